"""Exports runs of `route` as chat conversations to train a router on, with the checks that accept a label as
correct."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from relabel.jobs.downloads import local_templates
from relabel.jobs.evaluate.judging import gold_of, load_pairs
from relabel.jobs.evaluate.sides import Gold, JudgingOptions
from relabel.jobs.files import check_free, written
from relabel.labelers.registry import Labeler, labeler_class, options_of_run
from relabel.labelers.trajectories import Exchange, replay
from relabel.manifests.errors import InputError, UsageError, VerdictError
from relabel.manifests.files import Storage
from relabel.manifests.gold import ANSWER_IDS, EXPAND_IDS, PairGrades, taken
from relabel.manifests.inputs import changed_files
from relabel.manifests.label_sets import is_run, label_set
from relabel.manifests.labels import Pair
from relabel.manifests.manifest import load_manifest
from relabel.manifests.plan import chunk_row_ids, recipe_parts, shard_row_ids
from relabel.manifests.records import digest_of
from relabel.manifests.reuse import stage_digests
from relabel.manifests.rows import open_run_input, read_chunks
from relabel.manifests.run import RunLabels, open_run_labels, own_columns, read_labels

# ------------------------------------------------------------------------------
# Which labels of `route` are right: those whose nodes are gold's, or those that several runs agree on.


NO_GOLD, OTHER_THAN_GOLD, NOT_AGREED = "without_gold", "other_than_gold", "not_agreed"


@dataclass(frozen=True)
class Acceptance:
    """What makes a label right.

    Args:
        gold: file with gold nodes.
        by, doc: its columns of query and document.
        agree: of the runs, how many must answer with the same nodes; None: more than half, or any where gold decides.
    """

    gold: str | None = None
    by: str = "query_id"
    doc: str = "doc_id"
    agree: int | None = None

    def agreeing(self, num_runs: int) -> int | None:
        """How many of so many runs must agree; None where that is not asked for.

        Raises:
            UsageError: nothing says which labels are right, or so many can't agree.
        """
        if num_runs == 1:
            if self.agree is not None:
                raise UsageError(f"--agree {self.agree}: there is one run. Name several of one input, of other seeds.")
            if self.gold is None:
                raise UsageError(
                    "trajectories: which labels are right? Name gold nodes with --gold FILE, or several runs of one "
                    "input, which must --agree."
                )
            return None
        most = num_runs // 2 + 1
        if self.agree is None:
            return most if self.gold is None else None
        if not most <= self.agree <= num_runs:
            raise UsageError(
                f"--agree {self.agree} of {num_runs} runs: want more than half of them, {most} to {num_runs}, so that "
                "no two answers are agreed on."
            )
        return self.agree


def check_several(runs: Sequence[RunLabels]) -> None:
    """Runs that agree say something where they were drawn apart, over the same rows.

    Raises:
        UsageError: two are one job, or would be one but for the seed, without anything being drawn.
        InputError: they labelled different inputs.
    """
    seen: dict[str, str] = {}
    for run in runs:
        if changed := changed_files(runs[0].plan.files, tuple(run.plan.files)):
            raise InputError(f"{runs[0].root} and {run.root} labelled different inputs ({changed[0]}).")
        parts = run.plan.parts
        unseeded = {key: value for key, value in parts["engine"].items() if key != "seed"}
        is_drawn = parts["labeler"]["temperature"] > 0
        key = run.plan.fingerprint if is_drawn else digest_of({**recipe_parts(parts), "engine": unseeded})
        if (before := seen.setdefault(key, run.root)) is not run.root:
            raise UsageError(
                f"{before} and {run.root} agree with themselves: they are one job, or at temperature 0 differ by "
                "the seed alone. Label again with `labeler.temperature` above 0 and an `engine.seed` for each."
            )


@dataclass(frozen=True)
class GoldNodes:
    """The gold nodes of a run's rows, joined as `relabel evaluate` does: by row of its own input, else by pair."""

    gold: Gold
    pairs: PairGrades | None

    @classmethod
    def of(cls, run: RunLabels, path: str, by: str, doc: str, storage: Storage) -> GoldNodes:
        """
        Raises:
            InputError: gold can't be read, or names no answering nodes.
        """
        options = JudgingOptions(path, by=by, doc=doc, allow_partial=True)
        labels = label_set(run)
        gold = gold_of(labels, options, storage)
        pairs = load_pairs([labels], options, storage) if gold.by_row is None else None
        if ANSWER_IDS not in (gold.columns if pairs is None else pairs.columns):
            raise InputError(
                f"{path}: no column `{ANSWER_IDS}`, lists of the ids of nodes that answer. Routes are held against "
                "that."
            )
        return cls(gold, pairs)

    def columns(self, labels: pa.Table) -> tuple[list[list[int] | None], list[list[int] | None]]:
        """Of each label, the nodes that answer and those to be unfolded; None where gold does not say."""
        if self.pairs is None:
            rows: pa.Array = labels["row_id"].combine_chunks()
            found = {name: column.take(rows) for name, column in self.gold.columns.items()}
        else:
            ids = (labels[name].combine_chunks().cast(pa.large_binary()) for name in ("query_id", "doc_id"))
            place_N = self.pairs.places(*ids)
            found = {name: taken(column, place_N) for name, column in self.pairs.columns.items()}
        nothing = pa.nulls(labels.num_rows)
        answers, expands = (found.get(name, nothing).to_pylist() for name in (ANSWER_IDS, EXPAND_IDS))
        return answers, expands


