"""The highest rate under a bound, on servers whose answer is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.export.bench import (
    LOADS,
    LatencyRow,
    highest_rate,
    poisson_arrivals,
    serve,
    sweep,
)
from tests.bench.made_up import latency_row
from tests.bench.test_arrivals import MadeUpClock

SERVICE_S = 0.01


def point(
    rate: float, p99_ms: float | None, unanswered: int = 0, *, mean_ms: float | None = None, samples: int = 400
) -> LatencyRow:
    return latency_row(
        offered_rate=rate,
        mean_ms=mean_ms,
        p99_ms=p99_ms,
        unanswered=unanswered,
        samples=samples,
    )


def offered(points: Sequence[LatencyRow]) -> list[float]:
    return [point.rate for point in points]


def served(rate: float) -> LatencyRow:
    """A server of fixed service time, M/D/1, observed for four thousand requests."""
    clock = MadeUpClock()

    def answer(_first: int, _end: int) -> None:
        clock.time += SERVICE_S

    seconds = 4000 / rate
    latency_s, _, _ = serve(
        poisson_arrivals(rate, seconds, seed=4), answer, stop_s=2 * seconds, clock=clock.now, sleep=clock.sleep
    )
    p99_s, mean_s = np.quantile(latency_s, 0.99, method="inverted_cdf"), latency_s.mean()
    known = [value * 1000 if np.isfinite(value) else None for value in (p99_s, mean_s)]
    return point(rate, known[0], int(np.isinf(latency_s).sum()), mean_ms=known[1], samples=len(latency_s))


def test_the_mean_has_a_highest_rate_of_its_own_which_queueing_theory_gives() -> None:
    """M/D/1: mean = s + s·ρ / (2(1-ρ)). 20 ms at service 10 ms is ρ = 2/3, 66.7 requests/s; p99 is far above 20 ms
    there.
    """
    bounds = [("mean", 20.0), ("p99", 20.0)]
    points = sweep(served, [load / SERVICE_S for load in LOADS], bounds)
    by_mean, by_p99 = (highest_rate(points, bound) for bound in bounds)
    assert by_mean.highest_rate == pytest.approx(66.7, rel=0.05)
    assert by_mean.mean_ms is not None
    assert by_mean.mean_ms <= 20.0
    assert by_mean.p99_ms is not None
    assert by_mean.p99_ms > 20.0
    assert by_p99.highest_rate is not None
    assert by_p99.highest_rate < 50


def test_a_sweep_ends_after_the_first_queue_that_only_grows() -> None:
    asked: list[float] = []

    def measure(rate: float) -> LatencyRow:
        asked.append(rate)
        return point(rate, 5.0 if rate < 50 else None, 0 if rate < 50 else 9)

    points = sweep(measure, [10.0, 40.0, 80.0, 160.0], [])
    assert asked == [10.0, 40.0, 80.0]
    assert offered(points) == asked


CURVES = st.lists(
    st.tuples(st.floats(1, 1e4), st.one_of(st.none(), st.floats(0.1, 1e3)), st.integers(0, 2)), min_size=1, max_size=12
)


@given(CURVES, st.floats(0.1, 1e3), st.sampled_from(["mean", "p99"]))
def test_the_highest_rate_holds_the_bound_and_no_lower_one_broke_it(
    curve: list[Any], slo_ms: float, figure: Any
) -> None:
    values = [(rate, None if unanswered else value, unanswered) for rate, value, unanswered in curve]
    points = [
        point(rate, value, lost) if figure == "p99" else point(rate, None, lost, mean_ms=value)
        for rate, value, lost in values
    ]
    found = highest_rate(points, (figure, slo_ms))
    breaking = [rate for rate, value, lost in values if lost or (value or 0) > slo_ms]
    if found.highest_rate is not None:
        value = found.p99_ms if figure == "p99" else found.mean_ms
        assert value is not None
        assert value <= slo_ms
        assert all(found.highest_rate <= rate for rate in breaking)
    assert found.is_at_least == (found.highest_rate is not None and not breaking)
