"""`relabel evaluate` of several label sets: who is the teacher, which rows are compared, what is printed, what a gate
refuses.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from relabel.distill.students.examples import SIDES, pack_queries, split_queries
from tests.score.conftest import write_tiny_student

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


# A student is judged by rows that it did not learn from: the split of its manifest says which these are.


SPLIT = {"by": "query_id", "seed": 6, "shares": {"dev": 0.25, "test": 0.4}, "sha256": "0" * 64}


def split_student(path: Path, **changes: Any) -> Path:
    """A tiny student whose manifest says how its queries were split."""
    student = write_tiny_student(path)
    held = json.loads((student / "manifest.json").read_text())
    sides = {name: {"rows": 1, "queries": 1} for name in SIDES}
    (student / "manifest.json").write_text(json.dumps({**held, "split": {**SPLIT, **sides, **changes}}))
    return student


Setup = Callable[..., Any]


@pytest.mark.parametrize("by", ["query_id", "query"])
@pytest.mark.parametrize("had", ["all", "half", "none"])
def test_a_query_that_the_student_never_had_is_on_its_test_side(
    relabel: Setup, score: Setup, write_pairs: Setup, pairs: Rows, tmp_path: Path, *, by: str, had: str
) -> None:
    """The sides of the others are those by which they trained; the rest of a file is new to the student."""
    write_pairs()
    keys = [" ".join(str(row[by]).casefold().split()) for row in pairs]
    known = {"all": set(keys), "half": set(sorted(set(keys))[::2]), "none": set[str]()}[had]
    learned = {key for key, side in zip(keys, sides_of(pairs, by), strict=True) if side != "test"} & known
    student = split_student(tmp_path / "student", by=by, learned_queries=pack_queries(learned, SPLIT["seed"]))
    assert score(student=student).code == 0
    wanted = Counter(side if key in known else "test" for key, side in zip(keys, sides_of(pairs, by), strict=True))
    found = relabel("evaluate", "out/scores", *QRELS, *JSON).json
    assert {name: number for name, number in found["side"]["rows"]["out/scores"].items() if number} == wanted
    assert found["counts"]["judged"] == wanted["test"]
    assert "assumed" not in found["side"]


def test_of_a_student_that_does_not_say_what_it_had_the_assumption_is_said(
    relabel: Setup, score: Setup, write_pairs: Setup, tmp_path: Path
) -> None:
    write_pairs()
    assert score(student=split_student(tmp_path / "student")).code == 0
    done = relabel("evaluate", "out/scores", *QRELS)
    assert "made by an earlier relabel and does not say which queries it learned from" in done.out.split("\n\n")[0]
    assert relabel("evaluate", "out/scores", *QRELS, *JSON).json["side"]["assumed"] == ["out/scores"]


def sides_of(pairs: list[dict[str, Any]], key: str = "query_id") -> list[str]:
    found = split_queries([" ".join(str(row[key]).casefold().split()) for row in pairs], dev=0.25, test=0.4, seed=6)
    return [SIDES[side] for side in found.tolist()]


@pytest.fixture(params=["query_id", "query"])
def split_by(
    request: pytest.FixtureRequest,
    relabel: Callable[..., Any],
    score: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    tmp_path: Path,
) -> str:
    """Finished labels in out/ecom, and in out/scores those of a student whose split is by the column named."""
    write_pairs()
    assert relabel("run", write_job()).code == 0
    assert score(student=split_student(tmp_path / "student", by=request.param)).code == 0
    return str(request.param)


def test_every_command_cuts_all_sets_to_the_students_test_side(
    relabel: Callable[..., Any], committed: Callable[..., Any], pairs: list[dict[str, Any]], split_by: str
) -> None:
    sides = sides_of(pairs, split_by)
    count = Counter(sides)
    assert min(count[name] for name in SIDES) > 0
    for side in SIDES:
        option = () if side == "test" else ("--side", side)
        wanted = [row for row, name in enumerate(sides) if name == side]
        gold = [pairs[row]["grade"] for row in wanted]
        ours, theirs = (
            [label["grade"] for row, label in sorted(committed("labels", output).items()) if row in set(wanted)]
            for output in ("out/ecom", "out/scores")
        )
        both = relabel("evaluate", "out/ecom", "out/scores", *QRELS, *option, *JSON).json
        one = both["comparisons"][0]
        assert one["counts"]["judged"] == one["counts"]["matched"] == len(wanted)
        for role, labels in (("teacher", ours), ("student", theirs)):
            found = one["against_gold"][role]["figures"]["accuracy"]["value"]
            assert found == pytest.approx(metrics.accuracy_score(gold, labels))
        assert both["side"]["side"] == side
        for path in ("out/ecom", "out/scores"):
            assert both["side"]["rows"][path] == {**{name: count[name] for name in SIDES}, "unknown": 0}
        alone = relabel("evaluate", "out/scores", *QRELS, *option, *JSON).json
        assert alone["counts"]["judged"] == len(wanted)
        against = relabel("compare", "out/ecom", "out/scores", *QRELS, *option, *JSON).json
        assert (against["counts"]["both"], against["gold"]["judged"]) == (len(wanted), len(wanted))
    text = relabel("evaluate", "out/ecom", "out/scores", *QRELS).out
    first = (
        f"{count['test']} of {len(pairs)} rows of out/ecom, the student's test side; left out: {count['train']} train"
    )
    for done in (text, relabel("compare", "out/ecom", "out/scores").out):
        assert first in done.split("\n\n")[0]
    assert relabel("report", "out/ecom", "out/scores", "--gold", "pairs.parquet", "--to", "page.html").code == 0
    assert first in html.unescape(Path("page.html").read_text())


@pytest.mark.usefixtures("split_by")
def test_rows_that_taught_the_student_are_judged_on_request_and_said_to_flatter(relabel: Callable[..., Any]) -> None:
    done = relabel("evaluate", "out/ecom", "out/scores", *QRELS, "--side", "all")
    assert re.search("^all 24 rows of out/ecom: .* taught the student, whose figures flatter$", done.out, re.MULTILINE)
    gate = relabel("evaluate", "out/ecom", "out/scores", *QRELS, "--require", "accuracy>=0.0", *JSON).json
    student = gate["comparisons"][0]["against_gold"]["student"]
    assert gate["comparisons"][0]["gates"][0]["value"] == student["figures"]["accuracy"]["value"]


def test_where_the_split_is_not_known_it_is_said_and_no_side_can_be_asked_for(
    relabel: Callable[..., Any],
    score: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_rows: Callable[..., str],
    random_rows: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    write_pairs()
    student = split_student(tmp_path / "student")
    assert score(student=student).code == 0
    write_rows(random_rows(12))
    said = {"labels.jsonl": "a label file does not say whether what made it learned from these rows"}
    (student / "manifest.json").write_text((student / "manifest.json").read_text() + "\n")
    said["out/scores"] = "is another one by now, so nobody knows which rows trained it"
    for path, why in said.items():
        gold = ("--qrels", "labels.jsonl", "--label", "label") if path == "labels.jsonl" else QRELS
        done = relabel("evaluate", path, *gold)
        assert re.search(f"^{path}: .*{why}.*may flatter$", done.out.split("\n\n")[0], re.MULTILINE)
        refused = relabel("evaluate", path, *gold, "--side", "test")
        assert refused.code == 2
        assert why in refused.err


def test_a_row_of_a_student_of_two_stages_is_on_test_where_it_taught_neither(
    relabel: Callable[..., Any],
    score: Callable[..., Any],
    write_pairs: Callable[..., Path],
    pairs: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    write_pairs()
    first, second = split_student(tmp_path / "first", seed=4), split_student(tmp_path / "second")
    held = json.loads((second / "manifest.json").read_text())
    (second / "manifest.json").write_text(json.dumps({**held, "model": {"reference": str(first)}}))
    assert score(student=second).code == 0
    keys = [row["query_id"] for row in pairs]
    sides = [split_queries(keys, dev=0.25, test=0.4, seed=seed) for seed in (6, 4)]
    wanted = Counter(SIDES[min(both)] for both in zip(*(one.tolist() for one in sides), strict=True))
    found = relabel("evaluate", "out/scores", *QRELS, "--side", "all", *JSON).json["side"]["rows"]["out/scores"]
    assert {name: number for name, number in found.items() if number} == wanted
