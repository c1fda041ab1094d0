"""Systems come as TREC runs, as answers of OpenSearch and Elasticsearch, and as tables: all are read alike; what is
off is refused with what, where, and what to do.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.labels import texts_of
from relabel.manifests.rankings import RankingColumns, load_ranking

Write = Callable[[str, list[str]], str]
ROWS = [("q2", "é", 3.0), ("q1", "a", 1.5), ("q1", "007", 2.5), ("q1", "b", 2.5)]
ORDER = [("q1", "b"), ("q1", "007"), ("q1", "a"), ("q2", "é")]
"""By query, by score, and equal scores by document id, last first."""


def read(path: str, columns: RankingColumns | None = None) -> list[tuple[str, str]]:
    found = load_ranking(path, Storage(), columns)
    return list(zip(texts_of(found.query_ids), texts_of(found.doc_ids), strict=True))


def hits(*docs: str) -> dict[str, Any]:
    return {"hits": {"total": {"value": len(docs)}, "hits": [{"_id": doc, "_score": None} for doc in docs]}}


def test_a_trec_run_is_ordered_as_trec_eval_does(write_lines: Write) -> None:
    lines = [f"{query} Q0 {doc} 9 {score} tag" for query, doc, score in ROWS]
    assert read(write_lines("a.run", [*lines, ""])) == ORDER
    assert read(write_lines("input.txt", lines)) == ORDER


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv", "tsv"])
def test_tables_rank_by_score_or_by_rank(write_lines: Write, suffix: str) -> None:
    for name in ("score", "rank"):
        path = f"{name}.{suffix}"
        rows = [{"query_id": query, "doc_id": doc, name: value} for query, doc, value in ROWS]
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif suffix == "jsonl":
            write_lines(path, [json.dumps(row) for row in rows])
        else:
            cut = "\t" if suffix == "tsv" else ","
            write_lines(path, [cut.join(rows[0]), *(cut.join(map(str, row.values())) for row in rows)])
        wanted = ORDER if name == "score" else [("q1", "a"), ("q1", "b"), ("q1", "007"), ("q2", "é")]
        assert read(path) == wanted


def test_another_column_ranks_where_it_is_named(folder: object) -> None:
    rows = [{"q": query, "d": doc, "score": 0.0, "bm25": score} for query, doc, score in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    assert read("a.parquet", RankingColumns("q", "d", "bm25")) == ORDER


@pytest.mark.parametrize(
    "value",
    [
        {"q2": hits("é"), "q1": hits("b", "007", "a")},
        [{"query_id": "q1", **hits("b", "007", "a")}, {"query_id": "q2", "response": hits("é")}],
        {
            "metric_score": 0.4,
            "details": {
                "q1": {"hits": [{"hit": {"_id": doc, "_score": 1}, "rating": None} for doc in ("b", "007", "a")]},
                "q2": {"hits": [{"hit": {"_id": "é", "_score": 1}, "rating": 2}]},
            },
        },
    ],
    ids=["by query", "list", "rank_eval"],
)
def test_answers_of_a_search_engine_are_in_their_own_order(write_lines: Write, value: Any) -> None:
    assert read(write_lines("hits.json", [json.dumps(value)])) == ORDER


def test_answers_come_a_line_each_too(write_lines: Write) -> None:
    lines = [json.dumps({"query_id": "q1", **hits("b", "007", "a")}), "", json.dumps({"query_id": "q2", **hits("é")})]
    assert read(write_lines("hits.jsonl", lines)) == ORDER
    by_query = [json.dumps({"q1": hits("b", "007", "a")}), json.dumps({"q2": hits("é")})]
    assert read(write_lines("by-query.jsonl", by_query)) == ORDER


@pytest.mark.parametrize(
    ("path", "text", "parts"),
    [
        ("a.run", "q1 0 d1 2", ("four fields", "judgments", "--labels or --gold")),
        ("a.run", "q1 Q0 d1 1 0.5", ("line 1 has 5 fields, and 6 are wanted",)),
        ("a.run", "q1 Q0 d1 1 high tag", ("row 0 has the score 'high'", "no number")),
        ("a.run", "q1 Q0 d1 1 nan tag", ("row 0 has the score 'nan'",)),
        ("a.run", "q1 Q0 d1 1 2 t\nq1 Q0 d2 2 1 t\nq1 Q0 d1 3 0 t", ("document d1 of query q1", "more than once")),
        ("a.run", "", ("holds no document of any query",)),
        ("a.csv", "query_id,doc_id,grade\nq1,d1,2", ("no column `score`, `rank` or `cosine`", "doc_id, grade")),
        ("a.csv", "qid,doc_id,score\nq1,d1,2", ("no column `query_id`", "--by")),
        ("a.csv", "query_id|doc_id|score\nq1|d1|2", ("columns are divided by '|'", "with commas")),
        ("a.csv", "query_id|doc_id|score\nq1|d1|2,5", ("has 2 fields", "names 1 (columns are divided by ',')")),
        ("a.csv", "query_id;doc_id;score\nq1;d1;2,5", ("row 2 (the header is row 1) has the score '2,5'", "no number")),
        ("a.csv", "query_id,doc_id,score\nq1,d1,", ("row 2 (the header is row 1) has the score ''",)),
        ("a.json", "{", ("is not JSON",)),
        ("a.json", json.dumps(hits("a")), ("no query is named", '"QUERY_ID": ANSWER')),
        ("a.json", json.dumps({"responses": [hits("a")]}), ("no query is named",)),
        ("a.json", json.dumps({"q1": {"error": "shard failed"}}), ("query q1 has no list of hits", "shard failed")),
        ("a.json", json.dumps({"error": {"type": "no_index"}, "status": 404}), ("an error of the search", "no_index")),
        ("a.json", json.dumps({"q1": {**hits("a"), "timed_out": True}}), ("answer to query q1 timed out", "Ask again")),
        (
            "a.json",
            json.dumps({"q1": {**hits("a"), "_shards": {"total": 5, "successful": 3, "failed": 2}}}),
            ("answer to query q1, 2 of 5 shards failed", "Ask again"),
        ),
        ("a.json", json.dumps({"q1": {"hits": [{"_score": 1}]}}), ("a hit of query q1 has no `_id`",)),
        ("a.json", json.dumps({"q1": hits("a", "a")}), ("document a of query q1",)),
        ("a.json", json.dumps([hits("a")]), ("item 0 names no `query_id`",)),
        ("a.jsonl", json.dumps(hits("a")), ("line 1 names no `query_id`",)),
        ("a.jsonl", (json.dumps({"query_id": 1, **hits("a")}) + "\n") * 2, ("query 1 comes twice",)),
        ("absent.run", None, ("absent.run",)),
    ],
)
def test_what_is_off_is_refused(write_lines: Write, path: str, text: str | None, parts: tuple[str, ...]) -> None:
    if text is not None:
        write_lines(path, text.split("\n"))
    with pytest.raises(InputError) as refused:
        read(path)
    for part in (path, *parts):
        assert part in str(refused.value)


def test_rankings_may_be_compressed_by_gzip(folder: object) -> None:
    answer = {**hits("a", "b"), "_shards": {"total": 5, "successful": 5, "failed": 0}}
    texts = {"a.run": "q1 Q0 a 1 2 t\nq1 Q0 b 2 1 t\n", "a.json": json.dumps({"q1": answer})}
    for name, text in texts.items():
        Path(f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        found = load_ranking(f"{name}.gz", Storage())
        assert texts_of(found.doc_ids) == ["a", "b"]
