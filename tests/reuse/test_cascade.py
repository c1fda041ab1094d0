"""Cheap judges before the teacher: the bound that holds, who labelled which row, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.examples import load_examples
from relabel.distill.students.spec import DistillSpec, LabelSource
from relabel.manifests.cascade import audit_of_rows, certified_threshold
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from tests.reuse.conftest import Days, Row, rows_of

GRADES = 4
CALIBRATED = 30
ALPHA = 0.1


def simulated(rng: np.random.Generator, num_queries: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and loss [Q, N] of a judge that is overconfident on some queries, whose rows err together."""
    confidence_QN = rng.uniform(0.5, 1.0, (num_queries, num_rows))
    hard_Q1 = rng.random((num_queries, 1)) < 0.2
    error_QN = np.where(hard_Q1, 0.6, 0.9 * (1 - confidence_QN))
    return confidence_QN, (rng.random((num_queries, num_rows)) < error_QN).astype(float)


def naive_threshold(confidence_N: np.ndarray, loss_N: np.ndarray, alpha: float) -> float:
    """The least threshold whose loss was at most alpha on the calibration."""
    order = np.argsort(-confidence_N)
    above = np.flatnonzero(np.cumsum(loss_N[order]) / len(order) > alpha)
    return float(confidence_N[order][above[0]]) if len(above) else 0.0


def test_over_200_splits_the_mean_loss_of_new_queries_is_within_alpha_and_a_naive_threshold_is_not() -> None:
    rng, alpha = np.random.default_rng(3), 0.05
    certified, naive = [], []
    for _ in range(200):
        confidence_QN, loss_QN = simulated(rng, 25 + 500, 20)
        query_N = np.repeat(np.arange(25), 20)
        seen_N, lost_N = confidence_QN[:25].ravel(), loss_QN[:25].ravel()
        threshold = certified_threshold(query_N, seen_N, lost_N, alpha=alpha, highest=1.0)
        for found, one in ((certified, threshold), (naive, naive_threshold(seen_N, lost_N, alpha))):
            found.append((loss_QN[25:] * (confidence_QN[25:] > one)).mean())
    assert 0.0 < np.mean(certified) <= alpha
    assert np.mean(naive) > alpha * 1.02


def test_a_query_counts_once_however_many_rows_it_has() -> None:
    query_N = np.repeat(np.arange(20), [81, *[1] * 19])
    confidence_N = np.where(query_N == 0, 0.9, 0.8)
    loss_N = (query_N == 0).astype(float)  # the one query errs everywhere
    threshold = certified_threshold(query_N, confidence_N, loss_N, alpha=0.1, highest=1.0)
    assert threshold == 0.0  # (20 * 1/20 + 1) / 21 = 0.095, while 81 of 100 rows are wrong
    assert certified_threshold(query_N, confidence_N, loss_N, alpha=0.09, highest=1.0) == 0.9


@pytest.mark.parametrize(("alpha", "highest", "needed"), [(0.02, 1.0, 49), (0.05, 1.0, 19), (0.3, 3.0, 9)])
def test_an_alpha_that_so_few_queries_cannot_certify_is_refused_with_the_number_that_can(
    alpha: float, highest: float, needed: int
) -> None:
    few, zeros = np.arange(needed - 1), np.zeros(needed)
    with pytest.raises(ConfigError, match=f"at least {needed} "):
        certified_threshold(few, zeros[1:], zeros[1:], alpha=alpha, highest=highest)
    assert certified_threshold(np.arange(needed), zeros + 0.5, zeros, alpha=alpha, highest=highest) == 0.0


def test_the_audit_sees_a_judge_that_went_wrong_and_weighs_queries_alike() -> None:
    held = {"alpha": 0.05, "threshold": 0.5, "queries": 40, "loss": (1 - np.eye(2)).tolist()}

    def rows(wrong: float) -> pa.Table:
        found = [
            {"query_id": f"q{query}", "grade": int(doc < wrong * 10), "answered_by": by, "cheap_grade": 0}
            for query in range(40)
            for by in ("cheap", "audit")
            for doc in range(10)
        ]
        known = [{"query_id": "known", "grade": 1, "answered_by": "calibration", "cheap_grade": 0}] * 5
        return pa.Table.from_pylist(found + known)

    good, bad = audit_of_rows(rows(0.0), held), audit_of_rows(rows(0.3), held)
    assert (good.loss, good.is_alarm, good.cheap, good.audited, good.calibration) == (0.0, False, 400, 400, 5)
    one = audit_of_rows(rows(0.0).slice(19, 1), held)  # of one query nothing can be said
    assert (one.audited, one.loss, one.low) == (1, None, None)
    assert "too few pairs" in one.text
    assert bad.loss == pytest.approx(0.3)
    assert bad.is_alarm


