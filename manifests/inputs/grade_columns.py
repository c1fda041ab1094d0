"""A column of grades, read as such: which values are none."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.table_files import Column, distinct

_WHOLE = re.compile(r"[+-]?\d{1,9}(\.0*)?")


class Misread(NamedTuple):
    """Rows of a column that are read otherwise than written: how many, the first, and its text; and all their texts."""

    rows: int
    first: int
    example: str
    texts: list[str]


class Grades(NamedTuple):
    """A column of grades, null where a row has none or an unreadable one.

    Args:
        unreadable: rows that hold something, which is no whole number; None where all could be read.
        odd: rows whose number is written otherwise than usual; None without any.
    """

    values: pa.Int64Array
    unreadable: Misread | None
    odd: Misread | None

    def readable(self, path: str, column: str, *, advice: str = "") -> pa.Int64Array:
        """The grades.

        Raises:
            InputError: one is no whole number; `advice` is what to do then.
        """
        if self.unreadable is not None:
            rows, first, example, _ = self.unreadable
            raise InputError(
                f"{path}: {rows} values of `{column}` are no whole number (row {first}: {example!r}).{advice}"
            )
        return self.values


def read_grades(column: Column) -> Grades:
    """Whole numbers from what files hold: ints, floats without a fraction, and text that is one number (`2`, `1.`, `
    3`).

    Null, NaN and blank text are null; anything else is unreadable, and so is an int beyond 64 bits. Nothing becomes 0
    that is not written as 0.
    """
    values, code_N = distinct(column)
    found: list[int | None] = []
    unreadable: dict[int, str] = {}
    odd: dict[int, str] = {}
    for code, value in enumerate(values):
        if type(value) is int and -(2**63) <= value < 2**63:
            found.append(value)
            continue
        text = "" if value is None or value != value else str(value).strip()
        is_number = not isinstance(value, bool) and _WHOLE.fullmatch(text) is not None
        found.append(int(float(text)) if is_number else None)
        if text and not is_number:
            unreadable[code] = text[:60]
        elif is_number and isinstance(value, str) and value != str(found[-1]):
            odd[code] = value
    return Grades(
        pa.array(found, pa.int64()).take(pa.array(code_N)), _misread(unreadable, code_N), _misread(odd, code_N)
    )


def _misread(texts: dict[int, str], code_N: np.ndarray) -> Misread | None:
    """Rows by the codes of their values."""
    if not texts:
        return None
    rows = np.flatnonzero(np.isin(code_N, list(texts)))
    return Misread(len(rows), int(rows[0]), texts[int(code_N[rows[0]])], sorted(set(texts.values())))
