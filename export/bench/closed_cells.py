"""Closed-loop cells of one model: how long a batch or a request takes when nothing else is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from relabel.export.bench import memory
from relabel.export.bench.latency import time_calls
from relabel.export.bench.latency_facts import LatencyRow
from relabel.export.bench.plans import CELL_WEIGHT, BenchModel, Cell
from relabel.export.bench.quantiles import FEWEST_SAMPLES, MS, summarize
from relabel.export.bench.runners import Runner
from relabel.export.bench.settings import Setting, runtime_facts, spoken_latency
from relabel.export.bench.workloads import fixed_batch
from relabel.manifests.errors import ModelError

REPLAYED_BATCHES = 64


def measure_cells(
    setting: Setting, model: BenchModel, run: Runner, cells: Sequence[Cell], *, device_bytes: int | None
) -> tuple[list[LatencyRow], list[tuple[str, str]]]:
    """Measure cells, small ones first.

    Args:
        device_bytes: in use on the GPU before the model was opened.
    Returns:
        Rows, and the cells left out: name and reason.
    """
    rows: list[LatencyRow] = []
    left_out: list[tuple[str, str]] = []
    for cell in cells:
        share_s = setting.budget.share(CELL_WEIGHT)
        expected_s = _expected_s(rows, cell, setting)
        if expected_s > max(share_s, setting.budget.left_s):
            setting.say(f"{model.name} {cell.name}: would take {expected_s:,.1f} s, left out")
            left_out.append((cell.name, "a request would take longer than all time that is left. More --seconds."))
            continue
        start = time.perf_counter()
        try:
            row = _measure(
                setting, model, run, cell, share_s, is_warm=expected_s * 2 > share_s, used_bytes=device_bytes
            )
        except ModelError as exc:
            if cell.tokens is None or cell.tokens <= setting.encoder.max_tokens:
                raise
            setting.say(f"{model.name} {cell.name}: {exc}")
            left_out.append((cell.name, "the model takes no rows of that length."))
            continue
        finally:
            setting.budget.spend(time.perf_counter() - start)
        rows.append(row)
        setting.say(f"{model.name} {cell.name}: {spoken_latency(row)}")
    return rows, left_out


def _measure(
    setting: Setting,
    model: BenchModel,
    run: Runner,
    cell: Cell,
    seconds: float,
    *,
    is_warm: bool,
    used_bytes: int | None,
) -> LatencyRow:
    call, scope = _call(setting, model, run, cell)
    is_watched = memory.reset_peak()
    timed = time_calls(call, seconds, is_warm=is_warm)
    peak_rss_bytes = memory.peak_rss_bytes() if is_watched else None
    taken = memory.device_bytes()
    samples = len(timed.latency_s)
    is_told = samples >= FEWEST_SAMPLES
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
        peak_rss_bytes=peak_rss_bytes,
        device_bytes=None if taken is None or used_bytes is None else max(0, taken - used_bytes),
        threads=setting.threads,
        seconds=timed.seconds,
        cpu_ms=timed.cpu_s * MS / samples if is_told else None,
        **(summarize(timed.latency_s) if is_told else {"samples": samples}),
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


def _expected_s(measured: Sequence[LatencyRow], cell: Cell, setting: Setting) -> float:
    """What a request may take, by the last cell measured; 0 where none was."""
    if not measured:
        return 0.0
    last, usual = measured[-1], setting.workload.lengths.p50
    return last.seconds / last.samples * cell.size(usual) / (last.rows * (last.tokens or usual))
