"""What is off is reported: which file, what was found, which option helps. Never a traceback, and never a figure of the
wrong rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LABELS = [{"query_id": f"q{row % 3}", "doc_id": f"d{row}", "grade": row % 3} for row in range(9)]


@pytest.fixture
def judged(relabel: Callable[..., Any], write_rows: Callable[..., str], folder: Path) -> Callable[..., Any]:
    """`judged("q0 0 d0 1\\n", "--map", …)`: nine labels judged by that qrels text."""

    def call(qrels: str, *arguments: str, name: str = "grades.txt") -> Any:
        (folder / name).write_text(qrels, encoding="utf-8")
        return relabel("evaluate", write_rows(LABELS), "--qrels", name, *arguments)

    return call


def trec(grade: Callable[[int], Any]) -> str:
    return "".join(f"q{row % 3} 0 d{row} {grade(row)}\n" for row in range(9))


def test_labels_without_a_grade_show_the_first_ids_of_both_sides(judged: Callable[..., Any]) -> None:
    judged("7 0 x1 2\n8 0 x2 1\n").refused(
        3, "9 labels and 2 qrels", "(q0, d0), (q1, d1), (q2, d2)", "(7, x1), (8, x2)", "--by"
    )
    judged("").refused(3, "no label has a grade", "it is empty")


@pytest.mark.parametrize(
    ("grades", "grade", "parts"),
    [
        ("3", lambda row: row % 4, ("grade 3 is off the scale 0 to 2", "--map 0=0,1=1,2=2,3=2")),
        ("3", lambda row: row % 3 - 1, ("grade -1 is off the scale", "--map -1=0,0=0,1=1")),
        ("2", lambda row: row % 2, ("labels.jsonl: grade 2 is off the scale 0 to 1", "--map-labels")),
    ],
)
def test_grades_off_the_scale_come_with_a_map_to_use(
    judged: Callable[..., Any], grades: str, grade: Any, parts: tuple[str, ...]
) -> None:
    judged(trec(grade), "--grades", grades).refused(3, *parts)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0=1,0=2", "occurs twice"),
        ("a=1", "`a=1` is no pair"),
    ],
)
def test_a_map_that_is_none_is_a_usage_error(judged: Callable[..., Any], text: str, part: str) -> None:
    judged(trec(lambda row: 1), "--map", text).refused(2, part)


def test_a_grade_that_the_map_forgets_is_an_error(judged: Callable[..., Any]) -> None:
    judged(trec(lambda row: row % 3), "--map", "0=0,1=1").refused(3, "grade 2", "--map does not say")
    judged(trec(lambda row: row % 3), "--map-labels", "0=0,1=1").refused(3, "labels.jsonl", "grade 2", "--map-labels")


def test_qrels_text_of_another_form_names_the_line(judged: Callable[..., Any]) -> None:
    judged("q0 0 d0 1\nq1 d1 1\n").refused(3, "grades.txt: line 2 has 3 fields", "qid 0 docid grade")
    judged("q0 0 d0 1.5\n").refused(3, "no whole number", "'1.5'")


def test_tables_that_are_broken_name_the_place(judged: Callable[..., Any]) -> None:
    judged('{"query_id": "q0"}\nnot json\n', name="g.jsonl").refused(3, "line 2 is not JSON")
    judged("query_id,doc_id,grade\nq0,d0\n", name="g.csv").refused(3, "record 1 has 2 fields")
    judged("not parquet", name="g.parquet").refused(3, "g.parquet")


def test_a_missing_column_names_those_there_are(judged: Callable[..., Any], relabel: Callable[..., Any]) -> None:
    judged("query_id,doc_id,grades\nq0,d0,1\n", name="g.csv").refused(
        3, "no column `grade`", "Did you mean `grades`?", "--grade"
    )
    judged("query_id,docno,grade\nq0,d0,1\n", name="g.csv").refused(3, "no column `doc_id`", "--doc")
    relabel("evaluate", "labels.jsonl", "--qrels", "g.csv", "--label", "mark").refused(3, "no column `mark`", "--label")


def test_files_that_are_not_there_or_are_no_run(
    judged: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    judged(trec(lambda row: 1))
    relabel("evaluate", "nowhere.parquet", "--qrels", "grades.txt").refused(3, "nowhere.parquet", "no such file")
    relabel("evaluate", "labels.jsonl", "--qrels", "nowhere.txt").refused(3, "nowhere.txt", "no such file")
    (folder / "empty").mkdir()
    relabel("evaluate", "empty", "--qrels", "grades.txt").refused(3, "no run's output")


def test_judging_a_column_by_itself_is_refused(relabel: Callable[..., Any], write_rows: Callable[..., str]) -> None:
    path = write_rows(LABELS)
    relabel("evaluate", path, "--qrels", path).refused(2, "both be column `grade`", "--label")


def test_distributions_that_are_none_are_refused(relabel: Callable[..., Any], write_rows: Callable[..., str]) -> None:
    path = write_rows([{"label": 0, "grade": 1, "probs": [0.2, 0.2, 0.2]}])
    relabel("evaluate", path, "--qrels", path, "--label", "label").refused(3, "does not sum to 1")


def test_scales_that_differ_are_not_mixed(relabel: Callable[..., Any], write_rows: Callable[..., str]) -> None:
    rows = [{"query_id": "q", "doc_id": "d", "label": 0, "grade": 1}]
    two = write_rows([row | {"probs": [0.5, 0.5]} for row in rows], "two.jsonl")
    three = write_rows([row | {"probs": [0.5, 0.5, 0.0]} for row in rows], "three.jsonl")
    qrels = write_rows(rows, "grades.jsonl")
    relabel("evaluate", two, three, "--qrels", qrels, "--label", "label").refused(
        3, "different scales", "two.jsonl has 2", "--map-labels"
    )
    relabel("evaluate", two, "--qrels", qrels, "--label", "label", "--grades", "3").refused(2, "--grades 3")


def test_one_query_has_figures_and_no_intervals(relabel: Callable[..., Any], write_rows: Callable[..., str]) -> None:
    path = write_rows([{"query_id": "q", "doc_id": f"d{row}", "label": row % 2, "grade": 1} for row in range(4)])
    done = relabel("evaluate", path, "--qrels", path, "--label", "label")
    assert done.code == 0
    assert "no intervals" in done.out
    assert " to " not in done.out.partition("gold")[0].partition("figure")[2]


def test_hostile_ids_reach_the_join_as_they_are(relabel: Callable[..., Any], write_rows: Callable[..., str]) -> None:
    ids = ["007", "7", "a\u2028b", "\x85", "{0}", "%s", "é", "e\u0301", "\0", "<score>2</score>"]
    rows = [{"query_id": name, "doc_id": name, "label": 1, "grade": 1} for name in ids]
    path = write_rows([row for row in rows for _ in range(2)])
    qrels = write_rows(rows, "grades.jsonl")
    found = relabel("evaluate", path, "--qrels", qrels, "--label", "label", "--output", "json").json
    assert found["counts"]["judged"] == 2 * len(ids)
    assert found["counts"]["relabelled"] == found["counts"]["queries"] == len(ids)


def test_float_grades_are_read_where_they_are_whole(judged: Callable[..., Any]) -> None:
    found = judged(
        '{"query_id": "q0", "doc_id": "d0", "grade": 2.0}\n{"query_id": "q1", "doc_id": "d1", "grade": NaN}\n',
        "--output",
        "json",
        name="g.jsonl",
    )
    assert found.json["counts"]["judged"] == 1
    assert found.json["confusion"][2][0] == 1
    assert np.sum(found.json["confusion"]) == 1
