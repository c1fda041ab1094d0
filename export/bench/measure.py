"""A bench of a bundle, within the seconds that were given: the models and cells are planned, then every model's
closed-loop cells and its open loop are measured."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.export.bench.latency import (
    FEWEST_SAMPLES,
    HALVINGS,
    LOADS,
    MS,
    ROW_KEYS,
    Bound,
    LatencyRow,
    highest_rate,
    poisson_arrivals,
    requests_each,
    serve,
    summarize,
    sweep,
    time_calls,
)
from relabel.export.bench.results import LATENCY_FORMAT, BenchFacts, ModelLatency
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
from relabel.export.specs import BenchSpec, Preset
from relabel.manifests.errors import InputError, MissingExtraError, ModelError, UsageError
from relabel.manifests.metrics.gates import Gate, GateVerdict, judge_gates
from relabel.manifests.process import device_names, installed_versions, require, usable_cores

# N rows of the workload

TokenRow = tuple[list[int], list[int]]
"""Token ids and segment numbers, as the loader's `Encoder` gives them."""
Run = Callable[[Mapping[str, np.ndarray]], object]
"""Answers a batch; the answer lies in host memory when it returns, so a device has finished by then."""
Answer = Callable[[int, int], None]
"""A server's work: answers pairs from the first up to the second number."""
LIBRARIES = ("relabel-ir", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy", "tokenizers")
MAX_ROWS = 10_000
PUBLIC_SHAPES = ((1, 128), (32, 128), (1, 384))
"""Rows and tokens of the batches that public tables state, so that figures compare."""
TABLE3_DOCUMENTS = (1, 10, 100, 1_000, 10_000)
"""Documents a query of R3A's Table 3, which states what teacher and student take for them."""
REQUEST_PAIRS = {"grid": 1, "serving": 100}
"""Pairs of an open-loop request, by preset."""
SERVING_MS = 150.0
"""R3A's serving (section 3.5): an "average response time" of about 150 ms at 200 queries a second a GPU, 100 documents
each.
"""
CELL_FIGURES = ("p50_ms", "p99_ms", "p999_ms", "mean_ms", "pairs_per_s")
CAPACITY_SHARE = 0.08
"""Of an open loop's time: to find what full micro-batches reach."""
WARM_UP_SHARE = 0.1
"""Of a rate's time: requests that came while the queue was still empty from the start."""
REPLAYED_BATCHES = 64
TOO_SHORT = "the time suffices for too few samples. More --seconds."
TOO_LONG = "the model takes no rows of that length."


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
        `latency.json`, and how its figures compare with the gates.
    Raises:
        ConfigError: a gate names a figure that will not be measured; before anything is.
        MissingExtraError: a provider is not to be had.
        ManifestError: the bundle holds no student.
        UsageError, InputError, ModelError: see `choose_models`, `plan_workload`, and `ModelBench.open`.
    """
    require("onnxruntime", extra="cpu", purpose="A bench")
    student, encoder = student_facts(bundle), Encoder(bundle.folder, bundle.facts["inputs"])
    models = choose_models(student.models, spec, Machine.here())
    workload = plan_workload(pairs, student.inputs.lengths, encoder, seed=spec.seed)
    cells = plan_cells(spec, workload.lengths)
    names = planned_figures(models, cells, spec)
    judge_gates(gates, dict.fromkeys(names), None)
    threads, left_s = spec.threads or default_threads(), spec.seconds
    for number, model in enumerate(models):
        say(f"{model.side}: opening {model.path}")
        bench = ModelBench(bundle, list(student.heads), spec, encoder, workload, threads, model, say)
        start, share_s = time.perf_counter(), left_s / (len(models) - number)
        bench.measure(cells, share_s)
        left_s -= min(share_s, time.perf_counter() - start)  # what one leaves goes to the others
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
    return facts, judge_gates(gates, measured_figures(facts, names), None)


# ------------------------------------------------------------------------------
# What is measured: the rows to ask about, models, closed-loop cells, and the names of the figures.


@dataclass(frozen=True)
class Workload:
    """Rows to ask about, in the order in which they come. How long a model takes depends on how many rows there are and
    how long they are, so a bundle's own record of lengths suffices; texts of pairs are tokenized in the open loop too.

    Args:
        texts: the (query, document) pairs that the rows are of; None where only lengths are known.
    """

    rows: Sequence[TokenRow]
    texts: Sequence[tuple[str, str]] | None
    lengths: TokenLengths

    def draw(self, count: int, *, seed: int) -> Workload:
        """So many rows, drawn with replacement: stretches of a workload of any size."""
        places = np.random.default_rng(seed).integers(0, len(self.rows), size=count).tolist()
        texts = self.texts and [self.texts[place] for place in places]
        return replace(self, rows=[self.rows[place] for place in places], texts=texts)


def plan_workload(
    pairs: Sequence[tuple[str, str]] | None, lengths: TokenLengths, encoder: Encoder, *, seed: int
) -> Workload:
    """Pairs in the order given, else rows as long as those that a bundle was tested on, by its own record.

    Raises:
        InputError: there is no pair, or the bundle records no histogram.
    """
    if pairs is not None:
        if not pairs:
            raise InputError("--pairs holds no pair to measure with.")
        rows = encoder.encode(pairs)
        return Workload(rows, pairs, describe_lengths([len(ids) for ids, _ in rows]))
    if not lengths.histogram:
        raise InputError("the bundle's manifest records no histogram of lengths. Name pairs with --pairs.")
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


@dataclass(frozen=True)
class Cell:
    """A closed-loop measurement.

    Args:
        name: `1x128` (rows x tokens), `8xreplay`, `table3-1000`.
        rows: pairs of a request.
        tokens: of each; None where they are replayed.
    """

    preset: Preset
    name: str
    rows: int
    tokens: int | None

    @property
    def is_single(self) -> bool:
        """Whether it is one pair of real lengths, which goes before all others."""
        return (self.preset, self.rows, self.tokens) == ("grid", 1, None)

    def size(self, mean_tokens: float) -> float:
        """Tokens to compute, about."""
        return self.rows * (self.tokens or mean_tokens)


def choose_models(models: Sequence[ModelFile], spec: BenchSpec, machine: Machine) -> list[ModelLatency]:
    """The bundle's models to measure on each provider, fp32 first.

    Raises:
        MissingExtraError: a provider is not to be had here.
        UsageError: a precision that the bundle has not.
    """
    known = {model.precision for model in models} | (set(HINTS) if OPENVINO in spec.providers else set())
    if strange := [name for name in spec.precisions if name not in known]:
        raise UsageError(f"--precisions {strange[0]}: the bundle has {', '.join(sorted(known))}.")
    found: list[ModelLatency] = []
    for asked in spec.providers:
        here = _models_on(models, asked, spec, machine)
        if not here:
            raise UsageError(f"--precisions {', '.join(spec.precisions)}: no such model for {asked}.")
        found += [model for model in here if model not in found]
    return found


def _models_on(models: Sequence[ModelFile], asked: str, spec: BenchSpec, machine: Machine) -> list[ModelLatency]:
    wanted = [model for model in models if not spec.precisions or model.precision in spec.precisions]
    graphs = [model for model in wanted if model.format == "onnx"]
    if asked == "tensorrt":
        engines = [(model, engine_fault(vars(model), machine)) for model in wanted if isinstance(model, EngineFile)]
        if fitting := [model for model, fault in engines if fault is None]:
            return [ModelLatency(model.flavour, model.precision, model.path) for model in fitting]
        faults = "; ".join(f"{model.path}: {fault}" for model, fault in engines) or "the bundle holds none"
        missing = f"no engine of this bundle fits this machine ({faults}). Build one with `relabel build-engine`"
    elif asked == OPENVINO:
        if OPENVINO in machine.providers:
            paths = {model.precision: model.path for model in models if model.format == "onnx"}
            sources = {name: paths.get(ROUNDED.get(name, name)) for name in HINTS}
            if not spec.precisions and not {AMX, AVX512} & set(machine.flags):
                del sources["bf16"]
            wished = spec.precisions or sources
            return [ModelLatency(OPENVINO, name, path) for name, path in sources.items() if path and name in wished]
        missing = "it is not installed. Run `pip install 'relabel-ir[openvino]'`"
    else:
        provider = ("cuda" if PROVIDERS["cuda"] in machine.providers else "cpu") if asked == "auto" else asked
        if PROVIDERS[provider] in machine.providers:
            return [ModelLatency(provider, model.precision, model.path) for model in graphs]
        there = ", ".join(machine.providers)
        missing = f"this onnxruntime has no {PROVIDERS[provider]} ({there}). Install one that does"
    raise MissingExtraError(f"--providers {asked}: {missing}, or measure --providers cpu.")


def plan_cells(spec: BenchSpec, lengths: TokenLengths) -> list[Cell]:
    """Closed-loop cells in the order in which they are measured: one pair of real lengths, then small to large.

    Args:
        lengths: of the workload.
    """
    cells: list[Cell] = []
    if "grid" in spec.presets:
        tokens = spec.lengths or (lengths.p50, lengths.p99)
        shapes = dict.fromkeys([*((rows, length) for rows in spec.batches for length in tokens), *PUBLIC_SHAPES])
        cells += [Cell("grid", f"{rows}xreplay", rows, None) for rows in dict.fromkeys(spec.batches)]
        cells += [Cell("grid", f"{rows}x{length}", rows, length) for rows, length in shapes]
    if "table3" in spec.presets:
        cells += [Cell("table3", f"table3-{documents}", documents, None) for documents in TABLE3_DOCUMENTS]
    return sorted(cells, key=lambda cell: (not cell.is_single, cell.size(lengths.p50)))


def open_presets(spec: BenchSpec) -> dict[Preset, list[Bound]]:
    """Presets that have an open loop, each with the bounds for which the highest rate is sought. `serving` bounds the
    mean, which is what R3A states, and p99.
    """
    serving_ms = spec.slo_ms or SERVING_MS
    bounds: dict[Preset, list[Bound]] = {
        "grid": [Bound("p99", spec.slo_ms)] if spec.slo_ms else [],
        "serving": [Bound("mean", serving_ms), Bound("p99", serving_ms)],
    }
    return {preset: bounds[preset] for preset in spec.presets if preset in bounds}


def planned_figures(models: Sequence[ModelLatency], cells: Sequence[Cell], spec: BenchSpec) -> list[str]:
    """Every name that a gate may require, known before anything is measured: `cpu.int8.1x128.p99_ms`,
    `cpu.int8.grid.highest_rate`.
    """
    names = [f"{cell.name}.{key}" for cell in cells for key in CELL_FIGURES]
    names += [_rate_name(preset, bound.figure) for preset, bounds in open_presets(spec).items() for bound in bounds]
    return [f"{model.provider}.{model.precision}.{name}" for model in models for name in names]


def measured_figures(facts: BenchFacts, planned: Iterable[str]) -> dict[str, float | None]:
    """What was measured, by name; None where it was planned and then left out, or is not known well enough to be
    stated.
    """
    found: dict[str, float | None] = dict.fromkeys(planned)
    for model in facts.models:
        name = f"{model.provider}.{model.precision}"
        found |= {f"{name}.{row['cell']}.{key}": row[key] for row in model.closed for key in CELL_FIGURES}
        found |= {f"{name}.{_rate_name(slo['preset'], slo['figure'])}": slo["highest_rate"] for slo in model.slo}
    return found


def _rate_name(preset: str, figure: str) -> str:
    return f"{preset}.highest_rate" if figure == "p99" else f"{preset}.highest_rate_by_{figure}"


# ------------------------------------------------------------------------------
# Measuring.


@dataclass
class ModelBench:
    """One model of a bundle under measurement.

    Args:
        heads: outputs to ask for.
        workload: rows whose lengths are replayed.
        threads: of the CPU.
        model: receives what is measured, and where it runs.
        say: receives progress, a line each.
    """

    bundle: Bundle
    heads: Sequence[str]
    spec: BenchSpec
    encoder: Encoder
    workload: Workload
    threads: int
    model: ModelLatency
    say: Callable[[str], None]

    def measure(self, cells: Sequence[Cell], seconds: float) -> None:
        """Open the model, and measure its cells and its open loop."""
        run, presets = self.open(), open_presets(self.spec)
        end = time.perf_counter() + seconds
        self._closed_loop(run, cells, end, seconds / 2 if presets else 0.0)
        for number, (preset, bounds) in enumerate(presets.items()):
            self._open_loop(run, preset, bounds, (end - time.perf_counter()) / (len(presets) - number))

    def open(self) -> Run:
        """Open the model on its provider.

        Raises:
            MissingExtraError: it can't be opened there.
        """
        model = self.model
        path = self.bundle.folder / model.path
        try:
            session = open_session(path, model.provider, precision=model.precision, threads=self.threads)
        except BundleError as exc:
            raise MissingExtraError(str(exc)) from exc
        quiet = require("onnxruntime", extra="cpu", purpose="A bench").RunOptions()
        quiet.log_severity_level = 4  # the error is reported by the caller

        def run(batch: Mapping[str, np.ndarray]) -> object:
            try:
                return session.run(self.heads, batch, quiet)
            except Exception as exc:  # the runtimes' errors share no other class
                rows, tokens = next(iter(batch.values())).shape
                reason = str(exc).splitlines()[0].rpartition(" : ")[2][:200]
                raise ModelError(f"{path.name}: can't run {rows} rows of {tokens} tokens ({reason}).") from exc

        return run

    def _closed_loop(self, run: Run, cells: Sequence[Cell], end: float, open_s: float) -> None:
        """Measure cell after cell, small to large, as far as the time suffices; what one leaves goes to the next. One
        pair of real lengths gets a third of the time, since its p99 is asked for most.

        Args:
            end: of the model's time, by the clock; `open_s` of it is for the open loop.
        """
        shares = [max(1, len(cells) // 2) if cell.is_single else 1 for cell in cells]
        for number, cell in enumerate(cells):
            call, scope = self._call(run, cell)
            left_s = end - time.perf_counter() - open_s
            try:
                latency_s = time_calls(call, left_s * shares[number] / sum(shares[number:])) if left_s > 0 else None
            except ModelError:
                if cell.tokens is None or cell.tokens <= self.encoder.max_tokens:
                    raise
                self.model.not_run.append((cell.name, TOO_LONG))
                continue
            if latency_s is None or len(latency_s) < FEWEST_SAMPLES:
                self.model.not_run.append((cell.name, TOO_SHORT))
                continue
            row = self._row(
                "closed",
                cell.preset,
                cell.name,
                latency_s,
                scope=scope,
                rows=cell.rows,
                tokens=cell.tokens,
                seconds=float(latency_s.sum()),
                pairs_per_s=float(cell.rows / latency_s.mean()),
            )
            self.model.closed.append(row)

    def _call(self, run: Run, cell: Cell) -> tuple[Callable[[int], object], str]:
        """What a cell calls, and what that covers."""
        if cell.tokens is not None:
            batch = self.encoder.collate([blank_row(self.encoder, cell.tokens)] * cell.rows)  # without padding
            return lambda _: run(batch), "batch"
        if cell.preset == "table3":
            answer = self._server(run, self.workload.draw(cell.rows, seed=self.spec.seed))
            return lambda _: answer(0, cell.rows), self._scope
        rows = self.workload.draw(cell.rows * REPLAYED_BATCHES, seed=self.spec.seed).rows
        batches = [self.encoder.collate(rows[start : start + cell.rows]) for start in range(0, len(rows), cell.rows)]
        return lambda number: run(batches[number % len(batches)]), "batch"

    def _server(self, run: Run, workload: Workload) -> Answer:
        """A server's work as the loader does it: tokenized where texts are known, batched by length, padded. Numbers
        wrap around.
        """
        encoder, count, batch_tokens = self.encoder, len(workload.rows), batch_tokens_on(self.model.provider)

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

    def _open_loop(self, run: Run, preset: Preset, bounds: Sequence[Bound], seconds: float) -> None:
        """Measure capacity first, in requests/s of full micro-batches with no queue, then rate after rate."""
        spec, rows, cell = self.spec, REQUEST_PAIRS[preset], f"open-{preset}"
        if seconds <= 0:
            self.model.not_run.append((cell, TOO_SHORT))
            return
        requests, answer = max(1, spec.max_batch // rows), self._server(run, self.workload)
        end = time.perf_counter() + seconds
        batch = requests * rows
        batch_s = float(
            np.median(time_calls(lambda number: answer(number * batch, (number + 1) * batch), seconds * CAPACITY_SHARE))
        )
        rates = sorted(spec.rates) or [requests / batch_s * load for load in LOADS]
        each = requests_each(rates, max(0.0, end - time.perf_counter()), more=HALVINGS * len(bounds))
        missing: list[str] = []

        def measure(rate: float) -> LatencyRow | None:
            offer_s = min(each / rate, end - time.perf_counter())
            arrival_s = poisson_arrivals(rate, offer_s, seed=spec.seed)
            if min(len(arrival_s), offer_s * rate) < FEWEST_SAMPLES:
                missing.append(f"{cell} at {rate:,.1f}/s")
                return None
            served = serve(
                arrival_s,
                lambda first, end: answer(first * rows, end * rows),
                max_requests=requests,
                max_wait_s=spec.max_wait_ms / MS,
                # a growing queue is given up after half as long again; a slow model may still answer what it has begun
                stop_s=offer_s + max(offer_s / 2, 5 * batch_s),
            )
            answered = len(arrival_s) - served.unanswered
            kept_s = served.latency_s[min(np.searchsorted(arrival_s, offer_s * WARM_UP_SHARE), len(arrival_s) - 1) :]
            return self._row(
                "open",
                preset,
                cell,
                kept_s,
                scope=self._scope,
                rows=rows,
                offered_rate=rate,
                answered_rate=answered / served.seconds,
                mean_batch=answered / max(1, served.batches),
                unanswered=served.unanswered,
                seconds=served.seconds,
                pairs_per_s=answered * rows / served.seconds,
            )

        points = sweep(measure, rates, bounds)
        self.model.not_run += [(name, TOO_SHORT) for name in (missing if points else [cell])]
        if points:
            self.model.open += points
            self.model.capacity_per_s[preset] = requests / batch_s
            self.model.slo += [highest_rate(points, bound, preset) for bound in bounds]

    @property
    def _scope(self) -> str:
        """What a server's work covers: `texts`, or `tokens` where only lengths are known."""
        return "tokens" if self.workload.texts is None else "texts"

    def _row(
        self, loop: Literal["closed", "open"], preset: Preset, cell: str, latency_s: np.ndarray, **known: Any
    ) -> LatencyRow:
        """A row of this model, which is reported as progress."""
        model = {"provider": self.model.provider, "precision": self.model.precision}
        names = {"preset": preset, "loop": loop, "cell": cell, "samples": len(latency_s)}
        row: LatencyRow = {**dict.fromkeys(ROW_KEYS), **model, **names, **known, **summarize(latency_s)}
        rate = f" at {row['offered_rate']:,.1f}/s" if loop == "open" else ""
        figures = [f"{name} {ms:,.2f} ms" for name in ("p50", "p99") if (ms := row[f"{name}_ms"]) is not None]
        self.say(f"{self.model.side} {cell}{rate}: {', '.join([*figures, f'{len(latency_s):,} samples'])}")
        return row
