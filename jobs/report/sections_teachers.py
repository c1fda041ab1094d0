"""Sections about teachers: what each was made of, and answers that it gave while it was trained by reinforcement."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow.parquet as pq

from relabel.distill.teachers.methods import METHODS
from relabel.distill.teachers.rollout_files import NODES, RolloutRow
from relabel.jobs.report.blocks import Block, Cell, Code, Facts, Fold, Paragraph, Section, Side, Table
from relabel.jobs.report.teachers import TeacherArtifact
from relabel.jobs.report.trainings import TrainingArtifact
from relabel.manifests.secrets.redaction import shortened

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
