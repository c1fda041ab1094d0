"""`relabel convert` and `compare` with sources, targets and runs on S3."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from relabel.manifests.files import Storage
from relabel.manifests.store import ObjectStore, open_run_store
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
    again = relabel("convert", f"{s3}/out", f"{s3}/trec/out.qrels", "--duplicates", "first")
    assert (again.returncode, "is there already" in again.stderr) == (2, True)


def test_a_large_target_goes_up_in_parts_and_is_whole(
    s3: str, relabel: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 150_000
    (tmp_path / "big.qrels").write_text(
        "".join(f"query-{row // 100} 0 document-{row} {row % 4}\n" for row in range(rows))
    )
    monkeypatch.setattr("relabel.jobs.files.ONE_PUT_BYTES", 1 << 20)
    monkeypatch.setitem(ObjectStore.__init__.__kwdefaults__, "part_bytes", 5 << 20)
    done = relabel("convert", tmp_path / "big.qrels", f"{s3}/there/big.jsonl")
    assert done.returncode == 0, done.stderr
    assert relabel("convert", tmp_path / "big.qrels", tmp_path / "here.jsonl").returncode == 0
    here = (tmp_path / "here.jsonl").read_bytes()
    there = open_run_store(f"{s3}/there", Storage()).read("big.jsonl")
    assert len(here) > 5 << 20
    assert hashlib.sha256(there).digest() == hashlib.sha256(here).digest()


def test_runs_on_s3_compare(write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]) -> None:
    assert relabel("run", write_job()).returncode == 0
    assert (
        relabel("run", write_job({"output": f"{s3}/other", "engine": {"seed": 4}}, name="other.yaml")).returncode == 0
    )
    done = relabel("compare", f"{s3}/out", f"{s3}/other", "--html", f"{s3}/pages/compare.html")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    counts = found["counts"]
    parts = ("both", "quarantined_a_only", "quarantined_b_only", "quarantined_both")
    assert sum(counts[name] for name in parts) == 60
    assert b"</html>" in open_run_store(f"{s3}/pages", Storage()).read("compare.html")
    assert all(one["document"] is not None for one in found["flips"]["examples"])
