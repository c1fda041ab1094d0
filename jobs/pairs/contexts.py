"""Context documents for `r3a`: each query's best documents by BM25, where there are no clicks to tell.

One list a query, the same for all its rows, so that the first stage is still asked once a query. Grades are never looked at: a context
picked by grade would tell the teacher the answer.

BM25 as Lucene has it (k1 = 1.5, b = 0.75), over lower-cased runs of word characters, every word counting: for languages that put no spaces
between words it finds little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jobs.pairs.tables import document_of, load_polars, refuse_null, scan, told
from manifests.errors import InputError
from manifests.extras import require

MOST_CONTEXT = 4
"""Documents that a job reads from the context column at most."""
COLUMN = "context"
_WORD = r"(?u)\w+"


@dataclass(frozen=True, slots=True)
class ContextCounts:
    """What came of it."""

    queries: int
    queries_without: int
    documents: int


class Bm25Index:
    """Documents by their words.

    Args:
        texts: no two equal; ties in a ranking go by the text, so that their order does not matter.
    """

    def __init__(self, texts: list[str]) -> None:
        bm25s = require("bm25s", extra="pairs", purpose="relabel pairs context")
        self._texts = texts
        tokens = bm25s.tokenize(texts, lower=True, token_pattern=_WORD, stopwords=None, show_progress=False)
        self._has_words = any(len(one) for one in tokens.ids)
        self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        if self._has_words:
            self._index.index(tokens, show_progress=False)

    def best(self, query: str, k: int) -> list[str]:
        """The k texts with the highest score, best first; fewer where fewer share a word with the query."""
        import numpy as np

        if not self._has_words:
            return []
        known = self._index.vocab_dict
        words = [word for word in re.findall(_WORD, query.lower()) if word in known]
        if not words:
            return []
        scores = self._index.get_scores(words)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > k:
            least = np.partition(scores[hits], len(hits) - k)[len(hits) - k]
            hits = hits[scores[hits] >= least]  # ties at the edge stay in until the text decides
        ranked = sorted((-float(scores[i]), self._texts[i]) for i in hits)
        return [text for _, text in ranked[:k]]


def with_context(pairs_path: str, *, k: int, corpus_path: str | None, max_chars: int) -> tuple[Any, ContextCounts]:
    """The pairs with a column `context`, as a lazy frame in the order of the input.

    Holds the distinct documents and one context a query in memory (up to k × max_chars characters each); rows stream.

    Args:
        k: documents a query.
        corpus_path: where contexts are taken from; None for the documents of the pairs themselves.
        max_chars: each context document is cut to this many characters; `r3a` cuts to `max_context_chars` in any case.
    Raises:
        InputError: a file or column is off, the pairs have a context already, or a query has two texts.
    """
    polars = load_polars()
    col = polars.col
    pairs, text_columns = scan(pairs_path, {"query_id": "id", "query": "text"}, has_text=True, role="PAIRS")
    if COLUMN in pairs.collect_schema():
        raise InputError(f"{pairs_path}: has a column `{COLUMN}` already. Drop or rename it first.")
    for name in ("query_id", "query"):
        refuse_null(pairs, name, path=pairs_path)
    source, source_path = pairs, pairs_path
    if corpus_path is not None:
        source_path = corpus_path
        source, text_columns = scan(corpus_path, {}, has_text=True, role="--corpus")
    key = "query id as text"
    with told(source_path):
        texts = (
            source.select(text=document_of(text_columns)).filter(col("text").str.strip_chars() != "").unique().collect(engine="streaming")
        )
    with told(pairs_path):
        queries = (
            pairs.select(col("query_id").cast(polars.String).alias(key), "query").unique().sort(key, "query").collect(engine="streaming")
        )
    twice = queries.filter(polars.len().over(key) > 1)
    if twice.height:
        (query, one), (_, other) = twice.row(0), twice.row(1)
        raise InputError(f"{pairs_path}: query `{query}` has two texts, {one[:60]!r} and {other[:60]!r}. Give each text an id of its own.")
    index = Bm25Index(texts["text"].to_list())
    found = {text: [best[:max_chars] for best in index.best(text, k)] for text in queries["query"].unique().to_list()}
    contexts = polars.DataFrame(
        {key: queries[key], COLUMN: [found[text] for text in queries["query"]]},
        schema={key: polars.String, COLUMN: polars.List(polars.String)},
    )
    frame = (
        pairs.with_columns(col("query_id").cast(polars.String).alias(key))
        .join(contexts.lazy(), on=key, how="left", maintain_order="left")
        .drop(key)
    )
    without = sum(not context for context in contexts[COLUMN].to_list())
    return frame, ContextCounts(queries.height, without, texts.height)
