"""`relabel convert` and `compare` with sources, targets and runs on S3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests.s3.conftest import Outcome


def test_labels_on_s3_go_out_to_trec_and_come_back(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome], tmp_path: Path
) -> None:
    assert relabel("run", write_job()).returncode == 0
    done = relabel("convert", f"{s3}/out", f"{s3}/trec/out.qrels", "--duplicates", "first")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] + found["quarantined"] == 60
    lines = open_run_store(f"{s3}/trec", Storage()).read("out.qrels").decode().splitlines()
    assert len(lines) == found["written"] == found["rows"] - found["duplicates"]
    assert relabel("convert", f"{s3}/trec/out.qrels", tmp_path / "back.parquet").returncode == 0
    held = [
        f"{row['query_id']} 0 {row['doc_id']} {row['grade']}"
        for row in pq.read_table(tmp_path / "back.parquet").to_pylist()
    ]
    assert held == lines
