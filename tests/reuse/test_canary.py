"""The canary, and engines that may not be mixed: what is refused before a label is committed, and
what is reported of it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from relabel.jobs.run.canary import Drawn, compare
from relabel.jobs.run.stop import DRAIN_S, END_S
from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Request
from relabel.manifests.labels import Pair
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.store import LocalRunStore
from tests.reuse.conftest import Days, Row, rows_of

ENGINE = {"family": "fake", "version": "1", "model_digest": "m", "dtype": "", "device": "cpu"}


def changed(rows: list[Row], *numbers: int) -> list[Row]:
    return [{**row, "document": "Something else."} if number in numbers else row for number, row in enumerate(rows)]


@pytest.fixture
def other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the engine answers otherwise, under the same name: what an upgrade that nobody
    announced looks like.
    """
    draw = Fake._draw

    def drawn(self: Fake, request: Request) -> int:
        return draw(self, request) ^ 0x5DEECE66D1CE4E5B

    monkeypatch.setattr(Fake, "_draw", drawn)


@pytest.fixture
def upgraded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and from then on the engine says that it is another version."""
    facts = Fake.facts

    def upgrade() -> None:
        def newer(self: Fake) -> Any:
            found = facts(self)
            found.version = "99"
            return found

        monkeypatch.setattr(Fake, "facts", newer)

    return upgrade


def test_an_engine_that_says_the_same_passes_and_the_manifest_says_so(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    result = days.run("tuesday", changed(rows, 3), reuse=["monday"], canary=20)
    canary = result["this_run"]["canary"]
    assert (canary["rows"], canary["flips"], canary["flip_rate"], canary["mean_kl"]) == (20, 0, 0.0, 0.0)
    assert canary["low"] == 0.0 < canary["high"] < 0.2
    assert days.manifest("tuesday")["canary"] == [canary]
    assert days.asks("tuesday") == {"verdict": 1}, "what the canary asked is no label's cost"


def test_an_engine_that_says_something_else_commits_nothing_and_ends_in_5(
    days: Days, request: pytest.FixtureRequest
) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    request.getfixturevalue("other_answers")
    job = days.job("tuesday", changed(rows, 3), reuse=["monday"], canary=40)
    for _ in range(2):
        code, message = days.call("run", job)
        assert code == 5
        assert "grades flipped" in message
        assert not (days.out("tuesday") / "receipts").exists()
        assert not (days.out("tuesday") / "labels").exists()
    assert days.call("run", job, "--set", "max_flip_rate=1.0")[0] == 0
    (canary,) = days.manifest("tuesday")["canary"]
    assert canary["flip_rate"] > 0.05
    assert canary["low"] < canary["flip_rate"] < canary["high"]
    assert canary["mean_kl"] > 0


def test_nothing_to_compare_with_is_said(days: Days) -> None:
    result = days.run("monday", rows_of(2, 3), canary=20)
    assert any("nothing to compare" in remark for remark in result["remarks"])
    assert "canary" not in result["this_run"]


def test_a_resumed_run_is_compared_with_its_own_labels(days: Days, request: pytest.FixtureRequest) -> None:
    rows = rows_of(8, 5)
    job = days.job("monday", rows, canary=10)
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    request.getfixturevalue("other_answers")
    code, message = days.call("run", job)
    assert code == 5, message
    assert days.call("status", job)[1]["chunks_done"] == 2


def test_an_engine_that_passed_is_not_asked_again_in_this_output(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    job = days.job("tuesday", changed(rows, 3, 35), reuse=["monday"], canary=10)
    code, first = days.call("run", job, "--shard", "0/2")
    assert (code, first["this_run"]["canary"]["rows"]) == (0, 10)
    code, second = days.call("run", job, "--shard", "1/2")
    assert (code, "canary" in second["this_run"]) == (0, False)
    assert len(days.manifest("tuesday")["canary"]) == 1


def test_labels_from_elsewhere_are_asked_before_own_ones_that_would_hide_a_change(
    days: Days, request: pytest.FixtureRequest
) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    request.getfixturevalue("other_answers")
    today = changed(rows, *range(0, 40, 2))
    job = days.job("tuesday", today, reuse=["monday"])
    # 20 rows are there: 10 own ones by today's engine, 10 of Monday's
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    code, message = days.call("run", job, "--set", "canary=20")
    assert code == 5, message
    assert "of 20 grades flipped" in message
    assert days.call("run", job, "--set", "canary=20", "--set", "max_flip_rate=1.0")[0] == 0
    canary = days.manifest("tuesday")["canary"][-1]
    assert (canary["rows"], canary["own"]) == (20, 0)
    assert days.call("run", days.job("wednesday", changed(today, 1), reuse=["tuesday"], canary=40))[0] in (0, 5)


def test_own_labels_fill_what_those_from_elsewhere_leave(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows[:5])
    job = days.job("tuesday", rows, reuse=["monday"])
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    code, result = days.call("run", job, "--set", "canary=12")
    assert code == 0, result
    canary = result["this_run"]["canary"]
    assert (canary["rows"], canary["own"]) == (12, 7)


def test_a_canary_that_was_smaller_than_today_s_is_no_pass(days: Days) -> None:
    """Else one row, asked once, would let any number of labels be mixed."""
    rows = rows_of(8, 5)
    days.run("monday", rows)
    job = days.job("tuesday", changed(rows, 3, 35), reuse=["monday"])
    code, first = days.call("run", job, "--shard", "0/2", "--set", "canary=1")
    assert (code, first["this_run"]["canary"]["rows"]) == (0, 1)
    code, second = days.call("run", job, "--shard", "1/2", "--set", "canary=20")
    assert (code, second["this_run"]["canary"]["rows"]) == (0, 20)


def test_the_result_of_a_workers_canary_is_part_of_the_result(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    code, result = days.call(
        "run", days.job("tuesday", changed(rows, 3), reuse=["monday"], canary=20), "--workers", "2"
    )
    assert code == 0, result
    assert [result["this_run"]["canary"]] == days.manifest("tuesday")["canary"]


def test_a_worker_that_waits_for_the_canary_of_another_still_keeps_its_deadline(days: Days) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    job = days.job("tuesday", changed(rows, 3), reuse=["monday"], canary=20)
    lock = LocalRunStore(days.out("tuesday")).lock("canary", "the canary")
    lock.acquire()
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "relabel", "run", str(job), "--for", f"{DRAIN_S + END_S + 3:.0f}s"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    lock.release()
    assert done.returncode == 20, done.stderr
    assert time.monotonic() - started < DRAIN_S
    assert not (days.out("tuesday") / "receipts").exists()


@pytest.mark.parametrize(("more", "code"), [((), 20), pytest.param(("--workers", "1"), 4, marks=pytest.mark.full)])
def test_an_engine_that_hangs_at_the_canary_ends_the_run(days: Days, more: tuple[str, ...], code: int) -> None:
    rows = rows_of(4, 5)
    days.run("monday", rows)
    args = {"name": "fake", "args": {"crash": "hang", "crash_on": "socks"}}
    job = days.job("tuesday", changed(rows, 3), reuse=["monday"], canary=5, engine=args, run={"ask_timeout_s": 1.0})
    done = subprocess.run(
        [sys.executable, "-m", "relabel", "run", str(job), *more],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "ask_timeout_s" in done.stderr


@pytest.mark.parametrize(("canary", "advice"), [(0, "`canary: 200` would measure"), (5, "the canary measures")])
def test_labels_of_another_engine_are_not_taken_over_in_silence(
    days: Days, upgraded: Any, canary: int, advice: str
) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    upgraded()
    result = days.run("tuesday", changed(rows, 3), reuse=["monday"], canary=canary)
    (remark,) = [one for one in result["remarks"] if "another engine" in one]
    assert str(days.out("monday")) in remark
    assert "version: " in remark
    assert advice in remark


def test_another_engine_may_not_go_on_with_an_output(days: Days, upgraded: Any) -> None:
    rows = rows_of(8, 5)
    job = days.job("monday", rows)
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    upgraded()
    code, message = days.call("run", job)
    assert code == 5
    assert "version: " in message
    assert "99" in message
    assert days.call("status", job)[1]["chunks_done"] == 2
    assert days.call("run", job, "--set", "run.allow_mixed=true")[0] == 0
    mixed = days.manifest("monday")["mixed"]
    assert mixed["allowed"] is True
    assert len(mixed["differences"]) == 1
    assert mixed["differences"][0].startswith("version: ")


def label(grade: int, probs: list[float] | None) -> LabelRow:
    return LabelRow(0, "q", "d", "ok", grade, probs, 0.0, None, [], None, None, [], None, 1, 1, False)


def test_the_figures_by_hand() -> None:
    """Four rows: one the same, one that moved without a flip, one flip, one that reads no more."""
    pair = Pair(0, "q", "", "d", "")
    old = [label(1, [0.5, 0.5]), label(1, [0.5, 0.5]), label(0, None), label(1, [0.0, 1.0])]
    now = [
        label(1, [0.5, 0.5]),
        label(1, [0.25, 0.75]),
        label(1, None),
        QuarantineRow(0, "q", "d", "format", "", [], 1, 1),
    ]
    found = compare([Drawn(pair, one, number == 0) for number, one in enumerate(old)], list(now), ENGINE, 0.05)
    assert (found.rows, found.own, found.flips, found.unreadable, found.flip_rate) == (4, 1, 2, 1, 0.5)
    assert found.mean_kl == pytest.approx(0.143841 / 2, abs=1e-6)  # 0.5 ln 2 + 0.5 ln (2/3), and 0, over two rows
    # z = 1.96: (0.5 + 0.4802 ± 0.6861) / 1.9604
    assert (found.low, found.high) == pytest.approx((0.150039, 0.849961), abs=1e-6)
    assert not found.has_passed


def test_a_run_that_is_all_known_needs_no_time_for_an_engine(days: Days, no_engine: Any) -> None:
    rows = rows_of(2, 3)
    days.run("monday", rows)
    no_engine()
    job = days.job("tuesday", rows, reuse=["monday"], canary=20)
    assert days.call("run", job, "--for", "15s")[0] == 0
