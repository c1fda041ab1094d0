"""What a bench found, in words and tables for people, from its record alone."""

from __future__ import annotations

from collections.abc import Sequence

from relabel.export.bench.latency_facts import BenchFacts
from relabel.export.loader import OPENVINO


def latency_lines(facts: BenchFacts) -> list[str]:
    """Lines of Markdown, without a title."""
    tables = [cell_rows(facts), rate_rows(facts), comparison_rows(facts)]
    lines = [machine_line(facts), ""]
    for table in tables:
        if len(table) > 1:
            lines += [*_markdown(table), ""]
    lines += [
        (
            "Where a quantile is missing (–), too few latencies were measured to state it. All figures: "
            "`latency.json`, `latency.parquet`."
        )
    ]
    if facts.findings:
        lines += ["", "What to know about these figures:", ""]
        lines += [f"- {finding.where}: {finding.text}" for finding in facts.findings]
    return lines


def machine_line(facts: BenchFacts) -> str:
    """What it was measured on, and with what."""
    machine, workload = facts.machine, facts.workload
    gpu = f", {machine.gpu.name}" if machine.gpu else ""
    lengths = f"p50 {workload.p50}, p99 {workload.p99} tokens"
    source = "its own record of lengths" if workload.from_ == "lengths" else "pairs of a file"
    threads = f"{machine.threads} thread{'' if machine.threads == 1 else 's'}"
    cores = f"{threads} on {machine.usable_cores} of {machine.cores} cores"
    if machine.cpu_quota is not None:
        cores += f" with a quota of {machine.cpu_quota:g}"
    runtimes = f"onnxruntime {machine.onnxruntime}"
    if any(model.provider == OPENVINO for model in facts.models):
        amx = "with" if machine.has_amx else "without"
        runtimes += f", openvino {machine.versions.get(OPENVINO)} {amx} AMX"
    return (
        f"Measured {facts.measured_at[:10]} on {machine.cpu}{gpu}, {cores}, {runtimes}. "
        f"Replayed lengths are of {source} ({lengths})."
    )


def cell_rows(facts: BenchFacts) -> list[list[str]]:
    """Closed loop: a row a cell; the first row is the head."""
    rows = [
        [
            "model",
            "one caller, pairs x tokens",
            "samples",
            "p50 ms (95 %)",
            "p99 ms (95 %)",
            "p99.9 ms",
            "CPU ms",
            "pairs/s",
            "peak memory",
        ]
    ]
    for model in facts.models:
        for row in model.closed:
            memory = row.device_bytes if row.device_bytes is not None else row.peak_rss_bytes
            rows.append(
                [
                    model.side,
                    f"{row.cell}, {row.scope}" if row.scope != "batch" else row.cell,
                    f"{row.samples:,}",
                    _between(row.p50_ms, row.p50_low, row.p50_high),
                    _between(row.p99_ms, row.p99_low, row.p99_high),
                    _number(row.p999_ms),
                    _number(row.cpu_ms),
                    f"{row.pairs_per_s:,.0f}",
                    "–" if memory is None else f"{memory / 1e6:,.0f} MB",
                ]
            )
    return rows


def rate_rows(facts: BenchFacts) -> list[list[str]]:
    """Open loop: a row a rate; the first row is the head."""
    rows = [
        [
            "model",
            "requests by Poisson",
            "offered/s",
            "answered/s",
            "together",
            "samples",
            "mean ms",
            "p50 ms",
            "p99 ms (95 %)",
            "p99.9 ms",
        ]
    ]
    for model in facts.models:
        for row in model.open:
            held = [slo for slo in model.slo if (slo.preset, slo.highest_rate) == (row.preset, row.offered_rate)]
            mark = "".join(f" (highest with {slo.figure} ≤ {slo.slo_ms:g} ms)" for slo in held)
            pairs = "1 pair" if row.rows == 1 else f"{row.rows} pairs"
            p99 = _between(row.p99_ms, row.p99_low, row.p99_high)
            rows.append(
                [
                    model.side,
                    f"{pairs} each, {row.scope}",
                    f"{row.offered_rate:,.1f}{mark}",
                    _number(row.answered_rate, 1),
                    _number(row.mean_batch, 1),
                    f"{row.samples:,}",
                    _number(row.mean_ms),
                    _number(row.p50_ms),
                    f"{row.unanswered:,} never answered" if row.unanswered else p99,
                    _number(row.p999_ms),
                ]
            )
    return rows


def comparison_rows(facts: BenchFacts) -> list[list[str]]:
    """Comparisons: a row each; the first row is the head."""
    rows = [
        [
            "model",
            "against",
            "pairs x tokens",
            "ms",
            "theirs, ms",
            "time ratio, median (95 %)",
            "by CPU time",
            "rounds",
            "answers differ by",
        ]
    ]
    for one in facts.comparisons:
        rows.append(
            [
                f"{one.provider} {one.ours}",
                one.theirs,
                one.cell,
                _number(one.ours_ms),
                _number(one.theirs_ms),
                spoken_ratio(one.ratio, one.low, one.high),
                spoken_ratio(one.cpu_ratio, one.cpu_low, one.cpu_high),
                str(one.rounds),
                "–" if one.answers_differ_by is None else f"{one.answers_differ_by:.1e}",
            ]
        )
    return rows


def spoken_ratio(ratio: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval as far as they are known: `0.512 (0.490 to 0.533)`, `0.512`, `–`."""
    if ratio is None:
        return "–"
    return f"{ratio:.3f}" if low is None or high is None else f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def _between(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if low is None or high is None else f"{value:,.2f} ({low:,.2f} to {high:,.2f})"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in body)]
