"""What a labeler, ours or one from elsewhere, may put into the columns of its own: what they hold as it is.

Checked at each label, in plain Python: Arrow would say so only at the commit of a chunk, in its own words, cut 2.5 to 2
and drop a key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relabel.manifests.errors import ConfigError
from relabel.manifests.labels import Label

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def _is_int_of(bits: int) -> Callable[[Any], bool]:
    most = 2 ** (bits - 1) - 1

    def is_int(value: Any) -> bool:
        if type(value) is int:  # what most are: this runs for every value of every label
            return bool(-most - 1 <= value <= most)
        if isinstance(value, bool | np.bool_):
            return False
        try:
            return bool(-most - 1 <= operator.index(value) <= most)
        except TypeError:
            return False

    return is_int


def _is_number(value: Any) -> bool:
    if type(value) is float:
        return -_FLOAT32_MAX <= value <= _FLOAT32_MAX  # NaN is not
    is_real = isinstance(value, float | int | np.floating | np.integer) and not isinstance(value, bool)
    return is_real and bool(-_FLOAT32_MAX <= value <= _FLOAT32_MAX)


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:
        return False


def _is_list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple | np.ndarray) and all(map(is_one, value))


def _are_numbers(value: Any) -> bool:
    if type(value) is list and {*map(type, value)} == {float} and sum(map(abs, value)) <= _FLOAT32_MAX:
        return True
    return isinstance(value, list | tuple | np.ndarray) and all(map(_is_number, value))


_INTS = {
    f"int{bits}": (_is_int_of(bits), f"a whole number from {-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}")
    for bits in (8, 32, 64)
}
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **_INTS,
    "float32": (_is_number, "a finite number"),
    "list<float32>": (_are_numbers, "a list of finite numbers"),
    "string": (_is_text, "a text that UTF-8 can write"),
    **{
        f"list<int{bits}>": (
            _is_list_of(_is_int_of(bits)),
            f"a list of whole numbers from {-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}",
        )
        for bits in (16, 32)
    },
    "list<string>": (_is_list_of(_is_text), "a list of texts that UTF-8 can write"),
    "bool": (lambda value: value is True or value is False or isinstance(value, np.bool_), "true or false"),
}
"""By kind of column (`manifests.schemas.KINDS`): what it holds as it is, and how to say so."""


def check_columns(label: Label, declared: Mapping[str, str], *, labeler: str) -> None:
    """Every value has a column in the label files that holds it; None stands for a value that there is not.

    Args:
        declared: the columns that the labeler declares, name → kind.
    Raises:
        ConfigError: names the labeler, and the keys that no column is declared for, or the column and its value's type.
    """
    held = label.columns
    if not isinstance(held, dict):
        raise ConfigError(
            f"labeler {labeler}: `Label.columns` is {type(held).__name__}; want a dict, empty where there is nothing "
            "to say."
        )
    if not held.keys() <= declared.keys():
        strange = ", ".join(sorted(map(str, held.keys() - declared.keys())))
        raise ConfigError(
            f"labeler {labeler}: `Label.columns` holds {strange}, for which it declares no column. It declares "
            f"{', '.join(declared) or 'none'}: add a `LabelColumn` to its `columns`."
        )
    for name, value in held.items():
        fits, wanted = _CHECKS[declared[name]]
        if value is not None and not fits(value):
            raise ConfigError(
                f"labeler {labeler}: `Label.columns[{name!r}]` is {type(value).__name__}, where its column holds "
                f"{wanted}, or null."
            )
