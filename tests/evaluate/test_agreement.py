"""Every count-based figure against a hand-made case and the libraries."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.forms import load_columns
from relabel.manifests.gold import grades_by_pair
from relabel.manifests.label_sets import gather
from relabel.manifests.labels import codes_of, ids_of, texts_of
from relabel.manifests.metrics import metric
from relabel.manifests.metrics.comparison import match_rows
from relabel.manifests.metrics.evaluation import Gate, judge_gate, judge_gates, parse_flag, parse_gate, parse_gates
from relabel.manifests.metrics.judged import count_metrics
from relabel.manifests.metrics.metric import (
    QueryRanking,
    bootstrap,
    draw_weights,
    fit_temperature,
    tempered,
)
from relabel.manifests.metrics.metric import WeightedStatistic as Statistic
from relabel.manifests.tables import as_ids, read_grades

# nDCG, tau and bad cases by hand, and nDCG against ir_measures.


def rank_queries(query: np.ndarray, docs: list[str], score: np.ndarray, gold: np.ndarray, **kept: int) -> QueryRanking:
    """By ids as they are written."""
    return metric.rank_queries(query, codes_of(ids_of(docs))[0], score, gold, **kept)


def test_queries_without_a_figure_have_none() -> None:
    query = np.array([0, 0, 1, 1, 3])
    found = rank_queries(
        query, ["a", "b"] * 2 + ["c"], np.array([1, 2, 5, 5, 1.0]), np.array([0, 0, 1, 2, 2]), num_queries=4
    )
    assert np.isnan(found.ndcg).tolist() == [True, False, True, False]  # no relevant document; none at all
    assert np.isnan(found.tau).tolist() == [True, True, True, True]  # equal grades, equal scores, nothing, one document
    assert found.bad_case.tolist()[:2] == [1.0, 0.0]
    assert math.isnan(found.bad_case[2])


def test_a_document_that_comes_twice_is_ranked_once() -> None:
    query = np.zeros(3, dtype=int)
    twice = rank_queries(query, ["a", "b", "a"], np.array([4.0, 2.0, 2.0]), np.array([1, 2, 1]), num_queries=1)
    once = rank_queries(query[:2], ["a", "b"], np.array([3.0, 2.0]), np.array([1, 2]), num_queries=1)
    assert twice.ndcg[0] == once.ndcg[0]
    assert twice.tau[0] == once.tau[0]


# ECE and Brier by hand; a fitted temperature undoes what was bent on purpose.


def test_a_temperature_fitted_to_distributions_finds_the_one_that_they_were_flattened_by() -> None:
    target_NK = np.random.default_rng(5).dirichlet([2.0, 1.0, 0.5], 500)
    assert fit_temperature(tempered(target_NK, 3.0), target_NK) == pytest.approx(1 / 3, rel=1e-3)


# Intervals: reproducible, wide enough, and the same whether counts or rows are resampled.


def of_ratio(name: str, total_G: np.ndarray, count_G: np.ndarray) -> Statistic:
    def statistic(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore"):
            return {name: weight_RG @ total_G / (weight_RG @ count_G)}

    return statistic


def of_counts(counts_GKK: np.ndarray) -> Statistic:
    return lambda weight_RG: count_metrics(np.tensordot(weight_RG, counts_GKK, axes=1))


def test_weights_draw_as_many_groups_as_there_are() -> None:
    weights = np.concatenate(list(draw_weights(13, 50, seed=2)))
    assert weights.shape == (50, 13)
    assert (weights.sum(1) == 13).all()
    assert (np.concatenate(list(draw_weights(13, 50, seed=2))) == weights).all()
    assert (np.concatenate(list(draw_weights(13, 50, seed=3))) != weights).any()


def test_an_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    """300 tiny worlds of 40 queries with 5 rows that lean the same way: 95 % intervals over queries."""
    random = np.random.default_rng(11)
    worlds, queries, rows = 300, 40, 5
    covered = 0
    for world in range(worlds):
        hit = random.random((queries, rows)) < random.beta(0.6, 0.4, (queries, 1))  # the mean of that beta is 0.6
        by_query = of_ratio("mean", hit.sum(1), np.full(queries, rows))
        low, high = bootstrap(by_query, num_groups=queries, resamples=200, seed=world)["mean"]
        covered += low <= 0.6 <= high
    assert 0.90 <= covered / worlds <= 0.98


def test_resamples_without_a_value_are_left_out() -> None:
    counts = np.zeros((2, 2, 2))
    counts[0, 0, 0] = counts[1, 1, 1] = 3  # the figures of grade 1 are undefined where only the first query is drawn
    found = bootstrap(of_counts(counts), num_groups=2, resamples=400, seed=1)
    assert found["f1_1"] == (1.0, 1.0)


def test_one_group_has_no_interval() -> None:
    assert bootstrap(of_ratio("mean", np.ones(1), np.ones(1)), num_groups=1, resamples=10, seed=1) == {}
    nothing = bootstrap(of_ratio("mean", np.zeros(2), np.zeros(2)), num_groups=2, resamples=10, seed=1)["mean"]
    assert math.isnan(nothing.low)


# Joins over whole columns against loops over rows: pairs that come again, nulls, other scales, Parquet's kinds.


PAIRS = st.tuples(st.sampled_from(["q", "r", ""]), st.sampled_from(["a", "b", "\ud800", "é"]))
QRELS = st.lists(st.tuples(PAIRS, st.none() | st.integers(-1, 3)), max_size=14)
FEW = settings(max_examples=60, deadline=None)


def qrels_of(rows: list[tuple[tuple[str, str], int | None]]) -> dict[str, pa.Array]:
    ids = {name: ids_of(pair[side] for pair, _ in rows) for side, name in enumerate(("query_id", "doc_id"))}
    return {**ids, "gold": pa.array([grade for _, grade in rows], pa.int64())}


def held(rows: list[tuple[tuple[str, str], int | None]]) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for pair, grade in rows:
        found.setdefault(pair, []).extend([] if grade is None else [grade])
    return found


@FEW
@given(QRELS, st.sampled_from(["mean", "first"]))
def test_each_pair_has_the_grade_that_a_loop_over_rows_gives_it(rows: list[Any], rule: Any) -> None:
    found, expected = grades_by_pair(qrels_of(rows), rule, "g.txt"), held(rows)
    settled = {
        pair: (grades[0] if rule == "first" else (2 * sum(grades) + len(grades)) // (2 * len(grades)))
        for pair, grades in expected.items()
        if grades
    }
    wanted = [*expected, ("q", "nowhere"), ("nowhere", "a"), ("r", "b")]
    assert found.grades_of(wanted) == [settled.get(pair) for pair in wanted]
    places = found.places(ids_of(query for query, _ in wanted), ids_of(doc for _, doc in wanted))
    assert [place >= 0 for place in places] == [pair in expected for pair in wanted]
    assert len(found.keys) == len(expected)
    assert (found.num_repeated, found.num_null) == (len(rows) - len(expected), sum(grade is None for _, grade in rows))
    assert found.num_conflicts == sum(len(set(grades)) > 1 for grades in expected.values())


@FEW
@given(st.lists(PAIRS, max_size=12), st.lists(PAIRS, max_size=12))
def test_rows_are_matched_as_a_loop_matches_them(first: list[Any], second: list[Any]) -> None:
    sides = [
        gather(
            [
                pa.record_batch(
                    {
                        "row_id": pa.array(range(len(pairs)), pa.int64()),
                        "grade": pa.array([0] * len(pairs), pa.int64()),
                        "query_id": ids_of(query for query, _ in pairs),
                        "doc_id": ids_of(doc for _, doc in pairs),
                    }
                )
            ],
            grades=2,
            where="here",
        )
        for pairs in (first, second)
    ]
    left = {pair: [place for place, other in enumerate(second) if other == pair] for pair in second}
    expected = [(place, left[pair].pop(0)) for place, pair in enumerate(first) if left.get(pair)]
    found = match_rows(*sides, is_same_input=False)
    assert list(zip(found.teacher.tolist(), found.student.tolist(), strict=True)) == expected
    assert found.num_repeated == len(expected) - len({first[place] for place, _ in expected})


@pytest.mark.parametrize(
    "column",
    [
        pa.array([7, 10], pa.int16()),
        pa.array(["7", "10"]),
        pa.array(["7", "10"], pa.large_string()),
        pa.array(["7", "10"]).dictionary_encode(),
        pa.array([7, 10]).dictionary_encode(),
    ],
)
def test_ids_are_their_text_whatever_parquet_calls_them(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"id": column}), tmp_path / "a.parquet", row_group_size=1)
    found = load_columns(str(tmp_path / "a.parquet"), lambda names: names, Storage())["id"]
    assert texts_of(as_ids(found, path="a", name="id")) == ["7", "10"]
    assert read_grades(found).values.to_pylist() == [7, 10]


# Gates: what passes, what never passes, what is no gate.


FIGURES = {"f1_macro": 0.6, "ece": 0.05, "kendall_tau": None}
TEACHER = {"f1_macro": 0.65, "ece": 0.04, "kendall_tau": 0.3}


@pytest.mark.parametrize(
    ("name", "text", "has_passed"),
    [
        ("macro_f1", ">=0.6", True),
        ("f1_macro", ">0.6", False),
        ("f1_macro", "<=0.6", True),
        ("f1_macro", "<0.6", False),
        ("macro_f1", ">=0.9*teacher", True),
        ("macro_f1", " >= .93 * teacher ", False),
        ("macro_f1", ">=teacher", False),
        ("ece", "<=1.5*teacher", True),
        ("ece", "<5e-2", False),
        ("kendall_tau", ">=-1", False),
    ],
)
def test_a_gate_says_what_it_reads(name: str, text: str, has_passed: bool) -> None:
    assert judge_gate(parse_gate(name, text), FIGURES, TEACHER).has_passed is has_passed


def test_an_undefined_figure_never_passes_on_either_side() -> None:
    gates = parse_gates({"tau": "<1", "f1_macro": ">=0.1*teacher"})
    verdicts = judge_gates(gates, FIGURES, {"f1_macro": None})
    assert [verdict.has_passed for verdict in verdicts] == [False, False]
    assert "undefined" in str(verdicts[0])
    assert vars(verdicts[0]) == {
        "gate": "tau<1",
        "figure": "kendall_tau",
        "value": None,
        "bound": 1.0,
        "has_passed": False,
        "interval": None,
    }


@pytest.mark.parametrize(
    "text", ["", "0.6", "=>0.6", "==0.6", ">=", ">=student", ">=0.9*", ">=0.9*teacher+1", ">=nan", ">=1e999", ">=0,6"]
)
def test_what_is_no_gate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no gate\. Write a sign and a bound"):
        parse_gate("macro_f1", text)


@pytest.mark.parametrize("text", ["macro_f1", ">=0.6", "macro_f1=0.6", "macro_f1 >= much"])
def test_a_flag_that_is_no_gate_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--require"):
        parse_flag(text)


def test_a_teachers_gate_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no teacher"):
        judge_gate(parse_flag("macro_f1>=0.9*teacher"), FIGURES, None)


@given(
    st.sampled_from([">=", "<=", ">", "<"]), st.floats(allow_nan=False, allow_infinity=False, width=32), st.booleans()
)
def test_a_flag_and_a_spec_read_alike_and_keep_the_number(sign: str, number: float, is_of_teacher: bool) -> None:
    bound = f"{sign}{number!r}{'*teacher' if is_of_teacher else ''}"
    gate = parse_gate("auc_0/12", bound)
    assert parse_flag(f"auc_0/12{bound}") == gate == Gate("auc_0/12", "auc_0/12", bound, sign, number, is_of_teacher)
    assert math.isfinite(gate.number)
