"""Report sections about label runs: conservation of rows, quarantine, label distributions, route trees, throughput,
plan and cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from relabel.jobs.report.artifacts import Commit, RunArtifact
from relabel.jobs.report.page import (
    Badge,
    Block,
    Cell,
    Code,
    Drawing,
    Facts,
    Fold,
    Outline,
    OutlineLine,
    Paragraph,
    Section,
    Shade,
    ShownRow,
    Side,
    Table,
    csv_download,
    title_over,
)
from relabel.jobs.report.plots import Bars, Line, PlottedInterval, draw_bars, draw_histogram, draw_intervals, draw_lines
from relabel.jobs.report.tallies import Histogram, LabelTally, texts_of
from relabel.jobs.run.canary import load_results
from relabel.labelers.route_steps import RouteStep, Subtree, one_line, read_step
from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.labels import InputColumn, Pair, Reads
from relabel.manifests.run import own_columns, read_labels
from relabel.manifests.schemas import Try
from relabel.manifests.secrets import redacted, shortened
from relabel.manifests.trees import COLUMN, Tree, read_tree

# ------------------------------------------------------------------------------
# Sections about what ran and whether every row is there: artifacts, specs, conservation, quarantine.


DIGITS = 16
"""Of a digest that is shown."""
EXAMPLES = 5
REASONS = 12
REASON_CHARS = 300
OWN_WORDS = ("format", "truncated")
"""Statuses whose reasons are a labeler's own words, but for what they quote; after a colon, the others may have a
server's or a model's.
"""


class TalliedRun(NamedTuple):
    """A run, what its labels come to, and rows of its quarantine to show."""

    run: RunArtifact
    tally: LabelTally
    quarantined: Sequence[ShownRow]


def conservation_section(runs: Sequence[TalliedRun], *, quotes: bool) -> Section:
    """Rows in = labelled + reused + quarantined; what lies in quarantine, by reason, with examples.

    Args:
        quotes: reasons may quote what a model or a server answered, and so what a document holds.
    """
    if not runs:
        return Section("conservation", "", [])
    rows: list[list[Cell]] = []
    for run, _, _ in runs:
        tally = run.found.tally
        adds_up = tally.rows == tally.labelled + tally.reused + tally.num_quarantined
        verdict = Badge("does not add up", "bad")
        if adds_up:
            verdict = (
                Badge("proven by row ids", "good")
                if run.is_finished
                else Badge(f"{run.plan.rows - tally.rows:,} rows open", "warn")
            )
        rows.append([run.name, run.plan.rows, tally.labelled, tally.reused, tally.num_quarantined, verdict])
    head = ("run", "rows in", "labelled", "reused", "quarantined", "verdict")
    blocks: list[Block] = [
        Paragraph(
            "Rows in = labelled + reused + quarantined, compared as multisets of row ids when a run ends; relabel "
            "verify proves it again."
        ),
        Table(head, rows, "Rows in and out", csv_download("conservation", head[:-1], [row[:-1] for row in rows])),
    ]
    for one in runs:
        blocks += _quarantine(one, is_alone=len(runs) == 1, quotes=quotes)
    if not quotes and any(one.run.found.tally.num_quarantined for one in runs):
        blocks.append(Paragraph("This page shows no rows, so quoted text is left out of the reasons (…)."))
    return Section("conservation", "Conservation", blocks)


def _quarantine(tallied: TalliedRun, *, is_alone: bool, quotes: bool) -> list[Block]:
    run, tally, shown = tallied
    if not run.found.tally.num_quarantined:
        return []
    of = "" if is_alone else f" of {run.name}"
    counts = sorted(run.found.tally.quarantined.items(), key=lambda item: (-item[1], item[0]))
    share = run.found.tally.num_quarantined / max(1, run.found.tally.rows)
    limit = f", limit {run.manifest.max_failed_fraction:.1%}" if run.manifest is not None else ""
    rows: list[list[Cell]] = [
        [status, Shade(f"{count:,}", count / run.found.tally.num_quarantined)] for status, count in counts
    ]
    title = f"Quarantine{of}: {share:.2%} of the rows{limit}"
    blocks: list[Block] = [
        Table(("status", "rows"), rows, title, csv_download(f"quarantine-{run.name}", ("status", "rows"), counts))
    ]
    for status, count in counts:
        reasons: Counter[str] = Counter()
        for reason, number in (tally.reasons.get(status) or Counter()).items():
            reasons[shortened(reason, REASON_CHARS) if quotes else _unquoted(status, reason)] += number
        inner: list[Block] = []
        if reasons:
            listed = list(reasons.most_common(REASONS))
            inner.append(
                Table(
                    ("reason", "rows"),
                    [list(item) for item in listed],
                    f"Why, the {len(listed)} most frequent of {len(reasons):,}",
                )
            )
        examples = [row for row in shown if row.status == status][:EXAMPLES]
        inner += [_example(row) for row in examples]
        if inner:
            blocks.append(Fold(f"{status}{of}: {count:,} rows, {len(examples)} examples", inner))
    return blocks


def _example(row: ShownRow) -> Fold:
    """A row of the browser that has no label."""
    blocks: list[Block] = [
        Facts(
            [
                ("query", row.query_id if row.query is None else row.query),
                ("document", shortened((row.doc_id if row.document is None else row.document) or "", 600)),
                ("why", row.reason),
            ]
        )
    ]
    blocks += [
        Code(one.text or "(empty)", f"try {one.attempt} of {one.stage}, ended by {one.finish}")
        for one in (Try(**held) for held in row.tries or ())
    ]
    return Fold(f"row {row.row}: {shortened(row.reason or '', 120)}", blocks)


def _unquoted(status: str, reason: str) -> str:
    """A reason up to where it begins to quote somebody."""
    reason = redacted(reason)
    marks = "'\"`“‘«" if status in OWN_WORDS else "'\"`“‘«:"
    place = min((place for mark in marks if (place := reason.find(mark)) >= 0), default=None)
    if place is None:
        return shortened(reason, REASON_CHARS)
    return shortened(reason[:place], REASON_CHARS) + (": …" if reason[place] == ":" else "…")


# ------------------------------------------------------------------------------
# Sections about the labels themselves: grades, entropy, mass outside the grades, flags; and how many flip when asked
# again.


def labels_section(runs: Sequence[TalliedRun]) -> Section:
    """Grades, entropy and outside mass, over all labels."""
    figures: list[Block] = []
    graded = [one for one in runs if one.tally.by_grade.sum()]
    if graded:
        most = max(one.tally.grades for one in graded)
        grades = [str(grade) for grade in range(most)]
        bars = [
            Bars(one.run.name, grades, [*one.tally.by_grade.tolist(), *[0] * (most - one.tally.grades)])
            for one in graded
        ]
        rows = [(bar.name, grade, int(count)) for bar in bars for grade, count in zip(grades, bar.values, strict=True)]
        alt = "; ".join(
            f"{bar.name}: "
            + ", ".join(f"grade {grade} {int(count):,}" for grade, count in zip(grades, bar.values, strict=True))
            for bar in bars
        )
        figures.append(
            Drawing(
                title_over("Grades", (one.tally.queries for one in graded)),
                draw_bars(bars, label="grade", value="rows"),
                alt,
                csv_download("grades", ("run", "grade", "rows"), rows),
            )
        )
    figures += _histograms("Entropy of the distributions", "entropy", "nats", runs, lambda one: one.entropy)
    figures += _histograms("Mass outside the grades", "outside mass", "", runs, lambda one: one.outside)
    blocks: list[Block] = [Side(figures)] if figures else []
    if runs and not any(one.tally.entropy.rows for one in runs):
        blocks.append(Paragraph("These labels hold no distributions, so no entropy and no outside mass can be shown."))
    flags: list[list[Cell]] = [
        [one.run.name, flag, count] for one in runs for flag, count in one.tally.flags.most_common()
    ]
    if flags:
        head = ("run", "flag", "rows")
        blocks.append(Table(head, flags, "Flags on labels", csv_download("flags", head, flags)))
    return Section("distributions", "Labels", blocks)


def _histograms(
    title: str, name: str, unit: str, runs: Sequence[TalliedRun], of_run: Callable[[LabelTally], Histogram]
) -> list[Block]:
    """One figure; runs with another number of grades have another top, and a figure of their own."""
    found: list[Block] = []
    held = {one.run.name: of_run(one.tally) for one in runs}
    queries = {one.run.name: one.tally.queries for one in runs}
    tops = dict.fromkeys(one.top for one in held.values() if one.rows)
    for top in tops:
        chosen = {run: one for run, one in held.items() if one.rows and one.top == top}
        edges = next(iter(chosen.values())).edges
        bars = [Bars(run, [], one.counts.tolist()) for run, one in chosen.items()]
        rows = [
            (run, low, high, int(count))
            for run, one in chosen.items()
            for low, high, count in zip(edges, edges[1:], one.counts, strict=False)
        ]
        means = "; ".join(f"{run}: mean {one.mean:.4f} over {one.rows:,} rows" for run, one in chosen.items())
        label = f"{name}, {unit}" if unit else name
        of = f", {round(math.exp(top))} grades" if len(tops) > 1 else ""
        save = csv_download(f"{name}{of}", ("run", "from", "to", "rows"), rows)
        found.append(
            Drawing(
                title_over(title, (queries[run] for run in chosen)) + of,
                draw_histogram(bars, edges, label=label, value="rows"),
                f"Histogram of {name}. {means}.",
                save,
                means,
            )
        )
    return found


def noise_section(runs: Sequence[TalliedRun]) -> Section:
    """How many grades flip when the same rows are asked again."""
    rows: list[list[Cell]] = []
    marks = []
    for run, _, _ in runs:
        for one in load_results(run.store):
            name = f"{one.engine.get('family')} {one.engine.get('version', '')}"
            figures = (one.rows, one.flips, one.unreadable, one.flip_rate, one.low, one.high, one.mean_kl)
            verdict = Badge("passed", "good") if one.has_passed else Badge("refused", "bad")
            rows.append([run.name, name, *figures, one.max_flip_rate, verdict])
            marks.append(PlottedInterval(run.name if len(runs) > 1 else name, one.flip_rate, one.low, one.high))
    if not rows:
        return Section("noise", "", [])
    head = (
        "run",
        "engine",
        "asked again",
        "flips",
        "no label now",
        "flip rate",
        "low",
        "high",
        "mean KL, nats",
        "limit",
        "verdict",
    )
    save = csv_download("noise-floor", head[:-1], [row[:-1] for row in rows])
    alt = "; ".join(
        f"{row[0]}: {row[5]:.4f} of grades flipped, 95 % interval {row[6]:.4f} to {row[7]:.4f}" for row in rows
    )
    text = (
        "A canary asks rows that are labelled already once more. Compare any "
        "difference between labels with the share of grades that flip."
    )
    figure = Drawing(
        "Share of grades that flipped, 95 % interval", draw_intervals([("canary", marks)], label="flip rate"), alt, save
    )
    return Section("noise", "Noise floor", [Paragraph(text), Side([figure]), Table(head, rows, "Canaries")])


# ------------------------------------------------------------------------------
# A section on labels of `route`: trees of a few documents, step by step: what was shown, answered, unfolded.


DOCUMENTS = 3
"""Shown of each run: the first that are drawn for the labels browser."""
STEPS = 12
"""Of a document."""
LINES = 60
"""Of a tree; beyond that, headings that have nothing to do with the step are left out."""
TEXT_CHARS = 240
_COLUMNS = {"answer_ids": "list<int32>", "expand_ids": "list<int32>", "steps": "list<string>"}
_READS = Reads(columns=(InputColumn(COLUMN, "list<node>", "The document's tree.", True),))
_ABOUT = (
    "Each ask shows all headings and, of the text, what is lit: a retrieved passage with its neighbours, then in its "
    "place the text of a heading that was unfolded. A few documents of the rows that this page shows, the same each "
    "time."
)


class _Routed(NamedTuple):
    """What is shown of a label of `route`."""

    row_id: int
    query_id: str
    doc_id: str
    answer_ids: list[int] | None
    expand_ids: list[int] | None
    steps: list[str] | None


def routes_section(runs: Sequence[TalliedRun]) -> Section:
    """What a router saw and did, of a few documents of each run of `route`; nothing on a page that shows no rows."""
    blocks: list[Block] = []
    for run, tally, _ in runs:
        if _COLUMNS.items() <= own_columns(run.plan.parts).items() and tally.chosen["labels"]:
            chosen = dict(tally.chosen["labels"][:DOCUMENTS])
            blocks += _documents(run, chosen, f"{run.name}, " if len(runs) > 1 else "")
    return Section("routes", "Routes", [Paragraph(_ABOUT), *blocks] if blocks else [])


def _documents(run: RunArtifact, chosen: Mapping[int, Any], of: str) -> Iterator[Block]:
    """
    Args:
        chosen: row ids, each with its label file.
        of: what a summary begins with.
    """
    try:
        pairs = texts_of(run, list(chosen), reads=_READS)
    except (RelabelError, OSError) as exc:
        yield Paragraph(f"{run.name}: its documents' trees can't be read again: {exc}", "warn")
        return
    for row_id, file in chosen.items():
        table = read_labels(run.folder, file, list(_Routed._fields), check_bytes=False)
        (label,) = (one for row in table.to_pylist() if (one := _Routed(**row)).row_id == row_id)
        counts = (
            f"{len(label.answer_ids or ())} answering, {len(label.expand_ids or ())} to be unfolded, "
            f"{len(label.steps or ())} steps"
        )
        summary = f"{of}{shortened(label.query_id, 80)}, {shortened(label.doc_id, 80)}: {counts}"
        yield Fold(summary, list(_walk(label.steps or (), pairs[row_id])))


def _walk(written: Sequence[str], pair: Pair) -> Iterator[Block]:
    """The steps of one label, as written there, one tree each."""
    yield Paragraph(f"Query: {shortened(pair.query, TEXT_CHARS)}")
    try:
        tree = read_tree(pair.columns[COLUMN], pair.document)
        steps = [read_step(text) for text in written]
    except (InputError, ValueError) as exc:
        yield Paragraph(f"Its steps can't be shown on its tree: {shortened(str(exc), TEXT_CHARS)}", "warn")
        return
    for number, step in enumerate(steps[:STEPS], start=1):
        is_there = step.expanded is not None and 0 <= step.expanded < len(tree.nodes)
        shown = f"unfolded {step.expanded}" if is_there else "a passage"
        yield Outline(f"Step {number}, {shown}: {_said(step)}", list(_lines(tree, step)))
    if len(steps) > STEPS:
        yield Paragraph(f"… and {len(steps) - STEPS} more steps.")


def _said(step: RouteStep) -> str:
    said = [
        f"{what} {', '.join(map(str, ids))}"
        for what, ids in (("answers", step.answers), ("unfold", step.expands))
        if ids
    ]
    said += ["refused"] if step.refused else []
    said += [f"{step.expelled} lines that were not legal"] if step.expelled else []
    return "; ".join(said) or "no action"


def _lines(tree: Tree, step: RouteStep) -> Iterator[OutlineLine]:
    """What was shown, a line a node; a line in the place of those that are left out."""
    subtree = Subtree(tree, frozenset(id for id in step.lit if 0 <= id < len(tree.nodes)))
    kept = _kept(subtree, step)
    num_left_out = 0
    for node in subtree.visible:
        if node.id not in kept:
            num_left_out += 1
            continue
        if num_left_out:
            yield OutlineLine(1, "", f"… {num_left_out} more", ())
            num_left_out = 0
        badges = [
            *([Badge("unfolded", "plain")] if node.id == step.expanded else []),
            *([Badge("answers", "good")] if node.id in step.answers else []),
            *([Badge("to be unfolded", "warn")] if node.id in step.expands else []),
        ]
        if node.id in subtree.collapsed and (hidden := len(subtree.own_content(node.id))):
            badges.append(Badge(f"{hidden} folded", "plain"))
        yield OutlineLine(node.level, str(node.id), shortened(one_line(node.text), TEXT_CHARS), badges, node.is_content)
    if num_left_out:
        yield OutlineLine(1, "", f"… {num_left_out} more", ())


def _kept(subtree: Subtree, step: RouteStep) -> set[int]:
    """Ids of the nodes to show: all where there is room, else what the step lit or named and what that stands under."""
    visible = [node.id for node in subtree.visible]
    if len(visible) <= LINES:
        return set(visible)
    named = {*subtree.lit, *step.answers, *step.expands, step.expanded}
    touched = [id for id in visible if id in named]
    return {*touched[:LINES], *(above.id for id in touched[:LINES] for above in subtree.tree.ancestors(id))}


# ------------------------------------------------------------------------------
# Sections about the work: rows a second and restarts, plan against actual, tokens and cost.


TIME_BINS = 48
TOTALS = (
    "Work in all; a row that is retried is asked twice. In vain: chunks that another worker had committed first, "
    "counted nowhere else"
)
SHORTEST_S = 1e-3
"""Receipts tell times to the millisecond."""


def throughput_section(runs: Sequence[TalliedRun]) -> Section:
    """Rows a second from commit to commit, with the moments at which a worker's process (and so an engine) began."""
    blocks: list[Block] = []
    figures: list[Block] = []
    starts: list[list[Cell]] = []
    for run, _, _ in runs:
        commits = [commit for commit in run.commits if commit.asked]
        if not commits:
            continue
        begun = min(commits, key=lambda commit: commit.started).started
        workers = _workers(commits)
        series = _rates(commits, begun)
        marks = [_since(begun, first) for first, _, _, how in workers if how == "after another had ended"]
        rows = list(zip(series.places, series.values, strict=True))
        total = sum(commit.asked for commit in commits)
        seconds = max(SHORTEST_S, _since(begun, max(commit.committed for commit in commits)))
        again = sum(how == "after another had ended" for *_, how in workers)
        retried = sum(commit.asked for commit in commits if commit.attempt > 1)
        asked = f"{total:,} rows asked, {retried:,} of these again by a retry," if retried else f"{total:,} rows asked"
        note = (
            f"{asked} in {_seconds_text(seconds)} from the first start to the last commit: "
            f"{_rate_text(total / seconds)} rows/s. "
        )
        note += f"Worker processes: {len(workers):,}, of which {again:,} began after another had ended (dotted lines)."
        svg = draw_lines([series], label="seconds since the start", value="rows/s", marks=marks, starts_at_0=True)
        figures.append(
            Drawing(
                f"Rows a second, {run.name}",
                svg,
                note,
                csv_download(f"throughput-{run.name}", ("seconds", "rows_per_s"), rows),
                note,
            )
        )
        starts += [[run.name, worker, first, last, how] for first, last, worker, how in workers]
    if figures:
        head = ("run", "worker", "first start", "last commit", "began")
        table = Table(
            head,
            starts[:200],
            "Worker processes; each starts an engine of its own",
            csv_download("workers", head, starts),
        )
        text = "By the times in receipts. A chunk counts at its commit, so that a run of few chunks shows steps."
        blocks = [Paragraph(text), Side(figures), Fold(f"Worker processes: {len(starts):,}", [table])]
    return Section("throughput", "Throughput", blocks)


