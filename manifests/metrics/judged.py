"""Labels with the grades that judge them, the sufficient statistics of the join, and every metric of judged labels.

To add a metric, add it to `METRICS`: reports, plots, gates and the table of docs/evaluate.md follow.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError
from relabel.manifests.evidence_sets import exact_match, hit_at_1, set_f1
from relabel.manifests.gold import GOLD, check_chunks
from relabel.manifests.labels import codes_of, release_unused, texts_of
from relabel.manifests.metrics.metric import (
    DEPTH,
    Formula,
    Largest,
    Measured,
    Metric,
    OfCounts,
    Order,
    QueryRanking,
    Share,
    Statistic,
    Sums,
    accuracy,
    alpha,
    at_least,
    auc_of_counts,
    brier_rows,
    confusion_by_group,
    cut_names,
    ece_of_bins,
    f1_by_grade,
    f1_macro,
    f1_weighted,
    kappa,
    mean,
    mean_of_queries,
    mean_of_rows,
    measured,
    pass_at_k,
    rank_queries,
    reliability_by_group,
    share,
)
from relabel.manifests.process import WhenUsed

pc = WhenUsed("pyarrow.compute")

# ------------------------------------------------------------------------------
# Labels joined with the grades that judge them, and the rows that the join left out.
#
# Letters: N judged rows, K grades.


@dataclass(frozen=True)
class Judged:
    """Rows with a label and a gold grade, at least one; and what each metric of the registry is computed from, when it
    first asks for it.

    Args:
        gold, labels: int64 [N], 0..K-1; no labels where rows are `ranked_by` a score.
        queries: int64 [N], 0..num_queries-1 in the order of the ids' text; None where labels name no query.
        docs: int64 [N], documents numbered in the order of their ids' text; all alike where there are none.
        probs: float64 [N, K], rows sum to 1, NaN where a row has none; None where no row has one.
        num_correct, num_samples: int64 [N], samples equal to gold and all samples, 0 where a row has none; None where
            no row has some.
        query_names: the ids that `queries` number, where they were kept.
        columns: further ones of the rows, by name: see `manifests.gold.label_columns` and `gold_columns`.
        unjudged: labelled rows of these queries that have no gold grade, M: int64 [M], numbered as `queries`, and
            further columns, [M] each.
        lexical: float64 [N], BM25 of query and document; None where their texts are not known.
        rankings: by name, scores of other rankers to compare with, float64 [N]; -inf for what one does not rank.
        pass_at: the k of pass@k; by default the powers of two and the number of samples that every sampled row has.
        ranked_by: float64 [N], scores that only rank; None where rows have labels.
    """

    grades: int
    gold: np.ndarray
    labels: np.ndarray | None
    queries: np.ndarray | None
    num_queries: int
    docs: np.ndarray
    probs: np.ndarray | None
    num_correct: np.ndarray | None
    num_samples: np.ndarray | None
    query_names: pa.LargeBinaryArray | None = None
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    unjudged: tuple[np.ndarray, Mapping[str, pa.Array]] | None = None
    lexical: np.ndarray | None = None
    rankings: Mapping[str, np.ndarray] = field(default_factory=dict)
    pass_at: Sequence[int] = ()
    ranked_by: np.ndarray | None = None

    @cached_property
    def has_probs(self) -> np.ndarray:
        """Which rows have a distribution."""
        return np.zeros(len(self.gold), dtype=bool) if self.probs is None else ~np.isnan(self.probs[:, 0])

    @property
    def fewest_samples(self) -> int:
        """How many samples every row has that has some; 0 where none has."""
        return 0 if self.num_samples is None else int(self.num_samples[self.num_samples > 0].min())

    @property
    def scores(self) -> np.ndarray:
        """What a row is ranked by: its score, its expected grade where it has a distribution, else its label."""
        if self.ranked_by is not None:
            return self.ranked_by
        assert self.labels is not None
        score_N = self.labels.astype(np.float64)
        if self.probs is not None:
            score_N[self.has_probs] = self.probs[self.has_probs] @ np.arange(self.grades)
        return score_N

    @cached_property
    def groups(self) -> np.ndarray:
        """int64 [N], 0..num_groups-1: queries, or rows where labels name no query."""
        return np.arange(len(self.gold)) if self.queries is None else self.queries

    @property
    def num_groups(self) -> int:
        return len(self.gold) if self.queries is None else self.num_queries

    def mean_of_rows(self, value_N: np.ndarray) -> Sums:
        """The mean of a value that each row has, or has not (NaN)."""
        return mean_of_rows(value_N, self.groups, self.num_groups)

    @cached_property
    def counts(self) -> Sums | None:
        """A confusion matrix a group, [G, K, K]: rows gold, columns label; None without labels."""
        if self.labels is None:
            return None
        counts_GKK = confusion_by_group(
            self.gold,
            self.labels,
            self.groups,
            num_groups=self.num_groups,
            grades=self.grades,
        )
        return Sums(counts_GKK, len(self.gold))

    @cached_property
    def reliability(self) -> Sums | None:
        """Bins of confidence, [G, B, 3] (see `reliability_by_group`); None where no row has a distribution."""
        if self.probs is None:
            return None
        has_N = self.has_probs
        rows = self.probs[has_N], self.gold[has_N], self.groups[has_N]
        return Sums(reliability_by_group(*rows, num_groups=self.num_groups), len(rows[0]))

    @cached_property
    def orders(self) -> dict[str, Order]:
        """Rows with a distribution in the order of P(k ≥ j), or all in that of their scores, relevant where gold ≥ j,
        by the name of the cut j; empty without either.
        """
        cuts = enumerate(cut_names(self.grades))
        if self.ranked_by is not None:
            return {name: Order(self.ranked_by, self.gold > cut, self.groups) for cut, name in cuts}
        if self.probs is None:
            return {}
        has_N = self.has_probs
        # sums in float64 of float32: 1e-9 keeps equal scores equal
        above_NJ = np.round(at_least(self.probs[has_N]), 9)
        return {name: Order(above_NJ[:, cut], self.gold[has_N] > cut, self.groups[has_N]) for cut, name in cuts}

    @cached_property
    def ranking(self) -> QueryRanking | None:
        """nDCG, tau and bad cases of each query; None where labels name no query."""
        if self.queries is None:
            return None
        release_unused()
        score_N = np.round(self.scores, 6)
        return rank_queries(
            self.queries,
            self.docs,
            score_N,
            self.gold,
            num_queries=self.num_queries,
        )

    @cached_property
    def of_labeler(self) -> dict[str, Statistic]:
        """What the metrics of one labeler alone (`evidence-set`, `review`, `route`) are computed from, by metric."""
        routing = {name: self.mean_of_rows(value_N) for name, value_N in routing_values(self).items()}
        return {**evidence_statistics(self), **review_statistics(self), **routing}

    @cached_property
    def passes(self) -> dict[str, Sums]:
        """The mean of pass@k over rows with samples, by k; empty without any."""
        if self.num_samples is None or self.num_correct is None:
            return {}
        most = self.fewest_samples
        has_N = self.num_samples > 0
        passes_by_k = {}
        for k in sorted(set(self.pass_at) or {most, *(2**power for power in range(most.bit_length()))}):
            passed_N = np.full(len(has_N), np.nan)
            passed_N[has_N] = pass_at_k(self.num_correct[has_N], self.num_samples[has_N], k)
            passes_by_k[str(k)] = self.mean_of_rows(passed_N)
        return passes_by_k


SCORE = "score"
"""Column of rows that a score only ranks, float64, instead of a grade."""
RANK = "rank"
"""Column of a table of scores that ranks the lowest first."""
_OWN = ("row_id", "grade", "query_id", "doc_id", "probs", "samples", SCORE, GOLD)
"""Columns of labels (`manifests.label_sets`) that are joined with gold; all others are further ones."""


def column_of(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    """A column, or None without it."""
    return rows[name] if name in rows.schema.names else None


def with_columns(rows: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """With further columns of the same rows, or others in their place."""
    return pa.RecordBatch.from_pydict({**dict(zip(rows.schema.names, rows.columns, strict=True)), **columns})


def judged_rows(
    rows: pa.RecordBatch, grades: int, *, where: str, qrels: str, lexical: np.ndarray | None = None
) -> Judged:
    """Rows with a gold grade, of which there is at least one; of the others what they add to these rows' queries.

    Args:
        rows: labels with the column `GOLD`, and gold's further ones.
        where, qrels: what labels and gold are of, for errors.
    Raises:
        InputError: a distribution does not sum to 1, or a gold chunk is not one of its document's.
    """
    is_judged = rows[GOLD].is_valid()
    others = None
    if rows[GOLD].null_count:
        others = rows.filter(pc.invert(is_judged))
        rows = rows.filter(is_judged)
    columns = {name: rows[name] for name in rows.schema.names if name not in _OWN}
    query_ids = column_of(rows, "query_id")
    doc_ids = column_of(rows, "doc_id")
    check_chunks(columns, query_ids, doc_ids, where=qrels)
    gold_N = rows[GOLD].to_numpy()
    query_N = None
    query_names = None
    unjudged = None
    if query_ids is not None and not query_ids.null_count:
        query_N, query_names = codes_of(query_ids)
        if others and columns:
            number_M = pc.index_in(others["query_id"], value_set=query_names)
            others = others.filter(number_M.is_valid())
            number_M = number_M.drop_null().to_numpy().astype(np.int64)
            unjudged = number_M, {name: others[name] for name in columns}
    doc_N = np.zeros(len(gold_N), np.int64)
    if doc_ids is not None:
        doc_N, _ = codes_of(doc_ids.fill_null(b""))
    release_unused()
    num_correct_N, num_samples_N = sample_counts(column_of(rows, "samples"), gold_N)
    ranked_by = column_of(rows, SCORE)
    return Judged(
        grades=grades,
        gold=gold_N,
        labels=rows["grade"].to_numpy() if ranked_by is None else None,
        queries=query_N,
        num_queries=0 if query_names is None else len(query_names),
        docs=doc_N,
        probs=distributions(column_of(rows, "probs"), grades, where=where),
        num_correct=num_correct_N,
        num_samples=num_samples_N,
        query_names=query_names,
        columns=columns,
        unjudged=unjudged,
        lexical=lexical,
        ranked_by=None if ranked_by is None else ranked_by.to_numpy(),
    )


def distributions(lists: pa.LargeListArray | None, grades: int, *, where: str) -> np.ndarray | None:
    """Distributions as one array: float64 [N, K], rows sum to 1, NaN where a row has none; None where no row has one.

    Raises:
        InputError: one is none: of another length, not summing to 1, or holding a negative number or NaN.
    """
    if lists is None or lists.null_count == len(lists):
        return None
    sizes = pc.unique(pc.list_value_length(lists).drop_null()).to_pylist()
    if sizes != [grades]:
        size = next(size for size in sizes if size != grades)
        raise InputError(f"{where}: a distribution has {size} entries, the scale {grades} grades.")
    flat = pc.list_flatten(lists).to_numpy(zero_copy_only=False)
    given_MK: np.ndarray = flat.astype(np.float64).reshape(-1, grades)
    sum_M = given_MK.sum(1)
    if not ((given_MK >= 0).all() and np.allclose(sum_M, 1, atol=1e-3)):
        raise InputError(
            f"{where}, probs: a distribution does not sum to 1 within 0.001, or holds a negative number or NaN."
        )
    probs_NK = np.full((len(lists), grades), np.nan)
    probs_NK[lists.is_valid().to_numpy(zero_copy_only=False)] = given_MK / sum_M[:, None]  # float32 misses 1 by 1e-7
    return probs_NK


def sample_counts(samples: pa.LargeListArray | None, gold_N: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Samples equal to gold, and all samples, of each row: int64 [N], 0 where a row has none; None where no row has
    some.
    """
    if samples is None or not pc.sum(pc.list_value_length(samples)).as_py():
        return None, None
    size_N = pc.list_value_length(samples).fill_null(0).to_numpy()
    row_M = np.repeat(np.arange(len(size_N)), size_N)
    grade_M = pc.list_flatten(samples).to_numpy(zero_copy_only=False)  # NaN where a sample failed
    return np.bincount(row_M[grade_M == gold_N[row_M]], minlength=len(size_N)), size_N


