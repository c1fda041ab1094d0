"""A distillation from spec to student folder: check, read, train, calibrate, judge, write.

What costs nothing is checked first (spec, model config, labels, split, gate names), so that no hour of training ends in
a typo. `manifest.json` is written last: a folder without one holds no finished student.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distill.students.bases import check_base, make_record, texts_of
from distill.students.cards import render_card
from distill.students.examples import NO_GRADE, Examples, load_examples
from distill.students.figures import graded_counts, graded_figures, teacher_figures
from distill.students.fingerprints import fingerprint_of
from distill.students.kinds import KINDS
from distill.students.specs import DistillSpec
from distill.students.splits import DEV, TEST, TRAIN
from distill.students.student_manifest import (
    STUDENT_MANIFEST_VERSION,
    Figures,
    GateCheck,
    JudgedGates,
    SideFigures,
    StudentFigures,
    StudentManifest,
    TrainingFacts,
    read_student_manifest,
)
from distill.students.students import StudentRecord, logits_of_rows, softmax, student_files, write_student
from distill.students.trainers import Trainer, TrainingInputs
from distill.training.card_parts import CARD_NAME
from distill.training.curves import Curve, write_curves
from distill.training.making import Start, conclude, finish, look, making, refuse_own_base
from distill.training.model_manifests import BaseModelUsed, Product
from distill.training.output_locations import OutputLocation, output_location_of
from distill.training.ownership import claimed
from distill.training.reporting import check_services
from manifests.errors import InputError
from manifests.extras import installed_versions
from manifests.metrics.calibration import fit_temperature
from manifests.metrics.gates import judge_gate, judge_gates
from manifests.models.references import default_cache_dir, resolve_model
from manifests.registered import imported
from manifests.storage.context import Storage

TEMPERATURES = (0.25, 4.0)
"""Bounds of a fitted temperature: a few dev rows that are all right would ask for one near 0, and so for certainty."""
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")

STUDENT = Product("student", "distill")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """How `distill` ended.

    Args:
        output: the folder that it was trained in, and lies in unless its output location is a URL.
        was_done: the student was there already.
        place: where the student is, as the spec names it.
        gate: the spec's gates held against the manifest's figures: those of a finished student may have changed since.
    """

    manifest: StudentManifest
    output: Path
    was_done: bool
    place: str
    gate: JudgedGates

    @property
    def has_passed(self) -> bool:
        """Whether no gate refused it."""
        return self.gate.has_passed


@dataclass
class _Work(TrainingInputs):
    """What all steps share."""

    notes: list[str]


@dataclass
class _Trained:
    """What training left: the module, what it is called now, and what there is to say."""

    module: Any
    record: StudentRecord
    metrics: StudentFigures
    training: TrainingFacts
    curve: Curve


def distill(
    spec: DistillSpec,
    storage: Storage,
    *,
    start: Start = "new",
    cache_dir: Path | None = None,
    say: Say = lambda _: None,
    is_writer: bool = True,
) -> Report:
    """Train the student of a spec.

    Args:
        storage: how labels, gold and output are reached. The model is looked up in the cache alone
            (`jobs/fetching/models.py` brings it there).
        say: called with progress and remarks, a line each.
        is_writer: False in all but the first of several processes that train together: they write nothing.
    Raises:
        ConfigError, InputError, ManifestError, ModelError: something is off, see the modules that say so.
        StaleRunError: the output holds a student or checkpoints of another spec.
        LockHeldError: another process trains there.
        TrainingError: the loss is not finite, or memory runs out twice.
    """
    location = _location(spec, storage, cache_dir)
    check_services(spec.train.report_to, output=spec.output)
    resolved = resolve_model(spec.student.model, cache_dir=cache_dir)
    if is_writer:  # of several processes the others may come when the first one has begun to write
        location.check_free()
        refuse_own_base(location, resolved, key="student.model")
    examples = load_examples(spec, storage)
    fingerprint = fingerprint_of(spec, examples, resolved.digest)
    left = look(location, fingerprint, start)
    if left.found is not None:
        left = conclude(location, left, fingerprint, start, is_writer=is_writer)
        assert left.found is not None
        manifest = read_student_manifest(left.found.data, left.found.where)
        return _report(spec, location, manifest, was_done=left.done is not None)
    base = check_base(spec, resolved)
    _check_gates(spec, examples)
    _check_stopping(spec, examples)
    record = make_record(spec, base, examples.heads, examples.phi, examples.columns)
    texts = texts_of(base, record)
    if location.url is not None:
        say(f"training in {location.folder}; the student goes to {location.output} when it is finished")
    notes = list(examples.notes)
    for note in notes:
        say(note)
    tokens = texts.encode(examples.texts)
    work = _Work(spec, base, record, examples, tokens, texts, location.checkpoints, say, notes)
    if not is_writer:
        return _report(spec, location, _manifest(work, _train(work), fingerprint), was_done=False)
    with making(location, fingerprint, start):
        trained = _train(work)
        manifest = finish(location, fingerprint, lambda folder: _write(work, trained, folder, fingerprint))
    return _report(spec, location, manifest, was_done=False)


def holds_student(spec: DistillSpec, storage: Storage, *, cache_dir: Path | None = None) -> bool:
    """Whether the output, a folder, holds the student of this very spec, finished or not. Reads labels and looks the
    model up.

    Raises:
        RelabelError: they can't be read.
    """
    location = _location(spec, storage, cache_dir)
    fingerprint = fingerprint_of(
        spec, load_examples(spec, storage), resolve_model(spec.student.model, cache_dir=cache_dir).digest
    )
    there = location.local_manifest()
    is_finished = there is not None and there.fingerprint == fingerprint
    return is_finished or claimed(location.checkpoints)[0] == fingerprint


def _location(spec: DistillSpec, storage: Storage, cache_dir: Path | None) -> OutputLocation:
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    return output_location_of(STUDENT, spec.output, storage, cache_dir=cache)


def _report(spec: DistillSpec, location: OutputLocation, manifest: StudentManifest, *, was_done: bool) -> Report:
    return Report(manifest, location.folder, was_done, location.output, _judged_gates(spec, manifest.metrics.test))


def _check_gates(spec: DistillSpec, examples: Examples) -> None:
    """Every gate names a figure that there is, and there will be rows to judge by.

    Raises:
        ConfigError: no such figure.
        InputError: the test split has nothing to judge by.
    """
    if not spec.gates:
        return
    grades = examples.grades
    names = graded_figures(np.eye(grades), np.arange(grades))
    judge_gates(spec.gates, names, names)
    judge_N, by = _judge(examples)
    rows = examples.rows_of(TEST)
    judged = rows[judge_N[rows] != NO_GRADE]
    if not len(judged):
        raise InputError(
            f"`require` is judged on the test split, and none of its rows has a grade ({by}). Raise split.test."
        )
    if any(gate.is_of_teacher for gate in spec.gates) and not (examples.teacher[judged] != NO_GRADE).any():
        raise InputError(
            "`require` has a gate against the teacher, and no row of the test split has both a label and a trusted "
            "grade. Raise split.test, or bring gold for labelled pairs."
        )


def _check_stopping(spec: DistillSpec, examples: Examples) -> None:
    """Early stopping looks at a figure that dev will have at every look.

    Raises:
        InputError: dev has rows, and too few grades among them.
    """
    stopping = spec.train.early_stopping
    rows = examples.rows_of(DEV)
    if stopping is None or stopping.metric == "loss" or not len(rows):
        return
    judge_N, by = _judge(examples)
    num_grades = len(set(judge_N[rows].tolist()) - {NO_GRADE})
    wanted = 1 if stopping.metric in ("accuracy", "macro_f1") else 2
    if num_grades < wanted:
        raise InputError(
            f"train.early_stopping looks at {stopping.metric}, which wants {wanted} grade(s) on dev; its {len(rows)} "
            f"rows have {num_grades} ({by}). Raise split.dev, bring more {by}, or choose the metric `loss`."
        )


def _judge(examples: Examples) -> tuple[np.ndarray, str]:
    """The grades that a student is judged by, -1 where there is none, and what they are."""
    if (examples.gold != NO_GRADE).any():
        return examples.gold, "gold"
    return examples.teacher, "labels"


def _train(work: _Work) -> _Trained:
    """Train, calibrate, judge."""
    trainer: Trainer = imported(KINDS[work.spec.student.kind].trainer)
    module, training, outcome = trainer(work, lambda found: _dev(work, found))
    work.notes += outcome.notes
    merge = getattr(module, "merge", None)
    if merge is not None:
        merge()
    module.eval()
    logits = _judged_logits(work, module)
    temperature = _temperatures(work, logits)
    probs = {name: softmax(values / temperature[name]) for name, values in logits.items()}
    trained = softmax(logits["relevance"])
    metrics = StudentFigures(*(_side_figures(work, probs, trained, side) for side in (DEV, TEST)))
    return _Trained(module, replace(work.record, temperature=temperature), metrics, training, outcome.curve)


def _write(work: _Work, trained: _Trained, folder: Path, fingerprint: str) -> StudentManifest:
    """Write all files but the manifest."""
    write_student(folder, trained.record, trained.module, work.base.tokenizer)
    write_curves(folder, trained.curve, title=work.spec.name)
    manifest = replace(_manifest(work, trained, fingerprint), files=student_files(folder))
    (folder / CARD_NAME).write_text(render_card(manifest, work.spec), encoding="utf-8")
    return manifest


def _judged_logits(work: _Work, module: Any) -> dict[str, np.ndarray]:
    """Logits by head, float32 [N, K], of the rows that judge; rows that trained keep zeros, which nobody looks at."""
    rows = np.flatnonzero(work.examples.side != TRAIN)
    found = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    whole = {name: np.zeros((len(work.tokens), values.shape[1]), dtype=np.float32) for name, values in found.items()}
    for name, values in found.items():
        whole[name][rows] = values
    return whole


def _dev(work: _Work, module: Any) -> dict[str, float]:
    """Figures on dev while training."""
    rows = work.examples.rows_of(DEV)
    logits = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    found = {"loss": dev_loss(work.spec, work.examples, logits, rows)}
    judge_N, _ = _judge(work.examples)
    graded = judge_N[rows] != NO_GRADE
    figures = graded_figures(softmax(logits["relevance"][graded]), judge_N[rows][graded])
    names = ("accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc")
    return found | {name: float(value) for name in names if (value := figures.get(name)) is not None}


def dev_loss(spec: DistillSpec, examples: Examples, logits: dict[str, np.ndarray], rows: np.ndarray) -> float:
    """The training loss of these rows."""
    import torch

    from distill.students.objective import Objective

    objective = Objective(spec.loss, examples.heads, examples.phi)
    batch = {
        "targets": {name: torch.from_numpy(values[rows]) for name, values in examples.targets.items()},
        "weights": {name: torch.from_numpy(values[rows]) for name, values in examples.weights.items()},
        "row_weight": torch.from_numpy(examples.row_weight[rows]),
    }
    sums = objective.sums({name: torch.from_numpy(values) for name, values in logits.items()}, batch)
    return float(objective.loss(sums, {name: weight.sum() for name, weight in objective.row_weights(batch).items()}))


def _temperatures(work: _Work, logits: dict[str, np.ndarray]) -> dict[str, float]:
    """One temperature a head, fitted on dev against gold, or where there is none, and for nodes, against what the head
    learned from: distributions where the labels have them, for the most probable grade alone would ask for certainty
    that the teacher never had. 1 where dev has neither.
    """
    found = dict.fromkeys(work.record.heads, 1.0)
    rows = work.examples.rows_of(DEV)
    if not work.spec.calibrate:
        return found
    if not len(rows):
        work.notes.append("no dev rows, so the student is not calibrated: its temperatures are 1")
        return found
    for name in found:
        target_NK = work.examples.targets[name]
        kept = rows[work.examples.weights[name][rows] > 0]
        if name == "relevance" and (work.examples.gold != NO_GRADE).any():
            kept = rows[work.examples.gold[rows] != NO_GRADE]
            target_NK = np.eye(target_NK.shape[1])[work.examples.gold]
        if not len(kept):
            work.notes.append(
                f"head {name} is not calibrated, its temperature is 1: no dev row has a grade to judge it by"
            )
        else:
            wished = fit_temperature(softmax(logits[name][kept].astype(np.float64)), target_NK[kept])
            found[name] = min(max(wished, TEMPERATURES[0]), TEMPERATURES[1])
            if found[name] != wished:
                work.notes.append(f"head {name}: dev asks for temperature {wished:.3g}; {found[name]:g} is the limit")
    return found


def head_grades(examples: Examples, name: str) -> np.ndarray:
    """The most probable grade of each row's target for a head, -1 where it has none: int64 [N]."""
    return np.where(examples.weights[name] > 0, examples.targets[name].argmax(1), NO_GRADE)


