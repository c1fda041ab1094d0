"""What a bench measures and for how long: workloads, models, cells, time budget, and the names of the figures. Opens
nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from relabel.export.bench.latency import FEWEST_SAMPLES, QUANTILES, samples_needed
from relabel.export.bench.records import BenchFacts
from relabel.export.bundle_facts import EngineFile, ModelFile, TokenLengths, describe_lengths
from relabel.export.loader import AMX, AVX512, HINTS, OPENVINO, PROVIDERS, Encoder, Machine, engine_fault
from relabel.export.specs import BenchSpec, Preset
from relabel.manifests.errors import InputError, MissingExtraError, UsageError

# ------------------------------------------------------------------------------
# What is asked while measuring: rows whose lengths are those of real pairs, and batches of one fixed shape.
#
# How long a model takes depends on how many rows there are and how long they are, not on what is in them. So a bundle's
# own record of lengths is workload enough; with pairs at hand their texts are taken, and tokenizing can be timed too.


# N rows of the workload

TokenRow = tuple[list[int], list[int]]
"""Token ids and segment numbers, as the loader's `Encoder` gives them."""
MAX_ROWS = 10_000
PUBLIC_SHAPES = ((1, 128), (32, 128), (1, 384))
"""Rows and tokens of the batches that public tables state, so that figures compare."""
TABLE3_DOCUMENTS = (1, 10, 100, 1_000, 10_000)
"""Documents a query of R3A's Table 3, which states what teacher and student take for them."""
SERVING_DOCUMENTS = 100
SERVING_MS = 150.0
"""R3A's serving (section 3.5): an "average response time" of about 150 ms at 200 queries a second a GPU, 100 documents
each.
"""


