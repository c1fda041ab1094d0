"""What each form of judgments holds, as the tools that own them write and read it; what is merged, and what is refused
with its place.
"""

import csv
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = [
    {"query_id": "q1", "query": "oak table", "doc_id": "a", "grade": 2},
    {"query_id": "q1", "query": "oak table", "doc_id": "b", "grade": 0},
    {"query_id": "q2", "query": "lamp", "doc_id": "a", "grade": 1},
]
AS_TEXT = [(row["query"], row["doc_id"], row["grade"]) for row in ROWS]

OPENSEARCH = {
    "name": "mine",
    "description": "by hand",
    "type": "IMPORT_JUDGMENT",
    "judgmentRatings": [
        {"query": "oak table", "ratings": [{"docId": "a", "rating": "2.0"}, {"docId": "b", "rating": "0"}]},
        {"query": "lamp", "ratings": [{"docId": "a", "rating": 1}]},
        {"query": "no ratings", "ratings": []},
    ],
}
FETCHED = {"took": 1, "hits": {"total": {"value": 1}, "hits": [{"_id": "x", "_source": OPENSEARCH}]}}
QUEPID = "query,docid,rating\noak table,a,2.0\noak table,b,0.0\nno ratings\npadded,,\n lamp , a,1\n"
RRE_GROUPS = {
    "index": "shop",
    "id_field": "id",
    "topics": [
        {
            "description": "furniture",
            "query_groups": [
                {
                    "name": "oak",
                    "queries": [{"template": "t.json", "placeholders": {"$query": "oak table"}}],
                    "relevant_documents": {"a": {"gain": 2}, "b": {"gain": 0}},
                }
            ],
        },
        {
            "query_groups": [
                {"queries": [{"placeholders": {"$query": "lamp"}}], "relevant_documents": {"1": ["a"]}},
                {"queries": [{"placeholders": {"$query": "no ratings"}}]},
            ]
        },
    ],
}
RRE_OF_QUEPID = {
    "id_field": "id",
    "index": "case 1",
    "template": "template.json",
    "queries": [
        {"placeholders": {"$query": "oak table"}, "relevant_documents": {"2.0": ["a"], "0.0": ["b"]}},
        {"placeholders": {"$query": "lamp"}, "relevant_documents": {"1": ["a"]}},
        {"placeholders": {"$query": "no ratings"}},
    ],
}
RANK_EVAL = {
    "requests": [
        {
            "id": "oak table",
            "request": {"query": {"match": {"title": "oak table"}}},
            "ratings": [{"_index": "shop", "_id": "a", "rating": 2}, {"_index": "shop", "_id": "b", "rating": 0}],
        },
        {"id": "lamp", "template_id": "t", "params": {}, "ratings": [{"_index": "shop", "_id": "a", "rating": 1}]},
        {"id": "no ratings", "request": {}, "ratings": []},
    ],
    "metric": {"precision": {"k": 10}},
}
QUEPID_OF_DETAILS = "\r\n".join(
    (
        "Team Name,Case Name,Case ID,Query Text,Doc ID,Doc Position,Title,Rating,tags",
        'shop,mine,1,oak table,a,1,"12"" oak, round",2,"[""x"",""y""]"',
        'shop,mine,1,oak table,b,2,""oak"",0,',
        "shop,mine,1,oak table,unrated,3,oak,,",
        "shop,mine,1,no documents",
        "shop,mine,1, lamp ,a,1,,1,",
        "",
    )
)
FILES = {
    "a.json": json.dumps(OPENSEARCH),
    "b.json": json.dumps(RRE_GROUPS),
    "c.json": json.dumps(RRE_OF_QUEPID),
    "d.json": json.dumps(RANK_EVAL),
    "e.csv": QUEPID,
    "f.quepid.csv": QUEPID,
    "i.csv": QUEPID_OF_DETAILS,
    "j.quepid.csv": QUEPID_OF_DETAILS,
    "g.opensearch.json": json.dumps(FETCHED),
    "h.json": json.dumps(FETCHED),
}


