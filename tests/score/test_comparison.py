"""`relabel evaluate` of several label sets: who is the teacher, which rows are compared, what is printed, what a gate
refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

Rows = list[dict[str, Any]]
QRELS = ("--qrels", "pairs.parquet")
JSON = ("--output", "json")


@pytest.fixture
def taught(
    relabel: Callable[..., Any],
    score: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
) -> None:
    """A finished run in out/ecom and a student's scores of the same input in out/scores."""
    write_pairs()
    assert relabel("run", write_job()).code == 0
    assert score().code == 0


@pytest.fixture
def two_files(write_rows: Callable[..., str], random_rows: Callable[..., Rows]) -> tuple[str, str, str]:
    """Labels of a teacher, of a student that follows it, and gold grades, as files."""
    teacher = random_rows(60)
    student = [dict(row, probs=other["probs"]) for row, other in zip(teacher, random_rows(60, seed=2), strict=True)]
    for row, held in zip(student, teacher, strict=True):
        row["probs"] = [(one + 2 * other) / 3 for one, other in zip(row["probs"], held["probs"], strict=True)]
        row["label"] = int(np.argmax(row["probs"]))
    without_grade = [
        [{key: value for key, value in row.items() if key != "grade"} for row in rows] for rows in (teacher, student)
    ]
    return (
        write_rows(without_grade[0], "teacher.jsonl"),
        write_rows(without_grade[1][::-1], "student.jsonl"),
        write_rows(teacher, "grades.jsonl"),
    )


@pytest.mark.usefixtures("taught")
def test_scores_are_known_as_a_students_in_whatever_order_they_are_named(relabel: Callable[..., Any]) -> None:
    for order in (("out/ecom", "out/scores"), ("out/scores", "out/ecom")):
        found = relabel("evaluate", *order, *QRELS, *JSON).json
        assert [(one["path"], one["role"], one["kind"]) for one in found["sets"]] == [
            ("out/ecom", "teacher", "run"),
            ("out/scores", "student", "student"),
        ]
        assert (found["comparisons"][0]["teacher"], found["comparisons"][0]["student"]) == ("out/ecom", "out/scores")


@pytest.mark.usefixtures("taught")
def test_sets_of_one_input_are_matched_by_row_and_judged_by_it(
    relabel: Callable[..., Any], committed: Callable[..., Any], pairs: Rows
) -> None:
    one = relabel("evaluate", "out/ecom", "out/scores", *QRELS, *JSON).json["comparisons"][0]
    assert one["matched_by"] == "row_id: both were made from the same input"
    assert one["joined_by"] == "row_id: the qrels are the run's own input"
    assert one["counts"] | {"matched": 24, "only_teacher": 0, "only_student": 0, "judged": 24} == one["counts"]
    gold = [row["grade"] for row in pairs]
    ours, theirs = (
        [label["grade"] for label in committed("labels", output).values()] for output in ("out/ecom", "out/scores")
    )
    assert one["against_teacher"]["agreement"]["value"] == pytest.approx(metrics.accuracy_score(ours, theirs))
    humans = one["against_gold"]
    assert humans["teacher"]["figures"]["accuracy"]["value"] == pytest.approx(metrics.accuracy_score(gold, ours))
    assert humans["student"]["figures"]["accuracy"]["value"] == pytest.approx(metrics.accuracy_score(gold, theirs))
    step = humans["difference"]["accuracy"]
    assert step["value"] == pytest.approx(metrics.accuracy_score(gold, theirs) - metrics.accuracy_score(gold, ours))
    assert step["low"] <= step["value"] <= step["high"]


@pytest.mark.usefixtures("taught")
def test_every_set_is_compared_with_the_teacher(relabel: Callable[..., Any], score: Callable[..., Any]) -> None:
    assert score("--dtype", "bfloat16", to="out/half").code == 0
    found = relabel("evaluate", "full=out/scores", "half=out/half", "teacher=out/ecom", *QRELS, *JSON).json
    assert [(one["teacher"], one["student"]) for one in found["comparisons"]] == [
        ("teacher", "full"),
        ("teacher", "half"),
    ]
    students = relabel("evaluate", "out/scores", "out/half", *JSON).json
    # without any teacher the first is taken for one
    assert [one["role"] for one in students["sets"]] == [
        "teacher",
        "student",
    ]
    assert students["comparisons"][0]["against_teacher"]["kl"]["value"] < 0.01


def test_sets_of_different_files_are_matched_by_ids_whatever_their_order(
    relabel: Callable[..., Any], two_files: tuple[str, str, str]
) -> None:
    teacher, student, grades = two_files
    one = relabel("evaluate", teacher, student, "--qrels", grades, "--label", "label", *JSON).json["comparisons"][0]
    assert (one["matched_by"], one["joined_by"]) == ("query_id and doc_id", "query_id and doc_id")
    assert one["counts"]["matched"] == one["counts"]["judged"] == 60


def test_the_report_is_the_one_reviewed(
    relabel: Callable[..., Any], two_files: tuple[str, str, str], golden: Callable[[str, str], None]
) -> None:
    teacher, student, grades = two_files
    line = (
        "evaluate",
        f"teacher={teacher}",
        f"student={student}",
        "--qrels",
        grades,
        "--label",
        "label",
        "--require",
        "macro_f1>=0.5*teacher",
    )
    done = relabel(*line)
    assert (done.code, done.err) == (0, "")
    golden("evaluate/student_comparison.txt", done.out)


def test_a_gate_that_holds_passes_and_one_that_does_not_exits_5_with_everything_shown(
    relabel: Callable[..., Any], two_files: tuple[str, str, str]
) -> None:
    line = ("evaluate", *two_files[:2], "--qrels", two_files[2], "--label", "label")
    assert relabel(*line, "--require", "macro_f1>=0.5*teacher", "--require", "teacher.kl<1").code == 0
    refused = relabel(*line, "--require", "macro_f1 >= 1.5*teacher", "--require", "teacher.agreement>0.1")
    assert refused.code == 5
    assert "error: gate macro_f1>= 1.5*teacher: refused, f1_macro is 0." in refused.err
    assert "student.jsonl against teacher.jsonl" in refused.out
    found = relabel(*line, "--require", "macro_f1>=1.5*teacher", *JSON).json
    assert found["exit_code"] == 5
    gate = found["comparisons"][0]["gates"][0]
    humans = found["comparisons"][0]["against_gold"]
    assert gate["value"] == humans["student"]["figures"]["f1_macro"]["value"]
    assert gate["bound"] == pytest.approx(1.5 * humans["teacher"]["figures"]["f1_macro"]["value"])


def test_sets_without_a_common_row_are_refused_with_examples(
    relabel: Callable[..., Any],
    two_files: tuple[str, str, str],
    write_rows: Callable[..., str],
) -> None:
    other = write_rows(
        [{"query_id": "x1", "doc_id": f"d{row}", "label": row % 3, "probs": [0.2, 0.3, 0.5]} for row in range(9)],
        "other.jsonl",
    )
    relabel("evaluate", two_files[0], other, "--label", "label").refused(
        3,
        "have no row in common: 60 and 9 labels were compared by query_id and doc_id",
        "begins with (q0, d0)",
        "begins with (x1, d0)",
        "--by",
    )
