"""What a bench measures: the rows to ask about, models, closed-loop cells, and the names of the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from relabel.export.bench.latency import Bound
from relabel.export.bench.records import BenchFacts
from relabel.export.bundle_facts import EngineFile, ModelFile, TokenLengths, describe_lengths
from relabel.export.loader import AMX, AVX512, HINTS, OPENVINO, PROVIDERS, Encoder, Machine, engine_fault
from relabel.export.specs import BenchSpec, Preset
from relabel.manifests.errors import InputError, MissingExtraError, UsageError

# N rows of the workload

TokenRow = tuple[list[int], list[int]]
"""Token ids and segment numbers, as the loader's `Encoder` gives them."""
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


@dataclass(frozen=True)
class Workload:
    """Rows to ask about, in the order in which they come. How long a model takes depends on how many rows there are and
    how long they are, so a bundle's own record of lengths suffices; texts of pairs are tokenized in the open loop too.

    Args:
        texts: the (query, document) pairs that the rows are of; None where only lengths are known.
        source: where their lengths are from: the bundle's record of lengths, or pairs.
    """

    rows: Sequence[TokenRow]
    texts: Sequence[tuple[str, str]] | None
    source: Literal["lengths", "pairs"]
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
        return Workload(rows, pairs, "pairs", describe_lengths([len(ids) for ids, _ in rows]))
    if not lengths.histogram:
        raise InputError("the bundle's manifest records no histogram of lengths. Name pairs with --pairs.")
    drawn_N = draw_lengths(lengths.histogram, min(MAX_ROWS, lengths.rows), seed=seed)
    return Workload([blank_row(encoder, int(length)) for length in drawn_N], None, "lengths", lengths)


def draw_lengths(histogram: Sequence[Sequence[int]], count: int, *, seed: int) -> np.ndarray:
    """Lengths in tokens, int64 [count], in the shares of a histogram of `[tokens, rows]`."""
    tokens, rows = np.array(histogram, dtype=np.int64).T
    return np.asarray(np.random.default_rng(seed).choice(tokens, size=count, p=rows / rows.sum()))