def rows_of(path: str) -> list[tuple[str, str, int]]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(row["query_id"], row["doc_id"], row["grade"]) for row in rows]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_tool_is_read_as_it_is_known_by_its_name_or_by_what_it_names(
    folder: Path, convert: Callable[..., Any], name: str
) -> None:
    Path(name).write_text(FILES[name])
    convert(name, "x.jsonl")
    assert rows_of("x.jsonl") == AS_TEXT


@pytest.mark.parametrize("name", FILES)
def test_what_judges_by_gold_takes_each_form(
    folder: Path, relabel: Callable[..., Any], write_rows: Callable[..., str], name: str
) -> None:
    Path(name).write_text(FILES[name])
    labels = write_rows([row | {"query_id": row["query"]} for row in ROWS])
    found = relabel("evaluate", labels, "--qrels", name, "--output", "json").json
    assert (found["counts"]["judged"], found["figures"]["accuracy"]["value"]) == (3, 1.0)
    both = relabel("combine", labels, labels, "--gold", name, "--to", "both.parquet", "--output", "json").json
    assert both["gold_pairs"] == 3


def test_gold_by_texts_judges_labels_that_have_the_texts(
    folder: Path, relabel: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    Path("gold.json").write_text(FILES["a.json"])
    labels = write_rows(ROWS)
    found = relabel("evaluate", labels, "--qrels", "gold.json", "--by", "query", "--output", "json").json
    assert found["counts"]["judged"] == 3


def test_gold_by_texts_of_a_run_comes_with_the_line_that_gives_it_ids(
    run: Callable[..., None], relabel: Callable[..., Any], folder: Path
) -> None:
    run()
    first = pq.read_table("pairs.parquet").to_pylist()[0]
    Path("gold.quepid.csv").write_text(f"query,docid,rating\n{first['query']},{first['doc_id']},1\n")
    refused = relabel("evaluate", "out/ecom", "--qrels", "gold.quepid.csv")
    refused.refused(3, "no label found a gold grade", "24 labels and 1 gold grade", f"--queries {folder}/pairs.parquet")
    line = refused.err.strip().partition("relabel convert ")[2]
    assert relabel("convert", *shlex.split(line)).code == 0
    found = relabel("evaluate", "out/ecom", "--qrels", "people.qrels", "--output", "json").json
    assert found["counts"]["judged"] == 1


def test_a_page_shows_figures_by_gold_of_a_tool(
    run: Callable[..., None], relabel: Callable[..., Any], convert: Callable[..., Any]
) -> None:
    """Out of a run, whose input has the texts, and back by them."""
    run()
    made = convert("out/ecom", "gold.opensearch.json")
    assert made["written"] == 24
    convert("gold.opensearch.json", "gold.qrels", "--queries", "pairs.parquet")
    assert relabel("evaluate", "out/ecom", "--qrels", "gold.qrels", "--output", "json").json["counts"]["judged"] == 24
    done = relabel("report", "out/ecom", "--gold", "gold.qrels", "--to", "page.html")
    assert done.code == 0


def test_quotes_of_a_detailed_export_are_those_of_the_query(folder: Path, convert: Callable[..., Any]) -> None:
    lines = (
        "Query Text,Doc ID,Rating",
        '""oak"" table,a,1',
        '"oak, ""old""",b,2',
        " -50% lamp,c,0",
    )
    Path("case.csv").write_text("\n".join(lines))
    convert("case.csv", "x.jsonl")
    assert rows_of("x.jsonl") == [('"oak" table', "a", 1), ('oak, "old"', "b", 2), ("-50% lamp", "c", 0)]


# Two ids of one text.


@pytest.mark.parametrize("target", ["x.opensearch.json", "x.quepid.csv", "x.rre.json"])
def test_two_ids_of_one_text_are_merged_where_they_agree_and_refused_by_name_where_not(
    folder: Path, relabel: Callable[..., Any], convert: Callable[..., Any], write_rows: Callable[..., str], target: str
) -> None:
    settings = ("--index", "i", "--template", "t.json") if "rre" in target else ()
    again = [{"query_id": "q9", "query": "lamp", "doc_id": doc, "grade": 1} for doc in ("a", "c")]
    found = convert(write_rows([*ROWS, *again]), target, *settings)
    assert (found["written"], found["duplicates"], found["conflicts"]) == (4, 1, 0)
    convert(target, "back.jsonl")
    assert sorted(rows_of("back.jsonl")) == sorted([*AS_TEXT, ("lamp", "c", 1)])
    path = write_rows([*ROWS, again[0] | {"grade": 2}], "odd.jsonl")
    relabel("convert", path, f"y.{target}", *settings).refused(
        3, "odd.jsonl: 1 pairs have several grades", "query lamp, document a: 1, 2 (of ids q2, q9)"
    )
    assert not list(Path().glob("y.*"))


def test_a_request_is_the_template_with_the_query_in_its_place(
    folder: Path, convert: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    template = {"query": {"match": {"title": "{{query}}"}}, "ext": [{"id": "{{query_id}}: {{query}}"}, 5, None]}
    Path("t.json").write_text(json.dumps(template))
    rows = [{"query_id": "q1", "query": 'a "{{query_id}}" \\ b', "doc_id": "d", "grade": 1}]
    convert(write_rows(rows), "x.rank_eval.json", "--index", "shop", "--template", "t.json")
    found = json.loads(Path("x.rank_eval.json").read_text())
    text = rows[0]["query"]
    assert found["requests"] == [
        {
            "id": "q1",
            "request": {"query": {"match": {"title": text}}, "ext": [{"id": f"q1: {text}"}, 5, None]},
            "ratings": [{"_index": "shop", "_id": "d", "rating": 1}],
        }
    ]
    assert found["metric"] == {"dcg": {"k": 10, "normalize": True}}


def test_a_table_of_queries_may_call_its_columns_otherwise_than_the_source(
    folder: Path, relabel: Callable[..., Any], convert: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    write_rows([{"qid": row["query_id"], "search": row["query"]} for row in ROWS], "queries.jsonl")
    Path("gold.qrels").write_text("q1 0 a 2\nq1 0 b 0\nq2 0 a 1\n")
    own = ("--queries", "queries.jsonl", "--by", "qid", "--query", "search")
    convert("gold.qrels", "x.quepid.csv", *own)
    convert("x.quepid.csv", "y.qrels", *own)
    assert Path("y.qrels").read_text() == Path("gold.qrels").read_text()
    pq.write_table(pa.table({"qid": ["q1"], "doc_id": ["a"], "grade": [2]}), "gold.parquet")
    write_rows(ROWS, "usual.jsonl")
    convert("gold.parquet", "z.quepid.csv", "--queries", "usual.jsonl", "--by", "qid")
    assert Path("z.quepid.csv").read_text() == "query,docid,rating\noak table,a,2\n"
    typo = ("--queries", "queries.jsonl", "--by", "quid", "--query", "search")
    relabel("convert", "gold.qrels", "w.quepid.csv", *typo).refused(3, "gold.qrels: no column `quid`")
    typo = ("--queries", "queries.jsonl", "--by", "qid", "--query", "serch")
    relabel("convert", "gold.qrels", "w.quepid.csv", *typo).refused(3, "queries.jsonl: no column `serch`", "`search`")


def test_texts_of_ids_come_from_a_table_of_queries(
    folder: Path, relabel: Callable[..., Any], convert: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    write_rows(ROWS, "queries.jsonl")
    Path("gold.qrels").write_text("q1 0 a 2\nq1 0 b 0\nq2 0 a 1\n")
    relabel("convert", "gold.qrels", "x.quepid.csv").refused(3, "no column `query`", "--queries FILE")
    convert("gold.qrels", "x.quepid.csv", "--queries", "queries.jsonl")
    assert Path("x.quepid.csv").read_text() == "query,docid,rating\noak table,a,2\noak table,b,0\nlamp,a,1\n"
    convert("x.quepid.csv", "y.qrels", "--queries", "queries.jsonl")
    assert Path("y.qrels").read_text() == Path("gold.qrels").read_text()
    Path("gold.qrels").write_text("q1 0 a 2\nq7 0 b 0\n")
    relabel("convert", "gold.qrels", "y.quepid.csv", "--queries", "queries.jsonl").refused(
        3, "gold.qrels: line 2", "queries.jsonl has no text for query 'q7'"
    )
    Path("z.quepid.csv").write_text("query,docid,rating\nsofa,a,1\n")
    relabel("convert", "z.quepid.csv", "z.qrels", "--queries", "queries.jsonl").refused(
        3, "row 2 (the header is row 1)", "'sofa'"
    )
    write_rows([*ROWS, ROWS[0] | {"query": "oak  table"}], "queries.jsonl")
    relabel("convert", "gold.qrels", "y.quepid.csv", "--queries", "queries.jsonl").refused(3, "'q1' has two texts")
    assert not list(Path().glob("y.quepid*"))


def test_a_query_that_a_spreadsheet_would_run_is_guarded_as_quepid_guards_it(
    folder: Path, convert: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    convert(write_rows([{"query_id": "q", "query": "=1+1", "doc_id": "-d", "grade": 1}]), "x.quepid.csv")
    assert Path("x.quepid.csv").read_text() == "query,docid,rating\n =1+1,-d,1\n"
    convert("x.quepid.csv", "back.jsonl")
    assert rows_of("back.jsonl") == [("=1+1", "-d", 1)]


@pytest.mark.parametrize("mark", [";", "\t"])
def test_csv_as_a_spreadsheet_writes_it_where_the_comma_is_the_decimal_mark_is_read(
    folder: Path, convert: Callable[..., Any], mark: str
) -> None:
    def write(name: str, *rows: list[str]) -> str:
        with Path(name).open("w", encoding="utf-8-sig", newline="") as out:
            csv.writer(out, delimiter=mark).writerows(rows)
        return name

    table = write("gold.csv", ["query_id", "doc_id", "document", "grade"], ["q1", "a,b", "red, or\nblue; warm", "1"])
    convert(table, "gold.jsonl")
    (row,) = map(json.loads, Path("gold.jsonl").read_text().splitlines())
    assert row == {"query_id": "q1", "doc_id": "a,b", "document": "red, or\nblue; warm", "grade": "1"}
    convert(
        write("case.csv", ["query", "docid", "rating"], ["oak, table", "a", "2"], ["oak, table", "b", ""]), "x.jsonl"
    )
    assert rows_of("x.jsonl") == [("oak, table", "a", 2)]
    export = write("all.csv", ["Team", "Query Text", "Doc ID", "Rating"], ['a "b"', "oak, table", "a", "2"])
    convert(export, "y.jsonl")
    assert rows_of("y.jsonl") == [("oak, table", "a", 2)]
    queries = write("queries.csv", ["query_id", "query"], ["q1", "sofa; green"])
    convert("gold.csv", "z.quepid.csv", "--queries", queries)
    assert Path("z.quepid.csv").read_text() == 'query,docid,rating\nsofa; green,"a,b",1\n'


def test_a_table_without_any_column_that_is_wanted_is_no_empty_one(folder: Path, relabel: Callable[..., Any]) -> None:
    Path("foo.csv").write_text("foo\n1\n")
    relabel("convert", "foo.csv", "foo.qrels").refused(3, "foo.csv", "`query_id`", "`doc_id`", "`grade`", "foo")
    assert not Path("foo.qrels").exists()


# Refused, with the place.


def opensearch(**rating: Any) -> str:
    return json.dumps({"judgmentRatings": [{"query": "q", "ratings": [rating]}]})


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.json", opensearch(docId="d", rating="0.7"), ("row 0: grade '0.7'", "whole number", "--score grade")),
        ("a.json", opensearch(rating="1"), ("judgmentRatings[0].ratings[0].docId: a text is wanted, not nothing",)),
        ("a.json", opensearch(docId=True, rating="1"), ("ratings[0].docId", "True")),
        ("a.json", '{"judgmentRatings": {}}', ("a.json.judgmentRatings: a list is wanted",)),
        ("a.json", '{"judgmentRatings": [}', ("a.json",)),
        ("a.json", '{"ratings": []}', ("no form of judgments", "ratings", "opensearch: judgmentRatings")),
        ("a.opensearch.json", json.dumps({"hits": {"hits": []}}), ("0 judgment lists",)),
        ("a.rre.json", '{"queries": [{"placeholders": {}}]}', ("queries[0].placeholders.$query",)),
        (
            "a.rre.json",
            '{"queries": [{"placeholders": {"$query": "q"}, "relevant_documents": {"1": ["a"], "1": ["b"]}}]}',
            ("'1' twice", "would be lost"),
        ),
        ("a.quepid.csv", "query,docid\nq,d\n", ("its first line is 'query,docid'",)),
        ("a.quepid.csv", "query,docid,rating\nq,d,1\nq,d,1,x\n", ("row 3 (the header is row 1) has 4 fields",)),
        ("a.quepid.csv", "query,docid,rating\nq,,1\n", ("row 2 (the header is row 1) has a rating and no docid",)),
        ("a.quepid.csv", 'query,docid,rating\n"q,d,1\n', ("can't be read",)),
        ("a.rank_eval.json", '{"requests": [{"ratings": []}]}', ("requests[0].id",)),
    ],
)
def test_what_is_off_in_a_file_is_named_with_its_place(
    folder: Path, relabel: Callable[..., Any], name: str, text: str, parts: tuple[str, ...]
) -> None:
    Path(name).write_text(text)
    relabel("convert", name, "x.jsonl").refused(3, name, *parts)
    assert not list(Path().glob("x.*"))


def test_a_source_that_is_not_there_is_said_to_be_missing(folder: Path, relabel: Callable[..., Any]) -> None:
    relabel("convert", "out/dl", "x.qrels").refused(3, "out/dl: no such file or folder")
    Path("there").write_text("")
    relabel("convert", "there", "x.qrels").refused(2, "there: its form is not clear")


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("x.rank_eval.json", "--template", "t.json"), 2, ("--index",)),
        (("x.rank_eval.json", "--index", "i"), 2, ("--template", "{{query}}")),
        (("x.rank_eval.json", "--index", "i", "--template", "plain.json"), 3, ("plain.json: {{query}} is not in it",)),
        (("x.rank_eval.json", "--index", "i", "--template", "none.json"), 3, ("none.json: no such file",)),
        (("x.rre.json", "--index", "i"), 2, ("--template",)),
        (("x.quepid.csv", "--index", "i"), 2, ("--index: quepid",)),
        (("x.jsonl", "--template", "t.json"), 2, ("--template: jsonl",)),
        (("x.opensearch.json", "--score", "grade"), 2, ("--score: opensearch holds grades",)),
        (("x.opensearch.json", "--duplicates", "keep"), 2, ("--duplicates keep",)),
        (("x.opensearch.json", "--query", "text"), 3, ("no column `text`", "--query")),
        (("x.json",), 2, ("its form is not clear", "--to", ".opensearch.json")),
    ],
)
def test_options_that_a_form_lacks_or_has_no_place_for_are_named(
    folder: Path,
    relabel: Callable[..., Any],
    write_rows: Callable[..., str],
    arguments: tuple[str, ...],
    code: int,
    parts: tuple[str, ...],
) -> None:
    Path("t.json").write_text('{"query": "{{query}}"}')
    Path("plain.json").write_text('{"query": "oak"}')
    relabel("convert", write_rows(ROWS), *arguments).refused(code, *parts)
    assert not list(Path().glob("x.*"))
