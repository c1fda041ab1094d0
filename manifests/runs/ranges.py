"""Numbers with their 95 % intervals, and the ratio that chunks which were seen tell of those to come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z95 = 1.959964


class Range(NamedTuple):
    """A number with its 95 % interval. Exact numbers have `low == value == high`."""

    low: float
    value: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Range:
        return cls(value, value, value)

    def __mul__(self, other: object) -> Range:  # a tuple's `*` repeats it, which no range wants
        if isinstance(other, Range):
            return Range(self.low * other.low, self.value * other.value, self.high * other.high)
        assert isinstance(other, int | float)
        return Range(self.low * other, self.value * other, self.high * other)

    def plus(self, other: Range) -> Range:
        """The sum, as if both missed in the same direction: wide rather than wrong."""
        return Range(self.low + other.low, self.value + other.value, self.high + other.high)

    def over(self, other: Range) -> Range:
        """The quotient of non-negative ranges; `other` is above 0."""
        return Range(self.low / other.high, self.value / other.value, self.high / other.low)

    def cut(self, most: float) -> Range:
        """The mean of numbers of which each is cut to `most`, from their mean before. What lies below a mean over
        `most` nobody knows, so that the low end may be half of `most`.
        """
        return self if self.high <= most else Range(min(self.low, most / 2), min(self.value, most), most)

    def holds(self, number: float) -> bool:
        return self.low <= number <= self.high

    def rounded(self, digits: int = 0) -> Range:
        return Range(*(round(one, digits) for one in self))


def ratio_range(
    sizes: Sequence[float], amounts: Sequence[float], *, num_to_come: int, is_sample: bool = False
) -> Range | None:
    """What comes of a unit of size, from chunks that were seen, for the mean of chunks to come.

    The ratio estimator of survey sampling: sum of amounts over sum of sizes, its interval from the chunks' own
    deviations from it, with the variance of the mean of `num_to_come` further chunks added. One chunk tells nothing of
    a spread: half to double.

    Args:
        sizes: rows (or asks) of each chunk; some above 0.
        amounts: tokens, asks or seconds of each.
        is_sample: those that were seen are some of those to come, so that where all were seen there is no doubt.
    Returns:
        None if no chunk has a size.
    """
    pairs = [(size, amount) for size, amount in zip(sizes, amounts, strict=True) if size > 0]
    total = math.fsum(size for size, _ in pairs)
    if not pairs:
        return None
    ratio = math.fsum(amount for _, amount in pairs) / total
    unseen = max(0.0, 1 / len(pairs) + (-1 if is_sample else 1) / max(1, num_to_come))
    if unseen == 0:
        return Range.exact(ratio)
    if len(pairs) == 1:
        return Range(ratio / 2, ratio, ratio * 2)
    spread = math.sqrt(math.fsum((amount - ratio * size) ** 2 for size, amount in pairs) / (len(pairs) - 1))
    error = spread / (total / len(pairs)) * math.sqrt(unseen)
    return Range(max(0.0, ratio - _t95(len(pairs) - 1) * error), ratio, ratio + _t95(len(pairs) - 1) * error)


def _t95(freedom: int) -> float:
    """Student's t at 97.5 %: the Cornish-Fisher expansion, within 0.1 from 3 degrees of freedom on; below, the table's
    values.
    """
    if freedom <= 2:
        return (12.706, 4.303)[freedom - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
