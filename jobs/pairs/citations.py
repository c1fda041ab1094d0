"""Creates pairs from the citations of generated answers: cited documents count as likely relevant."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.distill.students.networks import Embedder
from relabel.jobs.tables import (
    PairsFile,
    add_columns,
    check_columns,
    document_of,
    load_polars,
    open_pairs,
    refuse_null,
    refuse_taken,
    refuse_two_texts,
    scan,
    translate_polars_errors,
)
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.tables import INPUT_KINDS, values_of

# ------------------------------------------------------------------------------
# Creates pairs from the citations of generated answers: cited documents count as likely relevant.


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
    refuse_two_texts(answers.select("query_id", "query").unique()["query_id"], path=path, what="query")
    return answers


def known_documents(docs: Any, text_columns: tuple[str, ...], path: str) -> Any:
    """Each document's id, a key that equal texts share, and whether it is blank."""
    text = document_of(text_columns)
    with translate_polars_errors(path):
        known = (
            docs.select("doc_id", text_key=text.hash(), is_blank=text.str.strip_chars() == "")
            .collect(engine="streaming")
            .unique()
        )
    refuse_two_texts(known["doc_id"], path=path, what="document")
    return known


def id_texts(frame: Any, column: str) -> Any:
    """One row for each id in a list column."""
    polars = load_polars()
    return frame.select("query_id", doc_id=polars.col(column)).explode("doc_id").drop_nulls()


# Pairs from citations: what several generated answers to a query cite is likely relevant; what they were shown and
# left out, likely not.
#
# Source: R3A's data strategy (methods, section 1): M answers a query; a document cited in at least N of them is a
# likely positive, else a hard negative; plus random negatives (M = 5, N = 2). These are guesses to balance a set with,
# no grades: the teacher grades the pairs.

KINDS = ("likely_positive", "hard_negative", "random_negative")


@dataclass(frozen=True, slots=True)
class CitationRule:
    """Who counts as what.

    Args:
        answers_per_query: M; of a query with more, the first M by answer id count.
        cited_in: N, in 1..M.
        random_negatives: documents drawn for each query from all that it was never shown.
        seed: of that draw; each query draws by itself, so that other queries in the file change nothing.
    """

    answers_per_query: int = 5
    cited_in: int = 2
    random_negatives: int = 0
    seed: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.cited_in <= self.answers_per_query:
            raise UsageError(
                f"--cited-in {self.cited_in} of --answers-per-query {self.answers_per_query}: want 1 to all of the "
                "answers."
            )


def cited_pairs(answers_path: str, docs_path: str, rule: CitationRule, storage: Storage) -> tuple[Any, dict[str, int]]:
    """The pairs, as a lazy frame: `query_id, query, doc_id`, the document's columns, `kind`, `cited_in`; and what
    came of it: queries, pairs by kind, and what was left out.

    Rows are ordered by query id, kind and document id, whatever the order of the inputs. Ids and citation lists are
    held in memory, of the documents those that a pair needs, while the rows stream.

    Args:
        answers_path: rows of `query_id, query, answer_id, cited, candidates`, the last two lists of document ids.
        docs_path: the corpus: `doc_id` and the document.
    Raises:
        InputError: a file or column is off, an answer or document occurs twice, a query has two texts, or no pair comes
            out.
    """
    polars = load_polars()
    col = polars.col
    answers = load_answers(answers_path, storage)
    docs, text_columns = scan(docs_path, {"doc_id": "id"}, storage, has_text=True, role="--docs")
    refuse_null(docs, "doc_id", path=docs_path)
    docs = docs.select(col("doc_id").cast(polars.String), *text_columns)
    known = known_documents(docs, text_columns, docs_path)

    counts: dict[str, int] = {}
    full, used = _full_answers(answers, rule, counts, answers_path)
    kept = _judged_by_citations(used, known, rule, counts)
    counts["random_lacking"] = 0
    if rule.random_negatives:
        # what any answer of the query saw is no random document for it, an answer beyond the first M included
        shown = polars.concat([id_texts(full, "candidates"), id_texts(full, "cited")]).unique().join(known, on="doc_id")
        drawn, counts["random_lacking"] = _draw(shown, known, used["query_id"].unique().sort().to_list(), rule)
        kept = polars.concat([kept, drawn])
    kept = kept.sort("query_id", "kind", "doc_id")
    counts |= {kind: int((kept["kind"] == number).sum()) for number, kind in enumerate(KINDS)}
    if not kept.height:
        raise InputError(f"{answers_path}: no candidate of any query is in {docs_path}. Do the document ids agree?")

    needed = docs.join(kept.lazy().select("doc_id").unique(), on="doc_id", how="semi").unique("doc_id", keep="first")
    queries = used.lazy().select("query_id", "query").unique("query_id", keep="first")
    frame = (
        kept.lazy()
        .with_columns(kind=col("kind").replace_strict(dict(enumerate(KINDS)), return_dtype=polars.String))
        .join(queries, on="query_id", how="left", maintain_order="left")
        .join(needed, on="doc_id", how="left", maintain_order="left")
        .select("query_id", "query", "doc_id", *text_columns, "kind", "cited_in")
    )
    return frame, counts


