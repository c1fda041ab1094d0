"""Open-loop sweeps of one model: latency of requests that come by a Poisson process, against how many come."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from export.bench.arrivals import Batching, poisson_arrivals, serve
from export.bench.latency import time_calls
from export.bench.plans import SWEEP_WEIGHT
from export.bench.quantiles import MS, summarize
from export.bench.rate_sweeps import HALVINGS, Bound, HighestRate, Point, SweepTime, highest_rate, plan_rates, sweep
from export.bench.runners import Runner
from export.bench.settings import Answer, Setting, spoken_latency
from export.bench.specs import BenchSpec, Preset
from export.bench.workloads import SERVING_DOCUMENTS, SERVING_MS

CAPACITY_SHARE = 0.08
"""Of a sweep's time: to find what full micro-batches reach."""
WARM_UP_SHARE = 0.1
"""Of an open loop's time: requests that came while the queue was still empty from the start."""


def sweeps_of(spec: BenchSpec) -> list[Preset]:
    """Presets that have an open loop."""
    return [preset for preset in spec.presets if preset != "table3"]


def bounds_of(spec: BenchSpec, preset: Preset) -> list[Bound]:
    """For which the highest rate is sought. `serving` bounds the mean, which is what R3A states, and p99 beside it."""
    if preset == "serving":
        ms = SERVING_MS if spec.slo_ms is None else spec.slo_ms
        return [Bound("mean", ms), Bound("p99", ms)]
    return [] if spec.slo_ms is None else [Bound("p99", spec.slo_ms)]


def measure_sweep(setting: Setting, run: Runner, preset: Preset, blank: dict[str, Any]) -> dict[str, Any]:
    """Measure capacity first, then rate after rate.

    Args:
        blank: what all rows of this model have in common.
    Returns:
        `rows` by offered rate, `capacity_per_s` (requests/s of full micro-batches with nobody waiting), and `slo`, one
        for each bound.
    """
    spec = setting.spec
    rows = SERVING_DOCUMENTS if preset == "serving" else 1
    bounds = bounds_of(spec, preset)
    requests = max(1, spec.max_batch // rows)
    answer = setting.server(run, setting.workload)
    share_s = setting.budget.share(SWEEP_WEIGHT)
    start = time.perf_counter()
    full = time_calls(
        lambda number: answer(number * requests * rows, (number + 1) * requests * rows), share_s * CAPACITY_SHARE
    )
    batch_s = float(np.median(full.latency_s))
    rates = plan_rates(requests / batch_s, spec.rates)
    time_left = SweepTime(rates, share_s - (time.perf_counter() - start), more=HALVINGS * len(bounds))
    about = blank | {"preset": preset, "loop": "open", "cell": f"open-{preset}", "scope": setting.scope, "rows": rows}
    about |= {"max_batch": requests * rows, "max_wait_ms": spec.max_wait_ms}

    def measure(rate: float) -> Point:
        point = about | measure_rate(
            spec, answer, rate, time_left.seconds(rate), rows=rows, requests=requests, batch_s=batch_s
        )
        setting.say(
            f"{blank['provider']} {blank['precision']} {point['cell']} at {rate:,.1f}/s: {spoken_latency(point)}"
        )
        return point

    points = sweep(measure, rates, bounds, is_spent=time_left.is_spent)
    setting.budget.spend(time.perf_counter() - start)
    slo = [_slo(preset, highest_rate(points, bound)) for bound in bounds]
    return {"rows": points, "capacity_per_s": requests / batch_s, "slo": slo}


def _slo(preset: Preset, best: HighestRate) -> dict[str, Any]:
    """As `latency.json` holds it."""
    return {
        "preset": preset,
        "figure": best.bound.figure,
        "slo_ms": best.bound.ms,
        "highest_rate": best.rate,
        "mean_ms": best.mean_ms,
        "p99_ms": best.p99_ms,
        "is_at_least": best.is_at_least,
    }


def measure_rate(
    spec: BenchSpec, answer: Answer, rate: float, seconds: float, *, rows: int, requests: int, batch_s: float
) -> Point:
    """Offer requests at one rate for a while.

    Args:
        seconds: for which requests come; where that is too short for any, there is one all the same.
        rows: pairs of a request.
        requests: of a micro-batch, at most.
        batch_s: what a full one takes.
    """
    arrival_s = poisson_arrivals(rate, seconds, seed=spec.seed)
    if not len(arrival_s):
        arrival_s = np.zeros(1)  # nobody came in so short a time: one who comes at once
    # a growing queue is given up after half as long again; a slow model may still answer what it has begun
    stop_s = seconds + max(seconds / 2, 5 * batch_s)
    batching = Batching(requests, spec.max_wait_ms / MS)
    served = serve(arrival_s, batching, lambda first, end: answer(first * rows, end * rows), stop_s=stop_s)
    warm_up = min(int(np.searchsorted(arrival_s, seconds * WARM_UP_SHARE)), len(arrival_s) - 1)
    kept_s = served.latency_s[warm_up:]
    answered = len(arrival_s) - served.unanswered
    answered_rate = answered / served.seconds if served.seconds else None
    found: Point = {
        "offered_rate": rate,
        "answered_rate": answered_rate,
        "mean_batch": answered / served.batches if served.batches else None,
        "pairs_per_s": answered_rate and answered_rate * rows,
        "warm_up": warm_up,
        "unanswered": served.unanswered,
        "seconds": served.seconds,
    }
    return found | summarize(kept_s)
