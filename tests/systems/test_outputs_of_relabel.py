"""Outputs of relabel as systems and as labels: the lineage of a scored run says whether the judge, or its student, made
a system's scores; and the report shows the comparison.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.examples import SIDES, pack_queries, split_queries
from tests.jobs.conftest import Outcome
from tests.score.conftest import write_tiny_student
from tests.systems.conftest import write

Relabel = Callable[..., Outcome]


@pytest.fixture
def judged(
    folder: Path, relabel: Relabel, write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> Callable[[str], None]:
    """`judged("out/ecom")`: a run in out/ecom, scores of a student that learned from the labels of that path, and a
    TREC run of the same pairs.
    """

    def make(learned_from: str) -> None:
        write_pairs()
        assert relabel("run", write_job()).code == 0
        student = write_tiny_student(Path("student"), heads={"relevance": 3})
        manifest = json.loads((student / "manifest.json").read_bytes())
        manifest["labels"] = [{"path": learned_from, "kind": "file", "weight": 1.0, "labels": 24}]
        (student / "manifest.json").write_text(json.dumps(manifest))
        assert relabel("score", "student", "--input", "pairs.parquet", "--to", "out/scores").code == 0
        rows = pq.read_table("pairs.parquet").to_pylist()
        write("a.run", [f"{row['query_id']} Q0 {row['doc_id']} 0 {len(rows) - at} t" for at, row in enumerate(rows)])

    return make


@pytest.mark.parametrize(("learned_from", "maker"), [("out/ecom", "student"), ("other.parquet", "other")])
def test_scores_of_the_judges_student_are_known(
    judged: Callable[[str], None], relabel: Relabel, learned_from: str, maker: str
) -> None:
    judged(learned_from)
    done = relabel("systems", "out/scores", "a.run", "--labels", "out/ecom", "--output", "json")
    assert done.code == 0, done
    assert [system["made_by"] for system in done.json["systems"]] == [maker, None]
    assert any("scores: its scores are those of a student" in text for text in done.json["warnings"]) == (
        maker == "student"
    )
    assert done.json["systems"][0]["documents"] == 24


def test_queries_that_a_student_learned_from_are_counted(judged: Callable[[str], None], relabel: Relabel) -> None:
    """Whose labels they were does not matter: the student has seen them."""
    judged("other.parquet")
    call = ("systems", "out/scores", "a.run", "--labels", "out/ecom", "--gold", "pairs.parquet", "--output", "json")
    assert not any("learned from" in text for text in relabel(*call).json["warnings"]), "its split is not known"
    queries = [f"q{number}" for number in range(6)]
    side_of = dict(zip(queries, split_queries(queries, dev=0.25, test=0.4, seed=6).tolist(), strict=True))
    sides = {name: {"rows": 1, "queries": 1} for name in SIDES}
    split = {"by": "query_id", "seed": 6, "shares": {"dev": 0.25, "test": 0.4}, "sha256": "0" * 64, **sides}
    manifest = json.loads(Path("student/manifest.json").read_bytes())
    for number, learned in enumerate((queries, queries[:2], [])):
        manifest["split"] = {**split, "learned_queries": pack_queries(set(learned), 6)}
        Path("student/manifest.json").write_text(json.dumps(manifest))
        scores = f"out/scores-{number}"
        assert relabel("score", "student", "--input", "pairs.parquet", "--to", scores).code == 0
        count = sum(side_of[query] == SIDES.index("train") for query in learned)
        warnings = relabel("systems", f"new={scores}", *call[2:]).json["warnings"]
        said = f"new: its student learned from {count} of the 6 compared queries ({count} of the 6 gold queries), and "
        assert [text.startswith(said) for text in warnings if "learned from" in text] == ([True] if count else [])
    assert relabel("systems", "new=out/scores-0", *call[2:]).code == 0


def test_the_runs_own_input_is_gold_by_the_columns_that_the_job_names(
    judged: Callable[[str], None], relabel: Relabel, write_job: Callable[..., str]
) -> None:
    judged("out/ecom")
    call = ("systems", "out/scores", "a.run", "--output", "json")
    expected = relabel(*call, "--labels", "out/ecom", "--gold", "pairs.parquet").json["pairs"]
    names = {"query_id": "qid", "doc_id": "sku", "grade": "stars"}
    own = pq.read_table("pairs.parquet").rename_columns(names)
    pq.write_table(own, "own.parquet")
    columns = {"query_id": "qid", "doc_id": "sku", "gold": "stars"}
    job = write_job({"input": {"path": "own.parquet", "columns": columns}, "output": "out/own"})
    assert relabel("run", job).code == 0
    assert relabel(*call, "--labels", "out/own", "--gold", "own.parquet").json["pairs"] == expected
    pq.write_table(own.slice(0, 20), "other.parquet")
    other = relabel(*call, "--labels", "out/own", "--gold", "other.parquet")
    assert "Did you mean `qid` for `query_id`?" in other.json["message"]


def test_scores_are_judged_by_the_input_of_the_run_that_they_are_compared_with(
    judged: Callable[[str], None], relabel: Relabel, write_job: Callable[..., str]
) -> None:
    """Scores have an input of their own, whose gold nobody named."""
    judged("out/ecom")
    pq.write_table(
        pq.read_table("pairs.parquet").rename_columns({"query_id": "qid", "doc_id": "sku", "grade": "stars"}),
        "own.parquet",
    )
    columns = {"query_id": "qid", "doc_id": "sku", "gold": "stars"}
    job = write_job({"input": {"path": "own.parquet", "columns": columns}, "output": "out/own"})
    assert relabel("run", job).code == 0

    def comparison(run: str, gold: str) -> Any:
        done = relabel("evaluate", run, "out/scores", "--qrels", gold, "--output", "json")
        (found,) = done.json["comparisons"]
        return {key: value for key, value in found.items() if key not in ("teacher", "matched_by")}

    assert comparison("out/own", "own.parquet") == comparison("out/ecom", "pairs.parquet")


def test_the_judges_own_run_as_a_system_is_known(judged: Callable[[str], None], relabel: Relabel) -> None:
    judged("out/ecom")
    done = relabel("systems", "out/ecom", "a.run", "--labels", "out/ecom", "--output", "json")
    assert [system["made_by"] for system in done.json["systems"]] == ["judge", None]
    assert "worth nothing" in done.json["warnings"][1]


def test_the_report_shows_the_comparison_with_a_plot(judged: Callable[[str], None], relabel: Relabel) -> None:
    judged("out/ecom")
    systems = ("--system", "student=out/scores", "--system", "a.run")
    done = relabel("report", "out/ecom", "--gold", "pairs.parquet", *systems, "--output", "json")
    assert done.code == 0, done
    assert "systems" in done.json["sections"]
    page = Path("report.html").read_text(encoding="utf-8")
    shown = relabel("systems", *systems[1::2], "--labels", "out/ecom", "--gold", "pairs.parquet", "--output", "json")
    assert shown.json["gold_queries"] == 6
    assert shown.json["pairs"][0]["sentence"].partition(" (")[0] in page
    assert done.json["sections"][0] == "verdict"
    assert done.json["verdicts"][1] == shown.json["pairs"][0]["sentence"]  # after that answers are made up
    assert "difference, with its 95 % interval" in page or "differences of systems" in page


def test_the_report_of_several_runs_says_by_whose_labels_systems_are_compared(
    judged: Callable[[str], None], relabel: Relabel
) -> None:
    judged("out/ecom")
    shutil.copytree("out/ecom", "out/again")
    systems = ("--system", "student=out/scores", "--system", "a.run")
    done = relabel("report", "out/ecom", "out/again", "--gold", "pairs.parquet", *systems, "--output", "json")
    whose = "By the labels of out/ecom, the first of 2 runs."
    assert any(verdict.endswith(whose) for verdict in done.json["verdicts"])
    assert whose in Path("report.html").read_text(encoding="utf-8")


def test_the_page_is_written_and_says_why_systems_are_not_compared_by_too_few_gold_queries(
    judged: Callable[[str], None], relabel: Relabel
) -> None:
    judged("out/ecom")
    table = pq.read_table("pairs.parquet")
    first = pc.unique(table["query_id"])[:3]
    pq.write_table(table.filter(pc.is_in(table["query_id"], value_set=first)), "few.parquet")
    systems = ("--system", "student=out/scores", "--system", "a.run")
    done = relabel("report", "out/ecom", "--gold", "few.parquet", *systems, "--output", "json")
    assert (done.code, "systems" in done.json["sections"], "gold" in done.json["sections"]) == (0, True, True)
    page = Path("report.html").read_text(encoding="utf-8")
    assert "The systems are not compared." in page
    assert "Differences want 5" in page
    typo = ("--system", "student=out/scores", "--system", "none.run")
    relabel("report", "out/ecom", "--gold", "few.parquet", *typo, "--force").refused(3, "none.run")


def test_the_report_wants_a_run_for_systems(judged: Callable[[str], None], relabel: Relabel) -> None:
    judged("out/ecom")
    done = relabel("report", "out/scores", "--system", "a.run", "--system", "student=out/scores")
    done.refused(2, "--system", "no PATH is a run")
