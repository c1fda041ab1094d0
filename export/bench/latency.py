"""Latency samples and their statistics: closed and open loop, quantiles with confidence intervals, and sweeps over
offered load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from relabel.export.bench.records import LatencyRow
from relabel.manifests.metrics.metric import LEVEL, bootstrap

# ------------------------------------------------------------------------------
# The closed loop: one caller asks, waits for the answer, asks again. How long an answer takes when nothing else is
# asked.
#
# A call returns when its answer lies in host memory as numpy arrays, so the device is done before the clock is read.


Clock = Callable[[], float]
"""Seconds from some fixed point, never going back."""

WARM_UP_SHARE = 0.15
"""Of a cell's time; first calls allocate, choose kernels and wake a sleeping clock."""
MAX_SAMPLES = 20_000
"""p99.9 has its interval from 3,688 on; more would cost time in the bootstrap and tell little."""


class Timed(NamedTuple):
    """What a closed loop measured.

    Args:
        latency_s: [N] seconds of each measured call, in their order.
        warm_up: calls before them.
        seconds: from the first measured call's start to the last one's end.
        cpu_s: of all threads of this process meanwhile.
    """

    latency_s: np.ndarray
    warm_up: int
    seconds: float
    cpu_s: float


def time_calls(
    call: Callable[[int], object],
    seconds: float,
    *,
    fewest: int = 1,
    max_samples: int = MAX_SAMPLES,
    clock: Clock = time.perf_counter,
) -> Timed:
    """Call again and again for a while.

    Args:
        call: receives its number, from 0 on; warm-up calls count too.
        seconds: for all of it, warm-up included.
        fewest: calls to measure, however long they take.
    """
    start = clock()
    warm_up = 0
    while warm_up == 0 or clock() - start < seconds * WARM_UP_SHARE:
        call(warm_up)
        warm_up += 1
    latencies: list[float] = []
    begun = before = clock()
    cpu_begun = time.process_time()
    while len(latencies) < fewest or (before - start < seconds and len(latencies) < max_samples):
        call(warm_up + len(latencies))
        after = clock()
        latencies.append(after - before)
        before = after
    return Timed(np.array(latencies), warm_up, before - begun, time.process_time() - cpu_begun)


# ------------------------------------------------------------------------------
# The open loop: requests come when they come, whether or not the last one is answered.
#
# A request's latency counts from the moment at which it was scheduled to arrive. A server that stalls once makes all
# wait that came meanwhile, and each of them is counted; a closed loop would ask fewer questions while the answers are
# slow, and call it fast ("coordinated omission").
#
# Arrivals are drawn before the first is served, so the server itself looks up what has come by now, and no second
# thread takes part.


# N requests


class ArrivalClock(Protocol):
    """Time, and waiting for it."""

    def now(self) -> float:
        """Seconds from some fixed point, never going back."""

    def sleep(self, seconds: float) -> None:
        """Let at least that much time pass."""


