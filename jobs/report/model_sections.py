"""Sections about models, trainings and bundles: facts, training curves, test figures, parity and latency."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.manifest import StudentManifest
from relabel.distill.teachers.spec import METHODS
from relabel.distill.training.curves import CURVE_SCHEMA, CURVES_NAME, LOSS_PANEL, panel_of, panels_of
from relabel.export.bench.results import BenchFacts, latency_rows, machine_line, measurements_of, warnings_of
from relabel.export.bundle_facts import compared_on, parity_rows, undecided_lines
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
    Section,
    Series,
    Table,
)
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import is_url
from relabel.manifests.metrics.comparison import AGAINST_TEACHER
from relabel.manifests.metrics.registry import title_of

# ------------------------------------------------------------------------------
# Facts of each model.


def teacher_facts(one: TeacherArtifact) -> Facts:
    """Method, data and training of a teacher."""
    manifest = one.manifest
    data, training, method = manifest.data, manifest.training, METHODS.get(manifest.method)
    rows: list[tuple[str, Cell]] = [
        ("method", manifest.method if method is None else f"{manifest.method}: {method.title}"),
        ("labeler", str(manifest.labeler.get("name"))),
        ("starts from", manifest.model.reference),
        ("learned from", f"{data.rows:,} rows, {data.answer_tokens:,} tokens of answers"),
        *(("left out", f"{count:,} {reason}") for reason, count in data.dropped.items()),
        ("trained", f"{training.steps:,} steps on {training.device}"),
    ]
    if data.held_out is not None and data.held_out.rows:
        kept = "" if training.best_step is None else f", by which step {training.best_step:,} was kept"
        rows.append(("held out", f"{data.held_out.rows:,} rows of {data.held_out.queries:,} queries{kept}"))
    digests = [("fingerprint", manifest.fingerprint[:DIGITS]), ("digest", one.digest[:DIGITS])]
    return Facts(f"Teacher {one.name}", [*rows, ("relabel", manifest.relabel), *digests, ("path", one.path)])


def student_facts(one: StudentArtifact) -> Facts:
    """Heads, size and gate of a student."""
    manifest, record = one.manifest, one.manifest.student
    passed = Badge("passed", "good") if manifest.gate.has_passed else Badge("refused", "bad")
    rows: list[tuple[str, Cell]] = [
        ("kind", record.get("kind")),
        ("reads at most", f"{record.get('max_tokens')} tokens"),
        *_heads(manifest.heads, manifest.temperature),
        ("starts from", manifest.model.reference),
        ("fingerprint", manifest.fingerprint[:DIGITS]),
        ("gate", passed if manifest.gate.checks else "no gate set"),
        ("path", one.path),
    ]
    return Facts(f"Student {one.name}", rows)


def bundle_facts(one: BundleArtifact) -> Facts:
    """Models and heads of a bundle."""
    student = one.student
    models = ", ".join(f"{model.path} ({model.precision})" for model in student.models)
    places = [("version", one.manifest_sha256[:DIGITS]), ("path", one.path)]
    licence = ("licence", student.licence.bundle or "not stated")
    return Facts(
        f"Bundle {one.name}", [("models", models), *_heads(student.heads, student.temperature or {}), licence, *places]
    )


def _heads(heads: Mapping[str, int], temperature: Mapping[str, float]) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = [("heads", ", ".join(f"{name} ({grades} grades)" for name, grades in heads.items()))]
    if temperature:
        rows.append(("temperatures", ", ".join(f"{name} {value:.3g}" for name, value in temperature.items())))
    return rows


# ------------------------------------------------------------------------------
# Training curves.

MOST_LINES = 8
POINTS = 400
"""Most points of a curve that is drawn."""


def training_section(trained: Sequence[StudentArtifact | TeacherArtifact]) -> Section:
    """Losses and rewards by step, figures on dev, and facts of the training."""
    blocks: list[Block] = []
    for one in trained:
        blocks += _curves(one)
        facts: list[tuple[str, Cell]] = [
            (name.replace("_", " "), value if isinstance(value, int | float) else str(value))
            for name, value in vars(one.manifest.training).items()
            if value is not None
        ]
        blocks.append(Facts(f"Training of {one.name}", facts))
    return Section("training", "Training", blocks)


def _curves(one: StudentArtifact | TeacherArtifact) -> Iterator[Plot]:
    """A plot for each kind of figure, and one of figures on dev."""
    points = _points(one)
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for step, split, name, value in points:
        curves.setdefault((split, name), []).append((step, value))
    on_dev = [name for split, name in curves if split == "dev" and panel_of(name) != "tokens"]
    panels = panels_of(name for split, name in curves if split == "train")
    for split, panel, names in [*(("train", *item) for item in panels.items()), ("dev", "", on_dev)]:
        title = "On dev" if split == "dev" else "Training loss" if panel == LOSS_PANEL else f"Training, {panel}"
        for start in range(0, len(names), MOST_LINES):
            series = []
            for name in names[start : start + MOST_LINES]:
                thin = curves[split, name][:: max(1, len(curves[split, name]) // POINTS)]
                series.append(Series(name, *zip(*thin, strict=True)))
            number = f" ({start // MOST_LINES + 1})" if len(names) > MOST_LINES else ""
            label = "loss, nats" if panel == LOSS_PANEL else panel
            yield Plot(f"{title}{number}, {one.name}", "lines", series, "optimizer step", label)


def _points(one: StudentArtifact | TeacherArtifact) -> list[tuple[int, str, str, float]]:
    try:
        data = one.store.read(CURVES_NAME)
        columns = pq.read_table(io.BytesIO(data), columns=CURVE_SCHEMA.names).to_pydict()
    except FileNotFoundError:
        return []
    except (pa.ArrowException, OSError) as exc:
        raise ManifestError(
            f"{one.path}/{CURVES_NAME}: not readable as curves. Restore the folder from a copy."
        ) from exc
    return list(zip(*(columns[name] for name in CURVE_SCHEMA.names), strict=True))


# ------------------------------------------------------------------------------
# Students by their own manifests.


def student_section(students: Sequence[StudentArtifact]) -> Section:
    """Each student's test split, gates and remarks, as its manifest holds them."""
    blocks: list[Block] = []
    for student in students:
        blocks += _student_tables(student.name, student.manifest)
    return Section("student", "Student", blocks)


