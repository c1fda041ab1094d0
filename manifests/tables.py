"""Stored columns as plain types and values: which of them a job reads, ids, grades, and text that is not UTF-8."""

import contextlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.files import Storage, check_kind, is_url, out_of_files, path_hint
from relabel.manifests.labels import Reads
from relabel.manifests.process import WhenUsed
from relabel.manifests.secrets import counted, shortened
from relabel.manifests.specs import Columns, nearest
from relabel.manifests.store import UrlFile
from relabel.manifests.trees import NODE

pc = WhenUsed("pyarrow.compute")

# ------------------------------------------------------------------------------
# The boundary of all that reads input files: errors of the system and of Arrow name the file.


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a failure to read an input file into an InputError that names it."""
    try:
        yield
    except (RelabelError, BlockingIOError):
        raise
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file.{path_hint(path)}") from exc
    except PermissionError as exc:
        raise InputError(f"{path}: no permission to read it. Check the file's owner and mode.") from exc
    except (pa.ArrowException, UnicodeDecodeError, OSError) as exc:
        first = shortened(str(exc).split("\n", 1)[0].rstrip("."), 200)
        if isinstance(exc, pa.ArrowInvalid) or (isinstance(exc, OSError) and exc.errno is None):
            raise InputError(f"{path}: not a readable Parquet file: {first}. Write it again from its source.") from exc
        why = out_of_files(exc) or f"{getattr(exc, 'strerror', None) or first}."
        raise InputError(f"{path}: can't be read: {why}") from exc


USUAL_COLUMNS = Columns()
"""What columns are called where nobody names them."""
TEXT_FORMS = {
    ".csv": "read_csv(PATH, schema_overrides={OVERRIDES})",
    ".tsv": r'read_csv(PATH, separator="\t", schema_overrides={OVERRIDES})',
    ".jsonl": "read_ndjson(PATH)",
    ".ndjson": "read_ndjson(PATH)",
}
"""How polars reads what people have instead of Parquet, by suffix. Ids stay text: 007 is not 7."""


def refuse_text(path: str, columns: Columns = USUAL_COLUMNS) -> None:
    """Refuse a file that is no Parquet where its suffix says what it is instead.

    Args:
        columns: which of them hold what.
    Raises:
        InputError: says how it becomes Parquet.
    """
    how = TEXT_FORMS.get(Path(path).suffix.lower())
    if how is None:
        return
    separator, names = _text_columns(path, columns)
    overrides = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: str" for name in names)
    if separator == ";":
        how = how.replace("PATH,", 'PATH, separator=";",')
    call = how.replace("PATH", json.dumps(path, ensure_ascii=False)).replace("OVERRIDES", overrides)
    raise InputError(
        f"{path}: text, and Parquet is wanted. Write it again in Python with polars (the extra eval), and give that: "
        f'`polars.{call}.write_parquet("{Path(path).stem}.parquet")`.'
    )


def _text_columns(path: str, columns: Columns) -> tuple[str, list[str]]:
    """What divides a sheet's columns, and those that are to stay text: the ids; all but the grades where the ids are
    called otherwise.
    """
    import csv

    from relabel.manifests.judgments import delimiter_of  # like csv, of a refusal alone

    line = ""
    with contextlib.suppress(OSError, UnicodeDecodeError), Path(path).open(encoding="utf-8-sig") as file:
        line = file.readline()
    separator = delimiter_of(line)
    names = next(csv.reader([line], delimiter=separator), [])
    ids = [columns.query_id, columns.doc_id]
    if not names or set(ids) <= set(names):
        return separator, list(dict.fromkeys(ids))
    return separator, [name for name in names if name not in ("grade", columns.gold)]


# ------------------------------------------------------------------------------
# What stored columns hold, by one rule for all that reads them: text however it is stored is text, ids are text, and a
# column that no file holds may be in the names of the folders that it lies in (`query_id=q1/part.parquet`).


NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows whose column is null, as Hive names it, and all writers after it."""
_EXACT_FLOAT = 2**53
"""Whole numbers below have a float64 of their own."""


