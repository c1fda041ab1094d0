"""Which rows two runs share, the rows whose grade changed most, and the queries whose scores changed most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.evaluate.sides import Sides, run_pairs
from relabel.manifests.errors import InputError, RelabelError, UsageError
from relabel.manifests.files import Storage, place_of
from relabel.manifests.inputs import changed_files
from relabel.manifests.label_sets import LabelPart, LabelSet, is_run
from relabel.manifests.labels import Pair
from relabel.manifests.metrics.comparison import BY_IDS, BY_ROW, Labelled, Match, PairedRows, QueryMoves, match_rows
from relabel.manifests.run import RunLabels, open_run_labels
from relabel.manifests.schemas import LABELS, QUARANTINE, texts_of


def open_both(first: str, second: str, storage: Storage, *, allow_partial: bool) -> tuple[RunLabels, RunLabels]:
    """The two runs, checked to be comparable.

    Raises:
        UsageError: one run twice.
        InputError: not a run, or runs of different scales.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    if place_of(first).rstrip("/") == place_of(second).rstrip("/"):
        raise UsageError(f"{first} and {second} are one run. Name two outputs.")
    for path in (first, second):
        if not is_run(path, storage):
            raise InputError(
                f"{path}: no run's output folder. `relabel evaluate` compares label files with each other."
            )
    ours, theirs = (open_run_labels(path, storage, allow_partial=allow_partial) for path in (first, second))
    if ours.grades != theirs.grades:
        raise InputError(
            f"{first} has {ours.grades} grades, {second} {theirs.grades}: their rows cannot be compared. "
            "Label with one scale, or judge each by gold grades: relabel evaluate RUN --qrels FILE --map-labels "
            "OLD=NEW,…"
        )
    return ours, theirs


def how_matched(first: RunLabels, second: RunLabels) -> tuple[str, list[str]]:
    """How rows of two runs are known to be the same, and remarks on it: by row where both labelled the very same input,
    else by ids.
    """
    changed = changed_files(first.plan.files, tuple(second.plan.files))
    columns = [run.plan.facts.columns for run in (first, second)]
    ids = [(one.query_id, one.doc_id) for one in columns]
    if not changed and ids[0] == ids[1]:
        return BY_ROW, []
    why = (
        f"their inputs differ ({changed[0]})"
        if changed
        else f"they read ids from other columns ({ids[0]} and {ids[1]})"
    )
    return BY_IDS, [f"rows are matched by query_id and doc_id, since {why}"]


def match_runs(
    runs: Sequence[RunLabels], labels: Sequence[Labelled], sides: Sides, *, is_same_input: bool
) -> tuple[Match, dict[str, int]]:
    """The rows that both runs labelled, and all rows by what each run has of them: the grade, a place in quarantine
    or nothing.

    Args:
        labels: of each run, on the side to compare.
    """
    whole = [_with_quarantined(run, held, sides) for run, held in zip(runs, labels, strict=True)]
    found = match_rows(*whole, is_same_input=is_same_input)
    place_a, place_b = (one.grades[rows] for one, rows in zip(whole, (found.teacher, found.student), strict=True))
    is_a, is_b = place_a >= 0, place_b >= 0
    labelled = [len(one.grades) for one in labels]
    absent = [len(one.grades) - len(found.teacher) for one in whole]
    only = [count - int(is_there.sum()) for count, is_there in zip(labelled, (is_a, is_b), strict=True)]
    counts = {
        "both": int((is_a & is_b).sum()),
        "labelled_a": labelled[0],
        "labelled_b": labelled[1],
        "only_a": only[0],
        "only_b": only[1],
        "quarantined_a_only": int((~is_a & is_b).sum()),
        "quarantined_b_only": int((is_a & ~is_b).sum()),
        "quarantined_both": int((~is_a & ~is_b).sum()),
        "quarantined_elsewhere_absent": sum(absent) - sum(only),
        "repeated": found.num_repeated,
    }
    return Match(found.how, place_a[is_a & is_b], place_b[is_a & is_b], found.num_repeated), counts


def _with_quarantined(run: RunLabels, labels: Labelled, sides: Sides) -> Labelled:
    """All rows of a run in their order, to be matched: as its grade a row has its place among the labels, -1 in
    quarantine.
    """
    tables = [
        sides.taken(run.root, run.folder.table(file, QUARANTINE, ["row_id", "query_id", "doc_id"]))
        for file in run.quarantine
    ]
    lost = pa.concat_tables([QUARANTINE.empty_table().select(["row_id", "query_id", "doc_id"]), *tables])
    row_ids = np.concatenate([labels.row_ids, lost["row_id"].to_numpy()])
    order = np.argsort(row_ids)
    query_ids, doc_ids = (
        pa.concat_arrays([held, lost[name].combine_chunks().cast(pa.large_binary())]).take(pa.array(order))
        for held, name in ((labels.query_ids, "query_id"), (labels.doc_ids, "doc_id"))
    )
    places = np.concatenate([np.arange(len(labels.grades)), np.full(lost.num_rows, -1)])
    return replace(labels, row_ids=row_ids[order], query_ids=query_ids, doc_ids=doc_ids, grades=places[order])


