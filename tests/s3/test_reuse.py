"""Labels reused from S3 to S3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests.s3.conftest import Outcome


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
