"""`relabel pairs cited`: the citation filter on cases counted by hand, and what holds for any input."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relabel.manifests.files import Storage

pytest.importorskip("polars")

from relabel.jobs.pairs.citations import CitationRule, cited_pairs
from relabel.manifests.errors import InputError

DOCS = [{"doc_id": f"d{i}", "document": f"text {i}"} for i in range(10)]
SCHEMA = pa.schema(
    [
        ("query_id", pa.string()),
        ("query", pa.string()),
        ("answer_id", pa.string()),
        ("cited", pa.list_(pa.string())),
        ("candidates", pa.list_(pa.string())),
    ]
)


def answers(query: str, *cited: str, shown: str = "d0 d1 d2 d3") -> list[dict[str, Any]]:
    """One answer for each text of cited ids."""
    return [
        {
            "query_id": query,
            "query": f"about {query}",
            "answer_id": f"a{i}",
            "cited": ids.split(),
            "candidates": shown.split(),
        }
        for i, ids in enumerate(cited)
    ]


FIVE = ("d0 d1", "d0", "d1 d1", "d2", "d0")  # d0 in 3 answers, d1 in 2 (once named twice), d2 in 1, d3 in none


def build(
    write: Callable[..., str], rows: list[dict[str, Any]], docs: list[dict[str, Any]] | None = None, **rule: Any
) -> Any:
    frame, counts = cited_pairs(
        write("answers.parquet", rows, SCHEMA),
        write("docs.parquet", DOCS if docs is None else docs),
        CitationRule(**rule),
        Storage(),
    )
    return frame.collect().to_dicts(), counts


def test_five_answers_counted_by_hand(write: Callable[..., str]) -> None:
    rows, counts = build(write, answers("q", *FIVE))
    assert [(row["doc_id"], row["kind"], row["cited_in"]) for row in rows] == [
        ("d0", "likely_positive", 3),
        ("d1", "likely_positive", 2),
        ("d2", "hard_negative", 1),
        ("d3", "hard_negative", 0),
    ]
    assert rows[0] == {
        "query_id": "q",
        "query": "about q",
        "doc_id": "d0",
        "document": "text 0",
        "kind": "likely_positive",
        "cited_in": 3,
    }
    assert counts.items() >= {"queries": 1, "likely_positive": 2, "hard_negative": 2, "random_negative": 0}.items()


def test_what_is_cited_without_being_shown_counts_for_nothing_and_is_reported(write: Callable[..., str]) -> None:
    rows, counts = build(write, answers("q", "d9", "d9 d0", "d0", "", ""))
    assert "d9" not in {row["doc_id"] for row in rows}
    assert counts["citations_ignored"] == 2


def test_documents_that_the_corpus_lacks_are_reported_and_left_out(write: Callable[..., str]) -> None:
    rows, counts = build(write, answers("q", *FIVE, shown="d0 d1 d2 d3 x1 x2"))
    assert len(rows) == 4
    assert counts["documents_missing"] == 2


def test_title_and_body_stay_columns_of_their_own_and_integer_ids_become_text(write: Callable[..., str]) -> None:
    docs = [{"doc_id": i, "title": f"t{i}", "body": None} for i in range(3)]
    rows = [{"query_id": 7, "query": "q", "answer_id": a, "cited": [0], "candidates": [0, 1]} for a in range(2)]
    frame, _ = cited_pairs(
        write("a.parquet", rows), write("d.parquet", docs), CitationRule(2, 2, random_negatives=1), Storage()
    )
    assert [tuple(row.values()) for row in frame.collect().to_dicts()] == [
        ("7", "q", "0", "t0", None, "likely_positive", 2),
        ("7", "q", "1", "t1", None, "hard_negative", 0),
        ("7", "q", "2", "t2", None, "random_negative", 0),
    ]


def test_the_seed_decides_the_draw_and_other_queries_do_not(write: Callable[..., str]) -> None:
    docs = [{"doc_id": f"d{i}", "document": f"text {i}"} for i in range(400)]

    def drawn(rows: list[dict[str, Any]], seed: int) -> list[str]:
        built, _ = build(write, rows, docs, random_negatives=5, seed=seed)
        return [row["doc_id"] for row in built if row["query_id"] == "q" and row["kind"] == "random_negative"]

    mine = answers("q", *FIVE)
    assert drawn(mine, 7) == drawn(mine[::-1], 7) == drawn([*answers("p", *FIVE), *mine], 7)
    assert drawn(mine, 7) != drawn(mine, 8)


ids = st.integers(0, 11).map("d{}".format)
id_lists = st.lists(ids, max_size=6)


@st.composite
def answer_sets(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows = []
    for query in range(draw(st.integers(1, 4))):
        for answer in range(draw(st.integers(3, 5)) if query == 0 else draw(st.integers(1, 5))):
            row = {"query_id": f"q{query}", "query": f"query {query}", "answer_id": f"a{answer}"}
            rows.append({**row, "cited": draw(id_lists), "candidates": draw(st.lists(ids, min_size=1, max_size=6))})
    return draw(st.permutations(rows))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=answer_sets(),
    cited_in=st.integers(1, 3),
    negatives=st.integers(0, 5),
    texts=st.lists(st.integers(0, 8), min_size=12, max_size=12),
)
def test_for_any_answers_the_pairs_are_the_ones_that_a_plain_count_gives(
    write: Callable[..., str], rows: list[dict[str, Any]], cited_in: int, negatives: int, texts: list[int]
) -> None:
    docs = [{"doc_id": f"d{i}", "document": f"text {text}"} for i, text in enumerate(texts)]
    rule = {"answers_per_query": 3, "cited_in": cited_in, "random_negatives": negatives}
    built, counts = build(write, rows, docs, **rule)
    by_query: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["answer_id"]):
        by_query.setdefault(row["query_id"], []).append(row)
    text_of = {doc["doc_id"]: doc["document"] for doc in docs}
    assert counts["queries_left_out"] == sum(len(held) < 3 for held in by_query.values())
    for query, held in by_query.items():
        mine = [row for row in built if row["query_id"] == query]
        assert len({row["doc_id"] for row in mine}) == len(mine), "no pair twice"
        if len(held) < 3:
            assert not mine
            continue
        shown = {doc for row in held[:3] for doc in row["candidates"]}
        times = {doc: sum(doc in row["cited"] for row in held[:3]) for doc in shown}
        positives = {doc for doc in shown if times[doc] >= cited_in}
        positive_texts = {text_of[doc] for doc in positives}
        hard = {doc for doc in shown - positives if text_of[doc] not in positive_texts}
        assert {row["doc_id"] for row in mine if row["kind"] == "likely_positive"} == positives
        assert {row["doc_id"] for row in mine if row["kind"] == "hard_negative"} == hard
        assert all(row["cited_in"] == times[row["doc_id"]] for row in mine if row["kind"] != "random_negative")
        drawn = [row["document"] for row in mine if row["kind"] == "random_negative"]
        ever = {text_of[doc] for row in held for doc in [*row["candidates"], *row["cited"]]}
        assert not set(drawn) & ever
        assert len(set(drawn)) == len(drawn) == min(negatives, len(set(text_of.values()) - ever))
    again, _ = build(write, rows[::-1], docs[::-1], **rule)
    assert again == built


def row(**changes: Any) -> dict[str, Any]:
    return {**answers("q", "d0")[0], **changes}


@pytest.mark.parametrize(
    ("rows", "docs", "message"),
    [
        ([row(), row()], DOCS, "answer `a0` of query `q` occurs 2 times"),
        ([row(), row(answer_id="a1", query="other")], DOCS, "query `q` has two texts"),
        ([row(query_id=None)], DOCS, "row 0 has no `query_id`"),
        ([row()], DOCS, r"no query has 5 answers \(the most is 1\). Lower --answers-per-query"),
        (
            answers("q", *FIVE, shown="x y"),
            DOCS,
            "no candidate of any query is in docs.parquet. Do the document ids agree?",
        ),
        (
            answers("q", *FIVE),
            [{"doc_id": "d0", "document": t} for t in "ab"],
            "document `d0` has two texts",
        ),
        (
            answers("q", *FIVE),
            [{"id": "d0", "document": "x"}],
            r"no column `doc_id` \(--docs\); it has id, document. Did you mean",
        ),
    ],
)
def test_bad_rows_are_named(
    write: Callable[..., str], rows: list[dict[str, Any]], docs: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build(write, rows, docs)


def test_the_command_from_end_to_end(relabel: Callable[..., Any], write: Callable[..., str], folder: Path) -> None:
    write("a.parquet", [*answers("few", "d0"), *answers("q", *FIVE)], SCHEMA)
    write("d.parquet", DOCS)
    call = ("pairs", "cited", "a.parquet", "--docs", "d.parquet", "--to", "out/p.parquet", "--random-negatives", "2")
    done = relabel(*call, "--output", "json")
    assert done.code == 0, done
    assert done.json["pairs"] == 6
    assert done.json["queries_left_out"] == 1
    first = (folder / "out/p.parquet").read_bytes()
    relabel(*call).refused(2, "out/p.parquet: is there already", "--force")
    assert relabel(*call, "--force").code == 0
    assert (folder / "out/p.parquet").read_bytes() == first
    relabel(*call[:3], "--docs", "d.parquet", "--to", "d.parquet", "--force").refused(2, "is in the input d.parquet")
    files = fsspec.filesystem("memory")
    for name in ("a.parquet", "d.parquet"):
        files.pipe_file(f"/pairs-cited/{name}", (folder / name).read_bytes())
    far = ("pairs", "cited", "memory://pairs-cited/a.parquet", "--docs", "memory://pairs-cited/d.parquet", *call[7:])
    assert relabel(*far, "--to", "memory://pairs-cited/out/p.parquet").code == 0
    assert files.cat_file("/pairs-cited/out/p.parquet") == first
    relabel(*far, "--to", "memory://pairs-cited/out/p.parquet").refused(2, "is there already", "--force")
    files.rm("/pairs-cited", recursive=True)
    relabel(*call, "--force", "--cited-in", "6").refused(2, "--cited-in 6 of --answers-per-query 5")


@pytest.mark.parametrize("command", ["cited", "context", "queries", "chunk", "tree", "unjudged"])
def test_help_is_the_one_reviewed(
    relabel: Callable[..., Any], golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    done = relabel("pairs", command, "--help")
    assert done.code == 0
    assert done.out.rstrip().rpartition("\n")[2].strip().startswith(f"Example: relabel pairs {command} ")
    golden(f"help/pairs-{command}.txt", done.out)