def why_not_gold(label: Mapping[str, list[int]], answers: list[int] | None, expands: list[int] | None) -> str | None:
    """Why a label is not gold's; None where it answers with gold's nodes, no more and no fewer, and unfolds no heading
    beyond gold's, where gold has headings.
    """
    if answers is None:
        return NO_GOLD
    is_right = set(label["answer_ids"]) == set(answers)
    if expands is not None:
        is_right = is_right and set(label["expand_ids"]) <= set(expands)
    return None if is_right else OTHER_THAN_GOLD


class Votes:
    """How many runs answer each row with which nodes.

    Args:
        least: runs that must agree; more than half of them, so that no two answers are agreed.
    """

    def __init__(self, runs: Sequence[RunLabels], least: int) -> None:
        self._least = least
        self._counts: Counter[tuple[int, frozenset[int]]] = Counter()
        for run in runs:
            for file in run.labels:
                table = read_labels(run.folder, file, ["row_id", "answer_ids"])
                answers = map(frozenset, table["answer_ids"].to_pylist())
                self._counts.update(zip(table["row_id"].to_pylist(), answers, strict=True))

    def are_for(self, row_id: int, answer_ids: Sequence[int]) -> bool:
        """Whether enough runs answer a row with these nodes."""
        return self._counts[row_id, frozenset(answer_ids)] >= self._least


def rows_kept(table: pa.Table, gold: GoldNodes | None, votes: Votes | None, left_out: Counter[str]) -> np.ndarray:
    """Places of the labels to keep; why the others are not is counted."""
    size = table.num_rows
    wanted = gold.columns(table) if gold is not None else ([None] * size, [None] * size)
    rows = table.select(["row_id", "answer_ids", "expand_ids"]).to_pylist()
    kept = []
    for place, (row, answers, expands) in enumerate(zip(rows, *wanted, strict=True)):
        reason = why_not_gold(row, answers, expands) if gold is not None else None
        if reason is None and votes is not None and not votes.are_for(row["row_id"], row["answer_ids"]):
            reason = NOT_AGREED
        if reason is None:
            kept.append(place)
        else:
            left_out[reason] += 1
    return np.array(kept, dtype=np.int64)


# ------------------------------------------------------------------------------
# A run's labels beside the pairs that they are of, walked through the labeler that made them once more.