def _side_figures(work: _Work, probs: dict[str, np.ndarray], trained_NK: np.ndarray, side: int) -> SideFigures:
    """All figures of one side: student and teacher by the judge, student by teacher, nodes by the labels.

    Args:
        probs: calibrated.
        trained_NK: the relevance head's before calibration, which may have moved it away from its teacher and towards
            trusted grades.
    """
    examples = work.examples
    rows = examples.rows_of(side)
    judge_N, by = _judge(examples)
    judged = rows[judge_N[rows] != NO_GRADE]
    taught = rows[examples.teacher[rows] != NO_GRADE]
    both = judged[examples.teacher[judged] != NO_GRADE]
    is_beside = by == "gold" and len(both) > 0
    by_node = {}
    for name in set(examples.heads) - {"relevance"}:
        grade_N = head_grades(examples, name)
        by_node[name] = _graded(probs[name], grade_N, rows[grade_N[rows] != NO_GRADE])
    relevance_NK = probs["relevance"]
    taught_sets = (trained_NK[taught], examples.teacher_probs[taught], examples.teacher[taught])
    return SideFigures(
        rows=len(rows),
        judged_by=by,
        student=_graded(relevance_NK, judge_N, judged),
        teacher=_teacher_against(examples, both) if is_beside else None,
        student_where_teacher=(
            _graded(relevance_NK, judge_N, both) if is_beside and len(both) != len(judged) else None
        ),
        to_teacher=teacher_figures(*taught_sets) if len(taught) else None,
        **by_node,
    )


