"""`--until` and `--for`: which moment they mean, and that a run has ended by then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from relabel.jobs.run.stop import Deadline, choose_deadline, span_s, until_s
from relabel.manifests.errors import UsageError


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's clock is in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("06:00", "2026-11-20T01:00", "2026-11-20T05:00"),
        ("6:00", "2026-11-20T04:59:59", "2026-11-20T05:00"),
        ("06:00", "2026-11-20T05:00", "2026-11-21T05:00"),
        ("06:00", "2026-11-20T22:00", "2026-11-21T05:00"),
        ("23:30:15", "2026-11-20T22:00", "2026-11-20T22:30:15"),
        ("00:00", "2026-11-20T22:59", "2026-11-20T23:00"),
        ("06:00", "2026-07-01T01:00", "2026-07-01T04:00"),
        ("06:00", "2026-03-28T23:00", "2026-03-29T04:00"),
        ("06:00", "2026-10-24T23:00", "2026-10-25T05:00"),
        # zones that are named
        ("06:00Z", "2026-11-20T01:00", "2026-11-20T06:00"),
        ("06:00+02:00", "2026-11-20T01:00", "2026-11-20T04:00"),
        ("06:00 -0530", "2026-11-20T01:00", "2026-11-20T11:30"),
        ("06:00 America/New_York", "2026-11-20T01:00", "2026-11-20T11:00"),
        ("06:00 UTC", "2026-11-20T01:00", "2026-11-20T06:00"),
        ("2026-11-21T06:00", "2026-11-20T01:00", "2026-11-21T05:00"),
        ("2026-11-21 06:00", "2026-11-20T01:00", "2026-11-21T05:00"),
        ("2026-11-21T06:00Z", "2026-11-20T01:00", "2026-11-21T06:00"),
        ("2026-11-21T06:00-05:00", "2026-11-20T01:00", "2026-11-21T11:00"),
    ],
)
def test_a_time_of_day_is_the_next_moment_at_which_the_clock_shows_it(
    berlin: None, text: str, now: str, expected: str
) -> None:
    assert datetime.fromtimestamp(until_s(text, utc(now)), UTC) == utc(expected)


@pytest.mark.parametrize("hour", range(24))
def test_a_time_of_day_lies_ahead_and_at_most_a_day_and_an_hour_away(berlin: None, hour: int) -> None:
    for day in ("2026-03-28", "2026-03-29", "2026-10-24", "2026-10-25", "2026-12-31"):
        for now_hour in range(24):
            now = utc(f"{day}T{now_hour:02d}:30")
            assert 0 < until_s(f"{hour}:30", now) - now.timestamp() <= 25 * 3600


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "want a time of day"),
        ("6", "want a time of day"),
        ("soon", "want a time of day"),
        ("24:00", "no clock shows that"),
        ("12:60", "no clock shows that"),
        ("06:00 Mars/Olympus", "knows no zone Mars/Olympus"),
        ("06:00+99:00", "no clock shows that"),
        ("2026-11-21", "names a day and no time; write 2026-11-21T06:00"),
        ("2026-11-19T06:00", "has passed; it is now 2026-11-20T"),
        ("2026-11-20T01:00Z", "has passed"),
        ("2226-11-20T01:00Z", "more than a year"),
    ],
)
def test_a_deadline_that_is_past_or_nonsense_is_refused(berlin: None, text: str, part: str) -> None:
    with pytest.raises(UsageError) as error:
        until_s(text, utc("2026-11-20T01:00"))
    assert f"--until {text}: " in str(error.value)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1h30m5s", 5405), ("0.5h", 1800)]
)
def test_a_length_has_units(text: str, seconds: float) -> None:
    assert span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1:30", "30m1h", "-5m", "0s", "0h0m", "9999999h", "5 min", "m", "1d"])
def test_a_length_that_is_none_says_so(text: str) -> None:
    with pytest.raises(UsageError, match="--for"):
        span_s(text)


def test_of_two_deadlines_the_earlier_counts() -> None:
    now = datetime.now(UTC)
    clock = datetime.fromtimestamp(now.timestamp() + 7200, UTC).strftime("%H:%M:%SZ")
    assert choose_deadline(None, None) is None
    nearer = choose_deadline(clock, "90m")
    assert nearer is not None
    assert (nearer.text, round(nearer.left_s(), -1)) == ("--for 90m", 5400)
    nearer = choose_deadline(clock, "3h")
    assert nearer is not None
    assert (nearer.text, round(nearer.left_s(), -1)) == (f"--until {clock}", 7200)


def test_a_deadline_states_its_zone(berlin: None) -> None:
    assert (
        Deadline("--until 06:00", wall_s=utc("2026-11-21T05:00").timestamp()).shown()
        == "--until 06:00 (2026-11-21 06:00:00 +0100 CET)"
    )


def test_a_clock_that_is_set_moves_a_time_of_day_and_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    by_clock, by_length = Deadline("u", wall_s=time.time() + 100), Deadline("f", steady_s=time.perf_counter() + 100)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60)
    assert round(by_clock.left_s()) == 40
    assert round(by_length.left_s()) == 100
