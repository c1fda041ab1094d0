"""Several workers on one run: the line of each counts what the others have committed, and its ETA is that of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.commands.labeling import open_session
from relabel.jobs.run import progress as progress_module
from relabel.jobs.run import session as sessions
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.execution import label
from relabel.jobs.run.progress import Display


def test_the_line_counts_the_others_and_its_eta_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of four equal workers said `249 of 1,000 pairs … ETA 300 s` with four pairs left."""
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    progress = Progress(pairs=249)
    progress.statuses["ok"] = 249
    progress.started_s = time.perf_counter() - 100.0
    progress.rows_of_others = 747
    with Display(progress, 1000) as display:
        display.update()
    err = capsys.readouterr().err
    assert err.startswith("996 of 1,000 pairs, 747 by other workers · 2.5 pairs/s · 0 quarantined · ")
    assert err.endswith("ETA 0 s\n"), "four pairs at ten a second"
    progress.pairs += 5  # of a chunk that another has committed, which a pool does not know yet
    with Display(progress, 1000) as display:
        display.update()
    assert capsys.readouterr().err.startswith("1,000 of 1,000 pairs, ")


def test_what_was_committed_before_a_call_counts_so_that_all_workers_show_the_same(
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    relabel: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that came a second later wrote `of 312 pairs`, the first `of 320`."""
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


def test_a_worker_counts_the_shards_that_others_do_meanwhile(
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    relabel: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_pairs()
    job = write_job({"shards": 3, "engine": {"args": {"batch": 4}}})
    monkeypatch.setattr(sessions, "LIST_EVERY_S", 0.0)
    session = open_session(job)
    true = sessions.Session._count_others
    shown: list[int] = []

    def count(self: sessions.Session) -> None:
        if self is session:
            if not shown:
                assert relabel("run", job, "--shard", "1/3").code == 0
            true(self)
            shown.append(self.progress.rows_of_others)

    monkeypatch.setattr(sessions.Session, "_count_others", count)
    report = label(session)
    assert set(shown) == {8}
    assert session.progress.kept("pairs") + session.progress.rows_of_others == 24
    assert report.did.pairs == 16, "the end is about this call"
