"""Pairs that systems return and that have no label yet, as input of the job that made the labels: pooling, a round at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.jobs.evaluate import run_pairs
from relabel.jobs.systems import SystemsOptions, label_pairs, named_paths, open_judge
from relabel.jobs.tables import (
    document_of,
    first_columns,
    load_polars,
    refuse_null,
    refuse_two_texts,
    scan,
    translate_polars_errors,
)
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.forms import form_by_suffix
from relabel.manifests.gold import GOLD, taken
from relabel.manifests.label_sets import LabelSet, no_labels, put_together
from relabel.manifests.labels import codes_of, texts_of
from relabel.manifests.metrics.metric import places_in_query
from relabel.manifests.rankings import TABLES, load_rankings
from relabel.manifests.tables import NeededColumn, as_ids, open_parquet, reading, require_columns


@dataclass(frozen=True)
class InputColumns:
    """Columns of a job's input.

    Args:
        document: None: as in the corpus.
        gold: of grades, which the pairs lack; None where there is no such column.
        numbers: those of ids that hold whole numbers.
    """

    query_id: str = "query_id"
    query: str = "query"
    doc_id: str = "doc_id"
    document: tuple[str, ...] | None = None
    gold: str | None = None
    numbers: tuple[str, ...] = ()


def unjudged_pairs(
    systems: Sequence[str], corpus: str, queries: str | None, options: SystemsOptions, storage: Storage
) -> tuple[Any, dict[str, int]]:
    """The pairs of the systems' top k without a label, as a lazy frame in the order of query and document ids; and what
    came of it, by name.

    Columns are called as in the input of the labels' run, so that the same job takes the pairs.

    Args:
        systems: rankings, as `relabel systems` takes them.
        corpus: Parquet with `doc_id`, and `document` or `title` and `body`.
        queries: a table with `query_id` and `query`; None for the queries of the run's own input, or of a label file's
            own column `query`.
    Raises:
        InputError: a file or column is off, queries have no text, or no pair is left.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    labels = open_judge(options.labels, options, storage)
    columns = input_columns(labels, storage)
    texts = query_texts(queries, labels, columns, options.by, storage)
    pairs = unlabelled(systems, labels, options, storage)
    counts = {"without_label": len(pairs)}
    with_text = [pair for pair in pairs if pair[0] in texts]
    counts["without_query_text"] = len(pairs) - len(with_text)
    if pairs and not with_text:
        raise InputError(
            f"{queries or options.labels}: has the text of none of the queries with unjudged documents, the first is "
            f"query {pairs[0][0]}. Give a table of query_id and query with --queries."
        )
    frame, num_with_document = with_documents(with_text, texts, corpus, columns, storage)
    counts["without_document"] = len(with_text) - num_with_document
    counts["queries"] = len({query for query, _ in with_text})
    if with_text and not num_with_document:
        raise InputError(
            f"{corpus}: has none of the {len(with_text):,} documents without a label, the first is "
            f"{with_text[0][1]}. Is it the corpus that the systems search, with the same ids?"
        )
    return frame, counts


def unlabelled(
    systems: Sequence[str], labels: LabelSet, options: SystemsOptions, storage: Storage
) -> list[tuple[str, str]]:
    """Query and document of each pair in the top k of any system that has no label, in the order of their ids."""
    judged = label_pairs(labels, options)
    unlabelled_ids = set[tuple[str, str]]()
    paths = named_paths(systems, fewest=1)
    rankings = load_rankings(paths, storage, options.columns, allow_partial=options.allow_partial)
    for ranking in rankings.values():
        query_N, names = codes_of(ranking.query_ids)
        is_labelled = taken(judged.columns[GOLD], judged.places(ranking.query_ids, ranking.doc_ids)).is_valid()
        is_open_N = places_in_query(query_N, len(names)) < options.k
        is_open_N &= ~is_labelled.to_numpy(zero_copy_only=False)
        ids = (texts_of(column.filter(pa.array(is_open_N))) for column in (ranking.query_ids, ranking.doc_ids))
        unlabelled_ids.update(zip(*ids, strict=True))
    return sorted(unlabelled_ids)


def input_columns(labels: LabelSet, storage: Storage) -> InputColumns:
    """Those of the input of the labels' run; the usual ones where labels are a file.

    Raises:
        InputError: the input can't be read any more.
    """
    if labels.plan is None:
        return InputColumns()
    columns = labels.plan.facts.columns
    first = labels.plan.files[0].path
    with open_parquet(first, storage) as parquet, reading(first):
        types = {one.name: one.type for one in parquet.plain_schema}
    ids = (columns.query_id, columns.doc_id)
    return InputColumns(
        query_id=columns.query_id,
        query=columns.query,
        doc_id=columns.doc_id,
        document=tuple(columns.document),
        gold=columns.gold,
        numbers=tuple(name for name in ids if name in types and pa.types.is_integer(types[name])),
    )