def folder_columns(path: str, stored: Collection[str]) -> dict[str, str | None]:
    """Columns of a file that the names of its folders hold, each with the value that all its rows have.

    Args:
        stored: columns that the file itself holds, which count before names.
    """
    steps = [step.partition("=") for step in path.split("/")[:-1]]
    found = {unquote(name): None if value == NO_VALUE else unquote(value) for name, equals, value in steps if equals}
    return {name: value for name, value in found.items() if name and name not in stored}


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column of a stored type is read as."""
    if is_text(kind):
        return pa.large_string()
    return plain(pa.nulls(0, kind)).type


def plain(column: pa.Array) -> pa.Array:
    """A stored column as its plain type. Text that is not UTF-8 stays as it is; reading it says so."""
    kind = column.type
    if isinstance(kind, pa.UuidType):
        return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.large_string())
    if isinstance(kind, pa.Bool8Type):
        return column.storage.cast(pa.bool_())
    if isinstance(kind, pa.BaseExtensionType):
        return plain(column.storage)
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if "binary" in str(kind) and (is_text(kind) or pa.types.is_fixed_size_binary(kind)):
        return column.cast(pa.large_binary()).view(pa.large_string())
    if is_text(kind):
        return column.cast(pa.large_string())
    if isinstance(kind, _LISTS) and not pa.types.is_nested(kind.value_type):
        inner = kind.value_type.value_type if pa.types.is_dictionary(kind.value_type) else kind.value_type
        return column.cast(pa.large_list(pa.large_string() if is_text(inner) else kind.value_type))
    return column


_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def is_text(kind: pa.DataType) -> bool:
    """Text, or bytes that may be text: ClickHouse and Impala mark none as such."""
    return re.fullmatch("(large_)?(string|binary)(_view)?", str(kind)) is not None


def is_number_type(kind: pa.DataType) -> bool:
    """Whether a plain type may hold grades."""
    return any(
        test(kind) for test in (pa.types.is_null, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    )


def is_id_type(kind: pa.DataType) -> bool:
    """Whether a plain type may hold ids: text, or numbers, which have to be whole."""
    return bool(pa.types.is_large_string(kind) or is_number_type(kind))


def id_texts(column: pa.Array, *, path: str, name: str) -> pa.Array:
    """A column of ids as text: text as it is, whole numbers of any type as their digits, NaN as null.

    Args:
        column: of a plain type.
        path, name: of the column, for messages.
    Raises:
        InputError: another type, a number that is not whole, or one too large to be exact.
    """
    kind = column.type
    try:
        if pa.types.is_floating(kind):
            column = pc.if_else(pc.is_nan(column), None, column.cast(pa.float64()))
            if (pc.max(pc.abs(column)).as_py() or 0) >= _EXACT_FLOAT:
                raise pa.ArrowInvalid("too large to be exact")
            column = column.cast(pa.int64())
        elif pa.types.is_decimal(kind):
            column = column.cast(pa.decimal256(76, 0))
        elif not is_id_type(kind):
            raise InputError(f"{path}: column `{name}` holds {kind}; ids are text or whole numbers.")
        return column.cast(pa.large_string())
    except pa.ArrowInvalid as exc:
        raise InputError(
            f"{path}: column `{name}` holds {kind}, and not all of its numbers are whole. Ids are text or whole "
            "numbers; store them as such."
        ) from exc


class PlainParquet(pq.ParquetFile):  # type: ignore[misc]
    """An open Parquet file whose columns are read as plain ones, those in the names of its folders included.

    Args:
        path: what the user calls it.
        options: pyarrow's.
    """

    def __init__(self, source: Any, path: str, **options: Any) -> None:
        super().__init__(source, page_checksum_verification=True, **options)
        self.path = path
        self.folder_columns = folder_columns(path, self.schema_arrow.names)

    @property
    def plain_schema(self) -> pa.Schema:
        """All columns with the types that they are read as."""
        held = [pa.field(one.name, plain_type(one.type)) for one in self.schema_arrow]
        return pa.schema([*held, *(pa.field(name, pa.large_string()) for name in self.folder_columns)])

    def plain_batches(
        self,
        names: Sequence[str],
        *,
        ids: Collection[str] = (),
        batch_rows: int,
        row_groups: Sequence[int] | None = None,
        use_threads: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Some columns, in this order, as plain types; those of `ids` as text.

        Raises:
            InputError: an id is neither text nor a whole number, or is not UTF-8.
        """
        stored = [name for name in names if name not in self.folder_columns]
        for batch in self.iter_batches(batch_rows, row_groups, columns=stored, use_threads=use_threads):
            columns = [self.plain_column(batch, name, is_id=name in ids) for name in names]
            yield pa.RecordBatch.from_arrays(columns, names=[*names])

    def first_broken_row(self, name: str) -> int:
        """The first row whose value in a column is not UTF-8; a column that has one is read again from its start."""
        first_row = 0
        for batch in self.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
            _, broken = mended_texts(plain(batch.column(name)))
            if broken:
                return first_row + broken[0]
            first_row += batch.num_rows
        raise ValueError(f"all of {name} is UTF-8")

    def plain_column(self, batch: pa.RecordBatch, name: str, *, is_id: bool = False) -> pa.Array:
        """A column of a batch that was read of this file, as its plain type; as text if it `is_id`.

        Raises:
            InputError: an id is neither text nor a whole number, or is not UTF-8.
        """
        if name in self.folder_columns:
            return pa.repeat(pa.scalar(self.folder_columns[name], pa.large_string()), batch.num_rows)
        column = plain(batch.column(name))
        if not is_id:
            return column
        if pa.types.is_large_string(column.type) and not is_utf8(column):
            raise id_not_utf8(self.path, name, self.first_broken_row(name))
        return id_texts(column, path=self.path, name=name)


