"""Measurements of one model: runners that answer a batch, closed-loop cells, and open-loop sweeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.export.bench import machine
from relabel.export.bench.latency import (
    FEWEST_REQUESTS,
    FEWEST_SAMPLES,
    HALVINGS,
    MS,
    Batching,
    Bound,
    HighestRate,
    OpenLoopTimes,
    SweepTime,
    highest_rate,
    plan_rates,
    poisson_arrivals,
    requests_each,
    serve,
    summarize,
    sweep,
    time_calls,
)
from relabel.export.bench.plans import (
    CELL_WEIGHT,
    P99_SAMPLES,
    SERVING_DOCUMENTS,
    SERVING_MS,
    SLACK,
    SWEEP_WEIGHT,
    TOO_SHORT,
    BenchModel,
    Budget,
    Cell,
    TokenRow,
    Workload,
    fixed_batch,
    plan_time,
)
from relabel.export.bench.records import BoundedRate, LatencyRow
from relabel.export.bundle_facts import StudentFacts
from relabel.export.bundles import Bundle
from relabel.export.loader import AMX, HINTS, OPENVINO, BundleError, Encoder, cpu_flags, open_session
from relabel.export.specs import BenchSpec, Preset
from relabel.manifests.errors import InputError, MissingExtraError, ModelError, RelabelError
from relabel.manifests.process import installed_versions
from relabel.manifests.secrets import counted

# ------------------------------------------------------------------------------
# What can be timed: an ONNX file on a provider, and a student's own module in torch. A runner takes a batch and gives
# numpy arrays.
#
# Its answer lies in host memory when it returns, so a device has finished by then.


Batch = dict[str, np.ndarray]
Runner = Callable[[Batch], Mapping[str, np.ndarray]]
SEGMENTS = "token_type_ids"


class OnnxRunner:
    """An ONNX file, or an engine's context, on the provider that was asked for.

    Args:
        precision: in what openvino computes.
        outputs: names of the outputs to ask for; all by default.
    Raises:
        MissingExtraError: the runtime can't open it there, or fell back.
    """

    def __init__(
        self,
        path: Path,
        provider: str,
        *,
        precision: str = "fp32",
        threads: int,
        outputs: Sequence[str] | None = None,
    ) -> None:
        self._path = path
        try:
            self._session: Any = open_session(path, provider, precision=precision, threads=threads)
        except BundleError as exc:
            raise MissingExtraError(f"{exc} Or measure what this machine has, with --allow-fallback.") from exc
        self._quiet = _quiet()
        self._outputs = list(outputs) if outputs is not None else [found.name for found in self._session.get_outputs()]
        self.inputs: list[str] = [found.name for found in self._session.get_inputs()]

    def __call__(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Outputs by name.

        Raises:
            ModelError: it does not run on such a batch.
        """
        try:
            found = self._session.run(self._outputs, batch, self._quiet)
        except Exception as exc:  # the runtimes' errors share no other class
            rows, tokens = next(iter(batch.values())).shape
            raise ModelError(f"{self._path.name}: can't run {rows} rows of {tokens} tokens ({_reason(exc)}).") from exc
        return dict(zip(self._outputs, found, strict=True))


def _quiet() -> Any:
    """Options of a run that fails without a word of onnxruntime's own on stderr: the caller reports the error."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    return options


def open_other(path: Path, provider: str, names: Sequence[str], *, threads: int) -> Runner:
    """Another ONNX file of the same weights, asked with the bundle's batches.

    Args:
        names: what the bundle's batches hold.
    Raises:
        InputError: there is no such file, or it takes inputs that the batches lack.
        MissingExtraError: see `OnnxRunner`.
    """
    if not path.is_file():
        raise InputError(f"--against {path}: no such file. Name an ONNX file, or torch.")
    runner = OnnxRunner(path, provider, threads=threads)
    if strange := [name for name in runner.inputs if name not in (*names, SEGMENTS)]:
        raise InputError(
            f"--against {path}: takes {', '.join(strange)}, which this bundle's batches ({', '.join(names)}) lack."
        )

    def run(batch: Batch) -> Mapping[str, np.ndarray]:
        held = {SEGMENTS: np.zeros_like(batch["input_ids"]), **batch}
        return runner({name: held[name] for name in runner.inputs})

    return run


def open_torch(path: Path, provider: str, *, threads: int) -> Runner:
    """A student's own module, eager, with the softmax and the temperatures that the graphs have.

    Args:
        path: the student's folder.
    Raises:
        MissingExtraError: torch is absent, or sees no GPU.
        ModelError: the student can't be loaded.
    """
    from relabel.manifests.process import require

    torch = require("torch", extra="cpu", purpose="--against torch")
    from relabel.distill.students.model import load_student, make_texts
    from relabel.export.exporters import input_names
    from relabel.export.onnx_graphs import ServingModule

    if provider != "cpu" and not torch.cuda.is_available():
        raise MissingExtraError(
            f"--against torch on {provider}: this torch sees no GPU. Install one that does, or compare on the CPU."
        )
    torch.set_num_threads(threads)
    device = "cpu" if provider == "cpu" else "cuda"
    student = load_student(path, device=device)
    student.texts = make_texts(replace(student.record, packs=False), student.tokenizer)
    names = input_names(student)
    module = ServingModule(student.module, names, student.record.temperature, logits=False).eval()

    def run(batch: Batch) -> Mapping[str, np.ndarray]:
        with torch.inference_mode():
            found = module(*(torch.from_numpy(batch[name]).to(device) for name in names))
            return {name: values.cpu().numpy() for name, values in zip(student.record.heads, found, strict=True)}

    return run


def _reason(error: Exception) -> str:
    """The part of onnxruntime's error that says something: what comes after the status code's name."""
    return str(error).splitlines()[0].rpartition(" : ")[2][:200]


def differ_by(ours: Runner, theirs: Runner, batch: Batch) -> float | None:
    """Largest |Δp| of the heads that both answer with; None where they share none, or one can't answer at all."""
    try:
        mine, others = ours(batch), theirs(batch)
    except RelabelError:
        return None
    shared = [name for name in mine if name in others and mine[name].shape == others[name].shape]
    return max((float(np.abs(mine[name] - others[name]).max()) for name in shared), default=None)


