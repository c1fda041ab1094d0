"""What an edited input costs the next day: exactly the asks whose prompts changed are asked again, exactly the rows
whose texts stayed are reused, and no query has rows of two answers. Labelers that look at a query's documents,
that look at none, and one that looks at its own alone, over every kind of edit.

The engine is `Fickle`: no two of its answers have the same number of output tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest

from relabel.labelers.engines.registry import ENGINES
from tests.faults.shared_jobs import SIBLINGS, WHOLE_QUERY, chunks_of, options_of
from tests.reuse.conftest import Days, Row, rows_of

Edit = Callable[[list[Row]], list[Row]]
NAMES = [*WHOLE_QUERY, "direct"]
EVERY_DAY = (SIBLINGS[0], "direct")
QUERY = 3


def chunked(rows: list[Row]) -> list[Row]:
    return [{"chunks": chunks_of(row["document"]), **row} for row in rows]


def at(which: str, **values: Any) -> Edit:
    return lambda rows: [{**row, **values} if row["doc_id"] == which else row for row in rows]


def as_one_chunk(rows: list[Row]) -> list[Row]:
    """One document's chunks are numbered otherwise: it is one chunk now."""
    (row,) = (row for row in rows if row["doc_id"] == "d3-1")
    text = row["document"]
    one = {**chunks_of(text)[0], "text": text, "end": len(text), "token_len": len(text) // 4}
    return at("d3-1", chunks=[one])(rows)


def reordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["doc_id"] == "d3-1")


EDITS: dict[str, Edit] = {
    "nothing": lambda rows: rows,
    "the query's text": lambda rows: [
        {**row, "query": "red wool socks"} if row["query_id"] == f"q{QUERY}" else row for row in rows
    ],
    "a sibling's text": lambda rows: chunked(at("d3-1", document="Other socks, of cotton, in red.")(without(rows))),
    "a sibling's id": at("d3-1", doc_id="d3-9"),
    "a sibling less": lambda rows: [row for row in rows if row["doc_id"] != "d3-1"],
    "a sibling more": lambda rows: [*rows, {**rows[-1], "query_id": "q3", "query": "blue wool socks 3"}],
    "another order of siblings": reordered,
    "other chunks": as_one_chunk,
    "another query": lambda rows: chunked(at("d5-0", document="Shoes.")(without(rows))),
    "another order of queries": lambda rows: sorted(rows, key=lambda row: row["query_id"], reverse=True),
    "a context": at("d3-1", context=["x"]),
}


def without(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "chunks"} for row in rows]


def texts_of(name: str, row: Row) -> Hashable:
    """What a labeler is shown of one document."""
    return {
        "evidence-set": tuple(chunk["text"] for chunk in row["chunks"]),
        "variants": None,
        "complexity": None,
    }.get(name, row["document"])


def asks_of(name: str, rows: list[Row]) -> set[Hashable]:
    """What a labeler asks over these rows: the data in each prompt."""
    found: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    for row in rows:
        found[row["query"], None if name in WHOLE_QUERY else row["document"]].append(texts_of(name, row))
    return {(ask, tuple(texts) if name in SIBLINGS else None) for ask, texts in found.items()}


def labels_of(name: str, rows: list[Row]) -> Counter[Hashable]:
    """What each row's label depends on."""
    queries = defaultdict[str, list[Row]](list)
    for row in rows:
        queries[row["query_id"]].append(row)
    found = Counter[Hashable]()
    for of_query in queries.values():
        seen = tuple((row["doc_id"], row["document"], str(texts_of(name, row))) for row in of_query)
        for place, row in enumerate(of_query):
            found[row["query"], (seen, place) if name in SIBLINGS else texts_of(name, row)] += 1
    return found


@pytest.fixture
def fickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`fickle()`: the `engine` section of a job."""
    monkeypatch.setitem(ENGINES, "fickle", "tests.faults.odd_engine:Fickle")

    def section(**args: Any) -> dict[str, Any]:
        return {"name": "fickle", "args": {"log": str(tmp_path), **args}}

    return section


def agree(labels: list[Row]) -> bool:
    """Whether rows of one query come from one answer."""
    found = defaultdict[str, set[int]](set)
    for row in labels:
        found[row["query_id"]].add(row["output_tokens"])
    return all(len(tokens) == 1 for tokens in found.values())


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in EVERY_DAY else pytest.mark.full) for one in NAMES]
)
def test_an_edit_asks_again_exactly_what_it_changed(
    days: Days, fickle: Callable[..., dict[str, Any]], name: str
) -> None:
    rows = chunked(rows_of(6, 3))
    job = {"labeler": options_of(name), "engine": fickle()}
    days.run("mon", rows, **job)
    assert sum(days.asks("mon").values()) == len(asks_of(name, rows))
    for number, (edit, alter) in enumerate(EDITS.items()):
        changed, day = alter(rows), f"tue-{number}"
        code, result = days.call("run", days.job(day, changed, reuse=["mon"], **job))
        assert code == 0, result
        new = asks_of(name, changed) - asks_of(name, rows)
        assert sum(days.asks(day).values()) == len(new), edit
        known = labels_of(name, rows)
        kept = Counter({one: count for one, count in labels_of(name, changed).items() if one in known})
        assert days.manifest(day)["rows"]["reused"] == kept.total(), edit
        assert name not in WHOLE_QUERY or agree(days.labels(day)), edit
