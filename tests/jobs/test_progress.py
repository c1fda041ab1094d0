"""What a run says of itself between two commits: what is in flight, what was refused and why, and that nothing was
accepted.
"""

import re
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from relabel.jobs.commands.status import look
from relabel.jobs.job import JobSource, load_job, open_run
from relabel.jobs.labeling import RunOptions, open_session
from relabel.jobs.run import display as display_module
from relabel.jobs.run import progress as progress_module
from relabel.jobs.run import session as sessions
from relabel.jobs.run.display import Display
from relabel.jobs.run.label import label
from relabel.jobs.run.progress import (
    FIRST_ANSWERS,
    SHOWN_CHARS,
    Live,
    LiveFile,
    MetricsFile,
    Progress,
    RefusedAnswer,
    WorkerState,
    live_states,
)
from relabel.manifests.records import plain, readable_json
from relabel.manifests.store import LocalStore


def refused(number: int, text: str = "No idea.", status: str = "format") -> RefusedAnswer:
    return RefusedAnswer(number, "verdict", 1, status, "stop", "there is no <score>", text)


def test_refused_answers_are_counted_by_reason_and_the_last_one_is_kept() -> None:
    live = Live(in_flight=3, accepted=2)
    live.count([refused(4)])
    live.count([refused(5, status="truncated")])
    assert live.answers_text() == "4 answered: 2 accepted, 2 refused (1 format, 1 truncated)"
    assert live.last_refused == refused(5, status="truncated")


def test_an_answer_that_rows_share_counts_once_and_is_accepted_if_one_could_read_it() -> None:
    live = Live()
    live.count([refused(number) for number in range(FIRST_ANSWERS)])
    assert live.answers_text() == "1 answered: 0 accepted, 1 refused (1 format)"
    assert live.warning() is None
    live.count([None, refused(5)])
    assert live.answers_text() == "2 answered: 1 accepted, 1 refused (1 format)"
    assert live.last_refused == refused(5)


def test_the_answers_of_a_run_are_those_of_its_asks(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    job = write_job({"engine": {"args": {"p_garbage": 0.3, "batch": 4}}, "labeler": {"name": "r3a"}})
    found = relabel("run", job, "--output", "json").json
    answers = found["answers"]
    assert sum(answers["refused"].values()) > 0
    assert answers["accepted"] + sum(answers["refused"].values()) == found["this_run"]["requests"]
    assert found["this_run"]["in_vain"]["requests"] == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n  \n\tI can't say.\nMore.", "I can't say."),
        ("", "(no text)"),
        ("\x1b[2J\x1b]0;title\x07gone\u202e", "\\x1b[2J\\x1b]0;title\\x07gone\\u202e"),
        ("x" * 5000, "x" * SHOWN_CHARS + "…"),
    ],
)
def test_an_answer_is_shown_by_a_line_that_no_terminal_obeys(text: str, line: str) -> None:
    assert refused(7, text).line() == f"row 7, verdict, format: there is no <score>: {line}"


def test_a_run_whose_every_answer_is_refused_says_so_once_and_shows_one(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]
) -> None:
    write_pairs()
    done = relabel("run", write_job({"engine": {"args": {"p_garbage": 1.0, "batch": 4}}, "labeler": {"name": "r3a"}}))
    assert done.code == 30
    assert done.err.count("warning: none of the first 16 answers was accepted (") == 1
    assert "The last one: row " in done.err


@pytest.mark.parametrize("verbose", [False, True])
def test_a_line_of_progress_says_slow_from_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    monkeypatch.setattr(display_module, "LINE_EVERY_S", 0.0)
    progress = Progress()
    progress.live = Live(12, 1, Counter(format=3), refused(3))
    with Display(progress, 24, shows_refused=verbose) as display:
        display.update()
    err = capsys.readouterr().err
    assert err.startswith("0 of 24 pairs · 0.000 pairs/s · 0 quarantined · 12 in flight, 4 answered: 1 accepted, ")
    assert "3 refused (3 format) · " in err
    assert " prompt + " in err
    assert ("last refused: row 3, verdict, format: there is no <score>: No idea." in err) is verbose
    assert err.endswith("ETA unknown\n")


# `relabel status --live`: what workers say of themselves is seen while they run, is gone when they end, and nothing
# depends on it.


def labels_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("out/ecom/labels/*/*"))}


@pytest.fixture
def store(folder: Path) -> LocalStore:
    return LocalStore(folder / "out/ecom")


@pytest.fixture
def planned(relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path]) -> str:
    write_pairs()
    job = write_job()
    assert relabel("plan", job).code == 0
    return job


