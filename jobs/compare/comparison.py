"""Compares two runs end to end, with gold grades where there are any."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.jobs.compare.matches import (
    LargestFlips,
    MovedQueries,
    StateCounts,
    examples,
    how_matched,
    matches,
    open_both,
    paired_rows,
    row_counts,
    spill_rows,
    summary,
)
from relabel.jobs.compare.results import RunComparison
from relabel.jobs.evaluate.judging import gold_of, load_pairs
from relabel.jobs.evaluate.sides import Gold, JudgingOptions, Sides, lexical_scores
from relabel.jobs.files import scratch_folder
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale, grades_seen
from relabel.manifests.label_sets import LabelSet, label_set
from relabel.manifests.metrics.comparison import BY_IDS, PairedRows, PairedSums
from relabel.manifests.metrics.evaluation import evaluate_both
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.measures import EXTRA
from relabel.manifests.plan import recipe_differences
from relabel.manifests.process import require
from relabel.manifests.run import RunLabels
from relabel.manifests.schemas import codes_of, ids_of

# ------------------------------------------------------------------------------
# Gold grades of two runs: which matched rows have one, and who is right where the runs differ.


class JudgedMatches:
    """Collects the matched rows that have a gold grade; memory grows with these.

    Args:
        sets: the two runs.
        options: what the command was given.
    Raises:
        InputError: qrels are off, or grades are off the runs' scale.
    """

    def __init__(
        self, polars: Any, sets: tuple[LabelSet, LabelSet], grades: int, options: JudgingOptions, storage: Storage
    ) -> None:
        self._polars, self._grades, self._qrels = polars, grades, str(options.qrels)
        self._first, self._storage = sets[0], storage
        golds: tuple[Gold, Gold] = (gold_of(sets[0], options, storage), gold_of(sets[1], options, storage))
        self.num_seen = self.num_null = 0
        self._parts: list[tuple[Any, ...]] = []
        by_row = next(
            ((letter, gold) for letter, gold in zip("ab", golds, strict=True) if gold.by_row is not None), None
        )
        if by_row is not None:
            letter, gold = by_row
            assert gold.by_row is not None
            self.joined_by, self._key = gold.how, [f"row_{letter}"]
            found, keys = gold.by_row, (pa.array(range(len(gold.by_row)), pa.int64()),)
        else:
            pairs = load_pairs(sets, options, storage)
            self.joined_by, self._key = BY_IDS, ["query_id", "doc_id"]
            found, keys = pairs.grades, tuple(ids.cast(pa.large_string()) for ids in pairs.pair_ids)
        self._held = polars.from_arrow(pa.table([*keys, found], [*self._key, "gold"]))
        check_scale(grades_seen(found), grades, where=self._qrels, option="--map")

    def add(self, frame: Any, rows: PairedRows) -> None:
        """Take in a frame of `matches`, and the same rows as arrays."""
        polars = self._polars
        graded = self._held.with_columns(is_known=polars.lit(value=True))
        found = frame.select(self._key).join(graded, on=self._key, how="left", maintain_order="left")
        gold, is_known = found.select("gold", "is_known")
        is_known_N = is_known.fill_null(value=False).to_numpy()
        is_judged_N = gold.is_not_null().to_numpy()
        self.num_seen += int(is_known_N.sum())
        self.num_null += int((is_known_N & ~is_judged_N).sum())
        places = np.flatnonzero(is_judged_N)
        if not len(places):
            return
        self._parts.append(
            (
                gold.to_numpy()[places].astype(np.int64),
                frame["row_a"].gather(places).to_numpy(),
                frame["query_id"].gather(places).to_list(),
                [rows.docs[place] for place in places],
                [side[places] for side in rows.grades],
                [side[places] for side in rows.probs],
            )
        )

    def result(self, matched: int, *, resamples: int, seed: int) -> dict[str, Any]:
        """Both runs judged, the second minus the first, and who is right alone.

        Raises:
            InputError: no matched row has a grade.
        """
        if not self._parts:
            raise InputError(
                f"none of the {matched:,} rows that both runs labelled has a grade in {self._qrels}, joined by "
                f"{self.joined_by}. Do the ids mean the same things? --by and --doc name other columns."
            )
        golds, row_ids, queries, docs, grades, probs = zip(*self._parts, strict=True)
        gold_N = np.concatenate(golds)
        query_N, query_names = codes_of(ids_of(itertools.chain(*queries)))
        doc_N, _ = codes_of(ids_of(itertools.chain(*docs)))
        num_queries = len(query_names)
        judged, notes = [], list[str]()
        lexical = lexical_scores(self._first, np.concatenate(row_ids), self._storage, notes)
        for side in (0, 1):
            probs_NK = np.concatenate([part[side] for part in probs])
            labels_N = np.concatenate([part[side] for part in grades])
            has_probs = not np.isnan(probs_NK).all()
            judged.append(
                Judged(
                    self._grades,
                    gold_N,
                    labels_N,
                    query_N,
                    num_queries,
                    doc_N,
                    probs_NK if has_probs else None,
                    None,
                    None,
                    lexical=lexical,
                )
            )
        first, second, difference = evaluate_both(*judged, resamples=resamples, seed=seed)
        first.notes.extend(notes)
        is_right = [one.labels == gold_N for one in judged]
        return {
            "qrels": self._qrels,
            "joined_by": self.joined_by,
            "judged": len(gold_N),
            "unjudged": matched - self.num_seen,
            "gold_null": self.num_null,
            "queries": num_queries,
            "a": first,
            "b": second,
            "difference": difference,
            "only_a_right": int((is_right[0] & ~is_right[1]).sum()),
            "only_b_right": int((~is_right[0] & is_right[1]).sum()),
        }


def compare_runs(
    first: str,
    second: str,
    options: JudgingOptions,
    storage: Storage,
    *,
    num_examples: int,
    num_queries: int,
    depth: int,
    resamples: int,
    seed: int,
) -> RunComparison:
    """Compare two finished runs, A and B; differences are B minus A.

    Args:
        options: of gold grades; `qrels` None where nobody judges.
        num_examples, num_queries: flips and moved queries to show.
        depth: of the top of a query that is compared.
    Raises:
        UsageError: one run twice.
        InputError: not a run, different scales, no row in common, or qrels that are off.
        ManifestError: a run is unfinished, over its limit or damaged.
        MissingExtraError: a package of the extra `eval` is absent.
    """
    polars = require("polars", extra=EXTRA, purpose="relabel compare")
    ours, theirs = open_both(first, second, storage, allow_partial=options.allow_partial)
    how, notes = how_matched(ours, theirs)
    both = label_set(ours), label_set(theirs)
    sides = Sides(both, options.side, storage)
    gold = None
    if options.qrels is not None:
        gold = JudgedMatches(polars, both, ours.grades, options, storage)
    counts, sums = StateCounts(), PairedSums(ours.grades, depth=depth)
    flips, moved = LargestFlips(polars, num_examples), MovedQueries(num_queries)
    num_matched = 0
    with scratch_folder("relabel-compare-") as scratch:
        spills = [spill_rows(run, scratch / f"{letter}.parquet", sides) for run, letter in ((ours, "a"), (theirs, "b"))]
        for frame in matches(polars, spills[0], spills[1], how, counts, scratch / "buckets"):
            if not frame.height:
                continue
            rows = paired_rows(polars, frame, ours.grades)
            num_matched += frame.height
            moved.add(_names(polars, frame), sums.add(rows))
            flips.add(frame)
            if gold is not None:
                gold.add(frame, rows)
    if not num_matched:
        sides.check()
        raise InputError(_nothing_matched(ours, theirs, how, counts))
    shown, more = examples(flips.rows, ours, theirs, storage)
    named = row_counts(counts)
    notes = [*ours.notes, *theirs.notes, *notes, *_notes(named), *more]
    return RunComparison(
        a=_about(ours),
        b=_about(theirs),
        differences=recipe_differences(ours.plan.parts, theirs.plan.parts),
        matched_by=how,
        grades=ours.grades,
        side=sides.cut,
        counts=named,
        figures=sums.figures(resamples=resamples, seed=seed),
        confusion=sums.confusion.tolist(),
        gold=None if gold is None else gold.result(num_matched, resamples=resamples, seed=seed),
        flips={"rows": flips.up + flips.down, "up": flips.up, "down": flips.down, "examples": shown},
        queries={**summary(sums.moves), "depth": depth, "moved_most": moved.rows},
        resamples=resamples,
        seed=seed,
        notes=notes,
    )


def _names(polars: Any, frame: Any) -> list[str]:
    """The ids of a frame's queries, in the order of their numbers."""
    return list(frame.group_by("query", maintain_order=True).agg(polars.col("query_id").first())["query_id"])


