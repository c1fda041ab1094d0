"""A teacher from spec to model folder: check, read, train or estimate, write the model card and manifest.

What costs nothing is checked first (spec, model config, data), so that no hour of training ends in a typo. The folder
is a model directory that `engine.model` takes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relabel.distill.students.model import student_files
from relabel.distill.teachers.manifest import (
    TEACHER_MANIFEST_VERSION,
    TeacherManifest,
)
from relabel.distill.teachers.spec import METHODS, SftSpec, TeacherSpec, method_of
from relabel.distill.teachers.trainer import (
    TeacherBase,
    TeacherTrainer,
    Trained,
    TrainingEstimate,
    check_teacher_base,
    write_model,
)
from relabel.distill.training.curves import check_services, write_curves
from relabel.distill.training.output import (
    CARD_NAME,
    BaseModelUsed,
    OutputFolder,
    Product,
    Start,
    TrainingRecord,
    check_checkpoints,
    is_finished,
    refuse_own_base,
    remove_leftovers,
    spec_section,
    training_in,
    training_record,
    write_finished,
    writing,
)
from relabel.distill.training.runtime import precision_of
from relabel.manifests.errors import ConfigError
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model
from relabel.manifests.process import installed_versions
from relabel.manifests.specs import imported

TEACHER = Product(
    "teacher",
    "train",
    "init",
    ("data", "labeler", "generator"),
    frozenset(
        {
            *("name", "output", "init", "labeler", "generator", "data.runs", "data.gold.path"),
            *("train.device", "train.keep_checkpoints", "train.gradient_checkpointing", "train.report_to"),
        }
    ),
)
"""What data, labeler and generator are, the digest of the data says; the model, its own digest."""
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")
PROBE_STRETCHES = 3
"""Stretches of steps that a probe times, after one that it does not: the first step also loads kernels."""
CONVERSATIONS_NAME = "conversations.jsonl"

Say = Callable[[str], None]


@dataclass(frozen=True)
class TeacherReport:
    """How `train_teacher` ended.

    Args:
        was_done: the teacher was there already.
        output: its folder.
    """

    manifest: TeacherManifest
    was_done: bool
    output: str


def _prepare(
    spec: TeacherSpec,
    storage: Storage,
    cache_dir: Path | None,
    secrets: Mapping[str, Any],
    *,
    is_writer: bool = True,
) -> tuple[OutputFolder, TeacherBase, TeacherTrainer, TrainingRecord]:
    """All that is read and checked before weights are loaded."""
    output = OutputFolder(TEACHER, spec.output)
    resolved = resolve_model(spec.init, cache_dir=cache_dir)
    if is_writer:  # the first of several processes may have begun to write before the others get here
        output.check_free()
        refuse_own_base(output, resolved, key="init")
    base = check_teacher_base(spec, resolved)
    check_services(spec.train.report_to)
    precision_of(spec.train)
    trainer: TeacherTrainer = imported(method_of(spec.method).trainer)(spec, base, storage)
    trainer.secrets = secrets
    record = training_record(TEACHER, spec, resolved, trainer.digest, version=TEACHER_MANIFEST_VERSION)
    return output, base, trainer, record


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
        storage: how runs and gold are reached. The model is looked up in the cache alone (`jobs/downloads.py` brings it
            there).
        say: called with progress and remarks, a line each.
        is_writer: False in all but the first of several processes that train together: they write nothing.
        secrets: what the options of an engine that the method asks name, by option.
    Raises:
        ConfigError, InputError, ManifestError, ModelError: something is off, see the modules that say so.
        StaleRunError: the output holds a teacher or checkpoints of another spec.
        LockHeldError: another process trains there.
        TrainingError: the loss is not finite, or memory runs out twice.
    """
    output, base, trainer, record = _prepare(spec, storage, cache_dir, secrets, is_writer=is_writer)
    if is_finished(output, record, start):
        if is_writer:
            remove_leftovers(output, record)
        return TeacherReport(output.manifest(TeacherManifest), True, spec.output)
    for note in trainer.notes:
        say(note)
    if not is_writer:
        trained = trainer.train(output.checkpoints, say)
        return TeacherReport(_manifest(spec, base, trainer, trained, record.fingerprint), False, spec.output)
    with training_in(output, record, start):
        trained = trainer.train(output.checkpoints, say)

        def write(folder: Path) -> TeacherManifest:
            write_model(folder, trained.model, base)
            write_curves(folder, trained.outcome.curve, title=spec.name)
            trained.write_more(folder)
            manifest = _manifest(spec, base, trainer, trained, record.fingerprint)
            manifest = replace(manifest, files=student_files(folder))
            (folder / CARD_NAME).write_text(render_card(manifest), encoding="utf-8")
            return manifest

        manifest = write_finished(output, write)
    return TeacherReport(manifest, False, spec.output)


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
    """What training a spec's teacher would do; writes nothing, and loads no weights unless it is timed.

    Args:
        is_timed: train some steps to see how long they take.
    Raises:
        RelabelError: as `train_teacher`, before it trains.
    """
    if is_timed:  # steps of a probe are not reported
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"report_to": ()})})
    output, _, trainer, record = _prepare(spec, storage, cache_dir, secrets)
    if is_finished(output, record, start):
        say(f"{spec.output}: holds this teacher already; a training would find it and end with nothing to do.")
    else:
        check_checkpoints(output, record, start)
        output.check_writable()
    for note in trainer.notes:
        say(note)
    estimate = replace(trainer.estimate(), dropped=dict(trainer.data.dropped))
    if not is_timed:
        return estimate
    updates = getattr(getattr(spec, "rollouts", None), "updates", 1)
    step_s = _probe(trainer, updates=updates, say=say)
    return replace(estimate, step_s=step_s, seconds=None if step_s is None else round(step_s * estimate.steps, 1))


