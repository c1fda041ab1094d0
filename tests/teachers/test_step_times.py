"""The time of a training, measured by its first steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.distill.teachers import teaching


class Stepping:
    """A trainer whose steps take so many seconds, over and over, on a clock of its own."""

    def __init__(self, *seconds: float, steps: int) -> None:
        self._seconds, self._steps = seconds, steps
        self.now, self.done = 0.0, 0
        self.folder = Path()

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> None:
        self.folder = checkpoints
        say("loading")
        for seconds in itertools.islice(itertools.cycle(self._seconds), self._steps):
            self.now += seconds
            self.done += 1
            say(f"step {self.done} of {self._steps}, loss 1.0")


def measured(monkeypatch: pytest.MonkeyPatch, trainer: Any, *, updates: int) -> tuple[float | None, list[str]]:
    monkeypatch.setattr(teaching.time, "perf_counter", lambda: trainer.now)
    said: list[str] = []
    return teaching._probe(trainer, updates=updates, say=said.append), said


def test_steps_on_the_same_rollouts_are_timed_together_and_the_first_ones_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Stepping(10.0, 2.0, steps=100)
    assert measured(monkeypatch, trainer, updates=2) == (6.0, ["loading"])
    assert trainer.done == 8
    assert not trainer.folder.exists()


def test_a_training_of_a_step_is_over_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, Stepping(1.0, steps=1), updates=1)[0] is None
