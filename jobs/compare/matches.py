"""Matches the rows of two runs in bounded memory, and finds changed grades and the queries whose scores changed
most."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.evaluate.sides import Sides, run_pairs
from relabel.jobs.tables import query_buckets
from relabel.manifests.errors import InputError, RelabelError, UsageError
from relabel.manifests.files import Storage, place_of
from relabel.manifests.inputs import changed_files
from relabel.manifests.label_sets import is_run
from relabel.manifests.labels import Pair
from relabel.manifests.metrics.comparison import BY_IDS, BY_ROW, PairedRows, QueryMoves
from relabel.manifests.run import RunLabels, open_run_labels
from relabel.manifests.schemas import LABELS, QUARANTINE
from relabel.manifests.store import map_concurrent

# ------------------------------------------------------------------------------
# Two finished runs as frames on this machine: each row with its label or the reason that there is none.


GROUP_BYTES = 16 << 20
NO_FILE = -1
_READ = ["row_id", "query_id", "doc_id", "grade", "probs", "expected_grade"]
ROWS = pa.schema([*(LABELS.field(name) for name in _READ), ("status", pa.string()), ("file", pa.int32())])
"""`status` is `ok` or the quarantine's; `file` is the label file's number in the run, -1 for a quarantined row."""


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


def spill_rows(run: RunLabels, file: Path, sides: Sides) -> Path:
    """All rows of a run that are on the side to compare, labelled and quarantined, in one scratch file of the schema
    `ROWS`; every file's digest is checked.

    Raises:
        ManifestError: a file is missing or damaged.
    """
    store, folder = run.folder.store, run.folder
    labels = map_concurrent(store, lambda one: folder.table(one, LABELS, _READ), run.labels)
    refused = map_concurrent(
        store, lambda one: folder.table(one, QUARANTINE, ["row_id", "query_id", "doc_id", "status"]), run.quarantine
    )
    held: list[pa.Table] = []
    with pq.ParquetWriter(file, ROWS, compression="zstd") as writer:
        for number, table in enumerate(labels):
            held.append(_filled(sides.taken(run.root, table), "ok", number))
            if sum(one.nbytes for one in held) >= GROUP_BYTES:
                writer.write_table(pa.concat_tables(held))
                held = []
        held += [_filled(sides.taken(run.root, table), None, NO_FILE) for table in refused]
        if held:
            writer.write_table(pa.concat_tables(held))
    return file


def _filled(table: pa.Table, status: str | None, file: int) -> pa.Table:
    columns: dict[str, Any] = {name: table[name] for name in table.column_names}
    if status is not None:
        columns["status"] = pa.array([status] * table.num_rows, pa.string())
    columns["file"] = pa.array([file] * table.num_rows, pa.int32())
    for name in ROWS.names:
        columns.setdefault(name, pa.nulls(table.num_rows, ROWS.field(name).type))
    return pa.table({name: columns[name] for name in ROWS.names}).cast(ROWS)


# ------------------------------------------------------------------------------
# Matched rows, some whole queries at a time: each is labelled, quarantined or absent in either run.


STATES = ("labelled", "quarantined", "absent")


@dataclass
class StateCounts:
    """Rows by (state in A, state in B), added up bucket by bucket; both absent does not occur.

    Args:
        repeated: matched rows beyond the first of their pair, where rows are matched by ids.
    """

    by_state: Counter[tuple[str, str]] = field(default_factory=Counter)
    repeated: int = 0


def row_counts(counts: StateCounts) -> dict[str, int]:
    """Rows by what each run has of them; all that follows in a comparison is of those that `both` labelled."""
    of = counts.by_state
    return {
        "both": of["labelled", "labelled"],
        "labelled_a": sum(of["labelled", state] for state in STATES),
        "labelled_b": sum(of[state, "labelled"] for state in STATES),
        "only_a": of["labelled", "absent"],
        "only_b": of["absent", "labelled"],
        "quarantined_a_only": of["quarantined", "labelled"],
        "quarantined_b_only": of["labelled", "quarantined"],
        "quarantined_both": of["quarantined", "quarantined"],
        "quarantined_elsewhere_absent": of["quarantined", "absent"] + of["absent", "quarantined"],
        "repeated": counts.repeated,
    }


def matches(polars: Any, first: Path, second: Path, how: str, counts: StateCounts, scratch: Path) -> Iterator[Any]:
    """Frames of whole queries: a row for each row of either run, columns of `ROWS` with `_a` and `_b`, ordered by query
    and row.

    Args:
        how: `BY_ROW`, or by ids: then rows of one pair are matched in their order, first with first.
        counts: is added to.
    """

    def sided(frame: Any, side: int) -> Any:
        return frame.rename({"row_id": "row"}).with_columns(side=polars.lit(side, polars.Int8))

    for bucket in query_buckets(polars, (first, second), sided, scratch):
        key = ["query", "row"] if how == BY_ROW else ["query", "doc_id", "place"]
        placed = bucket.with_columns(place=polars.int_range(polars.len()).over("side", "query", "doc_id"))
        ours, theirs = (
            placed.filter(polars.col("side") == side).drop("side", *(() if how != BY_ROW else ("place",)))
            for side in (0, 1)
        )
        shared = set(key)
        ours, theirs = (
            frame.rename({name: f"{name}_{letter}" for name in frame.columns if name not in shared})
            for frame, letter in ((ours, "a"), (theirs, "b"))
        )
        both = ours.join(theirs, on=key, how="full", coalesce=True)
        if how == BY_ROW:
            both = both.with_columns(row_a=polars.col("row"), row_b=polars.col("row"))
        both = both.with_columns(
            *(
                polars.when(polars.col(f"grade_{letter}").is_not_null())
                .then(polars.lit("labelled"))
                .when(polars.col(f"status_{letter}").is_not_null())
                .then(polars.lit("quarantined"))
                .otherwise(polars.lit("absent"))
                .alias(f"state_{letter}")
                for letter in "ab"
            ),
            query_id=polars.coalesce("query_id_a", "query_id_b"),
            **({"doc_id": polars.coalesce("doc_id_a", "doc_id_b")} if how == BY_ROW else {}),
            at=polars.coalesce("row_a", "row_b"),
        )
        for state_a, state_b, count in both.group_by("state_a", "state_b").len().rows():
            counts.by_state[state_a, state_b] += count
        labelled = (polars.col("state_a") == "labelled") & (polars.col("state_b") == "labelled")
        if how != BY_ROW:
            counts.repeated += both.filter(labelled & (polars.col("place") > 0)).height
        yield both.filter(labelled).sort("query", "at")


def paired_rows(polars: Any, frame: Any, grades: int) -> PairedRows:
    """A frame of `matches` as arrays; queries are numbered from 0."""

    def side(letter: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        given, expected, probs = frame.select(f"grade_{letter}", f"expected_grade_{letter}", f"probs_{letter}")
        return given.cast(polars.Int64).to_numpy(), _numbers(polars, expected), _distributions(probs, grades)

    queries, docs = frame.select("query", "doc_id")
    _, query_N = np.unique(queries.to_numpy(), return_inverse=True)
    return PairedRows(query_N.astype(np.int64), docs.to_list(), *zip(side("a"), side("b"), strict=True))


def _numbers(polars: Any, column: Any) -> np.ndarray:
    found: np.ndarray = column.cast(polars.Float64).fill_null(float("nan")).to_numpy()
    return found


def _distributions(column: Any, grades: int) -> np.ndarray:
    """float64 [N, K], rows sum to 1, NaN where a row has none."""
    found = np.full((len(column), grades), np.nan)
    has_N = column.is_not_null().to_numpy()
    if has_N.any():
        held = column.drop_nulls().explode().to_numpy().astype(np.float64).reshape(-1, grades)
        found[has_N] = held / held.sum(1, keepdims=True)  # float32 in the files: sums miss 1 by 1e-7
    return found


# ------------------------------------------------------------------------------
# Queries that moved: those whose mean score changed most, with what became of their order.


TINY = 1e-6
"""Changes below this are float32's."""


