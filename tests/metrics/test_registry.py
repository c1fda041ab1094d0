"""The registry itself: every metric there is, against libraries and loops, weighted against repeated rows, and in the
docs.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ir_measures
import krippendorff
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics

from relabel.manifests.labels import codes_of, ids_of
from relabel.manifests.metrics.evaluation import outside_mass_text, parse_gate
from relabel.manifests.metrics.judged import METRICS, Judged, metric_of, title_of
from relabel.manifests.metrics.metric import (
    MetricSet,
    Order,
    Share,
    bootstrap,
    draw_weights,
    share_bounds,
    t_quantile,
    wilson,
)

GRADES = 3
EVALUATE_PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"


def numbered(docs: Iterable[str]) -> np.ndarray:
    return codes_of(ids_of(docs))[0]


def world(seed: int, *, rows: int = 40, queries: int | None = 5, share_with_probs: float = 1.0) -> Judged:
    """Labels that often agree with gold; scores and document ids that often tie."""
    random = np.random.default_rng(seed)
    gold = random.integers(0, GRADES, rows)
    probs = random.integers(1, 5, (rows, GRADES)) + 4.0 * np.eye(GRADES)[gold]
    probs /= probs.sum(1, keepdims=True)
    labels = probs.argmax(1)
    probs[random.random(rows) >= share_with_probs] = np.nan
    query = (
        None if queries is None else np.concatenate([np.arange(queries), random.integers(0, queries, rows - queries)])
    )
    docs = numbered(f"d{row % 30}" for row in range(rows))
    correct = random.integers(0, 4, rows)
    held = None if share_with_probs == 0.0 else probs
    columns = {} if query is None else query_columns(query, queries or 0, random)
    return Judged(GRADES, gold, labels, query, queries or 0, docs, held, correct, np.full(rows, 3), columns=columns)


def query_columns(query: np.ndarray, queries: int, random: np.random.Generator) -> dict[str, pa.Array]:
    """What `evidence-set` and `review` say of the rows, and gold of it: chunks by row, all else by query."""

    def chunks(most: int) -> list[list[int]]:
        return [random.integers(1, 7, random.integers(0, most)).tolist() for _ in query]

    words = ["red", "The Blue!", "green"]
    answers = [[words[word] for word in random.permutation(3)[: random.integers(0, 4)]] for _ in range(queries)]
    wanted = [[plain(words)[word] for word in random.permutation(3)[: 1 + one % 2]] for one in range(queries)]
    yes = random.integers(0, 5, queries) / 4
    selected = chunks(5)
    return {
        "selected": pa.array(selected, pa.list_(pa.int16())),
        "selected_tokens": pa.array([10 * len(one) for one in selected], pa.int32()),
        "over_budget": pa.array([[0.0, 0.5, 1.0][len(one) % 3] for one in selected], pa.float32()),
        "gold_chunks": pa.array(chunks(4), pa.large_list(pa.int64())),
        "answers": pa.array([answers[one] for one in query], pa.large_list(pa.string())),
        "gold_answers": pa.array([wanted[one] for one in query], pa.large_list(pa.string())),
        "sufficient_probs": pa.array([[1 - yes[one], yes[one]] for one in query], pa.list_(pa.float32())),
        "gold_sufficient": pa.array([one % 2 == 0 for one in query.tolist()]),
        **routing_columns(len(query), random),
    }


def routing_columns(rows: int, random: np.random.Generator) -> dict[str, pa.Array]:
    """What `route` says of the rows, and gold of it."""

    def ids() -> list[list[int]]:
        return [random.choice(9, random.integers(0, 4), replace=False).tolist() for _ in range(rows)]

    return {
        "answer_ids": pa.array(ids(), pa.list_(pa.int32())),
        "expand_ids": pa.array(ids(), pa.list_(pa.int32())),
        "refused": pa.array(random.integers(0, 2, rows) > 0),
        "expelled": pa.array(random.integers(0, 3, rows), pa.int32()),
        "gold_answer_ids": pa.array(ids(), pa.large_list(pa.int64())),
        "gold_expand_ids": pa.array(ids(), pa.large_list(pa.int64())),
    }


def measured(judged: Judged) -> MetricSet:
    return MetricSet(METRICS, judged, num_groups=judged.num_groups)


def is_by_grade(metrics: MetricSet) -> dict[str, bool]:
    return {name: figure.is_by_grade for name, figure in metrics.with_intervals({}).items()}


def repeated(judged: Judged, weights: np.ndarray) -> Judged:
    """The rows of each group, as often as it was drawn; a query that was drawn twice is two queries."""
    group = np.arange(len(judged.gold)) if judged.queries is None else judged.queries
    rows, queries, copies = [], [], 0
    for number, weight in enumerate(weights.astype(int).tolist()):
        for _ in range(weight):
            mine = np.flatnonzero(group == number)
            rows += mine.tolist()
            queries += [copies] * len(mine)
            copies += 1
    return Judged(
        judged.grades,
        judged.gold[rows],
        judged.labels[rows],
        None if judged.queries is None else np.array(queries),
        0 if judged.queries is None else copies,
        judged.docs[rows],
        None if judged.probs is None else judged.probs[rows],
        judged.num_correct[rows],
        judged.num_samples[rows],
        columns={name: column.take(pa.array(rows, pa.int64())) for name, column in judged.columns.items()},
    )


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([5, 2, None]), st.sampled_from([1.0, 0.5, 0.0]))
def test_a_weighted_metric_is_the_metric_of_the_rows_repeated(seed: int, queries: int | None, share: float) -> None:
    judged = world(seed, queries=queries, share_with_probs=share)
    whole = measured(judged)
    weights = next(draw_weights(whole.num_groups, 3, seed))
    found = whole.resampled(weights)
    assert list(found) == list(whole.values)
    for number, weight in enumerate(weights):
        by_rows = measured(repeated(judged, weight))
        for name, value in by_rows.values.items():
            if is_by_grade(by_rows)[name] == is_by_grade(whole)[name]:  # else no row with a distribution was drawn
                assert found[name][number] == pytest.approx(value, abs=1e-12, nan_ok=True), name


def queries_of(judged: Judged) -> list[np.ndarray]:
    return [np.flatnonzero(judged.queries == number) for number in range(judged.num_queries)]


def ranked(judged: Judged, rows: np.ndarray) -> list[int]:
    return sorted(rows.tolist(), key=lambda row: (round(judged.scores[row], 6), judged.docs[row]), reverse=True)


def ndcg(judged: Judged) -> float:
    run, qrels = {}, {}
    for number, rows in enumerate(queries_of(judged)):
        order = ranked(judged, rows)
        run[str(number)] = {str(row): float(len(order) - place) for place, row in enumerate(order)}
        qrels[str(number)] = {str(row): int(judged.gold[row]) for row in rows}
    found = ir_measures.iter_calc([ir_measures.nDCG @ 10], qrels, run)
    return float(np.mean([one.value for one in found if max(qrels[one.query_id].values()) > 0]))


def tau(judged: Judged) -> float:
    values = [
        stats.kendalltau(np.round(judged.scores[rows], 6), judged.gold[rows]).statistic for rows in queries_of(judged)
    ]
    return float(np.nanmean(values))


def bad_cases(judged: Judged) -> float:
    tops = [ranked(judged, rows)[:10] for rows in queries_of(judged)]
    return float(np.mean([any(judged.gold[row] == 0 for row in top) for top in tops]))


def ece(judged: Judged) -> float:
    confidence, is_right = judged.probs.max(1), judged.probs.argmax(1) == judged.gold
    place = np.minimum((confidence * 15).astype(int), 14)
    gaps = [
        abs(confidence[place == one].mean() - is_right[place == one].mean()) * (place == one).mean()
        for one in set(place)
    ]
    return float(sum(gaps))


def alpha(level: str) -> Callable[[Judged], float]:
    return lambda one: krippendorff.alpha(
        np.stack([one.gold, one.labels]).astype(float), value_domain=list(range(GRADES)), level_of_measurement=level
    )


def over_queries(value: Callable[[list[dict[str, Any]]], float]) -> Callable[[Judged], float]:
    """The mean over queries of a value of their rows, each a dict; NaN is left out."""
    return lambda one: float(np.nanmean([value(rows) for rows in rows_by_query(one)]))


def rows_by_query(judged: Judged) -> list[list[dict[str, Any]]]:
    table = pa.table({**judged.columns, "gold": judged.gold, "label": judged.labels}).to_pylist()
    return [[table[row] for row in rows] for rows in queries_of(judged)]


def num_chunks(rows: list[dict[str, Any]]) -> float:
    return sum(len(set(row["selected"])) for row in rows)


def num_tokens(rows: list[dict[str, Any]]) -> float:
    return sum(row["selected_tokens"] for row in rows)


def chunk_f1(rows: list[dict[str, Any]]) -> float:
    """Each document's chunks as a row of zeros and ones."""
    chosen, wanted = (
        [[number in row[name] for number in range(1, 7)] for row in rows] for name in ("selected", "gold_chunks")
    )
    return float(np.mean([metrics.f1_score(*pair, zero_division=1.0) for pair in zip(wanted, chosen, strict=True)]))


