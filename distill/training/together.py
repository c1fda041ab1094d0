"""Processes that train together end together, and one of them says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from relabel.distill.training.checkpoint_folders import how_it_goes_on
from relabel.distill.training.memory import first_line, is_out_of_memory
from relabel.manifests.errors import PeerLostError, SaidElsewhereError, TrainingError

MARK_NAME = "ended"
_LOST_WORDS = ("closed by peer", "reset by peer", "closed by remote peer", "broken pipe", "remote process exit")


@contextmanager
def ending_together(
    accelerator: Accelerator, folder: Path, *, refusal: Callable[[str, str], TrainingError]
) -> Iterator[None]:
    """Where one of several processes ends, the others wait for it in vain until its connections break or the launcher
    stops them. If memory ended there, what they meet then is nothing to report; else the first that meets it says so.
    One process alone passes everything on.

    Args:
        folder: of the checkpoints, which all processes see.
        refusal: the error, given the machine's own words and which process it was.
    Raises:
        TrainingError: memory ended here first.
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
            raise refusal(first_line(exc), who) from exc
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
