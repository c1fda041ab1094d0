"""A section on labels of `route`: trees of a few documents, step by step: what was shown, answered, unfolded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relabel.jobs.report.blocks import Badge, Block, Fold, Outline, OutlineLine, Paragraph, Section
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.jobs.report.sections_runs import TalliedRun
from relabel.jobs.report.tallies import texts_of
from relabel.labelers.steps import RouteStep, read_step
from relabel.labelers.subtree import Subtree, one_line
from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.labels import InputColumn, Pair, Reads
from relabel.manifests.runs.label_files import own_columns, read_labels
from relabel.manifests.secrets.redaction import shortened
from relabel.manifests.trees import COLUMN, Tree, read_tree

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
