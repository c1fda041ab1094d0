"""Rows to reward by: pairs as a labeler sees them, trusted grades, and trusted scores of nodes where there are any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from relabel.distill.students.data_facts import LearnedGold
from relabel.distill.students.gold import in_words_of_the_spec
from relabel.distill.students.pair_texts import read_pairs
from relabel.distill.students.splits import DEV, folded, split_queries
from relabel.distill.teachers.graph_grpo_spec import GraphGold
from relabel.distill.teachers.grpo_spec import RewardGold
from relabel.distill.teachers.rollouts import Dialogues
from relabel.distill.teachers.scores import GoldRow
from relabel.distill.training.sections import DevSplit
from relabel.labelers.registry import Labeler, declared_reads
from relabel.manifests.errors import InputError
from relabel.manifests.inputs.dataset import open_dataset
from relabel.manifests.inputs.grade_columns import read_grades
from relabel.manifests.judging.gold_columns import load_gold_by_row
from relabel.manifests.judging.qrels import check_scale, mapped
from relabel.manifests.phi import NODE_SCORES
from relabel.manifests.specs import InputSpec
from relabel.manifests.storage.context import Storage


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
        """What trains, and the rows that training is looked at with.

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
    source: RewardGold, labeler: Labeler, name: str, dialogues: Dialogues, storage: Storage, *, grades: int
) -> GoldRows:
    """Read the pairs, and leave out those that can't be rewarded or asked.

    Args:
        name: the labeler's.
        grades: its number of grades.
    Raises:
        InputError: the file can't be read, a column is missing, a grade is off the scale, or no row is left.
    """
    columns = source.columns.model_copy(update={"gold": source.grade})
    with in_words_of_the_spec("data.gold"):
        dataset = open_dataset(
            InputSpec(path=(source.path,), columns=columns), storage, reads=declared_reads(labeler, name=name)
        )
    files = [file.path for file in dataset.files]
    trusted = {"grade": _grades(source, files, storage, grades=grades)}
    if isinstance(source, GraphGold):
        for node, column in (("subject", source.subject), ("attribute", source.attribute)):
            if column is not None:
                trusted[node] = _scores(source.path, files, column, storage, key=f"data.gold.{node}")
    found = GoldRows(LearnedGold(path=source.path, grade=source.grade, map=source.map))
    for number, pair in enumerate(read_pairs(dataset, np.arange(dataset.rows), readings=None)):
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
