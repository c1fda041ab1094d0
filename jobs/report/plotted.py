"""What is drawn: bars, lines, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bars:
    """One colour's bars: a label and a height each."""

    name: str
    labels: Sequence[str]
    values: Sequence[float]


@dataclass(frozen=True)
class Line:
    """One curve. `is_stepped`: a value holds from its place to the next."""

    name: str
    places: Sequence[float]
    values: Sequence[float]
    is_stepped: bool = False
    is_dashed: bool = False
    has_marks: bool = False


@dataclass(frozen=True)
class PlottedInterval:
    """A named value with the ends of its interval, where it has one."""

    name: str
    value: float
    low: float | None
    high: float | None
