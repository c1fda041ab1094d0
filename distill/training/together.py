"""Processes that train together end together, and one of them says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from distill.training.memory import first_line, is_out_of_memory
from manifests.errors import SaidElsewhereError, TrainingError

MARK_NAME = "out-of-memory"


@contextmanager
def ending_together(
    accelerator: Accelerator, folder: Path, *, refusal: Callable[[str, str], TrainingError]
) -> Iterator[None]:
    """Where memory ends in one of several processes, the others wait for it in vain until its connections break or the
    launcher stops them; what they meet then is nothing to report. One process alone passes everything on.

    Args:
        folder: of the checkpoints, which all processes see.
        refusal: the error, given the machine's own words and which process it was.
    Raises:
        TrainingError: memory ended here first.
        SaidElsewhereError: it ended in another process.
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
        if mark.exists():
            raise SaidElsewhereError(f"another process ended: {mark}") from exc
        raise


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
