"""The commands `distill` and `train`: options, spec loading and results of training a student or a teacher."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from relabel.jobs.commands.options import Command, output_option, sigterm_ends, together
from relabel.jobs.output import Exit, Summary, TextResult, emit, grid, value_text
from relabel.manifests.errors import ConfigError, InputError, UsageError
from relabel.manifests.files import is_url

if TYPE_CHECKING:
    from relabel.distill.students.spec import DistillSpec
    from relabel.distill.teachers.spec import GeneratorSpec
    from relabel.distill.training.output import Start
    from relabel.jobs.trained import StudentResult
    from relabel.manifests.files import Storage
    from relabel.manifests.specs import Spec

SpecT = TypeVar("SpecT", bound="Spec")

# ------------------------------------------------------------------------------
# Options, spec loading and progress that both commands share.


def training_options(product: str) -> Callable[[Command], Command]:
    """Options of both commands: keys set over the spec, and whether to resume or restart."""
    return together(
        click.option("--restart", is_flag=True, help=f"Delete checkpoints, or a {product}, that the output holds."),
        click.option("--resume", is_flag=True, help="Continue from the last checkpoint, or begin if there is none."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set a key of the spec, for instance train.epochs=3. Repeatable.",
        ),
    )


def open_spec(
    spec: str | Mapping[str, Any],
    overrides: Sequence[str],
    kind: str,
    fields: tuple[str, ...],
    read: Callable[[Mapping[str, Any], str], SpecT],
    model_of: Callable[[SpecT], str],
    paths_of: Callable[[SpecT], Iterable[tuple[str, str]]],
) -> tuple[SpecT, Path | None, Storage]:
    """Read a training's spec, a file or the values of one, and fetch the model that it starts from.

    Args:
        kind, fields: as `read_settings`.
        read: checks plain values, which come from the place that it is given for errors.
        model_of: the spec's reference of that model.
        paths_of: keys and paths of what it learns from, which has to be there before a model is fetched.
    Returns:
        The spec; where fetched models are kept, None for the default; the storage.
    Raises:
        ConfigError: it can't be read, or has an unknown key; or a launcher of several processes was not one that is
            known here.
        InputError: a local path is not there.
    """
    from relabel.jobs.delivery import fetch_model
    from relabel.jobs.job import cache_dir
    from relabel.jobs.settings import read_settings, resolved, storage_of

    check_launch(os.environ)
    settings = read_settings(spec, overrides=overrides, kind=kind, fields=fields)
    where = settings.places.where + (f" with {', '.join(settings.overrides)}" if settings.overrides else "")
    models_dir = cache_dir()
    storage = storage_of(settings.values, where=where)
    checked_spec = resolved(read(settings.values, where), settings.places)
    for key, path in paths_of(checked_spec):
        if not is_url(path) and not has_magic(path) and not os.path.lexists(path):
            raise InputError(f"{path}: no such file or folder (from {Path.cwd()}); `{key}` names it.")
    fetch_model(model_of(checked_spec), storage, cache_dir=models_dir)
    return checked_spec, models_dir, storage


@contextlib.contextmanager
def advice_to_continue(output: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the training; the first process prints how to continue.

    Args:
        output: of the spec.
    """
    from relabel.distill.training.output import CHECKPOINTS, how_it_goes_on

    try:
        # torchrun, and accelerate by it, set the variable for the processes that they start
        with sigterm_ends(has_launcher="TORCHELASTIC_RUN_ID" in os.environ):
            yield
    except KeyboardInterrupt:
        if is_first_process():
            click.echo(how_it_goes_on(Path(output) / CHECKPOINTS), err=True)
        raise


def start_of(*, resume: bool, restart: bool) -> Literal["new", "resume", "restart"]:
    """How a training begins, by its flags.

    Raises:
        UsageError: both were given.
    """
    if resume and restart:
        raise UsageError("--resume and --restart: one continues, the other starts over; give one of them.")
    if resume:
        return "resume"
    return "restart" if restart else "new"


OF_LAUNCHERS = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""What torchrun, and accelerate by it, set for each process."""
OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""How many processes MPI started; accelerate goes by it where no launcher says more."""


