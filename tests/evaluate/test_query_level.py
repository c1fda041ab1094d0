"""Runs of `evidence-set` and `review` from their input to figures: gold by row and by pair, gates; and gold that does
not fit.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats
from sklearn import metrics

from relabel.manifests.gold import GoldRows
from relabel.manifests.label_sets import gather
from relabel.manifests.labels import ids_of
from relabel.manifests.metrics.comparison import Labelled, compare, kl_rows, match_rows
from relabel.manifests.metrics.metric import draw_weights, tau_by_query
from tests.labelers.test_evidence_set import document_of
from tests.reuse.test_estimates import treed_rows

Row = dict[str, Any]
LISTS = {
    "gold_chunks": pa.list_(pa.int64()),
    "answers": pa.list_(pa.string()),
    "gold_answers": pa.list_(pa.string()),
    "gold_sufficient": pa.bool_(),
}


def chunked(queries: int = 5, documents: int = 3) -> list[Row]:
    """Documents of four chunks, of which gold wants one or none; answers of which every other query's is right."""
    rows = []
    for query in range(queries):
        for number in range(documents):
            text, chunks = document_of([f"part {place} of {query}-{number}" for place in range(4)])
            rows.append(
                {
                    "query_id": f"q{query}",
                    "query": f"red shoe {query}",
                    "doc_id": f"d{query}-{number}",
                    "document": text,
                    "chunks": list(chunks),
                    "gold_chunks": [1 + query % 4] if number == 0 else [],
                    "answers": ["The Red one", "blue"] if query % 2 else ["blue"],
                    "gold_answers": ["the red one."],
                    "gold_sufficient": query % 2 == 0,
                }
            )
    return rows


@pytest.fixture
def labelled(
    folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str]
) -> Callable[[str, list[Row]], list[Row]]:
    """`labelled("evidence-set", rows)`: a finished run of these rows in out/ecom; its labels in row order."""

    def call(labeler: str, rows: list[Row]) -> list[Row]:
        held = {name: kind for name, kind in LISTS.items() if name in rows[0]}
        table = pa.Table.from_pylist([{k: v for k, v in row.items() if k not in held} for row in rows])
        for name, kind in held.items():
            table = table.append_column(name, pa.array([row[name] for row in rows], kind))
        pq.write_table(table, folder / "pairs.parquet")
        changes = {"labeler": {"name": labeler}, "input": {"columns": {"document": ["document"]}}}
        assert relabel("run", write_job(changes)).code == 0
        files = json.loads((folder / "out/ecom/manifest.json").read_bytes())["labels"]
        found = [row for file in files for row in pq.read_table(folder / "out/ecom" / file["path"]).to_pylist()]
        return sorted(found, key=lambda row: int(row["row_id"]))

    return call


def by_query(rows: Sequence[Row], labels: Sequence[Row]) -> list[list[tuple[Row, Row]]]:
    found: dict[str, list[tuple[Row, Row]]] = {}
    for row, label in zip(rows, labels, strict=True):
        found.setdefault(row["query_id"], []).append((row, label))
    return list(found.values())


def f1(chosen: Sequence[int], wanted: Sequence[int]) -> float:
    held = [[number in numbers for number in range(1, 5)] for numbers in (wanted, chosen)]
    return float(metrics.f1_score(*held, zero_division=1.0))


def test_chosen_evidence_is_judged_by_the_runs_own_input_and_by_a_table(
    labelled: Callable[..., list[Row]], relabel: Callable[..., Any], write_rows: Callable[..., str]
) -> None:
    rows = chunked()
    labels = labelled("evidence-set", rows)
    queries = by_query(rows, labels)
    own = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--output", "json").json
    figures = {name: figure["value"] for name, figure in own["figures"].items()}
    counts = [sum(len(set(label["selected"])) for _, label in held) for held in queries]
    tokens = [sum(label["selected_tokens"] for _, label in held) for held in queries]
    assert (figures["chunks_mean"], figures["chunks_max"]) == (pytest.approx(np.mean(counts)), max(counts))
    assert (figures["tokens_mean"], figures["tokens_max"]) == (pytest.approx(np.mean(tokens)), max(tokens))
    costs = [np.mean([label["over_budget"] for _, label in held]) for held in queries]
    assert figures["over_budget"] == pytest.approx(np.mean(costs))
    agreement = [np.mean([f1(label["selected"], row["gold_chunks"]) for row, label in held]) for held in queries]
    assert figures["evidence_f1"] == pytest.approx(np.mean(agreement))
    assert figures["exact_match"] == figures["hit@1"] == 2 / 5
    assert (
        own["confusion"]
        == metrics.confusion_matrix(
            [bool(row["gold_chunks"]) for row in rows], [label["grade"] for label in labels], labels=[False, True]
        ).tolist()
    )
    assert own["figures"]["evidence_f1"]["low"] <= figures["evidence_f1"] <= own["figures"]["evidence_f1"]["high"]
    table = write_rows([{k: v for k, v in row.items() if k not in ("chunks", "document")} for row in rows], "g.jsonl")
    other = relabel("evaluate", "out/ecom", "--qrels", table, "--output", "json").json
    assert other["joined_by"] == ["query_id and doc_id"]
    assert other["figures"] == own["figures"]
    gates = ("--require", "f1_ret>=0", "--require", "em<=1", "--require", "tokens_mean<1")
    assert relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", *gates).code == 5


