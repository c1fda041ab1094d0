"""Counts, histograms and row samples from one pass over the labels of a run. Memory does not grow with the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from relabel.jobs.evaluate.sides import run_pairs
from relabel.jobs.report.artifacts import RunArtifact
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Pair, Reads
from relabel.manifests.receipts import FileRef
from relabel.manifests.run import read_labels
from relabel.manifests.schemas import LABELS, QUARANTINE, LabelRow, QuarantineRow

# ------------------------------------------------------------------------------
# The sample of rows that a page shows.


SEED = 7


class RowSample:
    """Picks rows as if at random, the same ones for the same row ids: those whose hash is smallest, by status."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._files: list[tuple[str, FileRef]] = []
        self._held: dict[str, list[np.ndarray]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, file: FileRef, status: str, row_ids_N: np.ndarray) -> None:
        """Rows of one status in one file."""
        if not self._files or self._files[-1] != (kind, file):
            self._files.append((kind, file))
        self.counts[status] += len(row_ids_N)
        order_N = hash_rows(row_ids_N)
        found = np.stack(
            [order_N, row_ids_N.astype(np.uint64), np.full(len(row_ids_N), len(self._files) - 1, dtype=np.uint64)]
        )
        parts = self._held.setdefault(status, [])
        parts.append(found)
        if sum(part.shape[1] for part in parts) > 4 * self._most:
            self._held[status] = [_smallest(np.concatenate(parts, axis=1), self._most)]

    def chosen(self) -> dict[str, list[tuple[int, FileRef]]]:
        """Row ids and their files, by kind of file."""
        found: dict[str, list[tuple[int, FileRef]]] = {"labels": [], "quarantine": []}
        for status, most in shares(dict(self.counts), self._most).items():
            for _, row, place in _smallest(np.concatenate(self._held[status], axis=1), most).T.tolist():
                kind, file = self._files[place]
                found[kind].append((row, file))
        return found


