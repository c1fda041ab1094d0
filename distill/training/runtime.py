"""The device runtime of a training: accelerator, precision, planned batches, memory that runs out, and stopping all
ranks if one fails."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from relabel.distill.training.output import how_it_goes_on
from relabel.distill.training.spec import TrainingSection
from relabel.manifests.errors import ConfigError, PeerLostError, SaidElsewhereError, TrainingError
from relabel.manifests.process import cpu_flags

# ------------------------------------------------------------------------------
# What a training computes in.


AMX = "amx_bf16"
"""The flag of CPUs that multiply bfloat16 in tiles; `auto` does not go by `avx512_bf16` alone."""
Precision = Literal["no", "bf16", "fp16"]
"""As accelerate calls it: `no` is float32 throughout; the others are for matrix products alone, by autocast."""


def is_on_cpu(settings: TrainingSection) -> bool:
    """Whether there is no GPU, or none is wanted."""
    return settings.device == "cpu" or not torch.cuda.is_available()


def precision_of(settings: TrainingSection, flags: Set[str] | None = None) -> Precision:
    """The spec's `train.precision` on this machine.

    Args:
        flags: of the CPU, for tests.
    Raises:
        ConfigError: fp16 without a GPU.
    """
    on_cpu = is_on_cpu(settings)
    if settings.precision == "auto":
        is_fast = AMX in (cpu_flags() if flags is None else flags) if on_cpu else torch.cuda.is_bf16_supported()
        return "bf16" if is_fast else "no"
    if settings.precision == "fp16" and on_cpu:  # accelerate would compute in float32 and say nothing
        raise ConfigError(
            "train.precision: fp16 is for GPUs, and this training has none. Take bf16 or fp32, or a machine with a GPU."
        )
    return "no" if settings.precision == "fp32" else settings.precision


# ------------------------------------------------------------------------------
# accelerate, as a training's spec has it.


def make_accelerator(settings: TrainingSection) -> Accelerator:
    """Device, processes and precision of a training.

    Raises:
        ConfigError: fp16 without a GPU.
    """
    # accelerate keeps one state a process, and refuses a second training in another precision
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=precision_of(settings), cpu=is_on_cpu(settings))


# ------------------------------------------------------------------------------
# Memory that runs out.


_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def first_line(exc: BaseException) -> str:
    """The first line of an error, shortened for a message."""
    return (str(exc).splitlines() or [type(exc).__name__])[0][:150]


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    return isinstance(exc, torch.OutOfMemoryError | MemoryError) or any(
        word in str(exc).lower() for word in _MEMORY_WORDS
    )


# ------------------------------------------------------------------------------
# If one rank fails, all ranks stop, and one of them reports why.


MARK_NAME = "ended"
_LOST_WORDS = ("closed by peer", "reset by peer", "closed by remote peer", "broken pipe", "remote process exit")


@contextmanager
def ending_together(
    accelerator: Accelerator, folder: Path, *, no_memory: Callable[[BaseException, str], TrainingError]
) -> Iterator[None]:
    """If one of several processes ends, the others block until its connections break or the launcher stops them. Where
    memory ran out in one of them, only that is reported; else the first that has an error reports it. A single process
    passes everything on.

    Args:
        folder: of the checkpoints, which all processes see.
        no_memory: makes the error, from the system's and which process it was.
    Raises:
        TrainingError: memory ran out here first.
        PeerLostError: another process ended, and none has said so.
        SaidElsewhereError: one has.
    """
    if accelerator.num_processes == 1:
        yield
        return
    mark = folder / MARK_NAME
    if accelerator.is_main_process:
        mark.unlink(missing_ok=True)
    accelerator.wait_for_everyone()  # the first process has claimed the output
    try:
        yield
    except (Exception, KeyboardInterrupt) as exc:
        if is_out_of_memory(exc) and _is_first(mark):
            who = f"in process {accelerator.process_index + 1} of {accelerator.num_processes}"
            raise no_memory(exc, who) from exc
        if is_lost_connection(exc) and _is_first(mark):
            raise PeerLostError(
                f"another of the {accelerator.num_processes} processes that train together ended: it says why, or was "
                f"killed (process {accelerator.process_index + 1} met: {first_line(exc)}). {how_it_goes_on(folder)}"
            ) from exc
        if mark.exists():
            raise SaidElsewhereError(f"another process ended: {mark}") from exc
        raise


def is_lost_connection(exc: BaseException) -> bool:
    """Whether gloo or NCCL says that a process at the other end is gone; both raise errors that say so in words."""
    return isinstance(exc, RuntimeError) and any(word in str(exc).lower() for word in _LOST_WORDS)


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


# ------------------------------------------------------------------------------
# Which rows make a batch, epoch by epoch.
#
# An epoch's batches follow from (seed, epoch) alone, so that a resumed training meets the same ones, and their number
# is the same in every epoch. Batches of like length are cut from rows sorted by length within stretches of a shuffled
# epoch, so that which rows share a batch stays mostly chance; with a budget of tokens the whole epoch is one
# stretch, since batches cut elsewhere would differ in number.


STRETCH_BATCHES = 50
"""Batches of a stretch. On crowdflower's pairs, 32 rows a batch, padding falls from 47 to 4.1 % of the tokens with
titles alone, and from 31 to 1.4 % with bodies cut at 96 tokens.
"""
FEWEST_STRETCHES = 4
"""Fewer rows make shorter stretches, so that batches still differ from epoch to epoch."""


class BatchPlan:
    """The batches of all epochs, and which of them this process has in each step.

    Args:
        lengths: tokens of each row.
        rows: the row numbers to draw from.
        groups: rows of like length share a batch; always so with `tokens_per_batch`.
        accumulation: batches of an optimizer step, in each process.
        process: number of this one.
        num_processes: that share the batches in turn; the first batches are repeated to make a multiple of it.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: np.ndarray,
        *,
        seed: int,
        batch_size: int,
        tokens_per_batch: int | None = None,
        groups: bool = False,
        accumulation: int = 1,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        self._rows = rows
        self._lengths = np.asarray(lengths, dtype=np.int64)[rows]
        self._seed = seed
        self._groups = groups or tokens_per_batch is not None
        batches = min(max(1, len(rows) // (FEWEST_STRETCHES * batch_size)), STRETCH_BATCHES)
        self._stretch = len(rows) if tokens_per_batch is not None else batch_size * batches
        self._sizes = batch_sizes(
            np.sort(self._lengths)[::-1], batch_size=batch_size, tokens_per_batch=tokens_per_batch
        )
        self._accumulation, self._process, self._num_processes = accumulation, process, num_processes
        self._num_own = math.ceil(len(self._sizes) / num_processes)
        self.epoch_steps = math.ceil(self._num_own / accumulation)
        """Optimizer steps of an epoch; the last one may have fewer batches."""
        self._own_batches = functools.lru_cache(maxsize=1)(self._batches_of_process)

    def epochs_at(self, step: int) -> float:
        """Passes over the rows that so many steps make."""
        whole, rest = divmod(step, self.epoch_steps)
        return whole + rest * self._accumulation / self._num_own

    def rows_of_step(self, step: int) -> list[list[int]]:
        """Row numbers of this process's batches in the step that follows so many."""
        epoch, place = divmod(step, self.epoch_steps)
        return self._own_batches(epoch)[place * self._accumulation : (place + 1) * self._accumulation]

    def _batches_of_process(self, epoch: int) -> list[list[int]]:
        padded = islice(cycle(self.batches(epoch)), self._num_own * self._num_processes)
        return list(padded)[self._process :: self._num_processes]

    def batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch."""
        chance = np.random.default_rng([self._seed, epoch])
        order = chance.permutation(len(self._rows))
        if self._groups:
            stretches = [order[start : start + self._stretch] for start in range(0, len(order), self._stretch)]
            # longest first; the order of equals is drawn
            order = np.concatenate(
                [stretch[np.argsort(-self._lengths[stretch], kind="stable")] for stretch in stretches]
            )
        found = np.split(self._rows[order], np.cumsum(self._sizes)[:-1])
        if self._groups:
            found = [found[place] for place in chance.permutation(len(found))]
        return [batch.tolist() for batch in found]


def batch_sizes(longest_first: np.ndarray, *, batch_size: int, tokens_per_batch: int | None) -> list[int]:
    """How many rows each batch takes of rows sorted by falling length.

    With `tokens_per_batch` as many as fit, padding included, and at least one; else `batch_size`.
    """
    if tokens_per_batch is None:
        whole, rest = divmod(len(longest_first), batch_size)
        return [batch_size] * whole + ([rest] if rest else [])
    sizes, start = [], 0
    while start < len(longest_first):
        size = min(max(1, tokens_per_batch // int(longest_first[start])), len(longest_first) - start)
        sizes.append(size)
        start += size
    return sizes
