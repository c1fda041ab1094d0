"""Tests of two label sets over the same rows: do they err equally often (McNemar), does one grade higher
(Stuart–Maxwell), do grades change one way (Bowker)?

Each takes rows for independent, which rows of one query are not: a p-value here is the least that chance explains. The
paired bootstrap over queries (`bootstrap.py`) makes no such assumption.

Letters: K grades; counts have a row a grade of the first set, a column a grade of the second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from relabel.manifests.extras import require

EXACT_BELOW = 25
"""Discordant rows up to which the binomial's own tail is taken instead of χ²."""
_EXTRA, _PURPOSE = "eval", "relabel compare"


class PairedTest(NamedTuple):
    """What a test came to.

    Args:
        statistic: χ²; None for an exact test.
        df: degrees of freedom; None for an exact test.
        p: 1.0 where nothing differs.
    """

    method: str
    statistic: float | None
    df: int | None
    p: float


def mcnemar(only_first: int, only_second: int) -> PairedTest:
    """Whether two sets are right equally often.

    Args:
        only_first, only_second: rows where that set alone is right.
    Source:
        McNemar 1947; the binomial's two tails below 25 discordant rows, else χ² with Edwards' continuity correction
        (1948).
    """
    stats = require("scipy.stats", extra=_EXTRA, purpose=_PURPOSE)
    discordant = only_first + only_second
    if discordant < EXACT_BELOW:
        p = float(stats.binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0
        return PairedTest("McNemar, exact binomial", None, None, p)
    statistic = (abs(only_first - only_second) - 1) ** 2 / discordant
    return PairedTest("McNemar, χ² with continuity correction", statistic, 1, float(stats.chi2.sf(statistic, 1)))


def bowker(counts_KK: np.ndarray) -> PairedTest:
    """Whether each change of grade is as frequent as its reverse.

    Source:
        Bowker 1948: Σ_{i<j} (n_ij - n_ji)² / (n_ij + n_ji); one degree of freedom for each pair of grades that occurs.
    """
    counts_KK = np.asarray(counts_KK, dtype=np.float64)
    above = np.triu_indices(len(counts_KK), 1)
    there, back = counts_KK[above], counts_KK.T[above]
    occurs = there + back > 0
    statistic = float(((there - back)[occurs] ** 2 / (there + back)[occurs]).sum())
    return _chi2("Bowker", statistic, int(occurs.sum()))


def stuart_maxwell(counts_KK: np.ndarray) -> PairedTest:
    """Whether both sets give each grade equally often; with two grades this is McNemar's test without a correction.

    Source:
        Stuart 1955, Maxwell 1970: dᵀ S⁻¹ d, d the differences of the margins, S_ii = n_i. + n_.i - 2 n_ii, S_ij =
        -(n_ij + n_ji). Of all K grades S has no inverse; its pseudo-inverse gives what leaving one grade out gives, and
        its rank the degrees of freedom, also where grades are unused.
    """
    counts_KK = np.asarray(counts_KK, dtype=np.float64)
    first_K, second_K = counts_KK.sum(1), counts_KK.sum(0)
    spread_KK = np.diag(first_K + second_K) - counts_KK - counts_KK.T
    shift_K = first_K - second_K
    df = int(np.linalg.matrix_rank(spread_KK)) if spread_KK.any() else 0
    statistic = float(shift_K @ np.linalg.pinv(spread_KK, hermitian=True) @ shift_K) if df else 0.0
    return _chi2("Stuart–Maxwell", statistic, df)


def _chi2(method: str, statistic: float, df: int) -> PairedTest:
    stats = require("scipy.stats", extra=_EXTRA, purpose=_PURPOSE)
    return PairedTest(method, statistic, df, float(stats.chi2.sf(statistic, df)) if df else 1.0)