# ------------------------------------------------------------------------------
# What labelers that see a query's documents together are measured by, query by query: the evidence that was chosen
# (RES-RAG), and the review of what was found (R2RAG).
#
# Letters: N judged rows, G queries.


BATCH_ROWS = 1 << 16
"""Rows whose lists are Python's at a time."""
SHOWN_CHARS = 60


def evidence_statistics(judged: Judged) -> dict[str, Statistic]:
    """What the metrics of `evidence-set` are computed from, by metric: of different chunks chosen, their tokens, mean φ
    by what was written (a chunk named twice counts twice), F1 against gold chunks, and answers; without those that gold
    has no column for. Empty where the labels choose no chunks.

    Raises:
        InputError: rows of a query have different answers.
    """
    selected = judged.columns.get("selected")
    if selected is None or judged.queries is None:
        return {}
    has_N = selected.is_valid().to_numpy(zero_copy_only=False)
    query_N = judged.queries[has_N]
    rows_G = np.bincount(query_N, minlength=judged.num_queries).astype(np.float64)
    rows_G[rows_G == 0] = np.nan

    def total(value_N: np.ndarray) -> np.ndarray:
        """A query's sum of what its rows have; NaN for a query without rows."""
        return np.asarray(np.bincount(query_N, value_N[has_N], minlength=judged.num_queries) + 0 * rows_G)

    chunks_G = total(_sizes(selected))
    tokens_G = total(_numbers(judged.columns["selected_tokens"]))
    statistics: dict[str, Statistic] = {
        "chunks_mean": mean_of_queries(chunks_G),
        "chunks_max": Largest(chunks_G),
        "tokens_mean": mean_of_queries(tokens_G),
        "tokens_max": Largest(tokens_G),
        "over_budget": mean_of_queries(total(_numbers(judged.columns["over_budget"])) / rows_G),
    }
    if "gold_chunks" in judged.columns:
        gold = judged.columns["gold_chunks"]
        has_both_N = pc.and_(selected.is_valid(), gold.is_valid()).to_numpy(zero_copy_only=False)
        f1_N = _scored(selected, gold, has_both_N, set_f1)
        total_G, count_G = mean_of_rows(f1_N, judged.queries, judged.num_queries).by_group.T
        statistics["evidence_f1"] = mean_of_queries(total_G / np.where(count_G > 0, count_G, np.nan))
    if {"answers", "gold_answers"} <= judged.columns.keys():
        answered = list(zip(of_queries(judged, "answers"), of_queries(judged, "gold_answers"), strict=True))
        for name, score in (("exact_match", exact_match), ("hit@1", hit_at_1)):
            scores = [score(given, gold) if given is not None and gold else np.nan for given, gold in answered]
            statistics[name] = mean_of_queries(np.array(scores))
    return statistics