def _full_answers(answers: Any, rule: CitationRule, counts: dict[str, int], path: str) -> tuple[Any, Any]:
    """Answers of queries that have M or more: all of them, and each query's first M.

    Raises:
        InputError: there is no such query.
    """
    polars = load_polars()
    sizes = answers.group_by("query_id").len()
    is_short = polars.col("len") < rule.answers_per_query
    counts["queries_left_out"] = sizes.filter(is_short).height
    full = answers.filter(polars.len().over("query_id") >= rule.answers_per_query)
    used = full.sort("query_id", "answer_id").filter(
        polars.int_range(polars.len()).over("query_id") < rule.answers_per_query
    )
    counts["answers_unused"] = full.height - used.height
    counts["queries"] = used["query_id"].n_unique()
    if not counts["queries"]:
        raise InputError(
            f"{path}: no query has {rule.answers_per_query} answers (the most is {sizes['len'].max() or 0}). "
            "Lower --answers-per-query, or generate more."
        )
    return full, used


def _judged_by_citations(used: Any, known: Any, rule: CitationRule, counts: dict[str, int]) -> Any:
    """Likely positives and hard negatives: what the answers were shown, by how many of them cited it."""
    polars = load_polars()
    kind, pair = polars.col("kind"), ["query_id", "doc_id"]
    shown = id_texts(used, "candidates").unique()
    once = used.with_columns(polars.col("cited").list.unique())
    cited = id_texts(once, "cited").group_by(pair).len("cited_in")
    counts["citations_ignored"] = int(cited.join(shown, on=pair, how="anti")["cited_in"].sum())
    cited_in = polars.col("cited_in").fill_null(0).cast(polars.Int32)
    shown = shown.join(cited, on=pair, how="left").with_columns(cited_in)
    counts["documents_missing"] = shown.join(known, on="doc_id", how="anti").height
    is_cited = polars.col("cited_in") >= rule.cited_in
    found = shown.join(known, on="doc_id").with_columns(kind=polars.when(is_cited).then(0).otherwise(1))
    positives, negatives = found.filter(kind == 0), found.filter(kind == 1)
    apart = negatives.join(positives.select("query_id", "text_key").unique(), on=["query_id", "text_key"], how="anti")
    counts["same_text_left_out"] = negatives.height - apart.height
    return polars.concat([positives, apart]).select(*pair, "kind", "cited_in")


def _draw(seen_pairs: Any, known: Any, queries: Sequence[str], rule: CitationRule) -> tuple[Any, int]:
    """Random negatives: no document that the query was shown, none with the text of one, no text twice, none that is
    blank.

    Returns:
        The pairs, and how many are lacking because the corpus is too small.
    """
    polars = load_polars()
    # one document for each text, in the order of ids, so that the draw depends on the corpus and not on how it is
    # written
    deck = known.filter(~polars.col("is_blank")).sort("doc_id").unique("text_key", keep="first", maintain_order=True)
    ids, keys = deck["doc_id"].to_list(), deck["text_key"].to_list()
    seen = defaultdict[str, set[int]](set)
    for query, key in (
        seen_pairs.select("query_id", "text_key").unique().join(deck, on="text_key", how="semi").iter_rows()
    ):
        seen[query].add(key)
    rows: list[tuple[str, str]] = []
    for query in queries:
        # so many that enough are left without those that it was shown
        wanted = min(len(ids), rule.random_negatives + len(seen[query]))
        thrown = random.Random(f"{rule.seed}|{query}").sample(range(len(ids)), wanted)
        rows += [(query, ids[i]) for i in [i for i in thrown if keys[i] not in seen[query]][: rule.random_negatives]]
    lacking = rule.random_negatives * len(queries) - len(rows)
    drawn = polars.DataFrame(rows, schema={"query_id": polars.String, "doc_id": polars.String}, orient="row")
    return drawn.with_columns(kind=polars.lit(2, polars.Int32), cited_in=polars.lit(0, polars.Int32)), lacking


