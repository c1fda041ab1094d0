"""transformers' Trainer whose every step is measured: figures into the curve, seconds on the clock, a line of progress,
and an end at the first number that is none.

Overridden hooks: `_maybe_log_save_evaluate` and `log`, which would print Trainer's own figures. TRL's trainers are
Trainers too: put this class before theirs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, TrainerControl

from relabel.distill.training.curves import Curve
from relabel.distill.training.reporting import CurveReporter
from relabel.distill.training.step_clock import StepClock
from relabel.distill.training.training_place import TrainingPlace
from relabel.manifests import failpoints
from relabel.manifests.errors import TrainingError
from relabel.manifests.interruptions import is_stop_wished


class MeasuredTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Arguments beside `place` are Trainer's."""

    control: TrainerControl
    clock: StepClock | None = None
    """Of trainers that tell what their seconds were spent on."""
    progress_figures: tuple[str, ...] = ("loss",)
    """Those of a step that its line of progress says, where it has them."""

    def __init__(self, *args: Any, place: TrainingPlace, **kwargs: Any) -> None:
        self._place = place
        self.curve = Curve()
        self.rows_seen = 0
        self.seconds = 0.0
        self._step_began: float | None = None
        self._pending: dict[str, float] = {}
        self._rows_of_step: list[int] = []
        super().__init__(*args, **kwargs)
        is_first = self.args.process_index == 0
        self.reporter = CurveReporter(place.report_to if is_first else (), place.folder, place.say)
        self.remove_callback(PrinterCallback)

    def note(self, values: dict[str, float], rows: Sequence[int]) -> None:
        """Add a batch's values to those of its optimizer step; `loss` is among them.

        Args:
            rows: of the batch.
        Raises:
            TrainingError: the loss is not finite; the message names the rows.
        """
        if not math.isfinite(values["loss"]):
            parts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            raise self.not_finite(f"the loss is not finite ({parts})", rows)
        self._rows_of_step += rows
        for name, value in values.items():
            if math.isfinite(value):  # 0/0: no row of this step has the label
                self._pending[name] = self._pending.get(name, 0.0) + value

    def not_finite(self, what: str, rows: Sequence[int], *, step: int | None = None) -> TrainingError:
        """The error for a number that came of these rows.

        Args:
            step: default: the one under way.
        """
        return self._place.not_finite(what, rows, step=self.state.global_step + 1 if step is None else step)

    def begin_step(self, num_rows: int) -> None:
        """Start the clock of an optimizer step over so many rows of this process."""
        self._step_began = time.perf_counter()
        self.rows_seen += num_rows

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._step_began is not None:
            self.seconds += time.perf_counter() - self._step_began
            self._step_began = None
        if self._pending:
            self._check_gradient(grad_norm)
            rate = kwargs.get("learning_rate")
            extra = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
            self.curve.add(
                self.state.global_step, "train", {**self._pending, **extra, "learning_rate": float(rate or 0.0)}
            )
            figures = [f"{name} {self._pending[name]:.4f}" for name in self.progress_figures if name in self._pending]
            self._pending = {}
            self._place.say(", ".join([f"step {self.state.global_step} of {self.state.max_steps}", *figures]))
            self.measured()
            failpoints.hit("after_training_step")
            if is_stop_wished() and self.may_stop():
                self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _check_gradient(self, grad_norm: Any) -> None:
        """Stop before what such a gradient makes of the weights is in a checkpoint; with fp16 the scaler looks itself.

        Raises:
            TrainingError: it is not finite.
        """
        rows, self._rows_of_step = self._rows_of_step, []
        scaler = getattr(self.accelerator, "scaler", None)
        if grad_norm is not None and scaler is None and not math.isfinite(float(grad_norm)):
            what = f"the gradient is not finite (norm {float(grad_norm):.4g}), though the loss is"
            raise self.not_finite(what, rows, step=self.state.global_step)

    def measured(self) -> None:
        """A step's figures are in the curve."""
        self.reporter.send(self.curve)

    def may_stop(self) -> bool:
        """Whether a checkpoint behind the step just done holds all that training goes on from."""
        return True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep Trainer's closing figures; the curve holds the rest."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
