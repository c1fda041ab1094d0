"""What a reader of the figures has to know before believing them. Pure: from the figures alone.

A finding is no error: the bench goes on and ends well, and says it in the record, on the card and on stderr.
"""

from __future__ import annotations

from collections.abc import Sequence

from relabel.export.bench.latency_comparison import ComparedModels, Finding
from relabel.export.bench.latency_facts import LatencyRow, ModelLatency
from relabel.export.bench.machine_facts import BUSY_LOAD
from relabel.export.bench.measured_machine import MeasuredMachine
from relabel.export.bench.quantiles import QUANTILES, samples_needed

MAX_CV = 0.05
PLAIN = "fp32"
ROUNDS_NEEDED = samples_needed(0.5)
"""Fewest rounds for which the median's 95 % interval exists."""


def model_findings(model: ModelLatency, *, max_tokens: int) -> list[Finding]:
    """Of one model's figures.

    Args:
        max_tokens: at which the bundle cuts.
    """
    found: list[Finding] = []
    if model.asked_provider not in ("auto", model.provider) and model.provider == "cpu":
        text = f"{model.asked_provider} was asked for and is not here: these are figures of the CPU."
        found.append(Finding("cpu_fallback", model.side, text))
    if model.cpu_nodes:
        names = ", ".join(f"{count} {kind}" for kind, count in model.cpu_nodes.items())
        found.append(Finding("cpu_nodes", model.side, f"onnxruntime runs part of the graph on the CPU: {names}."))
    for reason in dict.fromkeys(reason for _, reason in model.not_run):
        cells = [cell for cell, why in model.not_run if why == reason]
        found.append(Finding("not_run", model.side, f"{len(cells)} not measured ({', '.join(cells)}): {reason}"))
    if noisy := _noisy(model.closed):
        found.append(Finding("noisy", model.side, noisy))
    if few := _few(model.closed + model.open):
        found.append(Finding("too_few_samples", model.side, few))
    long = [row.cell for row in model.closed if row.tokens and row.tokens > max_tokens]
    if long:
        text = (
            f"{', '.join(long)}: longer than the {max_tokens} tokens at which this bundle cuts; to compare with "
            "others' tables alone."
        )
        found.append(Finding("over_max_tokens", model.side, text))
    for slo in model.slo:
        if slo.highest_rate is None:
            text = (
                f"{slo.preset}: no rate that was tried keeps {slo.figure} under {slo.slo_ms:g} ms with "
                "enough requests to tell."
            )
            found.append(Finding("slo_missed", model.side, text))
    return found


def comparison_findings(comparisons: Sequence[ComparedModels], *, rounds: int) -> list[Finding]:
    """Of comparisons: a small precision that is not faster, other answers, too few rounds."""
    found: list[Finding] = []
    for one in comparisons:
        where = f"{one.provider} {one.ours}"
        interval = "" if one.low is None else f" ({one.low:.2f} to {one.high:.2f})"
        if one.theirs == PLAIN and one.ratio >= 1:
            text = f"{one.cell}: no faster than fp32, its time over fp32's is {one.ratio:.2f}{interval}."
            found.append(Finding("slower_than_fp32", where, text))
        if one.rounds < max(rounds, ROUNDS_NEEDED):
            said = f"{one.rounds} of {rounds} rounds fitted into the time"
            if one.low is None:
                said = f"{one.rounds} rounds, too few for an interval ({ROUNDS_NEEDED} needed, {rounds} wanted)"
            found.append(Finding("too_few_rounds", where, f"{one.cell} against {one.theirs}: {said}."))
        if one.ours == PLAIN and (one.answers_differ_by or 0) > 1e-2:
            text = (
                f"{one.theirs} answers otherwise by up to {one.answers_differ_by:.3f}: other weights make no "
                "fair comparison."
            )
            found.append(Finding("answers_differ", where, text))
    return found


def machine_findings(machine: MeasuredMachine) -> list[Finding]:
    """Of the machine's state."""
    found = []
    load, quota, threads = machine.load_before, machine.cpu_quota, machine.threads
    if load is not None and load > BUSY_LOAD:
        text = f"it was busy before the bench began (load {load:g} on {machine.cores} cores)."
        found.append(Finding("busy_machine", "machine", text))
    if quota is not None and threads > quota:
        advice = (
            "Give the container at least one core."
            if quota < 1
            else f"Take --threads {int(quota)}, or raise the quota."
        )
        text = (
            f"{threads} threads and a quota of {quota:g} cores' time: all stop when it is used up, until the next "
            f"period. {advice}"
        )
        found.append(Finding("over_quota", "machine", text))
    return found


def _noisy(rows: Sequence[LatencyRow]) -> str | None:
    """Cells in which every call did the same work and yet they differ."""
    fixed = [row for row in rows if row.tokens and row.p50_ms is not None]
    spread = [(row.cv, row) for row in fixed if row.cv is not None and row.cv > MAX_CV]
    if not spread:
        return None
    cv, worst = max(spread, key=lambda one: one[0])
    return (
        f"calls of {len(spread)} of {len(fixed)} fixed shapes vary by more than {MAX_CV:.0%} of their mean "
        f"(worst {worst.cell}: {cv:.0%})."
    )


def _few(rows: Sequence[LatencyRow]) -> str | None:
    parts = []
    for name in ("p99", "p999"):
        need = samples_needed(QUANTILES[name])
        short = [row.samples for row in rows if row.samples < need]
        if short:
            parts.append(f"{_spoken(name)} ({need:,}) in {len(short)} of {len(rows)}, fewest {min(short):,}")
    return f"too few samples for {'; '.join(parts)}. More --seconds." if parts else None


def _spoken(name: str) -> str:
    return "p99.9" if name == "p999" else name