def plain(answers: list[str]) -> list[str]:
    return [answer.lower().replace("!", "") for answer in answers]


def share_of(rows: list[dict[str, Any]], of: str, among: str) -> float:
    held = [row for row in rows if row[among] > 0]
    return float(np.mean([row[of] > 0 for row in held])) if held else np.nan


def sufficient_auc(judged: Judged) -> float:
    first = [rows[0] for rows in rows_by_query(judged)]
    return float(
        metrics.roc_auc_score([row["gold_sufficient"] for row in first], [row["sufficient_probs"][1] for row in first])
    )


def over_rows(
    value: Callable[[dict[str, Any]], float], is_counted: Callable[[dict[str, Any]], Any] = lambda row: True
) -> Callable[[Judged], float]:
    """The mean over the rows that count."""

    def mean(judged: Judged) -> float:
        held = [value(row) for rows in rows_by_query(judged) for row in rows if is_counted(row)]
        return float(np.mean(held)) if held else np.nan

    return mean


def node_f1(row: dict[str, Any]) -> float:
    chosen, wanted = ([id in row[name] for id in range(9)] for name in ("answer_ids", "gold_answer_ids"))
    return float(metrics.f1_score(wanted, chosen, zero_division=0.0))


def heading_precision(row: dict[str, Any]) -> float:
    chosen, wanted = ([id in row[name] for id in range(9)] for name in ("expand_ids", "gold_expand_ids"))
    return float(metrics.precision_score(wanted, chosen, zero_division=0.0))


