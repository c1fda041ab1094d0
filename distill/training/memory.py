"""When memory ends: the batch is halved once and accumulated twice as often, then the training is refused."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from relabel.manifests.errors import TrainingError

logger = logging.getLogger(__name__)

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")

Found = TypeVar("Found")


class Halved(NamedTuple):
    """How often the batch was halved, and the remark on it."""

    times: int
    notes: list[str]


def halving(
    attempt: Callable[[int], Found],
    *,
    batch_size: int | None,
    say: Callable[[str], None],
    refusal: Callable[[str], TrainingError],
) -> tuple[Found, Halved]:
    """Train, with half the batch if memory ends.

    Args:
        attempt: trains, with the batch halved so often.
        batch_size: rows; None where it can't be halved.
        refusal: the error for when that does not help, given the machine's own words.
    Raises:
        TrainingError: what `refusal` makes.
    """
    notes: list[str] = []
    for halvings in (0, 1):
        try:
            return attempt(halvings), Halved(halvings, notes)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            if halvings or batch_size is None or batch_size < 2:
                raise refusal(first_line(exc)) from exc
            notes.append(
                f"out of memory with batches of {batch_size} rows: going on with {batch_size // 2}, accumulating "
                "twice as many"
            )
            say(notes[-1])
            logger.warning(notes[-1])
            exc.__traceback__ = None  # its frames hold the activations that did not fit
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    raise AssertionError("the second attempt returns or raises")


def first_line(exc: BaseException) -> str:
    """An error's own words, as far as a message has room for them."""
    return (str(exc).splitlines() or [type(exc).__name__])[0][:150]


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an error says that memory ended, on a device or on the host."""
    return isinstance(exc, torch.OutOfMemoryError | MemoryError) or any(
        word in str(exc).lower() for word in _MEMORY_WORDS
    )
