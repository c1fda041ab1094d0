"""What a rollout is worth: by its grade (R3A) and by the nodes of its graph (Graph-GRPO). RES-RAG's joint reward is
`manifests.evidence_sets.evidence_reward`.

A rollout without a readable label is worth 0, whatever its text: no grade is guessed.

Source: R3A, equation 2; Graph-GRPO, base rewards; methods, sections 1 and 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relabel.distill.students.examples import DEV, folded, in_words_of_the_spec, read_pairs, split_queries
from relabel.distill.students.spec import GoldSource, LearnedGold
from relabel.distill.teachers.rollouts import Dialogues, FirstPrompt, Generate, Rollout
from relabel.distill.training.spec import DevSplit
from relabel.labelers.registry import Labeler
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale, load_gold_by_row, mapped
from relabel.manifests.inputs import open_dataset
from relabel.manifests.labels import Label, Pair
from relabel.manifests.phi import NODE_SCORES
from relabel.manifests.specs import InputSpec
from relabel.manifests.tables import read_grades

NODE_GOLD = ("grade", "subject", "attribute")
"""The three nodes that gold may have grades of, and that are rewarded: r, s, a."""


def graded_reward(grade: int | None, gold: int, *, near: float = 0.0) -> float:
    """R = 1[format and verbatim] · r; r is 1 for gold's grade, λ next to it, 0 further off.

    Args:
        grade: of the label that was read; None where there was none to read.
        near: λ, 0..1.
    """
    if grade is None:
        return 0.0
    return {0: 1.0, 1: near}.get(abs(grade - gold), 0.0)


def node_rewards(
    label: Label | None, gold: dict[str, int | None], *, match: float = 1.0, miss: float = -1.0
) -> tuple[float, float, float]:
    """b of the nodes r, s, a.

    A node without gold gets 0, in every rollout of the row alike, so that it takes all its credit from r. A rollout
    without a readable label misses every node that has gold.

    Args:
        gold: by `NODE_GOLD`; None or no entry where a row has none.
        match, miss: reward of a node that is right, and of one that is not.
    """
    grades = {} if label is None else {**label.columns, "grade": label.grade}

    def reward_of(node: str) -> float:
        wanted = gold.get(node)
        if wanted is None:
            return 0.0
        return match if grades.get(node) == wanted else miss

    r, s, a = map(reward_of, NODE_GOLD)
    return r, s, a


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

    @property
    def has_node_gold(self) -> bool:
        """Whether there is more than a grade."""
        return any(value is not None for node, value in self.gold.items() if node != "grade")


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
        gold = row.gold["grade"]
        assert gold is not None, "rows without a grade are refused when the data is read"
        grade = None if rollout.label is None else rollout.label.grade
        return Score(graded_reward(grade, gold, near=near), parts=_parts(rollout, row))

    return score


def graph_score(match: float = 1.0, miss: float = -1.0) -> ScoreOf:
    """Scores by node (Graph-GRPO); the reward as a whole is that of the grade."""

    def score(rollout: Rollout, row: GoldRow) -> Score:
        base = node_rewards(rollout.label, row.gold, match=match, miss=miss)
        named = {f"reward_{node}": value for node, value in zip("rsa", base, strict=True)}
        return Score(base[0], base, {**_parts(rollout, row), **named})

    return score


def grades_of(rollouts: Sequence[Rollout]) -> list[int | None]:
    """The grade of each rollout; None where it has none."""
    return [None if rollout.label is None else rollout.label.grade for rollout in rollouts]


def answer_figures(grades: Sequence[int | None], scores: Sequence[Score]) -> dict[str, float]:
    """What the curve has of some answers: the mean reward, each part's mean over the answers that have it, and
    `top_grade_share`, the share of the most frequent grade among those that have one.

    Args:
        grades: of `grades_of`.
    """
    values: dict[str, list[float]] = {}
    known = [score.reward for score in scores if not math.isnan(score.reward)]
    if known:
        values["reward"] = known
    for score in scores:
        for name, value in score.parts.items():
            values.setdefault(name, []).append(value)
    figures = {name: sum(of_answers) / len(of_answers) for name, of_answers in values.items()}
    counts = Counter(grade for grade in grades if grade is not None)
    if counts:
        figures["top_grade_share"] = max(counts.values()) / counts.total()
    return figures


def _parts(rollout: Rollout, row: GoldRow) -> dict[str, float]:
    """What shows how a reward is earned, or hacked: format, accuracy, length, and grades that rest on no evidence."""
    label = rollout.label
    parts = {
        "format_rate": float(label is not None),
        "accuracy": float((None if label is None else label.grade) == row.gold["grade"]),
        "truncated_rate": float(rollout.fault == "truncated"),
        "response_tokens": float(rollout.num_own),
    }
    if label is not None and label.grade:
        parts["no_evidence_rate"] = float("evidence_missing" in label.flags)
    return parts


@dataclass
class GoldRows:
    """What there is to train on.

    Args:
        rows: with their first prompts.
        dropped: rows left out, by reason.
    """

    about: LearnedGold
    rows: list[GoldRow]
    dropped: Counter[str]

    @property
    def prompts(self) -> list[list[int]]:
        """The first prompts' token ids, row by row."""
        return [row.first.ids for row in self.rows if row.first is not None]

    @property
    def has_node_gold(self) -> bool:
        """Whether any row has more than a grade."""
        return any(row.has_node_gold for row in self.rows)

    def split(self, section: DevSplit) -> tuple[GoldRows, list[GoldRow]]:
        """What trains, and the rows that training is evaluated on.

        Raises:
            InputError: a dev split is wished for, and one of the sides would be empty.
        """
        if not section.dev:
            return self, []
        pairs = [row.pair for row in self.rows]
        keys = [pair.query_id if section.by == "query_id" else folded(pair.query) for pair in pairs]
        side_N = split_queries(keys, dev=section.dev, test=0.0, seed=section.seed)
        train = [self.rows[number] for number in np.flatnonzero(side_N != DEV).tolist()]
        held_out = [self.rows[number] for number in np.flatnonzero(side_N == DEV).tolist()]
        if not train or not held_out:
            raise InputError(
                f"split.dev is {section.dev:g}, and of {len(set(keys))} queries of {self.about.path} "
                f"{'all' if held_out else 'none'} fell there. Change it or split.seed, or bring more queries."
            )
        return replace(self, rows=train), held_out