@dataclass(frozen=True)
class Workload:
    """Rows to ask about, in the order in which they come.

    Args:
        rows: token ids.
        texts: the (query, document) pairs that they are of; None where only lengths are known.
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


def workload_of_lengths(lengths: TokenLengths, encoder: Encoder, *, seed: int) -> Workload:
    """Rows as long as those that a bundle was tested on, by its own record.

    Raises:
        InputError: the bundle records no histogram.
    """
    if not lengths.histogram:
        raise InputError(
            "the bundle's manifest records no histogram of lengths (an earlier version made it). Name pairs with "
            "--pairs, or export the student again."
        )
    drawn_N = draw_lengths(lengths.histogram, min(MAX_ROWS, lengths.rows), seed=seed)
    return Workload([blank_row(encoder, int(length)) for length in drawn_N], None, "lengths", lengths)


def workload_of_pairs(pairs: Sequence[tuple[str, str]], encoder: Encoder) -> Workload:
    """Real pairs in the order given.

    Raises:
        InputError: there is none.
    """
    if not pairs:
        raise InputError("--pairs holds no pair to measure with.")
    rows = encoder.encode(pairs)
    return Workload(rows, pairs, "pairs", describe_lengths([len(ids) for ids, _ in rows]))


def draw_lengths(histogram: Sequence[Sequence[int]], count: int, *, seed: int) -> np.ndarray:
    """Lengths in tokens, int64 [count], in the shares of a histogram of `[tokens, rows]`."""
    tokens, rows = np.array(histogram, dtype=np.int64).T
    return np.asarray(np.random.default_rng(seed).choice(tokens, size=count, p=rows / rows.sum()))


def blank_row(encoder: Encoder, length: int) -> TokenRow:
    """A row of so many tokens, all of them in the vocabulary."""
    ids, beside = encoder.encode([("a", "a")])[0]
    repeated = (ids * (length // len(ids) + 1))[:length]
    if "counts" in encoder.inputs.names:
        return repeated, beside
    return repeated, [0] * length if beside else []


def fixed_batch(encoder: Encoder, rows: int, tokens: int) -> dict[str, np.ndarray]:
    """A batch of one shape, without padding."""
    return encoder.collate([blank_row(encoder, tokens)] * rows)


# ------------------------------------------------------------------------------
# What to measure, and for how long: models, cells and time. Pure: nothing is opened here.


P99_SAMPLES = samples_needed(QUANTILES["p99"])
SLACK = 1.3
"""Of a cell's time over that of its calls: the warm-up, and calls that take longer than the first."""
TOO_SHORT = "the time suffices for too few samples. More --seconds."
CELL_WEIGHT, SWEEP_WEIGHT, COMPARISON_WEIGHT = 1.0, 16.0, 2.0
"""Shares of the time: a sweep is seven rates and three more around each bound."""


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
        """As findings call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True)
class Cell:
    """A closed-loop measurement.

    Args:
        name: `1x128`, `8xreplay`, `table3-1000`.
        rows: pairs of a request.
        tokens: of each; None where they are replayed.
    """

    preset: Preset
    name: str
    rows: int
    tokens: int | None

    def size(self, mean_tokens: float) -> float:
        """Tokens to compute, about."""
        return self.rows * (self.tokens or mean_tokens)


class Budget:
    """Seconds to give out by weight. Who takes less leaves it to the others; who takes more takes it from those that
    come after.

    Args:
        seconds: for all.
        weight: of everything together that will ask.
    """

    def __init__(self, seconds: float, weight: float) -> None:
        self.left_s = seconds
        self._weight = weight

    def share(self, weight: float) -> float:
        """Seconds for the next one."""
        part = self.left_s * min(1.0, weight / max(self._weight, weight))
        self._weight -= weight
        return part

    def spend(self, seconds: float) -> None:
        """Take off what it took."""
        self.left_s = max(0.0, self.left_s - seconds)


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
            raise UsageError(
                f"--precisions {', '.join(spec.precisions)}: no such model for {asked}. Leave it out of "
                "--providers, or bench it by itself."
            )
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
        missing = (
            f"--providers tensorrt: no engine of this bundle fits this machine ({faults}). Build one with `relabel "
            "build-engine`"
        )
    elif asked == OPENVINO:
        if OPENVINO in machine.providers:
            plain = next(model for model in models if (model.format, model.precision) == ("onnx", "fp32"))
            here = spec.precisions or (list(HINTS) if {AMX, AVX512} & set(machine.flags) else ["fp32"])
            return [BenchModel(asked, OPENVINO, name, plain.path) for name in HINTS if name in here]
        missing = "--providers openvino: it is not installed. Run `pip install 'relabel-ir[openvino]'`"
    else:
        provider = ("cuda" if PROVIDERS["cuda"] in machine.providers else "cpu") if asked == "auto" else asked
        if PROVIDERS[provider] in machine.providers:
            return [BenchModel(asked, provider, model.precision, model.path) for model in graphs]
        missing = (
            f"--providers {asked}: this onnxruntime has no {PROVIDERS[provider]} "
            f"({', '.join(machine.providers)}). Install one that does"
        )
    if not spec.allows_fallback:
        raise MissingExtraError(f"{missing}, or measure on the CPU with --allow-fallback.")
    return [BenchModel(asked, "cpu", model.precision, model.path) for model in graphs]


def plan_cells(spec: BenchSpec, lengths: TokenLengths) -> list[Cell]:
    """Closed-loop cells in the order in which they are wanted: real lengths, then fixed ones, small ones first.

    Args:
        lengths: of the workload.
    """
    cells: list[Cell] = []
    if "grid" in spec.presets:
        tokens = spec.lengths or tuple(dict.fromkeys((lengths.p50, lengths.p99)))
        shapes = dict.fromkeys([*((rows, length) for rows in spec.batches for length in tokens), *PUBLIC_SHAPES])
        cells += [Cell("grid", f"{rows}x{length}", rows, length) for rows, length in shapes]
        cells += [Cell("grid", f"{rows}xreplay", rows, None) for rows in dict.fromkeys(spec.batches)]
    cells.sort(key=lambda cell: (cell.tokens is not None, cell.size(lengths.p50)))
    if "table3" in spec.presets:
        cells += [Cell("table3", f"table3-{documents}", documents, None) for documents in TABLE3_DOCUMENTS]
    return cells


def plan_time(call_s: Mapping[Cell, float], seconds: float, open_s: float) -> dict[Cell, tuple[int, float]]:
    """Samples, and seconds for them, of each cell for which the time suffices: p99 of a single pair first, then some
    figure of each, then their p99. A cell that would get fewer samples than tell anything gets none.

    Args:
        call_s: seconds of a call, of the cells in the order in which they are wanted.
        seconds: for the cells and the open loop.
        open_s: of those, for the open loop; a single pair goes before it.
    """
    planned: dict[Cell, tuple[int, float]] = {}
    spent_s = 0.0
    singles = [cell for cell in call_s if (cell.rows, cell.tokens) == (1, None)]
    for cells, samples, limit_s in (
        (singles, P99_SAMPLES, seconds),
        (singles, FEWEST_SAMPLES, seconds),
        (call_s, FEWEST_SAMPLES, seconds - open_s),
        (call_s, P99_SAMPLES, seconds - open_s),
    ):
        for cell in cells:
            needed_s = call_s[cell] * samples * SLACK
            more_s = needed_s - planned.get(cell, (0, 0.0))[1]
            if 0 < more_s <= limit_s - spent_s:
                planned[cell] = samples, needed_s
                spent_s += more_s
    part_s = max(0.0, seconds - open_s - spent_s) / max(1, len(planned))
    return {cell: (samples, given_s + part_s) for cell, (samples, given_s) in planned.items()}


def plan_shapes(lengths: TokenLengths) -> list[tuple[int, int]]:
    """Rows and tokens of the batches on which two models are compared: a single pair of usual length, and two public
    shapes.
    """
    return list(dict.fromkeys([(1, lengths.p50), (1, 128), (32, 128)]))


# ------------------------------------------------------------------------------
# Figures by the names that `--require` gives them: `cpu.int8.1x128.p99_ms`, `cpu.int8.grid.highest_rate`,
# `cpu.int8/fp32.1x128.ratio`.


CELL_KEYS = ("samples", "p50_ms", "p99_ms", "p999_ms", "mean_ms", "pairs_per_s")
"""Of a cell, in the manifest's summary; all but the samples can be required."""
CELL_FIGURES = CELL_KEYS[1:]
RATIO_FIGURES = {"ratio": "ratio", "ratio_high": "high", "cpu_ratio": "cpu_ratio"}
"""Name of a comparison's figure → its field of `ComparedModels`."""