READ_BUFFER_BYTES = 1 << 20
PARQUET_SUFFIXES = (".parquet", ".pq")


def open_parquet(path: str, storage: Storage) -> PlainParquet:
    """Open one file, local or by URL, with page checksums verified. The caller closes it (it is a context manager).

    Raises:
        InputError: it can't be read or is not a whole Parquet file.
    """
    with reading(path):
        try:
            return _opened(path, storage)
        except pa.ArrowInvalid:
            refuse_text(path)
            raise


def _opened(path: str, storage: Storage) -> PlainParquet:
    if is_url(path):
        # pre-buffering asks for the columns of the row groups to come in as few ranges as have no gaps, and for
        # nothing else
        return PlainParquet(pa.PythonFile(UrlFile(path, storage), "r"), path, pre_buffer=True)
    # pre-buffering fetches whole row groups ahead: 149 MB where a buffered stream held 8 MB, at the same speed (row
    # groups of 40 MB)
    check_kind(path, Path(path).stat())
    local = Path(path).absolute()  # pyarrow takes a relative path with a colon for a URI
    return PlainParquet(local, path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)


# ------------------------------------------------------------------------------
# Text that is not UTF-8. Spark, Hive and Arrow write bytes as text without a look at them. Two ids that differ in such
# bytes alone would become one, so ids are refused; in other texts the bytes become U+FFFD, and that is reported.


logger = logging.getLogger(__name__)


def is_utf8(column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether all texts of a column are UTF-8, those within its lists and structs too."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def mended_texts(column: pa.Array) -> tuple[pa.Array, list[int]]:
    """A column of a plain type with U+FFFD in place of bytes that are not UTF-8, and the positions of the values that
    had some, ascending.
    """
    if is_utf8(column):
        return column, []
    values: list[Any] = []
    broken: list[int] = []
    for position, value in enumerate(column.cast(_as_bytes(column.type)).to_pylist()):
        try:
            values.append(_decoded(value, "strict"))
        except UnicodeDecodeError:
            values.append(_decoded(value, "replace"))
            broken.append(position)
    return pa.array(values, column.type), broken


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """A plain type with bytes where it has text."""
    if is_text(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_as_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_bytes(field.type)) for field in kind])
    return kind


def _decoded(value: Any, errors: Literal["strict", "replace"]) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors)
    if isinstance(value, list):
        return [_decoded(inner, errors) for inner in value]
    if isinstance(value, dict):
        return {name: _decoded(inner, errors) for name, inner in value.items()}
    return value


