"""Detection of reward hacking: figures that move when a reward is earned without the work. A warning is logged, and
ends the training where evaluations on held-out rows decide which step to keep.

All follows from the curve alone, so a training that is resumed ends as an undisturbed one. The held-out reward is the
same reward and can be hacked as well, so a step under a warning is not taken for the best.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from pydantic import Field

from relabel.distill.training.curves import Curve
from relabel.manifests.specs import Spec


class WatchSection(Spec):
    """When training warns of a reward that is earned without the work, and when it ends for it. All thresholds are
    ours; null turns one off.
    """

    window: int = Field(8, ge=1)
    """Steps with rollouts whose mean is judged."""
    length: float | None = Field(3.0, gt=1.0)
    """`response_tokens`: so many times what the first window had, or that part of it."""
    no_evidence: float | None = Field(0.5, gt=0.0, le=1.0)
    """`no_evidence_rate`: share of the grades above 0 that rest on no evidence."""
    one_grade: float | None = Field(0.95, gt=0.0, le=1.0)
    """`top_grade_share`: share of the most frequent grade. Where one trusted grade is as frequent, half way from its
    share to 1.
    """
    format: float | None = Field(0.8, gt=0.0, lt=1.0)
    """`format_rate`: this part of the highest that a window had."""
    patience: int | None = Field(3, ge=1)
    """Evaluations on dev under a warning before training ends. A warning active since the first window never ends it:
    training did not bring it about. Null only warns, and so does a training without a dev split.
    """


WATCHED = {
    "length": ("response_tokens", "Read the longest and the shortest answers: is it their length that earns?"),
    "no_evidence": ("no_evidence_rate", "Read answers that quote nothing: the reward may not ask for evidence."),
    "one_grade": (
        "top_grade_share",
        "Compare grades with the trusted ones: one grade may pay whatever the row.",
    ),
    "format": (
        "format_rate",
        "Read their `fault` and `detail`; lower train.learning_rate or raise rollouts.beta.",
    ),
}
"""Key of the section → the figure, and what to check."""


@dataclass
class Episode:
    """A stretch of steps in which a figure is beyond its threshold, or was within the last window.

    Args:
        start, end: steps; no end while it lasts.
        value, limit: of the figure at its start.
        is_first: active since the first window.
    """

    key: str
    start: int
    value: float
    limit: float
    is_first: bool
    end: int | None = None

    def __str__(self) -> str:
        figure, advice = WATCHED[self.key]
        return (
            f"{figure} is {self.value:.3g} at step {self.start}, beyond {self.limit:.3g} (watch.{self.key}). {advice}"
        )


class RewardWatch:
    """Compares a training's curve with the thresholds.

    Args:
        gold_share: share of the most frequent trusted grade.
    """

    def __init__(self, section: WatchSection, *, gold_share: float) -> None:
        self._section, self._gold_share = section, gold_share

    def episodes(self, curve: Curve) -> list[Episode]:
        """All of them, figure by figure."""
        watched = [(key, figure) for key, (figure, _) in WATCHED.items() if getattr(self._section, key) is not None]
        return [one for key, figure in watched for one in self._of_figure(key, curve.series("train", figure))]

    def begun(self, curve: Curve, step: int) -> list[Episode]:
        """Those that begin with a step."""
        return [one for one in self.episodes(curve) if one.start == step]

    def is_warned(self, curve: Curve) -> bool:
        """Whether a warning is active that may end the training."""
        return any(one.end is None for one in self._ending(curve))

    def ended_by(self, curve: Curve) -> Episode | None:
        """The episode that outlasted the patience, counted in evaluations."""
        evaluated = sorted({step for step, split, _, _ in curve.points if split == "dev"})
        for one in self._ending(curve):
            seen = [step for step in evaluated if one.start <= step and (one.end is None or step < one.end)]
            if len(seen) >= (self._section.patience or 0):
                return one
        return None

    def notes(self, curve: Curve) -> list[str]:
        """Remarks for the manifest."""
        found = [f"watch: {one}" for one in self.episodes(curve)]
        ending = self.ended_by(curve)
        if ending is not None:
            found.append(f"ended early: {WATCHED[ending.key][0]} was beyond its threshold since step {ending.start}")
        return found

    def _ending(self, curve: Curve) -> list[Episode]:
        if self._section.patience is None:
            return []
        return [one for one in self.episodes(curve) if not one.is_first]

    def _of_figure(self, key: str, points: list[tuple[int, float]]) -> list[Episode]:
        """One figure's episodes: the mean of its last window is judged, from the first whole one on."""
        size = self._section.window
        steps, values = [step for step, _ in points], [value for _, value in points]
        means = [sum(values[end - size : end]) / size for end in range(size, len(values) + 1)]
        found: list[Episode] = []
        num_fine = 0
        for step, mean, highest in zip(steps[size - 1 :], means, accumulate(means, max), strict=True):
            limit, is_beyond = self._judged(key, mean, first=means[0], highest=highest)
            num_fine = 0 if is_beyond else num_fine + 1
            is_open = bool(found) and found[-1].end is None
            if is_beyond and not is_open:
                found.append(Episode(key, step, mean, limit, is_first=step == steps[size - 1]))
            elif is_open and num_fine >= size:
                found[-1].end = step
        return found

    def _judged(self, key: str, mean: float, *, first: float, highest: float) -> tuple[float, bool]:
        """A mean's limit, and whether it is beyond."""
        threshold = getattr(self._section, key)
        if key == "length":
            limit = first * threshold if mean > first else first / threshold
            return limit, mean >= first * threshold or mean <= first / threshold
        if key == "format":
            return highest * threshold, mean < highest * threshold
        limit = max(threshold, (1 + self._gold_share) / 2) if key == "one_grade" else threshold
        return limit, mean >= limit
