"""Text that no path, plan or file can hold (with a NUL, or with a code point that UTF-8 has no bytes for), or that a
message shows in another form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relabel.manifests.secrets.redaction import shortened


def oddity_of(text: str) -> str | None:
    """What is wrong with a text, in a few words; None if nothing is."""
    if "\0" in text:
        return "holds a NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    return None


def shown(text: str) -> str:
    """A text as an error can show it: bytes that are no UTF-8 are spelled."""
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which stands for no byte
        data = text.encode("utf-8", "backslashreplace")
    return shortened(data.decode("utf-8", "backslashreplace").replace("\0", "\\0"), 200)


def one_line(text: str) -> str:
    """A message as one line: no id, path or text in it begins a line of its own or commands a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def message_lines(text: str) -> str:
    """A message that may list something, each thing on an indented line of its own; see `one_line`."""
    return "\n  ".join(map(one_line, text.split("\n  ")))


def odd_values(values: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Where odd texts are in plain values, as dotted keys, and what is wrong with each."""
    if isinstance(values, str):
        oddity = oddity_of(values)
        if oddity is not None:
            yield where, oddity
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from odd_values(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, Sequence):
        for number, value in enumerate(values):
            yield from odd_values(value, f"{where}.{number}")