REFERENCES: dict[str, Callable[[Judged], float]] = {
    "accuracy": lambda one: metrics.accuracy_score(one.gold, one.labels),
    "f1_{}": lambda one: metrics.f1_score(one.gold, one.labels, labels=[1], average=None)[0],
    "f1_macro": lambda one: metrics.f1_score(one.gold, one.labels, average="macro"),
    "f1_weighted": lambda one: metrics.f1_score(one.gold, one.labels, average="weighted"),
    "kappa": lambda one: metrics.cohen_kappa_score(one.gold, one.labels),
    "kappa_quadratic": lambda one: metrics.cohen_kappa_score(one.gold, one.labels, weights="quadratic"),
    "alpha_ordinal": alpha("ordinal"),
    "alpha_nominal": alpha("nominal"),
    "mean_absolute_error": lambda one: metrics.mean_absolute_error(one.gold, one.labels),
    "irrelevant_precision": lambda one: metrics.precision_score(one.gold, one.labels, labels=[0], average=None)[0],
    "irrelevant_recall": lambda one: metrics.recall_score(one.gold, one.labels, labels=[0], average=None)[0],
    "irrelevant_f1": lambda one: metrics.f1_score(one.gold, one.labels, labels=[0], average=None)[0],
    "auc_{}": lambda one: metrics.roc_auc_score(one.gold >= 1, np.round(one.probs[:, 1:].sum(1), 9)),  # type: ignore[index]
    "ece": ece,
    "brier": lambda one: metrics.brier_score_loss(one.gold, one.probs, scale_by_half=False),
    "ndcg@10": ndcg,
    "kendall_tau": tau,
    "bad_case_rate": bad_cases,
    "pass@{}": lambda one: float(np.mean(1 - (3 - one.num_correct) / 3)),  # type: ignore[operator]
    "chunks_mean": over_queries(num_chunks),
    "chunks_max": lambda one: max(map(num_chunks, rows_by_query(one))),
    "tokens_mean": over_queries(num_tokens),
    "tokens_max": lambda one: max(map(num_tokens, rows_by_query(one))),
    "over_budget": over_queries(lambda rows: float(np.mean([row["over_budget"] for row in rows]))),
    "evidence_f1": over_queries(chunk_f1),
    "exact_match": over_queries(lambda rows: set(rows[0]["gold_answers"]) <= set(plain(rows[0]["answers"]))),
    "hit@1": over_queries(lambda rows: any(one in rows[0]["gold_answers"] for one in plain(rows[0]["answers"])[:1])),
    "sufficient_auc": sufficient_auc,
    "useful_precision": over_queries(lambda rows: share_of(rows, "gold", "label")),
    "useful_recall": over_queries(lambda rows: share_of(rows, "label", "gold")),
    "answer_f1": over_rows(node_f1, lambda row: row["gold_answer_ids"]),
    "expand_precision": over_rows(heading_precision, lambda row: row["gold_expand_ids"]),
    "refusal_accuracy": over_rows(
        lambda row: not row["answer_ids"] + row["expand_ids"],
        lambda row: not row["gold_answer_ids"] + row["gold_expand_ids"],
    ),
    "expelled_mean": over_rows(lambda row: row["expelled"]),
    "collapse_rate": over_rows(
        lambda row: not (row["answer_ids"] or row["expand_ids"] or row["refused"] or row["expelled"])
    ),
}
"""Each metric by a library, or written out; of a metric with `{}` the one of `MEMBERS`."""
MEMBERS = {"f1_{}": "1", "auc_{}": "0/12", "pass@{}": "1"}


