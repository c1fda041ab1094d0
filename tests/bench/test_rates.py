"""The highest rate under a bound, on servers whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.bench.arrivals import Batching, poisson_arrivals, serve
from export.bench.quantiles import quantile
from export.bench.rate_sweeps import HALVINGS, SweepTime, highest_rate, plan_rates, requests_each, sweep
from tests.bench.test_arrivals import MadeUpClock

SERVICE_S = 0.01


def served_p99(rate: float) -> dict[str, Any]:
    """A server of fixed service time, M/D/1, looked at for four thousand requests."""
    clock = MadeUpClock()

    def answer(_first: int, _end: int) -> None:
        clock.time += SERVICE_S

    seconds = 4000 / rate
    found = serve(poisson_arrivals(rate, seconds, seed=4), Batching(), answer, stop_s=2 * seconds, clock=clock)
    p99_s = quantile(found.latency_s, 0.99)
    return {"offered_rate": rate, "p99_ms": p99_s * 1000 if np.isfinite(p99_s) else None, "unanswered": found.unanswered}


def test_the_highest_rate_of_a_known_server_is_found_to_a_few_percent() -> None:
    """p99 of M/D/1 at load 0.7 and service 10 ms is near 60 ms; the true bound is searched by brute force."""
    slo_ms = 60.0
    fine = [served_p99(rate) for rate in np.arange(50.0, 95.0, 1.0)]
    truth = next(point["offered_rate"] for point in fine if point["p99_ms"] > slo_ms)
    assert 55 < truth < 90
    found = highest_rate(sweep(served_p99, plan_rates(1 / SERVICE_S, ()), slo_ms), slo_ms)
    assert found.rate == pytest.approx(truth, rel=0.04)
    assert found.p99_ms is not None
    assert found.p99_ms <= slo_ms
    assert not found.is_at_least


def test_a_sweep_ends_after_the_first_queue_that_only_grows() -> None:
    asked: list[float] = []

    def measure(rate: float) -> dict[str, Any]:
        asked.append(rate)
        return {"offered_rate": rate, "p99_ms": 5.0 if rate < 50 else None, "unanswered": 0 if rate < 50 else 9}

    points = sweep(measure, [10.0, 40.0, 80.0, 160.0], None)
    assert asked == [10.0, 40.0, 80.0]
    assert [point["offered_rate"] for point in points] == asked


CURVES = st.lists(st.tuples(st.floats(1, 1e4), st.one_of(st.none(), st.floats(0.1, 1e3)), st.integers(0, 2)), min_size=1, max_size=12)


@given(CURVES, st.floats(0.1, 1e3))
def test_the_highest_rate_holds_the_bound_and_no_lower_one_broke_it(curve: list[Any], slo_ms: float) -> None:
    points = [{"offered_rate": rate, "p99_ms": None if unanswered else p99, "unanswered": unanswered} for rate, p99, unanswered in curve]
    found = highest_rate(points, slo_ms)
    breaking = [point["offered_rate"] for point in points if point["unanswered"] or (point["p99_ms"] or 0) > slo_ms]
    if found.rate is not None:
        assert found.p99_ms is not None
        assert found.p99_ms <= slo_ms
        assert all(found.rate <= rate for rate in breaking)
    assert found.is_at_least == (found.rate is not None and not breaking)


@given(st.floats(1, 1000), st.floats(1, 1000))
def test_rates_around_the_bound_close_in_on_it(edge: float, slo_ms: float) -> None:
    """A server that holds the bound below some rate and breaks it above."""

    def measure(rate: float) -> dict[str, Any]:
        return {"offered_rate": rate, "p99_ms": slo_ms / 2 if rate <= edge else slo_ms * 2, "unanswered": 0}

    rates = plan_rates(1000.0, ())
    points = sweep(measure, rates, slo_ms)
    assert [point["offered_rate"] for point in points] == sorted(point["offered_rate"] for point in points)
    found = highest_rate(points, slo_ms).rate
    if edge < rates[0] / 2**HALVINGS:
        assert found is None
    else:
        assert found is not None
        assert found <= edge
        assert edge >= rates[-1] or edge - found <= 200 / 2**HALVINGS + 1e-6


def test_rates_that_were_named_are_the_ones_tried_in_rising_order() -> None:
    assert plan_rates(100.0, (30.0, 10.0)) == [10.0, 30.0]
    assert plan_rates(100.0, ())[-1] == 100.0


@given(st.floats(0.1, 1000), st.lists(st.floats(0.01, 500), max_size=4, unique=True), st.floats(0, 200), st.sampled_from([None, 5.0]))
def test_a_sweep_keeps_to_its_time_though_its_lowest_rate_breaks_the_bound(
    capacity: float, named: list[float], seconds: float, slo_ms: float | None
) -> None:
    """The bound is missed everywhere, so lower and lower rates are tried, each of them longer."""
    rates = plan_rates(capacity, named)
    clock = MadeUpClock()
    time_left = SweepTime(rates, seconds, more=HALVINGS if slo_ms else 0, clock=clock.now)

    def measure(rate: float) -> dict[str, Any]:
        clock.time += time_left.seconds(rate)
        return {"offered_rate": rate, "p99_ms": 99.0, "unanswered": 0}

    points = sweep(measure, rates, slo_ms, is_spent=time_left.is_spent)
    assert clock.time <= seconds * (1 + 1e-9)
    assert {point["offered_rate"] for point in points} >= set(rates)


def test_no_rate_between_others_is_tried_once_the_time_is_spent() -> None:
    def measure(rate: float) -> dict[str, Any]:
        return {"offered_rate": rate, "p99_ms": rate, "unanswered": 0}

    assert len(sweep(measure, [10.0, 40.0], 20.0)) == 2 + HALVINGS
    assert [point["offered_rate"] for point in sweep(measure, [10.0, 40.0], 20.0, is_spent=lambda: True)] == [10.0, 40.0]


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=9), st.floats(0.1, 1000), st.integers(0, 3))
def test_all_rates_together_take_the_time_that_there_is(rates: list[float], seconds: float, more: int) -> None:
    each = requests_each(rates, seconds, more=more)
    mean = sum(rates) / len(rates)
    assert sum(each / rate for rate in [*rates, *[mean] * more]) == pytest.approx(seconds)
