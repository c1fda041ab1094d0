"""Labels reused from S3 to S3, and outputs merged there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests.s3.conftest import ROWS, Outcome


def test_a_run_on_s3_takes_over_from_s3_and_two_outputs_there_are_merged_into_one(
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
    refused = relabel("merge", f"{s3}/first", f"{s3}/second", "--to", f"{s3}/merged")
    assert refused.returncode == 3, refused.stderr
    merged = relabel("merge", f"{s3}/second", "--to", f"{s3}/merged")
    assert merged.returncode == 0, merged.stderr
    assert json.loads(merged.stdout)["rows"] == ROWS
    assert relabel("verify", f"{s3}/merged").returncode == 0


@pytest.mark.full
def test_a_merge_on_s3_follows_a_source_that_was_retried_and_one_that_was_done_again(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    """Two outputs of one job; the second is retried after the first merge, and then a chunk of it is done again without
    that retry.
    """
    job, outputs = write_job({"engine": {"seed": 5}}), [f"{s3}/one", f"{s3}/two"]
    for output in outputs:
        assert relabel("run", job, "--set", f"output={output}").returncode == 0
    counts = []
    for verb in ("run", "retry", "redo"):
        if verb == "redo":
            store = open_run_store(outputs[1], Storage())
            name = next(name for name in store.etags("receipts") if name.endswith(".2.json"))
            store._objects.delete(store._key(name))
        if verb != "run":
            again = relabel("retry" if verb == "retry" else "run", job, "--set", f"output={outputs[1]}")
            assert again.returncode == 0, again.stderr
        merged = relabel("merge", *outputs, "--to", f"{s3}/merged")
        assert merged.returncode == 0, merged.stderr
        assert relabel("merge", *outputs, "--to", f"{s3}/merged").returncode == 10
        verified = relabel("verify", f"{s3}/merged")
        assert verified.returncode == 0, verified.stderr
        counts.append(json.loads(verified.stdout)["quarantined"])
        assert counts[-1] == json.loads(relabel("status", outputs[1]).stdout)["quarantined"]
    assert counts[1] < counts[2] <= counts[0]
