"""Latency against offered load, and the highest rate that keeps p99, or the mean, under a bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from relabel.export.bench.latency_facts import LatencyRow

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
