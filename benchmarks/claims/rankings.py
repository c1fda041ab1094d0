"""nDCG@10 of rankings made here over the pools of DL 2019 to 2021, by humans and by 29 published judges.

The rankings are those of `benchmarks/systems_coverage.py`.

Letters: S systems, P pairs of systems, Q queries, R resamples, X any leading axes.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.claims.page import resampled
from benchmarks.systems_coverage import NDCG, SHOWN, Collection, load_collections


@cache
def collections(folder: Path) -> list[Collection]:
    """The three years."""
    return load_collections(folder)


@dataclass(frozen=True)
class Judged:
    """How one judge and the humans see some pairs of systems: mean differences in nDCG@10.

    Args:
        humans, judge: [P].
        humans_resampled, judge_resampled: the same of each resample of queries, [R, P].
    """

    name: str
    humans: np.ndarray
    judge: np.ndarray
    humans_resampled: np.ndarray
    judge_resampled: np.ndarray


def judged(folder: Path, kind: str) -> list[Judged]:
    """Each judge of each year, with the pairs of a kind of `KINDS`."""
    found = []
    for collection in collections(folder):
        human_SQ = collection.figures["human"][NDCG]
        num_queries = human_SQ.shape[1]
        weight_RQ = resampled(collection.year, num_queries) / num_queries
        for judge in collection.judges:
            pairs = np.array(collection.pairs(kind, judge))
            human_PQ = difference(human_SQ, pairs)
            judge_PQ = difference(collection.figures[judge][NDCG], pairs)
            one = Judged(
                name=f"{collection.year} {judge}",
                humans=human_PQ.mean(1),
                judge=judge_PQ.mean(1),
                humans_resampled=weight_RQ @ human_PQ.T,
                judge_resampled=weight_RQ @ judge_PQ.T,
            )
            found.append(one)
    return found


def difference(figure_SQ: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """The second system less the first, [P, Q]."""
    return figure_SQ[pairs[:, 1]] - figure_SQ[pairs[:, 0]]


ROUNDING = 1e-12
"""Means that differ by less are equal."""


def sign(value_X: np.ndarray) -> np.ndarray:
    """-1, 0 or 1."""
    return np.sign(np.where(np.abs(value_X) < ROUNDING, 0.0, value_X))


def kept(human_XP: np.ndarray, judge_XP: np.ndarray) -> np.ndarray:
    """Of the pairs that differ by `SHOWN` or more for humans, the share that the judge has in the same order, [X]."""
    differs_XP = np.abs(human_XP) >= SHOWN - ROUNDING
    same_XP = differs_XP & (sign(human_XP) == sign(judge_XP))
    return same_XP.sum(-1) / differs_XP.sum(-1)


def tau(human_XP: np.ndarray, judge_XP: np.ndarray) -> np.ndarray:
    """Kendall's tau-b over all pairs of some systems, [X]."""
    human_sign_XP = sign(human_XP)
    judge_sign_XP = sign(judge_XP)
    agreed_X = (human_sign_XP * judge_sign_XP).sum(-1)
    return agreed_X / np.sqrt(np.abs(human_sign_XP).sum(-1) * np.abs(judge_sign_XP).sum(-1))
