"""How long a training's steps take: measured on the training itself, which is ended before it leaves anything."""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from relabel.distill.teachers.trainers import TeacherTrainer, TrainingTime

MEASURED = 3
"""Stretches of steps that are timed, after one that is not: the first step also loads kernels and makes buffers."""

_STEP = re.compile(r"step \d+ of \d+\b")


class _Enough(Exception):  # noqa: N818 — no error
    """Ends the training from within its own lines of progress."""


def measure(trainer: TeacherTrainer, *, steps: int, updates: int, say: Callable[[str], None]) -> TrainingTime | None:
    """Train some steps in a folder of its own, which is then removed.

    Args:
        trainer: of the training; it can't train again.
        steps: of the whole training.
        updates: steps on the same rollouts: only the first of them writes answers, so they are timed together.
    Returns:
        None for a training that is over before it could be timed.
    Raises:
        TrainingError: as the training itself: memory runs out, the loss is not finite.
    """
    ends: list[float] = []

    def told(line: str) -> None:
        if _STEP.match(line) is None:
            say(line)
            return
        ends.append(time.perf_counter())
        if len(ends) == updates * (MEASURED + 1):
            raise _Enough

    with tempfile.TemporaryDirectory(prefix="relabel-") as scratch, contextlib.suppress(_Enough):
        trainer.train(Path(scratch), told)
    marks = ends[updates - 1 :: updates]
    paces = [(after - before) / updates for before, after in itertools.pairwise(marks)]
    if not paces:
        return None
    mean = sum(paces) / len(paces)
    return TrainingTime(len(paces) * updates, steps * mean, steps * min(paces), steps * max(paces))