class BrokenTexts:
    """Counts the texts that are not UTF-8 in the tables that a command reads."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[int]] = {}
        """By file and column: the first such row, and how many there are."""

    def mend(self, table: pa.Table, path: str, first_row: int, ids: Collection[str]) -> pa.Table:
        """The rows of a table with U+FFFD in place of bytes that are not UTF-8, counted.

        Args:
            path, first_row: the file that they are from, and the number of the first of them in it.
            ids: columns of ids.
        Raises:
            InputError: an id is not UTF-8.
        """
        for name in table.column_names:
            if is_utf8(table[name]):
                continue
            column, broken = mended_texts(table[name].combine_chunks())
            if name in ids:
                raise id_not_utf8(path, name, first_row + broken[0])
            table = table.set_column(table.column_names.index(name), name, column)
            self._rows.setdefault((path, name), [first_row + broken[0], 0])[1] += len(broken)
        return table

    def report(self) -> None:
        """Warn of each column of a file that had some."""
        for (path, name), (first_row, count) in self._rows.items():
            logger.warning(
                "%s: %s of `%s` with bytes that are not UTF-8 (first in row %d); they became U+FFFD",
                path,
                counted(count, "value"),
                name,
                first_row,
            )


def id_not_utf8(path: str, name: str, row: int) -> InputError:
    """The error for an id that is no text, in a row of a file."""
    return InputError(
        f"{path}: row {row}: `{name}` holds bytes that are not UTF-8, so that two ids could become one. Ids are text, "
        "whole numbers or UUIDs: write the file again in UTF-8, or store bytes as hexadecimal text."
    )


# ------------------------------------------------------------------------------
# Which columns of a file a job reads, and whether each holds what it should.


def resolve_columns(columns: Columns, names: Sequence[str], path: str, *, reads: Reads) -> Columns:
    """The columns by name: which hold the document, and the context where it is wanted and there. Where no document is
    read, a file of queries alone will do: the query takes the places of the document's columns.

    Args:
        names: of the columns that are there.
    Raises:
        InputError: nothing there can be the document.
    """
    doc_id = columns.doc_id
    if reads.document:
        document = columns.document or document_columns(names, path, advice=" Name them in input.columns.document.")
    else:
        document = columns.document or _usual_document(names) or (columns.query,)
        if doc_id == USUAL_COLUMNS.doc_id and doc_id not in names:
            doc_id = columns.query_id
    context = columns.context or ("context" if "context" in names else None)
    update = {"doc_id": doc_id, "document": document, "context": context if reads.context else None}
    return columns.model_copy(update=update)


def document_line(where: str, document: tuple[str, ...], *, is_named: bool) -> str:
    """Which columns of a file make the document, for people.

    Args:
        is_named: somebody chose them. Else a remark says so where only one of the usual two is there.
    """
    line = f"{where}: document from {', '.join(document)}"
    for found, absent in (("title", "body"), ("body", "title")):
        if document == (found,) and not is_named:
            return f"{line} alone: there is no `{absent}`. Name the columns in `columns.document` if there are others"
    return line


def document_columns(names: Collection[str], where: str, *, advice: str = "") -> tuple[str, ...]:
    """The columns that hold the document where nobody names them.

    Raises:
        InputError: nothing there can be the document.
    """
    found = _usual_document(names)
    if not found:
        raise InputError(
            f"{where}: no column for the document: neither `document` nor `title` nor `body` is there. It has "
            f"{', '.join(names)}.{advice}"
        )
    return found


def _usual_document(names: Collection[str]) -> tuple[str, ...]:
    if "document" in names:
        return ("document",)
    return tuple(name for name in ("title", "body") if name in names)


def check_types(
    columns: Columns,
    reads: Reads,
    schema: pa.Schema,
    path: str,
    first_types: dict[str, str],
    *,
    first_path: str,
    folders: Collection[str] = (),
) -> None:
    """Refuse a file without one of the columns, with two of one name, or with one of another type.

    Args:
        folders: columns that the names of its folders hold.
        first_types: of the files before, by column; filled in here.
    Raises:
        InputError: which, what it holds and what is wanted.
    """
    wanted = [
        ("input.columns.query_id", columns.query_id, "id"),
        ("input.columns.query", columns.query, "string"),
        ("input.columns.doc_id", columns.doc_id, "id"),
        *(("input.columns.document", name, "string") for name in columns.document),
        ("input.columns.context", columns.context, "list<string>"),
        ("input.columns.gold", columns.gold, "number"),
        *((f"for the labeler: {one.about}", one.name, one.kind) for one in reads.columns),
    ]
    needed = [NeededColumn(name, role) for role, name, _ in wanted if name is not None]
    require_columns(needed, [*schema.names, *folders], path=path)
    for role, name, wanted_kind in wanted:
        if name is None:
            continue
        if schema.names.count(name) > 1:
            raise InputError(f"{path}: {schema.names.count(name)} columns named `{name}` ({role}).")
        if name in folders:  # always text, which a grade is read from as from a file of text
            check_kind_of(
                name,
                pa.large_string(),
                "id" if wanted_kind == "number" else wanted_kind,
                path,
                role,
            )
            continue
        kind = schema.field(name).type
        check_kind_of(
            name,
            kind,
            wanted_kind,
            path,
            role,
        )
        family = _family(plain_type(kind))
        if family is not None and first_types.setdefault(name, family) != family:
            raise InputError(
                f"{path}: column `{name}` holds {kind}, while {first_path} holds {first_types[name]} there. Make "
                "the files agree."
            )


def check_kind_of(name: str, kind: pa.DataType, wanted: str, path: str, role: str) -> None:
    """Refuse a column of another type than a kind of `COLUMN_KINDS`.

    Raises:
        InputError: what it holds and what is wanted.
    """
    allowed, test = COLUMN_KINDS[wanted]
    if not test(plain_type(kind)):
        advice = ""
        if wanted == "number" and is_text(kind):
            advice = f" Write the file again with numbers there: polars.col({json.dumps(name)}).cast(polars.Float64)."
        raise InputError(f"{path}: column `{name}` ({role}) holds {kind}; {allowed} is wanted.{advice}")


def _is_plain_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _is_list_of_plain(kind: pa.DataType) -> bool:
    return bool(pa.types.is_null(kind) or (pa.types.is_large_list(kind) and _is_plain_text(kind.value_type)))


def _is_list_of_ids(kind: pa.DataType) -> bool:
    return _is_list_of_plain(kind) or bool(pa.types.is_large_list(kind) and pa.types.is_integer(kind.value_type))


CHUNK = pa.struct(
    [
        ("n", pa.int32()),
        ("heading_path", pa.large_list(pa.large_string())),
        ("text", pa.large_string()),
        ("token_len", pa.int32()),
        ("start", pa.int32()),
        ("end", pa.int32()),
    ]
)
"""What a chunk of a document holds at least: `document[start:end]` is `text`; `n` counts from 1."""


def _is_list_of(wanted: pa.StructType) -> Callable[[pa.DataType], bool]:
    """Whether a type is a list of structs that have these fields, whatever else they have."""
    is_as_wanted = {pa.int32(): pa.types.is_integer, pa.large_string(): _is_plain_text}
    tests = {field.name: is_as_wanted.get(field.type, _is_list_of_plain) for field in wanted}

    def is_list(kind: pa.DataType) -> bool:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
            return bool(pa.types.is_null(kind))
        held = {field.name: plain_type(field.type) for field in kind.value_type}
        return all(name in held and test(held[name]) for name, test in tests.items())

    return is_list


STRUCT_KINDS: dict[str, pa.StructType] = {"list<chunk>": CHUNK, "list<node>": NODE}
"""By kind of a labeler's input column that is a list of structs: the fields that are read."""
INPUT_KINDS: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "string": ("a string", _is_plain_text),
    "list<string>": ("a list of strings", _is_list_of_plain),
    "list<chunk>": ("a list of chunks as `relabel pairs chunk` writes them", _is_list_of(CHUNK)),
    "list<node>": ("a document's tree as `relabel pairs tree` writes it", _is_list_of(NODE)),
}
"""By kind of a labeler's input column: what it holds, in words and as a test of the plain type."""
COLUMN_KINDS = INPUT_KINDS | {
    "id": ("a string or a whole number", is_id_type),
    "number": ("a number", is_number_type),
    "list<id>": ("a list of strings or whole numbers", _is_list_of_ids),
}
"""The same of all columns that are read."""


