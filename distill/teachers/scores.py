"""What a method makes of a finished rollout: one reward for GRPO, three for the graph's nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from relabel.distill.teachers.rewards import PAPER_WORTH, NodeWorth, graded_reward, node_rewards
from relabel.distill.teachers.rollouts import Dialogues, FirstPrompt, Generate, Rollout
from relabel.labelers.evidence import read_evidence
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer
from relabel.manifests.errors import VerdictError
from relabel.manifests.formats import Fragment
from relabel.manifests.labels import Pair


@dataclass(frozen=True, slots=True)
class GoldRow:
    """A row to train on.

    Args:
        source, row_id: where it comes from, for messages.
        gold: `grade`, and `subject` and `attribute` where the data has them; None where a row has none.
        first: the first prompt, where it is known.
    """

    pair: Pair
    gold: dict[str, int | None]
    source: str = ""
    first: FirstPrompt | None = None

    @property
    def name(self) -> tuple[str, int]:
        return self.source, self.pair.row_id


@dataclass(frozen=True, slots=True)
class Score:
    """What a rollout earned.

    Args:
        reward: as a whole; NaN where nothing could be found out, and the rollout does not count.
        base: b of r, s and a, where credit flows along the graph.
        parts: further figures of this one rollout, averaged over the step in the curve.
        columns: what the rollout log keeps of it in columns of the method's own.
    """

    reward: float
    base: tuple[float, float, float] | None = None
    parts: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


def roll_rows(dialogues: Dialogues, rows: Sequence[GoldRow], generate: Generate) -> list[Rollout]:
    """One rollout for each row."""
    return dialogues.roll([row.pair for row in rows], generate, firsts=[row.first for row in rows])


ScoreOf = Callable[[Rollout, GoldRow], Score]
Scored = Callable[[Sequence[Rollout], Sequence[GoldRow]], list[Score]]
"""What rollouts earn, all of them together."""


def each(score_of: ScoreOf) -> Scored:
    """What rollouts earn, one by one."""
    return lambda rollouts, rows: [score_of(rollout, row) for rollout, row in zip(rollouts, rows, strict=True)]


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


def answer_figures(rollouts: Sequence[Rollout], scores: Sequence[Score]) -> dict[str, float]:
    """What the curve has of some answers: the mean reward, each part's mean over the answers that have it, and
    `top_grade_share`, the share of the most frequent grade among those that have one.
    """
    values: dict[str, list[float]] = {}
    if known := [score.reward for score in scores if not math.isnan(score.reward)]:
        values["reward"] = known
    for score in scores:
        for name, value in score.parts.items():
            values.setdefault(name, []).append(value)
    found = {name: sum(held) / len(held) for name, held in values.items()}
    labels = [rollout.label for rollout in rollouts if rollout.label is not None]
    if grades := Counter(label.grade for label in labels if label.grade is not None):
        found["top_grade_share"] = max(grades.values()) / grades.total()
    return found


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
    is_verbatim = _quotes_verbatim(rollout)
    if is_verbatim is not None:
        parts["evidence_verbatim_rate"] = float(is_verbatim)
    return parts


def _quotes_verbatim(rollout: Rollout) -> bool | None:
    """Whether what an answer in the right format quotes is in the document; None where it quotes nothing."""
    if rollout.label is not None:
        return True if rollout.label.evidence else None
    turn = rollout.turns[-1]
    sections = turn.ask.format.sections if turn.ask.format is not None else ()
    fragment = next((one for one in sections if isinstance(one, Fragment)), None)
    if fragment is None or turn.ask.format is None:
        return None
    try:
        quoted = Reader(turn.ask.format).read(Answer(0, turn.text, "stop"))[fragment.tag]
    except VerdictError:
        return None
    try:
        return True if read_evidence(quoted, rollout.pair.document) else None
    except VerdictError:
        return False
