"""Builds a report: opens the artifacts, reads each run once, judges it by gold, and collects
the sections that apply."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import yaml
from markupsafe import Markup

from relabel.jobs.evaluate import EmptySideError, Golds, JudgingOptions, compare_named, judge, open_set
from relabel.jobs.report.artifacts import (
    Artifact,
    BundleArtifact,
    RunArtifact,
    RunTally,
    StudentArtifact,
    TeacherArtifact,
    bundle_facts,
    conservation_section,
    input_texts,
    labels_section,
    latency_blocks,
    lineage_section,
    open_artifacts,
    parity_blocks,
    routes_section,
    run_facts,
    run_warnings,
    student_blocks,
    student_facts,
    tally_labels,
    teacher_facts,
    training_blocks,
)
from relabel.jobs.report.systems import systems_section
from relabel.jobs.report.verdicts import verdict_section
from relabel.jobs.sections import (
    Block,
    Cell,
    Code,
    ComparedSets,
    Facts,
    Fold,
    JudgedLabels,
    Paragraph,
    Plot,
    Section,
    Series,
    Table,
    cell_text,
    comparison_blocks,
    evaluation_blocks,
    figures_plot,
    top_texts,
    verdicts_of,
)
from relabel.manifests.errors import InputError, ManifestError, MissingExtraError, RelabelError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import GOLD, own_input
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow, Span, ids_of, texts_of
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.metric import DEPTH, rank_queries
from relabel.manifests.process import require
from relabel.manifests.secrets import redacted, shortened

if TYPE_CHECKING:
    from jinja2 import Environment

# ------------------------------------------------------------------------------
# Renders sections as one self-contained HTML file, with the label browser. Everything in a section is text: the
# templates escape it, and mask secrets. A content policy admits the page's own style and script, by their digests,
# and images from inside the file; nothing is loaded from anywhere. The same sections give the same bytes.


def render_page(
    title: str, subtitle: str, sections: Sequence[Section], *, rows: str = "", notes: Sequence[str] = ()
) -> str:
    """The HTML file.

    Args:
        rows: of the label browser, see `browser_json`; empty for none.
        notes: what a reader of it should know first, such as that this is a sample.
    """
    style = _asset("report.css")
    script = _asset("report.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = _environment().get_template("page.html.j2")
    return page.render(
        title=title,
        subtitle=subtitle,
        sections=[section for section in sections if section.blocks],
        rows=Markup(rows),
        notes=notes,
        style=Markup(style),
        script=Markup(script),
        policy=policy,
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _asset(name: str) -> str:
    return resources.files("relabel.jobs.report").joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: redacted(value) if type(value) is str else value,  # Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(cell=cell_text, draw=draw, kind=lambda value: type(value).__name__.lower())
    return found


# ------------------------------------------------------------------------------
# Rows of the label browser, as plain values.

DOCUMENT_CHARS = 8_000
"""Most characters of a document that a page carries; a page of 5,000 rows must open on a phone."""
LONG_CHARS = 4_000
"""Of an answer, a reasoning or an intent."""
QUERY_CHARS = 2_000
SHORT_CHARS = 500
"""Of an id, a reason, a flag, a piece of evidence, and of a text in the labeler's own columns."""
MOST_ITEMS = 64
"""Most pieces of evidence of a row, and most items of a list."""
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""What could end the script element, or JavaScript's lines; JSON reads both spellings alike."""


