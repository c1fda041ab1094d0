"""Sections about students: training curves, as teachers have them too, and the figures of their own manifests."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.student_manifest import SideFigures, StudentManifest
from relabel.distill.training.curves import CURVE_SCHEMA, CURVES_NAME, LOSS_PANEL, panel_of, panels_of
from relabel.jobs.evaluate.headlines import baseline_text
from relabel.jobs.report.artifacts import StudentArtifact
from relabel.jobs.report.blocks import Badge, Block, Cell, Drawing, Facts, Paragraph, Section, Side, Table
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.plot_style import SERIES
from relabel.jobs.report.plots import draw_lines
from relabel.jobs.report.plotted import Line
from relabel.jobs.report.teachers import TeacherArtifact
from relabel.jobs.report.trainings import TrainingArtifact
from relabel.manifests.errors import ManifestError
from relabel.manifests.metrics.registry import title_of

POINTS = 400
"""Most points of a curve that is drawn; its download has all."""


def training_section(trained: Sequence[StudentArtifact | TeacherArtifact | TrainingArtifact]) -> Section:
    """Losses and rewards by step, and figures on dev."""
    blocks: list[Block] = []
    for one in trained:
        figures = _curves(one)
        training = {} if one.manifest is None else vars(one.manifest.training)
        facts: list[tuple[str, Cell]] = [
            (name.replace("_", " "), _shown(value)) for name, value in training.items() if value is not None
        ]
        if facts:
            figures.append(Facts(facts, f"Training of {one.name}"))
        if figures:
            blocks.append(Side(figures))
    return Section("training", "Training", blocks)


def _shown(value: object) -> Cell:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value if isinstance(value, int) else str(value)


def _curves(one: StudentArtifact | TeacherArtifact | TrainingArtifact) -> list[Block]:
    """Figures of training, a drawing for each kind of figure, and one of what was measured on dev."""
    points = _points(one)
    trained = list(dict.fromkeys(name for _, split, name, _ in points if split == "train"))
    looked_at = list(dict.fromkeys(name for _, split, name, _ in points if split == "dev"))
    drawn = [
        (title, "train", panel, part)
        for panel, names in panels_of(trained).items()
        for title, part in _parts(_title(panel), names)
    ]
    on_dev = [name for name in looked_at if panel_of(name) != "tokens"]
    drawn += [(title, "dev", "", part) for title, part in _parts("On dev", on_dev)]
    found: list[Block] = []
    drawn_of: list[str] = []
    for title, split, panel, names in drawn:
        lines = []
        for name in names:
            series = [(step, value) for step, of, called, value in points if (of, called) == (split, name)]
            thin = series[:: max(1, len(series) // POINTS)]
            lines.append(Line(name, [step for step, _ in thin], [value for _, value in thin], has_marks=len(thin) < 30))
        if not lines:
            continue
        alt = "; ".join(f"{line.name} from {line.values[0]:.4f} to {line.values[-1]:.4f}" for line in lines)
        is_first = split not in drawn_of
        drawn_of.append(split)
        # the first has all of its split, also what is not drawn
        rows = [(s, name, value) for s, of, name, value in points if of == split and (is_first or name in names)]
        file = f"curves-{split}-{one.name}" + ("" if is_first else f"-{drawn_of.count(split)}")
        save = csv_download(file, ("step", "name", "value"), rows)
        value = "loss, nats" if panel == LOSS_PANEL else panel
        found.append(Drawing(f"{title}, {one.name}", draw_lines(lines, label="optimizer step", value=value), alt, save))
    return found


def _parts(title: str, names: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Names for one drawing each, with its title: no two lines of a drawing have one colour."""
    most = len(SERIES)
    parts = [names[start : start + most] for start in range(0, len(names), most)]
    if len(parts) == 1:
        return [(title, parts[0])]
    return [(f"{title} ({number} of {len(parts)})", part) for number, part in enumerate(parts, start=1)]


def _title(panel: str) -> str:
    """What a drawing of training is called, by what its axis has."""
    return "Training loss" if panel == LOSS_PANEL else f"Training, {panel}"


def _points(one: StudentArtifact | TeacherArtifact | TrainingArtifact) -> list[tuple[int, str, str, float]]:
    if isinstance(one, TrainingArtifact):
        return one.reached.curve
    try:
        data = one.store.read(CURVES_NAME)
    except FileNotFoundError:
        return []
    try:
        columns = pq.read_table(io.BytesIO(data), columns=CURVE_SCHEMA.names).to_pydict()
    except (pa.ArrowException, OSError) as exc:
        raise ManifestError(
            f"{one.path}/{CURVES_NAME}: not readable as curves. Restore the folder from a copy."
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
    bounds = [baseline_text(test.baselines, name) if test.baselines else "" for name in names]
    rows: list[list[Cell]] = [
        [_name(name), *(held.get(name) for _, held in columns), bound]
        for name, bound in zip(names, bounds, strict=True)
    ]
    head = ("figure", *(name for name, _ in columns), "baseline")
    return Table(head, rows, f"{student} on its test split, by {by}", csv_download(f"test-{student}", head, rows))


_MORE_NAMES = {
    "auc": "AUC, mean of all cuts",
    "nll": "negative log-likelihood, nats",
    "kl": "mean KL(teacher ‖ student), nats",
}


def _name(name: str) -> str:
    return _MORE_NAMES.get(name) or title_of(name)