def _about(run: RunLabels) -> dict[str, Any]:
    plan = run.plan
    return {
        "path": run.root,
        "name": plan.name,
        "labeler": plan.facts.labeler.name,
        "model": plan.facts.model,
        "fingerprint": plan.fingerprint,
        "labelled": sum(file.rows for file in run.labels),
        "quarantined": run.num_quarantined,
    }


def _notes(counts: dict[str, int]) -> list[str]:
    texts = {
        "only_a": "rows that only run A has, left out",
        "quarantined_a_only": "rows that run A alone has in quarantine, left out",
        "only_b": "rows that only run B has, left out",
        "quarantined_b_only": "rows that run B alone has in quarantine, left out",
        "quarantined_elsewhere_absent": "rows in quarantine in one run and absent from the other",
        "repeated": "pairs that occur several times in both runs are matched in order; rows beyond the first",
    }
    return [f"{text}: {counts[name]:,}" for name, text in texts.items() if counts[name]]


def _nothing_matched(first: RunLabels, second: RunLabels, how: str, counts: StateCounts) -> str:
    found = row_counts(counts)
    return (
        f"{first.root} and {second.root} have no labelled row in common: {found['labelled_a']:,} and "
        f"{found['labelled_b']:,} labels were compared by {how}. Did both label the same pairs?"
    )
