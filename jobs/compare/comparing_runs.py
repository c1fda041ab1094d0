"""Two runs compared from end to end: which rows are the same, how grades shift, which queries move, and who is right by
gold grades.
"""

from __future__ import annotations

from typing import Any

from relabel.jobs.compare.flips import LargestFlips, examples
from relabel.jobs.compare.gold import JudgedMatches
from relabel.jobs.compare.matches import MatchCounts, matches, paired_rows
from relabel.jobs.compare.query_list import MovedQueries, summary
from relabel.jobs.compare.results import ComparedRun, Flips, GradeTests, QueriesMoved, RunComparison
from relabel.jobs.compare.runs import how_matched, open_both, spill_rows
from relabel.jobs.evaluate.judged_options import JudgingOptions
from relabel.jobs.evaluate.sides import Sides
from relabel.jobs.files.scratch import scratch_folder
from relabel.manifests.errors import InputError
from relabel.manifests.extras import require
from relabel.manifests.judging.label_sets import label_set
from relabel.manifests.judging.run_labels import RunLabels
from relabel.manifests.metrics.agreement import EXTRA
from relabel.manifests.metrics.paired_labels import PairedSums
from relabel.manifests.metrics.paired_tests import bowker, stuart_maxwell
from relabel.manifests.runs.recipes import recipe_differences
from relabel.manifests.storage.context import Storage


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
    counts, sums = MatchCounts(), PairedSums(ours.grades, depth=depth)
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
    shown, more = examples(flips.rows(), ours, theirs, storage)
    notes = [*ours.notes, *theirs.notes, *notes, *_notes(counts), *more]
    confusion = sums.confusion
    return RunComparison(
        a=_about(ours),
        b=_about(theirs),
        differences=recipe_differences(ours.plan.parts, theirs.plan.parts),
        matched_by=how,
        grades=ours.grades,
        side=sides.cut,
        counts=counts.named(),
        figures=sums.figures(resamples=resamples, seed=seed),
        confusion=confusion.tolist(),
        tests=GradeTests(stuart_maxwell(confusion), bowker(confusion)),
        gold=None if gold is None else gold.result(num_matched, resamples=resamples, seed=seed),
        flips=Flips(flips.up + flips.down, flips.up, flips.down, shown),
        queries=QueriesMoved(**vars(summary(sums.moves)), depth=depth, moved_most=moved.rows()),
        resamples=resamples,
        seed=seed,
        notes=notes,
    )


def _names(polars: Any, frame: Any) -> list[str]:
    """The ids of a frame's queries, in the order of their numbers."""
    return list(frame.group_by("query", maintain_order=True).agg(polars.col("query_id").first())["query_id"])


def _about(run: RunLabels) -> ComparedRun:
    plan = run.plan
    return ComparedRun(
        path=run.root,
        name=plan.name,
        labeler=plan.facts.labeler.name,
        model=plan.facts.model,
        fingerprint=plan.fingerprint,
        labelled=sum(file.rows for file in run.labels),
        quarantined=run.num_quarantined,
    )


def _notes(counts: MatchCounts) -> list[str]:
    found = counts.named()
    notes = []
    for letter, only, quarantined in (
        ("A", found.only_a, found.quarantined_a_only),
        ("B", found.only_b, found.quarantined_b_only),
    ):
        if only:
            notes.append(f"rows that only run {letter} has, left out: {only:,}")
        if quarantined:
            notes.append(f"rows that run {letter} alone has in quarantine, left out: {quarantined:,}")
    if found.quarantined_elsewhere_absent:
        notes.append(f"rows in quarantine in one run and absent from the other: {found.quarantined_elsewhere_absent:,}")
    if found.repeated:
        notes.append(
            "pairs that occur several times in both runs are matched in order; rows beyond the first: "
            f"{found.repeated:,}"
        )
    return notes


def _nothing_matched(first: RunLabels, second: RunLabels, how: str, counts: MatchCounts) -> str:
    found = counts.named()
    return (
        f"{first.root} and {second.root} have no labelled row in common: {found.labelled_a:,} and "
        f"{found.labelled_b:,} labels were "
        f"compared by {how}. Did both label the same pairs?"
    )