def check_launch(environment: Mapping[str, str]) -> None:
    """This is the only process, or a launcher started it and several others: by what another tool left in the
    environment, it would wait for others for an hour, or write nothing.

    Raises:
        ConfigError: the environment has some of a launcher's variables alone.
    """
    given = {name: environment[name] for name in OF_LAUNCHERS if environment.get(name)}
    missing = [name for name in OF_LAUNCHERS if name not in given]
    if not missing:
        return
    is_one = "LOCAL_RANK" not in given and given.get("RANK", "0") == "0" and given.get("WORLD_SIZE", "1") == "1"
    stated = [f"{name}={value}" for name, value in given.items()] if not is_one else []
    stated += [f"{name}={environment[name]}" for name in OF_MPI if environment.get(name, "1") != "1"]
    if stated:
        raise ConfigError(
            f"the environment has {', '.join(stated)}, and not {', '.join(missing)}: a launcher of several processes "
            "(torchrun, accelerate launch) sets all of these. Start them by one of these; or unset what is there, to "
            "train in one process."
        )


def is_first_process() -> bool:
    """Whether this is the process that writes and prints: rank 0 of torchrun or accelerate."""
    return int(os.environ.get("RANK", "0")) == 0


def teller() -> Callable[[str], None]:
    """The first process prints progress on stderr; of the steps one line every 15 seconds."""
    last = float("-inf")
    is_first = is_first_process()

    def write(line: str) -> None:
        nonlocal last
        is_step = line.startswith("step ") and ", dev:" not in line
        now = time.monotonic()
        if is_first and (not is_step or now - last >= 15):
            last = now if is_step else last
            click.echo(line, err=True)

    return write


# ------------------------------------------------------------------------------
# `distill`: labels become a student.


@click.command(epilog="Example: relabel distill student.yaml --resume")
@click.argument("spec_file", metavar="STUDENT.YAML")
@training_options("student")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check spec, labels and model; report heads, rows and notes; train nothing.",
)
@click.option("--done-ok", is_flag=True, help="Exit 0 instead of 10 when the student is there already.")
@output_option
def distill(
    spec_file: str,
    overrides: tuple[str, ...],
    resume: bool,
    restart: bool,
    dry_run: bool,
    done_ok: bool,
    output: str,
) -> int:
    """Train a student on finished label runs.

    The spec names labels, model, losses and split; docs/distill.md has its keys. The student's folder holds weights,
    tokenizer, manifest, training curves and a model card. A student that a gate (`require`) refuses is kept, and the
    exit code is 5.
    """
    start = start_of(resume=resume, restart=restart)
    if dry_run:
        return _show_plan(spec_file, overrides, output)
    report = train_student(spec_file, overrides, start=start)
    if is_first_process():
        emit(report, output)
    if not report.has_passed:
        return Exit.GATE
    if report.was_done and not done_ok:
        return Exit.NOTHING_TO_DO
    return Exit.DONE


def train_student(spec: str | Mapping[str, Any], overrides: Sequence[str], *, start: Start) -> StudentResult:
    """Train the student of a spec file, or of the values of one.

    Args:
        overrides: `KEY=VALUE` strings that win over the spec.
    Raises:
        RelabelError: what is wrong with the spec, the labels, the model or the training.
    """
    from relabel.distill.students.distillation import distill as train
    from relabel.jobs.trained import StudentResult

    found, cache_dir, storage = _open_student_spec(spec, overrides)
    with advice_to_continue(found.output):
        report = train(
            found,
            storage,
            start=start,
            cache_dir=cache_dir,
            report=teller(),
            is_writer=is_first_process(),
        )
    return StudentResult(**vars(report))


def _open_student_spec(
    spec: str | Mapping[str, Any], overrides: Sequence[str]
) -> tuple[DistillSpec, Path | None, Storage]:
    """See `open_spec`."""
    from relabel.distill.students.spec import DistillSpec
    from relabel.manifests.specs import validate_spec

    return open_spec(
        spec=spec,
        overrides=overrides,
        kind="student",
        fields=tuple(DistillSpec.model_fields),
        read=lambda values, where: validate_spec(DistillSpec, values, where=where),
        model_of=lambda found: found.student.model,
        paths_of=_student_paths,
    )


def _student_paths(spec: DistillSpec) -> Iterator[tuple[str, str]]:
    """Keys and paths of what a student learns from."""
    for source in spec.labels:
        yield "labels", source.path
    if spec.gold is not None:
        yield "gold.path", spec.gold.path


