"""Report sections about students, teachers and bundles: training curves, rollouts, test metrics, parity and latency."""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.manifest import SideFigures, StudentManifest
from relabel.distill.teachers.manifest import NODES, RolloutRow
from relabel.distill.teachers.spec import METHODS
from relabel.distill.training.curves import CURVE_SCHEMA, CURVES_NAME, LOSS_PANEL, panel_of, panels_of
from relabel.export.bench.records import BenchFacts, LatencyRow, machine_name, measurements_of
from relabel.export.bundle_facts import Parity, compared_on, parity_rows, undecided_lines
from relabel.jobs.evaluate.results import baseline_text
from relabel.jobs.report.artifacts import BundleArtifact, StudentArtifact, TeacherArtifact, TrainingArtifact
from relabel.jobs.report.page import (
    Badge,
    Block,
    Cell,
    Code,
    Drawing,
    Facts,
    Fold,
    Paragraph,
    Section,
    Side,
    Table,
    csv_download,
)
from relabel.jobs.report.plots import SERIES, Line, draw_lines
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import is_url
from relabel.manifests.metrics.registry import title_of
from relabel.manifests.secrets import shortened

# ------------------------------------------------------------------------------
# What the page says of trainings that are not finished.


def training_facts(one: TrainingArtifact, *, digits: int) -> Facts:
    """How far it is, and what is trained.

    Args:
        digits: of a digest that is shown.
    """
    rows: list[tuple[str, Cell]] = [("state", Badge("not finished", "warn")), ("shown as of", one.when)]
    if record := one.record:
        method, labeler = record.spec.get("method"), record.spec.get("labeler")
        rows += [("trains", f"a {record.kind}"), ("starts from", record.model.reference)]
        rows += [("method", str(method))] if method else []
        rows += [("labeler", str(labeler.get("name")))] if isinstance(labeler, dict) else []
        rows += [("relabel", record.relabel), ("fingerprint", record.fingerprint[:digits])]
    return Facts([*rows, ("path", one.path)], f"Training {one.name}")


def training_notes(trainings: Sequence[TrainingArtifact]) -> list[Block]:
    """That they are not finished, and what that means for the page."""
    return [
        Paragraph(
            f"{one.name}: This training is not finished: it is under way, or was stopped. Curves and rollouts are "
            f"those of its last whole checkpoint ({one.when}); what came after it is not shown. --resume goes on with "
            "one that was stopped.",
            "warn",
        )
        for one in trainings
    ]


# ------------------------------------------------------------------------------
# Sections about teachers: what each was made of, and answers that it gave while it was trained by reinforcement.


SHOWN = 3
"""Rollouts of each kind: best, worst, drawn."""
TEXT_CHARS = 4000
"""Of a turn's text."""
SEED = 7
BATCH_ROWS = 512
_NODE_TITLES = {
    "r": "grade",
    "s": "subject score",
    "a": "attribute score",
    "q_s": "query, subject",
    "q_a": "query, attribute",
    "p_s": "product, subject",
    "p_a": "product, attribute",
}


def teacher_facts(one: TeacherArtifact, *, digits: int) -> Facts:
    """What its card says.

    Args:
        digits: of a digest that is shown.
    """
    manifest = one.manifest
    data, training = manifest.data, manifest.training
    method = METHODS.get(manifest.method)
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
    rows += [
        ("relabel", manifest.relabel),
        ("fingerprint", manifest.fingerprint[:digits]),
        ("digest", one.digest[:digits]),
        ("path", one.path),
    ]
    return Facts(rows, f"Teacher {one.name}")


def teacher_notes(teachers: Sequence[TeacherArtifact]) -> list[Block]:
    """Remarks of their trainings."""
    return [Paragraph(f"{one.name}: {note}", "warn") for one in teachers for note in one.manifest.notes]


def rollouts_section(teachers: Sequence[TeacherArtifact | TrainingArtifact], *, has_texts: bool) -> Section:
    """Answers of the training: best, worst and drawn ones, each with its reward.

    Args:
        has_texts: show the answers' texts; they may quote documents.
    Raises:
        ManifestError: a file of rollouts can't be read.
    """
    blocks: list[Block] = []
    for one in teachers:
        blocks += _rollouts(one, has_texts=has_texts)
    return Section("rollouts", "Rollouts", blocks)