def shares(counts: dict[str, int], most: int) -> dict[str, int]:
    """How many rows of each status to show: all where they fit, else by their share, but some of each.

    Args:
        counts: rows by status, each above 0.
        most: in all; more where there are more statuses than that.
    """
    if sum(counts.values()) <= most:
        return counts
    floor = max(1, most // (4 * len(counts)))
    found = {status: min(count, floor) for status, count in counts.items()}
    left, open_rows = max(0, most - sum(found.values())), sum(counts.values()) - sum(found.values())
    return {status: have + left * (counts[status] - have) // open_rows for status, have in found.items()}


def hash_rows(row_ids_N: np.ndarray) -> np.ndarray:
    """Row ids in a pseudo-random order: uint64 [N]. SplitMix64 (Steele et al. 2014), from our seed."""
    with np.errstate(over="ignore"):
        mixed_N = row_ids_N.astype(np.uint64) + np.uint64(SEED) * np.uint64(0x9E3779B97F4A7C15)
        mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed_N ^ (mixed_N >> np.uint64(31)))


def _smallest(held: np.ndarray, most: int) -> np.ndarray:
    """The columns with the smallest first entries; where those tie, with the smallest row id."""
    return held[:, np.lexsort((held[1], held[0]))[:most]]


# ------------------------------------------------------------------------------
# One pass over a run's labels. Letters: N rows of a file, K grades.


BINS = 20
_NARROW = ["row_id", "query_id", "grade", "probs", "outside_mass", "flags"]


@dataclass
class Histogram:
    """Counts in equal bins from 0 to `top`, and the sum for a mean."""

    top: float
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    total: float = 0.0

    def add(self, values_N: np.ndarray) -> None:
        """Count values; those beyond the top fall into the last bin."""
        place_N = np.clip((values_N / self.top * BINS).astype(np.int64), 0, BINS - 1)
        self.counts += np.bincount(place_N, minlength=BINS)
        self.total += float(values_N.sum())

    @property
    def rows(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float | None:
        """Of all values; None without any."""
        return self.total / self.rows if self.rows else None

    @property
    def edges(self) -> list[float]:
        """Lower ends of the bins, and the upper end of the last: `BINS` + 1 numbers."""
        return [self.top * number / BINS for number in range(BINS + 1)]


@dataclass
class LabelTally:
    """Counts over all labels of a run."""

    grades: int
    by_grade: np.ndarray
    entropy: Histogram
    outside: Histogram
    flags: Counter[str]
    reasons: dict[str, Counter[str]]
    """By status, the reasons of quarantined rows; the rarest are dropped where there are many."""
    chosen: dict[str, list[tuple[int, FileRef]]]
    """By `labels` and `quarantine`: row ids to show, each with its file."""
    num_rows: int
    """Rows that could have been chosen."""
    queries: set[str] = field(default_factory=set)
    """Ids of the queries that have a label."""

    @property
    def num_chosen(self) -> int:
        """Rows that the labels browser shows."""
        return sum(map(len, self.chosen.values()))


def tally_labels(run: RunArtifact, *, most: int) -> LabelTally:
    """Read every committed file once.

    Args:
        most: rows to choose for the browser; 0 for none.
    Raises:
        ManifestError: a file is missing or not the one committed.
    """
    draw = RowSample(max(1, most))
    grades = run.grades
    most_nats = math.log(max(grades, 1))  # without grades there is no distribution to be counted
    found = LabelTally(
        grades, np.zeros(grades, dtype=np.int64), Histogram(most_nats), Histogram(1.0), Counter(), {}, {}, 0
    )
    for file in run.found.labels:
        table = run.folder.table(file, LABELS, _NARROW)
        draw.add("labels", file, "ok", table["row_id"].to_numpy())
        found.queries.update(table["query_id"].unique().to_pylist())
        _add_labels(found, table)
    for file in run.found.quarantine:
        table = run.folder.table(file, QUARANTINE, ["row_id", "status", "reason"])
        status_N = np.array(table["status"].to_pylist(), dtype=object)
        for status in dict.fromkeys(status_N.tolist()):
            rows_N = np.flatnonzero(status_N == status)
            draw.add("quarantine", file, status, table["row_id"].to_numpy()[rows_N])
            reasons = found.reasons.setdefault(status, Counter())
            reasons.update(table["reason"].take(pa.array(rows_N)).to_pylist())
            if len(reasons) > 10_000:
                found.reasons[status] = Counter(dict(reasons.most_common(1_000)))
    found.num_rows = draw.counts.total()
    found.chosen = draw.chosen() if most else {"labels": [], "quarantine": []}
    return found


def read_labelled(run: RunArtifact, tally: LabelTally) -> Iterator[LabelRow]:
    """The chosen labels, whole, file by file."""
    for file, rows in _by_file(tally, "labels"):
        table = _only(read_labels(run.folder, file, check_bytes=False), rows)
        own = [name for name in table.column_names if name not in LABELS.names]
        columns = table.select(own).to_pylist() if own else [{}] * table.num_rows
        for row, more in zip(table.drop_columns(own).to_pylist(), columns, strict=True):
            yield LabelRow(**row, columns=more)


def read_quarantined(run: RunArtifact, tally: LabelTally) -> Iterator[QuarantineRow]:
    """The chosen rows of quarantine, likewise."""
    for file, rows in _by_file(tally, "quarantine"):
        table = _only(run.folder.table(file, QUARANTINE, check_bytes=False), rows)
        yield from (QuarantineRow(**row) for row in table.to_pylist())


def _by_file(tally: LabelTally, kind: str) -> Iterable[tuple[FileRef, list[int]]]:
    by_file: dict[str, tuple[FileRef, list[int]]] = {}
    for row, file in tally.chosen[kind]:
        by_file.setdefault(file.path, (file, []))[1].append(row)
    return by_file.values()


def _only(table: pa.Table, rows: list[int]) -> pa.Table:
    return table.filter(pa.array(np.isin(table["row_id"].to_numpy(), rows)))


def texts_of(run: RunArtifact, row_ids: list[int], *, reads: Reads = QUERY_AND_DOCUMENT) -> dict[int, Pair]:
    """Pairs by row id, read again from the run's input; `reads` is what is wanted of them.

    Raises:
        InputError, ManifestError: it is not there any more, or not what was labelled.
    """
    wanted = np.array(sorted(row_ids), dtype=np.int64)
    return {pair.row_id: pair for pair in run_pairs(run.path, run.plan, run.storage, wanted, reads=reads)}


def _add_labels(found: LabelTally, table: pa.Table) -> None:
    grade_N = table["grade"].drop_null().to_numpy()
    found.by_grade += np.bincount(grade_N.astype(np.int64), minlength=found.grades)[: found.grades]
    for flags in table["flags"].to_pylist():
        found.flags.update(flags or ())
    outside_N = table["outside_mass"].drop_null().to_numpy()
    found.outside.add(outside_N[np.isfinite(outside_N)].astype(np.float64))
    probs = table["probs"].drop_null().combine_chunks()
    flat_M = probs.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    if len(probs) and len(flat_M) == len(probs) * found.grades:
        p_NK = flat_M.reshape(-1, found.grades)
        with np.errstate(divide="ignore", invalid="ignore"):
            found.entropy.add(-np.where(p_NK > 0, p_NK * np.log(p_NK), 0.0).sum(1))