def _sizes(lists: pa.ListArray) -> np.ndarray:
    """How many different numbers each list holds: int64 [N], 0 where it is null."""
    number_M = pc.list_flatten(lists).to_numpy()
    row_M = pc.list_parent_indices(lists).to_numpy()
    different = np.unique(row_M * 2**16 + number_M, return_index=True)[1]  # numbers of 16 bits
    return np.bincount(row_M[different], minlength=len(lists))


def _numbers(column: pa.Array) -> np.ndarray:
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))


def _scored(first: pa.Array, second: pa.Array, has_N: np.ndarray, score: Callable[[Any, Any], float]) -> np.ndarray:
    """The score of two columns' values in some rows: float64 [N], NaN in all others."""
    rows = pa.array(np.flatnonzero(has_N))
    first = first.take(rows)
    second = second.take(rows)
    pairs = itertools.chain.from_iterable(
        zip(first[at : at + BATCH_ROWS].to_pylist(), second[at : at + BATCH_ROWS].to_pylist(), strict=True)
        for at in range(0, len(rows), BATCH_ROWS)
    )
    score_N = np.full(len(has_N), np.nan)
    score_N[has_N] = np.fromiter(itertools.starmap(score, pairs), np.float64, len(rows))
    return score_N


def of_queries(judged: Judged, name: str) -> list[Any]:
    """A column's one value a query, [G], None where all of its rows are null. It is the query's: rows without a gold
    grade may hold it.

    Raises:
        InputError: rows of a query differ; names the query and two values.
    """
    assert judged.queries is not None
    value_by_query: list[Any] = [None] * judged.num_queries
    columns = [(judged.queries, judged.columns[name])]
    if judged.unjudged is not None:
        unjudged_queries, unjudged_columns = judged.unjudged
        if name in unjudged_columns:
            columns.append((unjudged_queries, unjudged_columns[name]))
    for query_N, column in columns:
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        for query, value in zip(query_N[rows].tolist(), column.take(pa.array(rows)).to_pylist(), strict=True):
            if value_by_query[query] is None:
                value_by_query[query] = value
            elif value_by_query[query] != value:
                called = query if judged.query_names is None else texts_of(judged.query_names[query : query + 1])[0]
                first = str(value_by_query[query])[:SHOWN_CHARS]
                second = str(value)[:SHOWN_CHARS]
                raise InputError(
                    f"column `{name}`: rows of query {called} differ: {first} and {second}. Give all rows of a query "
                    "the same value, or null to all but one."
                )
    return value_by_query


