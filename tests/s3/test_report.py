"""A report of a run that lies on S3, written to S3, as on a disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests.s3.conftest import ROWS, Outcome


def test_a_report_is_read_from_s3_and_written_there(
    write_job: Callable[..., Path], s3: str, relabel: Callable[..., Outcome]
) -> None:
    assert relabel("run", write_job()).returncode == 0
    done = relabel("report", f"{s3}/out", "--to", f"{s3}/pages/ecom.html")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    page = open_run_store(s3, Storage()).read("pages/ecom.html").decode()
    assert found["rows_shown"] == ROWS
    assert len(page.encode()) == found["bytes"]
    assert "finished, every row accounted for" in page
    assert '"document":' in page  # texts come from the input on S3
