"""A trainer whose curve is watched while it grows."""

from __future__ import annotations

from typing import Any

from relabel.distill.teachers.watch import RewardWatch
from relabel.distill.training.looks import LookingTrainer


class WatchedTrainer(LookingTrainer):
    """Arguments beside `watch` are LookingTrainer's; None watches nothing."""

    def __init__(self, *args: Any, watch: RewardWatch | None = None, **kwargs: Any) -> None:
        self._watch = watch
        super().__init__(*args, **kwargs)

    def measured(self) -> None:
        """Warn, once an episode."""
        super().measured()
        if self._watch is not None:
            for episode in self._watch.begun(self.curve, self.state.global_step):
                self._place.say(f"watch: {episode}")

    def may_be_best(self) -> bool:
        """Not under a warning, unless there is nothing better."""
        is_warned = self._watch is not None and self._watch.is_warned(self.curve)
        return not is_warned or not self.state.best_global_step

    def stopped_by(self) -> str | None:
        if self._watch is not None and self._watch.ended_by(self.curve) is not None:
            return "watch"
        return super().stopped_by()
