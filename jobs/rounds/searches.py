"""The state of each question's search, as its rounds say; pure. And the trajectories that come of it, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from relabel.jobs.rounds.stop_rule import stop_reason
from relabel.manifests.specs import RoundsSpec

TEXTS = pa.list_(pa.string())
ROUND = pa.struct(
    [
        ("query", pa.string()),
        ("shown", TEXTS),
        ("is_sufficient", pa.bool_()),
        ("p_sufficient", pa.float32()),
        ("new_query", pa.string()),
        ("useful", TEXTS),
        ("summary", pa.string()),
    ]
)
"""What was searched in a round, ids of the documents that the review was shown, and what it says; nulls where it
failed. `p_sufficient` is P(yes), null where the engine gives no distribution.
"""
TRAJECTORIES = pa.schema(
    [
        ("query_id", pa.string()),
        ("query", pa.string()),
        ("stopped", pa.string()),
        ("reason", pa.string()),
        ("num_rounds", pa.int32()),
        ("useful", TEXTS),
        ("useful_tokens", pa.int64()),
        ("rounds", pa.list_(ROUND)),
    ],
    metadata={"relabel.schema": "trajectories-1"},
)
"""A row a question. `stopped` is `sufficient`, `tokens`, `rounds` or `failed`, and `reason` says why a review failed;
`useful` are the documents of all rounds, in the order in which they were named.
"""


class RoundReview(NamedTuple):
    """What a round's review says of one question.

    Args:
        shown: ids of the documents that it was shown.
        p_sufficient: P(yes).
        useful: of the documents that are new, those that matter, the most important first.
        failure: why there is no answer; then all before it is empty.
    """

    shown: tuple[str, ...] = ()
    is_sufficient: bool | None = None
    p_sufficient: float | None = None
    new_query: str | None = None
    useful: tuple[str, ...] = ()
    summary: str | None = None
    failure: str | None = None


class Round(NamedTuple):
    """A round of one question: what was searched, and what came of it."""

    query: str
    review: RoundReview


@dataclass(slots=True)
class Search:
    """One question's search.

    Args:
        useful: documents that were found to matter, id → tokens, in the order in which they were named.
        stopped: why it is over; None while it goes on.
    """

    query_id: str
    query: str
    rounds: list[Round] = field(default_factory=list)
    useful: dict[str, int] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def next_query(self) -> str:
        """What the next round searches: the question itself, then what the last review asks for."""
        return (self.rounds[-1].review.new_query or "") if self.rounds else self.query

    @property
    def useful_tokens(self) -> int:
        return sum(self.useful.values())

    def take(self, review: RoundReview, offered: Mapping[str, int], limits: RoundsSpec) -> None:
        """Go on by a round.

        Args:
            offered: tokens of the documents that were found for it, by id. What the review says of other documents
                does not count: a round that found none was shown an empty one.
        """
        shown = tuple(doc for doc in review.shown if doc in offered)
        useful = tuple(doc for doc in review.useful if doc in offered)
        review = review._replace(shown=shown, useful=useful, summary=review.summary if useful else None)
        self.rounds.append(Round(self.next_query, review))
        self.useful |= {doc: offered[doc] for doc in useful}
        self.stopped = (
            "failed"
            if review.failure is not None
            else stop_reason(
                self.useful_tokens,
                is_sufficient=bool(review.is_sufficient),
                num_rounds=len(self.rounds),
                limits=limits,
            )
        )


def trajectories(searches: Iterable[Search]) -> pa.Table:
    """A row for each search, in their order, with the columns of `TRAJECTORIES`."""
    rows = [
        {
            "query_id": one.query_id,
            "query": one.query,
            "stopped": one.stopped,
            "reason": one.rounds[-1].review.failure,
            "num_rounds": len(one.rounds),
            "useful": list(one.useful),
            "useful_tokens": one.useful_tokens,
            "rounds": [{"query": query, **review._asdict()} for query, review in one.rounds],
        }
        for one in searches
    ]
    return pa.Table.from_pylist(rows, schema=TRAJECTORIES)