def browser_json(runs: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """What the page's script shows, as JSON that can't leave its script element.

    Args:
        runs: name of each run.
        rows: see `shown_row`.
    """
    held = {"runs": [{"name": name} for name in runs], "rows": rows}
    return json.dumps(held, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def shown_row(run: int, row: LabelRow | QuarantineRow, pair: Pair | None, gold: int | None) -> dict[str, Any]:
    """A label or a quarantined row as the browser takes it; what is not there is left out.

    Args:
        run: its number among the page's runs.
        pair: its texts; None where they can't be read any more.
        gold: a trusted grade.
    """
    found: dict[str, Any] = {
        "run": run,
        "row": row.row_id,
        "query_id": _cut(row.query_id, SHORT_CHARS),
        "doc_id": _cut(row.doc_id, SHORT_CHARS),
        "status": row.status,
        "gold": gold,
        "tokens": (row.prompt_tokens, row.output_tokens),
    }
    if pair is not None:
        found |= {"query": _cut(pair.query, QUERY_CHARS), "document": pair.document[:DOCUMENT_CHARS]}
        found["length"] = len(pair.document) if len(pair.document) > DOCUMENT_CHARS else None
    if isinstance(row, QuarantineRow):
        found["reason"] = _cut(row.reason, SHORT_CHARS)
        found["tries"] = [{**one, "text": _cut(one["text"], LONG_CHARS)} for one in row.tries or ()] or None
    else:
        spans = [Span(**span) for span in row.evidence or ()]
        nats = -math.fsum(p * math.log(p) for p in row.probs or () if p > 0)
        found |= {
            "grade": row.grade,
            "probs": _plain(row.probs),
            "outside": _plain(row.outside_mass),
            "entropy": None if row.probs is None else round(max(0.0, nats), 4),
            "evidence": [[span.start, span.end, _cut(span.text, SHORT_CHARS)] for span in spans[:MOST_ITEMS]] or None,
            "evidence_more": max(0, len(spans) - MOST_ITEMS) or None,
            "intent": _cut(row.intent, LONG_CHARS),
            "reasoning": _cut(row.reasoning, LONG_CHARS),
            "flags": _plain(list(row.flags or ())) or None,
            "own": {name: value for name, held in row.columns.items() if (value := _plain(held)) is not None} or None,
            "samples": [{"status": one["status"], "grade": one["grade"]} for one in row.samples or ()] or None,
            "reused": row.reused or None,
        }
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """A value as JSON holds it: texts and lists cut, numbers rounded, None for what is no number."""
    if isinstance(value, list):
        return [_plain(one) for one in value[:MOST_ITEMS]]
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    return _cut(value, SHORT_CHARS) if isinstance(value, str) else value


def _cut(text: str | None, most: int) -> str | None:
    return text if text is None or len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)"


# ------------------------------------------------------------------------------
# Plots as SVG images, drawn with matplotlib. The same numbers give the same bytes.

_WIDTH = 4.8
_HEIGHT = 2.9
"""Inches: 346 points wide, which a phone shows as it is."""
_COLOURS = ("#0f6f80", "#bf5415", "#5b4bb0", "#3f7d20", "#a3336f", "#6b6f76")
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "relabel",
    "text.parse_math": False,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": "#dddbd5",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.formatter.useoffset": False,
}
_LABEL_CHARS = 24


