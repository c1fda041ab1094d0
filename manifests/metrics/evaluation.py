"""All figures of judged labels, each with its 95 % interval: which are computed, over what, and in which order they are
shown.

Letters: N rows, G groups (queries, or rows where there is no query), K grades.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relabel.manifests.errors import InputError
from relabel.manifests.memory import release_unused
from relabel.manifests.metrics.baselines import Baselines, baselines
from relabel.manifests.metrics.bootstrap import Interval, bootstrap
from relabel.manifests.metrics.calibration import BINS, Method
from relabel.manifests.metrics.calibration_trial import CalibrationTrial, calibration_trial
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.judged_statistics import JudgedStatistics
from relabel.manifests.metrics.metric import MetricSet, MetricValue
from relabel.manifests.metrics.query_metrics import QUERY_METRICS
from relabel.manifests.metrics.ranking import DEPTH
from relabel.manifests.metrics.registry import METRICS


@dataclass(frozen=True)
class ReliabilityBin:
    """Rows whose confidence lies between two edges, its mean, and the share whose most probable grade is gold."""

    from_: float
    to: float
    rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Evaluation:
    """What is known of judged labels.

    Args:
        confusion: rows gold, columns label.
        resampled: `queries` or `rows`; `num_groups` of them.
        reliability: bins of confidence that hold a row; None without distributions.
        calibration: of `--calibrate`, on held-out groups; None if not asked for.
        baselines: of the same rows.
    """

    grades: int
    figures: dict[str, MetricValue]
    confusion: list[list[int]]
    resampled: str
    num_groups: int
    reliability: list[ReliabilityBin] | None
    calibration: CalibrationTrial | None
    notes: list[str]
    baselines: Baselines


def evaluate(
    judged: Judged,
    *,
    resamples: int = 1000,
    seed: int = 7,
    calibrate: Method | None = None,
    pass_at: Sequence[int] = (),
) -> Evaluation:
    """Compute every figure that the rows allow.

    Args:
        judged: at least one row.
        seed: of the resamples, and of the split that `calibrate` makes.
        pass_at: the k of pass@k, each 1 or more; by default the powers of two and the number of samples that every
            sampled row has.
    Raises:
        InputError: `calibrate` without distributions, or with fewer than two groups that have some; a k without so many
            samples.
        MissingExtraError: a package of the extra `eval` is absent.
    """
    check_samples([judged], pass_at)
    release_unused()  # what the rows were read and joined with
    found = JudgedStatistics(judged, pass_at)
    metrics = MetricSet(METRICS, found, num_groups=found.num_groups)
    release_unused()
    intervals = bootstrap(metrics.resampled, num_groups=found.num_groups, resamples=resamples, seed=seed)
    calibration = None if calibrate is None else calibration_trial(found, calibrate, resamples, seed)
    return evaluation_of(found, metrics, intervals, calibration, baselines_of(judged))


def baselines_of(judged: Judged) -> Baselines:
    """The baselines of judged rows."""
    return baselines(
        judged.gold,
        judged.queries,
        judged.docs,
        grades=judged.grades,
        num_queries=judged.num_queries,
        lexical_N=judged.lexical,
    )


def evaluation_of(
    found: JudgedStatistics,
    metrics: MetricSet,
    intervals: Mapping[str, Interval],
    calibration: CalibrationTrial | None,
    beside: Baselines,
) -> Evaluation:
    return Evaluation(
        found.judged.grades,
        metrics.with_intervals(intervals),
        found.counts.by_group.sum(0).tolist(),
        "queries" if found.is_by_query else "rows",
        found.num_groups,
        None if found.reliability is None else reliability_table(found.reliability.by_group.sum(0)),
        calibration,
        [*_notes(found), *_left_out(metrics)],
        beside,
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
        raise InputError(
            f"--pass-at {listed}: no judged label holds samples. Label with `labeler.samples`, or leave the option out."
        )
    beyond = [k for k in pass_at if k > min(fewest)]
    if beyond:
        raise InputError(
            f"--pass-at {beyond[0]}: a judged label has {min(fewest)} samples, and of so many no {beyond[0]} can be "
            "drawn."
        )


def reliability_table(bins_B3: np.ndarray) -> list[ReliabilityBin]:
    """Bins of confidence that hold a row."""
    return [
        ReliabilityBin(number / BINS, (number + 1) / BINS, int(count), total / count, correct / count)
        for number, (count, total, correct) in enumerate(bins_B3.tolist())
        if count
    ]


def _notes(found: JudgedStatistics) -> list[str]:
    """What of the rows is in no metric, or not in all."""
    rows, groups = len(found.judged.gold), found.num_groups
    num_without = rows - int(found.has_probs.sum())
    notes = []
    if num_without == rows:
        notes.append(
            "no label has a distribution: AUC and ranking take the written grade for a score, whose many ties cost "
            "AUC; there is no ECE and no Brier score"
        )
    elif num_without:
        without = f"{num_without:,} of {rows:,} judged labels have no distribution"
        notes.append(f"{without}: AUC, ECE and Brier are over those that have one; ranking takes the label for a score")
    if found.ranking is None:
        notes.append("labels name no query: rows are resampled as if independent, and nothing is ranked")
    else:
        short = int((np.bincount(found.group_N, minlength=groups) < DEPTH).sum())
        if short:
            notes.append(
                f"queries with fewer than {DEPTH} judged rows, whose top {DEPTH} is all they have: {short:,} of "
                f"{groups:,}"
            )
        without_relevant, flat = (int(np.isnan(value_G).sum()) for value_G in (found.ranking.ndcg, found.ranking.tau))
        if without_relevant:
            notes.append(f"queries without a relevant document, left out of nDCG: {without_relevant:,}")
        if flat:
            notes.append(f"queries with equal scores or equal grades throughout, left out of Kendall tau: {flat:,}")
    for sums in found.passes.values():
        if sums.over < rows:
            notes.append(f"judged labels without samples, left out of pass@k: {rows - sums.over:,}")
        break
    if groups < 2:
        notes.append("one query or row alone: there is nothing to resample, so no intervals")
    return notes


def _left_out(metrics: MetricSet) -> list[str]:
    """Queries that metrics of whole queries are not over."""
    left = {metric.title: metrics.num_groups - metrics.over(metric.name) for metric in metrics.of(QUERY_METRICS)}
    return [f"queries without a value, left out of {title}: {count:,}" for title, count in left.items() if count]
