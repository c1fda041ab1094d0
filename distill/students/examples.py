"""Training examples as arrays: targets, masks and weights by head, and the train, dev and test split by a hash of the
query."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from relabel.distill.students.labels import (
    NO_GRADE,
    GoldGrades,
    LabelTable,
    Said,
    grade_array,
    load_gold,
    load_labels,
    refuse_twice,
)
from relabel.distill.students.manifest import DataFacts, SplitFacts, SplitSide
from relabel.distill.students.spec import HEADS, KINDS, NODE_HEADS, DistillSpec
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale
from relabel.manifests.labels import DEFAULT_PHI, NODE_SCORES, PhiTable, check_phi, default_phi, unreached_grades
from relabel.manifests.records import digest_of
from relabel.manifests.specs import Columns

# ------------------------------------------------------------------------------
# Which side a query falls on: train, dev or test, by a hash of the query alone.
#
# So all rows of a query stay together, however many runs and files they come from, and a query never changes sides when
# data is added.


TRAIN, DEV, TEST = 0, 1, 2
SIDES = ("train", "dev", "test")
_PRECISION = 2.0**64


def split_queries(keys: Sequence[str], *, dev: float, test: float, seed: int) -> np.ndarray:
    """The side of each key: int8 [N], 0 train, 1 dev, 2 test.

    Args:
        keys: query ids (or folded query texts), one a row; equal keys get equal sides.
        dev, test: expected shares of the distinct keys.
    """
    side_of: dict[str, int] = {}
    for key in keys:
        if key not in side_of:
            place = (
                int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogatepass")).digest()[:8], "big")
                / _PRECISION
            )
            side_of[key] = TEST if place < test else DEV if place < test + dev else TRAIN
    return np.array([side_of[key] for key in keys], dtype=np.int8)


def folded(text: str) -> str:
    """A query's text as a key: case folded, runs of white space one blank."""
    return " ".join(text.casefold().split())


def describe_split(keys: Sequence[str], side_N: np.ndarray) -> tuple[dict[str, SplitSide], str]:
    """Rows and queries of each side, by its name, and a digest of which query lies where, for the manifest."""
    queries: list[set[str]] = [set(), set(), set()]
    for key, side in zip(keys, side_N.tolist(), strict=True):
        queries[side].add(key)
    sides = {name: SplitSide(int((side_N == side).sum()), len(queries[side])) for side, name in enumerate(SIDES)}
    return sides, digest_of([sorted(keys_of) for keys_of in queries])


def leaking_queries(keys: Sequence[str], texts: Sequence[str], side_N: np.ndarray) -> dict[str, int]:
    """By side, how many queries of dev and test have the text of a training query: ids that keep such queries apart
    leak.

    Args:
        texts: each row's query text, folded.
    """
    sides = side_N.tolist()
    seen = {text for text, side in zip(texts, sides, strict=True) if side == TRAIN}
    rows = list(zip(keys, texts, sides, strict=True))
    return {SIDES[side]: len({key for key, text, of in rows if of == side and text in seen}) for side in (DEV, TEST)}


# ------------------------------------------------------------------------------
# Rows to learn from as arrays: targets by head, masks, weights, gold, and the side that each row's query falls on.
#
# A row without a node is masked for that head, never guessed.


