"""Real pairs for the parity gate and for calibration: of the student's own lineage, or of a file that was named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relabel.distill.students.example_rows import load_examples
from relabel.distill.students.examples import NO_GRADE
from relabel.distill.students.pair_texts import read_pairs
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.splits import SIDES, TEST, TRAIN
from relabel.manifests.digests import digest_of
from relabel.manifests.errors import ConfigError, InputError, ManifestError, RelabelError
from relabel.manifests.inputs.dataset import open_dataset
from relabel.manifests.inputs.grade_columns import read_grades
from relabel.manifests.judging.gold_columns import load_gold_by_row
from relabel.manifests.judging.qrels import check_scale, grades_seen, mapped
from relabel.manifests.metrics.ranking import rows_by_group
from relabel.manifests.spec_faults import validate_spec
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.storage.context import Storage

# N pairs

Judge = Literal["gold", "teacher"]


@dataclass(frozen=True)
class PairSet:
    """Pairs with their queries, and with grades where there are some.

    Args:
        pairs: (query, document) texts.
        names: where each comes from: `(source, row)`.
        queries: int64 [N], which pairs are of one query: 0..G-1.
        grades: int64 [N], -1 where there is none.
        judge: whose grades those are; None where no pair has one.
        about: where all of this is from, for the manifest.
    """

    pairs: list[tuple[str, str]]
    names: list[tuple[str, int]]
    queries: np.ndarray
    grades: np.ndarray
    judge: Judge | None
    about: dict[str, Any]

    def take(self, rows: np.ndarray) -> PairSet:
        """Some of the pairs, in the order of `rows`; queries are numbered anew."""
        _, query_N = np.unique(self.queries[rows], return_inverse=True)
        chosen = rows.tolist()
        return replace(
            self,
            pairs=[self.pairs[row] for row in chosen],
            names=[self.names[row] for row in chosen],
            queries=query_N,
            grades=self.grades[rows],
        )


@dataclass(frozen=True)
class PairsFile:
    """A file of pairs that the user names.

    Args:
        path: Parquet file, folder or glob.
        gold: column of trusted grades, if any.
        gold_map: brings them to the student's scale.
    """

    path: str
    gold: str | None = None
    gold_map: dict[int, int] | None = None


def lineage_pairs(manifest: Mapping[str, Any], storage: Storage, *, grades: int) -> tuple[PairSet, PairSet]:
    """The pairs that a student was tested and trained on, read again from where its labels and gold lie.

    Args:
        manifest: the student's.
        grades: K of its relevance head.
    Returns:
        Test split, training split.
    Raises:
        InputError: the student's manifest names none, or they can't be read any more.
        ManifestError: they are no longer what they were.
    """
    if "spec" not in manifest:
        raise InputError(
            "the student's manifest does not say what it was trained on. Name pairs to compare on with --pairs."
        )
    try:
        examples = load_examples(validate_spec(DistillSpec, manifest["spec"], where="the student's manifest"), storage)
    except RelabelError as exc:
        raise InputError(
            f"the student's own pairs can't be read: {exc} Restore them, or name others with --pairs."
        ) from exc
    split_digest = examples.about.split.sha256
    if split_digest != manifest["split"]["sha256"]:
        raise ManifestError(
            "the pairs that the student's manifest names now split otherwise than when it was trained, so its test "
            "split can't be determined. Restore them, or name other pairs with --pairs."
        )
    is_gold = bool((examples.gold != NO_GRADE).any())
    grade_N = examples.gold if is_gold else examples.teacher
    judge: Judge | None = "gold" if is_gold else "teacher" if bool((grade_N != NO_GRADE).any()) else None
    check_scale(set(grade_N[grade_N != NO_GRADE].tolist()), grades, where="the student's labels", option="gold.map")
    about = {"from": "lineage", "split_sha256": split_digest}
    _, query_N = np.unique(examples.queries, return_inverse=True)
    whole = PairSet(examples.texts, examples.names, query_N, grade_N, judge, about)
    test, train = (
        replace(whole.take(examples.rows_of(side)), about={**about, "side": SIDES[side]}) for side in (TEST, TRAIN)
    )
    return test, train


def file_pairs(source: PairsFile, columns: Mapping[str, Any], storage: Storage, *, grades: int) -> PairSet:
    """The pairs of a file.

    Args:
        columns: the student's.
        grades: K of its relevance head.
    Raises:
        InputError: the file can't be read, lacks a column, or its grades are off the scale.
    """
    wanted = Columns(**columns).model_copy(update={"gold": source.gold, "context": None})
    dataset = open_dataset(InputSpec(path=(source.path,), columns=wanted), storage)
    found = read_pairs(dataset, np.arange(dataset.rows), readings=None)
    grade_N = np.full(len(found), NO_GRADE, dtype=np.int64)
    if source.gold is not None:
        values = read_grades(load_gold_by_row([file.path for file in dataset.files], source.gold, storage)).values
        known = mapped(values, source.gold_map, where=source.path, option="--gold-map")
        check_scale(grades_seen(known), grades, where=source.path, option="--gold-map")
        grade_N[:] = known.fill_null(NO_GRADE).to_numpy()
    _, query_N = np.unique([pair.query_id for pair in found], return_inverse=True)
    return PairSet(
        [(pair.query, pair.document) for pair in found],
        [(source.path, pair.row_id) for pair in found],
        query_N,
        grade_N,
        "gold" if (grade_N != NO_GRADE).any() else None,
        {
            "from": "file",
            "name": Path(source.path).name,
            "inputs_sha256": digest_of([list(file.identity) for file in dataset.files]),
        },
    )


def draw_queries(pairs: PairSet, at_least: int, *, seed: int) -> PairSet:
    """Whole queries, drawn until they hold enough pairs; all of them where there are too few.

    Raises:
        ConfigError: there is no pair at all.
    """
    if not pairs.pairs:
        raise ConfigError("no pair to compare on: the student's test split is empty. Name some with --pairs.")
    groups = rows_by_group(pairs.queries, int(pairs.queries.max()) + 1)
    order = np.random.default_rng(seed).permutation(len(groups))
    rows: list[int] = []
    for group in order.tolist():
        if len(rows) >= at_least:
            break
        rows.extend(groups[group].tolist())
    return pairs.take(np.array(sorted(rows)))


def draw_pairs(pairs: PairSet, number: int, *, seed: int) -> Sequence[tuple[str, str]]:
    """Some pairs, drawn without replacement; all where there are too few."""
    if len(pairs.pairs) <= number:
        return pairs.pairs
    rows = np.random.default_rng(seed).choice(len(pairs.pairs), size=number, replace=False)
    return [pairs.pairs[row] for row in rows.tolist()]
