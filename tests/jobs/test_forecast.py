"""How long a run still takes: told before the first answer from the engine's own work, later from the rows that are
done, ever more narrowly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.run.rates import DoneSoFar, Expected, expected_of, left_s, left_text
from relabel.manifests.asks import NO_WORK, EngineWork
from relabel.manifests.costs import Estimate, Range, StageEstimate

EXPECTED = Expected(Range(1.0, 1.0, 1.3), Range(400.0, 500.0, 600.0), Range(10.0, 100.0, 400.0))


def width(found: Range | None) -> float:
    assert found is not None
    assert found.low <= found.value <= found.high
    return (found.high + 1) / (found.low + 1)


def test_prefills_alone_give_a_first_interval_and_decoding_and_answers_narrower_ones() -> None:
    prefilled = left_s(24, DoneSoFar(10.0, in_flight=16, work=EngineWork(10, 5_000, 10.0, 0, 0.0)), EXPECTED)
    decoded = left_s(24, DoneSoFar(20.0, in_flight=16, work=EngineWork(10, 5_000, 10.0, 1_000, 10.0)), EXPECTED)
    answered = left_s(
        24, DoneSoFar(20.0, in_flight=7, answers=9, work=EngineWork(10, 5_000, 10.0, 1_000, 10.0)), EXPECTED
    )
    assert decoded is not None
    # 24 rows of 500 tokens at 500 a second, and of 100 tokens at 100 a second, less what was run
    assert decoded.value == pytest.approx(24 + 24 - 20)
    assert width(prefilled) > width(decoded) > width(answered)


def test_the_estimate_gives_what_a_row_takes() -> None:
    stage = StageEstimate(Range(24, 24, 30), Range(6_000, 12_000, 18_000), Range(0, 240, 480), Range(0.5, 0.5, 0.5))
    rows = Range.exact(24.0)
    estimate = Estimate(24, Range.exact(0.0), rows, {"one": stage, "two": stage}, Range.exact(1.0), None, False)
    assert expected_of(estimate) == Expected(Range(2, 2, 2.5), Range(250, 500, 750), Range(0, 20, 40))
    assert expected_of(replace(estimate, rows_asked=Range.exact(0.0))) is None


@pytest.mark.parametrize("expected", [None, EXPECTED])
def test_nothing_measured_is_no_forecast(expected: Expected | None) -> None:
    assert left_s(24, DoneSoFar(9.0, in_flight=16), expected) is None


def test_without_an_estimate_the_first_row_tells() -> None:
    work = EngineWork(9, 5_000, 9.0, 10, 0.1)
    assert left_s(24, DoneSoFar(9.0, in_flight=16, work=work), None) is None
    assert left_s(24, DoneSoFar(9.0, rows=1, in_flight=15), None) is not None


def test_refused_answers_make_it_longer() -> None:
    work = EngineWork(16, 8_000, 16.0, 1_000, 10.0)
    read, unread = (left_s(240, DoneSoFar(20.0, answers=10, refused=one, work=work), EXPECTED) for one in (0, 10))
    assert read is not None
    assert unread is not None
    assert unread.value > read.value


@given(
    seconds=st.floats(0.01, 1e5),
    total=st.integers(400, 100_000),
    in_flight=st.integers(0, 64),
    knows_work=st.booleans(),
)
def test_at_an_even_pace_the_interval_shrinks_with_every_row_and_holds_the_truth(
    seconds: float, total: int, in_flight: int, knows_work: bool
) -> None:
    widths = []
    for rows in (1, 2, 5, 20, 100, 399):
        work = EngineWork(rows, rows * 100, 1.0, 0, 0.0) if knows_work else NO_WORK
        found = left_s(total, DoneSoFar(rows * seconds, rows, in_flight, rows, 0, rows * 100, work), None)
        assert found is not None
        assert found.low <= (total - rows) * seconds * (1 + 1e-9)
        assert found.high >= (total - rows) * seconds * (1 - 1e-9)
        widths.append((found.high - found.low) / found.value)
    assert widths == sorted(widths, reverse=True)


def test_rows_that_are_half_done_count_by_their_share_of_the_work() -> None:
    """Sixteen rows go side by side: the first was done after 60 s, and of the others most of the work is."""
    alone = left_s(16, DoneSoFar(60.0, 1, 15, 1, 0, 600), None)
    known = left_s(16, DoneSoFar(60.0, 1, 15, 1, 0, 600, EngineWork(16, 8_000, 30.0, 1_000, 30.0)), None)
    assert alone is not None
    assert known is not None
    assert known.value == pytest.approx(60.0)
    assert known.high < alone.high


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (None, "unknown"),
        (Range(4.0, 9.0, 20.0), "4 to 20 s"),
        (Range(61.0, 300.0, 540.0), "1.0 to 9 min"),
        (Range(3600.0, 7200.0, 9000.0), "1.0 to 2.5 h"),
        (Range(900_000.0, 950_000.0, 980_000.0), "10 to 11 d"),
        (Range(0.0, 0.0, 0.0), "0 s"),
        (Range(40.0, 300.0, 7200.0), "40 s to 2.0 h"),
    ],
)
def test_an_interval_is_told_in_one_unit(left: Range | None, text: str) -> None:
    assert left_text(left) == text
