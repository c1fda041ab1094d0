"""How a command prints its result: text for people, one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import click

from relabel.jobs.exits import Exit
from relabel.manifests.secrets import one_line, redacted_values


def emit(result: dict[str, Any], text: str, output: str, code: int = Exit.DONE) -> int:
    """Print a result: `text` for people, `result` as one JSON object for programs. Returns the exit code."""
    click.echo(json.dumps(redacted_values(result), ensure_ascii=False) if output == "json" else text)
    return code


def emit_record(head: str, result: Any, output: str, code: int = Exit.DONE) -> int:
    """Print a record: as one JSON object, or as `head` over a table of its values. Returns the exit code.

    The table leaves out what is empty or zero.
    """
    from relabel.manifests.records import plain  # with pydantic, which no help needs

    values: dict[str, Any] = plain(result)
    rows = [(name.replace("_", " "), value_text(value)) for name, value in values.items() if value]
    return emit(values, f"{one_line(head)}\n{grid(rows)}", output, code)


def value_text(value: Any) -> str:
    """A JSON value as a person reads it."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {value_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def note(text: str) -> None:
    """A remark on stderr."""
    click.echo(one_line(f"note: {text}"), err=True)


def shown(text: str) -> str:
    """A text of the data or of a model on a terminal: nothing in it is a command to that."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def grid(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of a table, each column padded; those at `right` to that side."""
    shown = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = (
        [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in shown
    )
    return "\n".join(f"  {'  '.join(cells)}".rstrip() for cells in lines)


def clock_text(seconds: float) -> str:
    """A length of time in hours, minutes and seconds: 1:02:03."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
