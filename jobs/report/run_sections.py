"""Sections about label runs: facts and cost, conservation of rows, quarantine, distributions, canaries and route
trees."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relabel.jobs.report.artifacts import DIGITS, RunArtifact, base_name
from relabel.jobs.report.tallies import Histogram, LabelTally, texts_of
from relabel.jobs.run.canary import load_results
from relabel.jobs.sections import (
    Badge,
    Block,
    Cell,
    Code,
    Facts,
    Fold,
    Paragraph,
    Plot,
    Section,
    Series,
    Shade,
    Table,
)
from relabel.labelers.route_steps import RouteStep, Subtree, one_line, read_step
from relabel.manifests.cascade import audit_of
from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.labels import InputColumn, Pair, Reads
from relabel.manifests.run import own_columns, read_labels
from relabel.manifests.schemas import Try
from relabel.manifests.secrets import redacted, shortened
from relabel.manifests.trees import COLUMN, Tree, read_tree

EXAMPLES = 5
REASONS = 12
REASON_CHARS = 300
OWN_WORDS = ("format", "truncated")
"""Statuses whose reasons are a labeler's own words, except for what they quote; after a colon, the others may hold a
server's or a model's.
"""


class TalliedRun(NamedTuple):
    """A run, the counts over its labels, and rows of its quarantine to show."""

    run: RunArtifact
    tally: LabelTally
    quarantined: Sequence[dict[str, Any]]


def run_facts(run: RunArtifact) -> Facts:
    """State, labeler, engines, rows, tokens and cost."""
    tally, plan = run.found.tally, run.plan
    state = Badge("finished, every row accounted for", "good")
    if not run.is_finished:
        state = Badge("not finished", "warn")
    elif run.manifest is not None and run.manifest.over_limit:
        state = Badge("over its quarantine limit", "bad")
    rows: list[tuple[str, Cell]] = [
        ("state", state),
        ("labeler", f"{plan.facts.labeler.name}, grades 0 to {run.grades - 1}"),
        *(
            (
                "student" if run.is_scored else "teacher",
                f"{base_name(str(one.get('model')))} on {one.get('family')} {one.get('version', '')}, "
                f"{', '.join(filter(None, [one.get('device'), one.get('dtype')]))}",
            )
            for one in run.found.engines
        ),
        ("rows", f"{tally.rows:,} of {plan.rows:,} done, {plan.queries:,} queries"),
        ("shards, chunks", f"{len(plan.shards):,}, {plan.num_chunks:,}"),
    ]
    for stage, counts in tally.stages.items():
        prompt, cached = counts.get("prompt_tokens", 0), counts.get("cached_tokens", 0)
        tokens = f"{prompt:,} tokens in ({cached / max(1, prompt):.0%} cached), {counts.get('output_tokens', 0):,} out"
        rows.append((stage, f"{counts.get('asks', 0):,} requests, {tokens}"))
    rows.append(("worker time", f"{tally.worker_seconds:,.1f} s, engine starts left out"))
    cascade = run.manifest.cascade if run.manifest is not None else audit_of(run.folder, run.found.labels)
    if cascade is not None:
        rows.append(("cascade", Badge(cascade.text, "bad" if cascade.is_alarm else "good")))
    price, gpus = run.spec.get("cost_per_gpu_hour"), run.spec_part("engine", "args").get("tensor_parallel_size") or 1
    if isinstance(price, int | float) and isinstance(gpus, int):
        rows.append(("cost", tally.worker_seconds / 3600 * price * gpus))
    if run.manifest is not None:
        rows.append(("relabel", run.manifest.relabel))
        differences = run.manifest.mixed.differences
        rows += [("engines differ", "; ".join(differences))] if differences else []
    rows += [("fingerprint", plan.fingerprint[:DIGITS]), ("path", run.path)]
    return Facts(f"{'Scores' if run.is_scored else 'Label run'} {run.name}", rows)


# ------------------------------------------------------------------------------
# Whether every row is there.


def conservation_section(runs: Sequence[TalliedRun], *, quotes: bool) -> Section:
    """Rows in = labelled + reused + quarantined; the quarantine by reason, with examples.

    Args:
        quotes: reasons may quote what a model or a server answered, and so what a document holds.
    """
    rows: list[list[Cell]] = []
    for run, _, _ in runs:
        tally = run.found.tally
        verdict = Badge(f"{run.plan.rows - tally.rows:,} rows open", "warn")
        if tally.rows != tally.labelled + tally.reused + tally.num_quarantined:
            verdict = Badge("does not add up", "bad")
        elif run.is_finished:
            verdict = Badge("proven by row ids", "good")
        rows.append([run.name, run.plan.rows, tally.labelled, tally.reused, tally.num_quarantined, verdict])
    head = ("run", "rows in", "labelled", "reused", "quarantined", "verdict")
    blocks: list[Block] = [
        Paragraph("Row ids in and out are compared when a run ends; relabel verify proves it again."),
        Table("Rows in and out", head, rows),
    ]
    for one in runs:
        blocks += _quarantine(one, quotes=quotes)
    if not quotes and any(one.run.found.tally.num_quarantined for one in runs):
        blocks.append(Paragraph("This page shows no rows, so quoted text is left out of the reasons (…)."))
    return Section("conservation", "Conservation", blocks if runs else [])


def _quarantine(tallied: TalliedRun, *, quotes: bool) -> Iterator[Block]:
    run, tally, shown = tallied
    total = run.found.tally.num_quarantined
    if not total:
        return
    counts = sorted(run.found.tally.quarantined.items(), key=lambda item: (-item[1], item[0]))
    limit = f", limit {run.manifest.max_failed_fraction:.1%}" if run.manifest is not None else ""
    title = f"Quarantine of {run.name}: {total / max(1, run.found.tally.rows):.2%} of the rows{limit}"
    yield Table(title, ("status", "rows"), [[status, Shade(f"{count:,}", count / total)] for status, count in counts])
    for status, count in counts:
        reasons: Counter[str] = Counter()
        for reason, number in tally.reasons.get(status, {}).items():
            reasons[shortened(reason, REASON_CHARS) if quotes else _unquoted(status, reason)] += number
        caption = f"Why, the {min(REASONS, len(reasons))} most frequent of {len(reasons):,}"
        examples = [_example(row) for row in shown if row["status"] == status][:EXAMPLES]
        table = Table(caption, ("reason", "rows"), reasons.most_common(REASONS))
        yield Fold(f"{status}: {count:,} rows of {run.name}, {len(examples)} examples", [table, *examples])


def _example(row: dict[str, Any]) -> Fold:
    """A row of the browser that has no label."""
    document = shortened(row.get("document") or row.get("doc_id") or "", 600)
    facts = Facts("", [("query", row.get("query") or row.get("query_id")), ("document", document)])
    tries = [Try(**held) for held in row.get("tries", ())]
    texts = [Code(f"try {one.attempt} of {one.stage}, ended by {one.finish}", one.text or "(empty)") for one in tries]
    return Fold(f"row {row['row']}: {row.get('reason')}", [facts, *texts])


def _unquoted(status: str, reason: str) -> str:
    """A reason up to where it begins to quote somebody."""
    reason = redacted(reason)
    marks = "'\"`“‘«" if status in OWN_WORDS else "'\"`“‘«:"
    place = min((place for mark in marks if (place := reason.find(mark)) >= 0), default=None)
    if place is None:
        return shortened(reason, REASON_CHARS)
    return shortened(reason[:place], REASON_CHARS) + (": …" if reason[place] == ":" else "…")


# ------------------------------------------------------------------------------
# The labels themselves.


def labels_section(runs: Sequence[TalliedRun]) -> Section:
    """Grades, entropy and mass outside the grades, over all labels; flags."""
    blocks: list[Block] = []
    graded = [one for one in runs if one.tally.by_grade.sum()]
    if graded:
        series = [
            Series(one.run.name, [str(grade) for grade in range(one.tally.grades)], one.tally.by_grade.tolist())
            for one in graded
        ]
        title = title_over("Grades", (one.tally.queries for one in graded))
        blocks.append(Plot(title, "bars", series, "grade", "rows"))
    blocks += _histograms("Entropy of the distributions", "entropy, nats", runs, lambda one: one.entropy)
    blocks += _histograms("Mass outside the grades", "outside mass", runs, lambda one: one.outside)
    if runs and not any(one.tally.entropy.rows for one in runs):
        blocks.append(Paragraph("These labels hold no distributions, so no entropy and no outside mass can be shown."))
    flags: list[list[Cell]] = [
        [one.run.name, flag, count] for one in runs for flag, count in one.tally.flags.most_common()
    ]
    blocks += [Table("Flags on labels", ("run", "flag", "rows"), flags)] if flags else []
    return Section("distributions", "Labels", blocks)


def title_over(title: str, queries: Iterable[Collection[str]]) -> str:
    """A plot's title, with a word where its sets are over different queries: the queries may be what differs.

    Args:
        queries: of each set, the ids.
    """
    return f"{title}, over different queries" if len(set(map(frozenset, queries))) > 1 else title


def _histograms(
    title: str, label: str, runs: Sequence[TalliedRun], of_run: Callable[[LabelTally], Histogram]
) -> Iterator[Plot]:
    """One plot; runs with another number of grades have another top, and a plot of their own."""
    held = [(one, of_run(one.tally)) for one in runs if of_run(one.tally).rows]
    for top in dict.fromkeys(found.top for _, found in held):
        chosen = [(one, found) for one, found in held if found.top == top]
        grades = "" if len(chosen) == len(held) else f", {round(math.exp(top))} grades"
        series = [Series(one.run.name, found.edges, found.counts.tolist()) for one, found in chosen]
        note = "; ".join(f"{one.run.name}: mean {found.mean:.4f} over {found.rows:,} rows" for one, found in chosen)
        called = title_over(title, (one.tally.queries for one, _ in chosen)) + grades
        yield Plot(called, "histogram", series, label, "rows", note)


def noise_section(runs: Sequence[TalliedRun]) -> Section:
    """How many grades flip when the same rows are asked again."""
    rows: list[list[Cell]] = [
        [
            run.name,
            f"{one.engine.get('family')} {one.engine.get('version', '')}",
            *(one.rows, one.flips, one.unreadable, one.flip_rate, f"{one.low:.4f} to {one.high:.4f}", one.mean_kl),
            one.max_flip_rate,
            Badge("passed", "good") if one.has_passed else Badge("refused", "bad"),
        ]
        for run, _, _ in runs
        for one in load_results(run.store)
    ]
    text = Paragraph("A canary asks labelled rows once more. Compare any difference between labels with the flip rate.")
    head = ("run", "engine", "asked again", "flips", "no label now", "flip rate", "95 % interval", "mean KL, nats")
    table = Table("Canaries", (*head, "limit", "verdict"), rows)
    return Section("noise", "Noise floor", [text, table] if rows else [])


# ------------------------------------------------------------------------------
# Labels of `route`: trees of a few documents as indented text, step by step.

DOCUMENTS = 3
"""Shown of each run: the first that are drawn for the label browser."""
STEPS = 12
"""Of a document."""
LINES = 60
"""Of a tree; beyond that, headings that have nothing to do with the step are left out."""
TEXT_CHARS = 240
_COLUMNS = {"answer_ids": "list<int32>", "expand_ids": "list<int32>", "steps": "list<string>"}
_READS = Reads(columns=(InputColumn(COLUMN, "list<node>", "The document's tree.", True),))


def routes_section(runs: Sequence[TalliedRun]) -> Section:
    """What a router saw and did, of a few documents of each run of `route`; nothing on a page that shows no rows."""
    blocks: list[Block] = []
    for run, tally, _ in runs:
        if _COLUMNS.items() <= own_columns(run.plan.parts).items() and tally.chosen["labels"]:
            blocks += _documents(run, dict(tally.chosen["labels"][:DOCUMENTS]))
    text = Paragraph(
        "Each step shows all headings, and the text that is lit: a retrieved passage, or an unfolded heading's."
    )
    return Section("routes", "Routes", [text, *blocks] if blocks else [])


def _documents(run: RunArtifact, chosen: Mapping[int, Any]) -> Iterator[Block]:
    """`chosen` are row ids, each with its label file."""
    try:
        pairs = texts_of(run, list(chosen), reads=_READS)
    except (RelabelError, OSError) as exc:
        yield Paragraph(f"{run.name}: its documents' trees can't be read again: {exc}", "warn")
        return
    for row_id, file in chosen.items():
        columns = ["row_id", "query_id", "doc_id", *_COLUMNS]
        table = read_labels(run.folder, file, columns, check_bytes=False)
        label = next(row for row in table.to_pylist() if row["row_id"] == row_id)
        answers, expands, steps = (label[name] or [] for name in _COLUMNS)
        counts = f"{len(answers)} answering, {len(expands)} to be unfolded, {len(steps)} steps"
        names = f"{run.name}, {shortened(label['query_id'], 80)}, {shortened(label['doc_id'], 80)}"
        yield Fold(f"{names}: {counts}", list(walk(steps, pairs[row_id])))


def walk(written: Sequence[str], pair: Pair) -> Iterator[Block]:
    """The steps of one label, as its column holds them, one tree each."""
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
        found = [
            *(f"answers {id}" for id in step.answers),
            *(f"unfold {id}" for id in step.expands),
            *(["refused"] if step.refused else []),
            *([f"{step.expelled} lines that were not legal"] if step.expelled else []),
        ]
        title = f"Step {number}, {shown}: {', '.join(found) or 'no action'}"
        yield Code(title, "\n".join([title, *tree_lines(tree, step)]))
    if len(steps) > STEPS:
        yield Paragraph(f"… and {len(steps) - STEPS} more steps.")


def tree_lines(tree: Tree, step: RouteStep) -> Iterator[str]:
    """What was shown, a line a node, indented by its level; a line in the place of those that are left out."""
    subtree = Subtree(tree, frozenset(id for id in step.lit if 0 <= id < len(tree.nodes)))
    kept = _kept(subtree, step)
    left_out = 0
    for node in [*subtree.visible, None]:
        if node is not None and node.id not in kept:
            left_out += 1
            continue
        if left_out:
            yield f"  … {left_out} more"
            left_out = 0
        if node is None:
            return
        folded = len(subtree.own_content(node.id)) if node.id in subtree.collapsed else 0
        marks = {
            "unfolded": node.id == step.expanded,
            "answers": node.id in step.answers,
            "to be unfolded": node.id in step.expands,
            f"{folded} folded": folded,
        }
        text = shortened(one_line(node.text), TEXT_CHARS)
        shown = "".join(f" [{mark}]" for mark, is_set in marks.items() if is_set)
        yield f"{'  ' * node.level}{'·' if node.is_content else '#'}{node.id} {text}{shown}"


def _kept(subtree: Subtree, step: RouteStep) -> set[int]:
    """Ids of the nodes to show: all where there is room, else what the step lit or named, with the headings above."""
    visible = [node.id for node in subtree.visible]
    if len(visible) <= LINES:
        return set(visible)
    named = {*subtree.lit, *step.answers, *step.expands, step.expanded}
    touched = [id for id in visible if id in named]
    return {*touched[:LINES], *(above.id for id in touched[:LINES] for above in subtree.tree.ancestors(id))}
