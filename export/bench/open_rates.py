"""Open-loop sweeps of one model: latency of requests that come by a Poisson process, against how many come."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from relabel.export.bench.arrivals import Batching, OpenLoopTimes, poisson_arrivals, serve
from relabel.export.bench.latency import time_calls
from relabel.export.bench.latency_facts import BoundedRate, LatencyRow
from relabel.export.bench.plans import BenchModel
from relabel.export.bench.quantiles import MS, summarize
from relabel.export.bench.rate_sweeps import (
    FEWEST_REQUESTS,
    HALVINGS,
    Bound,
    HighestRate,
    SweepTime,
    highest_rate,
    plan_rates,
    requests_each,
    sweep,
)
from relabel.export.bench.runners import Runner
from relabel.export.bench.settings import Answer, Setting, runtime_facts, spoken_latency
from relabel.export.bench.specs import BenchSpec, Preset
from relabel.export.bench.workloads import SERVING_DOCUMENTS, SERVING_MS

CAPACITY_SHARE = 0.08
"""Of a sweep's time: to find what full micro-batches reach."""
ROWS = {"grid": 1, "serving": SERVING_DOCUMENTS}
"""Pairs of a request, by preset."""
WARM_UP_SHARE = 0.1
"""Of an open loop's time: requests that came while the queue was still empty from the start."""


class RateSweep(NamedTuple):
    """A preset's open loop.

    Args:
        rows: by offered rate.
        capacity_per_s: requests/s of full micro-batches with nobody waiting.
        slo: one for each bound.
        left_out: rates for which the time was too short.
    """

    rows: list[LatencyRow]
    capacity_per_s: float
    slo: list[BoundedRate]
    left_out: list[float]


def sweeps_of(spec: BenchSpec) -> list[Preset]:
    """Presets that have an open loop."""
    return [preset for preset in spec.presets if preset != "table3"]


def bounds_of(spec: BenchSpec, preset: Preset) -> list[Bound]:
    """For which the highest rate is sought. `serving` bounds the mean, which is what R3A states, and p99 beside it."""
    if preset == "serving":
        ms = SERVING_MS if spec.slo_ms is None else spec.slo_ms
        return [Bound("mean", ms), Bound("p99", ms)]
    return [] if spec.slo_ms is None else [Bound("p99", spec.slo_ms)]


def sweep_fits(spec: BenchSpec, preset: Preset, pairs_per_s: float, seconds: float) -> bool:
    """Whether the rates get requests enough to have figures.

    Args:
        pairs_per_s: that the model does; infinite where that is not known.
        seconds: for all of them.
    """
    rates = plan_rates(pairs_per_s / ROWS[preset], spec.rates)
    return seconds > 0 and (math.isinf(pairs_per_s) or requests_each(rates, seconds, more=0) >= FEWEST_REQUESTS)


def measure_sweep(setting: Setting, model: BenchModel, run: Runner, preset: Preset, seconds: float) -> RateSweep:
    """Measure capacity first, then rate after rate."""
    spec, rows = setting.spec, ROWS[preset]
    bounds = bounds_of(spec, preset)
    requests = max(1, spec.max_batch // rows)
    answer = setting.server(run, setting.workload, model.provider)
    start = time.perf_counter()
    full = time_calls(
        lambda number: answer(number * requests * rows, (number + 1) * requests * rows), seconds * CAPACITY_SHARE
    )
    batch_s = float(np.median(full.latency_s))
    rates = plan_rates(requests / batch_s, spec.rates)
    time_left = SweepTime(rates, seconds - (time.perf_counter() - start), more=HALVINGS * len(bounds))

    left_out = []

    def measure(rate: float) -> LatencyRow | None:
        offer_s = time_left.seconds(rate)
        if offer_s * rate >= FEWEST_REQUESTS:
            offered = offer_rate(spec, answer, rate, offer_s, rows=rows, requests=requests, batch_s=batch_s)
            point = rate_row(setting, model, preset, rate, offered, rows=rows, requests=requests)
            if point.answered_rate is not None:  # not so where chance sent fewer
                setting.say(f"{model.name} {point.cell} at {rate:,.1f}/s: {spoken_latency(point)}")
                return point
        left_out.append(rate)
        return None

    points = sweep(measure, rates, bounds)
    return RateSweep(
        points,
        requests / batch_s,
        [_bounded(preset, highest_rate(points, bound)) for bound in bounds],
        [rate for rate in left_out if rate in rates],
    )


def _bounded(preset: Preset, best: HighestRate) -> BoundedRate:
    return BoundedRate(
        preset=preset,
        figure=best.bound.figure,
        slo_ms=best.bound.ms,
        highest_rate=best.rate,
        mean_ms=best.mean_ms,
        p99_ms=best.p99_ms,
        is_at_least=best.is_at_least,
    )


class OfferedRate(NamedTuple):
    """How requests at one rate fared.

    Args:
        warm_up: requests that came before those whose latencies are kept.
    """

    served: OpenLoopTimes
    warm_up: int


def offer_rate(
    spec: BenchSpec, answer: Answer, rate: float, seconds: float, *, rows: int, requests: int, batch_s: float
) -> OfferedRate:
    """Offer requests at one rate for a while.

    Args:
        seconds: for which requests come.
        rows: pairs of a request.
        requests: of a micro-batch, at most.
        batch_s: what a full one takes.
    """
    arrival_s = poisson_arrivals(rate, seconds, seed=spec.seed)
    # a growing queue is given up after half as long again; a slow model may still answer what it has begun
    stop_s = seconds + max(seconds / 2, 5 * batch_s)
    batching = Batching(requests, spec.max_wait_ms / MS)
    served = serve(arrival_s, batching, lambda first, end: answer(first * rows, end * rows), stop_s=stop_s)
    return OfferedRate(served, min(int(np.searchsorted(arrival_s, seconds * WARM_UP_SHARE)), len(arrival_s) - 1))


def rate_row(
    setting: Setting, model: BenchModel, preset: Preset, rate: float, offered: OfferedRate, *, rows: int, requests: int
) -> LatencyRow:
    """How a model fared at one rate; without figures where fewer requests came than tell anything.

    Args:
        rows: pairs of a request.
        requests: of a micro-batch, at most.
    """
    served, warm_up = offered
    is_told = len(served.latency_s) >= FEWEST_REQUESTS
    answered = len(served.latency_s) - served.unanswered
    answered_rate = answered / served.seconds if is_told and served.seconds else None
    kept_s = served.latency_s[warm_up:]
    return LatencyRow(
        provider=model.provider,
        precision=model.precision,
        **runtime_facts(model.provider, model.precision),
        model=model.path,
        preset=preset,
        loop="open",
        cell=f"open-{preset}",
        scope=setting.scope,
        rows=rows,
        max_batch=requests * rows,
        warm_up=warm_up,
        unanswered=served.unanswered,
        threads=setting.threads,
        offered_rate=rate,
        answered_rate=answered_rate,
        max_wait_ms=setting.spec.max_wait_ms,
        mean_batch=answered / served.batches if is_told and served.batches else None,
        seconds=served.seconds,
        pairs_per_s=answered_rate and answered_rate * rows,
        **(summarize(kept_s) if is_told else {"samples": len(kept_s)}),
    )