def _student_tables(student: str, manifest: StudentManifest) -> Iterator[Block]:
    test, split = manifest.metrics.test, manifest.split
    if test.student.get("rows"):
        head, *rows = test.figure_rows()
        yield Table(f"{student} on its test split", head, rows)
    if test.to_teacher:
        names = {name: title_of(name, AGAINST_TEACHER) for name in test.to_teacher}
        yield Facts(f"{student} against its teacher", [(names[name], value) for name, value in test.to_teacher.items()])
    counts: list[list[Cell]] = [[name, side.rows, side.queries] for name, side in split.sides().items()]
    yield Table(f"Split of {student}, by {split.by}", ("split", "rows", "queries"), counts)
    if manifest.gate.checks:
        checks: list[list[Cell]] = [
            [check.text, Badge("passed", "good") if check.has_passed else Badge("refused", "bad")]
            for check in manifest.gate.checks
        ]
        yield Table(f"Gates of {student}", ("gate", "verdict"), checks)
    yield Remarks(manifest.notes)


# ------------------------------------------------------------------------------
# Bundles: parity with the student, and latency as `relabel bench` measured it.

_TONES = {"passed": "good", "REFUSED": "bad"}


def parity_section(bundles: Sequence[BundleArtifact]) -> Section:
    """Every model compared with the student that it was exported from, on real pairs."""
    blocks: list[Block] = []
    for bundle in bundles:
        parity = bundle.parity
        if parity is None:
            text = (
                f"The manifest of {bundle.name} holds no parity: how near its models are to the student is not known."
            )
            blocks.append(Paragraph(text, "warn"))
            continue
        head, *rows = parity_rows(parity)
        shown: list[list[Cell]] = [[*row[:-1], Badge(row[-1], _TONES.get(row[-1], "warn"))] for row in rows]
        weak = " Fewer than the gate wants: a weak result." if parity.models[0].is_weak else ""
        blocks += [
            Paragraph(f"{compared_on(parity)} The worst batch size of each.{weak}"),
            Table(f"Parity of {bundle.name}", head, shown),
            *(Paragraph(sentence, "warn") for sentence in undecided_lines(parity)),
        ]
    return Section("parity", "Parity", blocks)


def latency_section(bundles: Sequence[BundleArtifact]) -> Section:
    """Closed loop: ask, wait, ask again. Open loop: requests come at random times, at a rate."""
    blocks: list[Block] = []
    for bundle in bundles:
        for facts in [] if is_url(bundle.path) else measurements_of(Path(bundle.path), bundle.manifest_sha256):
            blocks += _latency(bundle.name, facts)
    return Section("latency", "Latency", blocks)


def _latency(bundle: str, facts: BenchFacts) -> Iterator[Block]:
    head, *rows = latency_rows(facts)
    table = Table(f"Latency of {bundle}, measured {facts.measured_at}", head, rows)
    yield Paragraph(machine_line(facts))
    yield table if len(rows) < 24 else Fold(f"{len(rows):,} measurements", [table])
    yield from (Paragraph(warning, "warn") for warning in warnings_of(facts))
