"""The sections about teachers, students and bundles: facts, training curves, test split, parity and latency."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.spec import StudentManifest
from relabel.distill.teachers.spec import METHODS
from relabel.distill.training.output import (
    CURVE_SCHEMA,
    CURVES_NAME,
    LOSS_PANEL,
    TrainingFacts,
    panel_of,
    panels_of,
)
from relabel.export.bench import latency_rows, machine_line, measurements_of, warnings_of
from relabel.export.bundle_facts import (
    compared_on,
    parity_rows,
    undecided_lines,
)
from relabel.jobs.report.artifacts import DIGITS, BundleArtifact, StudentArtifact, TeacherArtifact
from relabel.jobs.sections import (
    Badge,
    Block,
    Cell,
    Facts,
    Fold,
    Paragraph,
    Plot,
    Remarks,
    Series,
    Table,
)
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import is_url
from relabel.manifests.metrics.comparison import AGAINST_TEACHER
from relabel.manifests.metrics.judged import title_of
from relabel.manifests.secrets import counted


def teacher_facts(teacher: TeacherArtifact) -> Facts:
    """Method, data and training of a teacher."""
    manifest = teacher.manifest
    data = manifest.data
    training = manifest.training
    method = METHODS.get(manifest.method)
    rows: list[tuple[str, Cell]] = [
        ("method", manifest.method if method is None else f"{manifest.method}: {method.title}"),
        ("labeler", str(manifest.labeler.get("name"))),
        ("starts from", manifest.model.reference),
        ("learned from", f"{data.rows:,} rows, {data.answer_tokens:,} tokens of answers"),
    ]
    rows += [("left out", f"{count:,} {reason}") for reason, count in data.dropped.items()]
    rows.append(("trained", f"{training.steps:,} steps on {training.device}"))
    if data.held_out is not None and data.held_out.rows:
        held_out = f"{data.held_out.rows:,} rows of {data.held_out.queries:,} queries"
        if training.best_step is not None:
            held_out += f", by which step {training.best_step:,} was kept"
        rows.append(("held out", held_out))
    rows += [
        ("relabel", manifest.relabel),
        ("fingerprint", manifest.fingerprint[:DIGITS]),
        ("digest", teacher.digest[:DIGITS]),
        ("path", teacher.path),
    ]
    return Facts(f"Teacher {teacher.name}", rows)


def student_facts(student: StudentArtifact) -> Facts:
    """Heads, size and gate of a student."""
    manifest = student.manifest
    record = manifest.student
    gate: Cell = "no gate set"
    if manifest.gate.checks:
        gate = _gate_badge(has_passed=manifest.gate.has_passed)
    rows: list[tuple[str, Cell]] = [
        ("kind", record.get("kind")),
        ("reads at most", f"{record.get('max_tokens')} tokens"),
        *_heads(manifest.heads, manifest.temperature),
        ("starts from", manifest.model.reference),
        ("fingerprint", manifest.fingerprint[:DIGITS]),
        ("gate", gate),
        ("path", student.path),
    ]
    return Facts(f"Student {student.name}", rows)


def bundle_facts(bundle: BundleArtifact) -> Facts:
    """Models and heads of a bundle."""
    student = bundle.student
    rows: list[tuple[str, Cell]] = [
        ("models", ", ".join(f"{model.path} ({model.precision})" for model in student.models)),
        *_heads(student.heads, student.temperature or {}),
        ("licence", student.licence["bundle"] or "not stated"),
        ("version", bundle.digest[:DIGITS]),
        ("path", bundle.path),
    ]
    return Facts(f"Bundle {bundle.name}", rows)


def _gate_badge(*, has_passed: bool) -> Badge:
    return Badge("passed", "good") if has_passed else Badge("refused", "bad")


def _heads(heads: Mapping[str, int], temperature: Mapping[str, float]) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = [("heads", ", ".join(f"{name} ({grades} grades)" for name, grades in heads.items()))]
    if temperature:
        rows.append(("temperatures", ", ".join(f"{name} {value:.3g}" for name, value in temperature.items())))
    return rows


MOST_LINES = 8
POINTS = 400
"""Most points of a curve that is drawn."""


def training_blocks(artifact: StudentArtifact | TeacherArtifact) -> Iterator[Block]:
    """Losses and rewards by step, figures on dev, and facts of the training."""
    yield from _curves(artifact)
    yield Facts(f"Training of {artifact.name}", list(_training_facts(artifact.manifest.training)))


_ENDED = {"early_stopping": "early: dev became no better", "watch": "early, by the watch on its rewards"}


def _training_facts(training: TrainingFacts) -> Iterator[tuple[str, Cell]]:
    yield "length", f"{counted(training.steps, 'step')}, {_epochs_text(training.epochs)} over the data"
    if training.stopped_by is not None:
        yield "ended", _ENDED.get(training.stopped_by, training.stopped_by)
    if training.best_step is not None:
        yield "kept", f"step {training.best_step:,}, the best on dev"
    yield "device", training.device
    if training.rows_per_s is not None:
        yield "speed", f"{training.rows_per_s:,.4g} rows a second"
    batch = ""
    if training.batch_size is not None:
        batch = counted(training.batch_size, "row")
    elif training.tokens_per_batch is not None:
        batch = f"rows of up to {training.tokens_per_batch:,} tokens together"
    if training.accumulation > 1:
        batch = f"{batch}, {training.accumulation:,} batches a step"
    if training.was_batch_halved:
        batch = f"{batch}; it was halved, since memory ran out"
    if batch:
        yield "batch", batch


def _epochs_text(epochs: float) -> str:
    return "once" if epochs == 1 else f"{epochs:,.4g} times"


def _curves(artifact: StudentArtifact | TeacherArtifact) -> Iterator[Plot]:
    """A plot for each kind of figure, and one of figures on dev."""
    try:
        data = artifact.store.read(CURVES_NAME)
        columns = pq.read_table(io.BytesIO(data), columns=CURVE_SCHEMA.names).to_pydict()
    except FileNotFoundError:
        return
    except (pa.ArrowException, OSError) as exc:
        raise ManifestError(
            f"{artifact.path}/{CURVES_NAME}: not readable as curves. Restore the folder from a copy."
        ) from exc
    curves: dict[tuple[str, str], Curve] = {}
    for step, split, name, value in zip(*(columns[name] for name in CURVE_SCHEMA.names), strict=True):
        curves.setdefault((split, name), []).append((step, value))
    panels = panels_of(name for split, name in curves if split == "train")
    for panel, names in panels.items():
        title = "Training loss" if panel == LOSS_PANEL else f"Training, {panel}"
        value = "loss, nats" if panel == LOSS_PANEL else panel
        yield from _curve_plots(title, artifact.name, value, {name: curves["train", name] for name in names})
    on_dev = {name: curve for (split, name), curve in curves.items() if split == "dev" and panel_of(name) != "tokens"}
    yield from _curve_plots("On dev", artifact.name, "", on_dev)


Curve: TypeAlias = list[tuple[int, float]]
"""Steps and values."""


def _curve_plots(title: str, artifact: str, value: str, curves: Mapping[str, Curve]) -> Iterator[Plot]:
    """Plots of a few curves each, thinned out."""
    names = list(curves)
    for start in range(0, len(names), MOST_LINES):
        series = []
        for name in names[start : start + MOST_LINES]:
            points = curves[name]
            steps, values = zip(*points[:: max(1, len(points) // POINTS)], strict=True)
            series.append(Series(name, steps, values))
        number = f" ({start // MOST_LINES + 1})" if len(names) > MOST_LINES else ""
        yield Plot(
            title=f"{title}{number}, {artifact}",
            form="lines",
            series=series,
            label="optimizer step",
            value=value,
        )


def student_blocks(student: str, manifest: StudentManifest) -> Iterator[Block]:
    """A student's test split, gates and remarks, as its manifest holds them."""
    test = manifest.metrics.test
    split = manifest.split
    if test.student.get("rows"):
        head, *rows = test.figure_rows()
        yield Table(f"{student} on its test split", head, rows)
    if test.to_teacher:
        named = [(title_of(name, AGAINST_TEACHER), value) for name, value in test.to_teacher.items()]
        yield Facts(f"{student} against its teacher", named)
    yield Table(
        f"Split of {student}, by {split.by}",
        ("split", "rows", "queries"),
        [(name, side.rows, side.queries) for name, side in split.sides().items()],
    )
    checks = [(check.text, _gate_badge(has_passed=check.has_passed)) for check in manifest.gate.checks]
    if checks:
        yield Table(f"Gates of {student}", ("gate", "verdict"), checks)
    yield Remarks(manifest.notes)