def _rollouts(one: TeacherArtifact | TrainingArtifact, *, has_texts: bool) -> Iterator[Block]:
    held = [file.read(columns=["reward"]).column(0).to_numpy(zero_copy_only=False) for file in one.rollouts()]
    rewards = np.concatenate([np.empty(0), *held])
    known = np.flatnonzero(~np.isnan(rewards))  # a rollout that was dropped has none
    if not len(known):
        return
    yield Paragraph(
        f"{one.name}: {len(rewards):,} answers, mean reward {rewards[known].mean():.3f}. Best and worst by reward, "
        "equal ones in seeded order, and some that were drawn; the prompt's row is its number in the gold file."
    )
    chosen = {title: known[places].tolist() for title, places in _chosen(rewards[known]).items()}
    rows = _rows(one.rollouts(), [place for places in chosen.values() for place in places])
    for title, places in chosen.items():
        for place in places:
            yield Fold(_summary(title, rows[place]), list(_rollout(rows[place], has_texts=has_texts)))


def _chosen(rewards: np.ndarray) -> dict[str, list[int]]:
    """Places of the rollouts that are shown, each once; by what they are."""
    drawn = np.random.default_rng(SEED).permutation(len(rewards))
    by_reward = drawn[np.argsort(-rewards[drawn], kind="stable")].tolist()
    best = by_reward[:SHOWN]
    worst = [place for place in reversed(by_reward) if place not in best][:SHOWN]
    others = [place for place in drawn.tolist() if place not in (*best, *worst)][:SHOWN]
    return {"Best": best, "Worst": worst, "Drawn": others}


def _rows(files: Iterable[pq.ParquetFile], places: Collection[int]) -> dict[int, RolloutRow]:
    """Whole rows by their place, read in one pass of small batches: files may hold more texts than memory does."""
    found, start = {}, 0
    for batch in itertools.chain.from_iterable(file.iter_batches(batch_size=BATCH_ROWS) for file in files):
        for place in places:
            if start <= place < start + len(batch):
                found[place] = RolloutRow.of(batch.slice(place - start, 1).to_pylist()[0])
        start += len(batch)
    return found


def _summary(title: str, row: RolloutRow) -> str:
    grade = "no grade" if row.grade is None else f"grade {row.grade}"
    return f"{title}: reward {row.reward:.3f}, {grade}, step {row.step:,}, row {row.row_id:,}"


