"""Trajectories of a pair: replay the asks and answers of a label for training, and merge several samples into one
label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relabel.labelers.registry import Labeler
from relabel.manifests.asks import Distribution, Message
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, Pair

# ------------------------------------------------------------------------------
# What was asked and answered on the way to a label, to train on. There is no second rendering of a prompt: the labeler
# walks once more over the same pair, and is sent the answers that its label tells.


class Exchange(NamedTuple):
    """A prompt as it was asked, and what is to be learned from the answer; `""` for nothing."""

    prompt: tuple[Message, ...]
    completion: str


def replay(labeler: Labeler, pair: Pair, row: Mapping[str, Any]) -> list[Exchange]:
    """The exchanges that led to a label, proved by leading there again.

    Args:
        labeler: one that recalls.
        row: the label's `grade` and the labeler's own columns, all of them.
    Raises:
        VerdictError: they lead elsewhere: pair, prompts or reading are not those of the label.
    """
    walk, found = labeler.label(pair), list[Exchange]()
    try:
        ask = next(walk)
        while True:
            recalled = labeler.recall(row, ask, len(found))
            if recalled.answer.finish != "overlong":
                found.append(Exchange(ask.messages, recalled.completion))
            ask = walk.send(recalled.answer)
    except StopIteration as end:
        if {"grade": end.value.grade, **end.value.columns} != dict(row):
            raise VerdictError("format", "its answers lead to another label") from None
    return found


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
    distribution = mean_distribution([label.distribution for label in labels if label.distribution is not None])
    votes = Counter(label.grade for label in labels if label.grade is not None)
    probs = distribution.probs if distribution else ()
    winner = min(votes, key=lambda grade: (-votes[grade], -probs[grade] if probs else 0.0, grade))
    chosen = next(label for label in labels if label.grade == winner)
    return Label(
        winner, distribution, chosen.columns, chosen.evidence, chosen.intent, chosen.reasoning, list(chosen.flags)
    )


def mean_distribution(distributions: Sequence[Distribution]) -> Distribution | None:
    """Component-wise mean of probabilities and of outside mass; None for none."""
    if not distributions:
        return None
    count = len(distributions)
    probs = tuple(sum(column) / count for column in zip(*(one.probs for one in distributions), strict=True))
    return Distribution(probs, sum(one.outside_mass for one in distributions) / count)
