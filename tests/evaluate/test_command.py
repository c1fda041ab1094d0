"""`relabel evaluate` from end to end: runs and files, every way to join, what is counted, what is printed."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from relabel.manifests.metrics.metric import share_bounds
from relabel.manifests.records import unsealed

LabelRows = list[dict[str, Any]]


def test_another_query_column_of_a_run_is_refused(relabel: Callable[..., Any], run: Callable[..., None]) -> None:
    run()
    refused = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--by", "query")
    refused.refused(2, "--by query", "whose query ids are in column `query_id`")
    assert relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--by", "query_id").code == 0


def test_a_run_is_judged_by_its_own_input_that_is_a_folder(
    relabel: Callable[..., Any], run: Callable[..., None], folder: Path
) -> None:
    run()
    (folder / "days").mkdir()
    (folder / "pairs.parquet").rename(folder / "days/pairs.parquet")
    assert relabel("evaluate", "out/ecom", "--qrels", "days", "--by", "query_id").code == 0


def test_the_label_column_of_a_run_is_no_choice(relabel: Callable[..., Any], run: Callable[..., None]) -> None:
    run()
    refused = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--label", "grad")
    refused.refused(2, "--label grad", "out/ecom is a run, whose grades are in column `grade`")
    assert relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--label", "grade").code == 0


def test_the_input_of_a_run_is_no_second_judge(relabel: Callable[..., Any], run: Callable[..., None]) -> None:
    run()
    relabel("evaluate", "out/ecom", "pairs.parquet").refused(2, "is the input of out/ecom", "--qrels pairs.parquet")


def test_a_run_is_judged_by_its_own_input_row_by_row(
    relabel: Callable[..., Any],
    run: Callable[..., None],
    committed: Callable[..., Any],
    pairs: LabelRows,
    folder: Path,
) -> None:
    run()
    (folder / "elsewhere").mkdir()
    shutil.move(folder / "pairs.parquet", folder / "elsewhere/pairs.parquet")  # the run's own input all the same
    found = relabel("evaluate", "out/ecom", "--qrels", "elsewhere/pairs.parquet", "--output", "json").json
    assert found["joined_by"] == ["row_id: the qrels are the run's own input"]
    assert (
        found["counts"] | {"labels": 24, "judged": 24, "unjudged": 0, "quarantined": 0, "queries": 6} == found["counts"]
    )
    labels = committed()
    hits = [labels[row]["grade"] == pairs[row]["grade"] for row in range(24)]
    assert found["figures"]["accuracy"]["value"] == pytest.approx(sum(hits) / 24)
    assert found["resampled"] == "queries"
    matrix = np.zeros((3, 3), dtype=int)
    for row in range(24):
        matrix[pairs[row]["grade"], labels[row]["grade"]] += 1
    assert found["confusion"] == matrix.tolist()


def test_all_ways_to_give_the_same_grades_give_the_same_figures(
    relabel: Callable[..., Any], run: Callable[..., None], folder: Path, pairs: LabelRows
) -> None:
    run()
    own = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--output", "json").json
    (folder / "grades.qrels").write_text(
        "".join(f"{row['query_id']} 0 {row['doc_id']} {row['grade']}\n" for row in pairs)
    )
    (folder / "grades.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(pairs)))
    (folder / "grades.csv").write_text(
        "doc_id,query_id,grade\r\n" + "".join(f"{row['doc_id']},{row['query_id']},{row['grade']}\r\n" for row in pairs)
    )
    for name in ("grades.qrels", "grades.jsonl", "grades.csv"):
        found = relabel("evaluate", "out/ecom", "--qrels", name, "--output", "json").json
        assert found["joined_by"] == ["query_id and doc_id"]
        assert found["figures"] == own["figures"], name
        assert found["counts"]["qrels"] == 24


def test_rows_of_one_pair_are_distinguished_by_row_and_not_by_ids(
    relabel: Callable[..., Any], run: Callable[..., None], pairs: LabelRows, folder: Path
) -> None:
    """The same pair twice with different gold grades: legal in a run's own input, a conflict where ids are all there
    is.
    """
    pairs[1] |= {"doc_id": pairs[0]["doc_id"]}
    run()
    found = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--output", "json").json
    assert found["counts"]["judged"] == 24
    assert found["counts"]["relabelled"] == 1
    (folder / "grades.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    relabel("evaluate", "out/ecom", "--qrels", "grades.jsonl").refused(
        3, "1 pairs have several grades", "d0-0: 0, 1", "--duplicates"
    )
    call = ("evaluate", "out/ecom", "--qrels", "grades.jsonl", "--duplicates", "mean", "--output", "json")
    assert relabel(*call).json["counts"]["qrels_in_conflict"] == 1


def test_only_pairs_with_both_sides_are_judged_and_all_others_are_counted(
    relabel: Callable[..., Any], run: Callable[..., None], folder: Path, pairs: LabelRows
) -> None:
    run()
    graded: LabelRows = [dict(row) for row in pairs[:10]]
    graded[3]["grade"] = None
    graded.append({"query_id": "q9", "doc_id": "x", "grade": 1})
    (folder / "grades.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded))
    found = relabel("evaluate", "out/ecom", "--qrels", "grades.jsonl", "--output", "json").json
    counts = found["counts"]
    assert (counts["labels"], counts["judged"], counts["unjudged"], counts["gold_null"]) == (24, 9, 14, 1)
    assert counts["qrels_without_label"] == 1
    assert sum(map(sum, found["confusion"])) == 9


def test_a_run_over_its_limit_is_refused_unless_it_is_allowed_and_quarantined_rows_are_no_labels(
    relabel: Callable[..., Any], run: Callable[..., None]
) -> None:
    run(
        {"engine": {"args": {"p_garbage": 0.5}}, "labeler": {"attempts": 1}, "run": {"max_failed_fraction": 0.0}},
        code=30,
    )
    relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet").refused(
        3, "over its quarantine limit", "--allow-partial"
    )
    call = ("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--allow-partial", "--output", "json")
    found = relabel(*call).json
    assert any("is over its quarantine limit" in note for note in found["notes"])
    counts = found["counts"]
    assert counts["quarantined"] > 0
    assert counts["labels"] == counts["judged"] == 24 - counts["quarantined"]


def test_an_unfinished_run_is_refused_unless_it_is_allowed(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> None:
    write_pairs()
    assert relabel("run", write_job(), "--shard", "0/4").code in (0, 20)
    relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet").refused(
        3, "not finished", "of 24 rows", "--allow-partial"
    )
    found = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--allow-partial", "--output", "json").json
    assert 0 < found["counts"]["judged"] < 24
    assert any("is not finished" in note for note in found["notes"])


def test_stray_files_in_a_run_are_not_read(relabel: Callable[..., Any], run: Callable[..., None], folder: Path) -> None:
    run()
    before = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet").out
    label_file = next((folder / "out/ecom/labels").rglob("*.parquet"))
    shutil.copy(label_file, label_file.with_name("chunk-000099-loser.parquet"))
    assert relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet").out == before


def test_pass_at_names_its_k_and_each_is_the_share_of_draws_that_hold_the_human_grade(
    relabel: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    """Against every draw written out; the intervals are those of shares over queries."""
    random = np.random.default_rng(4)
    rows = [
        {"query_id": f"q{row % 4}", "doc_id": f"d{row}", "label": 1, "grade": int(random.integers(0, 3)),
         "samples": [int(one) for one in random.integers(0, 3, 5 + row % 3)]}
        for row in range(24)
    ]  # fmt: skip
    path = write_rows(rows)
    command = ("evaluate", path, "--qrels", path, "--label", "label", "--pass-at", "5,1, 2,2")
    found = relabel(*command, "--resamples", "40", "--output", "json").json["figures"]
    assert [name for name in found if name.startswith("pass")] == ["pass@1", "pass@2", "pass@5"]
    for k in (1, 2, 5):
        passed = [np.mean([row["grade"] in draw for draw in itertools.combinations(row["samples"], k)]) for row in rows]
        figure = found[f"pass@{k}"]
        assert (figure["value"], figure["over"], figure["unit"]) == (pytest.approx(np.mean(passed)), 24, "rows")
        low, high = share_bounds(np.array([np.sum(passed[query::4]) for query in range(4)]), np.full(4, 6))
        assert (figure["low"], figure["high"]) == (pytest.approx(low), pytest.approx(high))


def test_auc_without_distributions_is_by_the_written_grade_and_says_so(
    relabel: Callable[..., Any], write_rows: Callable[..., str], random_rows: Callable[..., LabelRows]
) -> None:
    rows = random_rows(60)
    bare = write_rows([{key: value for key, value in row.items() if key != "probs"} for row in rows], "bare.jsonl")
    found = relabel("evaluate", bare, "--qrels", bare, "--label", "label", "--output", "json").json
    labels, golds = np.array([row["label"] for row in rows]), np.array([row["grade"] for row in rows])
    for cut, name in ((1, "auc_0/12"), (2, "auc_01/2")):
        figure = found["figures"][name]
        assert figure["is_by_grade"] is True
        assert figure["value"] == pytest.approx(metrics.roc_auc_score(golds >= cut, labels))
        assert figure["low"] < figure["value"] < figure["high"]
    assert not {"ece", "brier"} & set(found["figures"])
    assert any("AUC and ranking take the written grade for a score" in note for note in found["notes"])
    assert all(figure["is_by_grade"] == name.startswith("auc") for name, figure in found["figures"].items())


def test_an_order_of_one_document_a_query_is_no_win(
    relabel: Callable[..., Any], write_rows: Callable[..., str], random_rows: Callable[..., LabelRows]
) -> None:
    rows = write_rows(random_rows(60, queries=55))
    found = relabel("evaluate", rows, "--qrels", rows, "--label", "label")
    assert "shows nothing: so few documents of a query are judged that a random order has 0.9" in found.out
    assert "is above" not in found.out.partition("nDCG@10")[2].split("\n")[0]


def test_several_runs_are_judged_as_one_set_where_that_is_asked_for(
    relabel: Callable[..., Any], run: Callable[..., None], write_job: Callable[..., str], folder: Path
) -> None:
    run()
    assert relabel("run", write_job({"engine": {"seed": 8}, "output": "out/again"}, "again.yaml")).code == 0
    found = relabel("evaluate", "out/ecom", "out/again", "--pool", "--qrels", "pairs.parquet", "--output", "json").json
    assert found["counts"]["judged"] == 48
    assert found["counts"]["relabelled"] == 24
    assert any("together" in note for note in found["notes"])
    assert not any("no BM25" in note for note in found["notes"]), "the texts of all runs are known"
    (folder / "linked").symlink_to("out/ecom")  # the rows of a set that is named twice would count twice
    relabel("evaluate", "--pool", "out/ecom", "linked", "--qrels", "pairs.parquet").refused(2, "twice")


def test_maps_bring_both_sides_to_one_scale(
    relabel: Callable[..., Any], write_rows: Callable[..., str], random_rows: Callable[..., LabelRows]
) -> None:
    rows = random_rows(80, grades=4)
    path = write_rows(rows)
    arguments = ("evaluate", path, "--qrels", path, "--label", "label", "--output", "json")
    both = relabel(*arguments, "--map", "0=0,1=0,2=1,3=1", "--map-labels", "0=0,1=0,2=1,3=1").json
    assert both["grades"] == 2
    hits = [(row["label"] >= 2) == (row["grade"] >= 2) for row in rows]
    assert both["figures"]["accuracy"]["value"] == pytest.approx(np.mean(hits))
    whole = relabel(*arguments).json
    # mass is added, not lost
    assert both["figures"]["auc_0/1"]["value"] == pytest.approx(whole["figures"]["auc_01/23"]["value"])


def test_without_a_query_rows_are_resampled_and_it_is_said(
    relabel: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    path = write_rows([{"label": row % 2, "grade": row % 3 % 2} for row in range(30)])
    done = relabel("evaluate", path, "--qrels", path, "--label", "label")
    assert "30 rows, 1,000 times, seed 7" in done.out
    assert "rows are resampled as if independent" in done.out
    assert "nDCG" not in done.out


def test_where_judges_some_rows_of_a_file_and_another_column_can_be_the_query(
    relabel: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    path = write_rows([{"judge": "ab"[row % 2], "topic": row % 5, "label": row % 2, "grade": 1} for row in range(20)])
    call = ("evaluate", path, "--qrels", path, "--label", "label", "--where", "judge=b", "--by", "topic")
    found = relabel(*call, "--output", "json").json
    assert (found["resampled"], found["num_groups"], found["counts"]["judged"]) == ("queries", 5, 10)
    assert found["figures"]["accuracy"]["value"] == 1.0


def test_gold_with_other_id_columns_judges_labels_with_the_usual_ones(
    relabel: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    rows = [{"query_id": f"q{row % 5}", "doc_id": f"d{row}", "grade": row % 2} for row in range(20)]
    gold = [{"qid": row["query_id"], "pid": row["doc_id"], "grade": row["grade"]} for row in rows]
    call = ("evaluate", write_rows(rows), "--qrels", write_rows(gold, "gold.jsonl"))
    found = relabel(*call, "--by", "qid", "--doc", "pid", "--output", "json").json
    assert found["counts"]["judged"] == 20
    assert found["figures"]["accuracy"]["value"] == 1.0
    for typo in (("--by", "quid", "--doc", "pid"), ("--by", "qid", "--doc", "pd")):
        relabel(*call, *typo).refused(3, f"no column `{typo[1] if typo[1] != 'qid' else typo[3]}`")


def test_the_same_seed_gives_the_same_bytes(
    relabel: Callable[..., Any], write_rows: Callable[..., str], random_rows: Callable[..., LabelRows]
) -> None:
    path = write_rows(random_rows())
    arguments = ("evaluate", path, "--qrels", path, "--label", "label", "--output", "json")
    assert relabel(*arguments).out == relabel(*arguments).out
    assert relabel(*arguments).out != relabel(*arguments, "--seed", "8").out
    without = relabel(*arguments, "--resamples", "0").json["figures"]["accuracy"]
    assert without["low"] is None
    assert without["value"] is not None


def test_labels_that_are_no_number_are_left_out_and_shown(
    relabel: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    values = ["0", "1", "1.", "2 of 3", None, "", 2, 2.0]
    path = write_rows([{"query_id": f"q{row}", "label": value, "grade": 1} for row, value in enumerate(values)])
    found = relabel("evaluate", path, "--qrels", path, "--label", "label", "--output", "json").json
    assert found["counts"]["judged"] == 5
    assert found["counts"]["without_label"] == 3
    assert found["confusion"][1] == [1, 2, 2]
    assert any("'2 of 3'" in note for note in found["notes"])


def test_the_report_is_the_one_reviewed(
    relabel: Callable[..., Any],
    write_rows: Callable[..., str],
    random_rows: Callable[..., LabelRows],
    golden: Callable[[str, str], None],
) -> None:
    rows = random_rows(60)
    labels = write_rows(
        [{name: row[name] for name in ("query_id", "doc_id", "label", "probs")} for row in [*rows, rows[0]]]
    )
    qrels = write_rows(
        [row | {"grade": None if number == 3 else row["grade"]} for number, row in enumerate(rows[:55])], "grades.jsonl"
    )
    done = relabel("evaluate", labels, "--qrels", qrels, "--label", "label")
    assert (done.code, done.err) == (0, "")
    golden("evaluate/report.txt", done.out)


def test_a_manifest_older_than_its_receipts_is_no_finished_run(
    relabel: Callable[..., Any], run: Callable[..., None], folder: Path
) -> None:
    run()
    manifest = unsealed((folder / "out/ecom/manifest.json").read_bytes())
    (folder / "out/ecom/manifest.json").write_text(
        json.dumps(manifest | {"receipts_sha256": "0" * 64, "receipts_listing_sha256": "0" * 64})
    )
    relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet").refused(3, "its manifest is older than its receipts")


# What is off is reported: which file, what was found, which option helps. Never a traceback, and never a figure of
# the wrong rows.


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


@pytest.mark.parametrize(
    ("qrels", "arguments", "name", "code", "parts"),
    [
        pytest.param(
            "7 0 x1 2\n8 0 x2 1\n",
            (),
            "grades.txt",
            3,
            ("9 labels and 2 gold grades", "(q0, d0), (q1, d1), (q2, d2)", "(7, x1), (8, x2)", "--by"),
            id="labels without a grade show the first ids of both sides",
        ),
        pytest.param("", (), "grades.txt", 3, ("no label found a gold grade", "it is empty"), id="an empty file"),
        # a grade off the scale comes with a map to use
        (
            trec(lambda row: row % 4),
            ("--grades", "3"),
            "grades.txt",
            3,
            ("grade 3 is off the scale 0 to 2", "--map 0=0,1=1,2=2,3=2"),
        ),
        (
            trec(lambda row: row % 3 - 1),
            ("--grades", "3"),
            "grades.txt",
            3,
            ("grade -1 is off the scale", "--map -1=0,0=0,1=1"),
        ),
        (
            trec(lambda row: row % 2),
            ("--grades", "2"),
            "grades.txt",
            3,
            ("labels.jsonl: grade 2 is off the scale 0 to 1", "--map-labels"),
        ),
        (trec(lambda row: 1), ("--map", "0=1,0=2"), "grades.txt", 2, ("each grade once",)),
        (trec(lambda row: 1), ("--map", "a=1"), "grades.txt", 2, ("each grade once",)),
        (trec(lambda row: row % 3), ("--map", "0=0,1=1"), "grades.txt", 3, ("grade 2", "--map does not say")),
        (
            trec(lambda row: row % 3),
            ("--map-labels", "0=0,1=1"),
            "grades.txt",
            3,
            ("labels.jsonl", "grade 2", "--map-labels"),
        ),
        # a file of another form names the line, a column that is missing those there are
        ("q0 0 d0 1\nq1 d1 1\n", (), "grades.txt", 3, ("grades.txt: line 2 has 3 fields, and 4 are wanted",)),
        ("q0 0 d0 1.5\n", (), "grades.txt", 3, ("no whole number", "'1.5'")),
        ('{"query_id": "q0"}\nnot json\n', (), "g.jsonl", 3, ("line 2 is not JSON",)),
        ("query_id,doc_id,grade\nq0,d0\n", (), "g.csv", 3, ("row 2 (the header is row 1) has 2 fields",)),
        (
            "query_id,doc_id,grade\nq0,d0,one\n",
            (),
            "g.csv",
            3,
            ("(row 2 (the header is row 1): 'one')",),
        ),
        ("not parquet", (), "g.parquet", 3, ("g.parquet",)),
        (
            "query_id,doc_id,grades\nq0,d0,1\n",
            (),
            "g.csv",
            3,
            ("no column `grade`", "Did you mean `grades`?", "--grade"),
        ),
        ("query_id,docno,grade\nq0,d0,1\n", (), "g.csv", 3, ("no column `doc_id`", "--doc")),
        # a column of another role is not what is meant
        ("qid,query,doc_id,grade\nq0,sock,d0,1\n", (), "g.csv", 3, ("no column `query_id`", "Did you mean `qid`?")),
        (
            "qid,docno,mark\nq0,d0,1\n",
            (),
            "g.csv",
            3,
            ("no column `query_id`", "no column `doc_id`", "no column `grade`", "with --by and --doc and --grade."),
        ),
        (trec(lambda row: 1), ("--label", "mark"), "grades.txt", 3, ("no column `mark`", "--label")),
    ],
)
def test_grades_that_can_not_judge_are_refused_with_the_place_and_the_option(
    judged: Callable[..., Any], qrels: str, arguments: tuple[str, ...], name: str, code: int, parts: tuple[str, ...]
) -> None:
    judged(qrels, *arguments, name=name).refused(code, *parts)


def test_a_job_file_in_place_of_its_output_is_said_to_be_one(
    relabel: Callable[..., Any], run: Callable[..., None], folder: Path
) -> None:
    run()
    relabel("evaluate", "job.yaml", "--qrels", "pairs.parquet").refused(3, "job.yaml: a job file", "`output`")


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
    found = relabel("evaluate", three, "--qrels", qrels, "--label", "label", "--output", "json").json
    assert any("labels go up to 2, and no gold grade is above 1" in note for note in found["notes"])


def test_one_query_has_figures_and_no_intervals(relabel: Callable[..., Any], write_rows: Callable[..., str]) -> None:
    path = write_rows([{"query_id": "q", "doc_id": f"d{row}", "label": row % 2, "grade": 1} for row in range(4)])
    done = relabel("evaluate", path, "--qrels", path, "--label", "label")
    assert done.code == 0
    assert "no intervals" in done.out
    assert " to " not in done.out.partition("gold")[0].partition("figure")[2]


@pytest.mark.parametrize("queries", [4, 5])
def test_a_set_and_a_difference_have_an_interval_in_words_from_as_many_queries_on(
    queries: int, relabel: Callable[..., Any], write_rows: Callable[..., str], random_rows: Callable[..., LabelRows]
) -> None:
    teacher = write_rows(random_rows(60, queries=queries), "teacher.jsonl")
    student = write_rows([{**row, "label": row["grade"]} for row in random_rows(60, queries=queries)], "student.jsonl")
    found = relabel("evaluate", teacher, student, "--qrels", teacher, "--label", "label")
    difference, level = found.out.splitlines()[:2]
    assert difference.startswith("student.jsonl against teacher.jsonl, by gold: ")
    for sentence in (difference, level):
        assert ("too few queries for an interval" in sentence) == (queries < 5)
        assert bool(re.search(r"\d to [+-]?\d", sentence)) == (queries >= 5)
    assert ("and no verdict is given" in level) == (queries < 5)


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