def load_gold_rows(
    source: GoldSource, labeler: Labeler, dialogues: Dialogues, storage: Storage, *, grades: int
) -> GoldRows:
    """Read the pairs, and leave out those that can't be rewarded or asked.

    Args:
        grades: the labeler's number of grades.
    Raises:
        InputError: the file can't be read, a column is missing, or a grade is off the scale.
    """
    columns = source.columns.model_copy(update={"gold": source.grade})
    with in_words_of_the_spec("data.gold"):
        dataset = open_dataset(InputSpec(path=(source.path,), columns=columns), storage, reads=labeler.reads)
    files = [file.path for file in dataset.files]
    trusted: dict[str, list[int | None]] = {}
    for node in NODE_GOLD:  # nothing maps the scores of subject and attribute
        column = getattr(source, node, None)
        if column is None:
            continue
        is_grade = node == "grade"
        where = f"{source.path}, column `{column}`"
        option = "data.gold.map"
        values = load_gold_by_row(
            files,
            column,
            storage,
            role="what is trusted",
            option=f"data.gold.{node}",
        )
        readable = read_grades(values).readable(source.path, column)
        read = mapped(readable, source.map if is_grade else None, where=where, option=option)
        trusted[node] = read.to_pylist()
        most = grades if is_grade else NODE_SCORES
        check_scale(set(read.drop_null().to_pylist()), most, where=where, option=option)
    rows = []
    dropped = Counter[str]()
    for number, pair in enumerate(read_pairs(dataset, np.arange(dataset.rows))):
        gold = {node: values[number] for node, values in trusted.items()}
        if gold["grade"] is None:
            dropped["without a trusted grade"] += 1
            continue
        first = dialogues.first_prompt(pair)
        if first is None:
            dropped["whose prompt does not fit"] += 1
        else:
            rows.append(GoldRow(pair, gold, source.path, first))
    return GoldRows(
        LearnedGold(
            path=source.path,
            grade=source.grade,
            map=source.map,
            document=dataset.columns.document,
            rows=dataset.rows,
            without_grade=dropped["without a trusted grade"],
            graded_rows=len(rows),
        ),
        rows,
        dropped,
    )
