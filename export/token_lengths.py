"""How long pairs are in tokens, as a bundle's manifest keeps it: of those that its student was tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLengths:
    """Lengths of pairs, in tokens.

    Args:
        rows: pairs that were counted.
        histogram: `[tokens, rows]`, short to long; None in bundles of earlier days.
    """

    rows: int
    p50: int
    p90: int
    p99: int
    max: int
    histogram: list[list[int]] | None = None


def describe_lengths(lengths: Sequence[int]) -> TokenLengths:
    """The distribution of some lengths, one at least."""
    p50, p90, p99 = (int(value) for value in np.ceil(np.percentile(lengths, [50, 90, 99])))
    tokens, rows = np.unique(lengths, return_counts=True)
    histogram = [list(pair) for pair in zip(tokens.tolist(), rows.tolist(), strict=True)]
    return TokenLengths(len(lengths), p50, p90, p99, int(max(lengths)), histogram)