def test_reviews_are_judged_by_useful_documents_and_sufficiency(
    labelled: Callable[..., list[Row]], relabel: Callable[..., Any]
) -> None:
    rows = [{**row, "grade": int(row["doc_id"].endswith("-0"))} for row in chunked(8)]
    labels = labelled("review", rows)
    figures = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--output", "json").json["figures"]
    queries = by_query(rows, labels)
    enough = [held[0][0]["gold_sufficient"] for held in queries]
    yes = [held[0][1]["sufficient_probs"][1] for held in queries]
    assert figures["sufficient_auc"]["value"] == pytest.approx(metrics.roc_auc_score(enough, yes))
    pairs = [({row["doc_id"] for row, _ in held if row["grade"]}, set(held[0][1]["useful"])) for held in queries]
    precision = [len(useful & named) / len(named) for useful, named in pairs if named]
    assert figures["useful_precision"] == figures["useful_precision"] | {
        "value": pytest.approx(np.mean(precision)),
        "over": len(precision),
        "unit": "queries",
    }
    recall = [len(useful & named) / len(useful) for useful, named in pairs]
    assert figures["useful_recall"]["value"] == pytest.approx(np.mean(recall))
    assert not {"chunks_mean", "evidence_f1", "exact_match"} & figures.keys()


@pytest.mark.parametrize("number", [0, 5])
def test_a_gold_chunk_that_is_not_there_names_document_and_chunk(
    labelled: Callable[..., list[Row]], relabel: Callable[..., Any], write_rows: Callable[..., str], number: int
) -> None:
    rows = chunked(2)
    labelled("evidence-set", rows)
    rows[4]["gold_chunks"] = [2, number]
    relabel("evaluate", "out/ecom", "--qrels", write_rows(rows, "g.jsonl")).refused(
        3, "g.jsonl: column `gold_chunks`", f"chunk {number} of document d1-1 of query q1, which has 4 chunks"
    )


def test_what_is_of_the_query_counts_in_a_row_without_a_grade(
    labelled: Callable[..., list[Row]], relabel: Callable[..., Any]
) -> None:
    """Answers are in the first row of each query, which has no gold; two of five are right."""
    rows = chunked()
    for row in rows:
        if row["doc_id"].endswith("-0"):
            row["gold_chunks"] = None
        else:
            row["answers"] = row["gold_answers"] = None
    labels = labelled("evidence-set", rows)
    own = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--output", "json").json
    assert own["counts"]["judged"] == 10
    figures = own["figures"]
    assert {(figures[name]["value"], figures[name]["over"]) for name in ("exact_match", "hit@1")} == {(2 / 5, 5)}
    sizes = [
        sum(len(set(label["selected"])) for row, label in held if row["gold_chunks"] is not None)
        for held in by_query(rows, labels)
    ]
    assert figures["chunks_mean"]["value"] == pytest.approx(np.mean(sizes))


# A run of `route` from its input to figures: gold by row of its own input.


def _routed(folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str], gold: list[Any]) -> list[Any]:
    """A run over rows with this gold, a dict a row; its labels."""
    table = pa.Table.from_pylist(treed_rows(3, 2))
    for name in gold[0]:
        table = table.append_column(name, pa.array([row[name] for row in gold], pa.list_(pa.int64())))
    pq.write_table(table, folder / "pairs.parquet")
    changes = {"labeler": {"name": "route"}, "input": {"columns": {"document": ["document"]}}}
    assert relabel("run", write_job(changes)).code == 0
    files = json.loads((folder / "out/ecom/manifest.json").read_bytes())["labels"]
    return [row for file in files for row in pq.read_table(folder / "out/ecom" / file["path"]).to_pylist()]


