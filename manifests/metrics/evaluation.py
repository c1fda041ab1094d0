"""All figures of judged labels, each with its 95 % interval: which are computed, over what, and in which order they are shown.

Letters: N rows, G groups (queries, or rows where there is no query), K grades.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from manifests.errors import InputError
from manifests.metrics.agreement import agreement_figures, confusion_by_group, count_figures, pass_at_k
from manifests.metrics.bootstrap import Interval, Statistic, bootstrap, of_ratio, of_sums, paired_bootstrap
from manifests.metrics.calibration import (
    BINS,
    Method,
    at_least,
    brier_rows,
    calibration_statistics,
    ece,
    fit_calibrator,
    reliability_by_group,
    split_groups,
)
from manifests.metrics.judged import Judged
from manifests.metrics.ranking import DEPTH, auc, auc_statistic, cut_names, rank_queries

NOTHING_DRAWN = Interval(math.nan, math.nan, 0)


@dataclass(frozen=True)
class Figure:
    """One number and its interval.

    Args:
        value: None where the figure is not defined (0/0).
        low, high: 95 % percentile bootstrap bounds; None without resamples or with fewer than two groups.
        over: how many rows or queries it is the figure of.
        unit: `rows` or `queries`.
        undefined_resamples: resamples without a value, left out of the interval.
        is_by_grade: it ranks rows by the grade that was written, for want of a distribution. Such an AUC is lower than the same labeler's
            by distributions: grades tie what probabilities tell apart.
    """

    value: float | None
    low: float | None
    high: float | None
    over: int
    unit: str
    undefined_resamples: int
    is_by_grade: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What is known of judged labels.

    Args:
        confusion: rows gold, columns label.
        resampled: `queries` or `rows`; `num_groups` of them.
        reliability: by bin of confidence, rows, mean confidence and accuracy; None without distributions.
        calibration: of `--calibrate`, on held-out groups; None if not asked for.
    """

    grades: int
    figures: dict[str, Figure]
    confusion: list[list[int]]
    resampled: str
    num_groups: int
    reliability: list[dict[str, float]] | None
    calibration: dict[str, Any] | None
    notes: list[str]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """A figure of one label set minus the same figure of another, judged on the same rows and resampled together.

    Args:
        value: None where either figure is not defined.
        low, high: 95 % percentile bootstrap bounds of the difference.
    """

    value: float | None
    low: float | None
    high: float | None
    undefined_resamples: int


