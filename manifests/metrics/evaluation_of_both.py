"""Two sets of labels by the same gold, and the difference of their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relabel.manifests.memory import release_unused
from relabel.manifests.metrics.bootstrap import paired_bootstrap
from relabel.manifests.metrics.evaluation import Evaluation, baselines_of, check_samples, evaluation_of
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.judged_statistics import JudgedStatistics
from relabel.manifests.metrics.metric import NOTHING_DRAWN, MetricSet, finite
from relabel.manifests.metrics.registry import METRICS


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


def evaluate_both(
    first: Judged, second: Judged, *, resamples: int = 1000, seed: int = 7, pass_at: Sequence[int] = ()
) -> tuple[Evaluation, Evaluation, dict[str, Difference]]:
    """Judge two label sets of the same rows: the figures of each, and second minus first with the interval of a paired
    bootstrap.

    An AUC by distributions and one by written grades are not subtracted: they are not the same figure.

    Args:
        first, second: the same rows in the same order, so that gold grades and queries are equal.
        pass_at: see `evaluate`; of the sets that have samples.
    """
    check_samples([first, second], pass_at)
    found = [JudgedStatistics(judged, pass_at) for judged in (first, second)]
    ours, theirs = (MetricSet(METRICS, one, num_groups=one.num_groups) for one in found)
    release_unused()
    paired = paired_bootstrap(
        ours.resampled, theirs.resampled, num_groups=ours.num_groups, resamples=resamples, seed=seed
    )
    both = [name for name in ours.values if name in theirs.values]
    alike = [name for name in both if ours.is_by_grade(name) == theirs.is_by_grade(name)]
    differences = {}
    for name in alike:
        low, high, num_undefined = paired.difference.get(name, NOTHING_DRAWN)
        step = theirs.values[name] - ours.values[name]
        differences[name] = Difference(finite(step), finite(low), finite(high), num_undefined)
    beside = baselines_of(first)
    judged = [
        evaluation_of(one, metrics, intervals, None, beside)
        for one, metrics, intervals in zip(found, (ours, theirs), (paired.first, paired.second), strict=True)
    ]
    if alike != both:
        judged[1].notes.append(
            "one set's AUC is by distributions, the other's by written grades: they are not subtracted"
        )
    return judged[0], judged[1], differences
