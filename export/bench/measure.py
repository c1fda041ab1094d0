"""A bench of a bundle: every model's closed-loop cells, then its open loop, within the seconds that were given."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.export.bench.latency import (
    FEWEST_SAMPLES,
    HALVINGS,
    MS,
    QUANTILES,
    Bound,
    highest_rate,
    plan_rates,
    poisson_arrivals,
    requests_each,
    samples_needed,
    serve,
    summarize,
    sweep,
    time_calls,
)
from relabel.export.bench.plans import (
    REQUEST_PAIRS,
    BenchModel,
    Cell,
    TokenRow,
    Workload,
    choose_models,
    fixed_batch,
    measured_figures,
    open_presets,
    plan_cells,
    plan_workload,
    planned_figures,
)
from relabel.export.bench.records import (
    LATENCY_FORMAT,
    BenchedBundle,
    BenchFacts,
    BoundedRate,
    LatencyRow,
    MeasuredMachine,
    ModelLatency,
    ReplayedLengths,
)
from relabel.export.bundle_facts import student_facts
from relabel.export.bundles import Bundle
from relabel.export.loader import OPENVINO, BundleError, Encoder, Machine, default_threads, open_session
from relabel.export.specs import BenchSpec, Preset
from relabel.manifests.errors import MissingExtraError, ModelError
from relabel.manifests.metrics.gates import Gate, GateVerdict, judge_gates
from relabel.manifests.process import device_names, installed_versions, require, usable_cores

Run = Callable[[Mapping[str, np.ndarray]], object]
"""Answers a batch; the answer lies in host memory when it returns, so a device has finished by then."""
Answer = Callable[[int, int], None]
"""A server's work: answers pairs from the first up to the second number."""
LIBRARIES = ("relabel-ir", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy", "tokenizers")
P99_SAMPLES = samples_needed(QUANTILES["p99"])
SLACK = 1.3
"""Of a cell's time over that of its calls: the warm-up, and calls that take longer than the first."""
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
    planned = choose_models(student.models, spec, Machine.here())
    workload = plan_workload(pairs, student.inputs.lengths, encoder, seed=spec.seed)
    cells = plan_cells(spec, workload.lengths)
    names = planned_figures(planned, cells, spec)
    judge_gates(gates, dict.fromkeys(names), None)
    threads, left_s = spec.threads or default_threads(), spec.seconds
    models = []
    for number, model in enumerate(planned):
        say(f"{model.name}: opening {model.path}")
        bench = ModelBench(bundle, list(student.heads), spec, encoder, workload, threads, model, say)
        start, share_s = time.perf_counter(), left_s / (len(planned) - number)
        models.append(bench.measure(cells, share_s))
        left_s -= min(share_s, time.perf_counter() - start)  # what one leaves goes to the others
    cpu, *gpus = device_names()
    facts = BenchFacts(
        format=LATENCY_FORMAT,
        name=bundle.name,
        bundle=BenchedBundle(bundle.version, bundle.manifest.sha256),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spec=spec.model_dump(mode="json"),
        machine=MeasuredMachine(
            cpu=cpu.rpartition(", ")[0],
            gpu=next(iter(gpus), None),
            usable_cores=usable_cores(),
            threads=threads,
            python=platform.python_version(),
            versions=installed_versions(LIBRARIES),
        ),
        workload=ReplayedLengths(**vars(workload.lengths), from_=workload.source),
        models=models,
    )
    return facts, judge_gates(gates, measured_figures(facts, names), None)


def suffices_text(cells: Sequence[Cell], token_s: float, usual: int, left_s: float, open_s: float) -> str:
    """What a model's time suffices for, by the first cell's calls.

    Args:
        token_s: seconds a token; `usual` tokens has a replayed pair.
        left_s: until the model's time ends, of a single pair with the open loop's `open_s`.
    """
    first_s, *others = [FEWEST_SAMPLES * SLACK * token_s * cell.size(usual) for cell in cells]
    is_single, call_ms = cells[0].is_single, first_s / FEWEST_SAMPLES / SLACK * MS
    whole_s = first_s * P99_SAMPLES / FEWEST_SAMPLES if is_single else first_s
    known = "no figure" if first_s > left_s else "p50 and p99" if is_single and whole_s <= left_s else "p50"
    rest_s = left_s - (whole_s if whole_s <= left_s else first_s) - (open_s if is_single else 0.0)
    reached = sum(upto_s <= rest_s for upto_s in itertools.accumulate(others))
    return (
        f"{left_s:,.0f} s suffice for {known} of {cells[0].name} ({call_ms:,.2f} ms) and for {reached} of "
        f"{len(others)} further cells; all take this model about "
        f"{(whole_s + sum(others)) * (2 if open_s else 1):,.0f} s"
    )


@dataclass
class ModelBench:
    """One model of a bundle under measurement.

    Args:
        heads: outputs to ask for.
        workload: rows whose lengths are replayed.
        threads: of the CPU.
        model: the one that was planned; after `open` where it runs.
        say: receives progress, a line each.
    """

    bundle: Bundle
    heads: Sequence[str]
    spec: BenchSpec
    encoder: Encoder
    workload: Workload
    threads: int
    model: BenchModel
    say: Callable[[str], None]

    def measure(self, cells: Sequence[Cell], seconds: float) -> ModelLatency:
        """Open the model, and measure its cells and its open loop."""
        run, presets = self.open(), open_presets(self.spec)
        not_run: list[tuple[str, str]] = []
        end = time.perf_counter() + seconds
        closed = self._cells(run, cells, end, seconds / 2 if presets else 0.0, not_run)
        rows: list[LatencyRow] = []
        capacity_per_s: dict[str, float] = {}
        slo: list[BoundedRate] = []
        for number, (preset, bounds) in enumerate(presets.items()):
            left_s = (end - time.perf_counter()) / (len(presets) - number)
            capacity, points, missing = self._open_loop(run, preset, bounds, left_s)
            not_run += [(name, TOO_SHORT) for name in missing]
            if points:
                rows += points
                capacity_per_s[preset] = capacity
                slo += [highest_rate(points, bound, preset) for bound in bounds]
        return ModelLatency(
            asked_provider=self.model.asked,
            provider=self.model.provider,
            precision=self.model.precision,
            path=self.model.path,
            closed=closed,
            open=rows,
            capacity_per_s=capacity_per_s,
            slo=slo,
            not_run=not_run,
        )

    def open(self) -> Run:
        """Open the model on its provider, or on the CPU where the runtime falls back and that is allowed.

        Raises:
            MissingExtraError: it can't be opened there.
        """
        model = self.model
        path = self.bundle.folder / model.path
        try:
            session = open_session(path, model.provider, precision=model.precision, threads=self.threads)
        except BundleError as exc:
            if model.provider == "cpu" or not self.spec.allows_fallback:
                raise MissingExtraError(f"{exc} Or measure what this machine has, with --allow-fallback.") from exc
            self.say(f"{model.name}: not to be had here, so on the CPU")
            precision = "fp32" if model.provider == OPENVINO else model.precision  # OpenVINO rounds the fp32 file
            self.model = BenchModel(model.asked, "cpu", precision, model.path)
            session = open_session(path, "cpu", threads=self.threads)
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

    def _cells(
        self, run: Run, cells: Sequence[Cell], end: float, open_s: float, not_run: list[tuple[str, str]]
    ) -> list[LatencyRow]:
        """Measure cell after cell, small to large, as far as the time suffices. A single pair may take the open loop's
        time as well; each of the others gets what its fewest samples take, and an equal share of what all leave.

        Args:
            end: of the model's time, by the clock; `open_s` of it is for the open loop.
            not_run: receives the cells left out, name and reason.
        """
        rows: list[LatencyRow] = []
        token_s, usual = 0.0, self.workload.lengths.p50
        for number, cell in enumerate(cells):
            call, scope = self._call(run, cell)
            left_s = end - time.perf_counter() - (0.0 if cell.is_single else open_s)
            call_s = token_s * cell.size(usual)
            try:
                if left_s > 0 and call_s * FEWEST_SAMPLES * SLACK <= left_s:
                    call_s = float(np.median(time_calls(call, 0.0, fewest=3)))  # a stall is not what calls cost
                    token_s = call_s / cell.size(usual)
                    if number == 0:
                        text = suffices_text(cells, token_s, usual, left_s, open_s)
                        self.say(f"{self.model.name}: {text}")
            except ModelError:
                if cell.tokens is None or cell.tokens <= self.encoder.max_tokens:
                    raise
                not_run.append((cell.name, TOO_LONG))
                continue
            fewest = P99_SAMPLES if cell.is_single and P99_SAMPLES * call_s * SLACK <= left_s else FEWEST_SAMPLES
            if left_s <= 0 or fewest * call_s * SLACK > left_s:
                not_run.append((cell.name, TOO_SHORT))
                continue
            wanted_s = token_s * FEWEST_SAMPLES * SLACK * sum(one.size(usual) for one in cells[number:])
            spare_s = max(0.0, end - time.perf_counter() - open_s - wanted_s) / (len(cells) - number)
            latency_s = time_calls(call, fewest * call_s * SLACK + spare_s, fewest=fewest)
            row = self._row(
                cell.preset,
                "closed",
                cell.name,
                scope,
                rows=cell.rows,
                tokens=cell.tokens,
                samples=len(latency_s),
                seconds=float(latency_s.sum()),
                pairs_per_s=float(cell.rows / latency_s.mean()),
                **summarize(latency_s),
            )
            rows.append(row)
        return rows

    def _call(self, run: Run, cell: Cell) -> tuple[Callable[[int], object], str]:
        """What a cell calls, and what that covers."""
        if cell.tokens is not None:
            batch = fixed_batch(self.encoder, cell.rows, cell.tokens)
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

    def _open_loop(
        self, run: Run, preset: Preset, bounds: Sequence[Bound], seconds: float
    ) -> tuple[float, list[LatencyRow], list[str]]:
        """Measure capacity first, then rate after rate.

        Returns:
            Requests/s of full micro-batches with no queue; a row a rate; what the time was too short for.
        """
        spec, rows, cell = self.spec, REQUEST_PAIRS[preset], f"open-{preset}"
        if seconds <= 0:
            return 0.0, [], [cell]
        requests, answer = max(1, spec.max_batch // rows), self._server(run, self.workload)
        end = time.perf_counter() + seconds
        batch = requests * rows
        batch_s = float(
            np.median(time_calls(lambda number: answer(number * batch, (number + 1) * batch), seconds * CAPACITY_SHARE))
        )
        rates = plan_rates(requests / batch_s, spec.rates)
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
                preset,
                "open",
                cell,
                self._scope,
                rows=rows,
                offered_rate=rate,
                answered_rate=answered / served.seconds,
                mean_batch=answered / max(1, served.batches),
                unanswered=served.unanswered,
                samples=len(kept_s),
                seconds=served.seconds,
                pairs_per_s=answered * rows / served.seconds,
                **summarize(kept_s),
            )

        points = sweep(measure, rates, bounds)
        return requests / batch_s, points, missing if points else [cell]

    @property
    def _scope(self) -> str:
        """What a server's work covers: `texts`, or `tokens` where only lengths are known."""
        return "tokens" if self.workload.texts is None else "texts"

    def _row(self, preset: Preset, loop: str, cell: str, scope: str, **figures: Any) -> LatencyRow:
        """A row of this model, which is reported as progress."""
        row = LatencyRow(
            provider=self.model.provider,
            precision=self.model.precision,
            preset=preset,
            loop=loop,
            cell=cell,
            scope=scope,
            **figures,
        )
        rate = "" if row.offered_rate is None else f" at {row.offered_rate:,.1f}/s"
        known = [f"{name} {ms:,.2f} ms" for name, ms in (("p50", row.p50_ms), ("p99", row.p99_ms)) if ms is not None]
        self.say(f"{self.model.name} {cell}{rate}: {', '.join([*known, f'{row.samples:,} samples'])}")
        return row