class WallClock:
    """This machine's time."""

    def now(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Batching:
    """How requests that wait together are answered together.

    Args:
        max_requests: of one batch, 1 or more.
        max_wait_s: how long the oldest waits for company; 0 takes whoever is there.
    """

    max_requests: int = 1
    max_wait_s: float = 0.0


@dataclass(frozen=True)
class OpenLoopTimes:
    """What an open loop measured.

    Args:
        latency_s: [N] seconds from scheduled arrival to answer; infinite where none came before the server was stopped.
        batches: how many batches the answers came in.
        seconds: from the first moment to the last answer.
    """

    latency_s: np.ndarray
    batches: int
    seconds: float

    @property
    def unanswered(self) -> int:
        """Requests that were still waiting at the end."""
        return int(np.isinf(self.latency_s).sum())


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Arrival times within `seconds`, float64 [N], rising: gaps are exponential with mean 1 / rate. The same seed gives
    the same times.
    """
    random = np.random.default_rng(seed)
    found = [np.empty(0)]
    upto = 0.0
    while upto < seconds:
        times = upto + random.exponential(1 / rate, size=max(16, int(rate * seconds * 1.1))).cumsum()
        found.append(times)
        upto = float(times[-1])
    times = np.concatenate(found)
    return np.asarray(times[times < seconds])


def serve(
    arrival_s: np.ndarray,
    batching: Batching,
    answer: Callable[[int, int], object],
    *,
    stop_s: float,
    clock: ArrivalClock | None = None,
) -> OpenLoopTimes:
    """Answer requests in the order of their arrival, by one server with micro-batching.

    Args:
        arrival_s: [N] scheduled times from the start, rising.
        answer: answers requests from the first number up to the second, and returns when it is done.
        stop_s: when to stop, answered or not: a queue that only grows would never end.
    """
    clock = clock or WallClock()
    done_s = np.full(len(arrival_s), np.inf)
    batches, place = 0, 0
    start = clock.now()
    now = 0.0
    while place < len(arrival_s) and now <= stop_s:
        end, wait_s = _next_batch(arrival_s, place, now, batching)
        if wait_s > 0:
            clock.sleep(wait_s)
        else:
            answer(place, end)
            done_s[place:end] = clock.now() - start
            batches, place = batches + 1, end
        now = clock.now() - start
    return OpenLoopTimes(done_s - arrival_s, batches, now)


def _next_batch(arrival_s: np.ndarray, place: int, now: float, batching: Batching) -> tuple[int, float]:
    """Where the next batch ends, and how long to wait before it is looked at again; 0 when it is to be answered now."""
    oldest = float(arrival_s[place])
    if now < oldest:
        return place, oldest - now
    ready = int(np.searchsorted(arrival_s, now, side="right"))
    full = place + batching.max_requests
    closes = oldest + batching.max_wait_s
    if ready >= full or now >= closes:
        return min(ready, full), 0.0
    fills = float(arrival_s[full - 1]) if full <= len(arrival_s) else closes
    return ready, min(closes, fills) - now


# ------------------------------------------------------------------------------
# What a set of latencies says: quantiles, mean and rate with intervals, and nothing where there are too few of them.
#
# A quantile here is the least latency that was seen and is not exceeded by that share of them (numpy's `inverted_cdf`):
# one that truly happened. It is stated only where a 95 % interval for it exists at all without assuming a distribution,
# which takes 368 latencies for p99 and 3,688 for p99.9.
#
# Latencies that follow one another are alike (a queue, a clock that drops), so the bootstrap draws blocks of
# neighbours, not single ones.


# N latencies in the order measured, R resamples, G blocks of neighbours

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
FEWEST_SAMPLES = 20
"""A closed-loop cell with fewer states no figure: a mean of three tells more of the moment than of the model."""
MAX_BLOCKS = 50
RESAMPLES = 400
MS = 1000.0


def samples_needed(share: float) -> int:
    """Fewest latencies for which a quantile may be stated.

    The largest of N values exceeds the quantile with a chance of 1 - share^N; the interval's upper end can be one of
    them only when that is at least 97.5 %. The lower end asks the same of the smallest.
    """
    return math.ceil(math.log((1 - LEVEL) / 2) / math.log(max(share, 1 - share)))


def quantile(latency_N: np.ndarray, share: float) -> float:
    """The quantile of some latencies; infinite when those that never came reach into it."""
    ordered_N = np.sort(latency_N)
    return float(ordered_N[max(0, math.ceil(share * len(ordered_N) - 1e-9) - 1)])


def summarize(latency_s: np.ndarray, *, seed: int = 0) -> dict[str, Any]:
    """Figures of latencies in the order in which they were measured.

    Args:
        latency_s: [N] seconds, one at least; infinite for a request that was never answered.
    Returns:
        `samples`; `mean_ms`, `p50_ms`, `p90_ms`, `p99_ms`, `p999_ms` each with `…_low` and `…_high`, the ends of a 95 %
        interval; `min_ms`, `max_ms`, and `cv`, standard deviation over mean. None where there are too few latencies, or
        one never came.
    """
    count = len(latency_s)
    known = {name: share for name, share in QUANTILES.items() if count >= samples_needed(share)}
    is_whole = bool(np.isfinite(latency_s).all())
    found: dict[str, Any] = {
        "samples": count,
        "mean_ms": latency_s.mean() * MS,
        "min_ms": latency_s.min() * MS,
        "max_ms": latency_s.max() * MS,
        "cv": float(latency_s.std(ddof=1) / latency_s.mean()) if count > 1 and is_whole else None,
    }
    intervals = _intervals(latency_s, known, seed=seed)
    for name in QUANTILES:
        found[f"{name}_ms"] = quantile(latency_s, QUANTILES[name]) * MS if name in known else None
    for name in ("mean", *QUANTILES):
        low, high = intervals.get(name, (math.inf, math.inf))
        found[f"{name}_low"], found[f"{name}_high"] = low * MS, high * MS
    return {name: _finite(value) for name, value in found.items()}


def _intervals(latency_s: np.ndarray, known: Mapping[str, float], *, seed: int) -> dict[str, tuple[float, float]]:
    """Ends of the intervals in seconds, by name; empty for a single latency."""
    count = len(latency_s)
    groups = min(count, MAX_BLOCKS)
    group_N = np.arange(count) * groups // count
    order = np.argsort(latency_s, kind="stable")
    sorted_N, group_of_sorted_N = latency_s[order], group_N[order]

    def statistic(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        weight_RN = weight_RG[:, group_of_sorted_N]
        upto_RN = weight_RN.cumsum(1)
        total_R1 = upto_RN[:, -1:]
        found = {name: sorted_N[(upto_RN >= share * total_R1 - 1e-9).argmax(1)] for name, share in known.items()}
        with np.errstate(invalid="ignore"):
            found["mean"] = (weight_RN * sorted_N).sum(1) / total_R1[:, 0]
        return found

    drawn = bootstrap(statistic, num_groups=groups, resamples=RESAMPLES, seed=seed, width=count)
    return {name: (one.low, one.high) for name, one in drawn.items()}


def _finite(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


# ------------------------------------------------------------------------------
# Latency against offered load, and the highest rate that keeps p99, or the mean, under a bound.


LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of the rate that full micro-batches reach with nobody waiting; past the knee nothing is to be learnt."""
FEWEST_REQUESTS = 20
"""At a rate, that there may be figures at all; a rate for which fewer fit into the time is left out."""
HALVINGS = 3
"""Rates tried between the highest that holds and the lowest that does not: brings a step of 10 % to about 1 %."""


class Bound(NamedTuple):
    """What a latency must not exceed: the mean, as papers and dashboards state it, or p99, which nearly every request
    keeps to.
    """

    figure: Literal["mean", "p99"]
    ms: float

    def value(self, point: LatencyRow) -> float | None:
        """The figure at a rate; None where too few requests came to know it."""
        return point.p99_ms if self.figure == "p99" else point.mean_ms

    def is_broken(self, point: LatencyRow) -> bool:
        """Whether a rate breaks it: by its latency, or by a queue that only grew."""
        value = self.value(point)
        return bool(point.unanswered) or (value is not None and value > self.ms)


@dataclass(frozen=True)
class HighestRate:
    """The most requests a second under a bound.

    Args:
        rate: offered requests/s; None where no rate held it, or none was measured well enough.
        mean_ms, p99_ms: at that rate, where known.
        is_at_least: no rate that was tried broke the bound, so the true one may be higher.
    """

    bound: Bound
    rate: float | None
    mean_ms: float | None
    p99_ms: float | None
    is_at_least: bool


def plan_rates(capacity: float, rates: Sequence[float]) -> list[float]:
    """Rates to try, rising: those that were named, else shares of what the model can do at most."""
    return sorted(rates) if rates else [capacity * load for load in LOADS]


def requests_each(rates: Sequence[float], seconds: float, *, more: int) -> float:
    """How many requests each rate may get: as many at a low rate, which takes longer, as at a high one, so that p99 is
    known alike.

    Args:
        seconds: for all rates together.
        more: further rates that may be tried between them.
    """
    return seconds / (sum(1 / rate for rate in rates) + more * len(rates) / sum(rates))


class SweepTime:
    """How long requests come at each rate, so that all rates together keep to their time.

    Args:
        rates, more: see `requests_each`.
        seconds: for all of them, from now on.
    """

    def __init__(
        self, rates: Sequence[float], seconds: float, *, more: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._each = requests_each(rates, max(0.0, seconds), more=more)
        self._end = clock() + seconds

    def seconds(self, rate: float) -> float:
        """For a rate: a low one between others takes longer than was planned for, and gets what is left."""
        return max(0.0, min(self._each / rate, self._end - self._clock()))


def sweep(
    measure: Callable[[float], LatencyRow | None],
    rates: Sequence[float],
    bounds: Sequence[Bound],
    *,
    halvings: int = HALVINGS,
) -> list[LatencyRow]:
    """Measure rate after rate, and closer around each bound.

    Args:
        measure: one rate; None where the time is too short for it.
        rates: rising. The sweep ends after the first whose queue only grew.
        bounds: may be none.
    Returns:
        By offered rate.
    """
    points: list[LatencyRow] = []
    for rate in rates:
        if (point := measure(rate)) is None:
            continue
        points.append(point)
        if point.unanswered:
            break
    for bound in bounds:
        for _ in range(halvings):
            gap = _gap(points, bound)
            if gap is None or (point := measure(sum(gap) / 2)) is None:
                break
            points.append(point)
            points.sort(key=_offered)
    return points


def highest_rate(points: Sequence[LatencyRow], bound: Bound) -> HighestRate:
    """The highest measured rate below the first that breaks the bound. A rate with too few requests to know neither
    holds nor breaks.
    """
    best: LatencyRow | None = None
    is_open = True
    for point in sorted(points, key=_offered):
        if bound.is_broken(point):
            is_open = False
            break
        if bound.value(point) is not None:
            best = point
    if best is None:
        return HighestRate(bound, None, None, None, is_at_least=False)
    return HighestRate(bound, best.offered_rate, best.mean_ms, best.p99_ms, is_at_least=is_open)


def _offered(point: LatencyRow) -> float:
    assert point.offered_rate is not None  # every row of an open loop has one
    return point.offered_rate


def _gap(points: Sequence[LatencyRow], bound: Bound) -> tuple[float, float] | None:
    """The highest rate that holds (0 where even the lowest breaks) and the lowest that breaks; None where none between
    would tell.
    """
    low: float | None = 0.0
    for point in points:
        if bound.is_broken(point):
            return None if low is None else (low, _offered(point))
        low = None if bound.value(point) is None else _offered(point)
    return None