def test_every_metric_is_that_of_a_library_or_of_a_loop() -> None:
    for seed in range(3):
        judged = world(seed, rows=30 * 3, queries=4)
        judged = Judged(
            **{**vars(judged), "docs": numbered(f"d{(row * 7) % 90}" for row in range(90))}
        )  # each document once
        values = measured(judged).values
        for metric in METRICS:
            wanted = pytest.approx(REFERENCES[metric.name](judged), abs=1e-12)
            assert values[metric.name.format(MEMBERS.get(metric.name))] == wanted, metric.name


def test_drawn_metrics_lie_between_0_and_1_and_names_and_aliases_are_ones_own() -> None:
    every = [name for metric in METRICS for name in (metric.name, *metric.aliases)]
    assert len(set(every)) == len(every)
    values = measured(world(5)).values
    assert all(0 <= values[metric.name] <= 1 for metric in METRICS if metric.is_drawn)


def test_titles_and_gates_know_every_metric() -> None:
    for name in measured(world(2)).values:
        found = metric_of(name)
        assert title_of(name) == found[0].title.format(found[1])
        assert parse_gate(name, ">=0.5").figure == name
        assert all(parse_gate(alias, ">=0.5").figure == name for alias in found[0].aliases)
    assert metric_of("of nothing") is None


def test_the_page_names_every_metric() -> None:
    named = re.findall(r"`([^`\n]+)`", EVALUATE_PAGE.read_text(encoding="utf-8"))
    for metric in METRICS:
        names = [name.partition("{}") for name in (metric.name, *metric.aliases)]
        assert any(one == start or (hole and one.startswith(start)) for start, hole, _ in names for one in named), (
            metric.name
        )


# Intervals of shares: they never collapse, they cover what they say, and every share of every registry has one.


def test_every_share_of_the_registry_has_an_interval_that_is_not_a_point() -> None:
    """Labels that are gold throughout, and labels that never are: accuracy 1 and 0, and others near them."""
    right = world(3, queries=9)
    wrong = dataclasses.replace(right, labels=(right.gold + 1) % 3, num_correct=np.zeros_like(right.gold))
    ends = set()
    for judged in (dataclasses.replace(right, labels=right.gold, num_correct=np.full_like(right.gold, 3)), wrong):
        metrics = MetricSet(METRICS, judged, num_groups=9)
        intervals = bootstrap(metrics.resampled, num_groups=9, resamples=50, seed=1)
        shares = [name for name, one in metrics._measured.items() if isinstance(one.formula, Share)]
        assert {"accuracy", "bad_case_rate", "pass@1"} < set(shares)
        figures = metrics.with_intervals(intervals)
        for name in shares:
            one = figures[name]
            if one.value is None:
                continue
            assert 0 <= one.low <= one.value <= one.high <= 1, name
            assert one.high - one.low > 0.05, name
            ends |= {(name, one.value)} if one.value in (0, 1) else set()
        assert (figures["kappa"].low, figures["kappa"].high) == pytest.approx(intervals["kappa"])
        assert metrics.with_intervals({})["accuracy"].low is None
    assert {("accuracy", 0.0), ("accuracy", 1.0), ("pass@1", 0.0), ("pass@1", 1.0)} <= ends


