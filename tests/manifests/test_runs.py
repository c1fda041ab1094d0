"""Conservation: a lost, doubled or foreign row is found, whatever the counts say; so is a changed byte."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import ManifestError
from relabel.manifests.manifest import RunManifest, load_manifest, write_manifest
from relabel.manifests.receipts import Fates, RunRows
from relabel.manifests.records import unsealed
from relabel.manifests.run import RunFolder, build_manifest
from relabel.manifests.schemas import LABELS, parquet_bytes
from tests.manifests.small_runs import commit, label, planned_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return planned_run(tmp_path)


def proved(folder: RunFolder) -> Fates:
    return folder.prove(folder.snapshot(), check_bytes=True)


def manifest(folder: RunFolder, limit: float = 0.05) -> RunManifest:
    return build_manifest(folder, folder.snapshot(), spec={}, max_failed_fraction=limit, relabel_version="0")


def test_rows_in_equal_labelled_plus_quarantined(folder: RunFolder) -> None:
    commit(folder, 0, [0, 1, 2, 3])
    commit(folder, 1, [4, 6, 7], [5])
    found = manifest(folder)
    assert found.rows == RunRows(in_=8, labelled=7, reused=0, quarantined=1)
    assert found.over_limit
    assert not manifest(folder, limit=0.2).over_limit
    write_manifest(folder.store, found)
    assert load_manifest(folder.store) == found


def test_first_commit_wins_and_the_loser_harms_nobody(folder: RunFolder) -> None:
    assert commit(folder, 0, [0, 1, 2, 3]) is not None
    assert commit(folder, 0, [0, 1, 2], [3]) is None
    assert commit(folder, 0, [0, 1, 2, 3]) is None
    commit(folder, 1, [4, 5, 6, 7])
    assert proved(folder) == Fates(8, 0, {})
    assert folder.snapshot().tally.labelled == 8


def test_a_row_has_the_state_of_its_highest_attempt(folder: RunFolder) -> None:
    commit(folder, 0, [0, 1], [2, 3])
    commit(folder, 1, [4, 5, 6, 7])
    commit(folder, 0, [2], [3], attempt=2)
    found = manifest(folder, limit=0.5)
    assert found.rows == RunRows(in_=8, labelled=7, reused=0, quarantined=1)
    assert len(found.labels) == 3
    assert len(found.quarantine) == 1
    commit(folder, 0, [3], attempt=3)
    assert manifest(folder).rows.quarantined == 0
    assert proved(folder) == Fates(8, 0, {})


def test_a_missing_label_file_is_found(folder: RunFolder) -> None:
    receipt = commit(folder, 0, [0, 1, 2, 3])
    commit(folder, 1, [4, 5, 6, 7])
    assert receipt is not None
    assert receipt.labels is not None
    folder.store.path(receipt.labels.path).unlink()
    with pytest.raises(ManifestError, match="committed, but missing"):
        manifest(folder)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"version": 99}', b'{"version": 1, "labels": {"path": "x"}}']
)
def test_a_damaged_receipt_is_reported(folder: RunFolder, body: bytes) -> None:
    folder.store.put("receipts/shard-00000/chunk-000000.json", body)
    with pytest.raises(ManifestError, match=r"chunk-000000\.json"):
        folder.snapshot()


def test_a_receipt_of_another_job_or_of_no_chunk_is_refused(folder: RunFolder) -> None:
    commit(folder, 0, [0, 1, 2, 3])
    name = "receipts/shard-00000/chunk-000000.json"
    held = unsealed(folder.store.read(name))
    folder.store.put(name, json.dumps({**held, "fingerprint": "f" * 64}).encode())
    with pytest.raises(ManifestError, match="belongs to another job"):
        folder.snapshot()
    folder.store.put("receipts/shard-00000/chunk-000007.json", b"{}")
    with pytest.raises(ManifestError, match="no such chunk"):
        folder.pending(0)


def test_the_same_rows_give_the_same_bytes_and_read_back_equal() -> None:
    rows = [label(row)._replace(evidence=[{"start": 0, "end": 2, "text": "ab"}], flags=["x"]) for row in range(5)]
    data = parquet_bytes(rows, LABELS)
    assert data == parquet_bytes(rows, LABELS)
    table = pq.read_table(pa.BufferReader(data))
    assert table.schema.equals(LABELS)
    assert [row["row_id"] for row in table.to_pylist()] == list(range(5))
    assert table.to_pylist()[0]["evidence"] == [{"start": 0, "end": 2, "text": "ab"}]


def test_a_lone_surrogate_is_stored_as_a_question_mark_and_stops_nothing() -> None:
    rows = [label(0)._replace(intent="bad \ud800 end"), label(1)]
    assert pq.read_table(pa.BufferReader(parquet_bytes(rows, LABELS)))["intent"].to_pylist() == ["bad ? end", None]
