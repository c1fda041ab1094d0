"""What a labeler, ours or one from elsewhere, may put into a label's nodes: what the label files' columns hold as it is.

Checked at each label, in plain Python: Arrow would say so only at the commit of a chunk, in its own words, cut 2.5 to 2 and drop a key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from manifests.errors import ConfigError
from manifests.labels import Label
from manifests.schemas import NODES

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def _is_small_int(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    try:
        return -128 <= operator.index(value) <= 127
    except TypeError:
        return False


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, float | int | np.floating | np.integer) and not isinstance(value, bool)
    return is_real and bool(-_FLOAT32_MAX <= value <= _FLOAT32_MAX)  # NaN is not


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and all(map(_is_number, value))


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int8": (_is_small_int, "a whole number from -128 to 127"),
    "float": (_is_number, "a finite number"),
    "list<item: float>": (_is_list, "a list of finite numbers"),
    "string": (_is_text, "a text that UTF-8 can write"),
    "bool": (lambda value: isinstance(value, bool | np.bool_), "true or false"),
}
_FIELDS = {field.name: _KINDS[str(field.type)] for field in NODES}


def check_nodes(label: Label, *, labeler: str) -> None:
    """Every node has a field in the label files that holds its value; None stands for a value that there is not.

    Raises:
        ConfigError: names the labeler, and the keys that have no field, or the node and its value's type.
    """
    nodes = label.nodes
    if nodes is None:
        return
    if not isinstance(nodes, dict):
        raise ConfigError(f"labeler {labeler}: `Label.nodes` is {type(nodes).__name__}; want a dict, or None for a labeler without nodes.")
    if not nodes.keys() <= _FIELDS.keys():
        strange = ", ".join(sorted(map(str, nodes.keys() - _FIELDS.keys())))
        raise ConfigError(
            f"labeler {labeler}: `Label.nodes` holds {strange}, for which label files have no field. The nodes are "
            f"{', '.join(NODES.names)}; put other remarks into `intent`, `reasoning` or `flags`."
        )
    for name, value in nodes.items():
        fits, wanted = _FIELDS[name]
        if value is not None and not fits(value):
            raise ConfigError(
                f"labeler {labeler}: `Label.nodes[{name!r}]` is {type(value).__name__}, where label files hold {wanted}, or None."
            )
