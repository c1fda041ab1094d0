"""Comparisons of a bundle's models: the smaller precisions with fp32, OpenVINO with onnxruntime, and each with what was
named (torch eager, another ONNX file).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relabel.distill.students.students import student_digest
from relabel.export.bench.comparisons import Turns, take_turns
from relabel.export.bench.findings import PLAIN
from relabel.export.bench.latency_cards import spoken_ratio
from relabel.export.bench.latency_comparison import ComparedModels, ComparedPair, Finding
from relabel.export.bench.plans import COMPARISON_WEIGHT, BenchModel
from relabel.export.bench.runners import Runner, differ_by, open_other, open_torch
from relabel.export.bench.settings import Setting
from relabel.export.bench.workloads import fixed_batch
from relabel.export.loader import OPENVINO
from relabel.export.student_facts import StudentFacts
from relabel.manifests.errors import ManifestError, MissingExtraError, ModelError

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
