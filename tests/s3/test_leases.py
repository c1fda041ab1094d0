"""Leases on a real server: one holder, dead by the server's own dates, taken over on condition; a sleeper that wakes
harms nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relabel.manifests.errors import LockHeldError, StoreError
from relabel.manifests.store import ObjectRunStore
from tests import seaweed
from tests.s3.conftest import Outcome, command, labels

DEAD_S = 5.0
"""A lease of three seconds is dead by then: the server's dates are whole seconds."""


def test_a_live_lease_is_refused_and_a_dead_one_taken_over_with_the_next_epoch(
    open_fresh: Callable[..., ObjectRunStore],
) -> None:
    first = open_fresh(lease_s=3).lock("shard-00000", "shard 0")
    first.acquire()
    second = open_fresh(lease_s=3).lock("shard-00000", "shard 0")
    with pytest.raises(LockHeldError, match="shard 0 is being worked on"):
        second.acquire()
    time.sleep(DEAD_S)
    with pytest.raises(LockHeldError):  # its holder lives, and renews it
        second.acquire()
    first._keeper.remove(first)  # as if its process slept
    time.sleep(DEAD_S)
    second.acquire()
    assert (first.epoch, second.epoch) == (1, 2)
    first.renew()
    assert first.is_lost
    assert not second.is_lost
    first.release()
    assert second.is_alive()
    second.release()
    assert not second.is_alive()


def test_of_many_takers_one_gets_the_lease(open_fresh: Callable[..., ObjectRunStore]) -> None:
    store = open_fresh(lease_s=3)
    takers = [store.lock("shard-00000", "shard 0") for _ in range(8)]

    def took(number: int) -> bool:
        with contextlib.suppress(LockHeldError):
            takers[number].acquire()
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(took, range(8)))
    assert sum(won) == 1
    takers[won.index(True)].release()


def test_of_many_creators_one_wins(open_fresh: Callable[..., ObjectRunStore]) -> None:
    store = open_fresh()
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: store.create("receipts/a.json", b"%d" % number), range(16)))
    assert sum(won) == 1
    assert store.read("receipts/a.json") == b"%d" % won.index(True)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_worker_whose_clock_is_an_hour_off_neither_breaks_a_live_lease_nor_waits_for_a_dead_one(
    open_fresh: Callable[..., ObjectRunStore], monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The clock of this process is moved where it is asked for; requests are signed by the true one, or the server
    would refuse them.
    """
    true = time.time

    def moved() -> float:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return true() + (hours * 3600.0 if asks.startswith(("manifests", "jobs")) else 0.0)

    monkeypatch.setattr(time, "time", moved)
    first = open_fresh(lease_s=3).lock("shard-00000", "shard 0")
    first.acquire()
    second = open_fresh(lease_s=3).lock("shard-00000", "shard 0")
    with pytest.raises(LockHeldError):
        second.acquire()
    first._keeper.remove(first)
    time.sleep(DEAD_S)
    second.acquire()
    assert second.epoch == 2
    second.release()


def test_an_object_that_is_no_lease_is_reported(open_fresh: Callable[..., ObjectRunStore]) -> None:
    store = open_fresh()
    store.put("leases/shard-00000.json", b"{}")
    with pytest.raises(StoreError, match="not a lease"):
        store.lock("shard-00000", "shard 0").acquire()


@pytest.mark.full
def test_a_cron_tick_that_meets_a_live_lease_ends_at_once_and_a_sleeper_that_wakes_replaces_doubles_and_loses_nothing(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, open_fresh: Callable[..., ObjectRunStore]
) -> None:
    """The first worker is stopped in mid-run, and woken when the second has taken over, labelled
    everything and gone.
    """
    undisturbed = write_job({"output": f"{s3}/undisturbed", "shards": 1}, name="undisturbed.yaml")
    assert relabel("run", undisturbed).returncode == 0
    job = write_job({"run": {"lease_s": 3}, "shards": 1}, args={"p_slow": 1.0, "slow_s": 0.3, "capacity": 2})
    quick = write_job({"run": {"lease_s": 3}, "shards": 1}, name="quick.yaml")
    store = open_fresh()
    sleeper = subprocess.Popen(
        command("run", job, "--shard", "0/1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60.0
        while not store.etags("receipts") and time.monotonic() < deadline and sleeper.poll() is None:
            time.sleep(0.05)
        started = time.perf_counter()
        met = relabel("run", quick, "--shard", "0/1")
        assert met.returncode == 75, met.stderr
        assert time.perf_counter() - started < 15.0
        os.kill(sleeper.pid, signal.SIGSTOP)
        time.sleep(DEAD_S)
        before = store.etags("receipts")
        assert 0 < len(before) < 10
        took_over = relabel("run", quick, "--shard", "0/1")
        assert took_over.returncode == 0, took_over.stderr
        receipts = store.etags("receipts")
        os.kill(sleeper.pid, signal.SIGCONT)
        out, err = sleeper.communicate(timeout=60)
        assert sleeper.returncode in (0, 10), err
    finally:
        sleeper.kill()
        sleeper.communicate()
    assert json.loads(out)["this_run"]["chunks_committed"] <= len(before)
    assert store.etags("receipts") == receipts
    epochs = {name: json.loads(store.read(name))["epoch"] for name in receipts}
    assert {epoch for name, epoch in epochs.items() if name in before} == {1}
    assert {epoch for name, epoch in epochs.items() if name not in before} <= {1, 2}
    assert 2 in epochs.values()
    assert labels(f"{s3}/out") == labels(f"{s3}/undisturbed")
    assert relabel("verify", job).returncode == 0


def test_status_says_a_shard_under_way(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], open_fresh: Callable[..., ObjectRunStore]
) -> None:
    job = write_job()
    assert relabel("plan", job).returncode == 0
    held = open_fresh().lock("shard-00001", "shard 1")
    held.acquire()
    states = {shard["shard"]: shard["state"] for shard in json.loads(relabel("status", job).stdout)["shards"]}
    assert states == {0: "open", 1: "running", 2: "open"}
    held.release()
    states = {shard["shard"]: shard["state"] for shard in json.loads(relabel("status", job).stdout)["shards"]}
    assert states == {0: "open", 1: "open", 2: "open"}


def test_a_manifest_lock_is_waited_for_and_the_last_one_writes_the_truth(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str
) -> None:
    job = write_job(args={"p_garbage": 0.6})
    assert relabel("run", job).returncode == 0
    workers = [
        subprocess.Popen(
            command("retry", job, "--shard", f"{number}/3"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    said = [worker.communicate(timeout=90)[1] for worker in workers]
    assert {worker.returncode for worker in workers} <= {0, 10}, said
    assert relabel("verify", job).returncode == 0
    assert seaweed.BUCKET in s3
