"""How a command ends: its exit code, and its result as text for people or one JSON object for programs."""

import html
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import click

from relabel.manifests import errors
from relabel.manifests.secrets import one_line, redacted, redacted_values


class Exit(IntEnum):
    """What a scheduler sees. Cron jobs treat 0 and 10 as good, 20 and 75 as 'again later'."""

    DONE = 0
    OUR_FAULT = 1
    USAGE = 2
    BAD_INPUT = 3
    MISSING = 4
    GATE = 5
    NOTHING_TO_DO = 10
    PARTIAL = 20
    OVER_LIMIT = 30
    LOCKED = 75
    STOPPED = 130


_CODES: tuple[tuple[type[errors.RelabelError], Exit], ...] = (
    (errors.UsageError, Exit.USAGE),
    (errors.LockHeldError, Exit.LOCKED),
    (errors.GateError, Exit.GATE),
    (errors.NothingNewError, Exit.NOTHING_TO_DO),
    (errors.TransientError, Exit.PARTIAL),
    (errors.MissingExtraError, Exit.MISSING),
    (errors.ModelError, Exit.MISSING),
    (errors.EngineLostError, Exit.MISSING),
    (errors.RelabelError, Exit.BAD_INPUT),
)
"""The first kind that an error is of decides."""


def exit_for(error: errors.RelabelError) -> Exit:
    """The code for an error that reached the top."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


class Result(Protocol):
    """What a command found, as a record."""

    def as_json(self) -> dict[str, Any]:
        """For programs: one JSON object, of plain values."""
        ...

    def lines(self) -> list[str]:
        """For people."""
        ...


BY_HAND = "Stopped by hand."
"""The last line of a command that Ctrl-C ended."""


class Printed:
    """A result that Python prints as its command does; a notebook shows the same text."""

    def lines(self) -> list[str]:
        """The result for people."""
        raise NotImplementedError

    def __str__(self) -> str:
        return redacted(click.unstyle("\n".join(self.lines())))

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{html.escape(str(self))}</pre>'


def emit(result: Result, output: str, code: int = Exit.DONE) -> int:
    """Print a result as lines for people, or as one JSON object for programs. Returns the exit code."""
    if output == "json":
        click.echo(json.dumps(redacted_values(result.as_json()), ensure_ascii=False))
    else:
        click.echo("\n".join(result.lines()))
    return code


def values_table(values: dict[str, Any]) -> str:
    """JSON values as a table for people, without what is empty or zero."""
    return grid([(name.replace("_", " "), value_text(value)) for name, value in values.items() if value])


@dataclass(frozen=True)
class Summary:
    """A result of few values, plain ones or records: for people `head` over a table of them, without what is empty or
    zero.
    """

    head: str
    values: Any

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        from relabel.manifests.records import as_object  # with pydantic, which no help needs

        return as_object(self.values)

    def lines(self) -> list[str]:
        """The result for people."""
        return [one_line(self.head), values_table(self.as_json())]


@dataclass(frozen=True)
class TextResult:
    """A result that people read as a text and programs as values."""

    text: str
    values: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return self.values

    def lines(self) -> list[str]:
        """The result for people."""
        return [self.text]


def value_text(value: Any) -> str:
    """A JSON value as a person reads it; what is empty within an object is left out."""
    if value is None:
        return ""
    if isinstance(value, dict):
        entries = {str(name).replace("_", " "): value_text(inner) for name, inner in value.items()}
        return ", ".join(f"{name} {text}" for name, text in entries.items() if text)
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
    return "".join(map(_shown_character, text))


def _shown_character(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape").decode()


def grid(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of a table, each column padded; those at `right` to that side."""
    shown = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = []
    for row in shown:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def clock_text(seconds: float) -> str:
    """A length of time in hours, minutes and seconds: 1:02:03."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