@pytest.mark.parametrize("is_own_input", [True, False])
def test_without_grades_nodes_tell_them_and_a_row_that_does_not_tell_is_left_out(
    folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str], is_own_input: bool
) -> None:
    ids: list[tuple[Any, Any]] = [([2], [4]), ([5], None), ([], [4]), ([], []), ([], None), (None, [4])]
    grades = [2, 2, 1, 0]
    labels = _routed(
        folder, relabel, write_job, [{"gold_answer_ids": one, "gold_expand_ids": other} for one, other in ids]
    )
    if not is_own_input:
        kept = pq.read_table("pairs.parquet").select(["query_id", "doc_id", "gold_answer_ids", "gold_expand_ids"])
        pq.write_table(kept, "gold.parquet")
    gold = "pairs.parquet" if is_own_input else "gold.parquet"
    found = relabel("evaluate", "out/ecom", "--qrels", gold, "--output", "json").json
    assert (found["counts"]["judged"], found["counts"]["gold_null"]) == (4, 2)
    same = sum(label["grade"] == grade for label, grade in zip(labels, grades, strict=False))
    assert found["figures"]["accuracy"]["value"] == pytest.approx(same / 4)
    assert found["figures"]["answer_f1"]["over"] == 2
    assert found["figures"]["refusal_accuracy"]["over"] == 1


# A student's figures against its teacher and gold, computed a second time: by scikit-learn, scipy, ir_measures, and
# a bootstrap by hand.


GRADES = 3


def world(rows: int = 60, queries: int = 6, *, seed: int = 1) -> tuple[Labelled, Labelled, list[int]]:
    """A teacher who is often right, a student who often follows it, and the gold grades."""
    random = np.random.default_rng(seed)
    gold = random.integers(0, GRADES, rows)
    ours = random.dirichlet(np.ones(GRADES), rows) + 0.6 * np.eye(GRADES)[gold]
    theirs = ours + random.dirichlet(np.ones(GRADES), rows)
    sides = []
    for name, probs in (("teacher", ours), ("student", theirs)):
        held = probs / probs.sum(1, keepdims=True)
        part = pa.record_batch(
            {
                "row_id": pa.array(range(rows)),
                "grade": pa.array(held.argmax(1)),
                "query_id": ids_of(f"q{row % queries}" for row in range(rows)),
                "doc_id": ids_of(f"d{row}" for row in range(rows)),
                "probs": pa.array(held.tolist(), pa.large_list(pa.float64())),
            }
        )
        sides.append(gather([part], grades=GRADES, where=name))
    return sides[0], sides[1], gold.tolist()


def compared(teacher: Labelled, student: Labelled, golds: list[Any] | None, **options: Any) -> Any:
    match = match_rows(teacher, student, is_same_input=True)
    known = np.ones(len(match.teacher), dtype=bool)
    held = None if golds is None else GoldRows("row", known, {"gold": pa.array(golds, pa.int64())})
    return compare(teacher, student, match, held, grades=GRADES, **{"resamples": 200, "seed": 7} | options)


def test_kl_is_the_relative_entropy_of_scipy_in_the_teachers_direction() -> None:
    teacher, student, _ = world()
    rows = kl_rows(teacher.probs, student.probs)
    assert rows == pytest.approx(stats.entropy(teacher.probs, student.probs, axis=1))
    assert rows.mean() != pytest.approx(stats.entropy(student.probs, teacher.probs, axis=1).mean(), rel=1e-3)
    assert compared(teacher, student, None).against_teacher["kl"].value == pytest.approx(rows.mean())


def test_kendall_tau_leaves_out_queries_that_one_side_does_not_order() -> None:
    query = np.array([0, 0, 1, 1, 1, 2])
    tau = tau_by_query(query, np.array([1.0, 2, 1, 2, 2, 5]), np.array([3.0, 3, 1, 3, 2, 5]), num_queries=3)
    assert np.isnan(tau[[0, 2]]).all()
    assert tau[1] == pytest.approx(stats.kendalltau([1, 2, 2], [1, 3, 2]).statistic)


