"""Whether probabilities mean what they say, and two ways to correct them: expected calibration error, Brier score,
temperature, isotonic.

Letters: N rows, K grades, G groups, B bins, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from relabel.manifests.extras import require
from relabel.manifests.metrics.agreement import EXTRA, PURPOSE

BINS = 15
"""Equal-width bins of confidence, the number of Guo et al. 2017."""

TINY = 1e-12
"""Least probability that a logarithm is taken of."""

Method = Literal["temperature", "isotonic"]


def brier_rows(probs_NK: np.ndarray, gold_N: np.ndarray) -> np.ndarray:
    """Brier's own multi-class score of each row, Σ_k (p_k - [gold = k])²: 0 to 2, float64 [N]."""
    hit_NK = np.arange(probs_NK.shape[1]) == gold_N[:, None]
    rows_N: np.ndarray = ((probs_NK - hit_NK) ** 2).sum(1)
    return rows_N


def reliability_by_group(
    probs_NK: np.ndarray, gold_N: np.ndarray, group_N: np.ndarray, *, num_groups: int
) -> np.ndarray:
    """What each group adds to each bin of confidence: rows, sum of confidence, number correct; float64 [G, B, 3].

    Confidence is the largest probability, correct means that its grade is gold (the lower grade where two are equally
    probable).
    """
    confidence_N = probs_NK.max(1)
    correct_N = probs_NK.argmax(1) == gold_N
    bin_N = np.minimum((confidence_N * BINS).astype(np.int64), BINS - 1)
    cell_N = group_N * BINS + bin_N
    size = num_groups * BINS
    parts = [
        np.bincount(cell_N, weights, minlength=size)
        for weights in (np.ones(len(gold_N)), confidence_N, correct_N.astype(float))
    ]
    return np.stack(parts, axis=-1).reshape(num_groups, BINS, 3)


def ece_of_bins(bins_B3: np.ndarray) -> np.ndarray:
    """Expected calibration error of sums [..., B, 3] over rows: Σ_bins (share of rows) · |mean confidence - accuracy|;
    NaN without rows.

    Source:
        Guo et al. 2017 (arXiv:1706.04599), equation 3.
    """
    rows = bins_B3[..., 0].sum(-1)
    gap = np.abs(bins_B3[..., 1] - bins_B3[..., 2]).sum(-1)
    return np.asarray(gap / np.where(rows > 0, rows, np.nan))


def ece(probs_NK: np.ndarray, gold_N: np.ndarray) -> float:
    """Expected calibration error of all rows together."""
    bins = reliability_by_group(probs_NK, gold_N, np.zeros(len(gold_N), dtype=np.int64), num_groups=1)
    return float(ece_of_bins(bins[0]))


@dataclass(frozen=True)
class Calibrator:
    """A fitted map from distributions to distributions.

    Args:
        parameters: what was fitted, for a report: `{"temperature": 1.7}`, or the knots of each cut.
    """

    method: Method
    parameters: dict[str, object]
    apply: Callable[[np.ndarray], np.ndarray]


def fit_calibrator(method: Method, probs_NK: np.ndarray, gold_N: np.ndarray) -> Calibrator:
    """Fit on rows that will not be judged.

    Raises:
        MissingExtraError: scipy or scikit-learn is absent.
    """
    return _fit_temperature(probs_NK, gold_N) if method == "temperature" else _fit_isotonic(probs_NK, gold_N)


def tempered(probs_NK: np.ndarray, temperature: float) -> np.ndarray:
    """p^(1/T), renormalised."""
    scaled_NK = np.log(np.maximum(probs_NK, TINY)) / temperature
    raised_NK = np.exp(scaled_NK - scaled_NK.max(1, keepdims=True))
    return np.asarray(raised_NK / raised_NK.sum(1, keepdims=True))


def fit_temperature(probs_NK: np.ndarray, target_NK: np.ndarray) -> float:
    """One temperature, least cross-entropy (Guo et al. 2017, section 4.2), sought between 1/100 and 100.

    Args:
        target_NK: what the distributions should be; 1 at the grade where a row has one.
    Raises:
        MissingExtraError: scipy is absent.
    """
    optimize = require("scipy.optimize", extra=EXTRA, purpose=PURPOSE)

    def loss(log_temperature: float) -> float:
        logs_NK = np.log(np.maximum(tempered(probs_NK, np.exp(log_temperature)), TINY))
        return float(-(target_NK * logs_NK).sum(1).mean())

    found = optimize.minimize_scalar(
        loss, bounds=(np.log(0.01), np.log(100.0)), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(found.x))


def _fit_temperature(probs_NK: np.ndarray, gold_N: np.ndarray) -> Calibrator:
    temperature = fit_temperature(probs_NK, np.eye(probs_NK.shape[1])[gold_N])
    return Calibrator("temperature", {"temperature": temperature}, lambda probs: tempered(probs, temperature))


def _fit_isotonic(probs_NK: np.ndarray, gold_N: np.ndarray) -> Calibrator:
    """One isotonic regression a cut j, of [gold ≥ j] on P(k ≥ j); made decreasing in j, then turned back into
    probabilities.

    Cuts and not single grades, since grades are ordered: P(k ≥ j) is the score that AUC judges, and its rise means the
    same everywhere.
    """
    isotonic = require("sklearn.isotonic", extra=EXTRA, purpose=PURPOSE)
    above_NJ = at_least(probs_NK)
    fitted = []
    for cut in range(above_NJ.shape[1]):
        regression = isotonic.IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
        fitted.append(regression.fit(above_NJ[:, cut], gold_N > cut))

    def apply(probs: np.ndarray) -> np.ndarray:
        above = at_least(probs)
        corrected = np.stack([regression.predict(above[:, cut]) for cut, regression in enumerate(fitted)], axis=1)
        corrected = np.minimum.accumulate(np.clip(corrected, 0, 1), axis=1)
        edges = np.concatenate([np.ones((len(probs), 1)), corrected, np.zeros((len(probs), 1))], axis=1)
        return np.asarray(edges[:, :-1] - edges[:, 1:])

    knots = [{"score": one.X_thresholds_.tolist(), "probability": one.y_thresholds_.tolist()} for one in fitted]
    return Calibrator("isotonic", {"cuts": knots}, apply)


def at_least(probs_NK: np.ndarray) -> np.ndarray:
    """P(k ≥ j) for j = 1..K-1: float64 [N, K-1]."""
    return np.asarray(np.cumsum(probs_NK[:, ::-1], axis=1)[:, ::-1][:, 1:])


def split_groups(num_groups: int, seed: int) -> np.ndarray:
    """Which groups a calibrator is fitted on, about half of them, drawn by seed: bool [G]. The others are held out."""
    is_fitted_G = np.zeros(num_groups, dtype=bool)
    is_fitted_G[np.random.default_rng(seed).permutation(num_groups)[: (num_groups + 1) // 2]] = True
    return is_fitted_G
