"""Tables that people bring along, as columns of plain values: Parquet, JSONL, CSV, TSV, and TREC qrels text.

Ids stay the text that they are (`007` is not 7) and rows are split at `\\n` alone, since real ids and texts hold
other line-like characters.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from manifests.errors import InputError
from manifests.inputs.dataset import open_parquet
from manifests.inputs.input_faults import reading
from manifests.inputs.input_folders import PARQUET_SUFFIXES
from manifests.specs import nearest
from manifests.storage.context import Storage
from manifests.storage.url_files import read_whole

TREC_COLUMNS = ("query_id", "iteration", "doc_id", "grade")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson")
FILE_SUFFIXES = (*PARQUET_SUFFIXES, *JSON_SUFFIXES, *DELIMITERS)
"""Names that end so are tables, whatever lies there."""

Choice = Callable[[list[str]], Sequence[str]]
"""The names that a file has to the names that are wanted of it; raises where one is missing (see `require_column`)."""

_WHOLE = re.compile(r"[+-]?\d{1,9}(\.0*)?")


def load_columns(path: str, choose: Choice, storage: Storage) -> dict[str, list[Any]]:
    """Read some columns of a file; its form is known by its suffix, and TREC qrels text (`qid 0 docid grade`) is what
    has no known one.

    Args:
        path: local, or a URL.
        choose: picks columns from those that are there.
    Raises:
        InputError: the file is absent, is not what its suffix says, or lacks a column.
    """
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        with open_parquet(path, storage) as parquet, reading(path):
            names = list(dict.fromkeys(choose(parquet.schema_arrow.names)))
            table = parquet.read(columns=names)
            return {name: table[name].to_pylist() for name in names}
    text = _text(path, storage)
    if suffix in JSON_SUFFIXES:
        return _from_jsonl(path, text, choose)
    if suffix in DELIMITERS:
        return _from_csv(path, text, choose, DELIMITERS[suffix])
    return _from_trec(path, text, choose)


def require_column(name: str, names: list[str], *, path: str, role: str, option: str) -> str:
    """`name` if it is there.

    Raises:
        InputError: says what the file has, and which option names another column.
    """
    if name in names:
        return name
    hint = nearest(name, names)
    raise InputError(
        f"{path}: no column `{name}` for {role}; it has {', '.join(names) or 'none'}."
        + (f" Did you mean `{hint}`?" if hint else "")
        + f" Name it with {option}."
    )


class Grades(NamedTuple):
    """A column of grades, one entry a row: an int, or None where it is null or not readable (`unreadable` tells which,
    and shows it).
    """

    values: list[int | None]
    unreadable: dict[int, str]
    odd: list[str]


def read_grades(values: Sequence[Any]) -> Grades:
    """Whole numbers from what files hold: ints, floats without a fraction, and text that is one number (`2`, `1.`, `
    3`).

    Null, NaN and blank text are null; anything else is unreadable. Nothing becomes 0 that is not written as 0.
    """
    found: list[int | None] = []
    unreadable: dict[int, str] = {}
    odd: list[str] = []
    for row, value in enumerate(values):
        if type(value) is int:
            found.append(value)
            continue
        text = "" if value is None or value != value else str(value).strip()
        is_number = not isinstance(value, bool) and _WHOLE.fullmatch(text) is not None
        found.append(int(float(text)) if is_number else None)
        if text and not is_number:
            unreadable[row] = text[:60]
        elif is_number and isinstance(value, str) and value != str(found[-1]):
            odd.append(value)
    return Grades(found, unreadable, odd)


def as_ids(values: Sequence[Any], *, path: str, column: str) -> list[str]:
    """Ids as text.

    Raises:
        InputError: one is null.
    """
    for row, value in enumerate(values):
        if value is None:
            raise InputError(f"{path}: row {row} has no `{column}`. Give every row one, or leave the row out.")
    return [value if type(value) is str else str(value) for value in values]


def _text(path: str, storage: Storage) -> str:
    with reading(path):
        return read_whole(path, storage).decode("utf-8-sig")


def _from_jsonl(path: str, text: str, choose: Choice) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise InputError(f"{path}: line {number} is not JSON ({exc}). One object a line is wanted.") from exc
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {number} holds no object. One object a line is wanted.")
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in choose(names)}


def _from_csv(path: str, text: str, choose: Choice, delimiter: str) -> dict[str, list[Any]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        rows = [row for row in reader if row]
    except csv.Error as exc:
        raise InputError(f"{path}: line {reader.line_num} can't be read ({exc}).") from exc
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise InputError(f"{path}: record {number} has {len(row)} fields, its first line names {len(names)}.")
    place = {name: number for number, name in enumerate(names)}
    return {name: [row[place[name]] for row in rows] for name in choose(names)}


def _from_trec(path: str, text: str, choose: Choice) -> dict[str, list[Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != len(TREC_COLUMNS):
            raise InputError(
                f"{path}: line {number} has {len(fields)} fields; TREC qrels have four, `qid 0 docid grade`. "
                "A table wants the suffix .parquet, .csv, .tsv or .jsonl."
            )
        rows.append(fields)
    columns = (
        dict(zip(TREC_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        if rows
        else {name: [] for name in TREC_COLUMNS}
    )
    return {name: columns[name] for name in choose(list(TREC_COLUMNS))}
