"""Sufficient statistics: what each query adds, so that a metric of resampled queries needs no row again.

A resample is a vector of weights, how often each query was drawn. A metric is a function of weighted sums over queries
(`Sums`), and these are one matrix product for all resamples. AUC alone compares rows of different queries, and keeps
them in order (`Order`); a maximum (`Largest`) looks at which queries were drawn.

Letters: N rows, G groups (queries, or rows where there is no query), K grades, R resamples.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

BLOCK, BLOCKS = 24, 64
"""Rows in a block and blocks in a slab of `Order`."""


@dataclass(frozen=True, eq=False)
class Sums:
    """What each group adds.

    Args:
        by_group: [G, ...].
        over: how many rows or queries they are sums of.
    """

    by_group: np.ndarray
    over: int


class Order:
    """Rows in the order of a score, each relevant or not: what AUC of weighted groups is computed from.

    The order never changes, so it is found once. Others below every relevant row, and relevant rows above every other,
    count by their group alone. Rows between are laid out in slabs of BLOCKS blocks of BLOCK rows; place by place, all
    blocks of a slab and all resamples are added up together, in 16 bits. That is a quarter of the time of a running sum
    a resample (2026-11-22).

    Args:
        score_N: higher is more relevant.
        is_relevant_N: bool.
        group_N: 0..G-1.
    """

    def __init__(self, score_N: np.ndarray, is_relevant_N: np.ndarray, group_N: np.ndarray, *, num_groups: int) -> None:
        self.over = len(score_N)
        # the relevant after others of the same score: a tie counts as won, at first
        place_N = 2 * np.unique(score_N, return_inverse=True)[1] + is_relevant_N
        order = np.argsort(place_N)
        is_relevant_N, group_N, tie_N = is_relevant_N[order], group_N[order], place_N[order] // 2
        low = int(np.argmax(np.append(is_relevant_N, True)))
        top = max(low, len(order) - int(np.argmax(np.append(~is_relevant_N[::-1], True))))
        self._low_G, self._top_G = (
            np.bincount(part, minlength=num_groups).astype(np.float64) for part in (group_N[:low], group_N[top:])
        )
        nobody = num_groups  # weighs nothing
        between = slice(low, top)
        self._relevant, self._other = (
            _slabs(np.where(is_one_N, group_N, nobody)[between], nobody) for is_one_N in (is_relevant_N, ~is_relevant_N)
        )
        is_mixed = (np.bincount(tie_N, is_relevant_N) > 0) & (np.bincount(tie_N, ~is_relevant_N) > 0)
        tied = np.flatnonzero(is_mixed[tie_N])
        self._tied_group = group_N[tied]
        # others and the relevant of a tie take turns
        self._tied_start = np.flatnonzero(np.diff(2 * tie_N[tied] + is_relevant_N[tied], prepend=-1))

    def weighted(self, weight_RG: np.ndarray, weight_GR: np.ndarray) -> np.ndarray:
        """Pairs of a relevant row and another in the right order (ties a half), relevant rows, other rows: float64 [R,
        3].

        Args:
            weight_RG: whole numbers.
            weight_GR: the same as `places_of` lays them out.
        """
        won_R, relevant_R = np.zeros((2, len(weight_RG)))
        other_R, top_R = weight_RG @ self._low_G, weight_RG @ self._top_G
        relevant_PBR, other_PBR = np.empty((2, BLOCK, BLOCKS, len(weight_RG)), dtype=weight_GR.dtype)
        for relevant_slab, other_slab in zip(self._relevant, self._other, strict=True):
            for slab, weight_PBR in ((relevant_slab, relevant_PBR), (other_slab, other_PBR)):
                weight_GR.take(slab, axis=0, out=weight_PBR, mode="clip")  # `raise` goes through a copy
            for below_BR, so_far_BR in itertools.pairwise(other_PBR):
                np.add(so_far_BR, below_BR, out=so_far_BR)
            inside_BR = np.einsum("pbr,pbr->br", other_PBR, relevant_PBR)
            all_BR = relevant_PBR.sum(0, dtype=weight_GR.dtype)
            before_BR = np.cumsum(other_PBR[-1], axis=0, dtype=np.float64) - other_PBR[-1] + other_R
            won_R += np.einsum("br,br->r", before_BR, all_BR) + inside_BR.sum(0, dtype=np.float64)
            other_R = before_BR[-1] + other_PBR[-1, -1]
            relevant_R += all_BR.sum(0, dtype=np.float64)
        won_R += top_R * other_R - self._tied(weight_RG) / 2
        return np.stack([won_R, relevant_R + top_R, other_R], axis=1)

    @staticmethod
    def area(won_3: np.ndarray) -> np.ndarray:
        """AUC of what `weighted` gives; NaN where only one kind is there."""
        return np.asarray(won_3[..., 0] / (won_3[..., 1] * won_3[..., 2]))

    def _tied(self, weight_RG: np.ndarray) -> np.ndarray:
        """Pairs of a relevant row and another with the same score: float64 [R]."""
        if not len(self._tied_group):
            return np.zeros(len(weight_RG))
        sums = [np.add.reduceat(weight_G.take(self._tied_group), self._tied_start) for weight_G in weight_RG]
        return np.array([one[0::2] @ one[1::2] for one in sums])


def places_of(weight_RG: np.ndarray) -> np.ndarray:
    """Weights as `Order` reads them: [G + 1, R], the last group weighs nothing; of 16 bits if no block can come to
    more.
    """
    # within a block the relevant times the others below them is at most a quarter of the block's weight, squared
    kind = np.int16 if (BLOCK * weight_RG.max(initial=0)) ** 2 / 4 < 2**15 else np.int64
    weight_GR = np.zeros((weight_RG.shape[1] + 1, len(weight_RG)), dtype=kind)
    weight_GR[:-1] = weight_RG.astype(kind).T
    return weight_GR


def _slabs(group_N: np.ndarray, nobody: int) -> np.ndarray:
    """Groups of rows as [slab, place, block], filled up with `nobody`: int32, which is half the memory."""
    padded = np.append(group_N, np.full(-len(group_N) % (BLOCK * BLOCKS), nobody)).astype(np.int32)
    return np.ascontiguousarray(padded.reshape(-1, BLOCKS, BLOCK).transpose(0, 2, 1))


class Largest:
    """The largest value of the groups that are drawn.

    Args:
        value_G: NaN where a group has none.
    """

    def __init__(self, value_G: np.ndarray) -> None:
        self.over = int((~np.isnan(value_G)).sum())
        self._group = np.argsort(-value_G)[: self.over]  # NaN comes last
        self._value = np.append(value_G[self._group], np.nan)

    def weighted(self, weight_RG: np.ndarray, weight_GR: np.ndarray) -> np.ndarray:
        """Float64 [R], NaN where no group with a value is drawn. `weight_GR` is not needed."""
        is_drawn_RG = np.ones((len(weight_RG), self.over + 1), dtype=bool)
        is_drawn_RG[:, :-1] = weight_RG[:, self._group] > 0
        return np.asarray(self._value[is_drawn_RG.argmax(1)])


Statistic = Sums | Order | Largest


def mean_of_queries(value_G: np.ndarray) -> Sums:
    """The mean of a value that each query has, or has not (NaN)."""
    is_defined_G = ~np.isnan(value_G)
    return Sums(np.stack([np.where(is_defined_G, value_G, 0.0), is_defined_G], axis=1), int(is_defined_G.sum()))


def mean_of_rows(value_N: np.ndarray, group_N: np.ndarray, num_groups: int) -> Sums:
    """The mean of a value that each row has, or has not (NaN)."""
    has_N = ~np.isnan(value_N)
    group_N = group_N[has_N]
    total_G = np.bincount(group_N, value_N[has_N], minlength=num_groups)
    return Sums(np.stack([total_G, np.bincount(group_N, minlength=num_groups)], axis=1), len(group_N))
