"""Context documents for `r3a`: each query's best documents by BM25, where there are no clicks.

One list a query, the same for all its rows, so that the first stage is still asked once a query. Grades are never read:
a context picked by grade would give the teacher the answer.

BM25 as Lucene has it (k1 = 1.5, b = 0.75), over lower-cased runs of word characters, every word counting: for languages
that put no spaces between words it finds little.
"""

import re
from typing import Any

import numpy as np

from relabel.jobs.tables import (
    document_of,
    load_polars,
    refuse_null,
    refuse_two_texts,
    scan,
    translate_polars_errors,
)
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.process import require

MOST_CONTEXT = 4
"""Documents that a job reads from the context column at most."""
COLUMN = "context"
_WORD = r"(?u)\w+"
_KEY = "query id as text"


class Bm25Index:
    """Documents by their words.

    Args:
        texts: no two equal; ties in a ranking go by the text, so that their order does not matter.
    """

    def __init__(self, texts: list[str]) -> None:
        bm25s = require("bm25s", extra="pairs", purpose="relabel pairs context")
        self._texts = texts
        tokens = bm25s.tokenize(
            texts,
            lower=True,
            token_pattern=_WORD,
            stopwords=None,
            show_progress=False,
        )
        self._has_words = any(len(words) for words in tokens.ids)
        self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        if self._has_words:
            self._index.index(tokens, show_progress=False)

    def best(self, query: str, k: int) -> list[str]:
        """The k texts with the highest score, best first; fewer where fewer share a word with the query."""
        return self.ranked(self.scores(query), k)

    def scores(self, query: str) -> Any:
        """Of every text, as float64 [texts]; zeros where no word of the query is known."""
        vocabulary = self._index.vocab_dict if self._has_words else {}
        words = [word for word in re.findall(_WORD, query.lower()) if word in vocabulary]
        if not words:
            return np.zeros(len(self._texts))
        return np.asarray(self._index.get_scores(words), dtype=np.float64)

    def ranked(self, scores: Any, k: int) -> list[str]:
        """The k texts with the highest of these scores above 0, best first."""
        hits = np.flatnonzero(scores > 0)
        if len(hits) > k:
            least = np.partition(scores[hits], len(hits) - k)[len(hits) - k]
            hits = hits[scores[hits] >= least]  # ties at the edge stay in until the text decides
        best_first = sorted((-float(scores[hit]), self._texts[hit]) for hit in hits)
        return [text for _, text in best_first[:k]]


def with_context(
    pairs_path: str, storage: Storage, *, k: int = MOST_CONTEXT, max_chars: int = 2000, corpus_path: str | None
) -> tuple[Any, dict[str, int]]:
    """The pairs with a column `context`, as a lazy frame in the order of the input; and what came of it, by name.

    Holds the distinct documents and one context a query in memory (up to k x max_chars characters each); rows stream.

    Args:
        k: documents a query.
        max_chars: each is cut to this many characters; `r3a` cuts to `max_context_chars` in any case.
        corpus_path: where documents are taken from; None for the documents of the pairs themselves.
    Raises:
        InputError: a file or column is off, the pairs have a context already, or a query has two texts.
    """
    polars = load_polars()
    source_path = pairs_path
    pairs, text_columns = scan(
        pairs_path,
        {"query_id": "id", "query": "string"},
        storage,
        has_text=True,
        role="PAIRS",
    )
    names = pairs.collect_schema().names()
    if COLUMN in names:
        raise InputError(f"{pairs_path}: has a column `{COLUMN}` already. Drop or rename it first.")
    for name in ("query_id", "query"):
        refuse_null(pairs, name, path=pairs_path)
    source = pairs
    if corpus_path is not None:
        source_path = corpus_path
        source, text_columns = scan(
            corpus_path,
            {},
            storage,
            has_text=True,
            role="--corpus",
        )
    with translate_polars_errors(source_path):
        texts = source.select(text=document_of(text_columns)).filter(polars.col("text").str.strip_chars() != "")
        documents = texts.unique().collect(engine="streaming")["text"]
    queries = queries_of(pairs, pairs_path)
    index = Bm25Index(documents.to_list())
    best = {text: index.best(text, k) for text in queries["query"].unique().to_list()}
    contexts = [best[text] for text in queries["query"]]
    cut_contexts = [[text[:max_chars] for text in context] for context in contexts]
    column = polars.DataFrame(
        {_KEY: queries[_KEY], COLUMN: cut_contexts},
        schema={_KEY: polars.String, COLUMN: polars.List(polars.String)},
    )
    frame = (
        pairs.with_columns(polars.col("query_id").cast(polars.String).alias(_KEY))
        .join(column.lazy(), on=_KEY, how="left", maintain_order="left")
        .select([*names, COLUMN])
    )
    sizes = [len(context) for context in contexts]
    counts = {
        "queries": queries.height,
        "queries_without_context": sizes.count(0),
        "documents": len(documents),
        "context_documents": sum(sizes),
    }
    return frame, counts


def queries_of(pairs: Any, path: str) -> Any:
    """Ids (as text) and texts of the queries: one row a query, by id.

    Raises:
        InputError: a query has two texts.
    """
    polars = load_polars()
    with translate_polars_errors(path):
        queries = (
            pairs.select(polars.col("query_id").cast(polars.String).alias(_KEY), "query")
            .unique()
            .sort(_KEY, "query")
            .collect(engine="streaming")
        )
    refuse_two_texts(queries[_KEY], path=path, what="query")
    return queries
