"""The open loop: requests come when they come, whether or not the last one is answered.

A request's latency counts from the moment at which it was scheduled to arrive. A server that stalls once makes all wait
that came meanwhile, and each of them is counted; a closed loop would ask fewer questions while the answers are slow,
and call it fast ("coordinated omission").

Arrivals are drawn before the first is served, so the server itself looks up what has come by now, and no second thread
takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# N requests


class Clock(Protocol):
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
    clock: Clock | None = None,
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