def open_labeler(run: RunLabels, storage: Storage) -> Labeler:
    """The labeler of a run, with its options, asking what it asked then.

    Raises:
        ConfigError: there is no such labeler here, or its options are none.
        InputError: its labels don't tell what was answered, or it asks otherwise now: templates were edited, moved
            away, or are those of another version of relabel; or the run is a merge of runs that asked differently.
    """
    parts, name = run.plan.parts, run.plan.facts.labeler.name
    if run.plan.facts.kind == "student" or not (kind := labeler_class(name)).recalls:
        raise InputError(
            f"{run.root}: labels of `{name}` don't hold all that was answered, so there are no trajectories in it. "
            "Those of `route` do."
        )
    if "merged_recipes" in parts:
        raise InputError(f"{run.root}: merged of runs that asked in different ways. Convert each of them.")
    manifest = load_manifest(run.folder.store)
    options = options_of_run(parts, manifest.spec if manifest is not None else {}, where=run.root)
    with local_templates(options, storage) as held:
        labeler = kind(held)
    now, was = labeler.template_digests, parts.get("templates") or {}
    if now != was or stage_digests(labeler.probe()) != parts.get("stages"):
        changed = sorted(file for file in {*now, *was} if now.get(file) != was.get(file))
        what = f"the templates {', '.join(changed)} are not" if changed else "this version of relabel asks not"
        raise InputError(
            f"{run.root}: its prompts can't be made again: {what} what was asked then. Restore them, use the relabel "
            "that labelled it, or label again."
        )
    return labeler


class Replays:
    """Exchanges of a run's labels, in the order of its rows, with memory for the labels alone.

    Args:
        labels: by row id, the ones that are wanted: their columns.

    Attributes:
        num_failed: labels that did not lead back to themselves.
    """

    def __init__(self, run: RunLabels, labeler: Labeler, labels: Mapping[int, Mapping[str, Any]], storage: Storage):
        self._run, self._labeler, self._labels = run, labeler, labels
        self._storage = storage
        self._names = ["grade", *(column.name for column in labeler.columns)]
        self.num_failed = 0

    def __iter__(self) -> Iterator[tuple[Pair, list[Exchange]]]:
        """
        Raises:
            InputError, ManifestError: the input is gone, or is not what was labelled.
        """
        for pair in self._pairs():
            label = self._labels[pair.row_id]
            try:
                yield pair, replay(self._labeler, pair, {name: label[name] for name in self._names})
            except VerdictError:
                self.num_failed += 1

    def _pairs(self) -> Iterator[Pair]:
        run, store = self._run, self._run.folder.store
        reads = self._labeler.reads
        dataset = open_run_input(run.root, run.plan, self._storage, reads=reads)
        wanted = np.fromiter(self._labels, dtype=np.int64)
        for shard in run.plan.shards:
            rows = [np.intersect1d(chunk, wanted).tolist() for chunk in chunk_row_ids(store, shard)]
            pending = [number for number, found in enumerate(rows) if found]
            row_ids = shard_row_ids(store, shard) if shard.row_ids is not None else None
            only = {number: set(rows[number]) for number in pending}
            for chunk in read_chunks(dataset, shard, row_ids, pending, wanted=only):
                yield from chunk.pairs


# ------------------------------------------------------------------------------
# Runs of `route` as chats to train a router on: a line for each prompt that was asked, with what is right to answer.
#
# The form is that of TRL's `SFTTrainer`, conversational prompt and completion: `{"prompt": [{"role": "system",
# "content": …}, {"role": "user", "content": …}], "completion": [{"role": "assistant", "content": …}]}`.


NOT_REPLAYED, NO_ACTION, REPEATED = "not_replayed", "without_action", "repeated"
REASONS = {
    NO_GOLD: "labels of rows that gold does not know",
    OTHER_THAN_GOLD: "labels with other nodes than gold's",
    NOT_AGREED: "labels that too few runs agree on",
    NOT_REPLAYED: "labels that don't lead to the same prompts and actions again",
    NO_ACTION: "steps without a legal action",
    REPEATED: "steps that are there already, with the same prompt and completion",
}
"""Why something is left out, in words; the order is that in which it is looked for."""


@dataclass
class TrajectoryConversion:
    """What a conversion came to.

    Args:
        labels: of all runs; `kept` of them are right and could be replayed.
        written: lines, one for each of their steps that is not left out.
        left_out: labels, then steps, by reason.
        quarantined: rows of the runs without a label.
    """

    sources: list[str]
    target: str
    target_format: str
    gold: str | None
    agree: int | None
    labels: int = 0
    kept: int = 0
    written: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0
    notes: list[str] = field(default_factory=list)