def _show_plan(spec: str, overrides: Sequence[str], output: str) -> int:
    """What `--dry-run` prints."""
    from relabel.distill.students.distillation import plan_student
    from relabel.manifests.records import plain

    student_spec, cache_dir, storage = _open_student_spec(spec, overrides)
    plan = plan_student(student_spec, storage, cache_dir=cache_dir)
    if not is_first_process():
        return Exit.DONE
    values = {**plain(plan), "output": student_spec.output}
    shown = [(name, value_text(value)) for name, value in values.items() if name not in ("documents", "notes")]
    shown = [(name.replace("_", " "), text) for name, text in shown]
    shown += [("document", line) for line in plan.documents]
    shown += [("note", note) for note in plan.notes]
    return emit(TextResult(f"Nothing was trained\n{grid(shown)}", values), output)


# ------------------------------------------------------------------------------
# `train`: answers or rewards become a teacher.


@click.command(epilog="Example: relabel train teacher.yaml --resume")
@click.argument("spec_file", metavar="TEACHER.YAML")
@training_options("teacher")
@click.option("--dry-run", is_flag=True, help="Check spec and data; report rows, steps and tokens; train nothing.")
@click.option(
    "--export",
    "export_to",
    metavar="DIR",
    help="Write the conversations of `method: sft` as chat JSONL; train nothing.",
)
@click.option("--probe", is_flag=True, help="With --dry-run: also train a few steps, to estimate the time.")
@click.option("--done-ok", is_flag=True, help="Exit 0 instead of 10 when the teacher is there already.")
@output_option
def train(
    spec_file: str,
    overrides: tuple[str, ...],
    resume: bool,
    restart: bool,
    dry_run: bool,
    export_to: str | None,
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
    from relabel.distill.teachers.spec import ResRagSpec, read_teacher_spec, teacher_keys

    spec, cache_dir, storage = open_spec(
        spec=spec_file,
        overrides=overrides,
        kind="teacher",
        fields=teacher_keys(),
        read=lambda values, where: read_teacher_spec(values, where=where),
        model_of=lambda found: found.init,
        paths_of=_teacher_paths,
    )
    from relabel.distill.teachers import teaching  # loads transformers: a mistake in the spec is reported before
    from relabel.jobs.trained import TeacherResult

    if export_to is not None:
        from relabel.distill.teachers.sft import export_conversations

        count = export_conversations(spec, storage, Path(export_to), cache_dir=cache_dir)
        return emit(Summary("Wrote conversations", {"output": export_to, "conversations": count}), output)
    shared: dict[str, Any] = {"start": start, "cache_dir": cache_dir, "report": teller(), "secrets": {}}
    if isinstance(spec, ResRagSpec):
        from relabel.jobs.settings import read_secrets

        spec = spec.model_copy(update={"generator": _fetched(spec.generator, storage, cache_dir)})
        shared["secrets"] = read_secrets(spec.generator, os.environ)
    shared["is_writer"] = is_first_process()
    if dry_run:
        estimate = teaching.estimate_teacher(spec, storage, is_timed=probe, **shared)
        if is_first_process():
            emit(Summary("Nothing was trained", estimate), output)
        return Exit.DONE
    with advice_to_continue(spec.output):
        report = teaching.train_teacher(spec, storage, **shared)
    if is_first_process():
        emit(TeacherResult(**vars(report)), output)
    return Exit.DONE if done_ok or not report.was_done else Exit.NOTHING_TO_DO


def _teacher_paths(spec: Any) -> Iterator[tuple[str, str]]:
    """Keys and paths of what a teacher learns from.

    Args:
        spec: of any method.
    """
    for source in getattr(spec.data, "runs", ()):
        yield "data.runs", source.path
    if spec.data.gold is not None:
        yield "data.gold.path", spec.data.gold.path


def _fetched(generator: GeneratorSpec, storage: Storage, cache_dir: Path | None) -> GeneratorSpec:
    """The generator's spec with its model fetched, into the cache of all models unless it names another."""
    from relabel.jobs.delivery import fetch_model
    from relabel.manifests.specs import KeepsModels

    args = generator.args
    models_dir = cache_dir
    if generator.model is not None and isinstance(args, KeepsModels):
        if args.cache_dir is not None:
            models_dir = Path(args.cache_dir)
        elif models_dir is not None:
            generator = generator.model_copy(update={"args": args.model_copy(update={"cache_dir": str(models_dir)})})
        fetch_model(str(generator.model), storage, cache_dir=models_dir)
    return generator