def review_statistics(judged: Judged) -> dict[str, Statistic]:
    """What the metrics of `review` are computed from, by metric: of the documents named useful and of those that are,
    and of queries by P(yes), where gold knows whether the documents suffice. Empty where the labels are no reviews.

    Raises:
        InputError: rows of a query differ in whether its documents suffice.
    """
    if "sufficient_probs" not in judged.columns or judged.queries is None or judged.labels is None:
        return {}
    is_named_N = judged.labels > 0
    is_useful_N = judged.gold > 0
    both_G = np.bincount(judged.queries, is_named_N & is_useful_N, minlength=judged.num_queries)
    named_G = np.bincount(judged.queries, is_named_N, minlength=judged.num_queries)
    useful_G = np.bincount(judged.queries, is_useful_N, minlength=judged.num_queries)
    statistics: dict[str, Statistic] = {
        "useful_precision": mean_of_queries(both_G / np.where(named_G > 0, named_G, np.nan)),
        "useful_recall": mean_of_queries(both_G / np.where(useful_G > 0, useful_G, np.nan)),
    }
    if "gold_sufficient" in judged.columns:
        all_probs = of_queries(judged, "sufficient_probs")
        all_gold = of_queries(judged, "gold_sufficient")
        queries = []
        yes_probs = []
        is_enough = []
        for query, (probs, gold) in enumerate(zip(all_probs, all_gold, strict=True)):
            if probs is not None and gold is not None:
                queries.append(query)
                yes_probs.append(probs[1])
                is_enough.append(gold)
        statistics["sufficient_auc"] = Order(
            np.array(yes_probs, np.float64),
            np.array(is_enough, np.bool_),
            np.array(queries, np.int64),
        )
    return statistics