class Sheet:
    """Figures and the statistics behind their intervals, collected before one bootstrap serves them all."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[float, int, str]] = {}
        self.statistics: list[Statistic] = []
        self.by_grade: set[str] = set()
        """Figures that rank by the written grade."""
        self.notes: list[str] = []

    def add(self, values: Mapping[str, float], over: int, unit: str, *statistics: Statistic) -> None:
        """Figures over so many rows or queries, with the statistics that give them anew for a resample."""
        self.values.update({name: (value, over, unit) for name, value in values.items()})
        self.statistics += statistics

    def figures(self, intervals: Mapping[str, Interval]) -> dict[str, Figure]:
        """Every figure with its interval."""
        found = {}
        for name, (value, over, unit) in self.values.items():
            low, high, num_undefined = intervals.get(name, NOTHING_DRAWN)
            found[name] = Figure(_number(value), _number(low), _number(high), over, unit, num_undefined, name in self.by_grade)
        return found


@dataclass(frozen=True)
class _Collected:
    """All figures that the rows allow, before any interval."""

    sheet: Sheet
    confusion: list[list[int]]
    reliability: list[dict[str, float]] | None
    group_N: np.ndarray  # noqa: N815
    num_groups: int
    resampled: str


def evaluate(
    judged: Judged, *, resamples: int = 1000, seed: int = 7, calibrate: Method | None = None, pass_at: Sequence[int] = ()
) -> Evaluation:
    """Compute every figure that the rows allow.

    Args:
        judged: at least one row.
        seed: of the resamples, and of the split that `calibrate` makes.
        pass_at: the k of pass@k, each 1 or more; by default the powers of two and the number of samples that every sampled row has.
    Raises:
        InputError: `calibrate` without distributions, or with fewer than two groups that have some; a k without so many samples.
        MissingExtraError: a package of the extra `eval` is absent.
    """
    check_samples([judged], pass_at)
    found = _collect(judged, pass_at)
    intervals = bootstrap(found.sheet.statistics, num_groups=found.num_groups, resamples=resamples, seed=seed, width=len(judged.gold))
    calibration = None if calibrate is None else _calibration(judged, judged.has_probs, found.group_N, calibrate, resamples, seed)
    return _evaluation(judged, found, intervals, calibration)


def evaluate_both(
    first: Judged, second: Judged, *, resamples: int = 1000, seed: int = 7, pass_at: Sequence[int] = ()
) -> tuple[Evaluation, Evaluation, dict[str, Difference]]:
    """Judge two label sets of the same rows: the figures of each, and second minus first with the interval of a paired bootstrap.

    An AUC by distributions and one by written grades are not subtracted: they are not the same figure.

    Args:
        first, second: the same rows in the same order, so that gold grades and queries are equal.
        pass_at: see `evaluate`; of the sets that have samples.
    """
    check_samples([first, second], pass_at)
    ours, theirs = _collect(first, pass_at), _collect(second, pass_at)
    paired = paired_bootstrap(
        ours.sheet.statistics,
        theirs.sheet.statistics,
        num_groups=ours.num_groups,
        resamples=resamples,
        seed=seed,
        width=len(first.gold),
    )
    differences = {}
    if ours.sheet.by_grade != theirs.sheet.by_grade:
        theirs.sheet.notes.append("one set's AUC is by distributions, the other's by written grades: they are not subtracted")
    for name, (value, _, _) in ours.sheet.values.items():
        if name in theirs.sheet.values and (name in ours.sheet.by_grade) == (name in theirs.sheet.by_grade):
            low, high, num_undefined = paired.difference.get(name, NOTHING_DRAWN)
            step = theirs.sheet.values[name][0] - value
            differences[name] = Difference(_number(step), _number(low), _number(high), num_undefined)
    return _evaluation(first, ours, paired.first, None), _evaluation(second, theirs, paired.second, None), differences


def _evaluation(judged: Judged, found: _Collected, intervals: Mapping[str, Interval], calibration: dict[str, Any] | None) -> Evaluation:
    return Evaluation(
        judged.grades,
        found.sheet.figures(intervals),
        found.confusion,
        found.resampled,
        found.num_groups,
        found.reliability,
        calibration,
        found.sheet.notes,
    )


def check_samples(sets: Sequence[Judged], pass_at: Sequence[int]) -> None:
    """Every set that has samples has enough for each k, and one at least has some.

    Raises:
        InputError: names the k, and the samples that there are.
    """
    if not pass_at:
        return
    fewest = [judged.fewest_samples for judged in sets if judged.fewest_samples]
    if not fewest:
        listed = ",".join(map(str, pass_at))
        raise InputError(f"--pass-at {listed}: no judged label holds samples. Label with `labeler.samples`, or leave the option out.")
    beyond = [k for k in pass_at if k > min(fewest)]
    if beyond:
        raise InputError(f"--pass-at {beyond[0]}: a judged label has {min(fewest)} samples, and of so many no {beyond[0]} can be drawn.")


def _collect(judged: Judged, pass_at: Sequence[int]) -> _Collected:
    rows = len(judged.gold)
    is_by_query = judged.queries is not None
    group_N = judged.queries if judged.queries is not None else np.arange(rows)
    num_groups = judged.num_queries if is_by_query else rows
    sheet = Sheet()
    counts_GKK = confusion_by_group(judged.gold, judged.labels, group_N, num_groups=num_groups, grades=judged.grades)
    sheet.add(agreement_figures(judged.gold, judged.labels, grades=judged.grades), rows, "rows", of_sums(counts_GKK, count_figures))
    has_N = judged.has_probs
    reliability = None
    if has_N.any():
        reliability = _add_distributions(sheet, judged, has_N, group_N, num_groups)
        if not has_N.all():
            without = f"{int((~has_N).sum()):,} of {rows:,} judged labels have no distribution"
            sheet.notes.append(f"{without}: AUC, ECE and Brier are over those that have one; ranking takes the label for a score")
    else:
        score_N = judged.labels.astype(np.float64)
        _add_auc(sheet, [score_N] * (judged.grades - 1), judged.gold, group_N, is_by_grade=True)
        sheet.notes.append(
            "no label has a distribution: AUC and ranking take the written grade for a score, whose many ties cost AUC; there is no ECE "
            "and no Brier score"
        )
    if is_by_query:
        _add_ranking(sheet, judged, group_N, num_groups)
    else:
        sheet.notes.append("labels name no query: rows are resampled as if independent, and nothing is ranked")
    _add_samples(sheet, judged, group_N, num_groups, pass_at)
    if num_groups < 2:
        sheet.notes.append("one query or row alone: there is nothing to resample, so no intervals")
    return _Collected(sheet, counts_GKK.sum(0).tolist(), reliability, group_N, num_groups, "queries" if is_by_query else "rows")


def _add_distributions(sheet: Sheet, judged: Judged, has_N: np.ndarray, group_N: np.ndarray, num_groups: int) -> list[dict[str, float]]:
    """AUC at each cut, ECE and Brier, over the rows that have a distribution; returns the reliability table."""
    assert judged.probs is not None
    probs_NK, gold_N, kept_N = judged.probs[has_N], judged.gold[has_N], group_N[has_N]
    above_JN = np.round(at_least(probs_NK), 9).T  # sums in float64 of what was stored in float32: 1e-9 keeps equal scores equal
    _add_auc(sheet, list(above_JN), gold_N, kept_N, is_by_grade=False)
    values = {"ece": ece(probs_NK, gold_N), "brier": float(brier_rows(probs_NK, gold_N).mean())}
    sheet.add(values, len(gold_N), "rows", *calibration_statistics(probs_NK, gold_N, kept_N, num_groups=num_groups))
    return reliability_table(probs_NK, gold_N)


def _add_auc(sheet: Sheet, scores: Sequence[np.ndarray], gold_N: np.ndarray, group_N: np.ndarray, *, is_by_grade: bool) -> None:
    """AUC at each cut, by a score for each."""
    for cut, (name, score_N) in enumerate(zip(cut_names(len(scores) + 1), scores, strict=True)):
        is_relevant_N = gold_N > cut
        figure = f"auc_{name}"
        sheet.add({figure: auc(score_N, is_relevant_N)}, len(gold_N), "rows", auc_statistic(figure, score_N, is_relevant_N, group_N))
        if is_by_grade:
            sheet.by_grade.add(figure)


def reliability_table(probs_NK: np.ndarray, gold_N: np.ndarray) -> list[dict[str, float]]:
    """Bins of confidence that hold a row: their edges, rows, mean confidence and accuracy."""
    bins_B3 = reliability_by_group(probs_NK, gold_N, np.zeros(len(gold_N), dtype=np.int64), num_groups=1)[0]
    return [
        {"from": number / BINS, "to": (number + 1) / BINS, "rows": int(count), "confidence": total / count, "accuracy": correct / count}
        for number, (count, total, correct) in enumerate(bins_B3.tolist())
        if count
    ]


def _add_ranking(sheet: Sheet, judged: Judged, group_N: np.ndarray, num_groups: int) -> None:
    score_N = np.round(judged.scores, 6)
    found = rank_queries(group_N, judged.docs, score_N, judged.gold, num_queries=num_groups)
    for name, value_G in ((f"ndcg@{DEPTH}", found.ndcg), ("kendall_tau", found.tau), ("bad_case_rate", found.bad_case)):
        is_defined_G = ~np.isnan(value_G)
        filled_G = np.where(is_defined_G, value_G, 0.0)
        over = int(is_defined_G.sum())
        mean = float(filled_G.sum() / over) if over else math.nan
        sheet.add({name: mean}, over, "queries", of_ratio(name, filled_G, is_defined_G))
    short = int((np.bincount(group_N, minlength=num_groups) < DEPTH).sum())
    if short:
        sheet.notes.append(f"queries with fewer than {DEPTH} judged rows, whose top {DEPTH} is all they have: {short:,} of {num_groups:,}")
    without = int(np.isnan(found.ndcg).sum())
    if without:
        sheet.notes.append(f"queries without a relevant document, left out of nDCG: {without:,}")
    flat = int(np.isnan(found.tau).sum())
    if flat:
        sheet.notes.append(f"queries with equal scores or equal grades throughout, left out of Kendall tau: {flat:,}")


def _add_samples(sheet: Sheet, judged: Judged, group_N: np.ndarray, num_groups: int, pass_at: Sequence[int]) -> None:
    """pass@k for the k that were asked for, else for k = 1, 2, 4, … and the number of samples that every sampled row has."""
    if judged.num_samples is None or judged.num_correct is None:
        return
    has_N = judged.num_samples > 0
    most = judged.fewest_samples
    over_G = np.bincount(group_N[has_N], minlength=num_groups)
    for k in sorted(set(pass_at) or {most, *(2**power for power in range(most.bit_length()) if 2**power <= most)}):
        passed_N = pass_at_k(judged.num_correct[has_N], judged.num_samples[has_N], k)
        total_G = np.bincount(group_N[has_N], passed_N, minlength=num_groups)
        name = f"pass@{k}"
        sheet.add({name: float(passed_N.mean())}, int(has_N.sum()), "rows", of_ratio(name, total_G, over_G))
    if not has_N.all():
        sheet.notes.append(f"judged labels without samples, left out of pass@k: {int((~has_N).sum()):,}")


def _calibration(judged: Judged, has_N: np.ndarray, group_N: np.ndarray, method: Method, resamples: int, seed: int) -> dict[str, Any]:
    """Fit on half the groups, judge on the other half, before and after."""
    unit = "queries" if judged.queries is not None else "rows"
    if judged.probs is None or len(np.unique(group_N[has_N])) < 2:
        raise InputError(f"--calibrate {method}: needs distributions (`probs`) of at least two {unit}; half fit, half are held out.")
    present, group_of_N = np.unique(group_N[has_N], return_inverse=True)
    probs_NK, gold_N = judged.probs[has_N], judged.gold[has_N]
    is_fitted_N = split_groups(len(present), seed)[group_of_N]
    calibrator = fit_calibrator(method, probs_NK[is_fitted_N], gold_N[is_fitted_N])
    held_gold_N = gold_N[~is_fitted_N]
    held_groups, held_group_N = np.unique(group_of_N[~is_fitted_N], return_inverse=True)
    found: dict[str, Any] = {
        "method": method,
        "parameters": calibrator.parameters,
        "split_by": unit,
        "fitted_on": {unit: len(present) - len(held_groups), "rows": int(is_fitted_N.sum())},
        "held_out": {unit: len(held_groups), "rows": len(held_gold_N)},
    }
    for when, held_NK in (("before", probs_NK[~is_fitted_N]), ("after", calibrator.apply(probs_NK[~is_fitted_N]))):
        sheet = Sheet()
        values = {"ece": ece(held_NK, held_gold_N), "brier": float(brier_rows(held_NK, held_gold_N).mean())}
        statistics = calibration_statistics(held_NK, held_gold_N, held_group_N, num_groups=len(held_groups))
        sheet.add(values, len(held_gold_N), "rows", *statistics)
        intervals = bootstrap(sheet.statistics, num_groups=len(held_groups), resamples=resamples, seed=seed, width=len(held_gold_N))
        figures = sheet.figures(intervals)
        found[when] = {name: asdict(figure) for name, figure in figures.items()}
    return found


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
