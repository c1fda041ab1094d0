"""A training that is looked at on the dev split: figures into the curve, the best step kept, an end when it gets no
better.

Overridden hooks of transformers' Trainer: `evaluate` and `_determine_best_metric`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.utils import broadcast_object_list

from relabel.distill.training.checkpointed import CheckpointedTrainer

EARLY_STOPPING = "early_stopping"

DevFigures = Callable[[Any], dict[str, float]]
"""Figures of a model on dev, by name."""


@dataclass(frozen=True)
class Looks:
    """What is made of looks at dev.

    Args:
        every: steps between looks; None for once an epoch.
        metric: the figure by which the best step is kept; None keeps the last one.
        patience: looks without a new best before training stops; None trains to the end.
        lower_is_better: of the metric.
        at_the_end: look once more behind the last step, wherever the rhythm has it.
    """

    every: int | None = None
    metric: str | None = None
    patience: int | None = None
    lower_is_better: bool = False
    at_the_end: bool = False

    def arguments(self) -> dict[str, Any]:
        """Further arguments of transformers."""
        found: dict[str, Any] = {"eval_strategy": "epoch"}
        if self.every:
            found = {"eval_strategy": "steps", "eval_steps": self.every}
        if self.metric is not None:
            found |= {"metric_for_best_model": self.metric, "greater_is_better": not self.lower_is_better}
        return found


class LookingTrainer(CheckpointedTrainer):
    """Arguments beside these are CheckpointedTrainer's.

    Args:
        looks: None without a dev split.
        dev_figures: figures of the model on dev, by name.
    """

    def __init__(self, *args: Any, looks: Looks | None, dev_figures: DevFigures | None, **kwargs: Any) -> None:
        self._looks, self._dev_figures = looks or Looks(), dev_figures
        super().__init__(*args, **kwargs)

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """Figures on dev, noted in the curve."""
        assert self._dev_figures is not None
        self.model.eval()
        found = self._dev_figures(self.model)
        self.model.train()
        if self.args.world_size > 1:
            # the first process's: all of them must stop at the same step, however their devices round
            (found,) = broadcast_object_list([found])
        self.curve.add(self.state.global_step, "dev", found)
        self.reporter.send(self.curve)
        self._place.say(
            f"step {self.state.global_step}, dev: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        )
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        is_last = self.state.global_step >= self.state.max_steps
        if self._looks.at_the_end and is_last:
            self.control.should_evaluate = not self._has_looked()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _has_looked(self) -> bool:
        """Whether there was a look behind this very step."""
        return any(step == self.state.global_step for step, split, _, _ in self.curve.points if split == "dev")

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        metric, patience = self._looks.metric, self._looks.patience
        if metric is None:
            return False
        is_best: bool = self.may_be_best() and super()._determine_best_metric(metrics=metrics, trial=trial)
        if is_best:
            self.control.should_save = True
        reason = self.stopped_by()
        if reason is not None:
            why = f"no better dev {metric} for {patience} looks" if reason == EARLY_STOPPING else f"ended by {reason}"
            self._place.say(f"{why}: stopping")
            self.control.should_training_stop = True
        return is_best

    def may_be_best(self) -> bool:
        """Whether the step of this look may be kept."""
        return True

    def _looks_since_best(self) -> int:
        assert self._looks.metric is not None
        seen = [step for step, _ in self.curve.series("dev", self._looks.metric)]
        return sum(step > (self.state.best_global_step or 0) for step in seen)

    def stopped_by(self) -> str | None:
        patience = self._looks.patience
        return EARLY_STOPPING if patience is not None and self._looks_since_best() >= patience else None
