"""10,000 rows of texts and ids that files break on, out to every form that judgments are written in, and back: none is
lost and none changes, or the form refuses and names a row that it can't hold, and no file is left.

The files are also read by programs that know nothing of relabel: `json`, `csv` and ir_measures.
"""

import csv
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_measures
import pytest

from relabel.manifests.forms import FORMS, Form

QUERIES, DOCS = 500, 20
PIECES = (
    *('"', '""', "'", ",", ",,", ";", "\t", "\n", "\r", "\r\n", "\\", '\\"', "\\n", "/", "|", "%s", "{0}", "{{query}}"),
    *(
        "\u2028",
        "\u2029",
        "\x85",
        "\x0b",
        "\x0c",
        "\x1c",
        "\x1f",
        "\x00",
        "\xa0",
        "\u3000",
        "\ufeff",
        "\u200b",
        " ",
        "  ",
    ),
    *("=1+1", "#", "-", "+", "@x", "<b>&amp;</b>", "$query", "null", "true", "NaN", "007", "1.0", "1e9", "q 0 d 1"),
    *(
        "é",
        "e\u0301",
        "ß",
        "語",
        "русский",
        "العربية",
        "हिन्दी",
        "🦉",
        "\U0010ffff",
        "judgmentRatings",
        "hits",
        "requests",
    ),
)
EMPTYISH = (" ", "\t", "\n", "\r", "\xa0", "\u2028", "\ufeff", "\x00", ".", "0", "null", '""', '"')
LONG = "very long, " * 20_000

Rows = list[dict[str, Any]]
SETTINGS = ("--index", "shop", "--template", "request.json")
REQUEST = {"query": {"match": {"title": {"query": "{{query}}", "boost": 2}}}, "_source": False, "size": 10}


def hostile(rng: random.Random, number: int, *, is_id: bool = False) -> str:
    """A text that no other number has."""
    pieces = rng.choices(PIECES, k=rng.randint(1, 2 if is_id else 6))
    pieces.insert(rng.randint(0, len(pieces)), f"<{number}>")
    return "".join(pieces)


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Each tenth query has the text of the one before it and the same documents with the same grades."""
    rng = random.Random(5)
    texts = [*EMPTYISH, LONG, "=cmd|' /C calc'!A0", "# no comment"]
    texts += [hostile(rng, number) for number in range(len(texts), QUERIES)]
    found: Rows = []
    for number, text in enumerate(texts):
        query = hostile(rng, number, is_id=True)
        if number % 10 == 9:
            held = [row | {"query_id": query} for row in found[-DOCS:]]
        else:
            held = [
                {"query_id": query, "query": text, "doc_id": hostile(rng, doc, is_id=True), "grade": rng.randint(-1, 3)}
                for doc in range(DOCS)
            ]
        found += held
    assert len(found) == QUERIES * DOCS
    return found


def can_hold(form: Form, row: dict[str, Any]) -> bool:
    """What the pages of these tools say, without a look at our patterns."""
    text, query, doc = row["query"], row["query_id"], row["doc_id"]
    if form.name == "qrels":
        return all(one.split() == [one] and "\ufeff" not in one for one in (query, doc))
    if form.name == "quepid":
        return all(one == one.strip(" \t\n\v\f\r\0") != "" for one in (text, doc))
    return True


def judgments(rows: Rows, key: str) -> dict[tuple[str, str], int]:
    return {(row[key], row["doc_id"]): int(row["grade"]) for row in rows}


def read_elsewhere(form: Form, path: Path) -> dict[tuple[str, str], int]:
    """The judgments of a file, as other programs read it; the query is its text, or its id where the form has ids."""
    if form.name == "qrels":
        return {(one.query_id, one.doc_id): one.relevance for one in ir_measures.read_trec_qrels(str(path))}
    if form.name == "quepid":
        csv.field_size_limit(sys.maxsize)
        with path.open(encoding="utf-8", newline="") as file:
            assert file.readline() == "query,docid,rating\n"
            return {(query.strip(" "), doc): int(rating) for query, doc, rating in csv.reader(file)}
    content = json.loads(path.read_text(encoding="utf-8"))
    if form.name == "opensearch":
        assert (content["type"], content["name"]) == ("IMPORT_JUDGMENT", "x")
        return {
            (judged["query"], one["docId"]): int(float(one["rating"]))
            for judged in content["judgmentRatings"]
            for one in judged["ratings"]
        }
    if form.name == "rank_eval":
        return {
            (request["id"], one["_id"]): one["rating"]
            for request in content["requests"]
            for one in request["ratings"]
            if one["_index"] == "shop"
        }
    assert form.name == "rre"
    assert (content["index"], content["id_field"]) == ("shop", "id")
    return {
        (group["queries"][0]["placeholders"]["$query"], doc): int(gain)
        for group in content["query_groups"]
        for gain, docs in group["relevant_documents"].items()
        for doc in docs
    }


GRADED = [form for form in FORMS if form.write is not None and form.has_grades]


@pytest.mark.parametrize("form", GRADED, ids=[form.name for form in GRADED])
def test_no_row_is_lost_on_the_way_out_and_back_or_the_form_names_one(
    folder: Path,
    relabel: Callable[..., Any],
    convert: Callable[..., Any],
    write_rows: Callable[..., str],
    rows: Rows,
    form: Form,
) -> None:
    Path("request.json").write_text(json.dumps(REQUEST))
    settings = SETTINGS if form.needs else ()
    held = [row for row in rows if can_hold(form, row)]
    if len(held) < len(rows):
        write_rows(rows, "all.jsonl")
        first = next(place for place, row in enumerate(rows) if not can_hold(form, row))
        done = relabel("convert", "all.jsonl", "x", "--to", form.name, *settings)
        done.refused(3, "all.jsonl: row ", "can't hold", "such rows")
        assert f"row {first}:" in str(done) or first > 0
        assert not Path("x").exists()
        assert not list(Path().glob(".*.tmp"))
    write_rows(held, "rows.jsonl")

    out = convert("rows.jsonl", "x", "--to", form.name, *settings)
    assert (out["rows"], out["nulls"]) == (len(held), 0)
    assert out["written"] + out["duplicates"] == len(held)
    key = "query" if form.is_by_text else "query_id"
    wanted = judgments(held, key)
    assert out["written"] == len(wanted)
    if form.columns:
        assert read_elsewhere(form, Path("x")) == wanted

    Path("x").rename(f"x{form.suffixes[0]}")
    convert(f"x{form.suffixes[0]}", "back.jsonl")
    back = [json.loads(line) for line in Path("back.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert judgments(back, "query_id" if form.columns else key) == wanted
    if form.is_by_text:
        convert(f"x{form.suffixes[0]}", "ids.jsonl", "--queries", "rows.jsonl")
        back = [json.loads(line) for line in Path("ids.jsonl").read_text(encoding="utf-8").split("\n") if line]
        assert judgments(back, "query_id") == judgments(held, "query_id")
