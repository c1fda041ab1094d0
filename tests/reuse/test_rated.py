"""Intervals from what a model's last run told: they hold the ratio that was seen, stay within what is possible, and
shrink with what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.run.chunks import StageSeen
from relabel.jobs.run.rates import Rates, first_asks_a_row, output_tokens, prefix_hit, repeats, seconds_of
from relabel.manifests.asks import Answer
from relabel.manifests.costs import Range, StageEstimate

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=40)


def seen_of(lengths: list[int], *, repeated: int = 0, cached: int = 0) -> StageSeen:
    """Answers of these lengths, the last of them to repeated attempts."""
    seen = StageSeen()
    for number, length in enumerate(lengths):
        answer = Answer(number, "", "stop", prompt_tokens=100, cached_tokens=cached, output_tokens=length)
        seen.add(answer, is_first=number < len(lengths) - repeated)
    return seen


def rates_at(prefill: float, decode: float | None, rows: int = 10) -> Rates:
    return Rates({}, "run", "2026-11-23T17:00:00+00:00", "m", "cpu", "float32", rows, prefill, decode)


@given(LENGTHS, st.integers(1, 500), st.floats(1, 1e9))
def test_output_tokens_hold_the_mean_and_end_at_the_cap(lengths: list[int], cap: int, to_come: float) -> None:
    lengths = [min(length, cap) for length in lengths]
    low, value, high = output_tokens(seen_of(lengths), cap, to_come)
    assert 0 <= low <= value <= high <= cap
    assert value == pytest.approx(sum(lengths) / len(lengths))


def test_output_tokens_by_hand() -> None:
    """Lengths 10 and 30: mean 20, standard deviation 10; of 2 seen and 2 to come the error is 2 * 10."""
    assert output_tokens(seen_of([10, 30]), 1000, 2) == pytest.approx((0, 20, 40 * 1.2))
    assert output_tokens(seen_of([10, 30] * 200), 1000, 400)[2] < 26
    assert output_tokens(seen_of([7, 7, 7]), 1000, 3) == pytest.approx((7 / 1.2, 7, 7 * 1.2))


@given(st.integers(1, 50), st.data(), st.integers(1, 20), st.floats(1, 1e9))
def test_repeats_lie_between_none_and_all_attempts(
    first: int, data: st.DataObject, attempts: int, to_come: float
) -> None:
    repeated = data.draw(st.integers(0, first * (attempts - 1)))
    low, value, high = repeats(seen_of([1] * (first + repeated), repeated=repeated), attempts, to_come)
    assert 1 <= low <= value <= high <= attempts
    assert value == pytest.approx((first + repeated) / first)


def test_answers_that_were_never_refused_may_be_later() -> None:
    few, many = (repeats(seen_of([1] * count), 3, 1e6).high for count in (4, 400))
    assert 1 < many < 1.02 < few < 2


def test_asks_a_row_lie_between_one_and_the_most_that_there_can_be() -> None:
    rates = rates_at(1.0, None, rows=10)
    assert first_asks_a_row(seen_of([1] * 30), rates, 1.0, 7.0) == pytest.approx((3 / 1.44, 3, 3 * 1.44))
    assert first_asks_a_row(seen_of([1] * 5), rates, 1.0, 7.0)[:2] == (1, 1)
    assert first_asks_a_row(seen_of([1] * 90), rates, 1.0, 7.0)[1:] == (7, 7)


def test_a_prefix_hit_is_a_share() -> None:
    """Of each prompt as many tokens as before: 50 of 100, so a quarter of 200."""
    for cached in (0, 50, 100):
        low, value, high = prefix_hit(seen_of([1, 1], cached=cached), Range(90, 100, 120), 2)
        assert 0 <= low <= value <= high <= 1
        assert value == cached / 100
    assert prefix_hit(seen_of([1] * 9, cached=50), Range.exact(200.0), 9) == pytest.approx(
        (0.25 / 1.1, 0.25, 0.25 * 1.1)
    )


def test_few_prompts_share_less_than_many() -> None:
    """The first of two shares nothing; of many, nearly all of what the second one shared."""
    low, value, high = prefix_hit(seen_of([1, 1], cached=40), Range.exact(100.0), 1e9)
    assert (low, value, high) == pytest.approx((0.4 / 1.1, 0.8, 0.8 * 1.1))


def test_seconds_by_hand() -> None:
    """1,000 tokens that no cache holds at 100 a second, 50 written at 5: 20 s, and only the machine is in doubt."""
    stage = StageEstimate(*map(Range.exact, (10.0, 2000.0, 50.0, 0.5)))
    assert seconds_of([stage], rates_at(100, 5)) == pytest.approx((20 / 1.6, 20, 20 * 1.6))
    assert seconds_of([stage], rates_at(100, None)).value == pytest.approx(10.5)
    wider = stage.__class__(stage.asks, stage.prompt_tokens, Range(25.0, 50.0, 100.0), stage.prefix_hit)
    low, value, high = seconds_of([wider], rates_at(100, 5))
    assert low < 20 / 1.6
    assert value == pytest.approx(20)
    assert 20 * 1.6 < high < 20 * 1.6 * 1.6
    nothing = StageEstimate(*map(Range.exact, (0.0, 0.0, 0.0, 0.0)))
    assert seconds_of([nothing], rates_at(100, 5)) == Range(0.0, 0.0, 0.0)


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3), min_size=2, max_size=2), st.floats(0.01, 1e6))
def test_seconds_are_a_range_whatever_is_asked(tokens: list[tuple[float, float, float]], rate: float) -> None:
    prompt, output = (Range(*sorted(one)) for one in tokens)
    low, value, high = seconds_of(
        [StageEstimate(Range.exact(1.0), prompt, output, Range(0.2, 0.5, 0.8))], rates_at(rate, 2 * rate)
    )
    assert 0 <= low <= value <= high
