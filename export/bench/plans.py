"""What to measure, and for how long: models, cells and time. Pure: nothing is opened here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relabel.export.bench.quantiles import FEWEST_SAMPLES, QUANTILES, samples_needed
from relabel.export.bench.specs import BenchSpec, Preset
from relabel.export.bench.workloads import PUBLIC_SHAPES, TABLE3_DOCUMENTS
from relabel.export.loader import AMX, AVX512, HINTS, OPENVINO, PROVIDERS, Machine, engine_fault
from relabel.export.student_facts import EngineFile, ModelFile
from relabel.export.token_lengths import TokenLengths
from relabel.manifests.errors import MissingExtraError, UsageError

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
