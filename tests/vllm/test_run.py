"""A whole run with the real engine: planned, labelled, committed, proven."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.cli import main

from .conftest import KV_CACHE_GIB

QUERIES, DOCS = 4, 4


def relabel(capfd: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--output", "json"])
    out = capfd.readouterr().out
    assert out.count("\n") == 1, f"stdout is not one line of JSON: {out}"
    return int(end.value.code or 0), json.loads(out)


def test_r3a_labels_sixteen_pairs_and_the_run_verifies(model_dir, running, tmp_path, monkeypatch, capfd):
    running.close()
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "query_id": f"q{q}",
            "query": f"red shoes {q}",
            "doc_id": f"d{q}-{d}",
            "document": f"a shoe of size {d}, " * (1 + 5 * d),
        }
        for q in range(QUERIES)
        for d in range(DOCS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
    job = {
        "name": "real",
        "input": {"path": "pairs.parquet"},
        "labeler": {"name": "r3a", "evidence": "constrained", "max_think_tokens": 8, "max_text_tokens": 8},
        "engine": {
            "name": "vllm",
            "model": str(model_dir()),
            "max_prompt_tokens": 3500,
            "args": {
                "dtype": "float32",
                "max_num_seqs": 8,
                "kv_cache_space_gib": 2 * KV_CACHE_GIB,
                "cache_dir": "cache",
            },
        },
        "output": "out",
        "run": {"chunk_rows": 5, "max_failed_fraction": 1.0},
    }
    Path("job.yaml").write_text(yaml.safe_dump(job))
    code, report = relabel(capfd, "run", "job.yaml")
    assert code == 0, report
    assert relabel(capfd, "verify", "job.yaml")[0] == 0
    manifest = json.loads(Path("out/manifest.json").read_text())
    receipts = [json.loads(path.read_text()) for path in Path("out/receipts").rglob("*.json")]
    labels = [row for path in Path("out/labels").rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    failed = [row for path in Path("out/quarantine").rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert sorted(row["row_id"] for row in [*labels, *failed]) == list(range(QUERIES * DOCS))
    assert len(labels) >= 12, [row["reason"] for row in failed]  # a random model may write an empty thought
    for row in labels:
        assert row["grade"] in (0, 1, 2)
        assert sum(row["probs"]) == pytest.approx(1.0, abs=1e-5)
        assert 0.0 <= row["outside_mass"] <= 1.0
    stages: dict[str, int] = {}
    for receipt in receipts:
        assert receipt["engine"]["family"] == "vllm"
        for stage, counts in receipt["stages"].items():
            stages[stage] = stages.get(stage, 0) + counts["asks"]
    first, second = stages.values()
    assert first == QUERIES  # the first stage is asked once a query, not once a pair
    assert second >= QUERIES * DOCS
    assert sum(counts["cached_tokens"] for receipt in receipts for counts in receipt["stages"].values()) > 0
    assert manifest
    assert relabel(capfd, "run", "job.yaml")[0] == 10
