"""Relabel only what changed: what is reused, what is asked, and what the manifest says of both."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.labelers.registry import ENGINES
from relabel.labelers.variants import Variants
from relabel.manifests.asks import Ask, Message
from relabel.manifests.label_keys import AnswerKeys, LabelKeys, normalise_query
from relabel.manifests.labels import Pair, Reads
from relabel.manifests.reuse import KeyIndex
from relabel.manifests.run_manifest import engine_identity
from tests.faults.shared_jobs import SIBLINGS, WHOLE_QUERY, chunks_of, options_of
from tests.reuse.conftest import Days, Row, rows_of, said
from tests.strategies import pairs


@pytest.mark.parametrize("labeler", ["r3a", "complexity"])
def test_an_unchanged_day_starts_no_engine_and_says_the_same(
    days: Days, no_engine: Callable[[], None], labeler: str
) -> None:
    rows = rows_of(6, 5)
    days.run("monday", rows, labeler={"name": labeler})
    no_engine()
    days.run("tuesday", rows, labeler={"name": labeler}, reuse=["monday"])
    assert said(days.labels("tuesday")) == said(days.labels("monday"))
    manifest = days.manifest("tuesday")
    assert manifest["rows"] == {"in": 30, "labelled": 0, "reused": 30, "quarantined": 0}
    assert manifest["stages"] == {}
    assert manifest["engines_asked"] == []
    assert manifest["mixed"]["differences"] == []
    (engine,), (first,) = manifest["engines"], days.manifest("monday")["engines"]
    assert engine == engine_identity(first)


def test_the_first_run_is_named_through_generations(days: Days) -> None:
    rows = rows_of(3, 4)
    days.run("monday", rows)
    rows[5] = {**rows[5], "document": "Changed on Tuesday."}
    days.run("tuesday", rows, reuse=["monday"])
    days.run("wednesday", rows, reuse=["tuesday"])
    first, second = (days.manifest(day)["fingerprint"] for day in ("monday", "tuesday"))
    origins = [row["origin"] for row in days.labels("wednesday")]
    assert origins == [second if row == 5 else first for row in range(12)]
    (source,) = days.manifest("wednesday")["reused_from"]
    assert (source["fingerprint"], source["rows"]) == (second, 12)
    assert source["manifest_sha256"] == hashlib.sha256((days.out("tuesday") / "manifest.json").read_bytes()).hexdigest()


def test_rows_that_move_or_change_their_ids_keep_their_labels(days: Days, no_engine: Callable[[], None]) -> None:
    rows = rows_of(4, 5)
    days.run("monday", rows)
    moved = [{**row, "query_id": "new " + row["query_id"], "doc_id": "new " + row["doc_id"]} for row in reversed(rows)]
    no_engine()
    days.run("tuesday", moved, reuse=["monday"])
    labels = days.labels("tuesday")
    assert said(labels) == said(reversed(days.labels("monday")))
    assert [row["doc_id"] for row in labels] == [row["doc_id"] for row in moved]


def test_of_two_outputs_the_first_named_wins_and_both_are_listed(days: Days, no_engine: Callable[[], None]) -> None:
    rows = rows_of(6, 4)
    days.run("left", rows[:16])
    days.run("right", rows[8:])
    no_engine()
    days.run("both", rows, reuse=["right", "left"])
    right, left = (days.manifest(day)["fingerprint"] for day in ("right", "left"))
    assert [row["origin"] for row in days.labels("both")] == [left] * 8 + [right] * 16
    assert {source["fingerprint"]: source["rows"] for source in days.manifest("both")["reused_from"]} == {
        right: 16,
        left: 8,
    }


def test_an_output_that_was_cut_short_gives_what_it_committed(days: Days) -> None:
    rows = rows_of(6, 5)
    job = days.job("monday", rows)
    assert days.call("run", job, "--shard", "1/2")[0] == 0
    done = len(
        [
            1
            for file in (days.out("monday") / "labels").rglob("*.parquet")
            for _ in range(pq.read_metadata(file).num_rows)
        ]
    )
    assert 0 < done < 30
    days.run("tuesday", rows, reuse=["monday"])
    assert days.manifest("tuesday")["rows"] == {"in": 30, "labelled": 30 - done, "reused": done, "quarantined": 0}
    assert days.manifest("tuesday")["reused_from"][0]["manifest_sha256"] is None


def test_a_second_stage_edit_keeps_the_intents(days: Days) -> None:
    rows = rows_of(5, 4)
    days.run("monday", rows)
    templates = days.templates("edited", verdict=("Read|Judge|Now", "Consider and read"))
    days.run("tuesday", rows, labeler={"name": "r3a", "templates": templates}, reuse=["monday"])
    assert days.asks("tuesday") == {"verdict": 20}
    assert [row["intent"] for row in days.labels("tuesday")] == [row["intent"] for row in days.labels("monday")]
    assert days.manifest("tuesday")["rows"]["reused"] == 0
    days.run("alone", rows, labeler={"name": "r3a", "templates": templates})
    assert said(days.labels("tuesday")) == said(days.labels("alone"))


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"seed": 8}},
        {"labeler": {"temperature": 0.5}},
        {"input": {"overlong": "quarantine"}},
        {"engine": {"args": {"p_garbage": 0.01}}},
    ],
    ids=str,
)
def test_a_label_made_in_another_way_is_not_taken_over(days: Days, change: dict[str, Any]) -> None:
    rows = rows_of(2, 3)
    days.run("monday", rows)
    days.run("tuesday", rows, reuse=["monday"], **change)
    assert days.manifest("tuesday")["rows"]["reused"] == 0


def test_speed_and_cut_and_attempts_are_no_part_of_a_label(days: Days, no_engine: Callable[[], None]) -> None:
    rows = rows_of(2, 6)
    days.run("monday", rows)
    no_engine()
    changes: dict[str, Any] = {
        "shards": 3,
        "run": {"chunk_rows": 4},
        "labeler": {"attempts": 5},
        "engine": {"args": {"batch": 3}},
    }
    days.run("tuesday", rows, reuse=["monday"], **changes)
    assert days.manifest("tuesday")["rows"]["reused"] == 12


def test_rows_that_were_quarantined_are_asked_again(days: Days) -> None:
    rows = rows_of(5, 8)
    changes: dict[str, Any] = {
        "labeler": {"name": "direct", "attempts": 1},
        "engine": {"args": {"p_garbage": 0.3}},
        "run": {"max_failed_fraction": 1.0},
    }
    days.run("monday", rows, **changes)
    failed = days.manifest("monday")["rows"]["quarantined"]
    assert failed > 0
    days.run("tuesday", rows, reuse=["monday"], **changes)
    assert days.manifest("tuesday")["rows"]["reused"] == 40 - failed
    assert days.asks("tuesday") == {"score": failed}


def test_a_changed_file_of_an_earlier_output_is_an_error_and_no_label(days: Days) -> None:
    rows = rows_of(2, 3)
    days.run("monday", rows)
    file = days.manifest("monday")["labels"][0]["path"]
    table = pq.read_table(days.out("monday") / file)
    grades = pa.array([2 - grade for grade in table["grade"].to_pylist()], pa.int8())
    pq.write_table(table.set_column(4, table.schema.field("grade"), grades), days.out("monday") / file)
    code, message = days.call("run", days.job("tuesday", rows, reuse=["monday"]))
    assert code == 3
    assert "sha256" in message


def test_reuse_of_a_folder_that_holds_no_run_and_of_the_own_output_is_refused(days: Days) -> None:
    rows = rows_of(2, 3)
    code, message = days.call("run", days.job("tuesday", rows, reuse=["nowhere"]))
    assert (code, "no such folder" in message) == (3, True)
    code, message = days.call("run", days.job("tuesday", rows, reuse=["tuesday.parquet"]))
    assert (code, "a file, and this needs a run's output folder" in message) == (3, True)
    code, message = days.call("run", days.job("tuesday", rows, reuse=["tuesday"]))
    assert (code, "own output" in message) == (3, True)


# What an edited input costs the next day: exactly the asks whose prompts changed are asked again, exactly the rows
# whose texts stayed are reused, and no query has rows of two answers. Labelers that look at a query's documents,
# that look at none, and one that looks at its own alone, over every kind of edit. The engine is `Fickle`: no two of
# its answers have the same number of output tokens.


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


# Keys: what is the same label and what is not, and how keys are found again.


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


# A labeler that looks at all documents of a query: asked once for each, over chunks, shards and runs; a changed
# sibling asks its query again, and nothing else does.


REVIEW: Any = {"name": "review"}


def test_answers_of_an_earlier_run_are_taken_for_rows_that_had_no_label(days: Days) -> None:
    """Rows beyond the prompt's room are tried again each day, and nothing is generated for them."""
    rows = [{**row, "document": row["document"] * (1 if row["query_id"] == "q0" else 60)} for row in rows_of(3, 6)]
    limits = {"engine": {"max_prompt_tokens": 2500}, "run": {"max_failed_fraction": 1.0}}
    days.job("mon", rows, labeler=REVIEW, **limits)
    assert days.call("run", days.folder / "mon.yaml")[0] == 0
    held = len(days.labels("mon"))
    assert 0 < held < len(rows)
    job = days.job("tue", rows, labeler=REVIEW, reuse=["mon"], **limits)
    assert days.call("run", job)[0] == 0
    assert said(days.labels("tue")) == said(days.labels("mon"))
    manifest = days.manifest("tue")
    assert manifest["rows"]["quarantined"] == len(rows) - held
    assert manifest["rows"]["reused"] == 6, "rows of a query are reused all together"
    assert days.manifest("mon")["stages"]["review"]["output_tokens"] > 0
    assert manifest["stages"]["review"]["output_tokens"] == 0
