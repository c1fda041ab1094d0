"""What a row's label says to a head: a grade, and a distribution where the teacher gave one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relabel.manifests.errors import InputError

SUM_TOLERANCE = 1e-3
"""How far a distribution's sum may lie from 1: probabilities are stored as float32."""


class Target(NamedTuple):
    """What one label says about one head: a grade, and a distribution where the teacher gave one."""

    grade: int
    probs: list[float] | None


def targets_of(
    values: Sequence[int | None], probs: Sequence[list[float] | None], grades: int | None, where: str, column: str
) -> list[Target | None]:
    """Grades and distributions as targets, each checked: one bad number would be learned without a word."""
    found: list[Target | None] = []
    for row, (value, given) in enumerate(zip(values, probs, strict=True)):
        if value is None:
            found.append(None)
            continue
        if value < 0 or (grades is not None and value >= grades):
            raise InputError(f"{where}: label {row} has `{column}` {value}, off the scale 0 to {(grades or 11) - 1}.")
        if given is not None:
            numbers = np.asarray(given, dtype=np.float64)
            is_off = (
                len(given) != grades
                or not np.isfinite(numbers).all()
                or numbers.min() < 0
                or abs(numbers.sum() - 1) > SUM_TOLERANCE
            )
            if is_off:
                raise InputError(
                    f"{where}: label {row} has the distribution {given} for `{column}`; {grades} numbers that sum to "
                    "1 are wanted."
                )
        found.append(Target(value, given))
    return found


def check_outside(masses: Sequence[float | None], where: str) -> None:
    """A mass outside the grades is a share: rows are weighted by what it leaves."""
    for row, mass in enumerate(masses):
        if mass is not None and not -SUM_TOLERANCE <= mass <= 1 + SUM_TOLERANCE:
            raise InputError(f"{where}: label {row} has the outside mass {mass}; a share from 0 to 1 is wanted.")
