"""Tables that users bring along, as columns: Parquet, JSONL, CSV, TSV and TREC qrels; and columns of grades."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.columns import PlainParquet, id_texts
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import PARQUET_SUFFIXES, open_parquet, reading
from relabel.manifests.specs import nearest
from relabel.manifests.store import read_whole

# ------------------------------------------------------------------------------
# Tables that people bring along, as columns: Parquet, JSONL, CSV, TSV, and TREC qrels text.
#
# Ids stay the text that they are (`007` is not 7) and rows are split at `\n` alone, since real ids and texts hold
# other line-like characters.


QRELS_COLUMNS = ("query_id", "iteration", "doc_id", "grade")
SHOWN_CHARS = 80
"""Of a line that can't be read."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson")
FILE_SUFFIXES = (*PARQUET_SUFFIXES, *JSON_SUFFIXES, *DELIMITERS)
"""Names that end so are tables, whatever lies there."""

Column: TypeAlias = pa.ChunkedArray | list[Any]
"""A column of Parquet as it lies in Arrow; of text, a plain value each row, since JSON may mix kinds."""

Choice = Callable[[list[str]], Sequence[str]]
"""The names that a file has to the names that are wanted of it; raises where one is missing (see `require_column`)."""

BATCH_ROWS = 1 << 16


def load_columns(path: str, choose: Choice, storage: Storage) -> dict[str, Column]:
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
            names = list(dict.fromkeys(choose(parquet.plain_schema.names)))
            return {name: read_parquet(parquet, name) for name in names}
    text = read_text(path, storage)
    if suffix in JSON_SUFFIXES:
        return from_jsonl(path, text, choose)
    if suffix in DELIMITERS:
        return _from_csv(path, text, choose, DELIMITERS[suffix])
    return from_trec(path, text, choose)


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


def read_parquet(parquet: PlainParquet, name: str) -> pa.ChunkedArray:
    """A column of an open file, of a plain type; call it within `reading`.

    Raises:
        InputError: text that is no UTF-8.
    """
    # all columns of a row group at once took 60 MB with a million rows of 70 MB (2026-11-22)
    parts = parquet.plain_batches([name], batch_rows=BATCH_ROWS, use_threads=False)
    column = pa.chunked_array([part.column(name) for part in parts], parquet.plain_schema.field(name).type)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as exc:
        raise InputError(f"{parquet.path}: column `{name}` holds text that is not UTF-8. Write it again.") from exc
    return column


def distinct(column: Column) -> tuple[list[Any], np.ndarray]:
    """The values of a column and which of them each row has, int64 [N]; a plain column's come again and again."""
    if isinstance(column, pa.ChunkedArray):
        try:
            coded = pc.dictionary_encode(column, null_encoding="encode").combine_chunks()
            return coded.dictionary.to_pylist(), coded.indices.to_numpy()
        except pa.ArrowNotImplementedError:  # lists and the like, which can't be hashed
            column = column.to_pylist()
    return column, np.arange(len(column))


def rows_of(column: Column, rows: np.ndarray) -> Column:
    """Some rows of a column."""
    return column.take(pa.array(rows)) if isinstance(column, pa.ChunkedArray) else [column[row] for row in rows]


def as_ids(column: Column, *, path: str, name: str) -> pa.LargeBinaryArray:
    """Ids as text, whatever they are in the file.

    Raises:
        InputError: one is null, or neither text nor a whole number.
    """
    if isinstance(column, pa.ChunkedArray):
        texts = (id_texts(part, path=path, name=name) for part in column.chunks)
        ids = pa.chunked_array([one.cast(pa.large_binary()) for one in texts], pa.large_binary()).combine_chunks()
    else:
        encoded = (None if value is None else str(value).encode("utf-8", "surrogatepass") for value in column)
        ids = pa.array(encoded, pa.large_binary())
    missing = pc.index(ids.is_null(), True).as_py()
    if missing >= 0:
        raise InputError(f"{path}: row {missing} has no `{name}`. Give every row one, or leave the row out.")
    return ids


def read_text(path: str, storage: Storage) -> str:
    """A file's text.

    Raises:
        InputError: it can't be read, or is not UTF-8.
    """
    with reading(path):
        return read_whole(path, storage).decode("utf-8-sig")


def from_jsonl(path: str, text: str, choose: Choice) -> dict[str, list[Any]]:
    """Columns of JSON lines.

    Raises:
        InputError: a line is no JSON object, or a column is missing.
    """
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


def from_trec(path: str, text: str, choose: Choice, columns: Sequence[str] = QRELS_COLUMNS) -> dict[str, list[Any]]:
    """Columns of TREC text by their names, and the number of each row's line as `line`; blank lines are passed over.

    Raises:
        InputError: a line has another number of fields.
    """
    found: dict[str, list[Any]] = {name: [] for name in ("line", *columns)}
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.split()
        if fields and len(fields) != len(columns):
            raise InputError(
                f"{path}: line {number} has {len(fields)} fields, and {len(columns)} are wanted ({' '.join(columns)}): "
                f"{line.strip()[:SHOWN_CHARS]!r}. A table wants the suffix .parquet, .csv, .tsv or .jsonl."
            )
        for name, value in zip(found, (number, *fields), strict=True) if fields else ():
            found[name].append(value)
    return {name: found[name] for name in choose(list(columns))}


# ------------------------------------------------------------------------------
# A column of grades, read as such: which values are none.


_WHOLE = re.compile(r"[+-]?\d{1,9}(\.0*)?")


class Grades(NamedTuple):
    """A column of grades, null where a row has none or an unreadable one.

    Args:
        unreadable: rows that hold something, which is no whole number: int64, ascending.
        texts: what they hold, each once, in order.
    """

    values: pa.Int64Array
    unreadable: np.ndarray
    texts: list[str]

    def readable(self, path: str, column: str, *, advice: str = "") -> pa.Int64Array:
        """The grades.

        Raises:
            InputError: one is no whole number; `advice` is what to do then.
        """
        if self.texts:
            raise InputError(
                f"{path}: {len(self.unreadable)} values of `{column}` are no whole number (row {self.unreadable[0]}: "
                f"{self.texts[0]!r}).{advice}"
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
    for code, value in enumerate(values):
        if type(value) is int and -(2**63) <= value < 2**63:
            found.append(value)
            continue
        text = "" if value is None or value != value else str(value).strip()
        is_number = not isinstance(value, bool) and _WHOLE.fullmatch(text) is not None
        found.append(int(float(text)) if is_number else None)
        if text and not is_number:
            unreadable[code] = text[:60]
    grades = pa.array(found, pa.int64()).take(pa.array(code_N))
    # codes are in the order in which values occur, and so are the texts
    return Grades(grades, np.flatnonzero(np.isin(code_N, list(unreadable))), list(dict.fromkeys(unreadable.values())))
