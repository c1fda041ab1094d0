"""A bench of a bundle, within the seconds that were given: every model's closed loop by shape, then its open loop; its
file of figures near the bundle, one table, one plot.

Closed loop: one caller asks, waits for the answer, asks again. Open loop: requests arrive by a Poisson process, whether
or not the last one is answered, and a latency counts from the scheduled arrival. So a server that stalls once makes all
wait that arrive meanwhile, and each of them is counted; a closed loop would ask fewer questions while answers are slow
("coordinated omission"). A quantile is a latency that was observed (numpy's `inverted_cdf`), and is stated only where a
distribution-free 95 % interval for it exists: from 368 latencies for p99, from 3,688 for p99.9.
"""

import io
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relabel.distill.students.portable import batch_tokens_on, length_batches
from relabel.export.bundle_facts import EngineFile, ModelFile, TokenLengths, describe_lengths, student_facts
from relabel.export.bundles import MANIFEST_NAME, Bundle
from relabel.export.loader import (
    AMX,
    AVX512,
    DEFAULT_PRECISION,
    HINTS,
    OPENVINO,
    PROVIDERS,
    ROUNDED,
    Encoder,
    Machine,
    default_threads,
    engine_fault,
)
from relabel.export.parity import Run, model_runner
from relabel.export.puller import VERSIONS
from relabel.export.specs import BenchSpec
from relabel.manifests.errors import InputError, MissingExtraError, UsageError
from relabel.manifests.files import translate_errors
from relabel.manifests.metrics.evaluation import Gate, GateVerdict, judge_gates
from relabel.manifests.metrics.metric import LEVEL
from relabel.manifests.process import device_names, installed_versions, require, usable_cores
from relabel.manifests.records import plain, read_record, readable_json
from relabel.manifests.store import LocalStore

# N requests, latencies or rows of the workload

TokenRow = tuple[list[int], list[int]]
"""Token ids and segment numbers, as the loader's `Encoder` gives them."""
MAX_ROWS = 10_000
CELL_FIGURES = ("p50_ms", "p99_ms", "p999_ms", "mean_ms", "pairs_per_s")
CAPACITY_SHARE = 0.08
"""Of an open loop's time: to find what full micro-batches reach."""
WARM_UP_SHARE = 0.15
"""Of the time of a closed loop or a rate: first calls allocate, choose kernels and wake a sleeping clock, and the queue
is still empty.
"""
TOO_LONG = "the student reads no rows of that length."
TOO_SHORT = "the time suffices for too few samples. More --seconds."
Clock = Callable[[], float]
"""Seconds from some fixed point, never going back."""
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
FEWEST_SAMPLES = 20
"""A closed-loop cell, or an open-loop rate, with fewer states no figure."""
MS = 1000.0
MOST_WAITING = 1.25
"""Of a request on the CPU: wall time in CPU time, from which on it waited for other work."""
MOST_LOAD = 0.5
"""Of the cores: other work from which on a machine counts as busy."""
Bound = tuple[str, float]
"""A figure (`mean` or `p99`), and the milliseconds that it must not exceed."""
LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of the rate that full micro-batches reach with no queue."""
HALVINGS = 3
"""Rates tried between the highest that keeps a bound and the lowest that does not: a step of 10 % becomes about 1 %."""


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """A closed-loop cell or an open-loop rate; None where a figure does not apply, or is not known.

    Args:
        cell: the shape, or `open`.
        rows: pairs of a request; `tokens` of each where they are not replayed.
        mean_batch: requests of a micro-batch.
        unanswered: requests that still waited when the open loop was stopped.
        cpu_ms: CPU time of all threads of this process, a request.
    """

    cell: str
    rows: int | None = None
    tokens: int | None = None
    offered_rate: float | None = None
    answered_rate: float | None = None
    mean_batch: float | None = None
    unanswered: int | None = None
    samples: int
    seconds: float | None = None
    pairs_per_s: float | None = None
    mean_ms: float | None = None
    cpu_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None

    def latency_ms(self, figure: str) -> float | None:
        """Of `mean`, `p50`, `p99` or `p999`."""
        value: float | None = getattr(self, f"{figure}_ms")
        return value

    @property
    def rate(self) -> float:
        """Offered, of an open loop."""
        assert self.offered_rate is not None
        return self.offered_rate


@dataclass(frozen=True, kw_only=True)
class HighestRate:
    """The highest offered requests/s that keeps a bound, with the latencies there; None where no rate that was tried
    keeps it.

    Args:
        figure: that is bounded by `slo_ms`: `mean` or `p99`.
        is_at_least: none broke it, so the true one may be higher.
    """

    figure: str
    slo_ms: float
    highest_rate: float | None
    mean_ms: float | None
    p99_ms: float | None
    is_at_least: bool


@dataclass
class ModelLatency:
    """A model, where it runs, and what was measured of it.

    Args:
        path: of the graph, relative to the bundle.
        open: by the offered rate.
        capacity_per_s: requests/s of full micro-batches with no queue; None without an open loop.
        slo: of each bound.
        not_run: cells and rates left out, each with the reason.
    """

    provider: str
    precision: str
    path: str
    closed: list[LatencyRow] = field(default_factory=list)
    open: list[LatencyRow] = field(default_factory=list)
    capacity_per_s: float | None = None
    slo: list[HighestRate] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)

    @property
    def side(self) -> str:
        """As messages, tables and pages call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True)