def draw(plot: Plot) -> str:
    """A `data:` URI of the image."""
    matplotlib = require("matplotlib", extra="cpu", purpose="The plots of a report")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plots of a report").Figure
    cycle = matplotlib.cycler(linestyle=("-", "--", ":")) * matplotlib.cycler(color=_COLOURS)
    names = list(dict.fromkeys(name for one in plot.series for name in one.x)) if plot.form == "intervals" else []
    sink = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({**_RC, "axes.prop_cycle": cycle}):
        warnings.simplefilter("ignore")  # of letters that its own font lacks: the reader's font draws them
        figure = figure_class(figsize=(_WIDTH, max(_HEIGHT, 0.9 + 0.34 * len(names))), layout="constrained")
        axes = figure.subplots()
        _draw(axes, plot, names)
        axes.set(xlabel=_short(plot.label, 60), ylabel=_short(plot.value, 60))
        if len(plot.series) > 1:
            figure.legend(loc="outside upper left", ncols=2, borderaxespad=0.2, handlelength=1.4)
        figure.savefig(
            sink, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return f"data:image/svg+xml;base64,{base64.b64encode(sink.getvalue()).decode()}"


def _draw(axes: Any, plot: Plot, names: Sequence[str | float]) -> None:
    """Draw the series; of intervals each of the names is a line, with whiskers where there are bounds."""
    width = 0.24 if plot.form == "intervals" else 0.8 / len(plot.series)
    for number, one in enumerate(plot.series):
        colour = _COLOURS[number % len(_COLOURS)]
        label = _short(one.name)
        shift = (number - (len(plot.series) - 1) / 2) * width
        match plot.form:
            case "bars":
                axes.bar(
                    [place + shift for place in range(len(one.x))],
                    one.y,
                    width * 0.94,
                    color=colour,
                    label=label,
                )
            case "histogram":
                axes.stairs(
                    one.y,
                    one.x,
                    color=colour,
                    fill=len(plot.series) == 1,
                    label=label,
                    linewidth=1.6,
                )
            case "intervals":
                reach = [
                    [
                        math.nan if end is None else max(0.0, side * (end - value))
                        for end, value in zip(ends, one.y, strict=True)
                    ]
                    for side, ends in ((-1, one.low), (1, one.high))
                ]
                places = [names.index(name) + shift for name in one.x]
                axes.errorbar(
                    one.y,
                    places,
                    xerr=reach,
                    fmt="o",
                    color=colour,
                    markersize=5,
                    label=label,
                )
            case _:
                marker = "o" if len(one.x) < 30 else None
                axes.plot(
                    one.x,
                    one.y,
                    marker=marker,
                    markersize=4,
                    linewidth=1.5,
                    label=label,
                )
    match plot.form:
        case "bars":
            longest = max((one.x for one in plot.series), key=len)
            axes.set_xticks(range(len(longest)), [_short(str(name)) for name in longest])
        case "histogram":
            axes.set_ylim(bottom=0)
        case "reliability":
            axes.plot(
                [0, 1],
                [0, 1],
                color="#535b65",
                linestyle=":",
                linewidth=1,
            )
            axes.set(xlim=(0, 1.02), ylim=(-0.02, 1.02))
        case "intervals":
            axes.set_yticks(range(len(names)), [_short(str(name)) for name in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.grid(visible=False, axis="y")


def _short(text: str, most: int = _LABEL_CHARS) -> str:
    """Text that a plot has room for, without what XML can't hold."""
    return shortened("".join(one if one.isprintable() else " " for one in redacted(text)), most)


# ------------------------------------------------------------------------------
# Builds a report: opens the artifacts, reads each run once, judges it by gold, and collects the sections that apply.


@dataclass(frozen=True)
class BuiltPage:
    """A report.

    Args:
        sections: names of those that it has, in order; `labels` is the browser.
        verdicts: whether its students are better than baselines, a sentence each.
        rows_shown, rows: that the browser shows, and that there are.
    """

    html: str
    sections: list[str]
    verdicts: list[str]
    rows_shown: int
    rows: int


def build_report(
    paths: Sequence[str],
    storage: Storage,
    *,
    gold: JudgingOptions | None = None,
    systems: Sequence[str] = (),
    max_rows: int = 5000,
) -> BuiltPage:
    """Report on label runs, trainings, teachers, students and bundles.

    Args:
        paths: folders or URLs, in any mix.
        gold: gold grades; without `qrels` the gold column that a run's own job names.
        systems: rankings to compare by the first run's labels, as `relabel systems` takes them.
        max_rows: most rows of the label browser; 0 leaves it out.
    Raises:
        UsageError, InputError, ManifestError, StoreError: a path holds nothing to report on, or something damaged.
        MissingExtraError: gold grades were named, and the packages that judge by them are not here.
    """
    artifacts = open_artifacts(list(paths), storage)
    runs = [one for one in artifacts if isinstance(one, RunArtifact)]
    students = [one for one in artifacts if isinstance(one, StudentArtifact)]
    bundles = [one for one in artifacts if isinstance(one, BundleArtifact)]
    trained = [one for one in artifacts if isinstance(one, TeacherArtifact | StudentArtifact)]
    trained.sort(key=lambda one: isinstance(one, StudentArtifact))
    choice = replace(
        gold or JudgingOptions(), students=tuple(run.path for run in runs if run.kind == "scores"), allow_partial=True
    )
    own = {run.path: gold_options(choice, run) for run in runs}
    tallies = [tally_labels(run, most=max_rows // len(runs)) for run in runs]
    rows, notes = _browser(tallies, choice, own) if max_rows and any(tally.chosen for tally in tallies) else ([], [])
    verdict = verdict_section(artifacts)
    sections = [
        verdict,
        ran_section(artifacts),
        lineage_section(artifacts),
        conservation_section(tallies, has_reasons=max_rows > 0),
        labels_section(tallies),
        routes_section(tallies),
        gold_section(runs, choice, own),
        compared_section(runs, choice, own),
        systems_section(runs, systems, choice, storage),
        Section("training", "Training", [block for one in trained for block in training_blocks(one)]),
        Section("student", "Student", [block for one in students for block in student_blocks(one.name, one.manifest)]),
        Section("parity", "Parity", [block for one in bundles for block in parity_blocks(one)]),
        Section("latency", "Latency", [block for one in bundles for block in latency_blocks(one)]),
    ]
    names = list(dict.fromkeys(one.name for one in artifacts))
    title = ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
    held = browser_json([one.run.name for one in tallies], rows) if rows else ""
    html = render_page(
        title,
        _subtitle(artifacts),
        sections,
        rows=held,
        notes=notes,
    )
    shown = [section.name for section in sections if section.blocks] + (["labels"] if rows else [])
    return BuiltPage(
        html,
        shown,
        verdicts=[block.text for block in verdict.blocks if isinstance(block, Paragraph)],
        rows_shown=len(rows),
        rows=sum(one.by_status.total() for one in tallies),
    )


def _subtitle(artifacts: Sequence[Artifact]) -> str:
    counts = Counter("student's scores" if one.kind == "scores" else one.kind for one in artifacts)
    parts = [f"{count} {kind}{'s' if count > 1 and not kind.endswith('s') else ''}" for kind, count in counts.items()]
    rows = sum(one.found.tally.rows for one in artifacts if isinstance(one, RunArtifact))
    return ", ".join(parts) + (f" · {rows:,} rows" if rows else "")


def ran_section(artifacts: Sequence[Artifact]) -> Section:
    """Each artifact with its origin, and the spec of each."""
    cards: list[Facts] = []
    notes: list[Paragraph] = []
    specs: list[Block] = []
    for one in artifacts:
        spec: Any
        match one:
            case RunArtifact():
                card = run_facts(one)
                spec = one.spec
                notes += [Paragraph(f"{one.name}: {text}", "warn") for text in run_warnings(one)]
            case TeacherArtifact():
                card = teacher_facts(one)
                spec = one.manifest.spec
                notes += [Paragraph(f"{one.name}: {note}", "warn") for note in one.manifest.notes]
            case StudentArtifact():
                card = student_facts(one)
                spec = one.manifest.spec
            case BundleArtifact():
                card = bundle_facts(one)
                spec = one.facts.get("spec")
        cards.append(card)
        if spec and isinstance(spec, dict):
            text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)
            specs.append(Fold(f"Spec of {one.name}, as it was resolved", [Code(f"spec of {one.name}", text)]))
    return Section("ran", "What ran", [*notes, *cards, *specs])


def _browser(
    tallies: Sequence[RunTally], choice: JudgingOptions, own: Mapping[str, JudgingOptions]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows that were chosen, with their texts and gold grades; and notes on them.

    Args:
        own: how to judge each run, by its path, as `gold_options` has it.
    """
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    for number, tally in enumerate(tallies):
        run = tally.run
        found = tally.chosen
        num_rows = tally.by_status.total()
        if len(found) < num_rows:
            sample = "a seeded sample that keeps every status (the same rows each time)"
            counts = f"{len(found):,} of {num_rows:,} rows"
            notes.append(f"{run.name}: {counts}, {sample}. All other sections are over all rows.")
        texts: dict[int, Pair] = {}
        golds: list[int | None] = [None] * len(found)
        try:
            texts = input_texts(run, [row.row_id for row in found])
        except (RelabelError, OSError) as exc:
            notes.append(f"{run.name}: its rows are shown without their texts, which can't be read again: {exc}")
        options = own[run.path]
        try:
            golds = golds if options.qrels is None else row_golds(run, options, found)
        except (InputError, MissingExtraError):
            if choice.qrels is not None:
                raise  # else the section on gold grades says why
        shown = [shown_row(number, row, texts.get(row.row_id), gold) for row, gold in zip(found, golds, strict=True)]
        rows += sorted(shown, key=lambda row: int(row["row"]))
    return rows, notes


# ------------------------------------------------------------------------------
# Gold grades of a report: those that were named, or the gold column that a run's own spec names.

CANT = (InputError, ManifestError, UsageError, MissingExtraError)
"""Why a run can't be judged: where grades were found and not asked for, the page says so."""


def gold_options(choice: JudgingOptions, run: RunArtifact) -> JudgingOptions:
    """How to judge a run: by the gold that was named, else by the gold column of its own input, where that is one path
    and still what was labelled; without either there are no `qrels`.
    """
    path = run.spec_part("input").get("path")
    column = run.spec_part("input", "columns").get("gold")
    paths = path if isinstance(path, list) else [path]
    with contextlib.suppress(*CANT):
        is_one = choice.qrels is None and column and len(paths) == 1
        if is_one and own_input(run.plan, str(paths[0]), str(column), run.storage):
            return replace(choice, qrels=str(paths[0]), grade=str(column))
    return choice


def row_golds(run: RunArtifact, options: JudgingOptions, rows: Sequence[LabelRow | QuarantineRow]) -> list[int | None]:
    """The gold grade of each row, None where there is none."""
    labels = open_set(run.path, options, run.storage)
    held = {
        "row_id": pa.array([row.row_id for row in rows], pa.int64()),
        "query_id": ids_of(row.query_id for row in rows),
        "doc_id": ids_of(row.doc_id for row in rows),
    }
    return list(
        Golds([labels], options, run.storage).of(labels, pa.RecordBatch.from_pydict(held)).columns[GOLD].to_pylist()
    )


# ------------------------------------------------------------------------------
# Each run by gold.

WORST = 15


def gold_section(runs: Sequence[RunArtifact], choice: JudgingOptions, own: Mapping[str, JudgingOptions]) -> Section:
    """Every run by gold grades, and the queries that it ranks worst; why one could not be judged, where its grades were
    only found, not asked for.

    Raises:
        RelabelError: grades were asked for by name, and a run can't be judged by them.
    """
    blocks: list[Block] = []
    details: list[Block] = []
    judged: dict[str, JudgedLabels] = {}
    for run in runs:
        options = own[run.path]
        if options.qrels is None:
            continue
        try:
            rows, result = judge([run.path], options, run.storage)
        except CANT as exc:
            if choice.qrels is not None and not isinstance(exc, EmptySideError):
                raise
            blocks.append(Paragraph(f"{run.name} could not be judged: {exc}", "warn"))
            continue
        judged[run.name], details = result, [*details, *evaluation_blocks(result, name=run.name)]
        shown = _worst_queries(rows)
        if shown:
            title = f"The {len(shown)} queries that {run.name} ranks worst"
            details.append(Fold(title, [Table(title, ("query", f"nDCG@{DEPTH}", "judged documents"), shown)]))
    lines = [
        Series(name, [one["confidence"] for one in bins], [one["accuracy"] for one in bins])
        for name, result in judged.items()
        if (bins := result.reliability)
    ]
    note = "Above the dotted line labels are right more often than they claim, below it less often."
    plots = [
        figures_plot("Agreement with gold", {name: result.figures for name, result in judged.items()}),
        *(
            [
                Plot(
                    title="Reliability",
                    form="reliability",
                    series=lines,
                    label="mean confidence",
                    value="share that is right",
                    note=note,
                )
            ]
            if lines
            else []
        ),
    ]
    return Section("gold", "Against gold", [*blocks, *(plots if judged else ()), *details])


def _worst_queries(rows: Judged) -> list[list[Cell]]:
    """Query, nDCG and judged documents, worst first; queries without a relevant document are left out."""
    if rows.queries is None or rows.query_names is None:
        return []
    found = rank_queries(
        rows.queries,
        rows.docs,
        np.round(rows.scores, 6),
        rows.gold,
        num_queries=rows.num_queries,
    )
    sizes = np.bincount(rows.queries, minlength=rows.num_queries).tolist()
    listed = zip(found.ndcg.tolist(), texts_of(rows.query_names), sizes, strict=True)
    return [[query, ndcg, size] for ndcg, query, size in sorted(listed) if not math.isnan(ndcg)][:WORST]


# ------------------------------------------------------------------------------
# Runs compared: a student's scores with its teacher, other runs with the first.


def compared_section(runs: Sequence[RunArtifact], choice: JudgingOptions, own: Mapping[str, JudgingOptions]) -> Section:
    """Each run compared with the first label run, by gold too where there is some."""
    teacher = next((run for run in runs if run.kind != "scores"), None) or next(iter(runs), None)
    blocks: list[Block] = []
    for other in runs:
        if teacher is None or other is teacher:
            continue
        try:
            found = _compare(teacher, other, choice, own[teacher.path])
        except CANT as exc:
            blocks.append(Paragraph(f"{teacher.name} and {other.name} can't be compared: {exc}", "warn"))
            continue
        one = found.comparisons[0]
        blocks += top_texts(verdicts_of(one), found.side)
        by_gold = one.against_gold
        if by_gold:
            blocks.append(
                figures_plot(
                    f"{teacher.name} and {other.name} by gold grades",
                    {teacher.name: by_gold.teacher.figures, other.name: by_gold.student.figures},
                )
            )
        blocks += comparison_blocks(one, found)
    return Section("between", "Between runs", blocks)


def _compare(teacher: RunArtifact, other: RunArtifact, choice: JudgingOptions, options: JudgingOptions) -> ComparedSets:
    """One run compared with another; by gold grades too, where those that were found (not asked for) fit."""
    paths = {teacher.name: teacher.path, other.name: other.path}
    try:
        return compare_named(paths, teacher.name, options, teacher.storage)
    except CANT:
        if options is choice:
            raise
        return compare_named(paths, teacher.name, choice, teacher.storage)