def _graded(probs_NK: np.ndarray, grade_N: np.ndarray, rows: np.ndarray) -> Figures:
    return graded_figures(probs_NK[rows], grade_N[rows]) if len(rows) else {"rows": 0}


def _teacher_against(examples: Examples, rows: np.ndarray) -> Figures:
    """The teacher's own figures by gold: of the grades that it wrote, with those of its distributions where it gave
    them.
    """
    gold_N = examples.gold[rows]
    found = graded_counts(examples.teacher[rows], gold_N, grades=examples.grades)
    probs_NK = examples.teacher_probs[rows]
    if not np.isnan(probs_NK).any():
        of_probs = graded_figures(probs_NK, gold_N)
        found |= {name: value for name, value in of_probs.items() if name not in found}
    return found


def _judged_gates(spec: DistillSpec, test: SideFigures) -> JudgedGates:
    """The spec's gates on the figures of the test split: against the teacher over the rows that both have, else over
    all.
    """
    where_teacher = test.student if test.student_where_teacher is None else test.student_where_teacher
    verdicts = [
        judge_gate(gate, where_teacher if gate.is_of_teacher else test.student, test.teacher) for gate in spec.gates
    ]
    checks = [GateCheck(**vars(verdict), text=str(verdict)) for verdict in verdicts]
    return JudgedGates(all(verdict.has_passed for verdict in verdicts), checks)


def _manifest(work: _Work, trained: _Trained, fingerprint: str) -> StudentManifest:
    """All that there is to say about a student but its files' digests."""
    spec, record, base = work.spec, trained.record, work.base
    return StudentManifest(
        version=STUDENT_MANIFEST_VERSION,
        kind="student",
        relabel=importlib.metadata.version("relabel"),
        name=spec.name,
        fingerprint=fingerprint,
        model=BaseModelUsed(base.resolved.reference, base.resolved.digest, base.config.model_type),
        heads=record.heads,
        temperature=record.temperature,
        phi=record.phi if len(record.heads) > 1 else None,
        **vars(work.examples.about),
        training=trained.training,
        metrics=trained.metrics,
        gate=_judged_gates(spec, trained.metrics.test),
        notes=work.notes,
        versions=installed_versions(LIBRARIES),
        spec=spec.model_dump(mode="json"),
        student=asdict(record),
    )
