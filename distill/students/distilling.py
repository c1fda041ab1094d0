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

from relabel.distill.students.bases import check_base, make_record, texts_of
from relabel.distill.students.calibrating import fitted_temperatures, judged_logits
from relabel.distill.students.cards import render_card
from relabel.distill.students.example_rows import load_examples
from relabel.distill.students.fingerprints import NOT_IN_FINGERPRINT, record_of
from relabel.distill.students.gate_checks import check_gates, check_stopping, judged_gates
from relabel.distill.students.kinds import KINDS
from relabel.distill.students.logits import softmax
from relabel.distill.students.side_figures import dev_figures, side_figures
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.splits import DEV, TEST
from relabel.distill.students.student_manifest import (
    STUDENT_MANIFEST_VERSION,
    JudgedGates,
    StudentFigures,
    StudentManifest,
    TrainingFacts,
    read_student_manifest,
)
from relabel.distill.students.student_record import StudentRecord
from relabel.distill.students.students import student_files, write_student
from relabel.distill.students.trainers import Trainer, TrainingInputs
from relabel.distill.training.card_parts import CARD_NAME
from relabel.distill.training.curves import Curve, write_curves
from relabel.distill.training.making import Start, conclude, finish, look, making, refuse_own_base
from relabel.distill.training.model_manifests import BaseModelUsed, Product
from relabel.distill.training.output_locations import OutputLocation, output_location_of
from relabel.distill.training.reporting import check_services
from relabel.manifests.extras import installed_versions
from relabel.manifests.models.references import default_cache_dir, resolve_model
from relabel.manifests.registered import imported
from relabel.manifests.storage.context import Storage

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")

STUDENT = Product("student", "distill", "student.model", ("labels", "gold"), NOT_IN_FINGERPRINT)

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
    training = record_of(spec, examples, resolved)
    fingerprint = training.fingerprint
    left = look(location, training, start)
    if left.found is not None:
        left = conclude(location, left, training, start, is_writer=is_writer)
        assert left.found is not None
        manifest = read_student_manifest(left.found.data, left.found.where)
        return _report(spec, location, manifest, was_done=left.done is not None)
    base = check_base(spec, resolved)
    check_gates(spec, examples)
    check_stopping(spec, examples)
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
    with making(location, training, start):
        trained = _train(work)
        manifest = finish(location, fingerprint, lambda folder: _write(work, trained, folder, fingerprint))
    return _report(spec, location, manifest, was_done=False)


def _location(spec: DistillSpec, storage: Storage, cache_dir: Path | None) -> OutputLocation:
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    return output_location_of(STUDENT, spec.output, storage, cache_dir=cache)


def _report(spec: DistillSpec, location: OutputLocation, manifest: StudentManifest, *, was_done: bool) -> Report:
    return Report(manifest, location.folder, was_done, location.output, judged_gates(spec, manifest.metrics.test))


def _train(work: _Work) -> _Trained:
    """Train, calibrate, judge."""
    trainer: Trainer = imported(KINDS[work.spec.student.kind].trainer)
    module, training, outcome = trainer(work, lambda found: dev_figures(work, found))
    work.notes += outcome.notes
    merge = getattr(module, "merge", None)
    if merge is not None:
        merge()
    module.eval()
    logits = judged_logits(work, module)
    temperature = fitted_temperatures(work, logits, work.notes)
    probs = {name: softmax(values / temperature[name]) for name, values in logits.items()}
    trained = softmax(logits["relevance"])
    metrics = StudentFigures(*(side_figures(work, probs, trained, side) for side in (DEV, TEST)))
    return _Trained(module, replace(work.record, temperature=temperature), metrics, training, outcome.curve)


def _write(work: _Work, trained: _Trained, folder: Path, fingerprint: str) -> StudentManifest:
    """Write all files but the manifest."""
    write_student(folder, trained.record, trained.module, work.base.tokenizer)
    write_curves(folder, trained.curve, title=work.spec.name)
    manifest = replace(_manifest(work, trained, fingerprint), files=student_files(folder))
    (folder / CARD_NAME).write_text(render_card(manifest, work.spec), encoding="utf-8")
    return manifest


def _manifest(work: _Work, trained: _Trained, fingerprint: str) -> StudentManifest:
    """All that there is to say about a student but its files' digests."""
    spec, record, base = work.spec, trained.record, work.base
    return StudentManifest(
        version=STUDENT_MANIFEST_VERSION,
        kind="student",
        relabel=importlib.metadata.version("relabel-ir"),
        name=spec.name,
        fingerprint=fingerprint,
        model=BaseModelUsed(base.resolved.reference, base.resolved.digest, base.config.model_type),
        heads=record.heads,
        temperature=record.temperature,
        phi=record.phi if len(record.heads) > 1 else None,
        **vars(work.examples.about),
        training=trained.training,
        metrics=trained.metrics,
        gate=judged_gates(spec, trained.metrics.test),
        notes=work.notes,
        versions=installed_versions(LIBRARIES),
        spec=spec.model_dump(mode="json"),
        student=asdict(record),
    )