def _rollout(row: RolloutRow, *, has_texts: bool) -> Iterator[Block]:
    facts: list[tuple[str, Cell]] = [
        ("prompt's row", row.row_id),
        ("step, sample", f"{row.step:,}, {row.sample:,}"),
        ("reward", row.reward),
        ("advantage", row.advantage),
        ("grade", row.grade),
        ("format", "right" if row.format_ok else f"wrong: {row.fault or 'unknown'}"),
        ("tokens", row.tokens),
    ]
    if row.detail and has_texts:
        facts.append(("why", shortened(row.detail, TEXT_CHARS // 8)))
    facts += _further(row, has_texts=has_texts)
    yield Side([Facts(facts), *([_nodes(row)] if row.node_advantages is not None else [])])
    for number, text in enumerate(row.texts or () if has_texts else (), start=1):
        yield Code(shortened(text, TEXT_CHARS) or "(empty)", f"turn {number}")


def _further(row: RolloutRow, *, has_texts: bool) -> Iterator[tuple[str, Cell]]:
    """A method's own columns: numbers, and texts where texts are shown."""
    for name, value in row.further.items():
        if value is None:
            continue
        if isinstance(value, int | float):
            yield name.replace("_", " "), value
        elif has_texts:
            yield name.replace("_", " "), shortened(str(value), TEXT_CHARS // 8)


def _nodes(row: RolloutRow) -> Table:
    """Rewards of the nodes that gold judges, and the advantages of all that flow from them."""
    base = dict(zip(NODES, row.node_rewards or (), strict=False))
    nodes: list[list[Cell]] = [
        [f"{node}: {_NODE_TITLES.get(node, '')}", base.get(node), value]
        for node, value in zip(NODES, row.node_advantages or (), strict=False)
    ]
    return Table(("node", "reward", "advantage"), nodes, "By node of the graph")


# ------------------------------------------------------------------------------
# Sections about students: training curves, as teachers have them too, and the figures of their own manifests.


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


# ------------------------------------------------------------------------------
# Sections about bundles: parity with the student, and latency as `relabel bench` measured it.


MOST_LINES = 6
_TONES = {"passed": "good", "REFUSED": "bad"}
_CLOSED = ("provider", "precision", "preset", "cell", "scope", "samples", "p50_ms", "p99_ms", "pairs_per_s")
_OPEN = (
    "provider",
    "precision",
    "preset",
    "offered_rate",
    "answered_rate",
    "mean_batch",
    "samples",
    "mean_ms",
    "p50_ms",
    "p99_ms",
    "p999_ms",
    "unanswered",
)


def parity_section(bundles: Sequence[BundleArtifact]) -> Section:
    """Every model beside the student that it was exported from, on real pairs."""
    blocks: list[Block] = []
    for bundle in bundles:
        parity = bundle.parity
        if parity is None:
            blocks.append(
                Paragraph(
                    (
                        f"The manifest of {bundle.name} holds no parity, so nothing says how near its models are to "
                        "the student."
                    ),
                    "warn",
                )
            )
            continue
        head, *rows = parity_rows(parity)
        shown: list[list[Cell]] = [[*row[:-1], Badge(row[-1], _TONES.get(row[-1], "warn"))] for row in rows]
        weak = " Fewer than the gate wants: a weak result." if parity.models[0].is_weak else ""
        blocks += [
            Paragraph(f"{compared_on(parity)} The worst batch size of each.{weak}"),
            Table(head, shown, f"Parity of {bundle.name}", csv_download(f"parity-{bundle.name}", head, rows)),
            *(Paragraph(sentence, "warn") for sentence in undecided_lines(parity)),
            _worst(parity),
        ]
    return Section("parity", "Parity", blocks)


def _worst(parity: Parity) -> Fold:
    head = ("precision", "source", "row", "batch", "flipped", "max |Δp|", "student", "model")
    rows: list[list[Cell]] = [
        [
            one.precision,
            row.source,
            row.row,
            row.batch_size,
            "yes" if row.is_flip else "",
            "none" if row.max_abs is None else f"{row.max_abs:.1e}",
            _probs(row.student),
            _probs(row.model),
        ]
        for one in parity.models
        for row in one.worst
    ]
    return Fold(
        "The rows that differ most",
        [
            Table(
                head, rows, "By their row in the source", csv_download("parity-worst", head, rows), has_row_heads=False
            )
        ],
    )


def _probs(values: Sequence[float | None]) -> str:
    return " ".join("none" if value is None else f"{value:.3f}" for value in values)


def latency_section(bundles: Sequence[BundleArtifact]) -> Section:
    """Closed loop: ask, wait, ask again. Open loop: requests come when they come."""
    blocks: list[Block] = []
    for bundle in bundles:
        found = [] if is_url(bundle.path) else measurements_of(Path(bundle.path), bundle.manifest_sha256)
        for facts in found:
            name = bundle.name if len(found) == 1 else f"{bundle.name} on {machine_name(facts.machine)}"
            if facts.rows:
                blocks += _latency_blocks(replace(bundle, name=name), facts)
    return Section("latency", "Latency", blocks)


def _latency_blocks(bundle: BundleArtifact, facts: BenchFacts) -> list[Block]:
    closed = [row for model in facts.models for row in model.closed]
    opened = [row for model in facts.models for row in model.open]
    blocks: list[Block] = [
        *_machine(bundle, facts),
        Side([*_closed_figures(bundle, closed), *_open_figures(bundle, opened)]),
    ]
    for name, head, chosen in (("Closed loop", _CLOSED, closed), ("Open loop", _OPEN, opened)):
        if chosen:
            body: list[list[Cell]] = [[getattr(row, column) for column in head] for row in chosen]
            save = csv_download(
                f"latency-{name}-{bundle.name}", tuple(vars(chosen[0])), [tuple(vars(row).values()) for row in chosen]
            )
            titles = [column.replace("_", " ") for column in head]
            blocks.append(
                Fold(f"{name}: {len(chosen):,} measurements of {bundle.name}", [Table(titles, body, name, save)])
            )
    return blocks


def _machine(bundle: BundleArtifact, facts: BenchFacts) -> list[Block]:
    """Where it was measured, what it serves in time, and models side by side."""
    machine = facts.machine
    rows: list[tuple[str, Cell]] = [
        ("measured at", facts.measured_at),
        ("CPU", f"{machine.cpu}, {machine.threads} threads"),
        *([("GPU", machine.gpu)] if machine.gpu else []),
    ]
    limits: list[list[Cell]] = []
    for model in facts.models:
        for slo in model.slo:
            rate = slo.highest_rate
            served = "none" if rate is None else f"{rate:,.1f}{' or more' if slo.is_at_least else ''}"
            limits.append([model.side, slo.preset, slo.figure, slo.slo_ms, served, slo.mean_ms, slo.p99_ms])
    found: list[Block] = [Facts(rows, f"Where {bundle.name} was measured")]
    if limits:
        head = ("model", "preset", "bound on", "at most, ms", "requests/s", "mean there, ms", "p99 there, ms")
        found.append(
            Table(head, limits, "The most that it serves in time", csv_download(f"slo-{bundle.name}", head, limits))
        )
    return found


def _closed_figures(bundle: BundleArtifact, rows: Sequence[LatencyRow]) -> list[Block]:
    """Latency over length, for the fewest pairs a request and for the most, each model a curve."""
    fixed = [row for row in rows if row.tokens is not None and row.scope == "batch"]
    found: list[Block] = []
    sizes = sorted({row.rows for row in fixed})
    for size in dict.fromkeys([*sizes[:1], *sizes[-1:]]):
        for value in ("p50_ms", "p99_ms"):
            lines, data = _lines([row for row in fixed if row.rows == size], "tokens", value)
            if any(len(line.places) > 1 for line in lines):
                what = f"{value.removesuffix('_ms')} of {size:,} pair{'s' if size > 1 else ''} a request"
                save = csv_download(f"closed-{value}-{size}-{bundle.name}", ("model", "tokens", value), data)
                svg = draw_lines(lines, label="tokens a pair", value="ms", is_log=True, starts_at_0=True)
                found.append(Drawing(f"Closed loop, {what}", svg, _said(lines, "ms at the longest"), save))
    return found


def _open_figures(bundle: BundleArtifact, rows: Sequence[LatencyRow]) -> list[Block]:
    """Latency over the rate at which requests come, for each preset."""
    found: list[Block] = []
    for preset in dict.fromkeys(row.preset for row in rows):
        for value in ("p50_ms", "p99_ms"):
            lines, data = _lines([row for row in rows if row.preset == preset], "offered_rate", value)
            if lines:
                save = csv_download(f"open-{preset}-{value}-{bundle.name}", ("model", "requests_per_s", value), data)
                svg = draw_lines(lines, label="requests/s that come", value="ms", has_log_values=True)
                what = f"{value.removesuffix('_ms')} from the scheduled arrival, {preset}"
                found.append(Drawing(f"Open loop, {what}", svg, _said(lines, "ms at the highest rate"), save))
    return found


def _lines(rows: Sequence[LatencyRow], place: str, value: str) -> tuple[list[Line], list[tuple[str, float, float]]]:
    """A curve a model, and all their points; `place` and `value` are fields of the rows."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        at, held = getattr(row, place), getattr(row, value)
        if at is not None and held is not None:
            points.setdefault(row.side, {})[float(at)] = float(held)
    lines = [
        Line(name, sorted(held), [held[at] for at in sorted(held)], has_marks=True) for name, held in points.items()
    ]
    return lines[:MOST_LINES], [
        (line.name, at, number) for line in lines for at, number in zip(line.places, line.values, strict=True)
    ]


def _said(lines: Sequence[Line], what: str) -> str:
    return "; ".join(f"{line.name}: {line.values[-1]:.2f} {what}" for line in lines)
