"""Checks what jobs/demo/README.md promises about jobs/demo/pairs.jsonl."""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

DEMO_DIR = Path(__file__).resolve().parents[2] / "jobs" / "demo"
PAIRS_PATH = DEMO_DIR / "pairs.jsonl"

KEYS = ["query_id", "query", "doc_id", "title", "body", "grade"]
DOCS_PER_QUERY = 8
COUNTS = {"shop": {0: 36, 1: 33, 2: 27}, "web": {0: 39, 1: 30, 2: 27}}


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


def test_eight_documents_per_query_with_unique_ids_in_order(rows):
    by_query = defaultdict(list)
    for row in rows:
        by_query[row["query_id"]].append(row["doc_id"])
    for query_id, doc_ids in by_query.items():
        assert doc_ids == [f"{query_id}-d{n}" for n in range(1, DOCS_PER_QUERY + 1)]
    assert len({row["doc_id"] for row in rows}) == len(rows)


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
