"""Compares two runs end to end, with gold grades where there are any."""

from __future__ import annotations

from typing import Any

from relabel.jobs.compare.matches import (
    examples,
    how_matched,
    largest_flips,
    match_runs,
    moved_queries,
    open_both,
    summary,
    with_files,
)
from relabel.jobs.compare.results import RunComparison
from relabel.jobs.evaluate.judging import Both, GoldOfBoth
from relabel.jobs.evaluate.sides import JudgingOptions, cut_sets
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale
from relabel.manifests.label_sets import gather, label_set
from relabel.manifests.metrics.comparison import BY_ROW, Labelled, Match, PairedStatistics, paired_rows
from relabel.manifests.plan import recipe_differences
from relabel.manifests.run import RunLabels


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
    """
    runs = open_both(first, second, storage, allow_partial=options.allow_partial)
    ours, theirs = runs
    how, notes = how_matched(ours, theirs)
    sets = with_files(label_set(ours), ours), with_files(label_set(theirs), theirs)
    sides = cut_sets(sets, options.side, storage)
    gold = None if options.qrels is None else GoldOfBoth(list(sets), options, storage)
    if gold is not None:
        check_scale(gold.seen, ours.grades, where=gold.qrels, option="--map")
    labels = (
        gather(sets[0].parts(), grades=ours.grades, where=first),
        gather(sets[1].parts(), grades=ours.grades, where=second),
    )
    match, counts = match_runs(runs, labels, sides, is_same_input=how == BY_ROW)
    if not counts["both"]:
        sides.check()
        raise InputError(
            f"{first} and {second} have no labelled row in common: {counts['labelled_a']:,} and "
            f"{counts['labelled_b']:,} labels were compared by {how}. Did both label the same pairs?"
        )
    rows, query_names = paired_rows(*labels, match, ours.grades)
    statistics = PairedStatistics(rows, len(query_names), ours.grades, depth=depth)
    flips = largest_flips(rows, num_examples)
    change = (rows.scores[1] - rows.scores[0])[flips].tolist()
    shown, more = examples(runs, labels, (match.teacher[flips], match.student[flips]), change, storage)
    num_up, num_down = (int((rows.grades[1 - side] > rows.grades[side]).sum()) for side in (0, 1))
    drawn = {"grades": ours.grades, "resamples": resamples, "seed": seed}
    notes = [*ours.notes, *theirs.notes, *notes, *_notes(counts), *more]
    return RunComparison(
        a=_about(ours),
        b=_about(theirs),
        differences=recipe_differences(ours.plan.parts, theirs.plan.parts),
        matched_by=how,
        grades=ours.grades,
        side=sides.cut,
        counts=counts,
        figures=statistics.figures(resamples=resamples, seed=seed),
        confusion=statistics.counts.by_group.sum(0).tolist(),
        gold=None if gold is None else _by_gold(gold, sets, labels, match, drawn),
        flips={"rows": num_up + num_down, "up": num_up, "down": num_down, "examples": shown},
        queries={
            **summary(statistics.moves),
            "depth": depth,
            "moved_most": moved_queries(statistics.moves, query_names, num_queries),
        },
        resamples=resamples,
        seed=seed,
        notes=notes,
    )


def _by_gold(
    gold: GoldOfBoth, sets: Both, labels: tuple[Labelled, Labelled], match: Match, drawn: dict[str, Any]
) -> dict[str, Any]:
    """Both runs judged, the second minus the first, and who is right alone.

    Raises:
        InputError: no matched row has a grade.
    """
    found, joined_by, golds = gold.compared(sets, labels, match, drawn)
    both = found.against_gold
    assert both is not None
    gold_N = golds.fill_null(-1).to_numpy()
    is_a, is_b = (one.grades[rows] == gold_N for one, rows in zip(labels, (match.teacher, match.student), strict=True))
    return {
        "qrels": gold.qrels,
        "joined_by": joined_by,
        **{name: found.counts[name] for name in ("judged", "unjudged", "gold_null")},
        "queries": both.teacher.num_groups,
        "a": both.teacher,
        "b": both.student,
        "difference": both.difference,
        "only_a_right": int((is_a & ~is_b).sum()),
        "only_b_right": int((~is_a & is_b).sum()),
    }


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
