"""What figures come to, in a sentence: whether labels beat a baseline, and whether two sets differ.

Something is said to be shown where a 95 % interval lies wholly on one side; a baseline counts as a fixed number.
"""

from __future__ import annotations

from collections.abc import Mapping

from relabel.manifests.metrics.baselines import Baselines
from relabel.manifests.metrics.evaluation_of_both import Difference
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.ranking import DEPTH
from relabel.manifests.metrics.registry import title_of

HEADLINES = ("accuracy", f"ndcg@{DEPTH}")


def baseline_text(found: Baselines, figure: str) -> str:
    """The baselines that bound a figure; empty where none does."""
    return ", ".join(f"{value:.4f} {kind}" for kind, value in found.of(figure).items())


def level_text(figures: Mapping[str, MetricValue], found: Baselines, *, who: str = "") -> str:
    """Where a set lies beside the best baseline of each headline figure; empty where it has none.

    Args:
        who: begins the sentence, where there are several sets.
    """
    names = {
        "constant": f"the constant grade {found.grade}",
        "random": "a random order",
        "lexical": "shared words alone",
    }
    parts = []
    for name in HEADLINES:
        figure, bounds = figures.get(name), found.of(name)
        if figure is None or figure.value is None or not bounds:
            continue
        kind = max(bounds, key=lambda one: bounds[one])
        if figure.low is None or figure.high is None:
            interval, place = "no interval", "beside"
        else:
            interval = f"{figure.low:.3f} to {figure.high:.3f}"
            place = (
                "above" if figure.low > bounds[kind] else "below" if figure.high < bounds[kind] else "not shown to beat"
            )
        value = f"{title_of(name)} {figure.value:.3f} ({interval}, {figure.over:,} {figure.unit})"
        parts.append(f"{value} is {place} {names[kind]} with {bounds[kind]:.3f}")
    return f"{who}{'; '.join(parts)}" if parts else ""


def difference_text(who: str, steps: Mapping[str, Difference]) -> str:
    """Whether two sets differ in the headline figures; empty where they have none.

    Args:
        who: is measured against whom; begins the sentence.
    """
    said: dict[str, list[str]] = {}
    for name in HEADLINES:
        step = steps.get(name)
        if step is None or step.value is None:
            continue
        text = f"{title_of(name)} {step.value:+.3f}"
        if step.low is None or step.high is None:
            said.setdefault("no interval, so no difference is shown", []).append(text)
            continue
        verdict = "better" if step.low > 0 else "worse" if step.high < 0 else "no difference is shown"
        said.setdefault(verdict, []).append(f"{text}, {step.low:+.3f} to {step.high:+.3f}")
    return (
        f"{who}: " + "; ".join(f"{verdict}: {' and '.join(parts)}" for verdict, parts in said.items()) if said else ""
    )
