"""What a set of latencies says: quantiles, mean and rate with intervals, and nothing where there are too few of them.

A quantile here is the least latency that was seen and is not exceeded by that share of them (numpy's `inverted_cdf`):
one that truly happened. It is stated only where a 95 % interval for it exists at all without assuming a distribution,
which takes 368 latencies for p99 and 3,688 for p99.9.

Latencies that follow one another are alike (a queue, a clock that drops), so the bootstrap draws blocks of neighbours,
not single ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from relabel.manifests.metrics.bootstrap import LEVEL, bootstrap

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
