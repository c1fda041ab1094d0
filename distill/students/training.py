"""The training loop of students, from the first batch to the last step.

accelerate has the devices: DDP, autocast, the scaler of fp16. Which rows make a batch, what is minimised, when dev is
looked at and how a checkpoint is written is decided here. What a step does follows from its number, the seed and what
the checkpoint before it holds, so that a training goes on from any step as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed

from relabel.distill.students.feed import Feed
from relabel.distill.students.objective import Objective
from relabel.distill.students.optimizer_steps import OptimizerSteps
from relabel.distill.students.optimizing import rate_share
from relabel.distill.students.specs import EarlyStopping, TrainSection
from relabel.distill.training import checkpoints, sharding
from relabel.distill.training.checkpoint_folders import WEIGHTS, step_of
from relabel.distill.training.curves import Curve
from relabel.distill.training.outcomes import Outcome
from relabel.distill.training.reporting import CurveReporter
from relabel.distill.training.step_state import StepState, write_checkpoint
from relabel.distill.training.training_place import TrainingPlace
from relabel.manifests import failpoints
from relabel.manifests.interruptions import draining, interruption, is_stop_wished

EARLY_STOPPING = "early_stopping"
METRIC_KEYS = {"macro_f1": "f1_macro"}
"""Spec's name of a dev metric → the figure's own."""


class StudentTraining:
    """One training.

    Args:
        module: a student's, sharded or not; trained in place.
        place: where checkpoints lie.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: Any,
        objective: Objective,
        feed: Feed,
        settings: TrainSection,
        place: TrainingPlace,
    ) -> None:
        self.accelerator, self.module = accelerator, module
        self._feed, self._settings, self._place = feed, settings, place
        self.last_step = settings.max_steps or math.ceil(settings.epochs * feed.epoch_steps)
        self.step = 0
        self.curve = Curve()
        self.best_step: int | None = None
        self.stopped_by: str | None = None
        self._rows_seen, self._seconds = 0, 0.0
        self._steps = OptimizerSteps(
            accelerator,
            module,
            objective,
            settings,
            lambda what, rows: place.not_finite(what, rows, step=self.step + 1),
        )
        self.optimizer = self._steps.optimizer
        is_first = accelerator.is_main_process
        self._reporter = CurveReporter(place.report_to if is_first else (), place.folder, place.say)

    def run(self, *, resume_from: Path | None = None) -> Outcome:
        """Train to the last step, or until dev gets no better; then put back the best step where early stopping chose
        one.

        Raises:
            TrainingError: a loss, a gradient or a weight is not finite.
            KeyboardInterrupt: a signal came; what was trained is in a checkpoint.
        """
        set_seed(self._settings.seed)
        if resume_from is not None:
            self._resume(resume_from)
        try:
            with draining():
                self._train()
            self._reporter.send(self.curve)
        finally:
            self._reporter.finish()
        return self._outcome()

    def _train(self) -> None:
        every_look, every_save = self._settings.eval_every, self._settings.save_every
        is_over, is_stopped = self._is_done, False
        upcoming = self._feed.rows_of_steps(self.step, self.last_step)
        while not is_over:
            self._take_step(next(upcoming))
            if self.step == self.last_step or self._is_due(every_look):
                self._look()
            is_stopped = self._is_stop_wished()
            is_over = self._is_done or is_stopped
            if is_over or self.best_step == self.step or self._is_due(every_save):
                self._save()
        # the first process may still be writing, and a launcher stops all where one has ended
        self.accelerator.wait_for_everyone()
        if is_stopped:
            raise interruption()

    def _is_stop_wished(self) -> bool:
        """Whether a signal came to any of the processes, which all stop behind the same step."""
        wished = torch.tensor(is_stop_wished(), dtype=torch.float32, device=self.accelerator.device)
        return bool(self.accelerator.reduce(wished))

    def _is_due(self, every: int | None) -> bool:
        """Whether it is time behind this step: once in so many, or once an epoch."""
        return self.step % (every or self._feed.epoch_steps) == 0

    def _take_step(self, rows: Sequence[Sequence[int]]) -> None:
        began = time.perf_counter()
        batches = [self._feed.collator(one) for one in rows]
        figures = self._steps.take(batches, rate_share=rate_share(self._settings, self.step, self.last_step))
        self.step += 1
        self._seconds += time.perf_counter() - began
        self._rows_seen += sum(map(len, rows))
        self.curve.add(self.step, "train", figures)
        self._place.say(f"step {self.step} of {self.last_step}, loss {figures['loss']:.4f}")
        self._reporter.send(self.curve)
        failpoints.hit("after_training_step")

    def _look(self) -> None:
        """Figures on dev, noted in the curve."""
        if self._feed.dev_figures is None:
            return
        self.module.eval()
        # the first process's: all of them must stop at the same step, however their devices round
        (found,) = broadcast_object_list([self._feed.dev_figures(self.module)])
        self.curve.add(self.step, "dev", found)
        self._reporter.send(self.curve)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self._place.say(f"step {self.step}, dev: {shown}")
        self._judge_looks()

    def _judge_looks(self) -> None:
        """The first of the best looks, and whether too many came after it, where early stopping goes by them."""
        stopping = self._settings.early_stopping
        looks = [] if stopping is None else self.curve.series("dev", metric_key(stopping))
        if stopping is None or not looks:
            return
        sign = -1.0 if stopping.metric == "loss" else 1.0
        self.best_step, _ = max(looks, key=lambda look: sign * look[1])
        if sum(step > self.best_step for step, _ in looks) >= stopping.patience:
            self.stopped_by = EARLY_STOPPING
            self._place.say(f"no better dev {metric_key(stopping)} for {stopping.patience} looks: stopping")

    @property
    def _is_done(self) -> bool:
        return self.step >= self.last_step or self.stopped_by is not None

    def _save(self) -> None:
        is_writer = self.accelerator.is_main_process
        if not is_writer and not sharding.is_sharded(self.module):
            return
        scaler = self.accelerator.scaler
        state = StepState(
            optimizer=sharding.whole_moments(self.optimizer.state_dict(), keep=is_writer),
            scaler=None if scaler is None else scaler.state_dict(),
            curve=self.curve.points,
        )
        write_checkpoint(self._place, self.step, self.module, state, is_writer=is_writer, best=self.best_step)

    def _resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, also one that was written while transformers' Trainer was the loop.

        Raises:
            ManifestError: it is damaged, or of another model.
        """
        held = StepState.load(checkpoint)
        self.step = step_of(checkpoint)
        held.restore_curve(self.curve)
        self._judge_looks()
        checkpoints.load_weights(self.module, checkpoint / WEIGHTS)
        self.optimizer.load_state_dict(sharding.cut_moments(held.optimizer, self.optimizer))
        if self.accelerator.scaler is not None and held.scaler is not None:
            self.accelerator.scaler.load_state_dict(held.scaler)
        held.restore_random(checkpoint)

    def _outcome(self) -> Outcome:
        if self.best_step is not None:
            best = checkpoints.best_checkpoint(self._place.folder, self.best_step)
            checkpoints.load_weights(self.module, best / WEIGHTS)
            self.accelerator.wait_for_everyone()  # the first process removes it soon
        return Outcome(
            steps=self.step,
            epochs=round(self._feed.epochs_at(self.step), 4),
            best_step=self.best_step,
            rows_per_s=round(self._rows_seen / self._seconds, 2) if self._seconds else None,
            curve=self.curve,
            device=str(self.accelerator.device),
            stopped_by=self.stopped_by,
        )


def metric_key(stopping: EarlyStopping) -> str:
    """The figure that early stopping looks at."""
    return METRIC_KEYS.get(stopping.metric, stopping.metric)