def _family(kind: pa.DataType) -> str | None:
    """What must agree between files: text is text, however stored, and numbers of any type are numbers; None for the
    type of a column without values, which agrees with all.
    """
    if pa.types.is_null(kind):
        return None
    names = {"text": _is_plain_text, "numbers": is_number_type, "lists of text": _is_list_of_plain}
    return next((name for name, test in names.items() if test(kind)), str(kind))


# ------------------------------------------------------------------------------
# Columns of the tables that people bring along (`forms.py` reads them).


Column: TypeAlias = pa.ChunkedArray | list[Any]
"""A column of Parquet as it lies in Arrow; of text, a plain value each row, since JSON may mix kinds."""

BATCH_ROWS = 1 << 16


class NeededColumn(NamedTuple):
    """A column that a file is to have: its name, what it is for, and the option that names another one."""

    name: str
    role: str
    option: str = ""


USUAL_NAMES = ("query_id", "query", "doc_id", "document", "title", "body", "context", "grade")
"""What columns are called where nobody names them."""


def require_columns(needed: Sequence[NeededColumn], names: Sequence[str], *, path: str) -> None:
    """Refuse a file that lacks columns.

    Args:
        names: of the file's columns.
    Raises:
        InputError: names all that are missing, what the file has, and which options name other columns.
    """
    missing = list({column.name: column for column in needed if column.name not in names}.values())
    if not missing:
        return
    cut = next((cut for cut in (";", "\t", "|") if len(names) == 1 and cut in names[0]), None)
    if cut is not None:
        raise InputError(
            f"{path}: its one column is called {names[0]!r}: columns are divided by {cut!r}. Write the file with "
            "commas (.csv), or with tabs (.tsv)."
        )
    needed_names = {column.name for column in needed}
    free = [name for name in names if name not in needed_names]
    # a column that is called as another role usually is holds that, and is not what is meant
    free_of_usual = [name for name in free if name not in USUAL_NAMES]
    hints = {
        column.name: nearest(column.name, free_of_usual if column.name in USUAL_NAMES else free) for column in missing
    }
    for name, near in hints.items():
        rivals = [other for other, theirs in hints.items() if theirs == near]
        if near is not None and nearest(near, rivals) != name:
            hints[name] = None  # one column is meant once
    is_one = len(missing) == 1
    hint = ", ".join(f"`{near}`" if is_one else f"`{near}` for `{name}`" for name, near in hints.items() if near)
    options = " and ".join(column.option for column in missing if column.option)
    lacking = " and ".join(f"no column `{column.name}` ({column.role})" for column in missing)
    advice = f" Did you mean {hint}?" * bool(hint)
    advice += f" Name {'it' if is_one else 'them'} with {options}." * bool(options)
    raise InputError(f"{path}: {lacking}; it has {', '.join(names) or 'none'}.{advice}")