# ------------------------------------------------------------------------------
# How similar a query and its documents are, by the cosine of their embeddings: for a ranking, and for RES-RAG's
# heuristic labels, the chunks of a document whose cosine is above 0.4. Source: RES-RAG, section 3.4.1 (a sentence
# embedding model, chunks above 0.4).


COSINE, COSINES, SIMILAR = "cosine", "cosines", "similar"
_CHUNKS = "chunks"
_ADDED = {COSINE: pa.float32(), COSINES: pa.large_list(pa.float32()), SIMILAR: pa.large_list(pa.int32())}
_BATCH_ROWS = 256
"""Rows whose texts are embedded together, so that texts of like length share a batch."""


def open_compared(path: str, storage: Storage) -> PairsFile:
    """Pairs to be compared, checked without reading rows.

    Raises:
        InputError: a file or column is off, or a column that is written is there already.
    """
    pairs = open_pairs(path, {"query": "text"}, storage)
    if _CHUNKS not in pairs.types:
        check_columns(pairs.types, dict.fromkeys(_documents(pairs), "text"), file=pairs.named, role="PAIRS")
    elif not INPUT_KINDS["list<chunk>"][1](pairs.schema.field(_CHUNKS).type):
        raise InputError(f"{pairs.named} (PAIRS): column `chunks` is not as `relabel pairs chunk` writes it.")
    refuse_taken(pairs, _added(pairs))
    return pairs


def _documents(pairs: PairsFile) -> tuple[str, ...]:
    names = () if "document" in pairs.types else tuple(name for name in ("title", "body") if name in pairs.types)
    return names or ("document",)


def _added(pairs: PairsFile) -> dict[str, pa.DataType]:
    return {name: kind for name, kind in _ADDED.items() if _CHUNKS in pairs.types or name == COSINE}


def add_cosines(pairs: PairsFile, to: str, embedder: Embedder, threshold: float, storage: Storage) -> Counter[str]:
    """Write the pairs with the columns `cosine` and, where they have chunks, `cosines` and `similar`; counts of pairs,
    chunks and similar ones.

    Args:
        threshold: a chunk is similar above this cosine.
    Raises:
        InputError, DiskFullError, StoreError: see `add_columns`.
    """
    counts = Counter[str]()

    def values(table: pa.Table) -> dict[str, Sequence[Any]]:
        queries = [text or "" for text in values_of(table["query"], pairs.path)]
        chunks = table[_CHUNKS].to_pylist() if _CHUNKS in pairs.types else None
        if chunks is not None:
            texts = [[chunk["text"] or "" for chunk in row or ()] for row in chunks]
        else:
            parts = zip(*(values_of(table[name], pairs.path) for name in _documents(pairs)), strict=True)
            texts = [["\n\n".join(part for part in row if part)] for row in parts]
        cosines = cosines_of(queries, texts, embedder)
        best = [max((one for one in row if one is not None), default=None) for row in cosines]
        counts["pairs"] += len(queries)
        counts["pairs_without_cosine"] += best.count(None)
        if chunks is None:
            return {COSINE: best}
        numbers = [[chunk["n"] for chunk in row or ()] for row in chunks]
        chosen = [above(*pair, threshold) for pair in zip(numbers, cosines, strict=True)]
        counts["chunks"] += sum(map(len, numbers))
        counts["similar"] += sum(map(len, chosen))
        return {COSINE: best, COSINES: cosines, SIMILAR: chosen}

    add_columns(pairs, to, _added(pairs), values, storage, batch_rows=_BATCH_ROWS)
    return counts


def cosines_of(queries: Sequence[str], texts: Sequence[Sequence[str]], embedder: Embedder) -> list[list[float | None]]:
    """The cosine of each row's query with each of its texts, -1 to 1; None where either is blank."""
    distinct = {text: place for place, text in enumerate(dict.fromkeys(queries))}
    queries_QD = embedder.embed(list(distinct), "query")
    flat = [text for row in texts for text in row]
    texts_ND = embedder.embed(flat, "document")
    rows = np.repeat([distinct[query] for query in queries], [len(row) for row in texts]).astype(np.int64)
    found = iter(np.einsum("nd,nd->n", queries_QD[rows], texts_ND).clip(-1.0, 1.0).tolist())
    return [
        [cosine if query.strip() and text.strip() else None for text, cosine in zip(row, found, strict=False)]
        for query, row in zip(queries, texts, strict=True)
    ]


def above(numbers: Sequence[int], cosines: Sequence[float | None], threshold: float) -> list[int]:
    """The numbers of the chunks whose cosine is above the threshold, the most similar first, of equals the earlier."""
    held = [(-cosine, place) for place, cosine in enumerate(cosines) if cosine is not None and cosine > threshold]
    return [numbers[place] for _, place in sorted(held)]