def test_a_worker_is_seen_while_it_runs_and_leaves_nothing(
    planned: str, relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "WRITE_EVERY_S", 0.0)
    seen: list[dict[str, Any]] = []

    def look_on(self: LiveFile) -> None:
        LiveFile.update(self)
        if self._writing is not None:
            self._writing.result()
        seen.append(look(open_run(load_job(planned)).folder).as_json())

    class Followed(LiveFile):
        update = look_on

    monkeypatch.setattr("relabel.jobs.run.label.LiveFile", Followed)
    assert relabel("run", planned, "--set", "engine.args.batch=4").code == 0
    assert any(one["workers"] and one["workers"][0]["state"]["live"]["accepted"] for one in seen)
    assert all(one["is_held"] for one in seen if one["workers"])
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
    monkeypatch.setattr(progress_module, "WRITE_EVERY_S", 0.0)
    (folder / "out/ecom/live").write_text("in the way")
    done = relabel("run", planned, "--set", "engine.args.batch=4")
    assert done.code == 0
    assert done.err.count("going on without") == 1


def test_what_a_dead_worker_left_is_called_stale_and_goes_when_the_run_is_finished(
    planned: str, relabel: Callable[..., Any], store: LocalStore, folder: Path
) -> None:
    progress = Progress()
    progress.live = Live(7, 1, Counter(format=2))
    store.put(
        "live/gone-1.json",
        readable_json(plain(replace(WorkerState.now("gone-1", "e", progress), written="2026-01-01T00:00:00+00:00"))),
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


# Several workers on one run: the line of each counts what the others have committed, and its ETA is that of all.


def test_the_line_counts_the_others_and_its_eta_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of four equal workers said `249 of 1,000 pairs … ETA 300 s` with four pairs left."""
    monkeypatch.setattr(display_module, "LINE_EVERY_S", 0.0)
    progress = Progress(pairs=249)
    progress.statuses["ok"] = 249
    progress.started_s = time.perf_counter() - 100.0
    progress.rows_of_others = 747
    with Display(progress, 1000) as display:
        display.update()
    err = capsys.readouterr().err
    assert err.startswith("996 of 1,000 pairs, 747 by other workers · 2.5 pairs/s · 0 quarantined · ")
    assert err.endswith("ETA 0:00:00\n"), "four pairs at ten a second"
    progress.pairs += 5  # of a chunk that another has committed, which a pool does not know yet
    with Display(progress, 1000) as display:
        display.update()
    assert capsys.readouterr().err.startswith("1,000 of 1,000 pairs, ")


def test_a_probe_shows_its_progress_as_a_run_does(
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    relabel: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(display_module, "LINE_EVERY_S", 0.0)
    write_pairs()
    err = relabel("plan", write_job(), "--probe").err
    assert re.search(r"probe: 16 rows; .*\n(.*\n)*\d+ of 16 pairs · ", err)


def test_rows_of_a_chunk_that_a_student_still_scores_are_not_quarantined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display_module, "LINE_EVERY_S", 0.0)
    progress = Progress(pairs=2048 + 512)
    progress.statuses.update({"ok": 2040, "engine": 8})
    with Display(progress, 10_000) as display:
        display.update()
    assert "2,560 of 10,000 pairs" in (line := capsys.readouterr().err)
    assert " · 8 quarantined" in line


def test_a_worker_counts_the_shards_that_others_do_meanwhile(
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    relabel: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_pairs()
    job = write_job({"shards": 3, "engine": {"args": {"batch": 4}}})
    monkeypatch.setattr(sessions, "LIST_EVERY_S", 0.0)
    session = open_session(JobSource(job), RunOptions())
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
    assert session.progress.pairs + session.progress.rows_of_others == 24
    assert report.this_run.pairs == 16, "the end is about this call"


# `--metrics FILE`: what a collector reads, at the start, on the way and at the end.


def read(path: Path) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by metric and by labels other than `job` and `shard`, read by Prometheus's own parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
        assert family.documentation, f"{family.name} has no HELP"
        assert family.type == "gauge"
        for sample in family.samples:
            assert {"job", "shard"} <= set(sample.labels)
            rest = tuple(sorted((name, text) for name, text in sample.labels.items() if name not in ("job", "shard")))
            values = found.setdefault(sample.name, {})
            assert rest not in values, f"{sample.name}{rest} occurs twice"
            values[rest] = sample.value
    return found


def test_a_run_says_what_it_did_and_when_it_last_went_well(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path], folder: Path
) -> None:
    write_pairs()
    path, file = write_job(), folder / "relabel.prom"
    started = time.time()
    assert relabel("run", path, "--shard", "1/2", "--metrics", str(file)).code == 0
    found = read(file)
    assert found["relabel_exit_code"] == {(("reason", "done"),): 0}
    assert found["relabel_running"] == {(): 0}
    assert found["relabel_run_rows"][(("status", "ok"),)] == 12
    assert found["relabel_rows"] == {(("status", "ok"),): 12, (("status", "open"),): 12}
    assert found["relabel_run_chunks"] == {(("outcome", "committed"),): 3, (("outcome", "lost"),): 0}
    assert found["relabel_run_requests"][()] >= 12
    assert found["relabel_run_tokens"][(("kind", "output"),)] > 0
    assert found["relabel_run_engine_starts"] == {(): 1}
    assert started <= found["relabel_last_success_timestamp_seconds"][()] <= time.time()
    assert 'job="ecom",shard="1/2"' in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) & 0o044, "a collector of another user can't read it"
    assert [one.name for one in folder.iterdir() if ".tmp" in one.name] == []
    assert relabel("run", path, "--shard", "1/2", "--metrics", str(file)).code == 10
    again = read(file)
    assert again["relabel_exit_code"] == {(("reason", "nothing_to_do"),): 10}
    assert again["relabel_run_engine_starts"] == {(): 0}
    assert again["relabel_last_success_timestamp_seconds"][()] > started


def test_a_failure_keeps_the_time_of_the_last_success_and_quarantine_is_by_status(
    relabel: Callable[..., Any], write_job: Callable[..., str], write_pairs: Callable[..., Path], folder: Path
) -> None:
    write_pairs()
    path, file = write_job(), folder / "job.prom"
    assert relabel("run", path, "--shard", "0/4", "--metrics", str(file)).code == 0
    before = read(file)["relabel_last_success_timestamp_seconds"]
    assert relabel("run", path, "--set", "engine.seed=99", "--metrics", str(file)).code == 3
    assert relabel("run", path, "--set", "shards=0", "--metrics", str(file)).code == 3
    found = read(file)
    assert found["relabel_exit_code"] == {(("reason", "ConfigError"),): 3}
    assert found["relabel_last_success_timestamp_seconds"] == before
    garbage = write_job({"engine": {"args": {"p_garbage": 0.5}}, "labeler": {"attempts": 1}, "output": "out/garbage"})
    done = relabel("run", garbage, "--metrics", str(file), "--output", "json")
    assert done.code == 30
    found, share = read(file), done.json["quarantined"] / 24
    assert found["relabel_run_rows"][(("status", "format"),)] == done.json["quarantined"] > 0
    assert found["relabel_quarantine_fraction"][()] == found["relabel_run_quarantine_fraction"][()] == share
    assert found["relabel_last_success_timestamp_seconds"] == before


def test_metrics_that_can_not_be_written_are_warned_of_once_and_end_no_run(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relabel.jobs.run.progress.METRICS_EVERY_S", 0.0)
    write_pairs()
    done = relabel("run", write_job(), "--metrics", "absent/folder/m.prom")
    assert done.code == 0
    assert (
        done.err.count("--metrics absent/folder/m.prom: can't be written (No such file or directory); going on without")
        == 1
    )


def test_the_file_is_written_on_the_way_but_not_at_every_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    file = MetricsFile(str(tmp_path / "m.prom"), job="j", shard="0/2")
    file.progress = progress = Progress()
    file.update()
    assert read(tmp_path / "m.prom")["relabel_running"] == {(): 1}
    progress.pairs, progress.statuses = 3, Counter(ok=2, format=1)
    clock[0] += 14
    file.update()
    assert read(tmp_path / "m.prom")["relabel_run_rows"] == {(("status", "ok"),): 0}
    clock[0] += 2
    file.update()
    found = read(tmp_path / "m.prom")
    assert found["relabel_run_rows"] == {(("status", "ok"),): 2, (("status", "format"),): 1}
    assert found["relabel_run_seconds"] == {(): 16}
    assert "relabel_exit_code" not in found


def test_exits_with_20_that_committed_nothing_are_counted_until_one_commits(tmp_path: Path) -> None:
    """As of a server that is down, night for night: no other figure of such a run differs from a good start's."""

    def ended(code: int, reason: str = "", committed: int = 0) -> dict[str, Any]:
        file = MetricsFile(str(tmp_path / "m.prom"), job="ecom", shard="0/1")
        file.write()
        file.progress = Progress()
        file.progress.chunks_committed = committed
        file.write(code, reason)
        return read(tmp_path / "m.prom")

    counts = [ended(20, "EngineDownError")["relabel_exits_without_commit"][()] for _ in range(3)]
    assert counts == [1, 2, 3]
    assert ended(20, "EngineDownError")["relabel_exit_code"] == {(("reason", "EngineDownError"),): 20}
    assert ended(20, committed=1)["relabel_exits_without_commit"] == {(): 0}
    assert ended(20)["relabel_exits_without_commit"] == {(): 1}
    assert ended(0)["relabel_exits_without_commit"] == {(): 0}
