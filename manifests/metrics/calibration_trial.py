"""What calibration on one half of the judged rows does on the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from relabel.manifests.errors import InputError
from relabel.manifests.metrics.bootstrap import bootstrap
from relabel.manifests.metrics.calibration import Method, fit_calibrator, split_groups
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.judged_statistics import JudgedStatistics
from relabel.manifests.metrics.metric import MetricSet, MetricValue
from relabel.manifests.metrics.registry import CALIBRATION
from relabel.manifests.records import LEFT_OUT


@dataclass(frozen=True, kw_only=True)
class HalfSize:
    """One half of what `--calibrate` split; `queries` is None where it split single rows."""

    queries: int | None = field(default=None, metadata=LEFT_OUT)
    rows: int

    @property
    def groups(self) -> int:
        """Queries, or rows."""
        return self.rows if self.queries is None else self.queries


@dataclass(frozen=True)
class CalibrationTrial:
    """What a calibrator fitted on one half does for the other.

    Args:
        parameters: of `Calibrator`.
        split_by: `queries` or `rows`.
        before, after: those of `CALIBRATION`, of the half held out.
    """

    method: Method
    parameters: dict[str, object]
    split_by: str
    fitted_on: HalfSize
    held_out: HalfSize
    before: dict[str, MetricValue]
    after: dict[str, MetricValue]


def calibration_trial(found: JudgedStatistics, method: Method, resamples: int, seed: int) -> CalibrationTrial:
    """Fit on half the groups, judge on the other half, before and after."""
    judged, has_N = found.judged, found.has_probs
    unit = "queries" if found.is_by_query else "rows"
    present, group_of_N = np.unique(found.group_N[has_N], return_inverse=True)
    if judged.probs is None or len(present) < 2:
        raise InputError(
            f"--calibrate {method}: needs distributions (`probs`) of at least two {unit}; half fit, half are held out."
        )
    probs_NK, gold_N = judged.probs[has_N], judged.gold[has_N]
    is_fitted_N = split_groups(len(present), seed)[group_of_N]
    calibrator = fit_calibrator(method, probs_NK[is_fitted_N], gold_N[is_fitted_N])
    held_NK, held_gold_N = probs_NK[~is_fitted_N], gold_N[~is_fitted_N]
    held_groups, held_group_N = np.unique(group_of_N[~is_fitted_N], return_inverse=True)

    def size(groups: int, rows: int) -> HalfSize:
        return HalfSize(queries=groups if found.is_by_query else None, rows=rows)

    def figures(probs_NK: np.ndarray) -> dict[str, MetricValue]:
        no_docs = np.zeros_like(held_gold_N)
        held = Judged(
            judged.grades, held_gold_N, held_gold_N, held_group_N, len(held_groups), no_docs, probs_NK, None, None
        )
        metrics = MetricSet(CALIBRATION, JudgedStatistics(held), num_groups=len(held_groups))
        return metrics.with_intervals(
            bootstrap(metrics.resampled, num_groups=len(held_groups), resamples=resamples, seed=seed)
        )

    return CalibrationTrial(
        method,
        calibrator.parameters,
        unit,
        fitted_on=size(len(present) - len(held_groups), int(is_fitted_N.sum())),
        held_out=size(len(held_groups), len(held_gold_N)),
        before=figures(held_NK),
        after=figures(calibrator.apply(held_NK)),
    )