class BenchFacts:
    """The whole file of figures.

    Args:
        bundle: `version` and `manifest_sha256`.
        spec: the options of the bench.
        machine: `cpu`, `gpu` (of the first one, None without one), `usable_cores`, `threads` (of the CPU, that the
            models used), `load` (processes that ran or waited, of the minute before the bench and of its last one,
            and the machine's `cores`; None where it is not known), `python`, and `versions` of libraries.
        workload: the lengths that were replayed, in tokens; they are `from` the bundle's own `lengths`, or `pairs`.
        default_precision: in which the bundle answers where none is named.
    """

    format: Literal[2]
    name: str
    bundle: dict[str, str]
    measured_at: str
    spec: dict[str, Any]
    machine: dict[str, Any]
    workload: dict[str, Any]
    models: list[ModelLatency]
    default_precision: str = DEFAULT_PRECISION


def bench_bundle(
    bundle: Bundle,
    spec: BenchSpec,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    gates: Sequence[Gate] = (),
    write: Callable[[str], None] = lambda _: None,
) -> tuple[BenchFacts, list[GateVerdict]]:
    """Measure a bundle's models.

    Args:
        bundle: opened, its bytes checked.
        pairs: (query, document) texts to replay; the bundle's recorded lengths by default.
        write: receives progress, a line each.
    Returns:
        The figures, and how they compare with the gates.
    Raises:
        ConfigError: a gate names a figure that will not be measured; before anything is.
        MissingExtraError: a provider is not to be had.
        ManifestError: the bundle holds no student.
        UsageError: there was no time to measure anything.
        UsageError, InputError, ModelError: see `choose_models`, `plan_workload`, and `model_runner`.
    """
    require("onnxruntime", extra="cpu", purpose="A bench")
    load_before = machine_load()
    student = student_facts(bundle)
    encoder = Encoder(bundle.folder, bundle.facts["inputs"])
    models = choose_models(student.models, spec, Machine.here())
    workload = plan_workload(pairs, student.inputs.lengths, encoder, seed=spec.seed)
    judge_gates(gates, figures(models, spec), None)
    threads = spec.threads or default_threads()
    seconds = spec.seconds / len(models)
    for model in models:
        write(f"{model.side}: opening {model.path}")
        path = bundle.folder / model.path
        heads = list(student.heads)
        run = model_runner(
            path,
            model.provider,
            heads,
            precision=model.precision,
            threads=threads,
        )
        start = time.perf_counter()
        bench = ModelBench(
            run=run,
            encoder=encoder,
            workload=workload,
            spec=spec,
            model=model,
            write=write,
        )
        bench.closed_loop(seconds / 2)
        bench.open_loop(start + seconds - time.perf_counter())
    if not any(model.closed or model.open for model in models):
        raise UsageError(f"Nothing was measured in --seconds {spec.seconds:g}: give it more time.")
    cpu, *gpus = device_names()
    facts = BenchFacts(
        format=2,
        name=bundle.name,
        bundle={"version": bundle.version, "manifest_sha256": bundle.manifest.sha256},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spec=spec.model_dump(mode="json"),
        machine={
            "cpu": cpu.rpartition(", ")[0],
            "gpu": next(iter(gpus), None),
            "usable_cores": usable_cores(),
            "threads": threads,
            "load": {"before": load_before, "after": machine_load(), "cores": os.cpu_count()},
            "python": platform.python_version(),
            "versions": installed_versions(
                ("relabel-ir", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy", "tokenizers")
            ),
        },
        workload={**vars(workload.lengths), "from": "lengths" if workload.texts is None else "pairs"},
        models=models,
        default_precision=student.default_precision,
    )
    return facts, judge_gates(gates, figures(models, spec), None)


def machine_load() -> float | None:
    """Processes and threads that ran or waited to run, on average over the last minute; None where nobody counts."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def figures(models: Sequence[ModelLatency], spec: BenchSpec) -> dict[str, float | None]:
    """Every figure that a gate may require, such as `cpu.int8.1x128.p99_ms` or `cpu.int8.highest_rate_by_p99`; None
    where it is not measured, or not known well enough to be stated.
    """
    values: dict[str, float | None] = {}
    for model in models:
        side = f"{model.provider}.{model.precision}"
        for shape in spec.shapes:
            for figure in CELL_FIGURES:
                values[f"{side}.{shape}.{figure}"] = None
        for bounded, _ in bounds(spec):
            values[f"{side}.highest_rate_by_{bounded}"] = None
        for row in model.closed:
            for figure in CELL_FIGURES:
                values[f"{side}.{row.cell}.{figure}"] = getattr(row, figure)
        for slo in model.slo:
            values[f"{side}.highest_rate_by_{slo.figure}"] = slo.highest_rate
    return values


def bounds(spec: BenchSpec) -> list[Bound]:
    """Of the open loop's latencies: the highest rate that keeps each is sought."""
    return [(figure, ms) for figure, ms in (("mean", spec.slo_mean_ms), ("p99", spec.slo_ms)) if ms is not None]


# ------------------------------------------------------------------------------
# What is measured: the rows to ask about, and the models.


@dataclass(frozen=True)
class Workload:
    """Rows to ask about, in the order in which they come. How long a model takes depends on how many rows there are and
    how long they are, so a bundle's own record of lengths suffices; texts of pairs are tokenized as well.

    Args:
        texts: the (query, document) pairs that the rows are of; None where only lengths are known.
    """

    rows: Sequence[TokenRow]
    texts: Sequence[tuple[str, str]] | None
    lengths: TokenLengths


def plan_workload(
    pairs: Sequence[tuple[str, str]] | None, lengths: TokenLengths, encoder: Encoder, *, seed: int
) -> Workload:
    """Pairs in the order given, else rows as long as those that a bundle was tested on, by its own record.

    Raises:
        InputError: there is no pair.
    """
    if pairs is not None:
        if not pairs:
            raise InputError("--pairs holds no pair to measure with.")
        rows = encoder.encode(pairs)
        return Workload(rows, pairs, describe_lengths([len(ids) for ids, _ in rows]))
    tokens, counts = np.array(lengths.histogram, dtype=np.int64).T
    drawn_N = np.random.default_rng(seed).choice(tokens, size=min(MAX_ROWS, lengths.rows), p=counts / counts.sum())
    return Workload([blank_row(encoder, length) for length in drawn_N.tolist()], None, lengths)


def blank_row(encoder: Encoder, length: int) -> TokenRow:
    """A row of so many tokens, all of them in the vocabulary."""
    ids, segments = encoder.encode([("a", "a")])[0]
    repeated = (ids * (length // len(ids) + 1))[:length]
    return repeated, segments if "counts" in encoder.inputs.names else [0] * length if segments else []


def choose_models(models: Sequence[ModelFile], spec: BenchSpec, machine: Machine) -> list[ModelLatency]:
    """The bundle's models to measure on each provider, fp32 first.

    Raises:
        MissingExtraError: a provider is not to be had here.
        UsageError: a precision that the bundle has not for these providers.
    """
    graphs = {model.precision: model.path for model in models if model.format == "onnx"}
    chosen: list[ModelLatency] = []
    for asked in spec.providers:
        provider = ("cuda" if PROVIDERS["cuda"] in machine.providers else "cpu") if asked == "auto" else asked
        if provider == "tensorrt":
            engines = [model for model in models if isinstance(model, EngineFile)]
            faults = [engine_fault(vars(model), machine) for model in engines]
            if None not in faults:
                why = "; ".join(map(str, faults)) or "the bundle holds none"
                raise MissingExtraError(
                    f"--providers tensorrt: no engine of this bundle fits this machine ({why}). Build one with "
                    "`relabel build-engine`, or measure --providers cpu."
                )
            fitting = zip(engines, faults, strict=True)
            chosen += [ModelLatency(one.flavour, one.precision, one.path) for one, fault in fitting if fault is None]
            continue
        if PROVIDERS.get(provider, provider) not in machine.providers:
            install = "Run `pip install 'relabel-ir[openvino]'`, or measure" if provider == OPENVINO else "Measure"
            have = ", ".join(machine.providers)
            raise MissingExtraError(
                f"--providers {asked}: not among what is installed ({have}). {install} --providers cpu."
            )
        paths = dict(graphs)
        if provider == OPENVINO:
            paths = {name: graphs[source] for name in HINTS if (source := ROUNDED.get(name, name)) in graphs}
            if "bf16" not in spec.precisions and not {AMX, AVX512} & set(machine.flags):
                paths.pop("bf16", None)
        chosen += [ModelLatency(provider, precision, path) for precision, path in paths.items()]
    known = {model.precision for model in chosen}
    strange = [name for name in spec.precisions if name not in known]
    if strange:
        raise UsageError(f"--precisions {strange[0]}: the bundle has {', '.join(sorted(known))} for these providers.")
    return [model for model in chosen if not spec.precisions or model.precision in spec.precisions]


# ------------------------------------------------------------------------------
# Measuring.


@dataclass
class ModelBench:
    """One model of a bundle under measurement.

    Args:
        workload: rows that are replayed.
        model: receives what is measured, and where it runs.
        write: receives progress, a line each.
    """

    run: Run
    encoder: Encoder
    workload: Workload
    spec: BenchSpec
    model: ModelLatency
    write: Callable[[str], None]

    def closed_loop(self, seconds: float) -> None:
        """Measure shape after shape, as far as the time suffices; what one leaves goes to the next. The first gets a
        third of the time, since its p99 is asked for most.
        """
        end = time.perf_counter() + seconds
        shapes = self.spec.shapes
        for number, shape in enumerate(shapes):
            number_of_rows, _, length = shape.partition("x")
            rows = int(number_of_rows)
            tokens = None if length == "replay" else int(length)
            if tokens is not None and tokens > self.encoder.max_tokens:
                self.model.not_run.append((shape, TOO_LONG))
                continue
            left_s = end - time.perf_counter()
            parts = len(shapes) - number if number else min(3, len(shapes))
            latency_s, cpu_s = self._timed(self._call(rows, tokens), left_s / parts)
            if len(latency_s) < FEWEST_SAMPLES:
                self.model.not_run.append((shape, TOO_SHORT))
                continue
            seconds = float(latency_s.sum())
            pairs_per_s = float(rows / latency_s.mean())
            self.model.closed.append(
                self._row(
                    shape,
                    latency_s,
                    rows=rows,
                    tokens=tokens,
                    seconds=seconds,
                    pairs_per_s=pairs_per_s,
                    cpu_ms=cpu_s * MS,
                )
            )

    def open_loop(self, seconds: float) -> None:
        """Measure capacity first, in requests/s of full micro-batches with no queue, then rate after rate."""
        spec = self.spec
        rows = self.spec.request_pairs
        limits = bounds(self.spec)
        if seconds <= 0:
            self.model.not_run.append(("open", TOO_SHORT))
            return
        end = time.perf_counter() + seconds
        requests = max(1, spec.max_batch // rows)
        batch_s = float(np.median(time_calls(self._call(requests * rows), seconds * CAPACITY_SHARE)))
        rates = sorted(spec.rates) or [requests / batch_s * load for load in LOADS]
        # as many requests at a low rate, which takes longer, as at a high one, so that p99 is known alike
        parts_s = sum(1 / rate for rate in rates) + HALVINGS * len(limits) * len(rates) / sum(rates)
        each = max(0.0, end - time.perf_counter()) / parts_s

        def measure(rate: float) -> LatencyRow | None:
            offer_s = max(0.0, min(each / rate, end - time.perf_counter()))
            arrival_s = poisson_arrivals(rate, offer_s, seed=spec.seed)
            if min(len(arrival_s), offer_s * rate) < FEWEST_SAMPLES:
                return None
            cpu_before_s = time.process_time()
            latency_s, batches, took_s = serve(
                arrival_s,
                lambda first, end: self._answer(first * rows, end * rows),
                max_requests=requests,
                max_wait_s=spec.max_wait_ms / MS,
                # a growing queue is given up after half as long again; a slow model may still answer what it has begun
                stop_s=offer_s + max(offer_s / 2, 5 * batch_s),
            )
            cpu_s = time.process_time() - cpu_before_s
            unanswered = int(np.isinf(latency_s).sum())
            answered = len(arrival_s) - unanswered
            return self._row(
                "open",
                latency_s[min(np.searchsorted(arrival_s, offer_s * WARM_UP_SHARE), len(arrival_s) - 1) :],
                rows=rows,
                offered_rate=rate,
                answered_rate=answered / took_s,
                mean_batch=answered / max(1, batches),
                unanswered=unanswered,
                seconds=took_s,
                pairs_per_s=answered * rows / took_s,
                cpu_ms=cpu_s * MS / max(1, answered),
            )

        self.model.open = sweep(measure, rates, limits)
        if not self.model.open:
            self.model.not_run.append(("open", TOO_SHORT))
            return
        self.model.capacity_per_s = requests / batch_s
        self.model.slo = [highest_rate(self.model.open, bound) for bound in limits]

    def _timed(self, call: Callable[[int], object], seconds: float) -> tuple[np.ndarray, float]:
        """Seconds of each measured call, none without time, and CPU seconds a call, warm-up included."""
        if seconds <= 0:
            return np.empty(0), 0.0
        calls = 0

        def counted(number: int) -> object:
            nonlocal calls
            calls += 1
            return call(number)

        cpu_before_s = time.process_time()
        latency_s = time_calls(counted, seconds)
        return latency_s, (time.process_time() - cpu_before_s) / calls

    def _call(self, rows: int, tokens: int | None = None) -> Callable[[int], object]:
        """A call that answers so many pairs of the workload, the next ones each time; or, of so many tokens, the same
        batch without padding.
        """
        if tokens is None:
            return lambda number: self._answer(number * rows, (number + 1) * rows)
        batch = self.encoder.collate([blank_row(self.encoder, tokens)] * rows)
        return lambda _: self.run(batch)

    def _answer(self, first: int, end: int) -> None:
        """A server's work as the loader does it: tokenized where texts are known, batched by length, padded.

        Args:
            first, end: pairs of the workload, which begins again after its last.
        """
        places = [place % len(self.workload.rows) for place in range(first, end)]
        rows = [self.workload.rows[place] for place in places]
        if self.workload.texts is not None:
            rows = self.encoder.encode([self.workload.texts[place] for place in places])
        for chosen in length_batches([len(ids) for ids, _ in rows], batch_tokens_on(self.model.provider)):
            self.run(self.encoder.collate([rows[place] for place in chosen]))

    def _row(self, cell: str, latency_s: np.ndarray, **figures: Any) -> LatencyRow:
        """A row of this model, which is reported as progress."""
        summary = summarize(latency_s)
        row = LatencyRow(
            cell=cell,
            samples=len(latency_s),
            mean_ms=summary["mean_ms"],
            p50_ms=summary["p50_ms"],
            p99_ms=summary["p99_ms"],
            p999_ms=summary["p999_ms"],
            **figures,
        )
        rate = "" if row.offered_rate is None else f" at {row.offered_rate:,.1f}/s"
        texts = []
        for quantile in ("p50", "p99"):
            ms = row.latency_ms(quantile)
            if ms is not None:
                texts.append(f"{quantile} {ms:,.2f} ms")
        texts.append(f"{len(latency_s):,} samples")
        self.write(f"{self.model.side} {cell}{rate}: {', '.join(texts)}")
        return row


# ------------------------------------------------------------------------------
# How latency is sampled and summed up.


def time_calls(
    call: Callable[[int], object],
    seconds: float,
    *,
    max_samples: int = 20_000,
    clock: Clock = time.perf_counter,
) -> np.ndarray:
    """Call again and again for a while.

    Args:
        call: receives its number, from 0 on; warm-up calls count too. It returns when the answer lies in host memory.
        seconds: for all of it, warm-up included; one call is measured however long it takes.
    Returns:
        [N] seconds of each measured call, in their order.
    """
    start = clock()
    warm_up = 0
    while warm_up == 0 or clock() - start < seconds * WARM_UP_SHARE:
        call(warm_up)
        warm_up += 1
    latencies: list[float] = []
    before = clock()
    while not latencies or (before - start < seconds and len(latencies) < max_samples):
        call(warm_up + len(latencies))
        after = clock()
        latencies.append(after - before)
        before = after
    return np.array(latencies)


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Arrival times of a Poisson process within `seconds`, float64 [N], rising: given how many arrive, each is equally
    likely at any time. The same seed gives the same times.
    """
    random = np.random.default_rng(seed)
    return np.sort(random.uniform(0.0, seconds, size=random.poisson(rate * seconds)))


def serve(
    arrival_s: np.ndarray,
    answer: Callable[[int, int], object],
    *,
    max_requests: int = 1,
    max_wait_s: float = 0.0,
    stop_s: float,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[np.ndarray, int, float]:
    """Answer requests in the order of their arrival, by one server with micro-batching. Arrivals are drawn before the
    first is served, so the server itself finds what has arrived by now, and no second thread takes part.

    Args:
        arrival_s: [N] scheduled times from the start, rising.
        answer: answers requests from the first number up to the second, and returns when it is done.
        max_requests: of one batch.
        max_wait_s: how long the oldest waits for its batch to fill.
        stop_s: when to stop, answered or not: a queue that only grows would never end.
    Returns:
        [N] seconds from scheduled arrival to answer, infinite where none came before the stop; how many batches the
        answers came in; seconds from the first moment to the last answer.
    """
    done_s = np.full(len(arrival_s), np.inf)
    batches = 0
    first = 0
    now = 0.0
    start = clock()
    while first < len(arrival_s) and now <= stop_s:
        ready = int(np.searchsorted(arrival_s, now, side="right"))
        full = first + max_requests
        closes = arrival_s[first] + max_wait_s
        fills = arrival_s[full - 1] if full <= len(arrival_s) else closes
        if ready >= full or now >= closes:
            end = min(ready, full)
            answer(first, end)
            done_s[first:end] = clock() - start
            batches = batches + 1
            first = end
        else:
            sleep(float(min(closes, fills)) - now)
        now = clock() - start
    return done_s - arrival_s, batches, now


def samples_needed(share: float) -> int:
    """Fewest latencies for which a quantile may be stated.

    The largest of N values exceeds the quantile with a chance of 1 - share^N; the interval's upper end can be one of
    them only when that is at least 97.5 %. The lower end asks the same of the smallest.
    """
    return math.ceil(math.log((1 - LEVEL) / 2) / math.log(max(share, 1 - share)))


def summarize(latency_s: np.ndarray) -> dict[str, float | None]:
    """Figures of latencies.

    Args:
        latency_s: [N] seconds, one at least; infinite for a request that was never answered.
    Returns:
        `mean_ms`, `p50_ms`, `p99_ms` and `p999_ms`; None where there are too few latencies, or one never came.
    """
    found = {"mean_ms": float(latency_s.mean())}
    for name, share in QUANTILES.items():
        is_known = len(latency_s) >= samples_needed(share)
        found[f"{name}_ms"] = float(np.quantile(latency_s, share, method="inverted_cdf")) if is_known else math.inf
    return {name: value * MS if math.isfinite(value) else None for name, value in found.items()}


def _around(points: Sequence[LatencyRow], bound: Bound) -> tuple[LatencyRow | None, LatencyRow | None]:
    """The highest rate that keeps a bound below the first that breaks it, and that first one. A rate breaks it by its
    latency, or by a queue that only grew; one with too few requests to know neither keeps nor breaks it.
    """
    best = None
    for point in _by_rate(points):
        value = point.latency_ms(bound[0])
        if point.unanswered or (value is not None and value > bound[1]):
            return best, point
        if value is not None:
            best = point
    return best, None


def sweep(
    measure: Callable[[float], LatencyRow | None], rates: Sequence[float], bounds: Sequence[Bound]
) -> list[LatencyRow]:
    """Measure rate after rate, and closer around each bound.

    Args:
        measure: one rate; None where the time is too short for it.
        rates: rising. The sweep ends after the first whose queue only grew.
    Returns:
        By offered rate.
    """
    points: list[LatencyRow] = []
    for rate in rates:
        point = measure(rate)
        if point is None:
            continue
        points.append(point)
        if point.unanswered:
            break
    for bound in bounds:
        for _ in range(HALVINGS):
            best, broken = _around(points, bound)
            if broken is None:
                break
            lower = best.rate if best else 0.0
            between = measure((broken.rate + lower) / 2)
            if between is None:
                break
            points.append(between)
    return _by_rate(points)


def highest_rate(points: Sequence[LatencyRow], bound: Bound) -> HighestRate:
    """The highest rate that keeps a bound."""
    best, broken = _around(points, bound)
    return HighestRate(
        figure=bound[0],
        slo_ms=bound[1],
        highest_rate=best.offered_rate if best else None,
        mean_ms=best.mean_ms if best else None,
        p99_ms=best.p99_ms if best else None,
        is_at_least=best is not None and broken is None,
    )


def _by_rate(points: Sequence[LatencyRow]) -> list[LatencyRow]:
    return sorted(points, key=lambda point: point.rate)


# ------------------------------------------------------------------------------
# Where figures lie.


def measurements_folder(folder: Path) -> Path:
    """Where figures of a bundle lie: `measurements/NAME` next to it, of a pulled version in the folder pulled to."""
    place = folder.resolve()
    top = place.parent.parent if place.parent.name == VERSIONS else place.parent
    return top / "measurements" / place.name


def measurements_of(folder: Path, manifest_sha256: str) -> list[BenchFacts]:
    """What benches of the bundle in a folder found, newest first. A file names its bundle's manifest, so figures of an
    earlier bundle at the same place are not taken for those of the present one.

    Raises:
        ManifestError: a file of them is damaged, or of another format.
    """
    what = "not latencies as this relabel writes them"
    advice = "Measure them again: relabel bench."
    found = [
        read_record(
            BenchFacts,
            path.read_bytes(),
            str(path),
            what,
            advice,
        )
        for path in sorted(measurements_folder(folder).glob("*.json"))
    ]
    return sorted(
        [facts for facts in found if facts.bundle.get("manifest_sha256") == manifest_sha256],
        key=lambda facts: facts.measured_at,
        reverse=True,
    )


def machine_name(machine: dict[str, Any]) -> str:
    """A file's name for machines of one kind, `amd-epyc-9b45-2-cores`: by what they compute with, not by host name."""
    return re.sub(
        r"[^a-z0-9]+", "-", " ".join([machine["cpu"], f"{machine['usable_cores']} cores", machine["gpu"] or ""]).lower()
    ).strip("-")[:100]


def check_place(folder: Path) -> None:
    """Refuse a place for figures before anything is measured for it: a bundle, which they would make unreadable, or a
    folder that can't be written.

    Raises:
        UsageError: it is a bundle, or lies in one.
        StoreError, DiskFullError: it can't be written.
    """
    if any((one / MANIFEST_NAME).is_file() for one in (folder.resolve(), *folder.resolve().parents)):
        raise UsageError(f"--to {folder}: holds a {MANIFEST_NAME}, or is inside such a folder. Name another folder.")
    with translate_errors("write the figures (or name another folder: --to DIR)", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


# ------------------------------------------------------------------------------
# For people: a table, warnings of a line each, a plot.


def write_results(folder: Path, facts: BenchFacts) -> Path:
    """Write figures, the table and the plot into a folder, in place of earlier ones of such a machine; the file of
    figures.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    head, *rows = latency_rows(facts)
    lines = [
        f"# {facts.name}",
        "",
        machine_line(facts),
        "",
        *(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]),
    ]
    lines += ["", "–: too few latencies were measured to state it. All figures: the file `.json`."]
    lines += [f"\n{warning}" for warning in warnings_of(facts)]
    store = LocalStore(folder)
    name = machine_name(facts.machine)
    store.put(f"{name}.svg", plot(facts))
    store.put(f"{name}.md", ("\n".join(lines) + "\n").encode())
    store.put(f"{name}.json", readable_json(plain(facts)))
    return folder / f"{name}.json"


def machine_line(facts: BenchFacts) -> str:
    """What it was measured on, and with what."""
    machine = facts.machine
    workload = facts.workload
    source = "its own record of lengths" if workload["from"] == "lengths" else "pairs of a file"
    versions = machine["versions"].items()
    runtimes = [f"{name} {version}" for name, version in versions if name.startswith(("onnxruntime", "openvino"))]
    used = filter(None, [machine["cpu"], machine["gpu"], f"threads: {machine['threads']}", *runtimes])
    return (
        f"Measured {facts.measured_at[:10]} on {', '.join(used)}. "
        f"Replayed lengths are of {source} (p50 {workload['p50']}, p99 {workload['p99']} tokens). "
        f"By default the bundle answers in {facts.default_precision}."
    )


def latency_rows(facts: BenchFacts) -> list[list[str]]:
    """A row a closed-loop cell or a rate; the first row is the head."""
    table = [["model", "measured", "samples", "mean ms", "CPU ms", "p50 ms", "p99 ms", "p99.9 ms", "pairs/s"]]
    for model in facts.models:
        for row in (*model.closed, *model.open):
            latencies = (row.mean_ms, row.cpu_ms, row.p50_ms, row.p99_ms, row.p999_ms)
            table.append(
                [
                    model.side,
                    _measured_text(row, model.slo),
                    f"{row.samples:,}",
                    *map(_number, latencies),
                    _number(row.pairs_per_s, 0),
                ]
            )
    return table


def _measured_text(row: LatencyRow, slos: Sequence[HighestRate]) -> str:
    if row.offered_rate is None:
        return row.cell
    text = f"{row.cell}, {row.offered_rate:,.1f}/s offered"
    if row.unanswered:
        text += f", {row.unanswered:,} never answered"
    for slo in slos:
        if slo.highest_rate == row.offered_rate:
            text += f" (highest with {slo.figure} ≤ {slo.slo_ms:g} ms)"
    return text


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def warnings_of(facts: BenchFacts) -> list[str]:
    """What a reader of the figures has to know, a line each: a busy machine, what was left out, a bound that was
    missed.
    """
    lines = [f"the machine was busy: {why}. Measure again on an idle one." for why in _signs_of_other_work(facts)]
    for model in facts.models:
        if model.not_run:
            name, reason = model.not_run[0]
            lines.append(f"{model.side}: {len(model.not_run)} not measured, {name} first: {reason}")
        for slo in model.slo:
            if slo.highest_rate is None:
                lines.append(f"{model.side}: {_why_no_rate(model, slo, facts.spec.get('seconds'))}")
    return lines


def _why_no_rate(model: ModelLatency, slo: HighestRate, seconds: float | None) -> str:
    """Why no rate is known to keep a bound: none does, or its figure could not be measured where one might."""
    bound = f"{slo.figure} ≤ {slo.slo_ms:g} ms"
    _, broken = _around(model.open, (slo.figure, slo.slo_ms))
    unknown = [row for row in model.open if row.latency_ms(slo.figure) is None and not row.unanswered]
    if broken is not None:
        unknown = [row for row in unknown if row.rate < broken.rate]
    if not unknown:
        return f"no rate that was tried keeps {bound}."
    most = max(row.samples for row in unknown)
    needed = samples_needed(QUANTILES[slo.figure])
    below = "" if broken is None else f" below {broken.rate:,.1f}/s"
    advice = "Give more --seconds"
    if seconds is not None:
        advice += f", about {math.ceil(seconds * needed / most / 10) * 10:,}"
    return (
        f"whether a rate keeps {bound} is not known: {slo.figure} could not be measured{below}, with {most:,} "
        f"samples at a rate where {needed:,} are needed. {advice}."
    )


def _signs_of_other_work(facts: BenchFacts) -> list[str]:
    """What shows that other processes had the cores meanwhile, in words."""
    signs = []
    load = facts.machine.get("load") or {}
    cores = load.get("cores") or facts.machine["usable_cores"]
    before = load.get("before")
    after = load.get("after")
    if before is not None and before > MOST_LOAD * cores:
        signs.append(f"its load was {before:.1f} on {cores} cores before the bench began")
    if after is not None and after - facts.machine["threads"] > MOST_LOAD * cores:
        signs.append(f"its load was {after:.1f} on {cores} cores at the end, with {facts.machine['threads']} threads")
    for model in facts.models:
        if model.provider not in ("cpu", OPENVINO):
            continue  # waits for another device
        for row in model.closed:
            if row.cpu_ms and row.mean_ms is not None and row.mean_ms > MOST_WAITING * row.cpu_ms:
                had = f"had {row.cpu_ms:,.1f} ms of CPU time"
                signs.append(f"{model.side} {row.cell}: a request took {row.mean_ms:,.1f} ms and {had}")
                break
    return signs


def plot(facts: BenchFacts) -> bytes:
    """p50 and p99 against the offered rate, by model, as SVG. The same figures give the same bytes."""
    matplotlib: Any = require("matplotlib", extra="cpu", purpose="The plot of a bench")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a bench").Figure
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        figure = figure_class(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for model in facts.models:
            for name, style in (("p50", ":"), ("p99", "-")):
                rows = [row for row in model.open if row.latency_ms(name) is not None]
                if rows:
                    axes.plot(
                        [row.rate for row in rows],
                        [row.latency_ms(name) for row in rows],
                        style,
                        marker="o",
                        markersize=3,
                        linewidth=1,
                        label=f"{model.side}: {name}",
                    )
        for bound in {slo.slo_ms for slo in chain.from_iterable(model.slo for model in facts.models)}:
            axes.axhline(bound, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="requests/s offered", ylabel="ms from scheduled arrival", yscale="log", title=facts.name)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
