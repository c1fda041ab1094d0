"""What a method makes of a finished rollout: one reward for GRPO, three for the graph's nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from distill.teachers.rewards import PAPER_WORTH, NodeWorth, graded_reward, node_rewards
from distill.teachers.rollouts import Rollout
from manifests.labels import Pair


@dataclass(frozen=True, slots=True)
class GoldRow:
    """A row to train on.

    Args:
        source, row_id: where it comes from, for messages.
        gold: `grade`, and `subject` and `attribute` where the data has them; None where a row has none.
    """

    pair: Pair
    gold: dict[str, int | None]
    source: str = ""

    @property
    def name(self) -> tuple[str, int]:
        return self.source, self.pair.row_id


@dataclass(frozen=True, slots=True)
class Score:
    """What a rollout earned.

    Args:
        reward: as a whole.
        base: b of r, s and a, where credit flows along the graph.
        parts: further figures of this one rollout, averaged over the step in the curve.
    """

    reward: float
    base: tuple[float, float, float] | None = None
    parts: dict[str, float] = field(default_factory=dict)


ScoreOf = Callable[[Rollout, GoldRow], Score]


def grade_score(near: float) -> ScoreOf:
    """Scores by the distance of the grade (R3A).

    Args:
        near: λ, what the grade next to gold's earns.
    """

    def score(rollout: Rollout, row: GoldRow) -> Score:
        reward = graded_reward(_grade_of(rollout), _gold_of(row), near=near)
        return Score(reward, parts=_parts(rollout, row))

    return score


def graph_score(worth: NodeWorth = PAPER_WORTH) -> ScoreOf:
    """Scores by node (Graph-GRPO); the reward as a whole is that of the grade."""

    def score(rollout: Rollout, row: GoldRow) -> Score:
        base = node_rewards(rollout.label, row.gold, worth)
        named = {f"reward_{node}": value for node, value in zip("rsa", base, strict=True)}
        return Score(base[0], base, {**_parts(rollout, row), **named})

    return score


def _gold_of(row: GoldRow) -> int:
    gold = row.gold["grade"]
    assert gold is not None, "rows without a grade are refused when the data is read"
    return gold


def _grade_of(rollout: Rollout) -> int | None:
    return None if rollout.label is None else rollout.label.grade


def _parts(rollout: Rollout, row: GoldRow) -> dict[str, float]:
    """What shows how a reward is earned, or hacked: format, accuracy, length, and grades that rest on no evidence."""
    label, grade = rollout.label, _grade_of(rollout)
    parts = {
        "format_rate": float(label is not None),
        "accuracy": float(grade == row.gold["grade"]),
        "truncated_rate": float(rollout.fault == "truncated"),
        "response_tokens": float(rollout.num_own),
    }
    if label is not None and label.grade:
        parts["no_evidence_rate"] = float("evidence_missing" in label.flags)
    return parts