def planned_figures(
    models: Sequence[BenchModel],
    cells: Sequence[Cell],
    bounded: Iterable[tuple[str, str]],
    sides: Sequence[tuple[BenchModel, str]],
    shapes: Sequence[tuple[int, int]],
    *,
    may_fall_back: bool,
) -> list[str]:
    """Every name that a bench may have a figure for, known before anything is measured.

    Args:
        bounded: presets for which the highest rate is sought, with the figure that it keeps under a bound: `mean` or
            `p99`.
        sides, shapes: of the comparisons.
        may_fall_back: a model may come to run on the CPU, and its figures to be named after that.
    """
    names = [f"{_model(model)}.{cell.name}.{key}" for model in models for cell in cells for key in CELL_FIGURES]
    names += [f"{_model(model)}.{rate_name(preset, figure)}" for preset, figure in bounded for model in models]
    compared = [f"{_model(model)}/{other}.{rows}x{tokens}" for model, other in sides for rows, tokens in shapes]
    names += [f"{name}.{figure}" for name in compared for figure in RATIO_FIGURES]
    if may_fall_back:
        names += [f"cpu.{name.split('.', 1)[1]}" for name in names]
    return list(dict.fromkeys(names))


def measured_figures(facts: BenchFacts, planned: Iterable[str]) -> dict[str, float | None]:
    """What was measured, by name; None where it was planned and then left out, or is not known well enough to be
    stated.
    """
    found: dict[str, float | None] = dict.fromkeys(planned)
    for model in facts.models:
        name = f"{model.provider}.{model.precision}"
        for row in model.closed:
            found |= {f"{name}.{row.cell}.{key}": getattr(row, key) for key in CELL_FIGURES}
        for slo in model.slo:
            found[f"{name}.{rate_name(slo.preset, slo.figure)}"] = slo.highest_rate
    for one in facts.comparisons:
        name = f"{one.provider}.{one.ours}/{one.theirs}.{one.cell}"
        found |= {f"{name}.{figure}": getattr(one, key) for figure, key in RATIO_FIGURES.items()}
    return found


def rate_name(preset: str, figure: str) -> str:
    """The highest rate of a preset; by p99 where nothing else is said."""
    return f"{preset}.highest_rate" if figure == "p99" else f"{preset}.highest_rate_by_{figure}"


def _model(model: BenchModel) -> str:
    return f"{model.provider}.{model.precision}"
