"""Two jobs in one process that differ in nothing but their storage options: each reads and writes with its own."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.commands.labeling import open_session
from relabel.jobs.exits import Exit
from relabel.jobs.job import load_job, output_of
from relabel.jobs.pool.supervisor import Supervisor
from relabel.jobs.run.execution import label
from relabel.labelers.prompts import BUILT_IN
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.secrets import forget_secrets
from relabel.manifests.store import open_run_store
from tests.vault import Vault

KEYS = {"red": "key-of-red", "blue": "key-of-blue"}
ROWS = {"red": 6, "blue": 9}


def storage_of(name: str) -> Storage:
    return Storage.of({"vault": {"key": KEYS[name]}})


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`write("red", run={…})`: pairs and a template in red's room, and a job file that says the same as blue's, but for
    the key.
    """
    with Vault.installed():

        def make(name: str, **changes: Any) -> str:
            store = open_run_store("vault://data", storage_of(name), single_writer=True)
            rows = [
                {"query_id": f"q{row // 3}", "query": "wool", "doc_id": f"d{row}", "document": f"{name} socks {row}"}
                for row in range(ROWS[name])
            ]
            data = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows), data)
            store.put("pairs.parquet", data.getvalue())
            template = next((BUILT_IN / "direct").glob("*.j2"))
            store.put(f"templates/{template.name}", f"Of {name}. ".encode() + template.read_bytes())
            spec = {
                "name": "socks",
                "input": {"path": "vault://data/pairs.parquet"},
                "labeler": {"name": "direct", "templates": "vault://data/templates"},
                "engine": {"name": "fake"},
                "output": "vault://data/out",
                "run": {"single_writer": True, "chunk_rows": 3},
                "storage_options": {"vault": {"key": KEYS[name]}},
            }
            file = tmp_path / f"{name}.yaml"
            file.write_text(yaml.safe_dump({**spec, **changes}))
            return str(file)

        yield make
    forget_secrets()


def test_two_jobs_of_one_process_do_not_see_each_others_storage(write: Callable[..., str]) -> None:
    sessions = {name: open_session(write(name)) for name in KEYS}
    reports = {name: label(session) for name, session in sessions.items()}
    assert {name: report.rows for name, report in reports.items()} == ROWS
    assert {report.exit for report in reports.values()} == {Exit.DONE}
    digests = {session.opened.plan.fingerprint for session in sessions.values()}
    assert len(digests) == 2
    templates = [session.opened.plan.parts["templates"] for session in sessions.values()]
    assert templates[0] != templates[1]
    for name in KEYS:
        store = open_run_store("vault://data/out", storage_of(name))
        held = b"".join(store.read(one) for one in store.etags(""))
        assert len(held) > 1000
        assert not any(key.encode() in held for key in KEYS.values())
    assert Vault.rooms.keys() == {*KEYS.values()}  # nobody asked without a key


def test_a_job_that_is_loaded_later_changes_nothing_for_an_earlier_one(write: Callable[..., str]) -> None:
    red = load_job(write("red", run={"single_writer": True, "store_retry_s": 7.0, "lease_s": 11.0}))
    blue = load_job(write("blue"))
    assert red.open_dataset().rows == ROWS["red"]
    assert blue.open_dataset().rows == ROWS["blue"]
    assert [(job.storage.retry_s, job.storage.lease_s) for job in (red, blue)] == [(7.0, 11.0), (120.0, 60.0)]
    place, storage, _ = output_of(red.where)
    assert (place, storage.options_of("vault")) == ("vault://data/out", {"key": KEYS["red"]})


def test_a_job_without_options_does_not_inherit_those_of_the_one_before(write: Callable[..., str]) -> None:
    assert load_job(write("red")).open_dataset().rows == ROWS["red"]
    with pytest.raises(ConfigError, match="holds 0 files"):
        load_job(write("red", storage_options={}))
    with pytest.raises(InputError):
        load_job(write("red", storage_options={}, labeler={"name": "direct"})).open_dataset()


def test_workers_get_the_options_of_their_job_by_a_pipe_and_show_none(write: Callable[..., str]) -> None:
    for name in KEYS:
        supervisor = Supervisor(open_session(write(name)), say=lambda _: None, on_progress=lambda: None)
        assert KEYS[name] not in str(supervisor.words())
        there = load_job(yaml.safe_load(supervisor.job()))
        assert there.storage.options_of("vault") == {"key": KEYS[name]}
        assert there.open_dataset().rows == ROWS[name]
        assert KEYS[name] not in repr(there)