# ------------------------------------------------------------------------------
# What labels of `route` are measured by, row by row: nodes that answer, headings to unfold, refusals, and lines that
# were no legal action. Source: RDR2 (papers); what it leaves open is ours.


def routing_values(judged: Judged) -> dict[str, np.ndarray]:
    """What the metrics of `route` are means of, by metric: float64 [N], NaN where a row has no value; without those
    that gold has no column for. Empty where the labels are no routes.

    `answer_f1` is of ids that answer, `expand_precision` the share of the headings to unfold that gold has too (0 where
    none was to be unfolded), both over rows where gold has any. `refusal_accuracy` is 1 without an id and 0 with one,
    where gold has neither; `expelled_mean` counts lines meant as an action that were not legal; `collapse_rate` is 1
    where no line was an action.
    """
    columns = judged.columns
    if "answer_ids" not in columns:
        return {}
    num_ids_N = _lengths(columns["answer_ids"]) + _lengths(columns["expand_ids"])  # NaN in rows of another labeler
    expelled_N = _numbers(columns["expelled"])
    refused_N = columns["refused"].fill_null(False).to_numpy(zero_copy_only=False)
    is_silent_N = (num_ids_N == 0) & ~refused_N & (expelled_N == 0)
    values = {"expelled_mean": expelled_N, "collapse_rate": np.where(np.isnan(num_ids_N), np.nan, is_silent_N)}
    for name, ids, score in (("answer_f1", "answer_ids", set_f1), ("expand_precision", "expand_ids", _precision)):
        if f"gold_{ids}" in columns:
            has_N = ~np.isnan(_lengths(columns[ids])) & (_lengths(columns[f"gold_{ids}"]) > 0)
            values[name] = _scored(columns[ids], columns[f"gold_{ids}"], has_N, score)
    if {"gold_answer_ids", "gold_expand_ids"} <= columns.keys():
        num_gold_N = _lengths(columns["gold_answer_ids"]) + _lengths(columns["gold_expand_ids"])
        values["refusal_accuracy"] = np.where((num_gold_N == 0) & ~np.isnan(num_ids_N), num_ids_N == 0, np.nan)
    return values


