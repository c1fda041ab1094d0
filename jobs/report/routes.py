"""Labels of the labeler `route`: trees of a few documents as indented text, step by step."""

from collections.abc import Iterator, Sequence

from relabel.jobs.report.artifacts import RunArtifact
from relabel.jobs.report.runs import RunTally, input_texts
from relabel.jobs.sections import (
    Block,
    Code,
    Fold,
    Paragraph,
    Section,
)
from relabel.labelers.route import RouteStep, read_step
from relabel.labelers.subtrees import Subtree, one_line
from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.labels import (
    InputColumn,
    LabelRow,
    Pair,
    Reads,
)
from relabel.manifests.run_labels import own_columns
from relabel.manifests.secrets import shortened
from relabel.manifests.trees import COLUMN, Tree, read_tree

DOCUMENTS = 3
"""Shown of each run: the first of the label browser."""
STEPS = 12
"""Of a document."""
LINES = 200
"""Of a tree."""
TEXT_CHARS = 240
_COLUMNS = {"answer_ids": "list<int32>", "expand_ids": "list<int32>", "steps": "list<string>"}


def routes_section(runs: Sequence[RunTally]) -> Section:
    """What a router saw and did, of a few documents of each run of `route`; nothing on a page that shows no rows."""
    blocks: list[Block] = []
    for tally in runs:
        labels = [row for row in tally.chosen if isinstance(row, LabelRow)]
        if labels and _COLUMNS.items() <= own_columns(tally.run.plan.parts).items():
            blocks += _documents(tally.run, labels[:DOCUMENTS])
    if not blocks:
        return Section("routes", "Routes", [])
    text = Paragraph(
        "Each step shows all headings, and the text that is lit: a retrieved passage, or an unfolded heading's."
    )
    return Section("routes", "Routes", [text, *blocks])


def _documents(run: RunArtifact, labels: Sequence[LabelRow]) -> Iterator[Block]:
    tree_column = InputColumn(COLUMN, "list<node>", "The document's tree.", True)
    try:
        pairs = input_texts(run, [row.row_id for row in labels], reads=Reads(columns=(tree_column,)))
    except (RelabelError, OSError) as exc:
        yield Paragraph(f"{run.name}: its documents' trees can't be read again: {exc}", "warn")
        return
    for row in labels:
        answers, expands, steps = (row.columns[name] or [] for name in _COLUMNS)
        counts = f"{len(answers)} answering, {len(expands)} to be unfolded, {len(steps)} steps"
        names = f"{run.name}, {shortened(row.query_id, 80)}, {shortened(row.doc_id, 80)}"
        yield Fold(f"{names}: {counts}", list(walk(steps, pairs[row.row_id])))


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
        title = f"Step {number}, {_looked_at(step, tree)}: {', '.join(_actions(step)) or 'no action'}"
        yield Code(title, "\n".join([title, *tree_lines(tree, step)]))
    if len(steps) > STEPS:
        yield Paragraph(f"… and {len(steps) - STEPS} more steps.")


def _looked_at(step: RouteStep, tree: Tree) -> str:
    if step.expanded is not None and 0 <= step.expanded < len(tree.nodes):
        return f"unfolded {step.expanded}"
    return "a passage"


def _actions(step: RouteStep) -> list[str]:
    actions = [f"answers {id}" for id in step.answers]
    actions += [f"unfold {id}" for id in step.expands]
    if step.refused:
        actions.append("refused")
    if step.expelled:
        actions.append(f"{step.expelled} lines that were not legal")
    return actions


def tree_lines(tree: Tree, step: RouteStep) -> Iterator[str]:
    """What was shown, a line a node, indented by its level."""
    subtree = Subtree(tree, frozenset(id for id in step.lit if 0 <= id < len(tree.nodes)))
    for node in subtree.visible[:LINES]:
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
    if len(subtree.visible) > LINES:
        yield f"… {len(subtree.visible) - LINES} more"
