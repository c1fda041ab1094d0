"""`relabel rounds` with questions, corpus and output on S3: the trajectories of a local search, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests.s3.conftest import Outcome, put_parquet


def test_a_search_on_s3_is_that_of_a_local_disk(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, tmp_path: Path
) -> None:
    documents = pa.table(
        {
            "doc_id": [f"d{number}" for number in range(30)],
            "document": [f"Red shoes of size {number}, number {number % 10}." for number in range(30)],
        }
    )
    put_parquet(f"{s3}/docs.parquet", documents)
    job = write_job({"labeler": {"name": "review"}, "rounds": {"corpus": f"{s3}/docs.parquet", "k": 3}})
    found = []
    for output in (f"{s3}/out", str(tmp_path / "out")):
        job.write_text(yaml.safe_dump({**yaml.safe_load(job.read_text()), "output": output}))
        done = relabel("rounds", job)
        assert done.returncode == 0, done.stderr
        found.append(open_run_store(output, Storage()).read("trajectories.parquet"))
        assert relabel("rounds", job).returncode == 10
    assert found[0] == found[1]
    assert relabel("verify", f"{s3}/out/round-2").returncode == 0