def id_column(named: str, usual: str, names: Collection[str]) -> str:
    """The column of an id: the one that an option names for several files, or the usual one in a file without that."""
    return usual if named not in names and usual in names else named


def own_column(named: str, usual: str, names: Collection[str], names_of_other: Collection[str]) -> str:
    """The column of one of two files that an option names for both: the usual one in a file without that, if the other
    file has it.
    """
    return id_column(named, usual, names) if named in names_of_other else named


def read_parquet(parquet: PlainParquet, name: str) -> pa.ChunkedArray:
    """A column of an open file, of a plain type; call it within `reading`.

    Raises:
        InputError: text that is no UTF-8.
    """
    # all columns of a row group at once took 60 MB with a million rows of 70 MB (2026-11-22)
    parts = parquet.plain_batches([name], batch_rows=BATCH_ROWS, use_threads=False)
    column = pa.chunked_array([part.column(name) for part in parts], parquet.plain_schema.field(name).type)
    if not is_utf8(column):
        row = parquet.first_broken_row(name)
        raise InputError(f"{parquet.path}: row {row}: `{name}` holds text that is not UTF-8. Write the file again.")
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


RowText = Callable[[int], str]
"""How a message names a row of a file, which is counted from 0."""


def numbered_row(row: int) -> str:
    """The row by its number, as that of a run's input (`row_id`)."""
    return f"row {row}"


