"""A planned run of eight rows in one shard and two chunks, whose chunks a test commits by hand."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.labels import LabelRow, QuarantineRow
from relabel.manifests.plan import (
    ChunkId,
    FinishedRows,
    Receipt,
    ReusedRows,
    ReusedWork,
    WorkFacts,
    commit_chunk,
    write_plan,
)
from relabel.manifests.rows import make_plan
from relabel.manifests.run_folder import RunFolder
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import LocalStore

PARTS = {
    "columns": {},
    "labeler": {"name": "direct", "grades": 3},
    "label_columns": [],
    "model": "0" * 64,
    "schema": 3,
    "cut": {"shards": 1, "chunk_rows": 4},
}
"""As much of a plan's parts as readers of labels look at."""


def label(row: int, *, reused: bool = False) -> LabelRow:
    return LabelRow(row, "q", f"d{row}", "ok", 1, [0.1, 0.7, 0.2], 0.01, 1.1, [], None, None, [], None, 10, 1, reused)


def failure(row: int, status: str = "format") -> QuarantineRow:
    tries = [{"stage": "verdict", "attempt": 1, "finish": "stop", "text": "?", "reason": "no tags"}]
    return QuarantineRow(row, "q", f"d{row}", status, "no tags", tries, 10, 1)


def planned_run(folder: Path) -> RunFolder:
    rows = range(8)
    table = {
        "query_id": [f"q{row // 2}" for row in rows],
        "query": ["q"] * 8,
        "doc_id": [str(row) for row in rows],
        "document": ["d"] * 8,
    }
    pq.write_table(pa.table(table), folder / "in.parquet")
    dataset = open_dataset(InputSpec(path=(str(folder / "in.parquet"),)), Storage())
    store = LocalStore(folder / "out")
    plan, plan_files = make_plan(dataset, PARTS, name="job", shards=1, chunk_rows=4)
    write_plan(store, plan, plan_files)
    return RunFolder(store, plan)


def commit(
    folder: RunFolder,
    chunk: int,
    labels: Sequence[int],
    failed: Sequence[int] = (),
    attempt: int = 1,
    reused: Sequence[int] = (),
) -> Receipt | None:
    sources = [ReusedRows("earlier", "f" * 64, None, "0" * 64, len(reused))] if reused else []
    rows = sorted([label(row) for row in labels] + [label(row, reused=True) for row in reused])
    return commit_chunk(
        folder.store,
        ChunkId(0, chunk, attempt),
        FinishedRows(rows, [failure(row) for row in failed]),
        WorkFacts(
            fingerprint=folder.plan.fingerprint,
            stages={},
            seconds=0.1,
            engine={"family": "fake"},
            worker="w",
            epoch=0,
            started="2026-11-20T08:00:00.000+00:00",
            committed="2026-11-20T08:00:01.000+00:00",
        ),
        ReusedWork(sources),
    )
