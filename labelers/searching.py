"""A search that goes on for several rounds: what `variants` and `review` are shown of the rounds before.

Source: R2RAG, section 3.3 (papers); the columns' names are ours. `relabel rounds` is such a search: jobs/rounds.
"""

import unicodedata

from pydantic import Field

from relabel.labelers.registry import OnceAQueryOptions
from relabel.manifests.labels import InputColumn
from relabel.manifests.specs import TextOptions

ASPECT = InputColumn("aspect", "string", "The side of the question that this round searches.")
PREVIOUS_QUERIES = InputColumn("previous_queries", "list<string>", "Queries of the rounds before.")
PREVIOUS_SUMMARIES = InputColumn("previous_summaries", "list<string>", "Summaries of what was found in them.")
PREVIOUS_DOCS = InputColumn("previous_docs", "list<string>", "Ids of the documents that were kept in them.")


class SearchOptions(OnceAQueryOptions, TextOptions):
    """Options of `variants` and `review`."""

    temperature: float = Field(0.6, ge=0.0, le=5.0)
    """As in the paper; 0 is greedy."""
    top_p: float = Field(0.95, gt=0.0, le=1.0)
    """As in the paper; 1.0 is off."""


def folded(query: str) -> str:
    """A query in which case, white space and punctuation do not count (but `#` does, as in C#, and the like)."""
    text = unicodedata.normalize("NFKC", query).casefold()
    return " ".join("".join(map(_without_punctuation, text)).split())


def _without_punctuation(char: str) -> str:
    is_punctuation = unicodedata.category(char).startswith("P") and char not in "#%&*@"
    return " " if is_punctuation else char
