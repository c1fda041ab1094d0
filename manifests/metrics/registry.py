"""The metrics of judged labels, in the order in which they are printed.

To add one, add it here: reports, plots, gates and the table of docs/evaluate.md follow."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.metric import (
    DEPTH,
    Formula,
    Measured,
    Metric,
    OfCounts,
    Order,
    QueryRanking,
    Share,
    Sums,
    accuracy,
    alpha,
    auc_of_counts,
    brier_rows,
    cut_names,
    ece_of_bins,
    f1_by_grade,
    f1_macro,
    f1_weighted,
    kappa,
    mean,
    mean_of_queries,
    measured,
    share,
)

# ------------------------------------------------------------------------------
# The metrics of labelers that see a query's documents together, in the order in which they are shown: those of
# `evidence-set` (RES-RAG) and of `review` (R2RAG). `registry.py` lists them last.


def _of_labeler(name: str, formula: Formula = mean) -> Callable[[Any], Mapping[str, Measured]]:
    """Measures what one labeler's labels alone have, see `Judged.of_labeler`."""
    return measured(lambda rows: rows.of_labeler.get(name), formula)


QUERY_METRICS: tuple[Metric, ...] = (
    Metric(
        "chunks_mean",
        "chunks a query, mean",
        "lower",
        "queries",
        _of_labeler("chunks_mean"),
        "`evidence-set`: different chunks chosen",
    ),
    Metric(
        "tokens_mean",
        "tokens a query, mean",
        "lower",
        "queries",
        _of_labeler("tokens_mean"),
        "of the chunks chosen, each once",
    ),
    Metric(
        "over_budget",
        "over budget, φ",
        "lower",
        "queries",
        _of_labeler("over_budget"),
        "per query, mean φ of its documents (RES-RAG, equation 8)",
        is_drawn=True,
    ),
    Metric(
        "evidence_f1",
        "evidence F1",
        "higher",
        "queries",
        _of_labeler("evidence_f1"),
        (
            "F1_ret (equation 13): per query, mean over its documents of 2·both / (chosen + gold chunks); both empty "
            "1, one empty 0"
        ),
        aliases=("f1_ret",),
        is_drawn=True,
    ),
    Metric(
        "exact_match",
        "exact match",
        "higher",
        "queries",
        _of_labeler("exact_match", share),
        "share of queries with every gold answer among the `answers`",
        aliases=("em",),
        is_drawn=True,
    ),
    Metric(
        "hit@1",
        "Hit@1",
        "higher",
        "queries",
        _of_labeler("hit@1", share),
        "share of queries whose first answer is any gold answer",
        is_drawn=True,
    ),
    Metric(
        "sufficient_auc",
        "AUC, sufficient",
        "higher",
        "queries",
        _of_labeler("sufficient_auc", Order.area),
        "`review`: ROC area of P(yes) against `gold_sufficient`, a query once",
        aliases=("auc_sufficient",),
        is_drawn=True,
    ),
    Metric(
        "useful_precision",
        "useful: precision",
        "higher",
        "queries",
        _of_labeler("useful_precision", share),
        "per query, of the documents named useful, the share with g > 0; mean over queries where one is named",
        is_drawn=True,
    ),
    Metric(
        "useful_recall",
        "useful: recall",
        "higher",
        "queries",
        _of_labeler("useful_recall", share),
        "per query, of the documents with g > 0, the share that is named; mean over queries that have one",
        is_drawn=True,
    ),
)


# ------------------------------------------------------------------------------
# The metrics of `route` (RDR2), in the order in which they are shown; `registry.py` lists them last.


ROUTING_METRICS: tuple[Metric, ...] = (
    Metric(
        "answer_f1",
        "answers: F1",
        "higher",
        "rows",
        _of_labeler("answer_f1"),
        "`route`: of `answer_ids` and `gold_answer_ids`, over rows where gold has any; 0 where the label has none",
        aliases=("ans_f1",),
        is_drawn=True,
    ),
    Metric(
        "expand_precision",
        "headings: precision",
        "higher",
        "rows",
        _of_labeler("expand_precision", share),
        "share of `expand_ids` in `gold_expand_ids`, over rows where gold has any; 0 where the label has none",
        aliases=("exp_pre",),
        is_drawn=True,
    ),
    Metric(
        "refusal_accuracy",
        "refusals: accuracy",
        "higher",
        "rows",
        _of_labeler("refusal_accuracy", share),
        "of rows where gold has neither, the share whose label has neither",
        aliases=("ref_acc",),
        is_drawn=True,
    ),
    Metric(
        "expelled_mean",
        "expelled actions, mean",
        "lower",
        "rows",
        _of_labeler("expelled_mean"),
        "lines a row that were meant as an action and not legal, where `expelled: keep` keeps them",
        aliases=("xpl",),
    ),
    Metric(
        "collapse_rate",
        "collapse rate",
        "lower",
        "rows",
        _of_labeler("collapse_rate", share),
        "share of rows without any line that is an action, legal or not",
        aliases=("col",),
        is_drawn=True,
    ),
)


