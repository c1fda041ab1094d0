"""Whether a job, student or teacher file could start here: its checks in order, up to the first that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from relabel.distill.students.labels import in_words_of_the_spec
from relabel.distill.students.spec import DistillSpec, GoldSource
from relabel.distill.teachers.spec import EvidenceGold, read_teacher_spec, teacher_keys
from relabel.jobs.commands.train import TrainingSpec, open_spec
from relabel.jobs.downloads import fetch_model
from relabel.jobs.exits import Exit, exit_for
from relabel.jobs.job import Job, load_job
from relabel.jobs.settings import JOB, SpecKind, resolved
from relabel.jobs.spec_yaml import read_spec_file
from relabel.manifests.errors import ConfigError, ManifestError, RelabelError, StoreError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import load_gold_by_row
from relabel.manifests.input_files import list_files
from relabel.manifests.manifest import load_manifest
from relabel.manifests.models import resolve_model
from relabel.manifests.process import require
from relabel.manifests.secrets import counted
from relabel.manifests.specs import validate_spec
from relabel.manifests.store import has_links, open_run_store
from relabel.manifests.tables import read_grades

STEPS = {
    "job": ("spec", "input", "model", "engine", "server", "output"),
    "student": ("spec", "labels", "gold", "model", "packages", "output"),
    "teacher": ("spec", "runs", "gold", "model", "packages", "output"),
}
"""By kind of spec, its checks in order; one with nothing to check is not shown."""


def checked(spec_file: str) -> tuple[str, dict[str, str], Exit]:
    """The kind of spec that a file is, each check with its outcome, and the exit code of the one that failed."""
    kind, found = "job", dict[str, str]()
    try:
        values = read_spec_file(spec_file, beginning=JOB.beginning, keys=JOB.fields)
        if "bundle" in values:
            raise ConfigError(f"{spec_file}: a bench file: `relabel bench {spec_file}` checks it before it measures.")
        kind = "student" if "student" in values else "teacher" if "method" in values else "job"
        outcomes = {"job": _job, "student": _student, "teacher": _teacher}[kind](spec_file)
        for step in STEPS[kind]:
            found[step] = next(outcomes)
    except RelabelError as exc:
        found[STEPS[kind][len(found)]] = str(exc)
        return kind, found, exit_for(exc)
    return kind, {step: outcome for step, outcome in found.items() if outcome}, Exit.DONE


def _job(spec_file: str) -> Iterator[str]:
    job = load_job(spec_file)
    yield "fine"
    yield _input(job)
    yield f"{job.spec.engine.model or job.spec.engine.name}, digest {job.model_digest()[:12]}"
    job.engine_class.check(job.spec.engine)
    yield f"{job.spec.engine.name} can start"
    engine = job.engine_class
    asks = job.labeler.probe()
    yield engine.try_server(job.spec.engine, asks, job.secrets)
    yield _output(job.spec.output, job.storage, single_writer=job.spec.run.single_writer)


def _student(spec_file: str) -> Iterator[str]:
    opened = open_spec(spec_file, (), SpecKind("student", tuple(DistillSpec.model_fields), "train.epochs=3", ""))
    spec = resolved(validate_spec(DistillSpec, opened.settings.values, where=opened.where), opened.settings.places)
    yield "fine"
    yield _labels([source.path for source in spec.labels], opened.storage)
    yield _gold("gold", spec.gold, opened.storage)
    yield _model(spec.student.model, opened)
    require("torch", extra="cpu", purpose="relabel distill")
    yield "torch is here"
    yield _output(spec.output, opened.storage)


def _teacher(spec_file: str) -> Iterator[str]:
    opened = open_spec(spec_file, (), SpecKind("teacher", teacher_keys(), "train.epochs=3", ""))
    spec = resolved(read_teacher_spec(opened.settings.values, where=opened.where), opened.settings.places)
    yield "fine"
    data = getattr(spec, "data", None)
    yield _labels([source.path for source in getattr(data, "runs", ())], opened.storage)
    yield _gold("data.gold", getattr(data, "gold", None), opened.storage)
    yield _model(spec.init, opened)
    require("torch", extra="cpu,train", purpose="relabel train")
    if spec.method != "sft":
        require("trl", extra="cpu,train", purpose="relabel train")
    yield "torch is here" if spec.method == "sft" else "torch and trl are here"
    yield _output(spec.output, opened.storage)


def _input(job: Job) -> str:
    if job.spec.rounds is not None:
        return "questions for `relabel rounds`, which reads them; not checked here"
    dataset = job.open_dataset()
    if dataset.columns.gold is not None:
        for file in dataset.files:
            grades = read_grades(load_gold_by_row([file.path], dataset.columns.gold, job.storage))
            grades.readable(file.path, dataset.columns.gold)
    columns = ", ".join(dataset.columns.document)
    return f"{counted(dataset.rows, 'row')} in {counted(len(dataset.files), 'file')}, document from {columns}"


def _labels(places: list[str], storage: Storage) -> str:
    """What there is to learn from, of runs that are finished."""
    said = []
    for place in places:
        if Path(place).is_file():
            said.append(f"{place} is a file")
            continue
        manifest = load_manifest(open_run_store(place, storage))
        if manifest is None:
            raise ManifestError(f"{place}: no finished run lies there. `relabel status {place}` says what is open.")
        said.append(f"{place} has {manifest.rows.labelled + manifest.rows.reused:,} labels")
    return ", ".join(said) or "none; gold is all there is"


def _gold(key: str, source: GoldSource | EvidenceGold | None, storage: Storage) -> str:
    """Whether gold is where the spec says; its content is checked by the training."""
    if source is None:
        return "none"
    with in_words_of_the_spec(key):
        list_files(source.path, storage)
    return f"{source.path} is there"


def _model(reference: str, opened: TrainingSpec) -> str:
    fetch_model(reference, opened.storage, cache_dir=opened.cache_dir)
    return f"{reference}, digest {resolve_model(reference, cache_dir=opened.cache_dir).digest[:12]}"


def _output(place: str, storage: Storage, *, single_writer: bool = False) -> str:
    """Whether the output can be written; of storage, whether commits will be single there, by the probe that a run
    writes.
    """
    if is_url(place):
        open_run_store(place, storage, single_writer=single_writer).check_conditional_writes()
        if single_writer:
            return f"{place}: not checked for conditional writes (run.single_writer)"
        return f"{place} can be written, and heeds conditions"
    there = Path(place)
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise StoreError(f"{there}: a file, where the output wants a folder. Name another.")
    if not os.access(there, os.W_OK):
        raise StoreError(f"{there}: no permission to write there.")
    if not has_links(there):
        return (
            f"{place} can be written, but its file system has no hard links: a worker that is killed, or loses its "
            "power, in the middle of a commit leaves half a receipt, which is named then and has to be moved away"
        )
    return f"{place} can be written"
