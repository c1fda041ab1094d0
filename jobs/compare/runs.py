"""Two finished runs as frames on this machine: each row with its label or the reason that there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.evaluate.sides import Sides
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.inputs.changed_files import changed_files
from relabel.manifests.judging.opened_labels import is_run
from relabel.manifests.judging.run_labels import RunLabels, open_run_labels
from relabel.manifests.metrics.student_matches import BY_IDS, BY_ROW
from relabel.manifests.runs.kept_readings import differing_readings
from relabel.manifests.schemas import LABELS, QUARANTINE
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import place_of

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
    other = None if changed else differing_readings(first.folder.store, second.folder.store)
    if not changed and other is None and ids[0] == ids[1]:
        return BY_ROW, []
    if other is not None:
        changed = [f"{first.plan.files[other[0]].path}: its row group {other[1]} was written over between the two"]
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