def _workers(commits: Sequence[Commit]) -> list[tuple[str, str, str, str]]:
    """First start, last commit, name, and how it began, of every worker process, in the order of their starts."""
    spans: dict[str, tuple[str, str]] = {}
    for commit in commits:
        first, last = spans.get(commit.worker, (commit.started, commit.committed))
        spans[commit.worker] = min(first, commit.started), max(last, commit.committed)
    found = []
    for worker, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        before = [other for other in spans.values() if other[0] < first]
        how = (
            "first"
            if not before
            else "after another had ended"
            if any(other[1] <= first for other in before)
            else "beside others"
        )
        found.append((first, last, worker, how))
    return found


def _rates(commits: Sequence[Commit], begun: str) -> Line:
    """Rows a second in equal steps of time."""
    end_s = max(SHORTEST_S, *(_since(begun, commit.committed) for commit in commits))
    count = min(TIME_BINS, max(1, len(commits)))
    width = end_s / count
    rows_T = np.zeros(count)
    for commit in commits:
        rows_T[min(count - 1, int(_since(begun, commit.committed) / width))] += commit.asked
    values = (rows_T / width).tolist()
    return Line(
        "rows/s", [round(number * width, 6) for number in range(count + 1)], [*values, values[-1]], is_stepped=True
    )


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.3f} s" if seconds < 10 else f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _rate_text(rate: float) -> str:
    return f"{rate:,.2f}" if rate >= 0.1 else f"{rate:.2g}"


