"""The metrics of `route` (RDR2), in the order in which they are shown; `registry.py` lists them last."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from relabel.manifests.metrics.judged_statistics import JudgedStatistics
from relabel.manifests.metrics.metric import Formula, Measured, Metric, mean, share
from relabel.manifests.metrics.routing import RoutingByRow


def _of_routing(
    value: Callable[[RoutingByRow], np.ndarray | None], formula: Formula = mean
) -> Callable[..., Mapping[str, Measured]]:
    """Measures the mean over rows of what their actions come to."""

    def measure(rows: JudgedStatistics) -> Mapping[str, Measured]:
        value_N = None if rows.routing is None else value(rows.routing)
        return {} if value_N is None else {"": Measured(rows.mean_of_rows(value_N), formula)}

    return measure


ROUTING_METRICS: tuple[Metric, ...] = (
    Metric(
        "answer_f1",
        "answers: F1",
        "higher",
        "rows",
        _of_routing(lambda found: found.answer_f1),
        "`route`: of `answer_ids` and `gold_answer_ids`, over rows where gold has any; 0 where the label has none",
        aliases=("ans_f1",),
        is_drawn=True,
    ),
    Metric(
        "expand_precision",
        "headings: precision",
        "higher",
        "rows",
        _of_routing(lambda found: found.expand_precision, share),
        "share of `expand_ids` in `gold_expand_ids`, over rows where gold has any; 0 where the label has none",
        aliases=("exp_pre",),
        is_drawn=True,
    ),
    Metric(
        "refusal_accuracy",
        "refusals: accuracy",
        "higher",
        "rows",
        _of_routing(lambda found: found.refusal, share),
        "of rows where gold has neither, the share whose label has neither",
        aliases=("ref_acc",),
        is_drawn=True,
    ),
    Metric(
        "expelled_mean",
        "expelled actions, mean",
        "lower",
        "rows",
        _of_routing(lambda found: found.expelled),
        "lines a row that were meant as an action and not legal, where `expelled: keep` keeps them",
        aliases=("xpl",),
    ),
    Metric(
        "collapse_rate",
        "collapse rate",
        "lower",
        "rows",
        _of_routing(lambda found: found.collapsed, share),
        "share of rows without any line that is an action, legal or not",
        aliases=("col",),
        is_drawn=True,
    ),
)
