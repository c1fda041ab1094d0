"""Context documents for `r3a`: each query's best documents by BM25, where there are no clicks to tell; with noise among
them if asked.

One list a query, the same for all its rows, so that the first stage is still asked once a query. Grades are never
looked at: a context picked by grade would tell the teacher the answer.

BM25 as Lucene has it (k1 = 1.5, b = 0.75), over lower-cased runs of word characters, every word counting: for languages
that put no spaces between words it finds little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from relabel.jobs.files.tables import Kind, document_of, load_polars, refuse_null, scan, translate_polars_errors
from relabel.jobs.pairs.noise import Deck, NoiseRule
from relabel.manifests.errors import InputError
from relabel.manifests.extras import require
from relabel.manifests.storage.context import Storage

MOST_CONTEXT = 4
"""Documents that a job reads from the context column at most."""
COLUMN = "context"
_WORD = r"(?u)\w+"
_KEY = "query id as text"


@dataclass(frozen=True, slots=True)
class ContextCounts:
    """What came of it."""

    queries: int
    queries_without: int
    documents: int
    context_documents: int
    replaced: int


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


@dataclass(frozen=True, slots=True)
class ContextRule:
    """What becomes a query's context.

    Args:
        k: documents a query, where there is no context yet.
        max_chars: each is cut to this many characters; `r3a` cuts to `max_context_chars` in any case.
        noise: replaces a share of them; None for none.
    """

    k: int = MOST_CONTEXT
    max_chars: int = 2000
    noise: NoiseRule | None = None


def with_context(
    pairs_path: str, rule: ContextRule, storage: Storage, *, corpus_path: str | None
) -> tuple[Any, ContextCounts]:
    """The pairs with a column `context`, as a lazy frame in the order of the input.

    Holds the distinct documents and one context a query in memory (up to k x max_chars characters each); rows stream.
    With noise, a context that the pairs have already is what is replaced from, and the documents that a query judges
    are held as well.

    Args:
        corpus_path: where documents are taken from; None for the documents of the pairs themselves.
    Raises:
        InputError: a file or column is off, the pairs have a context already and no noise is asked for, a query has two
            texts or two contexts, or the corpus is too small for the noise.
    """
    polars = load_polars()
    col = polars.col
    noise = rule.noise
    is_given = noise is not None and COLUMN in scan(pairs_path, {}, storage, role="PAIRS")[0].collect_schema()
    wanted: dict[str, Kind] = {"query_id": "id", "query": "text"}
    pairs, text_columns = scan(
        pairs_path, {**wanted, COLUMN: "texts"} if is_given else wanted, storage, has_text=True, role="PAIRS"
    )
    names = pairs.collect_schema().names()
    if COLUMN in names and not is_given:
        raise InputError(
            f"{pairs_path}: has a column `{COLUMN}` already. Drop or rename it first; only --noisy starts from it."
        )
    for name in ("query_id", "query"):
        refuse_null(pairs, name, path=pairs_path)
    document = document_of(text_columns)
    source, source_path = pairs, pairs_path
    if corpus_path is not None:
        source_path = corpus_path
        source, text_columns = scan(corpus_path, {}, storage, has_text=True, role="--corpus")
    documents = _distinct_documents(source, document_of(text_columns), source_path)
    queries = queries_of(pairs, pairs_path, is_given=is_given)
    if is_given:
        contexts = [context[:MOST_CONTEXT] for context in queries[COLUMN].to_list()]
    else:
        contexts = _best_documents(documents, queries["query"], rule.k)
    replaced = 0
    if noise is not None:
        deck = Deck(documents.select("text", "key").iter_rows(), noise, max_chars=rule.max_chars, where=source_path)
        judged = _judged_documents(pairs, document, pairs_path)
        replaced = sum(noise.replaced(len(context)) for context in contexts)
        contexts = [
            deck.noisy(query, context, judged[query]) for query, context in zip(queries["query"], contexts, strict=True)
        ]
    column = polars.DataFrame(
        {_KEY: queries[_KEY], COLUMN: [[text[: rule.max_chars] for text in context] for context in contexts]},
        schema={_KEY: polars.String, COLUMN: polars.List(polars.String)},
    )
    frame = (
        pairs.select(name for name in names if name != COLUMN)
        .with_columns(col("query_id").cast(polars.String).alias(_KEY))
        .join(column.lazy(), on=_KEY, how="left", maintain_order="left")
        .select(names if is_given else [*names, COLUMN])
    )
    sizes = [len(context) for context in contexts]
    return frame, ContextCounts(queries.height, sizes.count(0), documents.height, sum(sizes), replaced)


def _distinct_documents(source: Any, document: Any, path: str) -> Any:
    """Documents that are not blank, each once: `text` and the `key` that stands for it."""
    polars = load_polars()
    with translate_polars_errors(path):
        found = source.select(text=document).filter(polars.col("text").str.strip_chars() != "").unique()
        return found.with_columns(key=polars.col("text").hash()).collect(engine="streaming")


def _best_documents(documents: Any, queries: Any, k: int) -> list[list[str]]:
    """Each query's best documents; a text that several queries have is looked up once."""
    index = Bm25Index(documents["text"].to_list())
    best = {text: index.best(text, k) for text in queries.unique().to_list()}
    return [best[text] for text in queries]


def _judged_documents(pairs: Any, document: Any, path: str) -> dict[str, set[int]]:
    """Keys of the documents that the pairs have with each query."""
    with translate_polars_errors(path):
        keys = pairs.select("query", key=document.hash()).unique().collect(engine="streaming")
    return {query: set(group) for query, group in keys.group_by("query").agg("key").iter_rows()}


def queries_of(pairs: Any, path: str, *, is_given: bool = False) -> Any:
    """Ids (as text) and texts of the queries, with the context that each has where it is given: one row a query, by id.

    Raises:
        InputError: a query has two texts, or two contexts.
    """
    polars = load_polars()
    col = polars.col
    context = col(COLUMN).cast(polars.List(polars.String)).list.drop_nulls().fill_null([])
    with translate_polars_errors(path):
        held = pairs.select(col("query_id").cast(polars.String).alias(_KEY), "query", *([context] if is_given else []))
        found = held.unique().sort(_KEY, "query").collect(engine="streaming")
    twice = found.filter(polars.len().over(_KEY) > 1)
    if twice.height:
        query, one, other = twice[_KEY][0], twice["query"][0], twice["query"][1]
        if one != other:
            raise InputError(
                f"{path}: query `{query}` has two texts, {one[:60]!r} and {other[:60]!r}. Give each text an id of its "
                "own."
            )
        raise InputError(
            f"{path}: query `{query}` has rows with different contexts. Give all rows of a query the same list."
        )
    return found
