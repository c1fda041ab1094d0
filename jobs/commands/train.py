"""`train`: a teacher is made here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs.commands.options import output_option
from relabel.jobs.commands.training import (
    is_first_process,
    open_spec,
    says_how_to_continue,
    start_of,
    teller,
    training_options,
)
from relabel.jobs.exits import Exit
from relabel.jobs.fetching.models import fetch_model
from relabel.jobs.output import clock_text, emit, table
from relabel.jobs.planning.settings import SpecKind, read_secrets
from relabel.jobs.planning.spec_places import resolved
from relabel.manifests.engine_options import KeepsModels
from relabel.manifests.errors import UsageError
from relabel.manifests.records import plain

if TYPE_CHECKING:
    from relabel.distill.teachers.res_rag_spec import GeneratorSpec
    from relabel.distill.teachers.teaching import TeacherReport
    from relabel.distill.teachers.trainers import TrainingEstimate, TrainingTime
    from relabel.manifests.storage.context import Storage

BEGINNING = "`relabel schema teacher` prints its keys, docs/teachers holds some to start from"


@click.command(epilog="Example: relabel train teacher.yaml --resume")
@click.argument("spec_file", metavar="TEACHER.YAML")
@training_options("teacher")
@click.option("--dry-run", is_flag=True, help="Check spec and data; report rows, steps and tokens; train nothing.")
@click.option("--probe", is_flag=True, help="With --dry-run: also train a few steps, to estimate the time.")
@click.option("--done-ok", is_flag=True, help="Exit 0 instead of 10 when the teacher is there already.")
@output_option
def train(
    spec_file: str,
    overrides: tuple[str, ...],
    resume: bool,
    restart: bool,
    dry_run: bool,
    probe: bool,
    done_ok: bool,
    output: str,
) -> int:
    """Train a teacher: a model that answers a labeler's prompts.

    The spec names the method, the model to start from and what to learn; docs/train.md has its keys. The teacher's
    folder is a model directory that a job's `engine.model` takes, with a manifest, training curves and a model card.
    """
    start = start_of(resume=resume, restart=restart)
    if probe and not dry_run:
        raise UsageError("--probe goes with --dry-run: a training itself says how fast it is.")
    from relabel.distill.teachers.res_rag_spec import ResRagSpec
    from relabel.distill.teachers.spec_files import read_teacher_spec, teacher_keys
    from relabel.distill.teachers.teaching import estimate_teacher, train_teacher

    kind = SpecKind("teacher", teacher_keys(), "train.epochs=3", BEGINNING)
    settings, where, cache_dir, storage = open_spec(spec_file, overrides, kind)
    spec = resolved(read_teacher_spec(settings.values, where=where), settings.places)
    fetch_model(spec.init, storage, cache_dir=cache_dir)
    secrets: dict[str, Any] = {}
    if isinstance(spec, ResRagSpec):
        generator = _fetched(spec.generator, storage, cache_dir)
        spec, secrets = spec.model_copy(update={"generator": generator}), read_secrets(generator, os.environ)
    is_first = is_first_process()
    say = teller() if is_first else lambda _: None
    if dry_run:
        estimate = estimate_teacher(
            spec, storage, start=start, cache_dir=cache_dir, say=say, is_timed=probe, secrets=secrets
        )
        return emit(
            plain(estimate), _estimated(estimate, "rollouts" if hasattr(spec, "rollouts") else "examples"), output
        )
    with says_how_to_continue(spec.output, cache_dir, is_first=is_first):
        report = train_teacher(
            spec, storage, start=start, cache_dir=cache_dir, say=say, is_writer=is_first, secrets=secrets
        )
    if is_first:
        emit({**_result(report), "output": report.place, "was_done": report.was_done}, _text(report), output)
    return Exit.DONE if done_ok or not report.was_done else Exit.NOTHING_TO_DO


def _fetched(generator: GeneratorSpec, storage: Storage, cache_dir: Path | None) -> GeneratorSpec:
    """The generator's spec with its model at hand, in the same cache as all models unless it names another."""
    args = generator.args
    reference = generator.model
    if reference is None or not isinstance(args, KeepsModels):
        return generator
    if cache_dir is not None and args.cache_dir is None:
        generator = generator.model_copy(update={"args": args.model_copy(update={"cache_dir": str(cache_dir)})})
    kept = args.cache_dir or cache_dir
    fetch_model(reference, storage, cache_dir=None if kept is None else Path(kept))
    return generator


def _estimated(estimate: TrainingEstimate, learned: str) -> str:
    left_out = "".join(f"; left out: {count:,} {reason}" for reason, count in estimate.dropped.items())
    looks = f"; {estimate.look_tokens:,} more in looks at dev" if estimate.look_tokens else ""
    rows = [
        ("rows", f"{estimate.rows:,}, {estimate.examples:,} {learned}{left_out}"),
        ("steps", f"{estimate.steps:,}"),
        ("tokens", f"{estimate.tokens:,}, {estimate.answer_tokens:,} of them in answers{looks}"),
        ("time", _time(estimate.time)),
    ]
    return f"Nothing was trained\n{table(rows)}"


def _time(time: TrainingTime | None) -> str:
    if time is None:
        return "unknown; --probe trains a few steps to estimate it"
    shown, least, most = (clock_text(seconds) for seconds in (time.seconds, time.least, time.most))
    return f"{shown} at the pace of {time.steps} first steps ({least} to {most}), looks at dev left out"


def _result(report: TeacherReport) -> dict[str, Any]:
    keys = ("name", "method", "fingerprint", "labeler", "data", "training", "notes")
    return {key: plain(getattr(report.manifest, key)) for key in keys}


def _step_took(seconds: dict[str, float] | None) -> list[str]:
    """What a step's seconds were spent on, in a line."""
    if not seconds:
        return []
    total = sum(seconds.values())
    write, read = seconds["write"] / total, seconds["read"] / total
    took = f"{total:,.1f}" if total >= 1 else f"{total:.2g}"
    return [f"took {took} s: {write:.0%} writing answers, {read:.0%} reading them, {1 - write - read:.0%} learning"]


def _text(report: TeacherReport) -> str:
    data, training = report.manifest.data, report.manifest.training
    kept = "" if training.best_step is None else f", step {training.best_step:,} kept"
    rows = [
        ("rows", f"{data.rows:,}, {data.examples:,} examples"),
        ("tokens", f"{data.tokens:,}, {data.answer_tokens:,} of them in answers"),
        ("trained", f"{training.steps:,} steps{kept}, {training.rows_per_s or 0:,} examples/s on {training.device}"),
        *(("a step", took) for took in _step_took(training.step_seconds)),
        *(("left out", f"{count:,} {reason}") for reason, count in data.dropped.items()),
        *(("note", note) for note in report.manifest.notes),
    ]
    head = "Nothing to do: this teacher is in" if report.was_done else "The teacher is in"
    return f"{head} {report.place}\n{table(rows)}"
