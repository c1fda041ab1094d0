"""`--metrics FILE`: what a collector reads, at the start, on the way and at the end."""

from __future__ import annotations

import stat
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from relabel.jobs.run.counts import Progress
from relabel.jobs.run.progress import MetricsFile


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
    monkeypatch.setattr("relabel.jobs.run.progress.WRITE_EVERY_S", 0.0)
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
