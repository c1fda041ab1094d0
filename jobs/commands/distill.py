"""`distill`: labels become a student."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from relabel.jobs.output import emit, table
from relabel.jobs.planning.settings import SpecKind
from relabel.jobs.planning.spec_places import resolved
from relabel.manifests.records import plain

if TYPE_CHECKING:
    from relabel.distill.students.distilling import Report
    from relabel.distill.students.student_manifest import Figures
    from relabel.distill.training.making import Start
    from relabel.manifests.metrics.baselines import Baselines

BEGINNING = "`relabel schema student` prints its keys, docs/students holds some to start from"
SHOWN = ("accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc", "ece", "ndcg@10")


@click.command(epilog="Example: relabel distill student.yaml --resume")
@click.argument("spec_file", metavar="STUDENT.YAML")
@training_options("student")
@click.option("--done-ok", is_flag=True, help="Exit 0 instead of 10 when the student is there already.")
@output_option
def distill(spec_file: str, overrides: tuple[str, ...], resume: bool, restart: bool, done_ok: bool, output: str) -> int:
    """Train a student on finished label runs.

    The spec names labels, model, losses and split; docs/distill.md has its keys. The student's folder holds weights,
    tokenizer, manifest, training curves and a model card. A student that a gate (`require`) refuses is kept, and the
    exit code is 5.
    """
    is_first = is_first_process()
    report = train_student(
        spec_file,
        overrides,
        start=start_of(resume=resume, restart=restart),
        say=teller() if is_first else lambda _: None,
        is_writer=is_first,
    )
    code = Exit.GATE if not report.has_passed else Exit.DONE if done_ok or not report.was_done else Exit.NOTHING_TO_DO
    if is_first:
        emit({**_result(report), "output": report.place, "was_done": report.was_done}, _text(report), output)
    return code


def train_student(
    spec: str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    start: Start,
    say: Callable[[str], None],
    is_writer: bool = True,
) -> Report:
    """Train the student of a spec file, or of values as one would hold them.

    Args:
        overrides: `KEY=VALUE` strings that win over the spec.
        say: called with progress and remarks, a line each.
        is_writer: False in all but the first of several processes that train together.
    Raises:
        RelabelError: what is wrong with the spec, the labels, the model or the training.
    """
    from relabel.distill.students.distilling import distill as train
    from relabel.distill.students.specs import DistillSpec
    from relabel.manifests.spec_faults import validate_spec

    kind = SpecKind("student", tuple(DistillSpec.model_fields), "train.epochs=3", BEGINNING)
    settings, where, cache_dir, storage = open_spec(spec, overrides, kind)

    found = resolved(validate_spec(DistillSpec, settings.values, where=where), settings.places)
    fetch_model(found.student.model, storage, cache_dir=cache_dir)
    with says_how_to_continue(found.output, cache_dir, is_first=is_writer):
        return train(found, storage, start=start, cache_dir=cache_dir, say=say, is_writer=is_writer)


def _result(report: Report) -> dict[str, Any]:
    keys = (
        "name",
        "fingerprint",
        "heads",
        "temperature",
        "rows",
        "rows_by_head",
        "split",
        "training",
        "metrics",
        "notes",
    )
    return {**{key: plain(getattr(report.manifest, key)) for key in keys}, "gate": plain(report.gate)}


def verdicts(student: Figures, found: Baselines | None, *, judged_by: str) -> list[str]:
    """Whether a student is above the baselines on its test split; without intervals, which `evaluate` has."""
    from relabel.manifests.metrics.baselines import not_beaten

    if found is None or not student.get("rows"):
        return []
    below = not_beaten(student, found)
    over = f"over {student['rows']:,} test rows, by {judged_by}"
    if below:
        return [f"no better than a baseline {over}: {'; '.join(below)}"]
    return [f"above the constant and lexical baselines {over}; `relabel evaluate` says whether that is shown"]


def _text(report: Report) -> str:
    manifest = report.manifest
    training, test = manifest.training, manifest.metrics.test
    sides = (f"{name} {side.rows:,} of {side.queries:,} queries" for name, side in manifest.split.sides().items())
    rows = [("verdict", text) for text in verdicts(test.student, test.baselines, judged_by=test.judged_by)]
    rows += [
        ("heads", ", ".join(f"{name} {grades}" for name, grades in manifest.heads.items())),
        ("rows", ", ".join(sides)),
        ("trained", f"{training.steps:,} steps, {training.rows_per_s or 0:,} rows/s on {training.device}"),
    ]
    for who, figures in (("student", test.student), ("teacher", test.teacher or {})):
        found = [f"{name} {value:.4f}" for name in SHOWN if (value := figures.get(name)) is not None]
        if found:
            found.append(f"over {figures.get('rows') or 0:,} rows")
        if found:
            rows.append((f"{who}, by {test.judged_by}", ", ".join(found)))
    for kind in ("constant", "random", "lexical"):
        held = {name: test.baselines.of(name).get(kind) for name in SHOWN} if test.baselines else {}
        bounds = [f"{name} {value:.4f}" for name, value in held.items() if value is not None]
        if bounds:
            rows.append((f"{kind} baseline", ", ".join(bounds)))
    rows += [("note", note) for note in manifest.notes]
    rows += [("gate", check.text) for check in report.gate.checks] or [("gate", "no gate set")]
    head = "Nothing to do: this student is in" if report.was_done else "The student is in"
    return f"{head} {report.place}\n{table(rows)}"