# ------------------------------------------------------------------------------
# What a bench carries through all its measurements: the bundle opened, the rows to ask about, the
# time that is left.


Say = Callable[[str], None]
Answer = Callable[[int, int], None]
"""A server's work: answers pairs from the first up to the second number."""
PROBE_ROWS = 8


@dataclass(frozen=True)
class Setting:
    """A bench under way.

    Args:
        student: what the bundle's manifest says of it.
        workload: rows whose lengths are replayed.
        threads: of the CPU, for each model.
        say: receives progress, a line each.
    """

    bundle: Bundle
    student: StudentFacts
    spec: BenchSpec
    encoder: Encoder
    workload: Workload
    budget: Budget
    threads: int
    say: Say

    @property
    def heads(self) -> list[str]:
        """Outputs to ask for."""
        return list(self.student.heads)

    @property
    def scope(self) -> str:
        """What the server's work covers: `texts`, or `tokens` where only lengths are known."""
        return "tokens" if self.workload.texts is None else "texts"

    @property
    def probe(self) -> Batch:
        """A small batch of real lengths."""
        return self.encoder.collate(self.workload.rows[:PROBE_ROWS])

    def open(self, model: BenchModel) -> tuple[BenchModel, Runner]:
        """Open a model on its provider, or on the CPU where onnxruntime falls back and that is allowed.

        Raises:
            MissingExtraError: it can't be opened there.
        """
        path = self.bundle.folder / model.path
        try:
            return model, OnnxRunner(
                path, model.provider, precision=model.precision, threads=self.threads, outputs=self.heads
            )
        except MissingExtraError:
            if model.provider == "cpu" or not self.spec.allows_fallback:
                raise
        self.say(f"{model.name}: not to be had here, so on the CPU")
        precision = "fp32" if model.provider == OPENVINO else model.precision  # what OpenVINO rounds is the fp32 file
        return BenchModel(model.asked, "cpu", precision, model.path), self.open_on_cpu(model.path)

    def open_on_cpu(self, path: str) -> Runner:
        """One of the bundle's graphs in onnxruntime on the CPU."""
        return OnnxRunner(self.bundle.folder / path, "cpu", threads=self.threads, outputs=self.heads)

    def server(self, run: Runner, workload: Workload, provider: str) -> Answer:
        """A server's work as the loader does it: tokenized where texts are known, batched by length, padded. Numbers
        wrap around.
        """
        encoder, count, batch_tokens = self.encoder, len(workload.rows), batch_tokens_on(provider)

        def answer(first: int, end: int) -> None:
            places = [place % count for place in range(first, end)]
            rows: Sequence[TokenRow]
            if workload.texts is None:
                rows = [workload.rows[place] for place in places]
            else:
                rows = encoder.encode([workload.texts[place] for place in places])
            for chosen in length_batches([len(ids) for ids, _ in rows], batch_tokens):
                run(encoder.collate([rows[place] for place in chosen]))

        return answer


@cache
def runtime_facts(provider: str, precision: str) -> dict[str, Any]:
    """Columns of a row about what ran a model: the runtime with its version, its precision hint, the CPU's AMX."""
    is_openvino = provider == OPENVINO
    here = installed_versions([OPENVINO] if is_openvino else ["onnxruntime", "onnxruntime-gpu"])
    return {
        "runtime": f"{OPENVINO if is_openvino else 'onnxruntime'} {next(iter(here.values()), '')}".rstrip(),
        "precision_hint": HINTS[precision] if is_openvino else None,
        "has_amx": AMX in cpu_flags(),
    }


def spoken_latency(row: LatencyRow) -> str:
    """A cell's or a rate's figures in a line of progress."""
    parts = [f"{name} {ms:,.2f} ms" for name, ms in (("p50", row.p50_ms), ("p99", row.p99_ms)) if ms is not None]
    waiting = [f"{row.unanswered:,} never answered"] if row.unanswered else []
    return ", ".join([*parts, f"{row.samples:,} samples", *waiting])


# ------------------------------------------------------------------------------
# Open-loop sweeps of one model: latency of requests that come by a Poisson process, against how many come.


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


# ------------------------------------------------------------------------------
# Closed-loop cells of one model: how long a batch or a request takes when nothing else is asked.


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
        is_watched = machine.reset_peak()
        try:
            taken_s = time_calls(call, 0.0, fewest=3).latency_s
        except ModelError:
            if cell.tokens is None or cell.tokens <= setting.encoder.max_tokens:
                raise
            left_out.append((cell.name, TOO_LONG))
            continue
        held = machine.device_bytes()
        tried[cell] = (
            float(sorted(taken_s)[1]),  # the middle one: a stall is not what calls cost
            {
                "peak_rss_bytes": machine.peak_rss_bytes() if is_watched else None,
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