def parity_blocks(bundle: BundleArtifact) -> Iterator[Block]:
    """Every model compared with the student that it was exported from, on real pairs."""
    parity = bundle.parity
    if parity is None:
        text = f"The manifest of {bundle.name} holds no parity: how near its models are to the student is not known."
        yield Paragraph(text, "warn")
        return
    head, *rows = parity_rows(parity)
    weak = " Fewer than the gate wants: a weak result." if parity.models[0].is_weak else ""
    yield Paragraph(f"{compared_on(parity)} The worst batch size of each.{weak}")
    tones = {"passed": "good", "REFUSED": "bad"}
    shown: list[list[Cell]] = [[*row[:-1], Badge(row[-1], tones.get(row[-1], "warn"))] for row in rows]
    yield Table(f"Parity of {bundle.name}", head, shown)
    yield from (Paragraph(sentence, "warn") for sentence in undecided_lines(parity))


def latency_blocks(bundle: BundleArtifact) -> Iterator[Block]:
    """Closed loop: ask, wait, ask again. Open loop: requests come at random times, at a rate."""
    if is_url(bundle.path):
        return
    for facts in measurements_of(Path(bundle.path), bundle.digest):
        head, *rows = latency_rows(facts)
        table = Table(f"Latency of {bundle.name}, measured {facts.measured_at}", head, rows)
        yield Paragraph(machine_line(facts))
        yield table if len(rows) < 24 else Fold(f"{len(rows):,} measurements", [table])
        yield from (Paragraph(warning, "warn") for warning in warnings_of(facts))
