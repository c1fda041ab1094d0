"""Columns that come of reading each pair's document: some rows read, some written, so that memory grows with the
longest pages and not with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.files.durable_files import written
from relabel.jobs.files.tables import check_columns, open_tables, stream_tables
from relabel.jobs.pairs.pages import CleanedPage
from relabel.jobs.pairs.reading import Form, read_page
from relabel.manifests.errors import InputError
from relabel.manifests.inputs.dataset import open_parquet
from relabel.manifests.inputs.text_values import values_of
from relabel.manifests.storage.context import Storage

DOCUMENT, TITLE = "document", "title"
TEXT = pa.large_string()
_BATCH_ROWS = 32
"""Rows read at a time; a page may have megabytes."""
_GROUP_ROWS = 16_384
_GROUP_BYTES = 64 << 20
"""A row group is written at so many rows or bytes."""


class PageRow(NamedTuple):
    """A pair's document.

    Args:
        title: of the column `title`; empty where there is none.
        has_title: whether the page begins with it.
    """

    page: CleanedPage
    title: str
    has_title: bool


def add_page_columns(
    pairs_path: str,
    to: str,
    form: Form,
    column: str | None,
    added: Mapping[str, pa.DataType],
    values: Callable[[PageRow], Sequence[Any]],
    storage: Storage,
) -> None:
    """Write the pairs with further columns, rows in the order of the input.

    Args:
        form: of the documents; a title is text in any case.
        column: that holds the documents; None for `html`, else the columns that a job would read.
        added: name and type of each; `document` may take the place of the one that was read.
        values: of a pair, one for each added column.
    Raises:
        InputError: a file or column is off, or a column that is written is there already.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
        MissingExtraError: what reads the documents is not installed.
    """
    files, types, named = open_tables(pairs_path, {}, storage, role="PAIRS")
    columns = _document_columns(column, list(types), named, added)
    read = {*columns, *([TITLE] if str(types.get(TITLE)) == "String" else [])}
    check_columns(types, dict.fromkeys(columns, "text"), file=named, role="PAIRS")
    with open_parquet(files[0], storage) as first:
        held = first.schema_arrow.remove_metadata()
    kept = [one for one in held if one.name not in added]
    schema = pa.schema([*kept, *(pa.field(name, kind) for name, kind in added.items())])
    with written(to, storage) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        waiting: list[pa.Table] = []
        for table in stream_tables(files, held, pairs_path, storage, batch_rows=_BATCH_ROWS):
            found = table.select([one.name for one in kept])
            texts = {name: values_of(table[name], pairs_path) for name in sorted(read)}
            rows = [
                values(_read(dict(zip(texts, row, strict=True)), columns, form, column))
                for row in zip(*texts.values(), strict=True)
            ]
            for place, (name, kind) in enumerate(added.items()):
                found = found.append_column(name, pa.array([row[place] for row in rows], type=kind))
            waiting.append(found)
            if sum(map(len, waiting)) >= _GROUP_ROWS or sum(one.nbytes for one in waiting) >= _GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


def _document_columns(
    column: str | None, names: list[str], file: str, added: Mapping[str, pa.DataType]
) -> tuple[str, ...]:
    """The columns that hold the documents.

    Raises:
        InputError: there are none, or a column that is written would replace one that is not read.
    """
    if column is not None:
        columns: tuple[str, ...] = (column,)
    else:
        given = ("html",) if "html" in names else (DOCUMENT,) if DOCUMENT in names else (TITLE, "body")
        columns = tuple(name for name in given if name in names)
        if not columns:
            raise InputError(
                f"{file} (PAIRS): no column for the document: neither `html`, `document`, `title` nor `body`. It has "
                f"{', '.join(names)}. Name it with --column."
            )
    for name in added:
        if name in names and (name != DOCUMENT or DOCUMENT not in columns):
            raise InputError(f"{file} (PAIRS): has a column `{name}` already. Drop or rename it first.")
    return columns


def _read(row: Mapping[str, str | None], columns: Sequence[str], form: Form, column: str | None) -> PageRow:
    has_title = TITLE in columns and column is None
    texts = [(text, name) for name in columns if (text := row[name])]
    page = read_page((text, "text" if name == TITLE and has_title else form) for text, name in texts)
    title = " ".join((row.get(TITLE) or "").split()) if column != TITLE else ""
    return PageRow(page, title, has_title and bool(title))
