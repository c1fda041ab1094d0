"""The closed loop: one caller asks, waits for the answer, asks again. How long an answer takes when nothing else is
asked.

A call returns when its answer lies in host memory as numpy arrays, so the device is done before the clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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
