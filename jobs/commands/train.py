"""`train`: a teacher is made here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.commands.ending import sigterm_ends
from jobs.commands.options import output_option
from jobs.commands.training import CONTINUE, is_first_process, start_of, teller
from jobs.exits import Exit
from jobs.fetching.models import fetch_model
from jobs.output import emit, table
from jobs.planning.job_files import CACHE_VARIABLE, SpecKind, read_settings, storage_of
from jobs.planning.spec_places import placed, resolved
from manifests.records import plain

if TYPE_CHECKING:
    from distill.teachers.teaching import TeacherReport
    from distill.teachers.trainers import TrainingEstimate

BEGINNING = "`relabel schema teacher` prints its keys, docs/teachers holds some to start from"


@click.command(epilog="Example: relabel train teacher.yaml --resume")
@click.argument("spec_file", metavar="TEACHER.YAML")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the spec, for instance train.epochs=3. Repeatable.",
)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint, or begin if there is none.")
@click.option("--restart", is_flag=True, help="Delete checkpoints, or a teacher, that the output holds.")
@click.option("--dry-run", is_flag=True, help="Say rows, tokens, steps and memory; train nothing.")
@click.option("--done-ok", is_flag=True, help="Exit 0 instead of 10 when the teacher is there already.")
@output_option
def train(
    spec_file: str, overrides: tuple[str, ...], resume: bool, restart: bool, dry_run: bool, done_ok: bool, output: str
) -> int:
    """Train a teacher: a model that answers a labeler's prompts.

    The spec names the method, the model to start from and what to learn; docs/train.md has its keys. The teacher's
    folder is a model directory that a job's `engine.model` takes, with a manifest, training curves and a model card.
    """
    start = start_of(resume=resume, restart=restart)
    from distill.teachers.spec_files import read_teacher_spec, teacher_keys
    from distill.teachers.teaching import estimate_teacher, train_teacher

    kind = SpecKind("teacher", teacher_keys(), "train.epochs=3", BEGINNING)
    settings = read_settings(spec_file, overrides=overrides, kind=kind)
    where = f"{spec_file} with {', '.join(settings.beside)}" if settings.beside else spec_file
    cache = os.environ.get(CACHE_VARIABLE)
    cache_dir = Path(placed(cache, settings.places.here)) if cache else None
    storage = storage_of(settings.values, where=where)
    spec = resolved(read_teacher_spec(settings.values, where=where), settings.places)
    fetch_model(spec.init, storage, cache_dir=cache_dir)
    is_first = is_first_process()
    say = teller() if is_first else lambda _: None
    if dry_run:
        estimate = estimate_teacher(spec, storage, cache_dir=cache_dir, say=say)
        emit(plain(estimate), _estimated(estimate), output)
        return Exit.DONE
    try:
        with sigterm_ends():
            report = train_teacher(spec, storage, start=start, cache_dir=cache_dir, say=say, is_writer=is_first)
    except KeyboardInterrupt:
        if is_first:
            click.echo(CONTINUE, err=True)
        raise
    if is_first:
        emit({**_result(report), "output": report.place, "was_done": report.was_done}, _text(report), output)
    return Exit.DONE if done_ok or not report.was_done else Exit.NOTHING_TO_DO


def _estimated(estimate: TrainingEstimate) -> str:
    rows = [
        ("rows", f"{estimate.rows:,}, {estimate.examples:,} examples"),
        ("steps", f"{estimate.steps:,}"),
        ("tokens", f"{estimate.tokens:,}, {estimate.answer_tokens:,} of them in answers"),
        ("memory", f"{estimate.memory_bytes / 2**30:.1f} GiB, and what the layers keep of a batch"),
        ("time", "not known before the first steps"),
    ]
    return f"Nothing was trained\n{table(rows)}"


def _result(report: TeacherReport) -> dict[str, Any]:
    keys = ("name", "method", "fingerprint", "labeler", "data", "training", "notes")
    return {key: plain(getattr(report.manifest, key)) for key in keys}


def _text(report: TeacherReport) -> str:
    data, training = report.manifest.data, report.manifest.training
    rows = [
        ("rows", f"{data.rows:,}, {data.examples:,} examples"),
        ("tokens", f"{data.tokens:,}, {data.answer_tokens:,} of them in answers"),
        ("trained", f"{training.steps:,} steps, {training.rows_per_s or 0:,} examples/s on {training.device}"),
        *(("left out", f"{count:,} {reason}") for reason, count in data.dropped.items()),
        *(("note", note) for note in report.manifest.notes),
    ]
    head = "Nothing to do: this teacher is in" if report.was_done else "The teacher is in"
    return f"{head} {report.place}\n{table(rows)}"