# ------------------------------------------------------------------------------
# The metrics of judged labels, in the order in which they are shown. To add one, add it here: reports,
# drawings, gates and the table of docs/evaluate.md follow.
#
# In the definitions: N rows, K grades, g gold, l label, p(k) the distribution.


def count_metrics(counts_KK: np.ndarray) -> dict[str, np.ndarray]:
    """Every metric that is a function of a confusion matrix; NaN where it is not defined (0/0).

    Args:
        counts_KK: [..., K, K], counts or sums of weights, rows gold, columns label; leading dimensions are kept in the
            values.
    """
    counts_KK = np.asarray(counts_KK, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            metric.name.format(member): formula(counts_KK)
            for metric in METRICS
            if isinstance(metric.measure, OfCounts)
            for member, formula in metric.measure.by_member(counts_KK.shape[-1]).items()
        }


def _mean_absolute_error(counts_KK: np.ndarray) -> np.ndarray:
    grade_K = np.arange(counts_KK.shape[-1])
    return np.asarray((counts_KK * np.abs(np.subtract.outer(grade_K, grade_K))).sum((-2, -1)) / counts_KK.sum((-2, -1)))


def _auc(rows: Judged) -> Mapping[str, Measured]:
    """At each cut, by distributions; where no row has one, of the counts, by the written grade."""
    if rows.orders:
        return {name: Measured(order, Order.area) for name, order in rows.orders.items()}
    cuts = enumerate(cut_names(rows.grades), start=1)
    return {
        name: Measured(rows.counts, functools.partial(auc_of_counts, cut=cut), is_by_grade=True) for cut, name in cuts
    }


def _brier(rows: Judged) -> Sums | None:
    return None if rows.probs is None else rows.mean_of_rows(brier_rows(rows.probs, rows.gold))


def _of_ranking(
    value: Callable[[QueryRanking], np.ndarray], formula: Formula = mean
) -> Callable[[Any], Mapping[str, Measured]]:
    """Measures the mean of a value that each query's ranking has."""
    return measured(lambda rows: None if rows.ranking is None else mean_of_queries(value(rows.ranking)), formula)


