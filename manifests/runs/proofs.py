"""The proof that no row is lost: what the files of a chunk hold, row by row, against the plan and against the words of
its receipts.

Each attempt at a chunk takes up exactly the rows that wait: the first one all that were planned, a retry all that the
attempt before it left in quarantine. So each row has one state, that of its highest attempt, and the quarantine of a
chunk is the file that its last receipt names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from relabel.manifests.errors import ManifestError
from relabel.manifests.runs.receipts import FileRef, Receipt
from relabel.manifests.schemas import LABELS, QUARANTINE

SHOWN = 10
ReadColumns = Callable[[FileRef, pa.Schema, list[str]], pa.Table]
"""Reads some columns of a committed file."""


@dataclass(frozen=True)
class RunRows:
    """Rows of a run by what became of them, as a manifest states them."""

    in_: Annotated[int, Field(alias="in")]
    labelled: int
    reused: int
    quarantined: int


class Fates(NamedTuple):
    """Rows by what became of them, counted in the files: labels asked here, labels reused, and, by status, rows in
    quarantine.
    """

    labelled: int
    reused: int
    quarantined: Mapping[str, int]

    @property
    def num_quarantined(self) -> int:
        return sum(self.quarantined.values())

    @property
    def rows(self) -> int:
        return self.labelled + self.reused + self.num_quarantined

    def by_kind(self) -> RunRows:
        """As a manifest states them."""
        return RunRows(self.rows, self.labelled, self.reused, self.num_quarantined)

    def plus(self, other: Fates) -> Fates:
        """Both together."""
        quarantined = Counter(self.quarantined) + Counter(other.quarantined)
        return Fates(self.labelled + other.labelled, self.reused + other.reused, dict(sorted(quarantined.items())))


NOTHING = Fates(0, 0, {})


def agree(receipts: Sequence[Receipt], num_planned: int) -> bool:
    """Whether a chunk's receipts agree with each other and with the plan, by their own words; `prove_chunk` tells what
    is wrong.

    Args:
        receipts: of one chunk, by attempt.
        num_planned: rows of the chunk in the plan.
    """
    waiting = num_planned
    for receipt in receipts:
        labels, quarantine = (file.rows if file else 0 for file in (receipt.labels, receipt.quarantine))
        by_status = receipt.statuses.get("ok", 0), sum(receipt.statuses.values())
        if receipt.rows != waiting or by_status != (labels, labels + quarantine) or receipt.rows != labels + quarantine:
            return False
        if receipt.rows_reused > labels:
            return False
        waiting = quarantine
    return True


def prove_chunk(receipts: Sequence[Receipt], planned_R: np.ndarray, read: ReadColumns, *, root: str) -> Fates:
    """Prove that each planned row has exactly one state, and that the receipts say so.

    Args:
        receipts: of one chunk, by attempt.
        planned_R: the chunk's row ids, int64.
    Raises:
        ManifestError: names the receipt, the files and up to ten row ids that are lost, doubled or foreign.
    """
    labelled = reused = 0
    quarantined: Counter[str] = Counter()
    waiting_R, odd_as = planned_R, "doubled or foreign ({})"
    for receipt in receipts:
        where = f"{root}/{receipt.id.receipt_name}"
        labels = _read(receipt.labels, LABELS, ["row_id", "status", "reused"], read)
        failures = _read(receipt.quarantine, QUARANTINE, ["row_id", "status"], read)
        found = {file.path: table["row_id"].to_numpy() for file, table in (labels, failures) if file}
        _compare(waiting_R, found, where, odd_as)
        quarantined = Counter(failures.table["status"].to_pylist())
        statuses = Counter(labels.table["status"].to_pylist())
        if statuses.keys() - {"ok"} or "ok" in quarantined:
            raise ManifestError(
                f"{where}: its labels have the status {dict(statuses)}, its quarantine {dict(quarantined)}. {_REDO}"
            )
        taken = pc.sum(labels.table["reused"]).as_py() or 0
        held = statuses + quarantined
        if (receipt.rows, Counter(receipt.statuses), receipt.rows_reused) != (held.total(), held, taken):
            raise ManifestError(
                f"{where}: says {receipt.rows:,} rows, {receipt.statuses}, {receipt.rows_reused:,} reused; its "
                f"files ({', '.join(found)}) hold {held.total():,}, {dict(held)}, {taken:,} reused. {_REDO}"
            )
        labelled += labels.table.num_rows - taken
        reused += taken
        waiting_R, odd_as = failures.table["row_id"].to_numpy(), "doubled or not in quarantine: {}"
    return Fates(labelled, reused, quarantined)


_REDO = (
    "Move this receipt and those of later attempts away and run what wrote it (run, retry or merge) again to redo it."
)


class _Held(NamedTuple):
    file: FileRef | None
    table: pa.Table


def _read(file: FileRef | None, schema: pa.Schema, columns: list[str], read: ReadColumns) -> _Held:
    if file is None:
        return _Held(None, pa.schema([schema.field(name) for name in columns]).empty_table())
    return _Held(file, read(file, schema, columns))


def _compare(wanted_R: np.ndarray, files: dict[str, np.ndarray], where: str, odd_as: str) -> None:
    """Raise unless the files of an attempt hold exactly the rows that it was to ask. `odd_as` is
    what to call others.
    """
    found_R = np.concatenate([np.zeros(0, np.int64), *files.values()])
    if np.array_equal(np.sort(wanted_R), np.sort(found_R)):
        return
    want, have = Counter(wanted_R.tolist()), Counter(found_R.tolist())
    lost, odd = want - have, have - want
    named = [path for path, rows_R in files.items() if not odd.keys().isdisjoint(rows_R.tolist())] or list(files)
    raise ManifestError(
        f"{where}: {lost.total()} rows lost (row ids {sorted(lost)[:SHOWN]}), {odd.total()} "
        f"{odd_as.format(sorted(odd)[:SHOWN])}, "
        f"by {' and '.join(named) or 'its files, of which it has none'}. {_REDO}"
    )
