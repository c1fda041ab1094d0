"""Blocks of JSON lines as frames."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from relabel.jobs.convert.text_blocks import SHOWN_CHARACTERS, Block
from relabel.manifests.errors import InputError
from relabel.manifests.secrets.redaction import shortened

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
EXACT = 2**53
"""Up to this size a float holds every integer (IEEE 754, binary64)."""


def json_frame(polars: Any, block: Block, schema: Mapping[str, Any] | None, *, path: str) -> Any:
    """A block of JSONL as a frame.

    Args:
        schema: columns to read, and as what; all, as they come, if None.
    Raises:
        InputError: a line is not a JSON object, or its text can't be held as UTF-8.
    """
    if _SURROGATE.search(block.data):  # polars reads half of a pair as NUL, so that two different ids could become one
        for _ in _objects(block, path):
            pass
    if not block.data.strip():
        return polars.DataFrame(schema=dict(schema or {}))
    try:
        if schema is None:
            return polars.read_ndjson(io.BytesIO(block.data), infer_schema_length=None)
        return polars.read_ndjson(io.BytesIO(block.data), schema=dict(schema))
    except polars.exceptions.PolarsError as exc:
        _check_kinds(block, path)
        last = block.first + block.data.rstrip().count(b"\n")
        raise InputError(
            f"{path}: lines {block.first} to {last} can't be read: {shortened(str(exc).splitlines()[0], 200)}."
        ) from exc


def json_names(polars: Any, block: Block, *, path: str) -> list[str]:
    """The keys of a block of JSONL, whatever its values are.

    Raises:
        InputError: a line is not a JSON object.
    """
    if not block.data.strip():
        return []
    try:
        return list(polars.read_ndjson(io.BytesIO(block.data), infer_schema_length=None).columns)
    except polars.exceptions.PolarsError:  # also for kinds of values that can't be in one column
        return list(dict.fromkeys(name for _, row in _objects(block, path) for name in row))


def _objects(block: Block, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a block with their lines; raises for the first line that is none."""
    for number, line in enumerate(block.data.split(b"\n"), start=block.first):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse)
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise InputError(
                f"{path}: line {number} holds half of a surrogate pair, which is not a character. Fix its text."
            ) from exc
        except ValueError as exc:
            raise InputError(f"{path}: line {number} is not JSON ({exc}). One object a line is wanted.") from exc
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {number} holds no object. One object a line is wanted.")
        yield number, row


def _check_kinds(block: Block, path: str) -> None:
    """Raise for the first line that is not a JSON object, or else holds another kind of value than a line before it. A
    column that holds text may hold any kind.
    """
    seen: dict[str, tuple[int, str]] = {}
    odd: dict[str, str] = {}
    with_text = set()
    for number, row in _objects(block, path):
        for name, value in row.items():
            if isinstance(value, str):
                with_text.add(name)
            elif value is not None and name not in odd:
                line, before = seen.setdefault(name, (number, _kind(value)))
                if _kind(value) != before:
                    shown = json.dumps(value, ensure_ascii=False)[:SHOWN_CHARACTERS]
                    odd[name] = f"line {number}: `{name}` is {shown}, {_kind(value)}, and {before} before (line {line})"
    for name, problem in odd.items():
        if name not in with_text:
            raise InputError(f"{path}: {problem}. Give a column values of one kind, or write them as text.")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else "a list" if isinstance(value, list) else "an object"


def refuse_rounded(polars: Any, frame: Any, block: Block, *, path: str) -> None:
    """Raise where an integer was read as another one, since its column also holds fractions.

    Args:
        frame: of the block.
    Raises:
        InputError: names the first.
    """
    names = [name for name, kind in frame.schema.items() if kind == polars.Float64]
    if not names or not frame.select(polars.any_horizontal((polars.col(names).abs() >= EXACT).any())).item():
        return
    for number, row in _objects(block, path):
        for name in names:
            value = row.get(name)
            if type(value) is int and int(float(value)) != value:
                raise InputError(
                    f"{path}: line {number}: `{name}` is {value}, in a column that also holds fractions, where it "
                    f"would become {int(float(value))}. Write the column's values as text, or fractions in a column "
                    "of their own."
                )


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; a missing number is null")


def merged_schema(polars: Any, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of both, each of a type that holds what either holds; text where nothing else does."""
    found = dict(first)
    for name, kind in second.items():
        found[name] = merged_type(polars, found[name], kind) if name in found else kind
    return found


def merged_type(polars: Any, first: Any, second: Any) -> Any:
    """The type that holds what either holds."""
    if first == second or second == polars.Null:
        return first
    if first == polars.Null:
        return second
    if isinstance(first, polars.List) and isinstance(second, polars.List):
        return polars.List(merged_type(polars, first.inner, second.inner))
    if isinstance(first, polars.Struct) and isinstance(second, polars.Struct):
        fields = merged_schema(polars, dict(first), dict(second))
        return polars.Struct(fields)
    if first.is_numeric() and second.is_numeric():
        return polars.Float64
    return polars.String