@pytest.mark.parametrize("share", [0.005, 0.5])
@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("queries", [20, 200])
def test_the_interval_holds_the_share_in_93_of_100_draws_of_queries(share: float, alike: float, queries: int) -> None:
    """Rows of a query are alike by an intra-query correlation; queries have 1 to many rows."""
    random = np.random.default_rng([queries, int(alike * 10), int(share * 1000)])
    shape = (1500, queries)
    rows = random.geometric(0.1, shape)
    chance = random.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), shape) if alike else share
    low, high = share_bounds(random.binomial(rows, chance), rows)
    assert (high > low).all()
    assert ((low <= share) & (share <= high)).mean() >= 0.93


@pytest.mark.parametrize("share", [0.5, 0.6, 0.8, 0.9, 0.95, 0.975, 0.995, 0.9995])
def test_quantiles_of_t_are_those_of_scipy(share: float) -> None:
    """Also below five degrees of freedom, where expansions are off, and between whole ones."""
    for freedom in [*range(1, 101), *np.linspace(1, 5, 41), 1000.0, 12345.6, 1e5, 1e6]:
        assert t_quantile(share, float(freedom)) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9, abs=1e-9)
    assert t_quantile(share, 1e9) == pytest.approx(stats.norm.ppf(share), abs=1e-7)
    assert math.isnan(t_quantile(share, math.nan))


def test_bounds_of_few_queries_take_the_exact_quantile() -> None:
    """Two queries that differ: two degrees of freedom."""
    part, whole = np.array([3.0, 7.0]), np.array([10.0, 10.0])
    square = 2 * 2.0**2
    freedom = square**2 / (2 * 2.0**4)
    assert freedom == 2
    size = max(0.25 * 20**2 / square / 2 * (1.959963984540054 / stats.t.ppf(0.975, freedom)) ** 2, 2.0)
    low, high = share_bounds(part, whole)
    assert low == pytest.approx(wilson(np.array(0.5 - 0.5 / size), np.array(size), -1), abs=1e-9)
    assert high == pytest.approx(1 - low, abs=1e-9)


@pytest.mark.parametrize("whole", [[], [3.0], [0.0, 2.0, 0.0], [0.0, 0.0]])
def test_fewer_than_two_groups_say_nothing(whole: list[float]) -> None:
    assert np.isnan(share_bounds(np.array(whole), np.array(whole))).all()


@pytest.mark.parametrize(("mean", "is_warned"), [(0.0, False), (0.49, False), (0.64, True), (1.0, True)])
def test_much_mass_outside_the_grades_is_warned_of(mean: float, *, is_warned: bool) -> None:
    assert bool(outside_mass_text(mean)) == is_warned
    assert not outside_mass_text(math.nan)


@pytest.mark.parametrize("digits", [1, 12], ids=["ties", "no ties"])
@pytest.mark.parametrize("apart", [0.0, 0.3, 0.95, 3.0])
def test_auc_of_weighted_queries_is_that_of_repeated_rows_however_far_the_kinds_lie_apart(
    apart: float, digits: int
) -> None:
    random = np.random.default_rng(5)
    is_relevant_N = random.random(700) < 0.4
    score_N = np.round(random.random(700) + apart * is_relevant_N, digits)
    group_N = random.integers(0, 60, 700)
    weight_RG = next(draw_weights(60, 8, seed=1))
    weighted = Order(score_N, is_relevant_N, group_N).weighted(weight_RG)
    for weight_G, won_3 in zip(weight_RG, weighted, strict=True):
        rows = np.repeat(np.arange(700), weight_G[group_N].astype(int))
        area = metrics.roc_auc_score(is_relevant_N[rows], score_N[rows])
        assert Order.area(won_3) == pytest.approx(area, abs=1e-12)


@pytest.mark.parametrize("is_relevant", [False, True])
def test_auc_of_one_kind_of_rows_is_not_defined(is_relevant: bool) -> None:
    order = Order(np.arange(100.0), np.full(100, is_relevant), np.zeros(100, dtype=np.int64))
    with np.errstate(invalid="ignore"):
        assert np.isnan(Order.area(order.weighted(np.ones((1, 1))))).all()