METRICS: tuple[Metric, ...] = (
    Metric("accuracy", "accuracy", "higher", "rows", OfCounts(accuracy), "share of rows with l = g", is_drawn=True),
    Metric(
        "f1_{}",
        "F1 of grade {}",
        "higher",
        "rows",
        OfCounts(f1_by_grade, is_each_grade=True),
        "2·both / (gold k + labels k)",
    ),
    Metric(
        "f1_macro",
        "F1, macro",
        "higher",
        "rows",
        OfCounts(f1_macro),
        "mean over occurring grades",
        aliases=("macro_f1",),
        is_drawn=True,
    ),
    Metric(
        "f1_weighted",
        "F1, weighted",
        "higher",
        "rows",
        OfCounts(f1_weighted),
        "mean by number of gold rows",
        aliases=("weighted_f1",),
    ),
    Metric(
        "kappa",
        "Cohen kappa",
        "higher",
        "rows",
        OfCounts(lambda counts_KK: kappa(counts_KK, power=0)),
        "1 − observed / expected disagreement",
        is_drawn=True,
    ),
    Metric(
        "kappa_quadratic",
        "Cohen kappa, quadratic",
        "higher",
        "rows",
        OfCounts(lambda counts_KK: kappa(counts_KK, power=2)),
        "the same with a disagreement of (g − l)²",
    ),
    Metric(
        "alpha_ordinal",
        "Krippendorff alpha, ordinal",
        "higher",
        "rows",
        OfCounts(lambda counts_KK: alpha(counts_KK, is_ordinal=True)),
        "1 − (n−1) Σ o δ² / Σ n_c n_k δ²; two raters",
        is_drawn=True,
    ),
    Metric(
        "alpha_nominal",
        "Krippendorff alpha, nominal",
        "higher",
        "rows",
        OfCounts(lambda counts_KK: alpha(counts_KK, is_ordinal=False)),
        "the same with δ = 1 for any two grades",
    ),
    Metric(
        "mean_absolute_error",
        "mean absolute error",
        "lower",
        "rows",
        OfCounts(_mean_absolute_error),
        "mean of \\|g − l\\|, in grades",
        aliases=("mae",),
    ),
    Metric(
        "irrelevant_precision",
        "irrelevant: precision",
        "higher",
        "rows",
        OfCounts(Share(lambda counts_KK: counts_KK[..., 0, 0], lambda counts_KK: counts_KK[..., :, 0].sum(-1))),
        "of grade 0",
    ),
    Metric(
        "irrelevant_recall",
        "irrelevant: recall",
        "higher",
        "rows",
        OfCounts(Share(lambda counts_KK: counts_KK[..., 0, 0], lambda counts_KK: counts_KK[..., 0, :].sum(-1))),
        "of grade 0",
    ),
    Metric(
        "irrelevant_f1",
        "irrelevant: F1",
        "higher",
        "rows",
        OfCounts(lambda counts_KK: f1_by_grade(counts_KK)[..., 0]),
        "of grade 0",
    ),
    Metric(
        "auc_{}",
        "AUC {}",
        "higher",
        "rows",
        _auc,
        "ROC area of P(k ≥ j) against g ≥ j, per cut; without distributions, of the label (`is_by_grade`)",
    ),
    Metric(
        "ece",
        "ECE",
        "lower",
        "rows",
        measured(lambda rows: rows.reliability, ece_of_bins),
        "15 equal-width bins: Σ share of rows · \\|mean confidence − accuracy\\|, of argmax p with confidence max p",
        is_drawn=True,
    ),
    Metric("brier", "Brier", "lower", "rows", measured(_brier, mean), "mean of Σ_k (p(k) − [g = k])², 0 to 2"),
    Metric(
        f"ndcg@{DEPTH}",
        f"nDCG@{DEPTH}",
        "higher",
        "queries",
        _of_ranking(lambda ranking: ranking.ndcg),
        (
            "per query, linear gain, trec_eval's tie order (document id, descending); mean over queries with a "
            "relevant document"
        ),
        aliases=("ndcg",),
        is_drawn=True,
    ),
    Metric(
        "kendall_tau",
        "Kendall tau",
        "higher",
        "queries",
        _of_ranking(lambda ranking: ranking.tau),
        "tau-b of scores and grades per query; mean over queries where both vary",
        aliases=("tau",),
        is_drawn=True,
    ),
    Metric(
        "bad_case_rate",
        "bad-case rate",
        "lower",
        "queries",
        _of_ranking(lambda ranking: ranking.bad_case, share),
        f"share of queries with a grade-0 document in the top {DEPTH}",
        is_drawn=True,
    ),
    Metric(
        "pass@{}",
        "pass@{}",
        "higher",
        "rows",
        lambda rows: {k: Measured(sums, share) for k, sums in rows.passes.items()},
        "1 − C(S−c, k) / C(S, k) over a row's S samples, c of them right; failed ones are wrong. k = 1, 2, 4, … and "
        "S, or `--pass-at 1,2,5` (at most the fewest samples of a row)",
    ),
    *QUERY_METRICS,
    *ROUTING_METRICS,
)


def metric_of(name: str, metrics: Iterable[Metric] = METRICS) -> tuple[Metric, str] | None:
    """The metric of a name as JSON has it, and what replaces its `{}`; None for an unknown name.

    Args:
        name: `f1_macro`, `auc_01/2`.
    """
    whole = next((metric for metric in metrics if metric.name == name), None)
    if whole is not None:
        return whole, ""
    for metric in metrics:
        found = re.fullmatch(re.escape(metric.name).replace(r"\{\}", "(.+)"), name)
        if found is not None and found.groups():
            return metric, found[1]
    return None


def title_of(name: str, metrics: Iterable[Metric] = METRICS) -> str:
    """What reports call a metric; an unknown name is returned as it is."""
    found = metric_of(name, metrics)
    return name if found is None else found[0].title.format(found[1])
