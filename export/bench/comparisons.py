"""Two models side by side: they take turns on the same batch, and each round gives one ratio.

What the machine does meanwhile (a clock that drops, a neighbour that wakes) hits both turns of a round, so the ratios
say what two measurements one after the other can't. Beside the clock's ratio is the one of CPU seconds, of all
threads together, which does not count the time in which others had the processor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from relabel.export.bench.latency import Clock
from relabel.export.bench.latency_comparison import ComparedModels, ComparedPair
from relabel.export.bench.quantiles import samples_needed
from relabel.manifests.metrics.bootstrap import bootstrap

Call = Callable[[], object]
TURN_S = 0.05
"""A turn goes on about so long where there is time, so that a single hiccup does not make a ratio."""
MAX_TURN_CALLS = 64
RESAMPLES = 2000
MIN_ROUNDS, MAX_ROUNDS = 2, 200
MS = 1000.0

# N rounds


@dataclass(frozen=True)
class Ratio:
    """Our time over theirs; under 1 is faster.

    Args:
        median: of the rounds' ratios.
        low, high: ends of its 95 % bootstrap interval over rounds; None where there are too few for one
            (`samples_needed`).
        ratios: of each round.
        ours_ms, theirs_ms: median over rounds of a call's mean time.
    """

    median: float
    low: float | None
    high: float | None
    ratios: tuple[float, ...]
    ours_ms: float
    theirs_ms: float


class Turns(NamedTuple):
    """A comparison by the clock, and by the CPU time of this process; None where that clock is too coarse to have seen
    every turn.
    """

    wall: Ratio
    cpu: Ratio | None

    def compared(self, pair: ComparedPair, cell: str) -> ComparedModels:
        """As `latency.json` holds it."""
        wall, cpu = self
        return ComparedModels(
            **vars(pair),
            cell=cell,
            rounds=len(wall.ratios),
            ratio=wall.median,
            low=wall.low,
            high=wall.high,
            cpu_ratio=cpu.median if cpu else None,
            cpu_low=cpu.low if cpu else None,
            cpu_high=cpu.high if cpu else None,
            ours_ms=wall.ours_ms,
            theirs_ms=wall.theirs_ms,
            ratios=[round(ratio, 5) for ratio in wall.ratios],
        )


class Spent(NamedTuple):
    """What a call took on average: seconds of the clock, and of the CPU."""

    wall_s: float
    cpu_s: float


def take_turns(
    ours: Call,
    theirs: Call,
    *,
    rounds: int,
    seconds: float,
    limit_s: float = math.inf,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.process_time,
) -> Turns:
    """Compare two calls.

    Args:
        rounds: at least so many; more while time is left, up to `MAX_ROUNDS`.
        seconds: for all of them.
        limit_s: after so long it ends with fewer rounds, but not before the second.
    """
    start = clock()
    # the slower side sets how many calls a turn has, by the better of two, since the first one warms up
    first_s = [min(_spent(call, 1, clock, cpu_clock).wall_s for _ in range(2)) for call in (ours, theirs)]
    turn_s = min(TURN_S, seconds / (2 * rounds))
    calls = max(1, min(MAX_TURN_CALLS, int(turn_s / max(1e-9, *first_s))))
    measured: list[tuple[Spent, Spent]] = []
    while _goes_on(len(measured), clock() - start, rounds, seconds, limit_s):
        is_ours_first = len(measured) % 2 == 0
        one, other = (
            _turn(call, calls, clock, cpu_clock) for call in ((ours, theirs) if is_ours_first else (theirs, ours))
        )
        measured.append((one, other) if is_ours_first else (other, one))
    cpu = [(own.cpu_s, other.cpu_s) for own, other in measured]
    has_cpu = all(own > 0 and other > 0 for own, other in cpu)
    return Turns(ratio_of([(own.wall_s, other.wall_s) for own, other in measured]), ratio_of(cpu) if has_cpu else None)


def _goes_on(done: int, spent_s: float, rounds: int, seconds: float, limit_s: float) -> bool:
    if done < rounds:
        return done < MIN_ROUNDS or spent_s < limit_s
    return done < MAX_ROUNDS and spent_s < seconds


def ratio_of(measured: Sequence[tuple[float, float]], *, seed: int = 0) -> Ratio:
    """The median of paired ratios with its interval.

    Args:
        measured: seconds of ours and theirs, by round.
    """
    ours_N, theirs_N = np.array(measured).T
    ratio_N = ours_N / theirs_N
    order = np.argsort(ratio_N)

    def statistic(weight_RN: np.ndarray) -> dict[str, np.ndarray]:
        upto_RN = weight_RN[:, order].cumsum(1)
        half = upto_RN[:, -1:] / 2
        lower, upper = (upto_RN >= half - 1e-9).argmax(1), (upto_RN > half + 1e-9).argmax(1)
        return {"median": (ratio_N[order][lower] + ratio_N[order][upper]) / 2}

    is_enough = len(ratio_N) >= samples_needed(0.5)
    drawn = (
        bootstrap(statistic, num_groups=len(ratio_N), resamples=RESAMPLES, seed=seed).get("median")
        if is_enough
        else None
    )
    return Ratio(
        float(np.median(ratio_N)),
        drawn and drawn.low,
        drawn and drawn.high,
        tuple(ratio_N.tolist()),
        float(np.median(ours_N) * MS),
        float(np.median(theirs_N) * MS),
    )


def _turn(call: Call, calls: int, clock: Clock, cpu_clock: Clock) -> Spent:
    """What a call takes, after one that wakes its threads and fills its caches again."""
    call()
    return _spent(call, calls, clock, cpu_clock)


def _spent(call: Call, calls: int, clock: Clock, cpu_clock: Clock) -> Spent:
    start, cpu_start = clock(), cpu_clock()
    for _ in range(calls):
        call()
    return Spent((clock() - start) / calls, (cpu_clock() - cpu_start) / calls)
