"""Which labels of `route` are right: those whose nodes are gold's, or those that several runs agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from relabel.jobs.evaluate.judged_options import Gold, JudgingOptions
from relabel.jobs.evaluate.judging import gold_of, load_pairs
from relabel.manifests.digests import digest_of
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.inputs.changed_files import changed_files
from relabel.manifests.judging.further_columns import ANSWER_IDS, EXPAND_IDS
from relabel.manifests.judging.label_sets import label_set
from relabel.manifests.judging.pair_grades import PairGrades, taken
from relabel.manifests.judging.run_labels import RunLabels
from relabel.manifests.runs.label_files import read_labels
from relabel.manifests.runs.recipes import recipe_parts
from relabel.manifests.storage.context import Storage

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
