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
from itertools import chain
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
    StudentArtifact,
    TeacherArtifact,
    open_artifacts,
)
from relabel.jobs.report.audits import audits_section
from relabel.jobs.report.lineage import lineage_section
from relabel.jobs.report.models import (
    bundle_facts,
    latency_blocks,
    parity_blocks,
    student_blocks,
    student_facts,
    teacher_facts,
    training_blocks,
)
from relabel.jobs.report.routes import routes_section
from relabel.jobs.report.runs import (
    RunTally,
    conservation_section,
    input_texts,
    labels_section,
    run_facts,
    run_warnings,
    tally_labels,
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
    level_text,
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

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: redacted(value) if type(value) is str else value,  # Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(cell=cell_text, draw=draw, kind=lambda value: type(value).__name__.lower())
    return environment


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
    values = {"runs": [{"name": name} for name in runs], "rows": rows}
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def shown_row(run: int, row: LabelRow | QuarantineRow, pair: Pair | None, gold: int | None) -> dict[str, Any]:
    """A label or a quarantined row as the browser takes it; what is not there is left out.

    Args:
        run: its number among the page's runs.
        pair: its texts; None where they can't be read any more.
        gold: a trusted grade.
    """
    values: dict[str, Any] = {
        "run": run,
        "row": row.row_id,
        "query_id": _cut(row.query_id, SHORT_CHARS),
        "doc_id": _cut(row.doc_id, SHORT_CHARS),
        "status": row.status,
        "gold": gold,
        "tokens": (row.prompt_tokens, row.output_tokens),
    }
    if pair is not None:
        values["query"] = _cut(pair.query, QUERY_CHARS)
        values["document"] = pair.document[:DOCUMENT_CHARS]
        values["length"] = len(pair.document) if len(pair.document) > DOCUMENT_CHARS else None
    if isinstance(row, QuarantineRow):
        values["reason"] = _cut(row.reason, SHORT_CHARS)
        values["tries"] = [
            {**attempt, "text": _cut(attempt["text"], LONG_CHARS)} for attempt in row.tries or ()
        ] or None
    else:
        values |= _shown_label(row)
    return {name: value for name, value in values.items() if value is not None}


def _shown_label(row: LabelRow) -> dict[str, Any]:
    """What a label alone has."""
    spans = [Span(**span) for span in row.evidence or ()]
    nats = -math.fsum(p * math.log(p) for p in row.probs or () if p > 0)
    own = {name: _plain(value) for name, value in row.columns.items()}
    return {
        "grade": row.grade,
        "probs": _plain(row.probs),
        "outside": _plain(row.outside_mass),
        "entropy": None if row.probs is None else round(max(0.0, nats), 4),
        "evidence": [[span.start, span.end, _cut(span.text, SHORT_CHARS)] for span in spans[:MOST_ITEMS]] or None,
        "evidence_more": max(0, len(spans) - MOST_ITEMS) or None,
        "intent": _cut(row.intent, LONG_CHARS),
        "reasoning": _cut(row.reasoning, LONG_CHARS),
        "flags": _plain(list(row.flags or ())) or None,
        "own": {name: value for name, value in own.items() if value is not None} or None,
        "samples": [{"status": sample["status"], "grade": sample["grade"]} for sample in row.samples or ()] or None,
        "reused": row.reused or None,
    }


def _plain(value: Any) -> Any:
    """A value as JSON holds it: texts and lists cut, numbers rounded, None for what is no number."""
    if isinstance(value, list):
        return [_plain(item) for item in value[:MOST_ITEMS]]
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    return _cut(value, SHORT_CHARS) if isinstance(value, str) else value


def _cut(text: str | None, most: int) -> str | None:
    if text is None or len(text) <= most:
        return text
    return f"{text[:most]}… ({len(text) - most:,} characters more)"


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
    names: list[str | float] = []
    if plot.form == "intervals":
        names = list(dict.fromkeys(chain.from_iterable(series.x for series in plot.series)))
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
    for number, series in enumerate(plot.series):
        colour = _COLOURS[number % len(_COLOURS)]
        label = _short(series.name)
        shift = (number - (len(plot.series) - 1) / 2) * width
        match plot.form:
            case "bars":
                axes.bar(
                    [number + shift for number in range(len(series.x))],
                    series.y,
                    width * 0.94,
                    color=colour,
                    label=label,
                )
            case "histogram":
                axes.stairs(
                    series.y,
                    series.x,
                    color=colour,
                    fill=len(plot.series) == 1,
                    label=label,
                    linewidth=1.6,
                )
            case "intervals":
                axes.errorbar(
                    series.y,
                    [names.index(name) + shift for name in series.x],
                    xerr=[_reach(series.y, series.low, -1), _reach(series.y, series.high, 1)],
                    fmt="o",
                    color=colour,
                    markersize=5,
                    label=label,
                )
            case _:
                axes.plot(
                    series.x,
                    series.y,
                    marker="o" if len(series.x) < 30 else None,
                    markersize=4,
                    linewidth=1.5,
                    label=label,
                )
    match plot.form:
        case "bars":
            longest = max((series.x for series in plot.series), key=len)
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


def _reach(values: Sequence[float], ends: Sequence[float | None], side: int) -> list[float]:
    """How far the whiskers on one side go, 0 and more; NaN where there is no bound."""
    return [
        math.nan if end is None else max(0.0, side * (end - value)) for end, value in zip(ends, values, strict=True)
    ]


def _short(text: str, most: int = _LABEL_CHARS) -> str:
    """Text that a plot has room for, without what XML can't hold."""
    printable = "".join(letter if letter.isprintable() else " " for letter in redacted(text))
    return shortened(printable, most)


# ------------------------------------------------------------------------------
# Builds a report: opens the artifacts, reads each run once, judges it by gold, and collects the sections that apply.


@dataclass(frozen=True)
class BuiltPage:
    """A report.

    Args:
        sections: names of those that it has, in order; `labels` is the browser.
        verdicts: which system is better, and whether runs and students are better than baselines, a sentence each.
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
    runs = [artifact for artifact in artifacts if isinstance(artifact, RunArtifact)]
    scores = tuple(run.path for run in runs if run.kind == "scores")
    choice = replace(gold or JudgingOptions(), students=scores, allow_partial=True)
    own = {run.path: gold_options(choice, run) for run in runs}
    tallies = [tally_labels(run, most=max_rows // len(runs)) for run in runs]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    if max_rows and any(tally.chosen for tally in tallies):
        rows, notes = _browser(tallies, choice, own)
    by_gold, levels = gold_section(runs, choice, own)
    by_system, decisions = systems_section(runs, systems, choice, storage)
    by_probes, fooled = audits_section(artifacts, storage, has_texts=max_rows > 0)
    verdict = verdict_section(artifacts, [*decisions, *levels, *fooled])
    sections = [
        verdict,
        ran_section(artifacts, tallies),
        lineage_section(artifacts),
        conservation_section(tallies, has_reasons=max_rows > 0),
        labels_section(tallies),
        routes_section(tallies),
        by_gold,
        compared_section(runs, choice, own),
        by_system,
        by_probes,
        *model_sections(artifacts),
    ]
    html = render_page(
        _title(artifacts),
        _subtitle(artifacts),
        sections,
        rows=browser_json([tally.run.name for tally in tallies], rows) if rows else "",
        notes=notes,
    )
    shown = [section.name for section in sections if section.blocks]
    if rows:
        shown.append("labels")
    return BuiltPage(
        html=html,
        sections=shown,
        verdicts=[block.text for block in verdict.blocks if isinstance(block, Paragraph)],
        rows_shown=len(rows),
        rows=sum(tally.by_status.total() for tally in tallies),
    )


def _title(artifacts: Sequence[Artifact]) -> str:
    names = list(dict.fromkeys(artifact.name for artifact in artifacts))
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"


def _subtitle(artifacts: Sequence[Artifact]) -> str:
    counts: Counter[str] = Counter()
    rows = 0
    for artifact in artifacts:
        counts["student's scores" if artifact.kind == "scores" else artifact.kind] += 1
        if isinstance(artifact, RunArtifact):
            rows += artifact.snapshot.tally.rows
    parts = []
    for kind, count in counts.items():
        plural = "s" if count > 1 and not kind.endswith("s") else ""
        parts.append(f"{count} {kind}{plural}")
    subtitle = ", ".join(parts)
    return f"{subtitle} · {rows:,} rows" if rows else subtitle


def model_sections(artifacts: Sequence[Artifact]) -> list[Section]:
    """Trainings, teachers first; students by their own manifests; parity and latency of bundles."""
    training: list[Block] = []
    of_students: list[Block] = []
    parity: list[Block] = []
    latency: list[Block] = []
    for artifact in artifacts:
        if isinstance(artifact, TeacherArtifact):
            training += training_blocks(artifact)
    for artifact in artifacts:
        if isinstance(artifact, StudentArtifact):
            training += training_blocks(artifact)
            of_students += student_blocks(artifact.name, artifact.manifest)
        elif isinstance(artifact, BundleArtifact):
            parity += parity_blocks(artifact)
            latency += latency_blocks(artifact)
    return [
        Section("training", "Training", training),
        Section("student", "Student", of_students),
        Section("parity", "Parity", parity),
        Section("latency", "Latency", latency),
    ]


def ran_section(artifacts: Sequence[Artifact], tallies: Sequence[RunTally]) -> Section:
    """Each artifact with its origin, and the spec of each; what is to be known of runs comes first."""
    cards: list[Facts] = []
    notes: list[Paragraph] = []
    for tally in tallies:
        notes += [Paragraph(f"{tally.run.name}: {text}", "warn") for text in run_warnings(tally)]
    specs: list[Block] = []
    for artifact in artifacts:
        spec: Any
        match artifact:
            case RunArtifact():
                card = run_facts(artifact)
                spec = artifact.spec
            case TeacherArtifact():
                card = teacher_facts(artifact)
                spec = artifact.manifest.spec
                notes += [Paragraph(f"{artifact.name}: {note}", "warn") for note in artifact.manifest.notes]
            case StudentArtifact():
                card = student_facts(artifact)
                spec = artifact.manifest.spec
            case BundleArtifact():
                card = bundle_facts(artifact)
                spec = artifact.facts.get("spec")
        cards.append(card)
        if spec and isinstance(spec, dict):
            text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)
            specs.append(Fold(f"Spec of {artifact.name}, as it was resolved", [Code(f"spec of {artifact.name}", text)]))
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
        chosen = tally.chosen
        num_rows = tally.by_status.total()
        if len(chosen) < num_rows:
            sample = "a seeded sample that keeps every status (the same rows each time)"
            counts = f"{len(chosen):,} of {num_rows:,} rows"
            notes.append(f"{run.name}: {counts}, {sample}. All other sections are over all rows.")
        texts: dict[int, Pair] = {}
        golds: list[int | None] = [None] * len(chosen)
        try:
            texts = input_texts(run, [row.row_id for row in chosen])
        except (RelabelError, OSError) as exc:
            notes.append(f"{run.name}: its rows are shown without their texts, which can't be read again: {exc}")
        options = own[run.path]
        try:
            if options.qrels is not None:
                golds = row_golds(run, options, chosen)
        except (InputError, MissingExtraError):
            if choice.qrels is not None:
                raise  # else the section on gold grades says why
        shown = [shown_row(number, row, texts.get(row.row_id), gold) for row, gold in zip(chosen, golds, strict=True)]
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
    if choice.qrels is not None or not column or len(paths) != 1:
        return choice
    with contextlib.suppress(*CANT):
        if own_input(run.plan, str(paths[0]), str(column), run.storage):
            return replace(choice, qrels=str(paths[0]), grade=str(column))
    return choice


def row_golds(run: RunArtifact, options: JudgingOptions, rows: Sequence[LabelRow | QuarantineRow]) -> list[int | None]:
    """The gold grade of each row, None where there is none."""
    labels = open_set(run.path, options, run.storage)
    columns = {
        "row_id": pa.array([row.row_id for row in rows], pa.int64()),
        "query_id": ids_of(row.query_id for row in rows),
        "doc_id": ids_of(row.doc_id for row in rows),
    }
    gold = Golds([labels], options, run.storage).of(labels, pa.RecordBatch.from_pydict(columns))
    return list(gold.columns[GOLD].to_pylist())


# ------------------------------------------------------------------------------
# Each run by gold.

WORST = 15


def gold_section(
    runs: Sequence[RunArtifact], choice: JudgingOptions, own: Mapping[str, JudgingOptions]
) -> tuple[Section, list[str]]:
    """Every run by gold grades, and the queries that it ranks worst; why one could not be judged, where its grades were
    only found, not asked for.

    Returns:
        The section, and of each run a sentence: whether it is above its baselines.
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
        judged[run.name] = result
        details += evaluation_blocks(result, name=run.name)
        worst = _worst_queries(rows)
        if worst:
            title = f"The {len(worst)} queries that {run.name} ranks worst"
            details.append(Fold(title, [Table(title, ("query", f"nDCG@{DEPTH}", "judged documents"), worst)]))
    if judged:
        figures = {name: result.figures for name, result in judged.items()}
        blocks.append(figures_plot("Agreement with gold", figures))
        blocks += _reliability_plot(judged)
    levels = [level_text(result, who=f"{name}: ") for name, result in judged.items()]
    return Section("gold", "Against gold", [*blocks, *details]), [level for level in levels if level]


def _reliability_plot(judged: Mapping[str, JudgedLabels]) -> list[Plot]:
    """How often labels of each confidence are right; none where no run has distributions."""
    lines = []
    for name, result in judged.items():
        bins = result.reliability
        if bins:
            lines.append(Series(name, [bin["confidence"] for bin in bins], [bin["accuracy"] for bin in bins]))
    if not lines:
        return []
    return [
        Plot(
            title="Reliability",
            form="reliability",
            series=lines,
            label="mean confidence",
            value="share that is right",
            note="Above the dotted line labels are right more often than they claim, below it less often.",
        )
    ]


def _worst_queries(rows: Judged) -> list[list[Cell]]:
    """Query, nDCG and judged documents, worst first. Queries without a relevant document, whose nDCG is undefined, and
    those of one document, whose nDCG is 1 in any order, are left out.
    """
    if rows.queries is None or rows.query_names is None:
        return []
    ranked = rank_queries(
        rows.queries,
        rows.docs,
        np.round(rows.scores, 6),
        rows.gold,
        num_queries=rows.num_queries,
    )
    sizes = np.bincount(rows.queries, minlength=rows.num_queries).tolist()
    listed = zip(ranked.ndcg.tolist(), texts_of(rows.query_names), sizes, strict=True)
    defined = [(ndcg, query, size) for ndcg, query, size in listed if size > 1 and not math.isnan(ndcg)]
    return [[query, ndcg, size] for ndcg, query, size in sorted(defined)[:WORST]]


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
            result = _compare(teacher, other, choice, own[teacher.path])
        except CANT as exc:
            blocks.append(Paragraph(f"{teacher.name} and {other.name} can't be compared: {exc}", "warn"))
            continue
        compared = result.comparisons[0]
        blocks += top_texts(verdicts_of(compared), result.side)
        by_gold = compared.against_gold
        if by_gold:
            figures = {teacher.name: by_gold.teacher.figures, other.name: by_gold.student.figures}
            blocks.append(figures_plot(f"{teacher.name} and {other.name} by gold grades", figures))
        blocks += comparison_blocks(compared, result)
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
