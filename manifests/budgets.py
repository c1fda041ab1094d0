"""What a run is expected to take, and what it may spend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from relabel.manifests.asks import Charge


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

    def rounded(self, digits: int = 0) -> Range:
        return Range(*(round(one, digits) for one in self))


class Limits(NamedTuple):
    """`run.max_tokens` and `run.max_cost`; None is no limit."""

    max_tokens: int | None = None
    max_cost: float | None = None

    @property
    def is_set(self) -> bool:
        return self != (None, None)

    def hold(self, charge: Charge) -> bool:
        """Whether that much is within the limits."""
        return (self.max_tokens is None or charge.tokens <= self.max_tokens) and (
            self.max_cost is None or charge.cost <= self.max_cost
        )


@dataclass(frozen=True, slots=True)
class BudgetState:
    """How much of a budget is spent, by receipts; None means no limit."""

    max_tokens: int | None
    max_cost: float | None
    spent_tokens: int
    spent_cost: float

    @property
    def text(self) -> str:
        """For people, in a phrase."""
        tokens = "" if self.max_tokens is None else f"{self.spent_tokens:,} of {self.max_tokens:,} tokens spent"
        cost = "" if self.max_cost is None else f"{self.spent_cost:,.4f} of {self.max_cost:,.4f} in money spent"
        return "; ".join(filter(None, (tokens, cost)))