# ------------------------------------------------------------------------------
# Queries that moved: those whose mean score changed most, with what became of their order.


TINY = 1e-6
"""Changes below this are float32's."""


def moved_queries(moves: QueryMoves, names: pa.LargeBinaryArray, count: int) -> list[dict[str, Any]]:
    """So many of the queries that moved, the largest change first.

    Args:
        names: the queries' ids.
    """
    change_G = moves.second - moves.first
    shown = [place for place in np.argsort(-np.abs(change_G), kind="stable")[:count] if abs(change_G[place]) > TINY]
    return [
        {
            "query_id": name,
            "rows": int(moves.rows[query]),
            "mean_a": round(float(moves.first[query]), 6),
            "mean_b": round(float(moves.second[query]), 6),
            "change": round(float(change_G[query]), 6),
            "kendall_tau": None if math.isnan(moves.tau[query]) else round(float(moves.tau[query]), 6),
            "entered_top": int(moves.entered[query]),
            "top": int(moves.top[query]),
            "first_changed": bool(moves.top_changed[query]),
        }
        for query, name in zip(shown, texts_of(names.take(pa.array(shown, pa.int64()))), strict=True)
    ]


def summary(moves: QueryMoves) -> dict[str, int]:
    """How many queries moved, and how."""
    change_G = moves.second - moves.first
    return {
        "queries": len(moves.rows),
        "moved": int((np.abs(change_G) > TINY).sum()),
        "up": int((change_G > TINY).sum()),
        "down": int((change_G < -TINY).sum()),
        "top_changed": int((moves.entered > 0).sum()),
        "first_changed": int(moves.top_changed.sum()),
    }


# ------------------------------------------------------------------------------
# Rows whose grade changed, the largest changes first, with their texts rejoined through the run's input and both
# answers' reasoning.


TEXT_CHARACTERS = 1000
"""Shown of a query, a document or a reasoning."""


FILE = "file"


def with_files(labels: LabelSet, run: RunLabels) -> LabelSet:
    """A run's labels with the further column `file`: in which of the run's files each is."""
    file_N = np.repeat(np.arange(len(run.labels)), [file.rows for file in run.labels])

    def parts() -> Iterator[LabelPart]:
        start = 0
        for part in labels.parts():
            yield part.with_columns({FILE: pa.array(file_N[start : start + len(part.grades)])})
            start += len(part.grades)

    return replace(labels, parts=parts)


def largest_flips(rows: PairedRows, count: int) -> np.ndarray:
    """So many of the rows whose grade changed, those first whose expected grade (or grade, where there is no
    distribution) changed most.
    """
    change_N = np.abs(rows.scores[1] - rows.scores[0])
    changed = np.flatnonzero(rows.grades[0] != rows.grades[1])
    return np.asarray(changed[np.argsort(-change_N[changed], kind="stable")][:count])


def examples(
    runs: Sequence[RunLabels],
    labels: Sequence[Labelled],
    places: Sequence[np.ndarray],
    change: Sequence[float],
    storage: Storage,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows with both labels and their texts, and remarks: texts are left out, with the reason, where they can't be read
    any more.

    Args:
        labels: of each run, with `with_files`.
        places: of the rows in these.
        change: of each row.
    """
    if not change:
        return [], []
    pairs: dict[int, Pair] = {}
    notes: list[str] = []
    row_ids = [one.row_ids[taken] for one, taken in zip(labels, places, strict=True)]
    try:
        pairs = {pair.row_id: pair for pair in run_pairs(runs[0].root, runs[0].plan, storage, row_ids[0])}
    except RelabelError as exc:
        notes.append(f"texts of the examples are left out: {exc}")
    files = [
        set(one.columns[FILE].take(pa.array(taken)).to_pylist()) for one, taken in zip(labels, places, strict=True)
    ]
    both = [_labels_in(run, numbers) for run, numbers in zip(runs, files, strict=True)]
    found = []
    for row_a, row_b, step in zip(*(ids.tolist() for ids in row_ids), change, strict=True):
        pair, ours, theirs = pairs.get(row_a), both[0][row_a], both[1][row_b]
        found.append(
            {
                "row_a": row_a,
                "row_b": row_b,
                "query_id": ours["query_id"],
                "doc_id": ours["doc_id"],
                "query": _cut(pair.query) if pair else None,
                "document": _cut(pair.document) if pair else None,
                "change": round(step, 6),
                "a": _shown(ours),
                "b": _shown(theirs),
            }
        )
    return found, notes


def _labels_in(run: RunLabels, files: set[int]) -> dict[int, dict[str, Any]]:
    """The labels of some files, by row id."""
    names = ["row_id", "query_id", "doc_id", "grade", "expected_grade", "probs", "reasoning"]
    tables = (run.folder.table(run.labels[number], LABELS, names, check_bytes=False) for number in files)
    return {row["row_id"]: row for table in tables for row in table.to_pylist()}


def _shown(label: dict[str, Any]) -> dict[str, Any]:
    named = {name: label[name] for name in ("grade", "expected_grade", "probs")}
    return {**named, "reasoning": _cut(label["reasoning"])}


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_CHARACTERS else text[:TEXT_CHARACTERS] + " …"
