"""A teacher from spec to model folder: check, read, train or estimate, write the model card and manifest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relabel.distill.students.model import student_files
from relabel.distill.teachers.bases import (
    AsksAnEngine,
    TeacherBase,
    TeacherTrainer,
    Trained,
    TrainingEstimate,
    TrainingTime,
    check_teacher_base,
    write_model,
)
from relabel.distill.teachers.manifest import (
    TEACHER_MANIFEST_VERSION,
    TeacherManifest,
    TeacherTrainingFacts,
    read_teacher_manifest,
)
from relabel.distill.teachers.spec import METHODS, TeacherSpec, method_of
from relabel.distill.training.curves import check_services, write_curves
from relabel.distill.training.locations import BaseModelUsed, OutputLocation, Product, output_location_of
from relabel.distill.training.output import (
    CARD_NAME,
    Start,
    TrainingRecord,
    conclude,
    finish,
    foresee,
    look,
    making,
    refuse_own_base,
    spec_section,
    training_record,
)
from relabel.distill.training.runtime import precision_of
from relabel.manifests.files import Storage
from relabel.manifests.models import ResolvedModel, default_cache_dir, resolve_model
from relabel.manifests.process import installed_versions
from relabel.manifests.records import digest_of
from relabel.manifests.specs import imported

# ------------------------------------------------------------------------------
# How long a training's steps take: measured on the training itself, which is ended before it leaves anything.


MEASURED = 3
"""Stretches of steps that are timed, after one that is not: the first step also loads kernels and makes buffers."""

_STEP = re.compile(r"step \d+ of \d+\b")


class _Enough(Exception):  # noqa: N818 — no error
    """Ends the training from within its own lines of progress."""


def measure(trainer: TeacherTrainer, *, steps: int, updates: int, say: Callable[[str], None]) -> TrainingTime | None:
    """Train some steps in a folder of its own, which is then removed.

    Args:
        trainer: of the training; it can't train again.
        steps: of the whole training.
        updates: steps on the same rollouts: only the first of them writes answers, so they are timed together.
    Returns:
        None for a training that is over before it could be timed.
    Raises:
        TrainingError: as the training itself: memory runs out, the loss is not finite.
    """
    ends: list[float] = []

    def told(line: str) -> None:
        if _STEP.match(line) is None:
            say(line)
            return
        ends.append(time.perf_counter())
        if len(ends) == updates * (MEASURED + 1):
            raise _Enough

    with tempfile.TemporaryDirectory(prefix="relabel-") as scratch, contextlib.suppress(_Enough):
        trainer.train(Path(scratch), told)
    marks = ends[updates - 1 :: updates]
    paces = [(after - before) / updates for before, after in itertools.pairwise(marks)]
    if not paces:
        return None
    mean = sum(paces) / len(paces)
    return TrainingTime(len(paces) * updates, steps * mean, steps * min(paces), steps * max(paces))


# ------------------------------------------------------------------------------
# What makes a teacher's training this one and no other.


SPEED_ONLY = ("device", "keep_checkpoints", "gradient_checkpointing", "report_to")
NOT_IN_FINGERPRINT: dict[str, Any] = {
    **dict.fromkeys(("name", "output", "init", "labeler", "generator"), True),
    "data": {"runs": True, "gold": {"path"}},
    "train": set(SPEED_ONLY),
}
"""What data, labeler and generator are, the digest of the data says; the model, its own digest."""


def record_of(spec: TeacherSpec, trainer: TeacherTrainer, model: ResolvedModel) -> TrainingRecord:
    """All that the teacher follows from: the spec's choices, the data itself, the model; and the digest of that."""
    fingerprint = digest_of(
        {
            "spec": spec.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT),
            "data": trainer.digest,
            "model": model.digest,
            "version": TEACHER_MANIFEST_VERSION,
        }
    )
    return training_record("teacher", spec, fingerprint, model, trainer.digest)


# ------------------------------------------------------------------------------
# The model card of a teacher, for a person who finds the folder.