# N rows, K grades

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
        if not (weight[rows] > 0).any():
            raise InputError(
                f"head {name} has no row to train on: none of the rows that train has such a label with a weight above "
                f"0 (labels' `weight`, loss.weight_by), of {int((weight > 0).sum())} that have."
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
    judging = (("dev", split.dev, split.shares["dev"]), ("test", split.test, split.shares["test"]))
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


# ------------------------------------------------------------------------------
# Labels and gold become examples: all sources concatenated, a target and a weight for each row and head.


def load_examples(spec: DistillSpec, storage: Storage) -> Examples:
    """Read labels and gold, and turn them into targets.

    Raises:
        InputError, ManifestError, ConfigError: a source is off, scales differ, or what is left can't be trained on.
    """
    tables = [load_labels(source, storage, allow_over_limit=spec.allow_over_limit) for source in spec.labels]
    refuse_twice([table.about for table in tables if table.about is not None], key="labels")
    for table in tables:
        if table.about is not None and table.about.labeler == "complexity" and not KINDS[spec.student.kind].reads_query:
            raise InputError(
                f"{table.where}: labels of `complexity` are about queries, not about pairs; a student grades pairs. "
                "Set student.kind: logistic."
            )
    gold = None if spec.gold is None else load_gold(spec.gold, storage, is_learned=spec.loss.gold_weight > 0)
    gold_of = [
        grade_array(gold.of(table.where, table.plan, table.pairs) if gold else [None] * len(table.pairs))
        for table in tables
    ]
    if gold is not None and gold.pairs:
        tables.append(_gold_rows(gold, tables))
        gold_of.append(tables[-1].said["relevance"].grades)
    gold_N = np.concatenate(gold_of)
    rows = _Rows(spec, tables, gold_N, _scale(spec, tables, gold_N))
    return rows.examples(gold)


def _gold_rows(gold: GoldGrades, tables: Sequence[LabelTable]) -> LabelTable:
    """Graded rows that no source has labelled, as a table of their own."""
    labelled = {(pair.query_id, pair.doc_id) for table in tables for pair in table.pairs}
    kept = [
        (pair, grade)
        for pair, grade in zip(gold.pairs, gold.grades, strict=True)
        if grade is not None and (pair.query_id, pair.doc_id) not in labelled
    ]
    if not kept and not tables:
        raise InputError(
            f"{gold.source.path}: no row with a grade in `{gold.source.grade}`. There is nothing to learn from."
        )
    nothing = [None] * len(kept)
    said = {name: Said(grade_array(nothing), nothing) for name in NODE_HEADS}
    said["relevance"] = Said(grade_array([grade for _, grade in kept]), nothing)
    assert gold.columns is not None
    pairs = [pair for pair, _ in kept]
    return LabelTable(gold.source.path, None, pairs, said, nothing, None, None, gold.columns, None)


def _scale(spec: DistillSpec, tables: Sequence[LabelTable], gold_N: np.ndarray) -> int:
    """K of the relevance head: of the spec, of runs and distributions, or one more than the highest grade.

    Raises:
        InputError: sources disagree, or a grade is off the scale.
    """
    given = {table.where: table.grades for table in tables if table.grades is not None}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{where} has {grades}" for where, grades in given.items())
        raise InputError(
            f"labels with different numbers of grades can't train one head: {listed}. Use those of one scale."
        )
    grades = next(iter(given.values()), None)
    seen = set(np.concatenate([gold_N, *(table.said["relevance"].grades for table in tables)]).tolist()) - {NO_GRADE}
    named = None if spec.student.heads == "auto" else spec.student.heads["relevance"]
    if named is not None and grades not in (None, named):
        raise InputError(f"student.heads: relevance has {named} grades, the labels have {grades} ({', '.join(given)}).")
    found = named or grades or max(2, max(seen) + 1)
    where = spec.gold.path if spec.gold else "labels"
    check_scale(seen, found, where=where, option="gold.map")
    if found > 10:
        raise InputError(f"{where}: grades up to {found - 1}; a scale has at most 10. Is `grade` the right column?")
    return found


class _Rows:
    """All sources concatenated."""

    def __init__(self, spec: DistillSpec, tables: Sequence[LabelTable], gold_N: np.ndarray, grades: int) -> None:
        self.spec = spec
        self.tables = tables
        self.pairs = [pair for table in tables for pair in table.pairs]
        self.size = len(self.pairs)
        self.grades = grades
        self.gold = gold_N
        self.is_labelled = np.concatenate([np.full(len(table.pairs), table.about is not None) for table in tables])
        self.said = {
            name: Said(
                np.concatenate([table.said[name].grades for table in tables]),
                [given for table in tables for given in table.said[name].probs],
            )
            for name in HEADS
        }
        self.widths = {"relevance": grades, **dict.fromkeys(NODE_HEADS, NODE_SCORES)}
        self.source_weight = np.concatenate(
            [
                np.array(table.weights or [1.0] * len(table.pairs), dtype=np.float32)
                * (1.0 if table.about is None else table.about.weight)
                for table in tables
            ]
        )
        self.outside = [mass for table in tables for mass in table.outside_mass]

    def examples(self, gold: GoldGrades | None) -> Examples:
        heads = self._heads()
        loss = self.spec.loss
        if loss.relevance == 0 and (loss.consistency == 0 or not set(NODE_HEADS) <= set(heads)):
            raise InputError(
                "nothing trains the relevance head: loss.relevance is 0, and consistency wants the heads subject and "
                f"attribute (there are {', '.join(heads)}). Raise loss.relevance, or bring labels with both nodes."
            )
        if gold is not None and not (self.gold >= 0).any():  # else the labels would judge themselves, unnoticed
            raise InputError(
                f"{gold.source.path}: none of its grades belongs to a labelled pair, joined by "
                f"{gold.about.joined_by or 'row'}. Do the ids mean the same things, and does `gold.grade` name the "
                "right column? Fix it, or leave `gold` out."
            )
        teacher, probs = self._teacher()
        row_weight = self._row_weight(probs)
        targets, weights = {}, {}
        for name, width in heads.items():
            targets[name], has_N = self._target(name, width)
            weights[name] = np.where(has_N, row_weight, 0.0).astype(np.float32)
            if name == "relevance":
                self._mix_gold(targets[name], weights[name], row_weight)
        keys = [folded(pair.query) if self.spec.split.by == "query" else pair.query_id for pair in self.pairs]
        split = self.spec.split
        side = split_queries(keys, dev=split.dev, test=split.test, seed=split.seed)
        sides, split_digest = describe_split(keys, side)
        for name, count in leaking_queries(keys, [folded(pair.query) for pair in self.pairs], side).items():
            sides[name] = replace(sides[name], texts_seen_in_train=count)
        num_labelled = int(self.is_labelled.sum())
        shares = {"dev": split.dev, "test": split.test}
        about = DataFacts(
            labels=[table.about for table in self.tables if table.about is not None],
            gold=None if gold is None else replace(gold.about, graded_rows=int((self.gold >= 0).sum())),
            rows={"all": self.size, "labelled": num_labelled, "gold_alone": self.size - num_labelled},
            rows_by_head={name: int((weight > 0).sum()) for name, weight in weights.items()},
            split=SplitFacts(split.by, split.seed, shares, **sides, sha256=split_digest),
        )
        found = Examples(
            [(pair.query, pair.document) for pair in self.pairs],
            [(table.where, pair.row_id) for table in self.tables for pair in table.pairs],
            keys,
            targets,
            weights,
            row_weight,
            teacher,
            probs,
            self.gold,
            side,
            heads,
            DEFAULT_PHI,
            self.tables[0].columns,
            about,
        )
        check_examples(found)
        num_train = len(found.rows_of(TRAIN))
        num_alone = int((~self.is_labelled[found.rows_of(TRAIN)]).sum())
        if num_alone and self.is_labelled.any():
            found.notes.append(
                f"{num_alone:,} of {num_train:,} rows to train on have gold alone: each weighs "
                f"{self.spec.loss.gold_weight:g} of a labelled one (loss.gold_weight)"
            )
        found.phi = self._phi(heads)  # after the labels were checked: what is off the scale is reported as that
        if self.spec.train.class_balance == "weights":
            factor_N = balance_weights(found)
            found.weights = {name: (weight * factor_N).astype(np.float32) for name, weight in found.weights.items()}
            found.row_weight = (found.row_weight * factor_N).astype(np.float32)
        return found

    def _heads(self) -> dict[str, int]:
        """Which heads there are: relevance, and where none are named, nodes with labels that some weight trains."""
        loss = self.spec.loss
        has = {name: bool((said.grades != NO_GRADE).any()) for name, said in self.said.items()}
        if self.spec.student.heads != "auto" or not KINDS[self.spec.student.kind].has_nodes:
            return {"relevance": self.grades}
        induces = loss.consistency > 0 and all(has[name] for name in NODE_HEADS)
        trained = {name: has[name] and (getattr(loss, name) > 0 or induces) for name in NODE_HEADS}
        return {name: self.widths[name] for name in HEADS if name == "relevance" or trained[name]}

    def _teacher(self) -> tuple[np.ndarray, np.ndarray]:
        """The teacher's grade [N] and distribution [N, K] of labelled rows."""
        said = self.said["relevance"]
        probs = np.full((self.size, self.grades), np.nan, dtype=np.float32)
        for row, given in enumerate(said.probs):
            if given is not None:
                probs[row] = given
        return np.where(self.is_labelled, said.grades, NO_GRADE), probs

    def _target(self, name: str, width: int) -> tuple[np.ndarray, np.ndarray]:
        said = self.said[name]
        has_N = said.grades != NO_GRADE
        target_NK = np.zeros((self.size, width), dtype=np.float32)
        target_NK[has_N, said.grades[has_N]] = 1.0
        if self.spec.loss.target_kind(name) == "soft":
            for row, given in enumerate(said.probs):
                if given is not None and has_N[row]:
                    target_NK[row] = np.asarray(given, dtype=np.float64) / np.sum(given)
        return target_NK, has_N

    def _mix_gold(self, target_NK: np.ndarray, weight_N: np.ndarray, row_weight: np.ndarray) -> None:
        """(1-g)·teacher + g·gold on rows with both; weight g on rows with gold alone; in place."""
        share = self.spec.loss.gold_weight
        if share == 0:
            return
        both = np.flatnonzero(self.is_labelled & (self.gold >= 0))
        target_NK[both] *= 1.0 - share
        target_NK[both, self.gold[both]] += share
        alone = ~self.is_labelled
        weight_N[alone] = row_weight[alone] * share

    def _row_weight(self, probs_NK: np.ndarray) -> np.ndarray:
        weight = self.source_weight.copy()
        if "confidence" in self.spec.loss.weight_by:
            highest = np.where(np.isnan(probs_NK).any(1), 1.0, np.nan_to_num(probs_NK).max(1))
            weight *= highest
        if "outside_mass" in self.spec.loss.weight_by:
            weight *= np.array([1.0 if mass is None else min(max(1.0 - mass, 0.0), 1.0) for mass in self.outside])
        return np.asarray(weight, dtype=np.float32)

    def _phi(self, heads: dict[str, int]) -> PhiTable:
        """The rule map: of the spec, of the runs, or the default.

        Raises:
            InputError: runs with different maps, and the spec chooses none.
            ConfigError: the map gives grades that the relevance head has not, misses one that the loss's direction
                needs, or is missing where there are more or fewer than three grades.
        """
        given = {table.phi for table in self.tables if table.phi is not None}
        if self.spec.phi is None and len(given) > 1:
            raise InputError("the label runs have different rule maps; say which one holds in `phi`.")
        phi = self.spec.phi or next(iter(given), None)
        if not set(NODE_HEADS) <= set(heads):
            return phi or DEFAULT_PHI
        grades = heads["relevance"]
        found = check_phi(phi or default_phi(grades, key="phi"), grades=grades)
        missing = unreached_grades(found, grades)
        if missing and self.spec.loss.consistency and self.spec.loss.consistency_direction == "direct_to_induced":
            raise InputError(f"phi gives no pair of scores grade {missing[0]}, so KL(p_r ‖ p_ind) would be infinite.")
        return found