def test_a_student_that_answers_as_its_teacher_differs_in_nothing() -> None:
    teacher, _, golds = world()
    found = compared(teacher, teacher, golds)
    assert found.against_teacher["kl"].value == pytest.approx(0.0, abs=1e-12)
    assert found.against_teacher["agreement"].value == 1.0
    assert found.against_teacher["kendall_tau"].value == pytest.approx(1.0)
    for name, step in found.against_gold.difference.items():
        assert (step.value, step.low, step.high) == (0.0, 0.0, 0.0), name


def test_swapped_roles_turn_every_difference_around() -> None:
    teacher, student, golds = world()
    there, back = (
        compared(*sides, golds).against_gold.difference for sides in ((teacher, student), (student, teacher))
    )
    for name, step in there.items():
        assert back[name].value == pytest.approx(-step.value), name
        assert (back[name].low, back[name].high) == pytest.approx((-step.high, -step.low)), name


def figures_by_hand(labels: Labelled, golds: list[int], rows: list[int], queries: list[int]) -> dict[str, float]:
    """Figures of drawn rows, each as often as drawn, by scikit-learn and ir_measures; `queries` are the drawn ones."""
    gold, label = np.array(golds)[rows], labels.grades[rows]
    probs = labels.probs[rows] if labels.probs is not None else np.zeros((0, 3))
    ndcg = []
    for query in queries:
        inside = [row for row in range(len(golds)) if row % 6 == query]
        run = {str(row): float(labels.probs[row] @ np.arange(GRADES)) for row in inside}
        qrels = {str(row): golds[row] for row in inside}
        ndcg.append(
            ir_measures.calc_aggregate([ir_measures.nDCG @ 10], {"q": qrels}, {"q": run})[ir_measures.nDCG @ 10]
        )
    return {
        "accuracy": float(metrics.accuracy_score(gold, label)),
        "f1_macro": float(metrics.f1_score(gold, label, average="macro", zero_division=0)),
        "kappa": float(metrics.cohen_kappa_score(gold, label)),
        "auc_0/12": float(metrics.roc_auc_score(gold >= 1, probs[:, 1:].sum(1))),
        "brier": float(((probs - np.eye(GRADES)[gold]) ** 2).sum(1).mean()),
        "ndcg@10": float(np.mean(ndcg)),
    }


def test_the_paired_bootstrap_is_the_one_made_by_hand() -> None:
    """25 draws of six queries, their rows written out as often as drawn, both sides judged by other libraries,
    subtracted, percentiles.
    """
    teacher, student, golds = world()
    steps: dict[str, list[float]] = {}
    for weights in np.concatenate(list(draw_weights(6, 25, seed=7))):
        queries = [query for query in range(6) for _ in range(int(weights[query]))]
        rows = [row for query in queries for row in range(60) if row % 6 == query]
        ours, theirs = (figures_by_hand(side, golds, rows, queries) for side in (teacher, student))
        for name, value in ours.items():
            steps.setdefault(name, []).append(theirs[name] - value)
    found = compared(teacher, student, golds, resamples=25).against_gold.difference
    whole = [figures_by_hand(side, golds, list(range(60)), list(range(6))) for side in (teacher, student)]
    for name, values in steps.items():
        assert found[name].value == pytest.approx(whole[1][name] - whole[0][name]), name
        assert (found[name].low, found[name].high) == pytest.approx(np.quantile(values, [0.025, 0.975])), name


def part(rows: list[int], pairs: list[tuple[str, str]], grades: list[int | None]) -> pa.RecordBatch:
    ids = {name: ids_of(pair[side] for pair in pairs) for side, name in enumerate(("query_id", "doc_id"))}
    return pa.record_batch({"row_id": pa.array(rows, pa.int64()), "grade": pa.array(grades, pa.int64()), **ids})


def test_rows_without_a_label_are_counted_and_never_matched() -> None:
    ours = gather([part([0, 1], [("q", "a"), ("q", "b")], [None, 1])], grades=3, where="ours")
    theirs = gather([part([0, 1], [("q", "a"), ("q", "b")], [0, 2])], grades=3, where="theirs")
    match = match_rows(ours, theirs, is_same_input=True)
    assert ours.row_ids[match.teacher].tolist() == [1]
    found = compare(ours, theirs, match, None, grades=3, resamples=0, seed=1)
    assert any("rows of ours without a readable label, left out: 1" in note for note in found.notes)
    assert "kl" not in found.against_teacher