def render_card(manifest: TeacherManifest) -> str:
    """Markdown from a teacher's manifest."""
    data, training = manifest.data, manifest.training
    sources = [
        f"- `{run.path}`: {run.labels:,} answers of {run.labeler}, fingerprint `{(run.fingerprint or '')[:12]}`"
        for run in data.runs
    ]
    if data.gold is not None:
        named = {"trusted grades": data.gold.grade, "chunks": data.gold.sets, "answers": data.gold.answers}
        held = ", ".join(f"{what} in column `{column}`" for what, column in named.items() if column is not None)
        sources.append(f"- `{data.gold.path}`: {held}")
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in data.dropped.items()) or "none"
    lines = [
        f"# {manifest.name}",
        "",
        (
            f"A causal language model that answers the labeler `{manifest.labeler['name']}`, by `relabel train` "
            f"{manifest.relabel}: {METHODS[manifest.method].title}."
        ),
        "",
        f"- Starts from: `{manifest.model.reference}` (digest `{manifest.model.digest[:16]}`)",
        f"- Trained: {training.steps} steps, {training.epochs} epochs, on {training.device}.",
        *_kept(manifest),
        f"- Learned from {data.rows:,} rows, {data.answer_tokens:,} tokens of answers; rows left out: {dropped}.",
        *sources,
        *(f"- Note: {note}" for note in manifest.notes),
        "",
        "![training curve](curves.svg)",
        "",
        "## Use",
        "",
        "Set `engine.model` of a job to this folder, and `labeler` to the one above with the same options.",
        "Its labels are the work of a model: judge them with trusted grades (`relabel evaluate`) before they decide",
        "anything.",
        "",
        *spec_section(manifest.spec),
    ]
    return "\n".join(lines)


def _kept(manifest: TeacherManifest) -> list[str]:
    best, held_out = manifest.training.best_step, manifest.data.held_out
    if best is None or held_out is None:
        return []
    return [
        f"- Kept: step {best}, the best mean reward on {held_out.rows:,} rows of {held_out.queries:,} queries that "
        "nobody trained on."
    ]


# ------------------------------------------------------------------------------
# A teacher from spec to model folder: check, read, train, write; whatever the method.
#
# What costs nothing is checked first (spec, model config, data), so that no hour of training ends in a typo. The folder
# is a model directory that `engine.model` takes; `manifest.json` is written last.


TEACHER = Product("teacher", "train", "init", ("data", "labeler", "generator"), NOT_IN_FINGERPRINT)
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")

Say = Callable[[str], None]


@dataclass(frozen=True)
class TeacherReport:
    """How `train_teacher` ended.

    Args:
        was_done: the teacher was there already.
        place: where it is, as the spec names it.
    """

    manifest: TeacherManifest
    was_done: bool
    place: str


