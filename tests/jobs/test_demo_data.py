"""Checks what jobs/demo/README.md promises about jobs/demo/pairs.jsonl."""

import json
import re
from collections import Counter, defaultdict
from itertools import groupby
from pathlib import Path

import pytest

DEMO_DIR = Path(__file__).resolve().parents[2] / "jobs" / "demo"
PAIRS_PATH = DEMO_DIR / "pairs.jsonl"

KEYS = ["query_id", "query", "doc_id", "title", "body", "grade"]
DOCS_PER_QUERY = 8
BODY_WORDS = {"shop": (20, 60), "web": (40, 90)}
COUNTS = {"shop": {0: 36, 1: 33, 2: 27}, "web": {0: 39, 1: 30, 2: 27}}

DUPLICATE_IDS = {"shop-07-d3", "shop-07-d8"}
EMPTY_BODY_ID = "shop-12-d3"
BRACES_ID = "web-04-d7"
NON_ASCII_IDS = {"shop-08-d8", "shop-12-d5", "web-01-d8", "web-08-d4"}


def kind_of(row: dict) -> str:
    return row["query_id"].split("-")[0]


@pytest.fixture(scope="module")
def raw() -> bytes:
    return PAIRS_PATH.read_bytes()


@pytest.fixture(scope="module")
def rows(raw: bytes) -> list[dict]:
    return [json.loads(line) for line in raw.decode("utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def grades_by_query(rows: list[dict]) -> dict[str, Counter]:
    grades = defaultdict(Counter)
    for row in rows:
        grades[row["query_id"]][row["grade"]] += 1
    return grades


def test_file_is_plain_utf8_with_one_json_object_per_line(raw):
    text = raw.decode("utf-8")  # raises where it is not UTF-8
    assert not text.startswith("\ufeff")
    assert "\r" not in text
    assert text.endswith("\n")
    lines = text.split("\n")[:-1]
    assert len(lines) == 24 * DOCS_PER_QUERY
    for line in lines:
        assert isinstance(json.loads(line), dict)
        assert len(line.splitlines()) == 1  # no U+2028 and the like either


def test_every_line_has_the_same_keys_and_types(rows):
    for row in rows:
        assert list(row) == KEYS
        assert all(isinstance(row[key], str) for key in KEYS[:-1])
        assert type(row["grade"]) is int
        assert row["grade"] in (0, 1, 2)


def test_text_is_trimmed_and_queries_and_titles_are_not_empty(rows):
    for row in rows:
        for key in KEYS[:-1]:
            assert row[key] == row[key].strip()
            assert "  " not in row[key]
        assert row["query"]
        assert row["title"]


def test_twelve_queries_of_each_kind_grouped_and_in_order(rows):
    expected = [f"{kind}-{n:02d}" for kind in ("shop", "web") for n in range(1, 13)]
    assert [query_id for query_id, _ in groupby(rows, key=lambda row: row["query_id"])] == expected


def test_eight_documents_per_query_with_unique_ids_in_order(rows):
    by_query = defaultdict(list)
    for row in rows:
        by_query[row["query_id"]].append(row["doc_id"])
    for query_id, doc_ids in by_query.items():
        assert doc_ids == [f"{query_id}-d{n}" for n in range(1, DOCS_PER_QUERY + 1)]
    assert len({row["doc_id"] for row in rows}) == len(rows)


def test_one_text_per_query_id(rows):
    pairs = {(row["query_id"], row["query"]) for row in rows}
    assert len(pairs) == len({query for _, query in pairs}) == 24


def test_every_query_has_at_least_two_documents_of_each_grade(grades_by_query):
    for query_id, grades in grades_by_query.items():
        assert all(grades[grade] >= 2 for grade in (0, 1, 2)), query_id


def test_counts_per_grade(rows):
    counted = {kind: dict(Counter(row["grade"] for row in rows if kind_of(row) == kind)) for kind in COUNTS}
    assert counted == COUNTS


def test_readme_states_the_counts():
    readme = (DEMO_DIR / "README.md").read_text(encoding="utf-8")
    stated = {
        cells[0]: [int(cell) for cell in cells[1:]]
        for cells in re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", readme, re.M)
    }
    expected = {
        kind: [*(counts[grade] for grade in (0, 1, 2)), sum(counts.values())] for kind, counts in COUNTS.items()
    }
    expected["all"] = [sum(column) for column in zip(*expected.values(), strict=True)]
    assert stated == expected


def test_readme_names_every_quirk():
    readme = (DEMO_DIR / "README.md").read_text(encoding="utf-8")
    for doc_id in {*DUPLICATE_IDS, EMPTY_BODY_ID, BRACES_ID, *NON_ASCII_IDS}:
        assert doc_id in readme


def test_body_lengths(rows):
    for row in rows:
        if row["doc_id"] == EMPTY_BODY_ID:
            continue
        low, high = BODY_WORDS[kind_of(row)]
        assert low <= len(row["body"].split()) <= high, row["doc_id"]


def test_exactly_one_body_is_empty(rows):
    assert [row["doc_id"] for row in rows if not row["body"]] == [EMPTY_BODY_ID]


def test_no_two_bodies_are_the_same_but_the_stated_pair(rows):
    by_body = defaultdict(list)
    for row in rows:
        by_body[row["body"].casefold()].append(row)
    repeated = [same for same in by_body.values() if len(same) > 1]
    assert [{row["doc_id"] for row in same} for same in repeated] == [DUPLICATE_IDS]
    # The pair differs in its ids alone, so its grades agree too.
    first, second = repeated[0]
    assert {**first, "doc_id": ""} == {**second, "doc_id": ""}


def test_titles_repeat_only_in_the_stated_pair(rows):
    titles = Counter(row["title"].casefold() for row in rows)
    assert sorted(titles.values())[-2:] == [1, 2]


def test_curly_braces_occur_in_one_document(rows):
    assert [row["doc_id"] for row in rows if set("{}") & set(row["query"] + row["title"] + row["body"])] == [BRACES_ID]


def test_text_is_ascii_but_for_the_stated_documents(rows):
    assert {row["doc_id"] for row in rows if not (row["query"] + row["title"] + row["body"]).isascii()} == NON_ASCII_IDS


def test_grade_does_not_follow_from_position_or_length(rows):
    for position in range(DOCS_PER_QUERY):
        assert {row["grade"] for row in rows[position::DOCS_PER_QUERY]} == {0, 1, 2}
    for kind in COUNTS:
        means = []
        for grade in (0, 1, 2):
            lengths = [len(row["body"].split()) for row in rows if kind_of(row) == kind and row["grade"] == grade]
            means.append(sum(lengths) / len(lengths))
        assert max(means) / min(means) < 1.25