# ------------------------------------------------------------------------------
# A run.


def cheap_file(days: Days, labels: list[Row], *, wrong: int) -> str:
    """A judge that knows the teacher's grades, is unsure of each fifth row and wrong about it, and sure of each
    `wrong`-th of the others and wrong.
    """
    rows = []
    for label in labels:
        is_unsure = label["row_id"] % 5 == 0
        grade = (label["grade"] + (is_unsure or label["row_id"] % wrong == 1)) % GRADES
        probs = np.full(GRADES, 0.15 if is_unsure else 0.01)
        probs[grade] = 1 - probs[0] * (GRADES - 1)
        rows.append({**{name: label[name] for name in ("query_id", "doc_id")}, "grade": grade, "probs": probs.tolist()})
    path = days.folder / "cheap.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def cascade(days: Days, cheap: str | list[str], **changes: Any) -> dict[str, Any]:
    return {"cheap": cheap, "calibration": str(days.out("calibration")), "alpha": ALPHA, "audit_pairs": 40, **changes}


@pytest.fixture
def asked(days: Days) -> tuple[list[Row], list[Row]]:
    """The rows of 80 queries and the teacher's labels of all; `calibration` is a run over 30 of the queries."""
    rows = rows_of(80, 10)
    days.run("truth", rows, labeler={"name": "direct"})
    drawn = {f"q{query}" for query in np.random.default_rng(5).permutation(80)[:CALIBRATED]}
    days.run("calibration", [row for row in rows if row["query_id"] in drawn], labeler={"name": "direct"})
    return rows, days.labels("truth")


def test_the_teacher_is_asked_what_the_cheap_judge_is_unsure_of_and_the_audit(
    days: Days, asked: tuple[list[Row], list[Row]]
) -> None:
    rows, truth = asked
    cheap = cheap_file(days, truth, wrong=97)
    result = days.run("cascade", rows, labeler={"name": "direct"}, cascade=cascade(days, cheap))
    labels = days.labels("cascade")
    by = [label["answered_by"] for label in labels]
    assert days.asks("cascade") == {"score": by.count("teacher") + by.count("audit")}
    assert by.count("calibration") == CALIBRATED * 10
    assert by.count("teacher") == 50 * 2
    assert 15 <= by.count("audit") <= 90
    for label, true in zip(labels, truth, strict=True):
        if label["answered_by"] == "cheap":
            assert (label["grade"], label["key"], label["prompt_tokens"]) == (label["cheap_grade"], None, 0)
        else:
            assert (label["grade"], label["probs"], label["key"]) == (true["grade"], true["probs"], true["key"])
    found, manifest = result["cascade"], days.manifest("cascade")
    assert found == manifest["cascade"]
    assert (found["cheap"], found["audited"], found["queries"]) == (by.count("cheap"), by.count("audit"), CALIBRATED)
    assert 0.0 <= found["low"] <= found["loss"] < ALPHA
    certificate = manifest["provenance"]["cascade"]
    assert (certificate["alpha"], certificate["queries"]) == (ALPHA, CALIBRATED)
    assert days.call("status", days.folder / "cascade.yaml")[1]["cascade"] == found
    code, again = days.call("run", days.folder / "cascade.yaml")
    assert (code, again["cascade"]) == (10, found)


def test_no_later_run_takes_a_cheap_label_for_the_teachers(days: Days, asked: tuple[list[Row], list[Row]]) -> None:
    rows, truth = asked
    days.run("cascade", rows, labeler={"name": "direct"}, cascade=cascade(days, cheap_file(days, truth, wrong=97)))
    cheap = sum(label["answered_by"] == "cheap" for label in days.labels("cascade"))
    days.run("after", rows, labeler={"name": "direct"}, reuse=["cascade"])
    assert days.asks("after") == {"score": cheap}
    assert [row["grade"] for row in days.labels("after")] == [row["grade"] for row in truth]
    spec = cascade(days, str(days.out("truth")), calibration=str(days.out("cascade")))
    code, error = days.call("run", days.job("again", rows, labeler={"name": "direct"}, cascade=spec))
    assert code == 3
    assert "is a cascade itself" in error


def test_shards_and_chunks_do_not_matter_to_who_labels_a_row(days: Days, asked: tuple[list[Row], list[Row]]) -> None:
    rows, truth = asked
    spec = cascade(days, cheap_file(days, truth, wrong=97))
    days.run("one", rows, labeler={"name": "direct"}, cascade=spec, shards=1, run={"chunk_rows": 80})
    days.run("many", rows, labeler={"name": "direct"}, cascade=spec, shards=7, run={"chunk_rows": 3})
    assert days.labels("one") == days.labels("many")


