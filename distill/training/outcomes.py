"""How a training ended, whoever ran it."""

from __future__ import annotations

from dataclasses import dataclass, field

from relabel.distill.training.curves import Curve
from relabel.distill.training.step_clock import StepClock


@dataclass
class Outcome:
    """How a training ended.

    Args:
        best_step: the step that was kept, where looks at dev chose one.
        stopped_by: what ended it before its last step, `early_stopping` or `watch`.
        rows_per_s: rows trained in a second of this process's own steps, looks at dev and checkpoints left out.
        clock: what the seconds of those steps were spent on, where the trainer tells.
    """

    steps: int
    epochs: float
    best_step: int | None
    rows_per_s: float | None
    curve: Curve
    device: str
    notes: list[str] = field(default_factory=list)
    stopped_by: str | None = None
    clock: StepClock | None = None
