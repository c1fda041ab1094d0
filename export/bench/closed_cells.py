"""Closed-loop cells of one model: how long a batch or a request takes when nothing else is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from export.bench import memory
from export.bench.latency import Timed, time_calls
from export.bench.plans import CELL_WEIGHT, Cell
from export.bench.quantiles import MS, summarize
from export.bench.runners import Runner
from export.bench.settings import Setting, spoken_latency
from export.bench.workloads import fixed_batch
from manifests.errors import ModelError

REPLAYED_BATCHES = 64

Row = dict[str, Any]
"""A row of `latency.parquet`."""


def measure_cells(
    setting: Setting, run: Runner, cells: Sequence[Cell], blank: Row, *, device_bytes: int | None
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Measure cells, small ones first.

    Args:
        blank: what all rows of this model have in common.
        device_bytes: in use on the GPU before the model was opened.
    Returns:
        Rows, and the cells left out: name and reason.
    """
    rows: list[Row] = []
    left_out: list[tuple[str, str]] = []
    for cell in cells:
        share_s = setting.budget.share(CELL_WEIGHT)
        expected_s = _expected_s(rows, cell, setting)
        if expected_s > max(share_s, setting.budget.left_s):
            setting.say(
                f"{blank['provider']} {blank['precision']} {cell.name}: would take {expected_s:,.1f} s, left out"
            )
            left_out.append((cell.name, "a request would take longer than all time that is left. More --seconds."))
            continue
        start = time.perf_counter()
        try:
            figures = _measure(setting, run, cell, share_s, is_warm=expected_s * 2 > share_s)
        except ModelError as exc:
            if cell.tokens is None or cell.tokens <= setting.encoder.max_tokens:
                raise
            setting.say(f"{blank['provider']} {blank['precision']} {cell.name}: {exc}")
            left_out.append((cell.name, "the model takes no rows of that length."))
            continue
        finally:
            setting.budget.spend(time.perf_counter() - start)
        taken = memory.device_bytes()
        figures["device_bytes"] = None if taken is None or device_bytes is None else max(0, taken - device_bytes)
        rows.append({**blank, **figures})
        setting.say(f"{blank['provider']} {blank['precision']} {cell.name}: {spoken_latency(rows[-1])}")
    return rows, left_out


def _measure(setting: Setting, run: Runner, cell: Cell, seconds: float, *, is_warm: bool) -> Row:
    call, scope = _call(setting, run, cell)
    is_watched = memory.reset_peak()
    timed = time_calls(call, seconds, is_warm=is_warm)
    return figures_of(cell, timed) | {"scope": scope, "peak_rss_bytes": memory.peak_rss_bytes() if is_watched else None}


def figures_of(cell: Cell, timed: Timed) -> Row:
    """A cell's figures, without what the machine tells."""
    figures = summarize(timed.latency_s)
    rate = {
        "pairs_per_s": cell.rows * MS / figures["mean_ms"],
        "pairs_per_s_low": figures["mean_high"] and cell.rows * MS / figures["mean_high"],
        "pairs_per_s_high": figures["mean_low"] and cell.rows * MS / figures["mean_low"],
    }
    about = {"preset": cell.preset, "loop": "closed", "cell": cell.name, "rows": cell.rows, "tokens": cell.tokens}
    cpu_ms = timed.cpu_s * MS / len(timed.latency_s)
    return {**about, "warm_up": timed.warm_up, "seconds": timed.seconds, "cpu_ms": cpu_ms, **figures, **rate}


def _call(setting: Setting, run: Runner, cell: Cell) -> tuple[Callable[[int], object], str]:
    """What a cell calls, and what that covers."""
    if cell.tokens is not None:
        batch = fixed_batch(setting.encoder, cell.rows, cell.tokens)
        return lambda _: run(batch), "batch"
    if cell.preset == "table3":
        answer = setting.server(run, setting.workload.draw(cell.rows, seed=setting.spec.seed))
        return lambda _: answer(0, cell.rows), setting.scope
    rows = setting.workload.draw(cell.rows * REPLAYED_BATCHES, seed=setting.spec.seed).rows
    batches = [setting.encoder.collate(rows[start : start + cell.rows]) for start in range(0, len(rows), cell.rows)]
    return lambda number: run(batches[number % len(batches)]), "batch"


def _expected_s(measured: Sequence[Row], cell: Cell, setting: Setting) -> float:
    """What a request may take, by the last cell measured; 0 where none was."""
    if not measured:
        return 0.0
    last, usual = measured[-1], float(setting.workload.about["p50"])
    expected_s: float = last["mean_ms"] / MS * cell.size(usual) / (last["rows"] * (last["tokens"] or usual))
    return expected_s