def _lengths(lists: pa.Array) -> np.ndarray:
    """How many numbers each list holds: float64 [N], NaN where it is null."""
    return _numbers(pc.list_value_length(lists))


def _precision(chosen: list[int], wanted: list[int]) -> float:
    different = set(chosen)
    return len(different & set(wanted)) / len(different) if different else 0.0


# ------------------------------------------------------------------------------
# The metrics of labelers that see a query's documents together, in the order in which they are shown: those of
# `evidence-set` (RES-RAG) and of `review` (R2RAG).


def _of_labeler(name: str, formula: Formula = mean) -> Callable[[Any], Mapping[str, Measured]]:
    """Measures what one labeler's labels alone have, see `Judged.of_labeler`."""
    return measured(lambda rows: rows.of_labeler.get(name), formula)


QUERY_METRICS: tuple[Metric, ...] = (
    Metric(
        name="chunks_mean",
        title="chunks a query, mean",
        direction="lower",
        unit="queries",
        measure=_of_labeler("chunks_mean"),
        what="`evidence-set`: different chunks chosen",
    ),
    Metric(
        name="chunks_max",
        title="chunks a query, most",
        direction="lower",
        unit="queries",
        measure=_of_labeler("chunks_max", lambda most: most),
        what="of one query; its interval ends at it, since no resample holds more",
    ),
    Metric(
        name="tokens_mean",
        title="tokens a query, mean",
        direction="lower",
        unit="queries",
        measure=_of_labeler("tokens_mean"),
        what="of the chunks chosen, each once",
    ),
    Metric(
        name="tokens_max",
        title="tokens a query, most",
        direction="lower",
        unit="queries",
        measure=_of_labeler("tokens_max", lambda most: most),
        what="of one query, as `chunks_max`",
    ),
    Metric(
        name="over_budget",
        title="over budget, φ",
        direction="lower",
        unit="queries",
        measure=_of_labeler("over_budget"),
        what="per query, mean φ of its documents (RES-RAG, equation 8)",
        is_drawn=True,
    ),
    Metric(
        name="evidence_f1",
        title="evidence F1",
        direction="higher",
        unit="queries",
        measure=_of_labeler("evidence_f1"),
        what=(
            "F1_ret (equation 13): per query, mean over its documents of 2·both / (chosen + gold chunks); both empty "
            "1, one empty 0"
        ),
        aliases=("f1_ret",),
        is_drawn=True,
    ),
    Metric(
        name="exact_match",
        title="exact match",
        direction="higher",
        unit="queries",
        measure=_of_labeler("exact_match", share),
        what="share of queries with every gold answer among the `answers`",
        aliases=("em",),
        is_drawn=True,
    ),
    Metric(
        name="hit@1",
        title="Hit@1",
        direction="higher",
        unit="queries",
        measure=_of_labeler("hit@1", share),
        what="share of queries whose first answer is any gold answer",
        is_drawn=True,
    ),
    Metric(
        name="sufficient_auc",
        title="AUC, sufficient",
        direction="higher",
        unit="queries",
        measure=_of_labeler("sufficient_auc", Order.area),
        what="`review`: ROC area of P(yes) against `gold_sufficient`, a query once",
        aliases=("auc_sufficient",),
        is_drawn=True,
    ),
    Metric(
        name="useful_precision",
        title="useful: precision",
        direction="higher",
        unit="queries",
        measure=_of_labeler("useful_precision", share),
        what="per query, of the documents named useful, the share with g > 0; mean over queries where one is named",
        is_drawn=True,
    ),
    Metric(
        name="useful_recall",
        title="useful: recall",
        direction="higher",
        unit="queries",
        measure=_of_labeler("useful_recall", share),
        what="per query, of the documents with g > 0, the share that is named; mean over queries that have one",
        is_drawn=True,
    ),
)


# ------------------------------------------------------------------------------
# The metrics of `route` (RDR2), in the order in which they are shown.