def _since(begun: str, moment: str) -> float:
    return (datetime.fromisoformat(moment) - datetime.fromisoformat(begun)).total_seconds()


def cost_section(runs: Sequence[TalliedRun]) -> Section:
    """Requests and tokens by stage, worker time, and what that cost where the spec names a price."""
    rows: list[list[Cell]] = []
    totals: list[list[Cell]] = []
    is_priced = False
    for run, _, _ in runs:
        tally = run.found.tally
        for stage, counts in tally.stages.items():
            prompt = counts.get("prompt_tokens", 0)
            hit = counts.get("cached_tokens", 0) / prompt if prompt else None
            rows.append([run.name, stage, counts.get("asks", 0), prompt, counts.get("output_tokens", 0), hit])
        cost = _cost(run, tally.worker_seconds)
        is_priced |= cost is not None
        tokens = sum(
            counts.get("prompt_tokens", 0) + counts.get("output_tokens", 0) for counts in tally.stages.values()
        )
        made = tally.labelled + tally.num_quarantined
        asked = sum(commit.asked for commit in run.commits)
        if made and asked:
            lost = run.in_vain
            lost_tokens = lost.prompt_tokens + lost.output_tokens
            figures = (tally.worker_seconds, tokens / made, tokens / asked)
            totals.append([run.name, made, asked, tokens, lost.pairs, lost.requests, lost_tokens, *figures, cost])
    head = ("run", "stage", "requests", "prompt tokens", "output tokens", "share of cached prompt tokens")
    blocks: list[Block] = []
    if rows:
        blocks.append(
            Table(
                head,
                rows,
                "Requests and tokens by stage; a shared answer counts once",
                csv_download("tokens", head, rows),
            )
        )
    if totals:
        total_head = [
            "run",
            "rows",
            "rows asked with retries",
            "tokens",
            "rows in vain",
            "requests in vain",
            "tokens in vain",
        ]
        total_head += ["worker seconds", "tokens a row", "tokens a row asked"]
        total_head += ["cost"] if is_priced else []
        totals = [row[: len(total_head)] for row in totals]
        blocks.append(Table(total_head, totals, TOTALS, csv_download("cost", total_head, totals)))
        if not is_priced:
            blocks.append(
                Paragraph(
                    "The specs name no price (cost_per_gpu_hour), so there is no cost in money. Worker seconds leave "
                    "out engine starts."
                )
            )
    return Section("cost", "Cost", blocks)


def _cost(run: RunArtifact, worker_seconds: float) -> float | None:
    """In the money of the spec's price; None where it names none."""
    price = run.spec.get("cost_per_gpu_hour")
    gpus = run.spec_part("engine", "args").get("tensor_parallel_size") or 1
    if not isinstance(price, int | float) or not isinstance(gpus, int):
        return None
    return worker_seconds / 3600 * price * gpus
