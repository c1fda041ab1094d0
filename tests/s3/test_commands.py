"""A job whose input and output are on S3: planned, run, looked at, verified and retried, as on a disk; killed and
resumed; many at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests import seaweed
from tests.s3.conftest import ROWS, Outcome, labels


@pytest.fixture
def undisturbed(write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]) -> dict[str, str]:
    """Labels of a run that nobody disturbs, at an output of its own."""
    done = relabel("run", write_job({"output": f"{s3}/undisturbed"}, name="undisturbed.yaml"))
    assert done.returncode == 0, done.stderr
    return labels(f"{s3}/undisturbed")


def test_a_job_on_s3_runs_from_plan_to_retry(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    job = write_job()
    planned = relabel("plan", job)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["chunks_open"] == 10
    done = relabel("run", job)
    assert done.returncode == 0, done.stderr
    first = labels(f"{s3}/out")
    status = json.loads(relabel("status", f"{s3}/out").stdout)
    assert status["is_finished"]
    assert {shard["state"] for shard in status["shards"]} == {"done"}
    verified = relabel("verify", job)
    assert verified.returncode == 0, verified.stderr
    retried = relabel("retry", job)
    assert retried.returncode == 0, retried.stderr
    assert relabel("verify", f"{s3}/out").returncode == 0
    assert labels(f"{s3}/out").keys() != first.keys()


def test_nothing_to_do_takes_a_few_requests_one_listing_of_receipts_and_reads_none(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], through: Callable[..., seaweed.Proxy]
) -> None:
    job = write_job()
    assert relabel("run", job).returncode == 0
    proxy = through()
    again = relabel("run", job)
    assert again.returncode == 10, again.stderr
    assert not [seen for seen in proxy.seen if seen.method not in ("GET", "HEAD")]
    assert not [seen for seen in proxy.seen if "/receipts/shard" in seen.path]
    assert sum("prefix=" in seen.path and "receipts" in seen.path for seen in proxy.seen) == 1
    assert sum(seen.path.endswith("/manifest.json") for seen in proxy.seen) == 1
    assert len(proxy.seen) <= 7, "\n".join(f"{s.method} {s.path} {s.status}" for s in proxy.seen)


def test_a_store_that_stays_down_ends_in_20_with_all_progress_kept(
    write_job: Callable[..., Path],
    s3: str,
    relabel: Callable[..., Outcome],
    undisturbed: dict[str, str],
    through: Callable[..., seaweed.Proxy],
) -> None:
    job = write_job({"run": {"store_retry_s": 1, "lease_s": 5}})
    commits = 0

    def decide(exchange: seaweed.Exchange) -> str:
        nonlocal commits
        commits += exchange.method == "PUT" and "/receipts/" in exchange.path
        return "503" if commits > 3 else "pass"

    proxy = through(decide)
    ended = relabel("run", job)
    assert ended.returncode == 20, ended.stderr
    assert "503 SlowDown" in ended.stderr
    assert "run the same command again" in ended.stderr
    proxy.decide = lambda exchange: "pass"
    assert len(open_run_store(f"{s3}/out", Storage()).etags("receipts")) == 3
    assert relabel("run", job).returncode == 0
    assert labels(f"{s3}/out") == undisturbed


def test_wrong_credentials_and_a_missing_bucket_are_reported_at_once(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    job = write_job()
    for changed, said in (
        ({"AWS_SECRET_ACCESS_KEY": "wrong-9f3ab"}, "the secret key is not the one of this access key"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "the access key is not known there"),
    ):
        refused = relabel("run", job, **changed)
        assert refused.returncode == 3, refused.stderr
        assert said in refused.stderr
        assert "wrong-9f3ab" not in refused.stderr + refused.stdout
    missing = relabel("run", job, "--set", "output=s3://no-such-bucket-here/out")
    assert missing.returncode == 3, missing.stderr
    assert "no bucket 'no-such-bucket-here'" in missing.stderr


def test_one_writer_is_no_crew(write_job: Callable[..., Path], relabel: Callable[..., Outcome]) -> None:
    refused = relabel("run", write_job({"run": {"single_writer": True}}), "--workers", "2")
    assert (refused.returncode, "single_writer" in refused.stderr) == (2, True)


def test_a_store_that_ignores_conditions_is_refused_and_works_for_a_single_writer(
    write_job: Callable[..., Path],
    s3: str,
    relabel: Callable[..., Outcome],
    undisturbed: dict[str, str],
    through: Callable[..., seaweed.Proxy],
) -> None:
    job = write_job()
    through(lambda exchange: "careless")
    refused = relabel("run", job)
    assert refused.returncode == 3, refused.stderr
    assert "accepts `If-None-Match: *` and ignores it" in refused.stderr
    assert "single_writer" in refused.stderr
    assert set(open_run_store(f"{s3}/out", Storage()).etags("")) == {"leases/probe"}
    vouched = relabel("run", job, "--set", "run.single_writer=true")
    assert vouched.returncode == 0, vouched.stderr
    assert labels(f"{s3}/out") == undisturbed
    assert json.loads(vouched.stdout)["rows"] == ROWS


# `relabel convert` and `compare` with sources, targets and runs on S3.


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


# Labels reused from S3 to S3.


def test_a_run_on_s3_takes_over_from_s3(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    first = relabel("run", write_job({"output": f"{s3}/first"}, name="first.yaml"))
    assert first.returncode == 0, first.stderr
    labelled = json.loads(first.stdout)["labelled"]
    second = write_job({"output": f"{s3}/second", "reuse": f"{s3}/first", "run": {"chunk_rows": 7}}, name="second.yaml")
    planned = relabel("plan", second)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["estimate"]["rows_reused"] == [labelled] * 3
    done = relabel("run", second)
    assert done.returncode == 0, done.stderr
    assert relabel("verify", f"{s3}/second").returncode == 0
    manifest = json.loads(open_run_store(f"{s3}/second", Storage()).read("manifest.json"))
    assert manifest["rows"]["reused"] == labelled
    assert manifest["reused_from"][0]["output"] == f"{s3}/first"
