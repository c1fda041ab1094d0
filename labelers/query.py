"""`query`: a search that the document answers. Reads the document alone, and gives no grade: `relabel pairs queries
--by` makes pairs out of these queries.

Source: InPars and Promptagator write training queries with a language model, from a document. The sentences and the
examples in them are ours.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.one_ask import OneAsk
from relabel.labelers.registry import OnceAQueryOptions
from relabel.manifests.asks import Answer, Ask, Lines
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.specs import LabelerOptions

MADE_QUERY = "made_query"


class QueryOptions(OnceAQueryOptions):
    """Options of `query`."""

    grades: Literal[0] = 0
    """None: the label is a query."""
    max_words: int = Field(8, ge=1, le=50)
    """Most words of the query; a longer one is asked for again."""


class Query(OneAsk):
    """Asks for one query. Flags: those of the answer."""

    Options: ClassVar[type[LabelerOptions]] = QueryOptions
    template_set = "query"
    data = ("document",)
    columns = (LabelColumn(MADE_QUERY, "string", "A search that the document answers."),)

    def __init__(self, options: QueryOptions) -> None:
        most = options.max_words
        self._max_words = most
        # six tokens for a word in a language that the tokenizer knows little of
        super().__init__(options, [Lines("query", 1, 1, 6 * most)], (), {"max_words": most})

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask.

        Raises:
            VerdictError: the answer is out of format, or its query has no word or too many.
        """
        answer = yield self._ask(pair)
        query = " ".join(self._reader.read(answer)["query"].split())
        if not any(char.isalnum() for char in query):
            raise VerdictError("format", f"the query {query[:40]!r} has no word")
        count = len(query.split())
        if count > self._max_words:
            raise VerdictError("format", f"the query has {count} words, expected {self._max_words} at most")
        return Label(None, None, {MADE_QUERY: query}, flags=list(answer.flags))
