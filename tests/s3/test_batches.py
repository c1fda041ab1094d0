"""A provider's batches of a run whose output is in object storage: what a kill leaves there is found again, and nothing
is paid for twice.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

from relabel.jobs.exits import Exit
from relabel.manifests.failpoints import BATCH_FAILPOINTS
from tests.engines_openai.batch_server import BatchServer, Fate
from tests.engines_openai.conftest import serve
from tests.engines_openai.test_batches import ARGS, WANTED, start
from tests.engines_openai.test_run import r3a
from tests.engines_openai.test_run import write_job as local_job

from .conftest import call

__all__ = ["local_job", "serve"]
OTHER_FATES = ("failed", "gone")


@pytest.fixture
def label(local_job: Any, serve: Any, s3: str) -> Callable[..., tuple[Any, BatchServer]]:
    """`label(provider, RELABEL_FAILPOINT=…)`: one run over the provider, with its output in the bucket."""
    servers: dict[int, Any] = {}

    def go(provider: BatchServer, **environment: str) -> Any:
        server = servers.get(id(provider)) or servers.setdefault(id(provider), start(serve, provider))
        job = Path(local_job(server, engine={"args": {**ARGS, "base_url": server.url}}, run={"lease_s": 3}))
        job.write_text(job.read_text().replace("output: out\n", f"output: {s3}/out\n"))
        return call("run", job, **environment)

    return go


def label_again(label: Any, provider: BatchServer) -> Any:
    """The next run, as soon as the dead one's leases are dead as well."""
    while (ended := label(provider)).returncode == Exit.LOCKED:
        pass
    return ended


def grades(s3: str) -> dict[int, int]:
    """The grade of each labelled row, as the manifest's files have it."""
    filesystem, root = fsspec.core.url_to_fs(f"{s3}/out", use_listings_cache=False)
    manifest = json.loads(filesystem.cat_file(f"{root}/manifest.json"))
    assert [path for path in filesystem.find(root) if "/batches/" in path] == [], "records go when the run is finished"
    tables = [pq.read_table(f"{root}/{file['path']}", filesystem=filesystem) for file in manifest["labels"]]
    return {row["row_id"]: row["grade"] for table in tables for row in table.to_pylist()}


@pytest.mark.full
@pytest.mark.parametrize("place", BATCH_FAILPOINTS)
def test_a_run_killed_around_the_handing_over_pays_for_no_ask_twice(place: str, label: Any, s3: str) -> None:
    provider = BatchServer(r3a)
    killed = label(provider, RELABEL_FAILPOINT=place)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = label_again(label, provider)
    assert ended.returncode == 0, ended.stderr
    assert grades(s3) == WANTED
    assert set(provider.paid.values()) == {1}


@pytest.mark.parametrize("fate", ["expired", *(pytest.param(fate, marks=pytest.mark.full) for fate in OTHER_FATES)])
def test_what_became_of_a_batch_after_a_kill_is_found_out(fate: Fate, label: Any, s3: str) -> None:
    provider = BatchServer(r3a, lambda nth: fate if nth == 0 else "completed")
    killed = label(provider, RELABEL_FAILPOINT="after_batch_record")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(provider.batches) == 1
    ended = label_again(label, provider)
    assert ended.returncode == 0, ended.stderr
    assert grades(s3) == WANTED
    first, *others = [[line["custom_id"] for line in batch["lines"]] for batch in provider.batches.values()]
    again = sorted(ask for asks in others for ask in asks if ask in first)
    assert again == sorted(first[::-1][1::2] if fate == "expired" else first)