ROUTING_METRICS: tuple[Metric, ...] = (
    Metric(
        name="answer_f1",
        title="answers: F1",
        direction="higher",
        unit="rows",
        measure=_of_labeler("answer_f1"),
        what="`route`: of `answer_ids` and `gold_answer_ids`, over rows where gold has any; 0 where the label has none",
        aliases=("ans_f1",),
        is_drawn=True,
    ),
    Metric(
        name="expand_precision",
        title="headings: precision",
        direction="higher",
        unit="rows",
        measure=_of_labeler("expand_precision", share),
        what="share of `expand_ids` in `gold_expand_ids`, over rows where gold has any; 0 where the label has none",
        aliases=("exp_pre",),
        is_drawn=True,
    ),
    Metric(
        name="refusal_accuracy",
        title="refusals: accuracy",
        direction="higher",
        unit="rows",
        measure=_of_labeler("refusal_accuracy", share),
        what="of rows where gold has neither, the share whose label has neither",
        aliases=("ref_acc",),
        is_drawn=True,
    ),
    Metric(
        name="expelled_mean",
        title="expelled actions, mean",
        direction="lower",
        unit="rows",
        measure=_of_labeler("expelled_mean"),
        what="lines a row that were meant as an action and not legal, where `expelled: keep` keeps them",
        aliases=("xpl",),
    ),
    Metric(
        name="collapse_rate",
        title="collapse rate",
        direction="lower",
        unit="rows",
        measure=_of_labeler("collapse_rate", share),
        what="share of rows without any line that is an action, legal or not",
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
        values = {}
        for metric in METRICS:
            if isinstance(metric.measure, OfCounts):
                for member, formula in metric.measure.by_member(counts_KK.shape[-1]).items():
                    values[metric.name.format(member)] = formula(counts_KK)
        return values


def _mean_absolute_error(counts_KK: np.ndarray) -> np.ndarray:
    grade_K = np.arange(counts_KK.shape[-1])
    error_KK = np.abs(np.subtract.outer(grade_K, grade_K))
    return np.asarray((counts_KK * error_KK).sum((-2, -1)) / counts_KK.sum((-2, -1)))


def _auc(rows: Judged) -> Mapping[str, Measured]:
    """At each cut, by distributions; where no row has one, of the counts, by the written grade."""
    if rows.orders:
        return {name: Measured(order, Order.area) for name, order in rows.orders.items()}
    assert rows.counts is not None
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
    Metric(
        name="accuracy",
        title="accuracy",
        direction="higher",
        unit="rows",
        measure=OfCounts(accuracy),
        what="share of rows with l = g",
        is_drawn=True,
    ),
    Metric(
        name="f1_{}",
        title="F1 of grade {}",
        direction="higher",
        unit="rows",
        measure=OfCounts(f1_by_grade, is_each_grade=True),
        what="2·both / (gold k + labels k)",
    ),
    Metric(
        name="f1_macro",
        title="F1, macro",
        direction="higher",
        unit="rows",
        measure=OfCounts(f1_macro),
        what="mean over occurring grades",
        aliases=("macro_f1",),
        is_drawn=True,
    ),
    Metric(
        name="f1_weighted",
        title="F1, weighted",
        direction="higher",
        unit="rows",
        measure=OfCounts(f1_weighted),
        what="mean by number of gold rows",
        aliases=("weighted_f1",),
    ),
    Metric(
        name="kappa",
        title="Cohen kappa",
        direction="higher",
        unit="rows",
        measure=OfCounts(lambda counts_KK: kappa(counts_KK, power=0)),
        what="1 − observed / expected disagreement",
        is_drawn=True,
    ),
    Metric(
        name="kappa_quadratic",
        title="Cohen kappa, quadratic",
        direction="higher",
        unit="rows",
        measure=OfCounts(lambda counts_KK: kappa(counts_KK, power=2)),
        what="the same with a disagreement of (g − l)²",
    ),
    Metric(
        name="alpha_ordinal",
        title="Krippendorff alpha, ordinal",
        direction="higher",
        unit="rows",
        measure=OfCounts(lambda counts_KK: alpha(counts_KK, is_ordinal=True)),
        what="1 − (n−1) Σ o δ² / Σ n_c n_k δ²; two raters",
        is_drawn=True,
    ),
    Metric(
        name="alpha_nominal",
        title="Krippendorff alpha, nominal",
        direction="higher",
        unit="rows",
        measure=OfCounts(lambda counts_KK: alpha(counts_KK, is_ordinal=False)),
        what="the same with δ = 1 for any two grades",
    ),
    Metric(
        name="mean_absolute_error",
        title="mean absolute error",
        direction="lower",
        unit="rows",
        measure=OfCounts(_mean_absolute_error),
        what="mean of \\|g − l\\|, in grades",
        aliases=("mae",),
    ),
    Metric(
        name="irrelevant_precision",
        title="irrelevant: precision",
        direction="higher",
        unit="rows",
        measure=OfCounts(Share(lambda counts_KK: counts_KK[..., 0, 0], lambda counts_KK: counts_KK[..., :, 0].sum(-1))),
        what="of grade 0",
    ),
    Metric(
        name="irrelevant_recall",
        title="irrelevant: recall",
        direction="higher",
        unit="rows",
        measure=OfCounts(Share(lambda counts_KK: counts_KK[..., 0, 0], lambda counts_KK: counts_KK[..., 0, :].sum(-1))),
        what="of grade 0",
    ),
    Metric(
        name="irrelevant_f1",
        title="irrelevant: F1",
        direction="higher",
        unit="rows",
        measure=OfCounts(lambda counts_KK: f1_by_grade(counts_KK)[..., 0]),
        what="of grade 0",
    ),
    Metric(
        name="auc_{}",
        title="AUC {}",
        direction="higher",
        unit="rows",
        measure=_auc,
        what="ROC area of P(k ≥ j) against g ≥ j, per cut; without distributions, of the label (`is_by_grade`)",
    ),
    Metric(
        name="ece",
        title="ECE",
        direction="lower",
        unit="rows",
        measure=measured(lambda rows: rows.reliability, ece_of_bins),
        what=(
            "15 equal-width bins: Σ share of rows · \\|mean confidence − accuracy\\|, of argmax p with confidence max p"
        ),
        is_drawn=True,
    ),
    Metric(
        name="brier",
        title="Brier",
        direction="lower",
        unit="rows",
        measure=measured(_brier, mean),
        what="mean of Σ_k (p(k) − [g = k])², 0 to 2",
    ),
    Metric(
        name=f"ndcg@{DEPTH}",
        title=f"nDCG@{DEPTH}",
        direction="higher",
        unit="queries",
        measure=_of_ranking(lambda ranking: ranking.ndcg),
        what=(
            "per query, linear gain, trec_eval's tie order (document id, descending); mean over queries with a "
            "relevant document"
        ),
        aliases=("ndcg",),
        is_drawn=True,
    ),
    Metric(
        name="kendall_tau",
        title="Kendall tau",
        direction="higher",
        unit="queries",
        measure=_of_ranking(lambda ranking: ranking.tau),
        what="tau-b of scores and grades per query; mean over queries where both vary",
        aliases=("tau",),
        is_drawn=True,
    ),
    Metric(
        name="bad_case_rate",
        title="bad-case rate",
        direction="lower",
        unit="queries",
        measure=_of_ranking(lambda ranking: ranking.bad_case, share),
        what=f"share of queries with a grade-0 document in the top {DEPTH}",
        is_drawn=True,
    ),
    Metric(
        name="pass@{}",
        title="pass@{}",
        direction="higher",
        unit="rows",
        measure=lambda rows: {k: Measured(sums, share) for k, sums in rows.passes.items()},
        what=(
            "1 − C(S−c, k) / C(S, k) over a row's S samples, c of them right; failed ones are wrong. k = 1, 2, 4, … "
            "and S, or `--pass-at 1,2,5` (at most the fewest samples of a row)"
        ),
    ),
    *QUERY_METRICS,
    *ROUTING_METRICS,
)


def metric_of(name: str, metrics: Iterable[Metric] = METRICS) -> tuple[Metric, str] | None:
    """The metric of a name as JSON has it, and what replaces its `{}`; None for an unknown name.

    Args:
        name: `f1_macro`, `auc_01/2`.
    """
    for metric in sorted(metrics, key=lambda one: one.name != name):  # one that is called so, before `{}` matches it
        found = re.fullmatch(re.escape(metric.name).replace(r"\{\}", "(.+)"), name)
        if found is not None:
            return metric, "".join(found.groups())
    return None


def title_of(name: str, metrics: Iterable[Metric] = METRICS) -> str:
    """What reports call a metric; an unknown name is returned as it is."""
    found = metric_of(name, metrics)
    return name if found is None else found[0].title.format(found[1])
