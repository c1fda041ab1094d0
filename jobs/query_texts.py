"""Query ids and their texts: a table of both, for judgments that know a query by one of them."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.forms import load_columns
from relabel.manifests.labels import texts_of
from relabel.manifests.tables import NeededColumn, RowText, as_ids, require_columns

SHOWN_CHARACTERS = 60


def load_queries(path: str, by: str, query: str, storage: Storage) -> list[tuple[str, str]]:
    """The different ids and texts of a table, in its order; rows without a text are left out.

    Args:
        by, query: columns of ids and texts.
    Raises:
        InputError: it can't be read, lacks a column, or a row has no id.
    """

    def choose(names: list[str]) -> list[str]:
        needed = NeededColumn(by, "the query id", "--by"), NeededColumn(query, "the query's text", "--query")
        require_columns(needed, names, path=path)
        return [by, query]

    columns = load_columns(path, choose, storage)
    ids = texts_of(as_ids(columns[by], path=path, name=by))
    column = columns[query]
    texts = column.to_pylist() if isinstance(column, pa.ChunkedArray) else column
    pairs = zip(ids, texts, strict=True)
    return list(dict.fromkeys((name, str(text)) for name, text in pairs if text is not None))


def with_ids(table: pa.Table, path: str, queries: Sequence[tuple[str, str]], *, row_text: RowText) -> pa.Table:
    """Rows whose `query_id` is a text, with the ids of that text in its place: a row for each.

    Args:
        path, row_text: of the rows, for messages.
        queries: ids and texts.
    Raises:
        InputError: a text has no id.
    """
    ids_of_text: dict[str, list[str]] = {}
    for name, text in queries:
        ids_of_text.setdefault(text, []).append(name)
    rows: list[int] = []
    ids: list[str] = []
    for row, text in enumerate(table["query_id"].to_pylist()):
        if text not in ids_of_text:
            shown = text[:SHOWN_CHARACTERS]
            raise InputError(
                f"{path}: {row_text(row)}: the table of --queries has no text {shown!r}. Add it with its id."
            )
        for name in ids_of_text[text]:
            rows.append(row)
            ids.append(name)
    index = table.column_names.index("query_id")
    return table.take(pa.array(rows, pa.int64())).set_column(index, "query_id", pa.array(ids, pa.string()))


def with_texts(polars: Any, rows: Any, path: str, queries: Sequence[tuple[str, str]]) -> Any:
    """A frame with the column `query`: the text of each row's `query_id`, null where it has none.

    Args:
        path: of the table of queries, for messages.
        queries: ids and texts.
    Raises:
        InputError: an id has several texts.
    """
    texts: dict[str, str] = {}
    for name, text in queries:
        if texts.setdefault(name, text) != text:
            first, second = (one[:SHOWN_CHARACTERS] for one in (texts[name], text))
            raise InputError(f"{path}: query {name!r} has two texts, {first!r} and {second!r}. Leave one.")
    known = polars.DataFrame(
        {"query_id": list(texts), "query": list(texts.values())},
        schema={"query_id": polars.String, "query": polars.String},
    )
    return rows.join(known, on="query_id", how="left", maintain_order="left")