def test_a_judge_that_is_worse_on_the_run_than_on_the_calibration_ends_in_an_alarm(
    days: Days, asked: tuple[list[Row], list[Row]]
) -> None:
    rows, truth = asked
    known = {label["query_id"] for label in days.labels("calibration")}
    spoilt = [{**label, "grade": (label["grade"] + (label["query_id"] not in known)) % GRADES} for label in truth]
    spec = cascade(days, cheap_file(days, spoilt, wrong=1000), audit=0.2)
    code, result = days.call("run", days.job("cascade", rows, labeler={"name": "direct"}, cascade=spec))
    assert (code, result["rows_open"]) == (5, 0)
    assert result["cascade"]["low"] > ALPHA


def test_what_cannot_be_certified_is_refused(days: Days, asked: tuple[list[Row], list[Row]]) -> None:
    rows, truth = asked
    cheap = cheap_file(days, truth, wrong=97)

    def refused(*words: str, job: dict[str, Any] | None = None, cheap: str = cheap, **changes: Any) -> None:
        spec = {"labeler": {"name": "direct"}, **(job or {}), "cascade": cascade(days, cheap, **changes)}
        code, error = days.call("run", days.job("refused", rows, **spec))
        assert code == 3, error
        assert all(word in error for word in words), error
        assert not Path(days.out("refused")).exists()

    refused("30 calibration queries", "at least 49", alpha=0.02)
    refused("labelled otherwise", "templates", job={"labeler": {"name": "umbrela"}})
    refused("4 grades", "labeler 3", job={"labeler": {"name": "r3a"}}, cheap=str(days.out("truth")))
    strangers = days.folder / "strangers.parquet"
    pq.write_table(pa.Table.from_pylist([{"query_id": "other", "doc_id": "d", "grade": 1}]), strangers)
    refused("0 calibration queries", cheap=str(strangers))
    refused("canary", job={"canary": 5})
    refused("review", job={"labeler": {"name": "review"}})


def test_other_cheap_answers_are_another_job(days: Days, asked: tuple[list[Row], list[Row]]) -> None:
    rows, truth = asked
    days.run("day", rows, labeler={"name": "direct"}, cascade=cascade(days, cheap_file(days, truth, wrong=97)))
    cheap_file(days, truth, wrong=53)
    code, error = days.call("run", days.folder / "day.yaml")
    assert code == 3
    assert "cascade.cheap" in error


def test_several_judges_answer_by_the_mean_of_their_distributions(
    days: Days, asked: tuple[list[Row], list[Row]]
) -> None:
    rows, truth = asked
    cheap = cheap_file(days, truth, wrong=97)
    spec = cascade(days, [cheap, str(days.out("truth"))])
    days.run("cascade", rows, labeler={"name": "direct"}, cascade=spec)
    held = pq.read_table(cheap)["probs"].to_pylist()
    for label, one, other in zip(days.labels("cascade"), held, truth, strict=True):
        mean_K = (np.array(one) + np.array(other["probs"])) / 2
        assert label["cheap_grade"] == mean_K.argmax()
        assert label["cheap_confidence"] == pytest.approx(mean_K.max(), abs=1e-5)
    sources = {one["output"] for one in days.manifest("cascade")["reused_from"]}
    assert sources == {*spec["cheap"], spec["calibration"]}


def test_a_student_learns_from_a_cascade_with_weights_by_who_labelled_the_row(
    days: Days, asked: tuple[list[Row], list[Row]]
) -> None:
    rows, truth = asked
    days.run("cascade", rows, labeler={"name": "direct"}, cascade=cascade(days, cheap_file(days, truth, wrong=97)))
    by = [label["answered_by"] for label in days.labels("cascade")]
    source = {"path": str(days.out("cascade")), "weight": 2.0, "weights": {"cheap": 0.25, "audit": 0.0}}
    student = {"kind": "encoder", "model": "none"}
    spec = DistillSpec.model_validate(
        {"name": "s", "labels": [source], "student": student, "loss": {"weight_by": []}, "output": "o"}
    )
    weights = load_examples(spec, Storage()).row_weight
    assert weights.tolist() == [{"cheap": 0.5, "audit": 0.0}.get(one, 2.0) for one in by]
    plain = spec.model_copy(update={"labels": (LabelSource(path=str(days.out("truth")), weights={"cheap": 0.5}),)})
    with pytest.raises(InputError, match="cascade alone"):
        load_examples(plain, Storage())