def blank_row(encoder: Encoder, length: int) -> TokenRow:
    """A row of so many tokens, all of them in the vocabulary."""
    ids, segments = encoder.encode([("a", "a")])[0]
    repeated = (ids * (length // len(ids) + 1))[:length]
    if "counts" in encoder.inputs.names:
        return repeated, segments
    return repeated, [0] * length if segments else []


def fixed_batch(encoder: Encoder, rows: int, tokens: int) -> dict[str, np.ndarray]:
    """A batch of one shape, without padding."""
    return encoder.collate([blank_row(encoder, tokens)] * rows)


@dataclass(frozen=True)
class BenchModel:
    """A model and where it runs.

    Args:
        asked: the provider that was asked for.
        provider: where it runs: another one only where falling back was allowed.
        path: of the graph, relative to the bundle.
    """

    asked: str
    provider: str
    precision: str
    path: str

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"{self.provider} {self.precision}"


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


def choose_models(models: Sequence[ModelFile], spec: BenchSpec, machine: Machine) -> list[BenchModel]:
    """The bundle's models to measure on each provider, fp32 first.

    Raises:
        MissingExtraError: a provider is not to be had here, and falling back was not allowed.
        UsageError: a precision that the bundle has not.
    """
    known = {model.precision for model in models} | (set(HINTS) if OPENVINO in spec.providers else set())
    if strange := [name for name in spec.precisions if name not in known]:
        raise UsageError(f"--precisions {strange[0]}: the bundle has {', '.join(sorted(known))}.")
    found: dict[BenchModel, None] = {}
    for asked in spec.providers:
        here = _models_on(models, asked, spec, machine)
        if not here:
            raise UsageError(f"--precisions {', '.join(spec.precisions)}: no such model for {asked}.")
        found.update(dict.fromkeys(here))
    return list(found)


def _models_on(models: Sequence[ModelFile], asked: str, spec: BenchSpec, machine: Machine) -> list[BenchModel]:
    wanted = [model for model in models if not spec.precisions or model.precision in spec.precisions]
    graphs = [model for model in wanted if model.format == "onnx"]
    if asked == "tensorrt":
        engines = [(model, engine_fault(vars(model), machine)) for model in wanted if isinstance(model, EngineFile)]
        if fitting := [model for model, fault in engines if fault is None]:
            return [BenchModel(asked, model.flavour, model.precision, model.path) for model in fitting]
        faults = "; ".join(f"{model.path}: {fault}" for model, fault in engines) or "the bundle holds none"
        missing = f"no engine of this bundle fits this machine ({faults}). Build one with `relabel build-engine`"
    elif asked == OPENVINO:
        if OPENVINO in machine.providers:
            plain = next(model for model in models if (model.format, model.precision) == ("onnx", "fp32"))
            here = spec.precisions or (list(HINTS) if {AMX, AVX512} & set(machine.flags) else ["fp32"])
            return [BenchModel(asked, OPENVINO, name, plain.path) for name in HINTS if name in here]
        missing = "it is not installed. Run `pip install 'relabel-ir[openvino]'`"
    else:
        provider = ("cuda" if PROVIDERS["cuda"] in machine.providers else "cpu") if asked == "auto" else asked
        if PROVIDERS[provider] in machine.providers:
            return [BenchModel(asked, provider, model.precision, model.path) for model in graphs]
        there = ", ".join(machine.providers)
        missing = f"this onnxruntime has no {PROVIDERS[provider]} ({there}). Install one that does"
    if not spec.allows_fallback:
        raise MissingExtraError(f"--providers {asked}: {missing}, or measure on the CPU with --allow-fallback.")
    return [BenchModel(asked, "cpu", model.precision, model.path) for model in graphs]


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
    bounds: dict[Preset, list[Bound]] = {}
    for preset in spec.presets:
        if preset == "serving":
            ms = SERVING_MS if spec.slo_ms is None else spec.slo_ms
            bounds[preset] = [Bound("mean", ms), Bound("p99", ms)]
        elif preset == "grid":
            bounds[preset] = [] if spec.slo_ms is None else [Bound("p99", spec.slo_ms)]
    return bounds


def planned_figures(models: Sequence[BenchModel], cells: Sequence[Cell], spec: BenchSpec) -> list[str]:
    """Every name that a gate may require, known before anything is measured: `cpu.int8.1x128.p99_ms`,
    `cpu.int8.grid.highest_rate`. Where falling back is allowed, a model's figures may be named after the CPU.
    """
    names = [f"{cell.name}.{key}" for cell in cells for key in CELL_FIGURES]
    names += [_rate_name(preset, bound.figure) for preset, bounds in open_presets(spec).items() for bound in bounds]
    models_here = [f"{model.provider}.{model.precision}" for model in models]
    models_here += [f"cpu.{model.precision}" for model in models if spec.allows_fallback]
    return [f"{model}.{name}" for model in dict.fromkeys(models_here) for name in names]


def measured_figures(facts: BenchFacts, planned: Iterable[str]) -> dict[str, float | None]:
    """What was measured, by name; None where it was planned and then left out, or is not known well enough to be
    stated.
    """
    found: dict[str, float | None] = dict.fromkeys(planned)
    for model in facts.models:
        name = f"{model.provider}.{model.precision}"
        found |= {f"{name}.{row.cell}.{key}": getattr(row, key) for row in model.closed for key in CELL_FIGURES}
        found |= {f"{name}.{_rate_name(slo.preset, slo.figure)}": slo.highest_rate for slo in model.slo}
    return found


def _rate_name(preset: str, figure: str) -> str:
    return f"{preset}.highest_rate" if figure == "p99" else f"{preset}.highest_rate_by_{figure}"
