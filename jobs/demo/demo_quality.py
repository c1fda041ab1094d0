"""How good each model of a demo that trains is, by the author's grades of pairs that nothing was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from relabel.jobs.demo.demo_steps import JUDGED
from relabel.jobs.evaluate.judged_options import JudgingOptions
from relabel.jobs.evaluate.judging import judge
from relabel.manifests.metrics.evaluation import evaluate
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.storage.context import Storage

CALLED = dict(zip(JUDGED, ("trained teacher", "model as it was", "student"), strict=True))
FIGURES = ("accuracy", "auc_0/12", "kappa_quadratic")


class Quality(NamedTuple):
    """Figures of one set of labels, with 95 % intervals over queries."""

    labels: str
    pairs: int
    queries: int
    figures: dict[str, MetricValue]


def qualities(root: Path) -> list[Quality]:
    """Of the model as it was, of the teacher and of the student, over the same pairs: what the step `evaluate` says.

    Args:
        root: the demo's folder, its steps done.
    """
    found = []
    for name in sorted(JUDGED, key=lambda name: name != "untrained"):
        options = JudgingOptions(qrels=str(root / "held_out.parquet"))
        result = evaluate(judge((str(root / name),), options, Storage()).judged, resamples=1000, seed=7)
        figures = {figure: result.figures[figure] for figure in FIGURES if figure in result.figures}
        found.append(Quality(CALLED[name], next(iter(figures.values())).over, result.num_groups, figures))
    return found