def train_teacher(
    spec: TeacherSpec,
    storage: Storage,
    *,
    start: Start = "new",
    cache_dir: Path | None = None,
    say: Say = lambda _: None,
    is_writer: bool = True,
    secrets: Mapping[str, Any] = MappingProxyType({}),
) -> TeacherReport:
    """Train the teacher of a spec.

    Args:
        storage: how runs, gold and output are reached. The model is looked up in the cache alone
            (`jobs/downloads.py` brings it there).
        say: called with progress and remarks, a line each.
        is_writer: False in all but the first of several processes that train together: they write nothing.
        secrets: what the options of an engine that the method asks name, by option.
    Raises:
        ConfigError, InputError, ManifestError, ModelError: something is off, see the modules that say so.
        StaleRunError: the output holds a teacher or checkpoints of another spec.
        LockHeldError: another process trains there.
        TrainingError: the loss is not finite, or memory runs out twice.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    location = output_location_of(TEACHER, spec.output, storage, cache_dir=cache)
    resolved = resolve_model(spec.init, cache_dir=cache_dir)
    if is_writer:  # of several processes the others may come when the first one has begun to write
        _check_place(location, resolved)
    base = check_teacher_base(spec, resolved)
    trainer = _trainer(spec, base, storage)
    if isinstance(trainer, AsksAnEngine):
        trainer.take_secrets(secrets)
    training = record_of(spec, trainer, resolved)
    fingerprint = training.fingerprint
    left = look(location, training, start)
    if left.found is not None:
        left = conclude(location, left, training, start, is_writer=is_writer)
        assert left.found is not None
        manifest = read_teacher_manifest(left.found.data, left.found.where)
        return TeacherReport(manifest, left.done is not None, location.output)
    _introduce(location, trainer, say)
    if not is_writer:
        trained = trainer.train(location.checkpoints, say)
        return TeacherReport(_manifest(spec, base, trainer, trained, fingerprint), False, location.output)
    with making(location, training, start):
        trained = trainer.train(location.checkpoints, say)

        def write(folder: Path) -> TeacherManifest:
            write_model(folder, trained.model, base)
            write_curves(folder, trained.outcome.curve, title=spec.name)
            trained.write_more(folder)
            manifest = _manifest(spec, base, trainer, trained, fingerprint)
            manifest = replace(manifest, files=student_files(folder))
            (folder / CARD_NAME).write_text(render_card(manifest), encoding="utf-8")
            return manifest

        manifest = finish(location, fingerprint, write)
    return TeacherReport(manifest, False, location.output)


def estimate_teacher(
    spec: TeacherSpec,
    storage: Storage,
    *,
    start: Start = "new",
    cache_dir: Path | None = None,
    say: Say = lambda _: None,
    is_timed: bool = False,
    secrets: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingEstimate:
    """What training a spec's teacher would do; leaves nothing, and loads no weights unless it is timed.

    Args:
        is_timed: train some steps to see how long they take.
    Raises:
        RelabelError: as `train_teacher`, before it trains.
    """
    if is_timed:  # steps of a trial are nobody's figures
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"report_to": ()})})
    location = output_location_of(TEACHER, spec.output, storage, cache_dir=cache_dir or default_cache_dir())
    resolved = resolve_model(spec.init, cache_dir=cache_dir)
    _check_place(location, resolved)
    base = check_teacher_base(spec, resolved)
    trainer = _trainer(spec, base, storage)
    if foresee(location, record_of(spec, trainer, resolved), start) is not None:
        say(f"{location.output}: holds this teacher already; a training would find it and end with nothing to do.")
    for note in trainer.notes:
        say(note)
    estimate = replace(trainer.estimate(), dropped=dict(trainer.data.dropped))
    if not is_timed:
        return estimate
    if isinstance(trainer, AsksAnEngine):
        trainer.take_secrets(secrets)
    updates = getattr(getattr(spec, "rollouts", None), "updates", 1)
    return replace(estimate, time=measure(trainer, steps=estimate.steps, updates=updates, say=say))


def _check_place(location: OutputLocation, init: ResolvedModel) -> None:
    location.check_free()
    refuse_own_base(location, init, key="init")


def _trainer(spec: TeacherSpec, base: TeacherBase, storage: Storage) -> TeacherTrainer:
    check_services(spec.train.report_to, output=spec.output)
    precision_of(spec.train)
    found: TeacherTrainer = imported(method_of(spec.method).trainer)(spec, base, storage)
    return found


def _introduce(location: OutputLocation, trainer: TeacherTrainer, say: Say) -> None:
    if location.url is not None:
        say(f"training in {location.folder}; the teacher goes to {location.output} when it is finished")
    for note in trainer.notes:
        say(note)


def _manifest(
    spec: TeacherSpec, base: TeacherBase, trainer: TeacherTrainer, trained: Trained, fingerprint: str
) -> TeacherManifest:
    """All that there is to say about a teacher but its files' digests."""
    outcome, halvings = trained.outcome, trained.halved.times
    training = TeacherTrainingFacts(
        steps=outcome.steps,
        epochs=outcome.epochs,
        best_step=outcome.best_step,
        stopped_by=outcome.stopped_by,
        device=outcome.device,
        rows_per_s=outcome.rows_per_s,
        batch_size=spec.train.batch_size >> halvings,
        accumulation=spec.train.accumulation << halvings,
        was_batch_halved=halvings > 0,
        step_seconds=None if outcome.clock is None else outcome.clock.mean() or None,
    )
    return TeacherManifest(
        version=TEACHER_MANIFEST_VERSION,
        kind="teacher",
        relabel=importlib.metadata.version("relabel-ir"),
        name=spec.name,
        method=spec.method,
        fingerprint=fingerprint,
        model=BaseModelUsed(base.resolved.reference, base.resolved.digest, base.config.model_type),
        labeler=trainer.labeler,
        templates=trainer.templates,
        data=trainer.data,
        training=training,
        notes=[*trainer.notes, *outcome.notes, *trained.halved.notes],
        versions=installed_versions(LIBRARIES),
        spec=spec.model_dump(mode="json"),
    )