def convert_trajectories(
    sources: Sequence[str],
    target: str,
    storage: Storage,
    acceptance: Acceptance,
    *,
    allow_partial: bool = False,
    force: bool = False,
) -> TrajectoryConversion:
    """Write the trajectories of runs into one file, which is there whole or not at all.

    Raises:
        UsageError: nothing says which labels are right, runs that can't agree, or the target is there already.
        InputError: a source is no run of a labeler with trajectories, its prompts or its input are not what they were,
            or gold is off.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: the target can't be written; what was there before stays.
    """
    agree = acceptance.agreeing(len(sources))
    gold = () if acceptance.gold is None else (acceptance.gold,)
    check_free(target, (*sources, *gold), storage, force=force)
    for source in sources:
        if not is_run(source, storage):
            raise InputError(f"{source}: no run's output folder. Trajectories are those of runs of `route`.")
    runs = [open_run_labels(source, storage, allow_partial=allow_partial) for source in sources]
    labelers = [open_labeler(run, storage) for run in runs]
    for run in runs:
        check_free(target, [file.path for file in run.plan.files], storage, force=True)
    if agree is not None:
        check_several(runs)
    golds = [
        None if acceptance.gold is None else GoldNodes.of(run, acceptance.gold, acceptance.by, acceptance.doc, storage)
        for run in runs
    ]
    votes = None if agree is None else Votes(runs, agree)
    found = TrajectoryConversion([*sources], target, "trajectories", acceptance.gold, agree)
    left_out: Counter[str] = Counter()
    with written(target, storage) as path, path.open("wb") as file:
        lines = _Lines(file)
        for run, labeler, gold_nodes in zip(runs, labelers, golds, strict=True):
            found.notes += run.notes
            found.quarantined += run.num_quarantined
            found.labels += sum(one.rows for one in run.labels)
            found.kept += _write(run, labeler, gold_nodes, votes, storage, lines, left_out)
    found.written = lines.num_written
    found.left_out = {reason: left_out[reason] for reason in REASONS if left_out[reason]}
    return found


def _write(
    run: RunLabels,
    labeler: Labeler,
    gold: GoldNodes | None,
    votes: Votes | None,
    storage: Storage,
    lines: _Lines,
    left_out: Counter[str],
) -> int:
    """Write the trajectories of a run's labels that are right; how many labels there were such."""
    kept: dict[int, dict[str, Any]] = {}
    names = ["row_id", "query_id", "doc_id", "grade", *own_columns(run.plan.parts)]
    for one in run.labels:
        table = read_labels(run.folder, one, names)
        for row in table.take(rows_kept(table, gold, votes, left_out)).to_pylist():
            kept[row["row_id"]] = row
    replays = Replays(run, labeler, kept, storage)
    settings = (run.plan.parts.get("engine") or {}).get("chat_template_kwargs")
    for pair, exchanges in replays:
        for left in lines.add(pair, exchanges, settings):
            left_out[left] += 1
    left_out[NOT_REPLAYED] += replays.num_failed
    return len(kept) - replays.num_failed


class _Lines:
    """The file's lines, each prompt and completion once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._seen = file, set[bytes]()
        self.num_written = 0

    def add(self, pair: Pair, exchanges: Sequence[Exchange], settings: dict[str, Any] | None) -> Iterator[str]:
        """Write a label's steps; why some are left out."""
        for number, (messages, completion) in enumerate(exchanges, start=1):
            if not completion:
                yield NO_ACTION
                continue
            chat: dict[str, Any] = {
                "prompt": [{"role": message.role, "content": message.text} for message in messages],
                "completion": [{"role": "assistant", "content": completion}],
            }
            if settings:
                chat["chat_template_kwargs"] = settings
            digest = hashlib.blake2b(_json(chat), digest_size=16).digest()
            if digest in self._seen:
                yield REPEATED
                continue
            self._seen.add(digest)
            place = {"query_id": pair.query_id, "doc_id": pair.doc_id, "step": number}
            self._file.write(_json({**chat, **place}) + b"\n")
            self.num_written += 1


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
