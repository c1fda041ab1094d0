"""Several workers at one run: the line of each counts what the others have committed, once, and its ETA takes their
pace into account.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.commands.labeling import open_session
from relabel.jobs.run import progress as progress_module
from relabel.jobs.run import session as sessions
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import Others, Progress
from relabel.jobs.run.execution import label
from relabel.jobs.run.progress import Display
from relabel.manifests.labels import Pair
from relabel.manifests.receipts import ChunkId

THEIRS = ("shard-00000/chunk-000002.json", "shard-00001/chunk-000001.json")


@pytest.fixture
def job_done_elsewhere(
    write_pairs: Callable[..., Path], write_job: Callable[..., str], relabel: Callable[..., Any]
) -> Callable[..., str]:
    """`job_done_elsewhere(batch=4)`: a job of two shards that is planned, and done in `out/other`: see `_take_over`."""

    def make(**args: Any) -> str:
        write_pairs()
        job = write_job({"shards": 2, "engine": {"args": args}})
        assert relabel("plan", job).code == 0
        assert relabel("run", job, "--set", "output=out/other").code == 0
        return job

    return make


def chunks(rows: dict[int, int]) -> dict[ChunkId, int]:
    return {ChunkId(0, chunk): count for chunk, count in rows.items()}


def begun(number: int, rows: int = 4) -> ChunkWork:
    return ChunkWork(ChunkId(0, number), [Pair(row, "q", "shoe", "d", "a shoe") for row in range(rows)])


def test_a_chunk_counts_once_whoever_commits_it() -> None:
    progress = Progress()
    first, second = begun(0), begun(1)
    for work in (first, second):
        progress.others.begins(work.id)
        progress.pairs += len(work.pairs)
    progress.others.saw(0, chunks({0: 4, 5: 3}))
    assert (progress.kept("pairs"), progress.others.rows) == (8, 3), "chunk 0 is ours, or counts once it is lost"
    progress.lose(second)
    assert (progress.kept("pairs"), progress.others.rows) == (4, 7)
    progress.others.saw(0, chunks({0: 4, 1: 4, 5: 3}))
    assert (progress.kept("pairs"), progress.others.rows) == (4, 7)
    progress.others.saw(1, {ChunkId(1, 0): 2})
    assert progress.others.rows == 9


def test_the_line_counts_the_others_and_its_eta_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of four equal workers said `249 of 1,000 pairs … ETA 300 s` with four pairs left."""
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    progress = Progress(pairs=249)
    progress.statuses["ok"] = 249
    progress.started_s = time.perf_counter() - 100.0
    progress.others.saw(0, chunks(dict.fromkeys(range(249), 3)))
    with Display(progress, 1000) as display:
        display.update()
    err = capsys.readouterr().err
    assert err.startswith("996 of 1,000 pairs, 747 by other workers · 2.5 pairs/s · 0 quarantined · ")
    assert err.endswith("ETA 0 s\n"), "four pairs at ten a second"
    progress.pairs += 5  # of a chunk that another has committed, which a pool does not know yet
    with Display(progress, 1000) as display:
        display.update()
    assert capsys.readouterr().err.startswith("1,000 of 1,000 pairs, ")


def test_what_was_committed_before_a_call_counts_so_that_all_workers_say_the_same(
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    relabel: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that came a second later said `of 312 pairs` beside one that said `of 320`."""
    write_pairs()
    job = write_job({"shards": 2, "engine": {"args": {"batch": 4}}})
    assert relabel("run", job, "--shard", "0/2").code == 0
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    done = relabel("run", job)
    lines = [line for line in done.err.splitlines() if " pairs · " in line]
    assert lines
    assert all(" of 24 pairs · " in line for line in lines)
    assert lines[-1].startswith("24 of 24 ")
    assert "12 pairs in" in done.out, "the end is about this call"
    mine = relabel("run", write_job({"shards": 2, "output": "out/mine"}), "--shard", "1/2").err
    assert " of 12 pairs · " in mine, "the shards that it is at"


def test_a_worker_learns_of_the_others_from_the_listings_that_it_makes_anyway(
    folder: Path, job_done_elsewhere: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's receipts of both shards appear once the first chunk is begun."""
    job = job_done_elsewhere()
    monkeypatch.setattr(sessions, "LIST_EVERY_S", -1.0)
    monkeypatch.setattr(sessions, "LIST_ALL_EVERY_S", -1.0)
    true = sessions.Session._begin
    shown: list[tuple[int, int]] = []

    def begin(self: sessions.Session, chunk: ChunkId, pairs: Any, settled: Any) -> ChunkWork:
        for name in THEIRS:
            _take_over(folder, name)
        shown.append((self.progress.kept("pairs"), self.progress.others.rows))
        return true(self, chunk, pairs, settled)

    monkeypatch.setattr(sessions.Session, "_begin", begin)
    session = open_session(job)
    total = session.left.rows_to_ask()
    report = label(session)
    assert total == session.progress.kept("pairs") + session.progress.others.rows == 24
    assert session.progress.others.rows == 8
    assert shown[1][1] == 8, "the second look, of both shards"
    assert report.did.pairs == 16, "the end is about this call"


def _take_over(folder: Path, name: str) -> None:
    """Copy a chunk of the other output here, its receipt last."""
    mine, other = folder / "out/ecom", folder / "out/other"
    receipt = json.loads((other / "receipts" / name).read_bytes())
    for kind in ("labels", "quarantine", "answers"):
        if (file := receipt.get(kind)) is not None:
            (mine / file["path"]).parent.mkdir(parents=True, exist_ok=True)
            (mine / file["path"]).write_bytes((other / file["path"]).read_bytes())
    (mine / "receipts" / name).parent.mkdir(parents=True, exist_ok=True)
    (mine / "receipts" / name).write_bytes((other / "receipts" / name).read_bytes())


def test_rows_that_are_surely_of_other_commands_never_become_fewer() -> None:
    others = Others()
    for seen, rows in ((-8, 0), (4, 4), (2, 4), (8, 8), (-4, 8)):
        others.saw_in_all(seen)
        assert others.rows == rows
