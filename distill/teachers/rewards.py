"""Rewards: the gold rows, the score of a finished rollout by its grade (R3A) and by the nodes of its graph
(Graph-GRPO), and the log of all rollouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.examples import DEV, folded, split_queries
from relabel.distill.students.labels import in_words_of_the_spec, read_pairs
from relabel.distill.students.manifest import LearnedGold
from relabel.distill.teachers.manifest import EDGE_SCHEMA, EDGES_NAME, PARTS, ROLLOUT_SCHEMA, ROLLOUTS_NAME
from relabel.distill.teachers.rollouts import Dialogues, FirstPrompt, Generate, Rollout
from relabel.distill.teachers.spec import GraphGold, RewardGold
from relabel.distill.training.output import sync_files, writing
from relabel.distill.training.spec import DevSplit
from relabel.labelers.registry import Labeler
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale, load_gold_by_row, mapped
from relabel.manifests.inputs import open_dataset
from relabel.manifests.labels import NODE_SCORES, Label, Pair
from relabel.manifests.records import first_changed, sha256_file
from relabel.manifests.schemas import table_bytes
from relabel.manifests.specs import InputSpec
from relabel.manifests.tables import read_grades

# ------------------------------------------------------------------------------
# What a rollout is worth: by its grade (R3A) and by the nodes of its graph (Graph-GRPO). RES-RAG's joint reward is
# `manifests.metrics.evidence_sets.evidence_reward`.
#
# A rollout without a readable label is worth 0, whatever it says: no grade is guessed.
#
# Source: R3A, equation 2; Graph-GRPO, base rewards; methods, sections 1 and 2.


NODE_GOLD = ("grade", "subject", "attribute")
"""What gold may say of the three nodes that are rewarded: r, s, a."""


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
    said: dict[str, int | None] = {}
    if label is not None:
        said = {"grade": label.grade, **{name: label.columns[name] for name in NODE_GOLD[1:]}}
    r, s, a = (
        0.0 if (wanted := gold.get(name)) is None else match if said.get(name) == wanted else miss for name in NODE_GOLD
    )
    return r, s, a


# ------------------------------------------------------------------------------
# What a method makes of a finished rollout: one reward for GRPO, three for the graph's nodes.


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


def _parts(rollout: Rollout, row: GoldRow) -> dict[str, float]:
    """What shows how a reward is earned, or hacked: format, accuracy, length, and grades that rest on no evidence."""
    label = rollout.label
    grade = None if label is None else label.grade
    parts = {
        "format_rate": float(label is not None),
        "accuracy": float(grade == row.gold["grade"]),
        "truncated_rate": float(rollout.fault == "truncated"),
        "response_tokens": float(rollout.num_own),
    }
    if label is not None and label.grade:
        parts["no_evidence_rate"] = float("evidence_missing" in label.flags)
    return parts


# ------------------------------------------------------------------------------
# Rows to reward by: pairs as a labeler sees them, trusted grades, and trusted scores of nodes where there are any.


@dataclass
class GoldRows:
    """What there is to train on.

    Args:
        rows: with their first prompts.
        dropped: rows left out, by reason.
    """

    about: LearnedGold
    rows: list[GoldRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def prompts(self) -> list[list[int]]:
        """The first prompts' token ids, row by row."""
        return [row.first.ids for row in self.rows if row.first is not None]

    @property
    def prompt_tokens(self) -> int:
        """Of all first prompts together."""
        return sum(map(len, self.prompts))

    @property
    def has_node_gold(self) -> bool:
        """Whether any row says more than a grade."""
        return any(value is not None for row in self.rows for name, value in row.gold.items() if name != "grade")

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
        sides = (np.flatnonzero(side_N != DEV).tolist(), np.flatnonzero(side_N == DEV).tolist())
        if not all(sides):
            raise InputError(
                f"split.dev is {section.dev:g}, and of {len(set(keys))} queries of {self.about.path} "
                f"{'none' if not sides[1] else 'all'} fell there. Change it or split.seed, or bring more queries."
            )
        train, held_out = ([self.rows[place] for place in side] for side in sides)
        return replace(self, rows=train), held_out


