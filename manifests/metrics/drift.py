"""Whether a judge has become worse, asked again and again: its agreement with gold on the same pairs at each look,
against that of the first look.

A 95 % interval at each look would raise an alarm by chance sooner or later. Here all looks together raise one with a
chance of at most `alpha`, however many there are.

Letters: T looks after the first.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

ALPHA = 0.05
"""Chance of a false alarm, all looks together."""


@dataclass(frozen=True)
class Fall:
    """How far the agreement has fallen since the first look.

    Args:
        since: number of looks up to now that show it best, the last included.
        value: mean agreement of the first look less that of these; below 0 where it rose.
        bound: what chance explains of it; None before the second look.
    """

    since: int
    value: float
    bound: float | None

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it is an alarm."""
        return self.bound is not None and self.value > self.bound


def latest_fall(agreement_T: np.ndarray, error_T: np.ndarray, *, alpha: float = ALPHA) -> Fall:
    """The fall that the last look shows, alone or with those before it.

    Half of alpha goes to the chance of the first look, half to the later ones. Of these a confidence sequence is begun
    at each look, the j-th with alpha/2 · 1/(j (j + 1)), which sums to alpha/2, so that a late and sudden fall is seen
    as well as an early and slow one.

    Args:
        agreement_T: of all looks, the first one too, float64.
        error_T: their standard errors, above 0.
    Source:
        Robbins 1970, the normal mixture: |S| <= sqrt((V + r) ln((V + r) / (r a²))) at all times with chance 1 - a, for
        a sum S of variance V; here r is the variance of one look. It holds for sums that are about normal, which means
        over many pairs are. False alarms: `tests/metrics/test_drift.py`.
    """
    num_later = len(agreement_T) - 1
    if num_later < 1:
        return Fall(0, 0.0, None)
    first_bound = NormalDist().inv_cdf(1 - alpha / 2) * error_T[0]
    fall_T = (agreement_T[0] - agreement_T[1:])[::-1]
    variance_T = (error_T[1:] ** 2)[::-1]
    sums_T = np.cumsum(fall_T)
    variances_T = np.cumsum(variance_T)
    falls = []
    for count in range(1, num_later + 1):
        begun_at = num_later - count + 1
        part = alpha / 2 / (begun_at * (begun_at + 1))
        room = variance_T[count - 1]
        variance = variances_T[count - 1]
        half = math.sqrt((variance + room) * math.log((variance + room) / (room * part**2)))
        falls.append(Fall(count, float(sums_T[count - 1] / count), float(first_bound + half / count)))
    return max(falls, key=lambda fall: fall.value - (fall.bound or 0.0))