def as_ids(column: Column, *, path: str, name: str, row_text: RowText = numbered_row) -> pa.LargeBinaryArray:
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
        raise InputError(f"{path}: {row_text(missing)} has no `{name}`. Give every row one, or leave the row out.")
    return ids


# ------------------------------------------------------------------------------
# A column of grades, read as such: which values are none.


_WHOLE = re.compile(r"[+-]?\d{1,9}(\.0*)?")


SCORES_RANK = (
    "Grades are whole numbers; scores only rank. `relabel evaluate FILE --score COL` judges their order by gold, "
    "`relabel systems` compares rankings."
)
"""What to do with scores where grades are wanted."""


def is_score(text: str) -> bool:
    """Whether a text is a number that is not whole."""
    try:
        number = float(text)
    except ValueError:
        return False
    return math.isfinite(number) and not number.is_integer()


class Grades(NamedTuple):
    """A column of grades, null where a row has none or an unreadable one.

    Args:
        unreadable: rows that hold something, which is no whole number: int64, ascending.
        texts: what they hold, each once, in order.
    """

    values: pa.Int64Array
    unreadable: np.ndarray
    texts: list[str]

    @property
    def hint(self) -> str:
        """What to do where the column holds scores; empty where it holds none."""
        return f" {SCORES_RANK}" if any(is_score(text) for text in self.texts) else ""

    def check_not_scores(self, path: str, column: str) -> None:
        """Refuse a column with numbers that are not whole.

        Raises:
            InputError: it holds some.
        """
        score = next((text for text in self.texts if is_score(text)), None)
        if score is not None:
            raise InputError(f"{path}: column `{column}` holds scores, such as {score}. {SCORES_RANK}")

    def readable(self, path: str, column: str, *, advice: str = "", row_text: RowText = numbered_row) -> pa.Int64Array:
        """The grades.

        Raises:
            InputError: one is no whole number; `advice` is what to do then.
        """
        if self.texts:
            first = row_text(int(self.unreadable[0]))
            raise InputError(
                f"{path}: {len(self.unreadable)} values of `{column}` are no whole number ({first}: "
                f"{self.texts[0]!r}).{advice}{self.hint}"
            )
        return self.values


def read_scores(column: Column, *, path: str, name: str, row_text: RowText) -> pa.DoubleArray:
    """Numbers from what files hold, float64; null, NaN and blank text are null.

    Args:
        path, name, row_text: of the column, for messages.
    Raises:
        InputError: a row holds something else.
    """
    values, code_N = distinct(column)
    scores: list[float | None] = []
    for code, value in enumerate(values):
        text = "" if value is None or value != value else str(value).strip()
        try:
            number = float(text) if text else None
        except ValueError:
            number = math.nan
        if number is not None and not math.isfinite(number):
            row = int(np.flatnonzero(code_N == code)[0])
            raise InputError(f"{path}: {row_text(row)}: `{name}` is {text[:60]!r}, and a score is a number.")
        scores.append(number)
    return pa.array(scores, pa.float64()).take(pa.array(code_N))


def read_grades(column: Column) -> Grades:
    """Whole numbers from what files hold: ints, floats without a fraction, and text that is one number (`2`, `1.`, `
    3`).

    Null, NaN and blank text are null; anything else is unreadable, and so is an int beyond 64 bits. Nothing becomes 0
    that is not written as 0.
    """
    values, code_N = distinct(column)
    numbers: list[int | None] = []
    unreadable: dict[int, str] = {}
    for code, value in enumerate(values):
        if type(value) is int and -(2**63) <= value < 2**63:
            numbers.append(value)
            continue
        text = "" if value is None or value != value else str(value).strip()
        is_number = not isinstance(value, bool) and _WHOLE.fullmatch(text) is not None
        numbers.append(int(float(text)) if is_number else None)
        if text and not is_number:
            unreadable[code] = text[:60]
    grades = pa.array(numbers, pa.int64()).take(pa.array(code_N))
    # codes are in the order in which values occur, and so are the texts
    return Grades(grades, np.flatnonzero(np.isin(code_N, list(unreadable))), list(dict.fromkeys(unreadable.values())))