def load_gold_rows(
    source: RewardGold, labeler: Labeler, dialogues: Dialogues, storage: Storage, *, grades: int
) -> GoldRows:
    """Read the pairs, and leave out those that can't be rewarded or asked.

    Args:
        grades: the labeler's number of grades.
    Raises:
        InputError: the file can't be read, a column is missing, a grade is off the scale, or no row is left.
    """
    columns = source.columns.model_copy(update={"gold": source.grade})
    with in_words_of_the_spec("data.gold"):
        dataset = open_dataset(InputSpec(path=(source.path,), columns=columns), storage, reads=labeler.reads)
    files = [file.path for file in dataset.files]
    trusted = {"grade": _grades(source, files, storage, grades=grades)}
    if isinstance(source, GraphGold):
        for node, column in (("subject", source.subject), ("attribute", source.attribute)):
            if column is not None:
                trusted[node] = _scores(source.path, files, column, storage, key=f"data.gold.{node}")
    found = GoldRows(LearnedGold(path=source.path, grade=source.grade, map=source.map))
    for number, pair in enumerate(read_pairs(dataset, np.arange(dataset.rows))):
        gold = {node: values[number] for node, values in trusted.items()}
        if gold["grade"] is None:
            found.dropped["without a trusted grade"] += 1
        elif (first := dialogues.first_prompt(pair)) is None:
            found.dropped["whose prompt does not fit"] += 1
        else:
            found.rows.append(GoldRow(pair, gold, source.path, first))
    if not found.rows:
        listed = ", ".join(f"{count:,} {reason}" for reason, count in found.dropped.items())
        raise InputError(f"{source.path}: no row to learn from: {listed}.")
    found.about = LearnedGold(
        path=source.path,
        grade=source.grade,
        map=source.map,
        rows=dataset.rows,
        without_grade=found.dropped["without a trusted grade"],
        graded_rows=len(found.rows),
    )
    return found


def _grades(source: RewardGold, files: list[str], storage: Storage, *, grades: int) -> list[int | None]:
    column = source.grade
    values = read_grades(load_gold_by_row(files, column, storage)).readable(source.path, column)
    where = f"{source.path}, column `{column}`"
    held: list[int | None] = mapped(values, source.map, where=where, option="data.gold.map").to_pylist()
    check_scale({one for one in held if one is not None}, grades, where=where, option="data.gold.map")
    return held


def _scores(path: str, files: list[str], column: str, storage: Storage, *, key: str) -> list[int | None]:
    """A node's trusted scores, which nothing maps."""
    read = load_gold_by_row(files, column, storage, role="a node's trusted score", option=key)
    held: list[int | None] = read_grades(read).readable(path, column).to_pylist()
    off = sorted({one for one in held if one is not None and not 0 <= one < NODE_SCORES})
    if off:
        raise InputError(f"{path}, column `{column}`: score {off[0]} is off the scale 0 to {NODE_SCORES - 1} ({key}).")
    return held


# ------------------------------------------------------------------------------
# Every rollout of a training, and the graph's coefficients by step, as Parquet.
#
# Rollouts are written in parts, each as far as a checkpoint goes, before that checkpoint is there. A training that goes
# on from a checkpoint keeps the parts that it names and drops what came after.


