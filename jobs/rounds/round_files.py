"""What goes into a round and comes out of it, as files: the rows to review, and what the reviews say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from relabel.jobs.rounds.retrieval import Corpus
from relabel.jobs.rounds.searches import RoundReview, Search
from relabel.labelers.searches import ASPECT, PREVIOUS_DOCS, PREVIOUS_QUERIES, PREVIOUS_SUMMARIES
from relabel.manifests import failpoints
from relabel.manifests.errors import StaleRunError
from relabel.manifests.judging.run_labels import RunLabels
from relabel.manifests.row_files import table_bytes, table_of
from relabel.manifests.runs.label_files import read_labels
from relabel.manifests.schemas import QUARANTINE
from relabel.manifests.storage.run_store_ports import RunStore

SEARCHES_PER_FILE = 512
_TEXTS = pa.list_(pa.string())
ROWS = pa.schema(
    [
        ("query_id", pa.string()),
        ("query", pa.string()),
        ("doc_id", pa.string()),
        ("document", pa.string()),
        ("num_tokens", pa.int64()),
        (ASPECT.name, pa.string()),
        (PREVIOUS_QUERIES.name, _TEXTS),
        (PREVIOUS_SUMMARIES.name, _TEXTS),
        (PREVIOUS_DOCS.name, _TEXTS),
    ]
)
"""The input of a round, as `review` reads it: for each search that goes on the documents that were found, best first,
or one row without a document where none was. `num_tokens` is the document's.
"""

Offered = dict[str, dict[str, int]]
"""By question: the tokens of each document that was found for it, by id."""


class _Reviewed(NamedTuple):
    """What a label of `review` says, with the columns that are read."""

    row_id: int
    query_id: str
    doc_id: str
    is_sufficient: bool | None
    sufficient_probs: Sequence[float] | None
    new_query: str | None
    useful: Sequence[str] | None
    summary: str | None


class _Failed(NamedTuple):
    """Why a row has no label."""

    query_id: str
    status: str
    reason: str


def folder_of(number: int) -> str:
    """Where the input of a round lies."""
    return f"inputs/round-{number}"


def write_round(store: RunStore, number: int, searches: Sequence[Search], corpus: Corpus, k: int) -> None:
    """Search what comes next, and make the rows durable, file by file. What is there already is held against it.

    Raises:
        StaleRunError: a file is there with other rows: an earlier round was changed since.
    """
    store.sweep(folder_of(number))
    for start in range(0, len(searches), SEARCHES_PER_FILE):
        some = searches[start : start + SEARCHES_PER_FILE]
        name = f"{folder_of(number)}/part-{start // SEARCHES_PER_FILE:05d}.parquet"
        table = pa.Table.from_pylist([row for search in some for row in _rows(search, corpus, k)], schema=ROWS)
        failpoints.hit("before_round_file")
        if not store.create(name, table_bytes(table)) and not table_of(store.read(name)).equals(table):
            raise _changed(store, number, f"{name} holds other rows than they lead to")
        failpoints.hit("after_round_file")


def _rows(search: Search, corpus: Corpus, k: int) -> Iterator[dict[str, Any]]:
    asked = search.next_query
    row = {
        "query_id": search.query_id,
        "query": search.query,
        ASPECT.name: asked,
        PREVIOUS_QUERIES.name: [one.query for one in search.rounds],
        PREVIOUS_SUMMARIES.name: [one.review.summary for one in search.rounds if one.review.summary],
        PREVIOUS_DOCS.name: list(search.useful),
    }
    found = corpus.best(asked, k, search.useful)
    for doc_id, text, num_tokens in found:
        yield {**row, "doc_id": doc_id, "document": text, "num_tokens": num_tokens}
    if not found:
        yield {**row, "doc_id": None, "document": "", "num_tokens": 0}


def read_round(store: RunStore, number: int, searches: Sequence[Search]) -> Offered:
    """What was found for each search.

    Raises:
        StaleRunError: the rows are those of other searches: an earlier round was changed since.
    """
    offered: Offered = {}
    asked = {}
    for name in store.names(folder_of(number)):
        table = table_of(store.read(name), ["query_id", "doc_id", "num_tokens", ASPECT.name])
        for query_id, doc_id, num_tokens, aspect in zip(*(column.to_pylist() for column in table.columns), strict=True):
            asked[query_id] = aspect
            found = offered.setdefault(query_id, {})
            if doc_id is not None:
                found[doc_id] = num_tokens
    if asked != {search.query_id: search.next_query for search in searches}:
        raise _changed(store, number, "its input is that of other searches")
    return offered


def _changed(store: RunStore, number: int, what: str) -> StaleRunError:
    return StaleRunError(
        f"{store.root}: a round before round {number} was changed since round {number} was begun: {what}. Restore it "
        f"from a copy, or remove {folder_of(number)}, round-{number} and all later ones to go on from there."
    )


def read_reviews(run: RunLabels) -> dict[str, RoundReview]:
    """What a finished round says of each question."""
    said: dict[str, _Reviewed] = {}
    shown: dict[str, list[tuple[int, str]]] = {}
    for file in run.labels:
        for row in (_Reviewed(**one) for one in read_labels(run.folder, file, list(_Reviewed._fields)).to_pylist()):
            said[row.query_id] = row
            shown.setdefault(row.query_id, []).append((row.row_id, row.doc_id))
    failures: dict[str, RoundReview] = {}
    for file in run.quarantine:
        for lost in run.folder.table(file, QUARANTINE, list(_Failed._fields)).to_pylist():
            failed = _Failed(**lost)
            failures.setdefault(failed.query_id, RoundReview(failure=f"{failed.status}: {failed.reason}"))
    return failures | {query_id: _review(row, shown[query_id]) for query_id, row in said.items()}


def _review(row: _Reviewed, shown: list[tuple[int, str]]) -> RoundReview:
    """Of a question that any row has a label of: those that have none were not shown."""
    return RoundReview(
        shown=tuple(doc_id for _, doc_id in sorted(shown)),
        is_sufficient=row.is_sufficient,
        p_sufficient=None if row.sufficient_probs is None else row.sufficient_probs[1],
        new_query=row.new_query,
        useful=tuple(row.useful or ()),
        summary=row.summary,
    )
