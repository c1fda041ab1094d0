"""A bench of a bundle, within the seconds that were given: every model's closed loop by shape, then its open loop."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from relabel.distill.students.portable import batch_tokens_on, length_batches
from relabel.export.bench.results import (
    FEWEST_SAMPLES,
    HALVINGS,
    LATENCY_FORMAT,
    LOADS,
    MS,
    ROW_KEYS,
    BenchFacts,
    Bound,
    LatencyRow,
    ModelLatency,
    highest_rate,
    poisson_arrivals,
    requests_each,
    serve,
    summarize,
    sweep,
    time_calls,
)
from relabel.export.bundle_facts import EngineFile, ModelFile, TokenLengths, describe_lengths, student_facts
from relabel.export.bundles import Bundle
from relabel.export.loader import (
    AMX,
    AVX512,
    HINTS,
    OPENVINO,
    PROVIDERS,
    ROUNDED,
    BundleError,
    Encoder,
    Machine,
    default_threads,
    engine_fault,
    open_session,
)
from relabel.export.specs import BenchSpec
from relabel.manifests.errors import InputError, MissingExtraError, ModelError, UsageError
from relabel.manifests.metrics.evaluation import Gate, GateVerdict, judge_gates
from relabel.manifests.process import device_names, installed_versions, require, usable_cores

# N rows of the workload

TokenRow = tuple[list[int], list[int]]
"""Token ids and segment numbers, as the loader's `Encoder` gives them."""
Run = Callable[[Mapping[str, np.ndarray]], object]
"""Answers a batch; the answer lies in host memory when it returns, so a device has finished by then."""
LIBRARIES = ("relabel-ir", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy", "tokenizers")
MAX_ROWS = 10_000
CELL_FIGURES = ("p50_ms", "p99_ms", "p999_ms", "mean_ms", "pairs_per_s")
CAPACITY_SHARE = 0.08
"""Of an open loop's time: to find what full micro-batches reach."""
WARM_UP_SHARE = 0.1
"""Of a rate's time: requests that came while the queue was still empty from the start."""
TOO_SHORT = "the time suffices for too few samples. More --seconds."
TOO_LONG = "the student reads no rows of that length."


def bench_bundle(
    bundle: Bundle,
    spec: BenchSpec,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    gates: Sequence[Gate] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[BenchFacts, list[GateVerdict]]:
    """Measure a bundle's models.

    Args:
        bundle: opened, its bytes checked.
        pairs: (query, document) texts to replay; the bundle's recorded lengths by default.
        say: receives progress, a line each.
    Returns:
        The figures, and how they compare with the gates.
    Raises:
        ConfigError: a gate names a figure that will not be measured; before anything is.
        MissingExtraError: a provider is not to be had.
        ManifestError: the bundle holds no student.
        UsageError, InputError, ModelError: see `choose_models`, `plan_workload`, and `open_model`.
    """
    require("onnxruntime", extra="cpu", purpose="A bench")
    student, encoder = student_facts(bundle), Encoder(bundle.folder, bundle.facts["inputs"])
    models = choose_models(student.models, spec, Machine.here())
    workload = plan_workload(pairs, student.inputs.lengths, encoder, seed=spec.seed)
    judge_gates(gates, figures(models, spec), None)
    threads, seconds = spec.threads or default_threads(), spec.seconds / len(models)
    for model in models:
        say(f"{model.side}: opening {model.path}")
        run = open_model(bundle.folder / model.path, model, list(student.heads), threads)
        start = time.perf_counter()
        bench = ModelBench(run, encoder, workload, spec, model, say)
        bench.closed_loop(seconds / 2)
        bench.open_loop(start + seconds - time.perf_counter())
    cpu, *gpus = device_names()
    facts = BenchFacts(
        format=LATENCY_FORMAT,
        name=bundle.name,
        bundle={"version": bundle.version, "manifest_sha256": bundle.manifest.sha256},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spec=spec.model_dump(mode="json"),
        machine={
            "cpu": cpu.rpartition(", ")[0],
            "gpu": next(iter(gpus), None),
            "usable_cores": usable_cores(),
            "threads": threads,
            "python": platform.python_version(),
            "versions": installed_versions(LIBRARIES),
        },
        workload={**vars(workload.lengths), "from": "lengths" if workload.texts is None else "pairs"},
        models=models,
    )
    return facts, judge_gates(gates, figures(models, spec), None)


def figures(models: Sequence[ModelLatency], spec: BenchSpec) -> dict[str, float | None]:
    """Every figure that a gate may require, such as `cpu.int8.1x128.p99_ms` or `cpu.int8.highest_rate_by_p99`; None
    where it is not measured, or not known well enough to be stated.
    """
    found: dict[str, float | None] = {}
    for model in models:
        names = [f"{shape}.{key}" for shape in spec.shapes for key in CELL_FIGURES]
        known = dict.fromkeys([*names, *(f"highest_rate_by_{bound.figure}" for bound in bounds(spec))])
        known |= {f"{row['cell']}.{key}": row[key] for row in model.closed for key in CELL_FIGURES}
        known |= {f"highest_rate_by_{slo['figure']}": slo["highest_rate"] for slo in model.slo}
        found |= {f"{model.provider}.{model.precision}.{name}": value for name, value in known.items()}
    return found


def bounds(spec: BenchSpec) -> list[Bound]:
    """Of the open loop's latencies: the highest rate that keeps each is sought."""
    found = []
    if spec.slo_mean_ms is not None:
        found.append(Bound("mean", spec.slo_mean_ms))
    if spec.slo_ms is not None:
        found.append(Bound("p99", spec.slo_ms))
    return found


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
    size = min(MAX_ROWS, lengths.rows)
    drawn_N = np.random.default_rng(seed).choice(tokens, size=size, p=counts / counts.sum())
    return Workload([blank_row(encoder, length) for length in drawn_N.tolist()], None, lengths)


def blank_row(encoder: Encoder, length: int) -> TokenRow:
    """A row of so many tokens, all of them in the vocabulary."""
    ids, segments = encoder.encode([("a", "a")])[0]
    repeated = (ids * (length // len(ids) + 1))[:length]
    if "counts" in encoder.inputs.names:
        return repeated, segments
    return repeated, [0] * length if segments else []


def choose_models(models: Sequence[ModelFile], spec: BenchSpec, machine: Machine) -> list[ModelLatency]:
    """The bundle's models to measure on each provider, fp32 first.

    Raises:
        MissingExtraError: a provider is not to be had here.
        UsageError: a precision that the bundle has not for these providers.
    """
    graphs = {model.precision: model.path for model in models if model.format == "onnx"}
    found: list[ModelLatency] = []
    for asked in spec.providers:
        provider = ("cuda" if PROVIDERS["cuda"] in machine.providers else "cpu") if asked == "auto" else asked
        if provider == "tensorrt":
            found += _engines_that_fit(models, machine)
            continue
        if PROVIDERS.get(provider, provider) not in machine.providers:
            missing = f"not among what is installed ({', '.join(machine.providers)})"
            install = " Run `pip install 'relabel-ir[openvino]'`." if provider == OPENVINO else ""
            raise MissingExtraError(f"--providers {asked}: {missing}.{install} Or measure --providers cpu.")
        paths = dict(graphs)
        if provider == OPENVINO:
            paths = {name: graphs[source] for name in HINTS if (source := ROUNDED.get(name, name)) in graphs}
            if "bf16" not in spec.precisions and not {AMX, AVX512} & set(machine.flags):
                paths.pop("bf16", None)
        found += [ModelLatency(provider, precision, path) for precision, path in paths.items()]
    known = {model.precision for model in found}
    if strange := [name for name in spec.precisions if name not in known]:
        raise UsageError(f"--precisions {strange[0]}: the bundle has {', '.join(sorted(known))} for these providers.")
    return [model for model in found if not spec.precisions or model.precision in spec.precisions]


def _engines_that_fit(models: Sequence[ModelFile], machine: Machine) -> list[ModelLatency]:
    engines = [model for model in models if isinstance(model, EngineFile)]
    faults = [engine_fault(vars(model), machine) for model in engines]
    fitting = [model for model, fault in zip(engines, faults, strict=True) if fault is None]
    if not fitting:
        found = "; ".join(map(str, faults)) or "the bundle holds none"
        raise MissingExtraError(
            f"--providers tensorrt: no engine of this bundle fits this machine ({found}). Build one with "
            "`relabel build-engine`, or measure --providers cpu."
        )
    return [ModelLatency(model.flavour, model.precision, model.path) for model in fitting]


# ------------------------------------------------------------------------------
# Measuring.


def open_model(path: Path, model: ModelLatency, heads: Sequence[str], threads: int) -> Run:
    """Open a model on its provider.

    Args:
        heads: outputs to ask for.
        threads: of the CPU.
    Raises:
        MissingExtraError: it can't be opened there.
    """
    try:
        session = open_session(path, model.provider, precision=model.precision, threads=threads)
    except BundleError as exc:
        raise MissingExtraError(str(exc)) from exc

    def run(batch: Mapping[str, np.ndarray]) -> object:
        try:
            return session.run(heads, batch)
        except Exception as exc:  # the runtimes' errors share no other class
            rows, tokens = next(iter(batch.values())).shape
            reason = str(exc).splitlines()[0].rpartition(" : ")[2][:200]
            raise ModelError(f"{path.name}: can't run {rows} rows of {tokens} tokens ({reason}).") from exc

    return run


@dataclass
class ModelBench:
    """One model of a bundle under measurement.

    Args:
        workload: rows that are replayed.
        model: receives what is measured, and where it runs.
        say: receives progress, a line each.
    """

    run: Run
    encoder: Encoder
    workload: Workload
    spec: BenchSpec
    model: ModelLatency
    say: Callable[[str], None]

    def closed_loop(self, seconds: float) -> None:
        """Measure shape after shape, as far as the time suffices; what one leaves goes to the next. The first gets a
        third of the time, since its p99 is asked for most.
        """
        end, shapes = time.perf_counter() + seconds, self.spec.shapes
        for number, shape in enumerate(shapes):
            number_of_rows, _, length = shape.partition("x")
            rows, tokens = int(number_of_rows), None if length == "replay" else int(length)
            if tokens is not None and tokens > self.encoder.max_tokens:
                self.model.not_run.append((shape, TOO_LONG))
                continue
            left_s = end - time.perf_counter()
            parts = len(shapes) - number if number else min(3, len(shapes))
            call = self._replay(rows) if tokens is None else self._same_batch(rows, tokens)
            latency_s = time_calls(call, left_s / parts) if left_s > 0 else np.empty(0)
            if len(latency_s) < FEWEST_SAMPLES:
                self.model.not_run.append((shape, TOO_SHORT))
                continue
            row = self._row(
                shape,
                latency_s,
                rows=rows,
                tokens=tokens,
                seconds=float(latency_s.sum()),
                pairs_per_s=float(rows / latency_s.mean()),
            )
            self.model.closed.append(row)

    def open_loop(self, seconds: float) -> None:
        """Measure capacity first, in requests/s of full micro-batches with no queue, then rate after rate."""
        spec, rows, limits = self.spec, self.spec.request_pairs, bounds(self.spec)
        if seconds <= 0:
            self.model.not_run.append(("open", TOO_SHORT))
            return
        end = time.perf_counter() + seconds
        requests = max(1, spec.max_batch // rows)
        batch_s = float(np.median(time_calls(self._replay(requests * rows), seconds * CAPACITY_SHARE)))
        rates = sorted(spec.rates) or [requests / batch_s * load for load in LOADS]
        each = requests_each(rates, max(0.0, end - time.perf_counter()), more=HALVINGS * len(limits))

        def measure(rate: float) -> LatencyRow | None:
            offer_s = max(0.0, min(each / rate, end - time.perf_counter()))
            arrival_s = poisson_arrivals(rate, offer_s, seed=spec.seed)
            if min(len(arrival_s), offer_s * rate) < FEWEST_SAMPLES:
                return None
            served = serve(
                arrival_s,
                lambda first, end: self._answer(first * rows, end * rows),
                max_requests=requests,
                max_wait_s=spec.max_wait_ms / MS,
                # a growing queue is given up after half as long again; a slow model may still answer what it has begun
                stop_s=offer_s + max(offer_s / 2, 5 * batch_s),
            )
            answered = len(arrival_s) - served.unanswered
            kept_s = served.latency_s[min(np.searchsorted(arrival_s, offer_s * WARM_UP_SHARE), len(arrival_s) - 1) :]
            return self._row(
                "open",
                kept_s,
                rows=rows,
                offered_rate=rate,
                answered_rate=answered / served.seconds,
                mean_batch=answered / max(1, served.batches),
                unanswered=served.unanswered,
                seconds=served.seconds,
                pairs_per_s=answered * rows / served.seconds,
            )

        self.model.open = sweep(measure, rates, limits)
        if not self.model.open:
            self.model.not_run.append(("open", TOO_SHORT))
            return
        self.model.capacity_per_s = requests / batch_s
        self.model.slo = [highest_rate(self.model.open, bound) for bound in limits]

    def _same_batch(self, rows: int, tokens: int) -> Callable[[int], object]:
        """A call that runs one batch without padding."""
        batch = self.encoder.collate([blank_row(self.encoder, tokens)] * rows)
        return lambda _: self.run(batch)

    def _replay(self, rows: int) -> Callable[[int], object]:
        """A call that answers so many pairs of the workload, the next ones each time."""
        return lambda number: self._answer(number * rows, (number + 1) * rows)

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

    def _row(self, cell: str, latency_s: np.ndarray, **known: Any) -> LatencyRow:
        """A row of this model, which is reported as progress."""
        row: LatencyRow = {**dict.fromkeys(ROW_KEYS), "cell": cell, "samples": len(latency_s)}
        row |= known | summarize(latency_s)
        rate = "" if row["offered_rate"] is None else f" at {row['offered_rate']:,.1f}/s"
        figures = [f"{name} {ms:,.2f} ms" for name in ("p50", "p99") if (ms := row[f"{name}_ms"]) is not None]
        self.say(f"{self.model.side} {cell}{rate}: {', '.join([*figures, f'{len(latency_s):,} samples'])}")
        return row
