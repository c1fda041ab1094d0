"""Keys: what is the same label and what is not, and how keys are found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.labelers.variants import Variants
from relabel.manifests.asks import Ask, Message
from relabel.manifests.labels import Pair, Reads
from relabel.manifests.reuse import AnswerKeys, KeyIndex, LabelKeys, normalise_query
from tests.strategies import pairs, texts

PARTS: dict[str, Any] = {
    "labeler": {"name": "r3a", "grades": 3, "attempts": 3},
    "templates": {"verdict.j2": "0"},
    "stages": {"verdict": "0"},
    "model": "m",
    "engine": {"name": "fake", "seed": 1},
    "overlong": "truncate",
}
COLUMNS = Variants.input_columns


def key(pair: Pair, parts: dict[str, Any] = PARTS, *, document: bool = True, context: bool = True) -> bytes:
    return LabelKeys(parts, Reads(context, document, COLUMNS)).keys([pair])[0]


@given(st.lists(pairs(), max_size=8))
def test_a_key_does_not_depend_on_the_rows_around_it(rows: list[Pair]) -> None:
    assert LabelKeys(PARTS, Reads(True, True, COLUMNS)).keys(rows) == [key(row) for row in rows]


@given(pairs(), pairs())
def test_keys_are_equal_only_for_the_same_query_document_and_context(one: Pair, other: Pair) -> None:
    def texts_of(pair: Pair) -> tuple[Any, ...]:
        more = (pair.columns.get(column.name) or None for column in COLUMNS)
        return normalise_query(pair.query), pair.document, pair.context, *more

    assert (key(one) == key(other)) == (texts_of(one) == texts_of(other))


@given(texts(4), texts(4), st.lists(texts(2), max_size=3))
def test_texts_that_run_into_each_other_keep_their_own_keys(query: str, document: str, context: list[str]) -> None:
    """Moving a character from one field to the next is another row."""
    pair = Pair(0, "q", query, "d", document, tuple(context))
    moved = Pair(0, "q", query, "d", "x" + document, tuple(context))
    listed = Pair(0, "q", query, "d", document, (*context, "x"))
    assert len({key(pair), key(moved), key(listed)}) == 3


def test_queries_that_only_look_different_are_one_and_documents_never() -> None:
    composed, decomposed = "caf\u00e9  au\tlait ", "cafe\u0301 au lait"
    assert key(Pair(0, "q", composed, "d", "")) == key(Pair(1, "p", decomposed, "e", ""))
    assert key(Pair(0, "q", "", "d", "\u00e9")) != key(Pair(0, "q", "", "d", "e\u0301"))
    assert key(Pair(0, "q", "", "d", "a b")) != key(Pair(0, "q", "", "d", "a  b"))
    assert key(Pair(0, "q", "", "d", "", ("\u00e9",))) != key(Pair(0, "q", "", "d", "", ("e\u0301",)))
    assert key(Pair(0, "q", "Red", "d", "")) != key(Pair(0, "q", "red", "d", ""))


def test_what_the_labeler_does_not_read_does_not_count() -> None:
    one, other = Pair(0, "q", "x", "d", "one", ("a",)), Pair(0, "q", "x", "d", "other", ("b",))
    assert key(one, document=False, context=False) == key(other, document=False, context=False)
    assert key(one, document=False) != key(other, document=False)
    assert key(one, context=False) != key(other, context=False)


@pytest.mark.parametrize("part", [part for part in PARTS if part != "labeler"])
def test_every_part_of_the_recipe_counts(part: str) -> None:
    pair = Pair(0, "q", "x", "d", "y")
    changed = PARTS | {part: "other" if isinstance(PARTS[part], str) else {"other": "1"}}
    assert key(pair) != key(pair, changed)
    assert key(pair) == key(
        pair, PARTS | {"labeler": PARTS["labeler"] | {"attempts": 9}, "columns": {}, "limit": 5, "cut": {}}
    )


def test_an_answers_key_leaves_out_whose_rows_share_it_and_nothing_else() -> None:
    keys = AnswerKeys(PARTS)
    ask = Ask("intent", (Message("user", ("Say: ", "socks", "."), ("query",)),), None, 10, shared_by="q1")
    same = Ask("intent", (Message("user", ("Say: ", "socks", "."), ("query",)),), None, 10, shared_by="q2")
    moved = Ask("intent", (Message("user", ("Say: s", "ocks", "."), ("query",)),), None, 10, shared_by="q1")
    assert keys.key(ask, 0, 0, 0) == keys.key(same, 0, 0, 0)
    others = [keys.key(moved, 0, 0, 0), keys.key(ask, 1, 0, 0), keys.key(ask, 0, 1, 0), keys.key(ask, 0, 0, 1)]
    assert len({keys.key(ask, 0, 0, 0), *others, AnswerKeys(PARTS | {"model": "n"}).key(ask, 0, 0, 0)}) == 6


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4))),
)
def test_an_index_finds_the_first_of_equal_keys_also_where_halves_collide(known: list[Any], wanted: list[Any]) -> None:
    """Halves are drawn from four values, so that nearly every first half collides."""
    index = KeyIndex(np.array(known, np.uint64).reshape(-1, 2), np.arange(len(known), dtype=np.uint64))
    first = {pair: number for number, pair in reversed(list(enumerate(known)))}
    is_known, values = index.find(np.array(wanted, np.uint64).reshape(-1, 2))
    assert [int(value) if found else None for found, value in zip(is_known, values, strict=True)] == [
        first.get(pair) for pair in wanted
    ]
    assert len(first) <= len(index) <= len(known)
