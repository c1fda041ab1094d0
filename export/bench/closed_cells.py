"""Closed-loop cells of one model: how long a batch or a request takes when nothing else is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relabel.export.bench import memory
from relabel.export.bench.latency import time_calls
from relabel.export.bench.latency_facts import LatencyRow
from relabel.export.bench.open_rates import sweep_fits, sweeps_of
from relabel.export.bench.plans import (
    CELL_WEIGHT,
    P99_SAMPLES,
    SLACK,
    SWEEP_WEIGHT,
    TOO_SHORT,
    BenchModel,
    Cell,
    plan_time,
)
from relabel.export.bench.quantiles import FEWEST_SAMPLES, MS, summarize
from relabel.export.bench.runners import Runner
from relabel.export.bench.settings import Setting, runtime_facts, spoken_latency
from relabel.export.bench.workloads import fixed_batch
from relabel.manifests.errors import ModelError
from relabel.manifests.plurals import counted

REPLAYED_BATCHES = 64
TOO_LONG = "the model takes no rows of that length."


def measure_cells(
    setting: Setting, model: BenchModel, run: Runner, cells: Sequence[Cell], seconds: float, *, device_bytes: int | None
) -> tuple[list[LatencyRow], list[tuple[str, str]], float]:
    """Try cells, small ones first, say what the time suffices for, and measure that in the order of `cells`.

    Args:
        seconds: for the model's cells and sweeps.
        device_bytes: in use on the GPU before the model was opened.
    Returns:
        Rows; the cells left out, name and reason; pairs/s of the quickest cell, infinite where none was tried.
    """
    end = time.perf_counter() + seconds
    sweeps = sweeps_of(setting.spec)
    sweep_s = seconds * SWEEP_WEIGHT / (CELL_WEIGHT * len(cells) + SWEEP_WEIGHT * len(sweeps))
    tried, left_out = _try_cells(setting, model, run, cells, end, used_bytes=device_bytes)
    call_s = {cell: tried[cell][0] for cell in cells if cell in tried}
    pairs_per_s = max((cell.rows / taken_s for cell, taken_s in call_s.items()), default=math.inf)
    open_s = sum(sweep_s for preset in sweeps if sweep_fits(setting.spec, preset, pairs_per_s, sweep_s))

    def plan() -> dict[Cell, tuple[int, float]]:
        return plan_time(call_s, end - time.perf_counter(), open_s)

    if cells:
        wanted = [cell for cell in cells if (cell.name, TOO_LONG) not in left_out]
        spoken = _spoken_plan(setting, wanted, plan(), end - time.perf_counter(), pairs_per_s)
        setting.say(f"{model.name}: {seconds:,.1f} of {setting.spec.seconds:g} s suffice for {spoken}")
    rows: list[LatencyRow] = []
    for cell in list(call_s):
        planned = plan().get(cell)  # anew, since those before may have taken more or less than planned
        del call_s[cell]
        if planned is None:
            left_out.append((cell.name, TOO_SHORT))
            continue
        rows.append(_measure(setting, model, run, cell, *planned, tried[cell][1]))
        setting.say(f"{model.name} {cell.name}: {spoken_latency(rows[-1])}")
    return rows, left_out, pairs_per_s


def _try_cells(
    setting: Setting, model: BenchModel, run: Runner, cells: Sequence[Cell], end: float, *, used_bytes: int | None
) -> tuple[dict[Cell, tuple[float, dict[str, Any]]], list[tuple[str, str]]]:
    """Seconds of a call of each cell for whose samples there is time, with the columns of its memory; and the cells
    left out. The memory is looked at here, small ones first, since onnxruntime keeps what large ones took.
    """
    tried: dict[Cell, tuple[float, dict[str, Any]]] = {}
    left_out: list[tuple[str, str]] = []
    size_s, usual = 0.0, setting.workload.lengths.p50
    for cell in sorted(cells, key=lambda cell: cell.size(usual)):
        if size_s * cell.size(usual) * FEWEST_SAMPLES * SLACK > end - time.perf_counter():
            left_out.append((cell.name, TOO_SHORT))
            continue
        call, _ = _call(setting, model, run, cell)
        is_watched = memory.reset_peak()
        try:
            taken_s = time_calls(call, 0.0, fewest=3).latency_s
        except ModelError:
            if cell.tokens is None or cell.tokens <= setting.encoder.max_tokens:
                raise
            left_out.append((cell.name, TOO_LONG))
            continue
        held = memory.device_bytes()
        tried[cell] = (
            float(sorted(taken_s)[1]),  # the middle one: a stall is not what calls cost
            {
                "peak_rss_bytes": memory.peak_rss_bytes() if is_watched else None,
                "device_bytes": None if held is None or used_bytes is None else max(0, held - used_bytes),
            },
        )
        size_s = tried[cell][0] / cell.size(usual)
    return tried, left_out


def _spoken_plan(
    setting: Setting, cells: Sequence[Cell], plan: Mapping[Cell, tuple[int, float]], seconds: float, pairs_per_s: float
) -> str:
    """`1 pair (p50, p99); 8 pairs, 32 pairs (p50); not for 1x128, requests by Poisson`."""
    figures = {P99_SAMPLES: " (p50, p99)", FEWEST_SAMPLES: " (p50)", True: "", False: ""}
    names: dict[int, list[str]] = {samples: [] for samples in figures}
    for cell in cells:
        name = counted(cell.rows, "pair") if cell.tokens is None and cell.preset == "grid" else cell.name
        names[plan[cell][0] if cell in plan else False].append(name)
    open_s = seconds - sum(given_s for _, given_s in plan.values())
    for preset in sweeps_of(setting.spec):
        name = "requests by Poisson" if preset == "grid" else "100 pairs each by Poisson"
        names[sweep_fits(setting.spec, preset, pairs_per_s, open_s)].append(name)
    lacking = names.pop(False)
    spoken = "; ".join(", ".join(these) + figures[samples] for samples, these in names.items() if these) or "nothing"
    return f"{spoken}; not for {', '.join(lacking)}" if lacking else spoken


def _measure(
    setting: Setting,
    model: BenchModel,
    run: Runner,
    cell: Cell,
    fewest: int,
    seconds: float,
    memory_columns: Mapping[str, Any],
) -> LatencyRow:
    call, scope = _call(setting, model, run, cell)
    timed = time_calls(call, seconds, fewest=fewest)
    row = LatencyRow(
        provider=model.provider,
        precision=model.precision,
        **runtime_facts(model.provider, model.precision),
        model=model.path,
        preset=cell.preset,
        loop="closed",
        cell=cell.name,
        scope=scope,
        rows=cell.rows,
        tokens=cell.tokens,
        warm_up=timed.warm_up,
        **memory_columns,
        threads=setting.threads,
        seconds=timed.seconds,
        cpu_ms=timed.cpu_s * MS / len(timed.latency_s),
        **summarize(timed.latency_s),
    )
    mean, low, high = (ms and cell.rows * MS / ms for ms in (row.mean_ms, row.mean_high, row.mean_low))
    return replace(row, pairs_per_s=mean, pairs_per_s_low=low, pairs_per_s_high=high)


def _call(setting: Setting, model: BenchModel, run: Runner, cell: Cell) -> tuple[Callable[[int], object], str]:
    """What a cell calls, and what that covers."""
    if cell.tokens is not None:
        batch = fixed_batch(setting.encoder, cell.rows, cell.tokens)
        return lambda _: run(batch), "batch"
    if cell.preset == "table3":
        answer = setting.server(run, setting.workload.draw(cell.rows, seed=setting.spec.seed), model.provider)
        return lambda _: answer(0, cell.rows), setting.scope
    rows = setting.workload.draw(cell.rows * REPLAYED_BATCHES, seed=setting.spec.seed).rows
    batches = [setting.encoder.collate(rows[start : start + cell.rows]) for start in range(0, len(rows), cell.rows)]
    return lambda number: run(batches[number % len(batches)]), "batch"