class MovedQueries:
    """The queries that moved most, of all that were seen.

    Args:
        count: how many to keep in `rows`, the largest change first.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.rows: list[dict[str, Any]] = []

    def add(self, names: list[str], moves: QueryMoves) -> None:
        """Take in the moves of some queries, and what these are called."""
        change_Q = moves.second - moves.first
        order = np.lexsort((np.arange(len(names)), -np.abs(change_Q)))[: self._count]
        for query in order.tolist():
            tau = float(moves.tau[query])
            self.rows.append(
                {
                    "query_id": names[query],
                    "rows": int(moves.rows[query]),
                    "mean_a": round(float(moves.first[query]), 6),
                    "mean_b": round(float(moves.second[query]), 6),
                    "change": round(float(change_Q[query]), 6),
                    "kendall_tau": None if math.isnan(tau) else round(tau, 6),
                    "entered_top": int(moves.entered[query]),
                    "top": int(moves.top[query]),
                    "first_changed": bool(moves.top_changed[query]),
                }
            )
        moved = [one for one in self.rows if abs(one["change"]) > TINY]
        self.rows = sorted(moved, key=lambda one: -abs(one["change"]))[: self._count]


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


class LargestFlips:
    """The rows whose expected grade (or grade, where there is no distribution) changed most, of all that were seen.

    Args:
        count: how many to keep in `rows`, the largest change first.
    """

    def __init__(self, polars: Any, count: int) -> None:
        self._polars = polars
        self._count = count
        self.rows: list[dict[str, Any]] = []
        self.up = 0
        self.down = 0

    def add(self, frame: Any) -> None:
        """Take in a frame of `matches`."""
        polars = self._polars
        scores = [
            polars.coalesce(f"expected_grade_{letter}", f"grade_{letter}").cast(polars.Float64) for letter in "ab"
        ]
        changed = frame.filter(polars.col("grade_a") != polars.col("grade_b")).with_columns(
            score_a=scores[0], score_b=scores[1], change=scores[1] - scores[0]
        )
        self.up += changed.filter(polars.col("grade_b") > polars.col("grade_a")).height
        self.down += changed.filter(polars.col("grade_b") < polars.col("grade_a")).height
        largest = changed.sort(polars.col("change").abs(), "at", descending=[True, False]).head(self._count)
        names = itertools.product(("row", "file", "grade", "expected_grade", "probs"), "ab")
        # plain values: a slice of a frame would keep all of it
        columns = ("change", "at", "query_id", "doc_id", *("_".join(name) for name in names))
        self.rows += largest.select(columns).to_dicts()
        self.rows.sort(key=lambda row: (-abs(row["change"]), row["at"]))
        del self.rows[self._count :]


def examples(
    rows: list[dict[str, Any]], first: RunLabels, second: RunLabels, storage: Storage
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of `LargestFlips` with their texts and reasoning, and remarks: texts are left out, with the reason, where
    they can't be read any more.
    """
    pairs: dict[int, Pair] = {}
    notes: list[str] = []
    row_ids = np.array([row["row_a"] for row in rows], dtype=np.int64)
    try:
        pairs = {pair.row_id: pair for pair in run_pairs(first.root, first.plan, storage, row_ids)} if rows else {}
    except RelabelError as exc:
        notes.append(f"texts of the examples are left out: {exc}")
    reasons = {
        letter: _reasoning(run, {row[f"file_{letter}"] for row in rows})
        for letter, run in (("a", first), ("b", second))
    }
    found = []
    for row in rows:
        pair = pairs.get(row["row_a"])
        sides = {
            letter: {
                **{name: row[f"{name}_{letter}"] for name in ("grade", "expected_grade", "probs")},
                "reasoning": _cut(reasons[letter].get(row[f"row_{letter}"])),
            }
            for letter in "ab"
        }
        found.append(
            {
                **{name: row[name] for name in ("row_a", "row_b", "query_id", "doc_id")},
                "query": _cut(pair.query) if pair else None,
                "document": _cut(pair.document) if pair else None,
                "change": round(row["change"], 6),
                **sides,
            }
        )
    return found, notes


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_CHARACTERS else text[:TEXT_CHARACTERS] + " …"


def _reasoning(run: RunLabels, files: set[int]) -> dict[int, str | None]:
    """What a run wrote about the rows of some label files, by row id."""
    found: dict[int, str | None] = {}
    for number in sorted(files):
        row_ids, reasons = run.folder.table(run.labels[number], LABELS, ["row_id", "reasoning"]).columns
        found |= dict(zip(row_ids.to_pylist(), reasons.to_pylist(), strict=True))
    return found
