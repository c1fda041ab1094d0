"""The open loop on a clock made up here: what a request waits for counts, however the server amounted to be late."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.export.bench import poisson_arrivals, serve


class MadeUpClock:
    """Time that passes only when somebody sleeps or works."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.time = max(self.time + seconds, float(np.nextafter(self.time, np.inf)))  # time never stops


def served(
    arrival_s: np.ndarray,
    service_s: float,
    *,
    max_requests: int = 1,
    max_wait_s: float = 0.0,
    stall_at: int = -1,
    stall_s: float = 0.0,
    stop_s: float = 1e9,
) -> tuple[np.ndarray, int, float]:
    """A server that takes as long for any batch, and stalls once."""
    clock = MadeUpClock()

    def answer(first: int, end: int) -> None:
        assert first < end
        clock.time += service_s + (stall_s if first <= stall_at < end else 0.0)

    return serve(
        arrival_s,
        answer,
        max_requests=max_requests,
        max_wait_s=max_wait_s,
        stop_s=stop_s,
        clock=clock.now,
        sleep=clock.sleep,
    )


def test_arrivals_are_poisson_and_of_the_rate_that_was_asked_for() -> None:
    rate, seconds = 200.0, 200.0
    times = poisson_arrivals(rate, seconds, seed=3)
    assert len(times) == pytest.approx(40_000, abs=4 * np.sqrt(40_000))
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert times[-1] < seconds
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # an exponential's own mark
    in_second = np.bincount((times / seconds * 400).astype(int), minlength=400)
    assert in_second.var() == pytest.approx(in_second.mean(), rel=0.3)  # and a Poisson count's


@given(st.floats(0.01, 500), st.floats(0.01, 3), st.integers(0, 5))
def test_the_same_seed_gives_the_same_arrivals(rate: float, seconds: float, seed: int) -> None:
    assert (poisson_arrivals(rate, seconds, seed=seed) == poisson_arrivals(rate, seconds, seed=seed)).all()


def test_a_stall_is_counted_for_everyone_who_came_meanwhile() -> None:
    """100 requests a second, 1 ms each, and one stall of a second: about a hundred wait, the last of them hardly at
    all.
    """
    arrival_s = np.arange(2000) / 100
    latency_s, _, _ = served(arrival_s, 0.001, stall_at=500, stall_s=1.0)
    late = latency_s > 0.0015
    assert 100 <= late.sum() <= 120
    assert np.quantile(latency_s, 0.99, method="inverted_cdf") > 0.7
    expected = np.maximum(1.001 - 0.01 * np.arange(50), 0.001) + 0.001 * np.arange(50)
    np.testing.assert_allclose(latency_s[500:550], expected, atol=1e-9)


def test_requests_that_wait_together_are_answered_together() -> None:
    arrival_s = np.array([0.0, 0.001, 0.002, 0.003, 0.5, 0.9, 0.901])
    latency_s, batches, _ = served(arrival_s, 0.1, max_requests=3, max_wait_s=0.01)
    # the first three fill a batch at 2 ms; the fourth is overdue once that is done; the fifth waits for nobody; the
    # last two share one
    np.testing.assert_allclose(latency_s, [0.102, 0.101, 0.1, 0.199, 0.11, 0.11, 0.109], atol=1e-9)
    assert batches == 4


@given(
    st.lists(st.floats(0, 2), min_size=1, max_size=60),
    st.integers(1, 8),
    st.floats(0, 0.2),
    st.floats(0.001, 0.1),
)
def test_every_request_is_answered_once_in_order_and_never_before_it_came(
    times: list[float], most: int, wait_s: float, service_s: float
) -> None:
    arrival_s = np.sort(np.array(times))
    clock = MadeUpClock()
    asked: list[int] = []

    def answer(first: int, end: int) -> None:
        assert end - first <= most
        assert arrival_s[end - 1] <= clock.time + 1e-9
        asked.extend(range(first, end))
        clock.time += service_s

    latency_s, _, _ = serve(
        arrival_s,
        answer,
        max_requests=most,
        max_wait_s=wait_s,
        stop_s=1e9,
        clock=clock.now,
        sleep=clock.sleep,
    )
    assert asked == list(range(len(arrival_s)))
    assert (latency_s >= service_s - 1e-9).all()
    assert np.isfinite(latency_s).all()
    if most > 1 and len(arrival_s) == 1:
        assert latency_s[0] <= wait_s + service_s + 1e-9


def test_a_queue_that_only_grows_is_stopped_and_its_waiting_requests_counted() -> None:
    arrival_s = np.arange(1000) / 100
    latency_s, _, seconds = served(arrival_s, 0.05, stop_s=20.0)
    assert 20.0 < seconds <= 20.05 + 1e-6
    assert np.isinf(latency_s).sum() in (599, 600)  # one more or fewer by the last bit of a sum
