"""Scores rank and grade nothing: where grades are wanted, a TREC run or a column of scores is refused, with what reads
it as scores.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_measures
import pytest
from sklearn.metrics import roc_auc_score

PAIRS = [(f"q{query}", f"d{doc}") for query in range(3) for doc in range(4)]
ROWS = [
    {"query_id": query, "doc_id": doc, "grade": place % 3, "score": 0.25 + place}
    for place, (query, doc) in enumerate(PAIRS)
]
RUN = "".join(f"{query} Q0 {doc} 1 {0.5 + place} bm25\n" for place, (query, doc) in enumerate(PAIRS))


@pytest.fixture
def world(folder: Path) -> Path:
    """A run file, the same under a suffix that says nothing, judgments, and a table of grades and scores."""
    Path("a.run").write_text(RUN)
    Path("a.txt").write_text(RUN)
    Path("gold.qrels").write_text("".join(f"{row['query_id']} 0 {row['doc_id']} {row['grade']}\n" for row in ROWS))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "a.run", "--qrels", "gold.qrels"),
        ("evaluate", "a.txt", "--qrels", "gold.qrels"),
        ("evaluate", "rows.jsonl", "--qrels", "a.run"),
        ("evaluate", "rows.jsonl", "--qrels", "a.txt"),
        ("combine", "a.run", "rows.jsonl", "--to", "x.parquet"),
        ("combine", "rows.jsonl", "rows.jsonl", "--gold", "a.run", "--to", "x.parquet"),
    ],
    ids=" ".join,
)
def test_a_trec_run_is_no_file_of_grades(world: Path, relabel: Callable[..., Any], command: tuple[str, ...]) -> None:
    name = next(word for word in command if word in ("a.run", "a.txt"))
    relabel(*command).refused(3, f"{name}: ", "TREC run", "--score", "relabel systems")
    assert not Path("x.parquet").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "rows.jsonl", "--label", "score", "--qrels", "gold.qrels"),
        ("evaluate", "rows.jsonl", "--qrels", "rows.jsonl", "--grade", "score"),
        ("combine", "rows.jsonl", "rows.jsonl", "--gold", "rows.jsonl", "--grade", "score", "--to", "x.parquet"),
    ],
    ids=" ".join,
)
def test_a_column_of_scores_holds_no_grades(world: Path, relabel: Callable[..., Any], command: tuple[str, ...]) -> None:
    relabel(*command).refused(3, "rows.jsonl: ", "`score`", "0.25", "--score")
    assert not Path("x.parquet").exists()


def test_a_page_takes_no_ranking_for_gold(world: Path, run: Callable[..., None], relabel: Callable[..., Any]) -> None:
    run()
    for gold in ("a.run", "a.txt"):
        done = relabel("report", "out/ecom", "--gold", gold, "--to", "page.html")
        done.refused(3, f"{gold}: ", "TREC run", "relabel systems")
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("command", "code", "parts"),
    [
        (("a.run", "x.qrels"), 2, ("a.run: a TREC run is a ranking", "has no grades", "--score")),
        (("a.run", "x.qrels", "--grade", "rank"), 2, ("a.run: a TREC run is a ranking",)),
        (("a.run", "x.parquet", "--grade", "rank"), 2, ("a.run: a TREC run is a ranking",)),
        (("a.txt", "x.parquet", "--from", "qrels"), 3, ("a.txt: line 1", "TREC run")),
        (("rows.jsonl", "x.qrels", "--grade", "score"), 3, ("row 0: score '0.25'", "whole number", "--score score")),
        (("rows.jsonl", "x.parquet", "--grade", "score"), 3, ("row 0: score '0.25'", "--score score")),
    ],
)
def test_scores_are_not_converted_to_grades(
    world: Path, relabel: Callable[..., Any], command: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    relabel("convert", *command).refused(code, *parts)
    assert not list(world.glob("x.*"))


def test_scores_that_are_named_as_such_are_converted(world: Path, relabel: Callable[..., Any]) -> None:
    for command in (("rows.jsonl", "x.run", "--score", "score"), ("a.run", "x.parquet"), ("a.run", "y.run")):
        assert relabel("convert", *command).code == 0


@pytest.mark.parametrize("source", [("a.run", "score"), ("a.txt", "score"), ("rows.jsonl", "score")], ids=" ".join)
def test_an_order_by_scores_has_the_figures_of_an_order_and_none_of_grades(
    world: Path, relabel: Callable[..., Any], source: tuple[str, str]
) -> None:
    """nDCG is that of ir_measures, the AUC that of sklearn."""
    path, column = source
    found = relabel("evaluate", path, "--score", column, "--qrels", "gold.qrels", "--output", "json").json
    assert (found["counts"]["judged"], found["labels"][0]["kind"], found["confusion"]) == (len(ROWS), "ranking", [])
    assert [*found["figures"]] == ["auc_0/12", "auc_01/2", "ndcg@10", "kendall_tau", "bad_case_rate"]
    gold = [row["grade"] for row in ROWS]
    measured = ir_measures.calc_aggregate(
        [ir_measures.nDCG @ 10], ir_measures.read_trec_qrels("gold.qrels"), ir_measures.read_trec_run("a.run")
    )
    assert found["figures"]["ndcg@10"]["value"] == pytest.approx(measured[ir_measures.nDCG @ 10])
    area = roc_auc_score([grade > 0 for grade in gold], [row["score"] for row in ROWS])
    assert found["figures"]["auc_0/12"]["value"] == pytest.approx(area)


def test_graded_documents_that_are_not_ranked_are_remarked_on(world: Path, relabel: Callable[..., Any]) -> None:
    call = ("evaluate", "a.run", "--score", "score", "--qrels", "gold.qrels", "--output", "json")
    assert not any("not ranked" in note for note in relabel(*call).json["notes"])
    Path("a.run").write_text("".join(RUN.splitlines(keepends=True)[::2]))
    assert any(note.startswith("6 graded documents that are not ranked") for note in relabel(*call).json["notes"])


def test_a_column_of_ranks_ranks_the_lowest_first(world: Path, relabel: Callable[..., Any]) -> None:
    """Its figures are those of the scores that it was made of; a run file, which has scores, is not made of it."""
    rows = [{**row, "rank": len(ROWS) - place} for place, row in enumerate(ROWS)]
    Path("ranks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def figures(column: str) -> Any:
        call = ("evaluate", "ranks.jsonl", "--score", column, "--qrels", "gold.qrels", "--output", "json")
        return relabel(*call).json["figures"]

    def differences(column: str) -> Any:
        call = ("systems", "ranks.jsonl", "a.run", "--score", column, "--labels", "gold.qrels", "--output", "json")
        return relabel(*call).json["pairs"]

    assert figures("rank") == figures("score")
    assert differences("rank") == differences("score")
    relabel("convert", "ranks.jsonl", "x.run", "--score", "rank").refused(2, "--score rank", "highest first")


def test_rows_without_a_score_are_left_out_and_what_is_no_number_is_refused(
    world: Path, relabel: Callable[..., Any]
) -> None:
    Path("some.csv").write_text("query_id,doc_id,score\nq0,d0,1.5\nq0,d1,\nq0,d2,0.5\n")
    found = relabel("evaluate", "some.csv", "--score", "score", "--qrels", "gold.qrels", "--output", "json").json
    assert (found["counts"]["judged"], found["counts"]["without_label"]) == (2, 1)
    Path("odd.csv").write_text("query_id,doc_id,score\nq0,d0,1.5\nq0,d1,high\n")
    relabel("evaluate", "odd.csv", "--score", "score", "--qrels", "gold.qrels").refused(3, "row 1", "'high'")


@pytest.mark.parametrize("command", [("evaluate", "--qrels"), ("systems", "a.run", "b.run", "--gold")], ids=" ".join)
def test_labels_in_words_are_refused_with_some(
    world: Path, relabel: Callable[..., Any], command: tuple[str, ...]
) -> None:
    Path("words.csv").write_text("query_id,doc_id,grade\nq0,d0,yes\nq0,d1,no\n")
    Path("b.run").write_text("".join(RUN.splitlines(keepends=True)[::2]))
    name, *systems, option = command
    labels = ["--labels", "words.csv"] if systems else ["words.csv"]
    done = relabel(name, *systems, *labels, option, "gold.qrels")
    done.refused(3, "words.csv: column `grade` holds no grade, but 'yes', 'no'", "--label")


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (("a.run", "rows.jsonl", "--score", "score"), ("--score", "relabel systems")),
        (("a.run", "--score", "score", "--map-labels", "0=1"), ("--map-labels and --score",)),
        (("out/ecom", "--score", "score"), ("out/ecom is a run",)),
    ],
)
def test_options_that_do_not_go_with_a_ranking_are_refused(
    world: Path, run: Callable[..., None], relabel: Callable[..., Any], command: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    run()
    relabel("evaluate", *command, "--qrels", "gold.qrels").refused(2, *parts)


def test_other_rankers_are_baselines_of_the_same_rows(world: Path, relabel: Callable[..., Any]) -> None:
    """The first stage's run, which lacks a document, and cosines of a table, by ir_measures and scikit-learn."""
    first_stage = RUN.splitlines(keepends=True)
    Path("first.run").write_text("".join(first_stage[:-1]))
    cosines = [{"query_id": q, "doc_id": d, "cosine": (7 * place) % 12 / 12} for place, (q, d) in enumerate(PAIRS)]
    Path("cosines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cosines))
    done = relabel(
        *("evaluate", "rows.jsonl", "--qrels", "gold.qrels", "--output", "json"),
        *("--baseline", "first.run", "--baseline", "minilm=cosines.jsonl"),
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    rankings = found["baselines"]["rankings"]
    assert rankings.keys() == {"first", "minilm"}
    scores = {
        "first": {pair: 0.5 + place for place, pair in enumerate(PAIRS[:-1])} | {PAIRS[-1]: -1.0},
        "minilm": {(row["query_id"], row["doc_id"]): row["cosine"] for row in cosines},
    }
    qrels = [ir_measures.Qrel(row["query_id"], row["doc_id"], row["grade"]) for row in ROWS]
    for name, by_pair in scores.items():
        ranked = [ir_measures.ScoredDoc(query, doc, score) for (query, doc), score in by_pair.items()]
        ndcg = ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, ranked)[ir_measures.nDCG @ 10]
        assert rankings[name]["ndcg@10"] == pytest.approx(ndcg)
        is_relevant = [row["grade"] > 0 for row in ROWS]
        wanted = roc_auc_score(is_relevant, [by_pair[row["query_id"], row["doc_id"]] for row in ROWS])
        assert rankings[name]["auc_0/12"] == pytest.approx(wanted)
    assert any("baseline first: ranks 11 of 12 judged rows" in note for note in found["notes"])
    text = relabel("evaluate", "rows.jsonl", "--qrels", "gold.qrels", "--baseline", "minilm=cosines.jsonl").out
    assert f"{rankings['minilm']['ndcg@10']:.4f} minilm" in text


@pytest.mark.parametrize(
    ("baselines", "code", "parts"),
    [
        (("gold.qrels",), 3, ("gold.qrels", "judgments, not a system's ranking")),
        (("a.run", "a.run"), 2, ("two are called a", "NAME=PATH")),
        (("lexical=a.run",), 2, ("lexical", "NAME=PATH")),
        (("BM25=a.run",), 2, ("BM25", "NAME=PATH")),
        (("other.run",), 3, ("other.run: ranks none of the 12 documents",)),
    ],
)
def test_a_ranking_that_is_no_baseline_is_refused(
    world: Path, relabel: Callable[..., Any], baselines: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    Path("other.run").write_text("q77 Q0 d1 1 0.5 bm25\n")
    options = [word for baseline in baselines for word in ("--baseline", baseline)]
    relabel("evaluate", "rows.jsonl", "--qrels", "gold.qrels", *options).refused(code, *parts)
