"""Answers with their citations, and the documents that may be cited, as frames."""

from __future__ import annotations

from typing import Any

from relabel.jobs.files.tables import document_of, load_polars, refuse_null, scan, translate_polars_errors
from relabel.manifests.errors import InputError
from relabel.manifests.storage.context import Storage


def load_answers(path: str, storage: Storage) -> Any:
    """The answers, ids as text; checked."""
    polars = load_polars()
    col = polars.col
    frame, _ = scan(
        path,
        {"query_id": "id", "query": "text", "answer_id": "id", "cited": "ids", "candidates": "ids"},
        storage,
        role="ANSWERS",
    )
    for name in ("query_id", "query", "answer_id"):
        refuse_null(frame, name, path=path)
    ids = polars.List(polars.String)
    with translate_polars_errors(path):
        answers = frame.select(
            col("query_id").cast(polars.String),
            "query",
            col("answer_id").cast(polars.String),
            col("cited", "candidates").cast(ids),
        ).collect(engine="streaming")
    twice = answers.group_by("query_id", "answer_id").len().filter(col("len") > 1).sort("query_id", "answer_id").head(1)
    if twice.height:
        query, answer, count = twice.row(0)
        raise InputError(
            f"{path}: answer `{answer}` of query `{query}` occurs {count} times. Give each answer one row."
        )
    texts = (
        answers.group_by("query_id")
        .agg(col("query").unique().sort())
        .filter(col("query").list.len() > 1)
        .sort("query_id")
        .head(1)
    )
    if texts.height:
        query, forms = texts.row(0)
        raise InputError(
            f"{path}: query `{query}` has two texts, {forms[0][:60]!r} and {forms[1][:60]!r}. Give each text an id of "
            "its own."
        )
    return answers


def known_documents(docs: Any, text_columns: tuple[str, ...], path: str) -> Any:
    """Each document's id, a key that equal texts share, and whether it is blank."""
    polars = load_polars()
    text = document_of(text_columns)
    with translate_polars_errors(path):
        known = (
            docs.select("doc_id", text_key=text.hash(), is_blank=text.str.strip_chars() == "")
            .collect(engine="streaming")
            .unique()
        )
    twice = known.filter(polars.len().over("doc_id") > 1)["doc_id"]
    if twice.len():
        raise InputError(
            f"{path}: document `{twice.min()}` occurs with different texts. Give each text an id of its own."
        )
    return known


def id_texts(frame: Any, column: str) -> Any:
    """One row for each id in a list column."""
    polars = load_polars()
    return frame.select("query_id", doc_id=polars.col(column)).explode("doc_id").drop_nulls()
