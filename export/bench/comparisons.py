"""Paired comparisons of models on the same batches, caveats on the figures, and the tables and sentences that report
them."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relabel.distill.students.model import student_digest
from relabel.export.bench.cells import Runner, Setting, differ_by, open_other, open_torch
from relabel.export.bench.latency import QUANTILES, Clock, samples_needed
from relabel.export.bench.machine import BUSY_LOAD
from relabel.export.bench.plans import COMPARISON_WEIGHT, BenchModel, fixed_batch
from relabel.export.bench.records import (
    BenchFacts,
    ComparedModels,
    ComparedPair,
    Finding,
    LatencyRow,
    MeasuredMachine,
    ModelLatency,
)
from relabel.export.bundle_facts import StudentFacts
from relabel.export.loader import OPENVINO
from relabel.manifests.errors import ManifestError, MissingExtraError, ModelError
from relabel.manifests.metrics.metric import bootstrap

# ------------------------------------------------------------------------------
# Two models side by side: they take turns on the same batch, and each round gives one ratio.
#
# What the machine does meanwhile (a clock that drops, a neighbour that wakes) hits both turns of a round, so the ratios
# say what two measurements one after the other can't. Beside the clock's ratio is the one of CPU seconds, of all
# threads together, which does not count the time in which others had the processor.


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


# ------------------------------------------------------------------------------
# What a reader of the figures has to know before believing them. Pure: from the figures alone.
#
# A finding is no error: the bench goes on and ends well, and says it in the record, on the card and on stderr.


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


# ------------------------------------------------------------------------------
# What a bench found, in words and tables for people, from its record alone.


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


# ------------------------------------------------------------------------------
# Comparisons of a bundle's models: the smaller precisions with fp32, OpenVINO with onnxruntime, and each with what was
# named (torch eager, another ONNX file).


TORCH = "torch"
ONNXRUNTIME = "onnxruntime"
"""The side that openvino's models are compared with: the same file in onnxruntime on the CPU."""
OVERTIME = 3.0
"""How many times its share a comparison may take to come to its rounds; more would be taken from those after it."""


@dataclass(frozen=True)
class Against:
    """What to compare with.

    Args:
        torch: the student's folder; None for no comparison with torch.
        graphs: other ONNX files by the name that they go by.
    """

    torch: Path | None = None
    graphs: Mapping[str, Path] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of all sides."""
        return ([TORCH] if self.torch is not None else []) + list(self.graphs)

    def check(self, student: StudentFacts, *, threads: int) -> None:
        """Refuse before anything is measured what would be refused after; torch is looked for and not loaded.

        Raises:
            InputError, ManifestError, MissingExtraError: see `open_other`, `open_torch`.
        """
        for path in self.graphs.values():
            open_other(path, "cpu", student.inputs.names, threads=threads)
        if self.torch is None:
            return
        if importlib.util.find_spec("torch") is None:
            raise MissingExtraError("--against torch needs the package torch: run `pip install 'relabel-ir[cpu]'`.")
        if student_digest(self.torch) != student.lineage.student.digest:
            raise ManifestError(f"--student {self.torch}: not the student that this bundle was made of. Name that one.")


def plan_sides(models: Sequence[BenchModel], against: Against) -> list[tuple[BenchModel, str]]:
    """Every comparison but its shape: each smaller precision with fp32 on the same provider, openvino's with
    onnxruntime, each model with everything named.
    """
    sides = []
    for model in models:
        has_plain = any((other.provider, other.precision) == (model.provider, PLAIN) for other in models)
        sides += [
            (model, name)
            for name in [
                *([PLAIN] if has_plain and model.precision != PLAIN else []),
                *([ONNXRUNTIME] if model.provider == OPENVINO else []),
                *against.names,
            ]
        ]
    return sides


def compare_models(
    setting: Setting,
    models: Sequence[BenchModel],
    against: Against,
    shapes: Sequence[tuple[int, int]],
    left_out: Mapping[BenchModel, set[str]],
) -> tuple[list[ComparedModels], list[Finding]]:
    """Every comparison, sides taking turns.

    Args:
        models: as they were opened, on the CPU where onnxruntime fell back.
        shapes: rows and tokens of the batches.
        left_out: names of the cells that a model can't run.
    Returns:
        Comparisons, and what could not be compared.
    """
    found: list[ComparedModels] = []
    findings: list[Finding] = []
    opened: dict[tuple[str, str], Runner] = {}
    sides: list[tuple[BenchModel, Runner, Runner, ComparedPair]] = []
    for model, other in plan_sides(models, against):
        _, ours = setting.open(model)
        if (model.provider, other) not in opened:
            opened[model.provider, other] = _open_side(setting, model, models, other, against)
        theirs = opened[model.provider, other]
        differ = differ_by(ours, theirs, setting.probe)
        pair = ComparedPair(provider=model.provider, ours=model.precision, theirs=other, answers_differ_by=differ)
        sides.append((model, ours, theirs, pair))
    # the smallest shapes first: they come to all their rounds, and leave what they do not need to the large ones
    for rows, tokens in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        for model, ours, theirs, pair in sides:
            share_s, cell = setting.budget.share(COMPARISON_WEIGHT), f"{rows}x{tokens}"
            if cell in left_out.get(model, set()):
                continue
            start = time.perf_counter()
            turns = _compared(setting, ours, theirs, rows, tokens, share_s)
            setting.budget.spend(time.perf_counter() - start)
            if turns is None:
                text = f"{cell} against {pair.theirs} was not compared: one side can't run it."
                findings.append(Finding("not_run", model.name, text))
                continue
            one = turns.compared(pair, cell)
            found.append(one)
            by_clock, by_cpu = spoken_ratio(one.ratio, one.low, one.high), spoken_ratio(one.cpu_ratio, None, None)
            setting.say(f"{model.name} over {pair.theirs}, {cell}: {by_clock}, by CPU time {by_cpu}")
    return found, findings


def _compared(setting: Setting, ours: Runner, theirs: Runner, rows: int, tokens: int, seconds: float) -> Turns | None:
    batch = fixed_batch(setting.encoder, rows, tokens)
    try:
        return take_turns(
            lambda: ours(batch),
            lambda: theirs(batch),
            rounds=setting.spec.rounds,
            seconds=seconds,
            limit_s=seconds * OVERTIME,
        )
    except (ModelError, IndexError, RuntimeError):  # torch has no position for so many tokens
        if tokens <= setting.encoder.max_tokens:
            raise
        return None


def _open_side(
    setting: Setting, model: BenchModel, models: Sequence[BenchModel], other: str, against: Against
) -> Runner:
    if other == PLAIN:
        plain = next(one for one in models if (one.provider, one.precision) == (model.provider, PLAIN))
        return setting.open(plain)[1]
    if other == ONNXRUNTIME:
        return setting.open_on_cpu(model.path)
    provider = "cpu" if model.provider == OPENVINO else model.provider
    if other == TORCH:
        assert against.torch is not None
        return open_torch(against.torch, provider, threads=setting.threads)
    return open_other(against.graphs[other], provider, setting.student.inputs.names, threads=setting.threads)
