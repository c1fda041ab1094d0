"""What is said of rows that did not meet gold."""

from __future__ import annotations

from dataclasses import replace

from relabel.jobs.evaluate.judged_options import JudgingOptions
from relabel.jobs.evaluate.results import JudgedCounts
from relabel.manifests.judging.joins import SHOWN, Join
from relabel.manifests.judging.label_sets import LabelSet
from relabel.manifests.judging.pair_grades import PairGrades
from relabel.manifests.metrics.judged import Judged


def nothing_judged(join: Join, pairs: PairGrades | None, options: JudgingOptions) -> str:
    if join.num_gold_null:
        return (
            f"{options.qrels}: all {join.num_gold_null:,} labels that were found there have a null grade; there is "
            "nothing to judge by."
        )
    if not join.num_labels:
        return "no labels: nothing was found to judge."
    assert pairs is not None
    examples = ", ".join(f"({query}, {doc})" for query, doc in pairs.begins[:SHOWN])
    return (
        f"no label has a grade: {join.num_labels:,} labels and {pairs.num_rows:,} qrels were compared by (query_id, "
        f"doc_id). Labels begin with {', '.join(join.label_examples[:SHOWN])}; {options.qrels} with "
        f"{examples or 'nothing, it is empty'}. Do the ids mean the same things? --by and --doc name other columns."
    )


def judged_counts(join: Join, sets: list[LabelSet], pairs: PairGrades | None, judged: Judged) -> JudgedCounts:
    counts = JudgedCounts(
        labels=join.num_labels,
        judged=join.num_judged,
        unjudged=join.num_unjudged,
        gold_null=join.num_gold_null,
        without_label=join.num_without_label,
        quarantined=sum(one.num_quarantined or 0 for one in sets),
        relabelled=join.num_relabelled,
        queries=judged.num_queries,
    )
    if pairs is None:
        return counts
    is_graded_P = pairs.grades.is_valid().to_numpy(zero_copy_only=False)
    return replace(
        counts,
        qrels=len(pairs.keys),
        qrels_repeated=pairs.num_repeated,
        qrels_in_conflict=pairs.num_conflicts,
        qrels_without_label=int((is_graded_P & ~join.is_labelled).sum()),
    )


def join_notes(join: Join, pairs: PairGrades | None, options: JudgingOptions) -> list[str]:
    notes = []
    if join.num_relabelled:
        notes.append(f"judged labels beyond the first of their pair, each judged: {join.num_relabelled:,}")
    if pairs is not None and pairs.num_conflicts:
        rule = (
            "the mean of their grades, rounded, halves up"
            if options.duplicates == "mean"
            else "the first of their grades"
        )
        notes.append(f"pairs whose grades differ, which take {rule}: {pairs.num_conflicts:,}")
    if pairs is not None and pairs.num_null:
        notes.append(f"qrels without a grade, which judge nothing: {pairs.num_null:,}")
    return notes