class RolloutLog:
    """Rollouts that are not yet written, the edges, and counts of all rollouts.

    Args:
        folder: where the parts go, in that of the checkpoints; None keeps nothing.
        columns: further ones of the method, filled from `Score.columns`.
    """

    def __init__(self, folder: Path | None, *, columns: Sequence[pa.Field] = ()) -> None:
        self._schema = pa.schema([*ROLLOUT_SCHEMA, *columns])
        self._folder = None if folder is None else folder / PARTS
        self._pending: list[dict[str, Any]] = []
        self._parts: dict[str, str] = {}  # sha256 by name
        self.edges: list[list[Any]] = []
        self.counts = Counter[str]()

    def add(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        *,
        advantages: Sequence[float],
        node_advantages: Sequence[Sequence[float]] | None,
        group: int,
    ) -> None:
        """Add what was generated for a step.

        Args:
            group: rollouts of one prompt; they follow each other.
        """
        if self._folder is None:
            return
        for place, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            self.counts["rollouts"] += 1
            self.counts["tokens"] += rollout.num_own
            self.counts["prompt_tokens"] += len(rollout.prompt_ids) + len(rollout.completion_ids) - rollout.num_own
            self._pending.append(
                {
                    "step": step,
                    "row_id": rollout.pair.row_id,
                    "sample": place % group,
                    "texts": [turn.text for turn in rollout.turns],
                    "grade": None if rollout.label is None else rollout.label.grade,
                    "reward": None if math.isnan(score.reward) else score.reward,
                    "advantage": advantages[place],
                    "format_ok": rollout.label is not None,
                    "fault": rollout.fault or None,
                    "detail": rollout.detail or None,
                    "tokens": rollout.num_own,
                    "node_rewards": None if score.base is None else list(score.base),
                    "node_advantages": None if node_advantages is None else list(node_advantages[place]),
                    **score.columns,
                }
            )

    def add_edges(self, step: int, logits: Sequence[float], alpha: Mapping[str, float]) -> None:
        """Add the coefficients, by edge, as they are after a step."""
        self.edges += [[step, edge, logit, value] for (edge, value), logit in zip(alpha.items(), logits, strict=True)]

    def flush(self, step: int) -> list[str]:
        """Write what is pending as the part of a checkpoint's step; the names of all parts."""
        if self._folder is not None and self._pending:
            name = f"step-{step:06d}.parquet"
            self._folder.mkdir(parents=True, exist_ok=True)
            with writing(self._folder, self._folder.parent):
                (self._folder / name).write_bytes(table_bytes(pa.Table.from_pylist(self._pending, schema=self._schema)))
                sync_files(self._folder, name)
            self._parts[name] = sha256_file(self._folder / name)
            self._pending = []
        return list(self._parts)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of a step keeps; all that is pending is written."""
        self.flush(step)
        return {"parts": dict(self._parts), "edges": self.edges, "counts": dict(self.counts)}

    def go_on(self, held: Mapping[str, Any]) -> None:
        """Take up what a checkpoint keeps; an empty mapping starts again.

        Raises:
            ManifestError: a part is missing, or not as it was written.
        """
        self._parts = dict(held.get("parts", {}))
        self._pending = []
        self.edges = [list(one) for one in held.get("edges", [])]
        self.counts = Counter(held.get("counts", {}))
        if self._folder is not None and (bad := first_changed(self._folder, self._parts)) is not None:
            raise ManifestError(
                f"{self._folder / bad}: rollouts that the checkpoint names are missing, or not as they were written. "
                "Train again with --restart."
            )

    def write(self, folder: Path, *, step: int) -> None:
        """Write `ROLLOUTS_NAME`, and `EDGES_NAME` where there are edges, into the finished model's folder."""
        parts = self.flush(step)
        if self._folder is not None:
            tables = [pq.read_table(self._folder / name) for name in parts]
            table = pa.concat_tables(tables) if tables else self._schema.empty_table()
            (folder / ROLLOUTS_NAME).write_bytes(table_bytes(table.combine_chunks()))  # however often it was stopped
        if self.edges:
            columns = [
                pa.array(column, kind.type)
                for column, kind in zip(zip(*self.edges, strict=True), EDGE_SCHEMA, strict=True)
            ]
            table = pa.Table.from_arrays(columns, schema=EDGE_SCHEMA)
            (folder / EDGES_NAME).write_bytes(table_bytes(table))
