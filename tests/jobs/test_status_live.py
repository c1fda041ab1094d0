"""`relabel status --live`: what workers say of themselves is seen while they run, is gone when they end, and nothing
depends on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.commands.status import LiveStatus, look
from relabel.jobs.job import load_job, open_run
from relabel.jobs.run import counts
from relabel.jobs.run.chunks import Live
from relabel.jobs.run.counts import LiveFile, Progress, live_states, state_of
from relabel.manifests.records import plain, readable_json
from relabel.manifests.store import LocalRunStore


def labels_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("out/ecom/labels/*/*"))}


@pytest.fixture
def store(folder: Path) -> LocalRunStore:
    return LocalRunStore(folder / "out/ecom")


@pytest.fixture
def planned(relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]) -> str:
    write_pairs()
    job = write_job()
    assert relabel("plan", job).code == 0
    return job


def test_a_worker_is_seen_while_it_runs_and_leaves_nothing(
    planned: str, relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "WRITE_EVERY_S", 0.0)
    seen: list[LiveStatus] = []

    def look_on(self: LiveFile) -> None:
        LiveFile.update(self)
        if self._writing is not None:
            self._writing.result()
        seen.append(look(open_run(load_job(planned)).folder))

    class Followed(LiveFile):
        update = look_on

    monkeypatch.setattr("relabel.jobs.run.execution.LiveFile", Followed)
    assert relabel("run", planned, "--set", "engine.args.batch=4").code == 0
    assert any(one.workers and one.workers[0].state.live.accepted for one in seen)
    assert all(one.is_held for one in seen if one.workers)
    assert list(folder.glob("out/ecom/live/*")) == []
    assert relabel("verify", "out/ecom").code == 0
    with_files = labels_of(folder)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert relabel("run", planned, "--set", "output=out/again").code == 0
    again = {path.name: path.read_bytes() for path in sorted(folder.glob("out/again/labels/*/*"))}
    assert again == with_files


def test_a_file_that_cannot_be_written_ends_no_run_and_is_said_once(
    planned: str, relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "WRITE_EVERY_S", 0.0)
    (folder / "out/ecom/live").write_text("in the way")
    done = relabel("run", planned, "--set", "engine.args.batch=4")
    assert done.code == 0
    assert done.err.count("going on without") == 1


def test_what_a_dead_worker_left_is_called_stale_and_goes_when_the_run_is_finished(
    planned: str, relabel: Callable[..., Any], store: LocalRunStore, folder: Path
) -> None:
    progress = Progress()
    progress.live = Live(7, 1, Counter(format=2))
    store.put(
        "live/gone-1.json",
        readable_json(plain(replace(state_of("gone-1", "e", progress), written="2026-01-01T00:00:00+00:00"))),
    )
    store.put("live/torn-1.json", b'{"version": 1, "wor')
    store.put("live/later-1.json", b'{"version": 99}')
    (found,) = live_states(store)
    assert (found.worker, found.is_stale, found.live) == ("gone-1", True, progress.live)
    done = relabel("status", "out/ecom", "--live")
    assert done.code == relabel("status", "out/ecom", "--live", "--output", "json").code == 20
    assert "0 of 24 rows committed" in done.out
    assert "no worker: run the same command again" in done.out
    assert "gone-1 (stale, last heard of " in done.out
    assert "7 in flight, 3 answered: 1 accepted, 2 refused (2 format)" in done.out
    assert relabel("run", planned).code == 0
    assert list(folder.glob("out/ecom/live/*")) == []


def test_the_state_as_json_is_one_object(planned: str, relabel: Callable[..., Any], store: LocalRunStore) -> None:
    store.put("live/here-1.json", readable_json(plain(state_of("here-1", "e", Progress()))))
    found = relabel("status", "out/ecom", "--live", "--output", "json").json
    assert (found["rows"], found["rows_done"], found["is_held"]) == (24, 0, True)
    assert found["workers"][0]["state"]["worker"] == "here-1"
    assert json.loads(json.dumps(found)) == found


def test_a_finished_run_is_shown_once(planned: str, relabel: Callable[..., Any]) -> None:
    assert relabel("run", planned).code == 0
    done = relabel("status", planned, "--live")
    assert (done.code, done.out.count("every chunk is committed")) == (0, 1)
