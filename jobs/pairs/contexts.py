"""Adds context documents to each query: its best documents by BM25, optionally mixed with random documents as noise."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from relabel.jobs.tables import (
    Kind,
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

# Noise among context documents: a share of each query's replaced by random documents of the corpus.
#
# For measuring how much noise a teacher bears, as R3A's Table 4 does ("half" and "all noisy docs": documents "randomly
# replaced with irrelevant ones"). Nobody says that a random document is irrelevant; it is one that no row of the query
# judges and its context did not hold.


@dataclass(frozen=True, slots=True)
class NoiseRule:
    """How much, and of which draw.

    Args:
        share: of a query's context documents, above 0 to 1; the number of documents is rounded, halves up.
        seed: each query draws by itself, so that other queries in the file change nothing.
    """

    share: float
    seed: int

    def replaced(self, num_context: int) -> int:
        """How many of so many documents."""
        return math.floor(self.share * num_context + 0.5)


class Deck:
    """The corpus to draw from.

    Args:
        documents: text and key of each; no two texts equal and none blank, in any order. Equal texts have equal keys.
        max_chars: what a context document is cut to; texts that are equal so far are one document.
        where: what the corpus is called, for messages.
    """

    def __init__(self, documents: Iterable[tuple[str, int]], rule: NoiseRule, *, max_chars: int, where: str) -> None:
        # the draw depends on the corpus, not on its order
        self._documents = sorted((text[:max_chars], key) for text, key in documents)
        self._rule = rule
        self._max_chars = max_chars
        self._where = where

    def noisy(self, query: str, context: Sequence[str], judged: AbstractSet[int]) -> list[str]:
        """The context with its share replaced; the others keep their places.

        Args:
            query: its text, which seeds the draw.
            context: the documents that it has.
            judged: keys of the documents that can't be noise for this query.
        Raises:
            InputError: the corpus holds too few other documents.
        """
        wanted = self._rule.replaced(len(context))
        rng = random.Random(f"{self._rule.seed}|{query}")
        found = list(context)
        shown = {text[: self._max_chars] for text in context}
        places = sorted(rng.sample(range(len(found)), wanted))
        for place, text in zip(places, self._draw(rng, wanted, shown, judged, query), strict=True):
            found[place] = text
        return found

    def _draw(
        self, rng: random.Random, wanted: int, shown: set[str], judged: AbstractSet[int], query: str
    ) -> list[str]:
        deck = self._documents
        if len(deck) < 4 * (wanted + len(shown) + len(judged)):
            # few are left: throwing again and again would take long
            left = list(dict.fromkeys(text for text, key in deck if text not in shown and key not in judged))
            if len(left) < wanted:
                raise InputError(
                    f"{self._where}: query {query[:60]!r} wants {wanted} random documents, and {len(left)} are left "
                    "that it neither judges "
                    "nor has for context. Give a larger corpus with --corpus."
                )
            return rng.sample(left, wanted)
        drawn: dict[str, None] = {}
        while len(drawn) < wanted:
            text, key = deck[rng.randrange(len(deck))]
            if text not in shown and key not in judged:
                drawn[text] = None
        return list(drawn)


# Context documents for `r3a`: each query's best documents by BM25, where there are no clicks; with noise among
# them if asked.
#
# One list a query, the same for all its rows, so that the first stage is still asked once a query. Grades are never
# read: a context picked by grade would give the teacher the answer.
#
# BM25 as Lucene has it (k1 = 1.5, b = 0.75), over lower-cased runs of word characters, every word counting: for
# languages that put no spaces between words it finds little.

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
        # keys of the documents that the pairs have with each query
        with translate_polars_errors(pairs_path):
            keys = pairs.select("query", key=document.hash()).unique().collect(engine="streaming")
        judged = {query: set(group) for query, group in keys.group_by("query").agg("key").iter_rows()}
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
    """Documents that are not blank, each once: `text` and its `key`."""
    polars = load_polars()
    with translate_polars_errors(path):
        found = source.select(text=document).filter(polars.col("text").str.strip_chars() != "").unique()
        return found.with_columns(key=polars.col("text").hash()).collect(engine="streaming")


def _best_documents(documents: Any, queries: Any, k: int) -> list[list[str]]:
    """Each query's best documents; a text that several queries have is searched once."""
    index = Bm25Index(documents["text"].to_list())
    best = {text: index.best(text, k) for text in queries.unique().to_list()}
    return [best[text] for text in queries]


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
    refuse_two_texts(found.select(_KEY, "query").unique()[_KEY], path=path, what="query")
    twice = found.filter(polars.len().over(_KEY) > 1)
    if twice.height:
        raise InputError(
            f"{path}: query `{twice[_KEY][0]}` has rows with different contexts. Give all rows of a query one list."
        )
    return found
