"""Ratios of sides that took turns: the median over rounds, with a bootstrap interval over rounds."""

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

RESAMPLES = 10_000
Side = TypeVar("Side")


class Ratio(NamedTuple):
    """Median of the rounds' ratios, and the 2.5th and 97.5th percentile of the medians of rounds drawn with
    replacement.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The ratio of two sides of which each round has one value.

    Args:
        numerators, denominators: by round, above 0; the same unit.
    """
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    rng = random.Random(5)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(ratios), medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000 - 1])


def turns(sides: Sequence[Side], round_number: int) -> list[Side]:
    """The order of the sides in a round: each begins as often as the others, so that a slow drift of the machine hits
    all alike.
    """
    first = round_number % len(sides)
    return [*sides[first:], *sides[:first]]