def export_conversations(spec: TeacherSpec, storage: Storage, folder: Path, *, cache_dir: Path | None = None) -> int:
    """Write the conversations that a spec's teacher would learn as chat JSONL, in TRL's form of prompt and completion;
    nothing is trained.

    Returns:
        How many there are.
    Raises:
        ConfigError: the method samples its answers itself, or the file is there already.
        RelabelError: as `train_teacher`, before it trains.
    """
    if not isinstance(spec, SftSpec):
        raise ConfigError(f"--export: `method: {spec.method}` samples its answers itself; only sft learns given ones.")
    from relabel.distill.teachers.sft import conversations

    file = folder / CONVERSATIONS_NAME
    if file.exists():
        raise ConfigError(f"{file}: is there already. Name another folder, or remove it.")
    base = check_teacher_base(spec, resolve_model(spec.init, cache_dir=cache_dir))
    scratch = folder / f".{CONVERSATIONS_NAME}"
    lines = conversations(spec, base, storage)
    count = 0
    with writing(folder, None):
        folder.mkdir(parents=True, exist_ok=True)
        with scratch.open("w", encoding="utf-8") as target:
            for line in lines:
                target.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
        scratch.replace(file)
    return count


class _ProbeEnded(Exception):  # noqa: N818 — no error
    """Ends a probe from within its own lines of progress."""


def _probe(trainer: TeacherTrainer, *, updates: int, say: Say) -> float | None:
    """Mean seconds of a step, of a training in a folder that is then removed; None where it ends too soon to say.

    Args:
        trainer: it can't train again.
        updates: steps on the same rollouts: only the first of them samples answers, so they are timed together.
    """
    ends: list[float] = []

    def heard(line: str) -> None:
        if re.match(r"step \d+ of \d+\b", line) is None:
            say(line)
            return
        ends.append(time.perf_counter())
        if len(ends) == updates * (PROBE_STRETCHES + 1):
            raise _ProbeEnded

    with tempfile.TemporaryDirectory(prefix="relabel-") as scratch, contextlib.suppress(_ProbeEnded):
        trainer.train(Path(scratch), heard)
    marks = ends[updates - 1 :: updates]
    return round((marks[-1] - marks[0]) / (updates * (len(marks) - 1)), 4) if len(marks) > 1 else None


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


def _manifest(
    spec: TeacherSpec, base: TeacherBase, trainer: TeacherTrainer, trained: Trained, fingerprint: str
) -> TeacherManifest:
    """The manifest of a teacher, without its files' digests."""
    return TeacherManifest(
        version=TEACHER_MANIFEST_VERSION,
        relabel=importlib.metadata.version("relabel-ir"),
        name=spec.name,
        method=spec.method,
        fingerprint=fingerprint,
        model=BaseModelUsed(base.resolved.reference, base.resolved.digest, base.config.model_type),
        labeler=trainer.labeler,
        templates=trainer.templates,
        data=trainer.data,
        training=trained.outcome.facts,
        notes=[*trainer.notes, *trained.outcome.notes],
        versions=installed_versions(LIBRARIES),
        spec=spec.model_dump(mode="json"),
    )
