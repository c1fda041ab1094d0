"""Rows to learn from as arrays: targets by head, masks, weights, gold, and the side that each row's query falls on.

A row without a node is masked for that head, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from relabel.distill.students.data_facts import DataFacts
from relabel.distill.students.splits import TRAIN
from relabel.manifests.errors import InputError
from relabel.manifests.phi import PhiTable
from relabel.manifests.specs import Columns

# N rows, K grades

NO_GRADE = -1

SAME_TARGET = 1e-3
"""Distributions that differ by less are one and the same target."""


@dataclass
class Examples:
    """All rows of a distillation.

    Args:
        texts: (query, document) of each row.
        names: where each row comes from, for messages: `(source, row_id)`.
        queries: what keeps each row's query on one side: its id, or its folded text (`split.by`).
        targets: by head float32 [N, K]; rows sum to 1, or are zero where `weights` of the head is 0.
        weights: by head float32 [N]: weight of a row in that head's loss, 0 where it has no label of it.
        row_weight: float32 [N], for losses that need no label.
        teacher: int64 [N], the teacher's grade, -1 where there is none.
        teacher_probs: float32 [N, K], NaN where the teacher gave none.
        gold: int64 [N], the trusted grade, -1 where there is none.
        side: int8 [N], 0 train, 1 dev, 2 test.
        heads: number of grades by head that is trained.
    """

    texts: list[tuple[str, str]]
    names: list[tuple[str, int]]
    queries: list[str]
    targets: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    row_weight: np.ndarray
    teacher: np.ndarray
    teacher_probs: np.ndarray
    gold: np.ndarray
    side: np.ndarray
    heads: dict[str, int]
    phi: PhiTable
    columns: Columns
    about: DataFacts
    notes: list[str] = field(default_factory=list)

    @property
    def grades(self) -> int:
        """Those of the relevance head."""
        return self.heads["relevance"]

    def rows_of(self, side: int) -> np.ndarray:
        """Row numbers of one side, ascending."""
        return np.flatnonzero(self.side == side)


def balance_weights(examples: Examples) -> np.ndarray:
    """N / (K · N_k) for each row by its target's most probable grade k, counted on the training rows; 1 for grades that
    do not occur.
    """
    grade_N = examples.targets["relevance"].argmax(1)
    rows = examples.rows_of(TRAIN)
    count_K = np.bincount(grade_N[rows], minlength=examples.grades)
    occurring = int((count_K > 0).sum())
    factor_K = np.where(count_K > 0, len(rows) / (occurring * np.maximum(count_K, 1)), 1.0)
    return np.asarray(factor_K[grade_N], dtype=np.float32)


def check_examples(found: Examples) -> None:
    """What is left can be trained on.

    Raises:
        InputError: no training row, one grade only, or a head without a training row.
    """
    rows = found.rows_of(TRAIN)
    split = found.about.split
    if not len(rows):
        raise InputError(
            f"no query is left to train on, of {len(found.texts)} rows. Lower split.dev and split.test, or bring more "
            "queries."
        )
    for name, weight in found.weights.items():
        if not (weight > 0).any():
            raise InputError(
                f"head {name} has no row to train on: all rows with such a label weigh 0 (labels' `weight`, "
                "loss.weight_by)."
            )
        if not (weight[rows] > 0).any():
            raise InputError(
                f"head {name} has no row to train on: its {int((weight > 0).sum())} rows all fall to dev and test."
            )
    targets = found.targets["relevance"][rows][found.weights["relevance"][rows] > 0]
    seen = np.unique(targets.argmax(1))
    if len(seen) < 2 and np.ptp(targets, axis=0).max() < SAME_TARGET:
        raise InputError(
            f"all {len(rows)} rows to train on have grade {seen[0]}: one class alone teaches nothing. "
            "Is it the right grade column, or should a map be another?"
        )
    if len(seen) < 2:
        found.notes.append(
            f"grade {seen[0]} is the most probable one of every row to train on: the student learns how sure the "
            "teacher was"
        )
    judging = (("dev", split.dev, split.shares.dev), ("test", split.test, split.shares.test))
    found.notes += [
        f"the {name} split is empty: no query fell there, of {len(set(found.texts))} pairs"
        for name, side, share in judging
        if share and not side.rows
    ]
    found.notes += [
        f"{side.texts_seen_in_train} queries of the {name} split have the text of a training query, under another id: "
        "its figures flatter. `split.by: query` keeps them together"
        for name, side, _ in judging
        if side.texts_seen_in_train
    ]
