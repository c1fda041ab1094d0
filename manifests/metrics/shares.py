"""Shares and their 95 % intervals over queries. A bootstrap has nothing to draw from where a share is near 0 or 1: of
200 queries without a bad case every resample has none, and the interval would be a point.

Letters: G groups (queries, or rows where there is no query).
"""

from __future__ import annotations

import numpy as np

_Z = 1.959964
"""Quantile 0.975 of a normal distribution."""
_ROUNDING = 1e-12
"""Variance within it is none."""


def share_bounds(part_G: np.ndarray, whole_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % bounds of Σ part / Σ whole, groups drawn independently: [...] from [..., G]; NaN with fewer than two groups
    whose whole is above 0.

    Wilson's interval with a correction for continuity, of as many independent draws as have the variance that is seen
    between groups, and no fewer than if the rows of a group were all alike, which is also what is taken where no
    variance is seen. Degrees of freedom count the groups that the variance comes from: few, near 0 and 1.

    Source:
        Newcombe 1998, method 4; the effective size and t for its degrees of freedom: Korn and Graubard 1998. Coverage:
        `benchmarks/share_intervals.py`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        num_groups = np.asarray((whole_G > 0).sum(-1), dtype=np.float64)
        total = np.where(num_groups > 1, whole_G.sum(-1, dtype=np.float64), np.nan)
        share = part_G.sum(-1, dtype=np.float64) / total
        square_G = (part_G - share[..., None] * whole_G) ** 2
        square, unit = square_G.sum(-1), share * (1 - share)
        alike = total**2 / (whole_G**2).sum(-1)
        freedom = square**2 / (square_G**2).sum(-1)
        size = unit * total**2 / square * (num_groups - 1) / num_groups * (_Z / _t(freedom)) ** 2
        size = np.where(square > _ROUNDING * unit * total, np.maximum(size, alike), alike)
    step = 0.5 / size
    return _wilson(np.maximum(share - step, 0.0), size, -1), _wilson(np.minimum(share + step, 1.0), size, 1)


def _wilson(share: np.ndarray, size: np.ndarray, side: int) -> np.ndarray:
    """One bound (Wilson 1927)."""
    spread = _Z * np.sqrt(share * (1 - share) / size + _Z**2 / (4 * size**2))
    return np.asarray(np.clip((share + _Z**2 / (2 * size) + side * spread) / (1 + _Z**2 / size), 0.0, 1.0))


def _t(freedom: np.ndarray) -> np.ndarray:
    """Quantile 0.975 of Student's t (Hill 1970, to three terms)."""
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
