"""The canary, and engines that may not be mixed: what is refused before a label is committed, and
what is reported of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from relabel.jobs.run.canary import Drawn, compare
from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Request
from relabel.manifests.labels import Pair
from relabel.manifests.schemas import LabelRow, QuarantineRow
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
    code, message = days.call("run", job)
    assert (code, "grades flipped" in message) == (5, True)
    assert not (days.out("tuesday") / "receipts").exists()
    assert not (days.out("tuesday") / "labels").exists()
    assert days.call("run", job, "--set", "max_flip_rate=1.0")[0] == 0
    (canary,) = days.manifest("tuesday")["canary"]
    assert canary["flip_rate"] > 0.05
    assert canary["low"] < canary["flip_rate"] < canary["high"]
    assert canary["mean_kl"] > 0


def test_a_resumed_run_is_compared_with_its_own_labels(days: Days, request: pytest.FixtureRequest) -> None:
    rows = rows_of(8, 5)
    job = days.job("monday", rows, canary=10)
    assert days.call("run", job, "--shard", "0/2")[0] == 0
    request.getfixturevalue("other_answers")
    code, message = days.call("run", job)
    assert code == 5, message
    assert days.call("status", job)[1]["chunks_done"] == 2


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


def test_a_canary_that_was_smaller_than_today_s_is_no_pass(days: Days) -> None:
    """Else one row, asked once, would let any number of labels be mixed."""
    rows = rows_of(8, 5)
    days.run("monday", rows)
    job = days.job("tuesday", changed(rows, 3, 35), reuse=["monday"])
    code, first = days.call("run", job, "--shard", "0/2", "--set", "canary=1")
    assert (code, first["this_run"]["canary"]["rows"]) == (0, 1)
    code, second = days.call("run", job, "--shard", "1/2", "--set", "canary=20")
    assert (code, second["this_run"]["canary"]["rows"]) == (0, 20)


def test_labels_of_another_engine_are_not_taken_over_in_silence(days: Days, upgraded: Any) -> None:
    rows = rows_of(8, 5)
    days.run("monday", rows)
    upgraded()
    result = days.run("tuesday", changed(rows, 3), reuse=["monday"])
    (remark,) = [one for one in result["remarks"] if "another engine" in one]
    assert str(days.out("monday")) in remark
    assert "version: " in remark
    assert "`canary: 200` would measure" in remark


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
