"""What the content of a section says: lines, numbers, lists, texts."""

from __future__ import annotations

import json
from typing import Any

from relabel.manifests.formats import (
    JsonIndices,
    Section,
)


def lines_of(content: str) -> list[str]:
    """The lines of a section, white space at their ends taken off, without blank ones."""
    return [line for one in content.split("\n") if (line := one.strip())]


def indices_of(content: str) -> list[int]:
    """The numbers of a section, in their order; 0 stands for anything that is none."""
    if not content:
        return []
    return [
        int(one) if (one := part.strip()).isascii() and one.isdigit() and len(one) < 10 else 0
        for part in content.split(",")
    ]


def index_lists_of(content: str, section: Section) -> list[list[int]]:
    """The lists of a JSON answer, in the order of its keys.

    Raises:
        ValueError: it is no such object: other keys or another order, one twice, something else than whole numbers
            within their bounds, anything around it.
    """
    assert isinstance(section, JsonIndices)
    held = _loaded(content, object_pairs_hook=list, parse_int=_short_int)
    if not isinstance(held, list) or not all(isinstance(one, tuple) for one in held):
        raise ValueError("it is no object")
    if tuple(key for key, _ in held) != section.keys:
        raise ValueError(f"its keys are not {', '.join(section.keys)[:80]}")
    for (key, numbers), most in zip(held, section.mosts, strict=True):
        if not isinstance(numbers, list) or not all(type(one) is int and 1 <= one <= most for one in numbers):
            raise ValueError(f"{key} is no list of numbers of 1 to {most}")
    return [numbers for _, numbers in held]


def texts_of(content: str) -> list[str]:
    """The texts of a JSON array, white space at their ends taken off, without blank ones; a number is the text that it
    was written as.

    Raises:
        ValueError: it is no array of texts and numbers alone.
    """
    held = _loaded(content, parse_int=str, parse_float=str)
    if not isinstance(held, list) or not all(isinstance(one, str) for one in held):
        raise ValueError("it is no array of texts")
    return [text for one in held if (text := one.strip())]


def _loaded(content: str, **readers: Any) -> Any:
    """
    Raises:
        ValueError: it is no JSON, or too deep, or has a number that is none.
    """
    try:
        return json.loads(content, parse_constant=_refuse, **readers)
    except RecursionError as exc:
        raise ValueError("it is nested without end") from exc


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _short_int(text: str) -> int:
    return int(text) if len(text) < 10 else 0