def query_texts(
    queries: str | None, labels: LabelSet, columns: InputColumns, by: str | None, storage: Storage
) -> Mapping[str, str]:
    """The text of each query that is known, by its id.

    Args:
        by: column of query ids in a label file, where it is another than `query_id`.
    Raises:
        InputError: nothing says them, or a query has two texts.
    """
    if queries is not None:
        return _texts_of_table(queries, columns, storage)
    if labels.plan is None:
        return _texts_of_labels(labels.where, by or columns.query_id, columns.query, storage)
    rows = put_together([no_labels(), *(part.select(["row_id", "query_id"]) for part in labels.parts())])
    query_N, _ = codes_of(rows["query_id"])
    _, first = np.unique(query_N, return_index=True)
    row_ids = rows["row_id"].to_numpy()[np.sort(first)]
    pairs = run_pairs(labels.where, labels.plan, storage, np.sort(row_ids))
    return {pair.query_id: pair.query for pair in pairs}


def _texts_of_table(path: str, columns: InputColumns, storage: Storage) -> dict[str, str]:
    form = form_by_suffix(path, TABLES)
    if form is None:
        raise InputError(f"--queries {path}: a table of query_id and query is wanted: .parquet, .csv, .tsv or .jsonl.")

    def choose(names: list[str]) -> list[str]:
        wanted = [columns.query_id, columns.query]
        require_columns([NeededColumn(name, "--queries") for name in wanted], names, path=path)
        return wanted

    return _by_id(form.read(path, choose, storage), path, columns.query_id, columns.query)


def _texts_of_labels(path: str, query_id: str, query: str, storage: Storage) -> dict[str, str]:
    """Those of a label file's own column.

    Raises:
        InputError: it has none, or a query has two texts.
    """

    def choose(names: list[str]) -> list[str]:
        if query in names and query_id in names:
            return [query_id, query]
        raise InputError(
            f"{path}: has no column `{query}` with texts of queries. Give a table of query_id and query with --queries."
        )

    form = form_by_suffix(path, TABLES)
    if form is None:
        raise InputError(
            f"{path}: a file of this form has no texts of queries. Give a table of query_id and query with --queries."
        )
    return _by_id(form.read(path, choose, storage), path, query_id, query)


def _by_id(held: Mapping[str, Any], path: str, query_id: str, query: str) -> dict[str, str]:
    """
    Raises:
        InputError: a query has no text, or two.
    """
    ids = texts_of(as_ids(held[query_id], path=path, name=query_id))
    column = held[query]
    texts = column.to_pylist() if isinstance(column, pa.ChunkedArray) else column
    found: dict[str, str] = {}
    for name, text in zip(ids, texts, strict=True):
        if text is None or found.setdefault(name, str(text)) != str(text):
            raise InputError(f"{path}: query {name} has no text, or two. Give each query one text.")
    return found


def with_documents(
    pairs: Sequence[tuple[str, str]], texts: Mapping[str, str], corpus: str, columns: InputColumns, storage: Storage
) -> tuple[Any, int]:
    """The pairs whose document is in the corpus, with their texts, as a lazy frame; and how many they are.

    Raises:
        InputError: the corpus lacks a column, or a document has two texts.
    """
    polars = load_polars()
    doc_id = "doc_id"
    if columns.doc_id != doc_id and columns.doc_id in first_columns(corpus, storage, role="--corpus"):
        doc_id = columns.doc_id
    docs, text_columns = scan(corpus, {doc_id: "id"}, storage, has_text=columns.document is None, role="--corpus")
    if columns.document is not None:
        names = docs.collect_schema().names()
        needed = [NeededColumn(name, "--corpus; the labels' run reads it") for name in columns.document]
        require_columns(needed, names, path=corpus)
        text_columns = columns.document
    refuse_null(docs, doc_id, path=corpus)
    wanted = polars.DataFrame(
        {
            columns.query_id: [query for query, _ in pairs],
            columns.query: [texts[query] for query, _ in pairs],
            columns.doc_id: [doc for _, doc in pairs],
        },
        schema=dict.fromkeys((columns.query_id, columns.query, columns.doc_id), polars.String),
    ).lazy()
    docs = docs.select(polars.col(doc_id).cast(polars.String).alias(columns.doc_id), *text_columns)
    needed = docs.join(wanted.select(columns.doc_id).unique(), on=columns.doc_id, how="semi")
    with translate_polars_errors(corpus):
        known = needed.select(columns.doc_id, text=document_of(text_columns).hash()).unique().collect()
    refuse_two_texts(known[columns.doc_id], path=corpus, what="document")
    known_ids = pa.array(known[columns.doc_id].to_list(), pa.string())
    num_known = int(
        pc.sum(pc.is_in(pa.array([doc for _, doc in pairs], pa.string()), value_set=known_ids)).as_py() or 0
    )
    frame = wanted.join(
        needed.unique(columns.doc_id, keep="first"), on=columns.doc_id, how="inner", maintain_order="left"
    )
    frame = frame.with_columns(polars.col(name).cast(polars.Int64) for name in columns.numbers)
    if columns.gold is not None:
        frame = frame.with_columns(polars.lit(None, polars.Int64).alias(columns.gold))
    return frame, num_known
