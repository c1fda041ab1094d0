"""Several samples of a pair merged into one label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from relabel.manifests.asks import Distribution
from relabel.manifests.labels import Label

# ------------------------------------------------------------------------------
# S trajectories of one pair become one label: the mean of their distributions and the vote of their grades.


def merge_samples(labels: Sequence[Label]) -> Label:
    """One label from several.

    The grade is the most frequent one; among equally frequent ones that with the larger mean probability, then the
    lower. Everything else (own columns, evidence, intent, reasoning) is that of the first trajectory that voted for it,
    so that a label's parts fit together.

    Args:
        labels: at least one, each with a grade; their distributions, where present, are over the same grades.
    Source:
        R3A (methods, section 1): with S samples, the mean of the S distributions, and the vote.
    """
    given = [label.distribution for label in labels if label.distribution is not None]
    distribution = mean_distribution(given) if given else None
    votes = Counter(label.grade for label in labels if label.grade is not None)
    probs = distribution.probs if distribution else ()
    winner = min(votes, key=lambda grade: (-votes[grade], -probs[grade] if probs else 0.0, grade))
    chosen = next(label for label in labels if label.grade == winner)
    return Label(
        winner, distribution, chosen.columns, chosen.evidence, chosen.intent, chosen.reasoning, list(chosen.flags)
    )


def mean_distribution(distributions: Sequence[Distribution]) -> Distribution:
    """Component-wise mean of probabilities and of outside mass, of one distribution or more."""
    count = len(distributions)
    probs = tuple(sum(column) / count for column in zip(*(one.probs for one in distributions), strict=True))
    return Distribution(probs, sum(one.outside_mass for one in distributions) / count)
