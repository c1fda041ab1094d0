"""Detection of reward hacking: figures that move when a reward is earned without the work. A warning is logged, and
ends the training where evaluations on held-out rows decide which step to keep.

All follows from the curve alone, so a training that is resumed ends as an undisturbed one. The held-out reward is the
same reward and can be hacked as well, so a step under a warning is not taken for the best.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

from relabel.distill.teachers.spec import WatchSection
from relabel.distill.training.output import Curve

WATCHED = {
    "length": ("response_tokens", "Read the longest and the shortest answers: is it their length that earns?"),
    "no_evidence": ("no_evidence_rate", "Read answers that quote nothing: the reward may not ask for evidence."),
    "one_grade": ("top_grade_share", "Compare grades with the trusted ones: one grade may pay whatever the row."),
    "format": ("format_rate", "Read their `fault` and `detail`; lower train.learning_rate or raise rollouts.beta."),
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
            f"watch: {figure} is {self.value:.3g} at step {self.start}, beyond {self.limit:.3g} (watch.{self.key}). "
            f"{advice}"
        )


class RewardWatch:
    """Compares a training's curve with the thresholds.

    Args:
        gold_share: share of the most frequent trusted grade.
    """

    def __init__(self, section: WatchSection, *, gold_share: float) -> None:
        self._section = section
        self._gold_share = gold_share

    def episodes(self, curve: Curve) -> list[Episode]:
        """All of them, figure by figure."""
        episodes: list[Episode] = []
        for key, (figure, _) in WATCHED.items():
            if getattr(self._section, key) is not None:
                episodes += self._of_figure(key, curve.series("train", figure))
        return episodes

    def warnings(self, curve: Curve, step: int) -> list[str]:
        """Of rewards that are earned without the work, once an episode."""
        return [str(episode) for episode in self.episodes(curve) if episode.start == step]

    def is_suspect(self, curve: Curve) -> bool:
        """Whether a warning is active that may end the training: a step is then the best one only if it is the
        first."""
        return any(episode.end is None for episode in self._ending(curve))

    def ended_by(self, curve: Curve) -> Episode | None:
        """The episode that outlasted the patience, counted in evaluations."""
        evaluated = sorted({step for step, split, _, _ in curve.points if split == "dev"})
        for episode in self._ending(curve):
            end = math.inf if episode.end is None else episode.end
            num_evaluations = sum(episode.start <= step < end for step in evaluated)
            if num_evaluations >= (self._section.patience or 0):
                return episode
        return None

    def notes(self, curve: Curve) -> list[str]:
        """Remarks for the manifest."""
        notes = [str(episode) for episode in self.episodes(curve)]
        ending = self.ended_by(curve)
        if ending is not None:
            notes.append(f"ended early: {WATCHED[ending.key][0]} was beyond its threshold since step {ending.start}")
        return notes

    def _ending(self, curve: Curve) -> list[Episode]:
        """Episodes that may end the training."""
        if self._section.patience is None:
            return []
        return [episode for episode in self.episodes(curve) if not episode.is_first]

    def _of_figure(self, key: str, points: list[tuple[int, float]]) -> list[Episode]:
        """One figure's episodes: the mean of its last window is judged, from the first whole one on."""
        size = self._section.window
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        means = [sum(values[end - size : end]) / size for end in range(size, len(values) + 1)]
        episodes: list[Episode] = []
        num_fine = 0
        for step, mean, highest in zip(steps[size - 1 :], means, accumulate(means, max), strict=True):
            limit, is_beyond = self._judged(key, mean, first=means[0], highest=highest)
            num_fine = 0 if is_beyond else num_fine + 1
            is_open = bool(episodes) and episodes[-1].end is None
            if is_beyond and not is_open:
                episodes.append(
                    Episode(
                        key,
                        start=step,
                        value=mean,
                        limit=limit,
                        is_first=step == steps[size - 1],
                    )
                )
            elif is_open and num_fine >= size:
                episodes[-1].end = step
        return episodes

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
