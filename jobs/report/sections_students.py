"""Sections about students: training curves, and the figures of their own manifests."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from distill.students.student_manifest import SideFigures, StudentManifest
from distill.training.curves import CURVE_SCHEMA, CURVES_NAME, NOT_PLOTTED
from jobs.report.artifacts import StudentArtifact
from jobs.report.blocks import Badge, Block, Cell, Drawing, Facts, Paragraph, Section, Side, Table
from jobs.report.downloads import csv_download
from jobs.report.plots import Line, draw_lines
from manifests.errors import ManifestError
from manifests.metrics.registry import title_of

POINTS = 400
"""Most points of a curve that is drawn; its download has all."""


def training_section(students: Sequence[StudentArtifact]) -> Section:
    """Losses by step and figures on dev."""
    blocks: list[Block] = []
    for student in students:
        figures = _curves(student)
        training = {} if student.manifest is None else vars(student.manifest.training)
        facts: list[tuple[str, Cell]] = [
            (name.replace("_", " "), _shown(value)) for name, value in training.items() if value is not None
        ]
        if facts:
            figures.append(Facts(facts, f"Training of {student.name}"))
        if figures:
            blocks.append(Side(figures))
    return Section("training", "Training", blocks)


def _shown(value: object) -> Cell:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value if isinstance(value, int) else str(value)


def _curves(student: StudentArtifact) -> list[Block]:
    """Two figures: losses of training, and what was measured on dev."""
    points = _points(student)
    found: list[Block] = []
    for split, value in (("train", "loss, nats"), ("dev", "")):
        names = [
            name for name in dict.fromkeys(name for _, of, name, _ in points if of == split) if name not in NOT_PLOTTED
        ]
        lines = []
        for name in names:
            series = [(step, number) for step, of, called, number in points if (of, called) == (split, name)]
            thin = series[:: max(1, len(series) // POINTS)]
            lines.append(
                Line(name, [step for step, _ in thin], [number for _, number in thin], has_marks=len(thin) < 30)
            )
        if lines:
            rows = [(step, name, number) for step, of, name, number in points if of == split]
            alt = "; ".join(f"{line.name} from {line.values[0]:.4f} to {line.values[-1]:.4f}" for line in lines)
            save = csv_download(f"curves-{split}-{student.name}", ("step", "name", "value"), rows)
            title = f"{'Training loss' if split == 'train' else 'On dev'}, {student.name}"
            found.append(Drawing(title, draw_lines(lines, label="optimizer step", value=value), alt, save))
    return found


def _points(student: StudentArtifact) -> list[tuple[int, str, str, float]]:
    try:
        data = student.store.read(CURVES_NAME)
    except FileNotFoundError:
        return []
    try:
        columns = pq.read_table(io.BytesIO(data), columns=CURVE_SCHEMA.names).to_pydict()
    except (pa.ArrowException, OSError) as exc:
        raise ManifestError(
            f"{student.path}/{CURVES_NAME}: not readable as curves. Restore the folder from a copy."
        ) from exc
    return list(zip(*(columns[name] for name in CURVE_SCHEMA.names), strict=True))


def student_section(students: Sequence[StudentArtifact], *, has_comparison: bool) -> Section:
    """What each student's manifest says of its test split: student and teacher by the same judge,
    the split, the gate.
    """
    blocks: list[Block] = []
    for student in students:
        if student.manifest is not None:
            blocks += [Side(_tables(student.name, student.manifest))]
            blocks += [Paragraph(note) for note in student.manifest.notes]
    if blocks and not has_comparison:
        blocks.append(
            Paragraph(
                "A student's own manifest holds no intervals. For a comparison with intervals, score pairs that have "
                "gold grades (relabel score) and give label run, scores and --gold together."
            )
        )
    return Section("student", "Student", blocks)


def _tables(student: str, manifest: StudentManifest) -> list[Block]:
    """Figures on the test split, the split, the gates."""
    test, split = manifest.metrics.test, manifest.split
    tables: list[Block] = []
    if test.student.get("rows"):
        tables.append(_test_table(student, test))
    if test.to_teacher and test.to_teacher.get("rows"):
        figures: list[tuple[str, Cell]] = [(_name(name), value) for name, value in test.to_teacher.items()]
        tables.append(Facts(figures, f"{student} against its teacher, before calibration"))
    head = ("split", "rows", "queries")
    sides: list[list[Cell]] = [[name, side.rows, side.queries] for name, side in split.sides().items()]
    save = csv_download(f"split-{student}", head, sides)
    tables.append(Table(head, sides, f"Split of {student}, by {split.by}", save))
    if manifest.gate.checks:
        rows: list[list[Cell]] = [
            [check.text, Badge("passed", "good") if check.has_passed else Badge("refused", "bad")]
            for check in manifest.gate.checks
        ]
        tables.append(Table(("gate", "verdict"), rows, f"Gates of {student}"))
    return tables


def _test_table(student: str, test: SideFigures) -> Table:
    by = "trusted grades" if test.judged_by == "gold" else "its labels"
    columns = [("student", test.student)] + ([("teacher", test.teacher)] if test.teacher is not None else [])
    names = list(dict.fromkeys(name for _, held in columns for name in held))
    rows: list[list[Cell]] = [[_name(name), *(held.get(name) for _, held in columns)] for name in names]
    head = ("figure", *(name for name, _ in columns))
    return Table(head, rows, f"{student} on its test split, by {by}", csv_download(f"test-{student}", head, rows))


_MORE_NAMES = {
    "auc": "AUC, mean of all cuts",
    "nll": "negative log-likelihood, nats",
    "kl": "mean KL(teacher ‖ student), nats",
}


def _name(name: str) -> str:
    return _MORE_NAMES.get(name) or title_of(name)
