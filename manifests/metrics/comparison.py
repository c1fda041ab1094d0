"""Two label sets over the same rows: student against teacher, or two runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.gold import GoldRows
from relabel.manifests.labels import codes_of, pair_codes
from relabel.manifests.metrics.evaluation import BothByGold, evaluate_both
from relabel.manifests.metrics.judged import Judged, judged_rows, with_columns
from relabel.manifests.metrics.metric import (
    TINY,
    Formula,
    Measured,
    Metric,
    MetricSet,
    MetricValue,
    OfCounts,
    Sums,
    accuracy,
    bootstrap,
    confusion_by_group,
    kappa,
    mean,
    mean_of_queries,
    mean_of_rows,
    measured,
    share,
    tau_by_query,
)

# ------------------------------------------------------------------------------
# Which rows of a student's labels and a teacher's are the same.


BY_ROW = "row_id: both were made from the same input"
BY_IDS = "query_id and doc_id"


@dataclass(frozen=True)
class Labelled:
    """All labels of one set.

    Args:
        rows: in the order of `row_id`, see `manifests.label_sets`; no `grade` is null.
        probs: float64 [N, K], NaN where a row has none; None where no row has one.
        num_without_label: rows of the set that hold no label and are not here.
    """

    where: str
    rows: pa.RecordBatch
    probs: np.ndarray | None
    num_without_label: int = 0

    @cached_property
    def row_ids(self) -> np.ndarray:
        """Rows of the run's input, or of the file: int64 [N]."""
        return np.asarray(self.rows["row_id"].to_numpy())

    @cached_property
    def grades(self) -> np.ndarray:
        """int64 [N]."""
        return np.asarray(self.rows["grade"].to_numpy(zero_copy_only=False))

    @property
    def query_ids(self) -> pa.LargeBinaryArray:
        return self.rows["query_id"]

    @property
    def doc_ids(self) -> pa.LargeBinaryArray:
        return self.rows["doc_id"]


class Match(NamedTuple):
    """Which rows of two sets are the same: index into the teacher's rows and into the student's, int64 [N] each.

    `num_repeated` counts matched rows beyond the first of their pair, where rows are matched by ids.
    """

    how: str
    teacher: np.ndarray
    student: np.ndarray
    num_repeated: int


def match_rows(teacher: Labelled, student: Labelled, *, is_same_input: bool) -> Match:
    """Find the rows that both sets label.

    A pair that occurs several times in both is matched in the order of its rows: first with first, second with second.

    Args:
        is_same_input: row ids mean the same in both.
    """
    if is_same_input:
        _, ours, theirs = np.intersect1d(teacher.row_ids, student.row_ids, assume_unique=True, return_indices=True)
        return Match(BY_ROW, ours, theirs, 0)
    query_ids = pa.concat_arrays([teacher.query_ids, student.query_ids])
    doc_ids = pa.concat_arrays([teacher.doc_ids, student.doc_ids])
    codes = np.unique(pair_codes(query_ids, doc_ids), return_inverse=True)[1]
    pair_N, pair_M = np.split(codes, [len(teacher.grades)])
    # the same pair's first row, second row, …
    number_N = _numbers(pair_N)
    number_M = _numbers(pair_M)
    most = max(number_N.max(initial=0), number_M.max(initial=0)) + 1
    key_N = pair_N * most + number_N
    key_M = pair_M * most + number_M
    _, ours, theirs = np.intersect1d(key_N, key_M, assume_unique=True, return_indices=True)
    order = np.argsort(ours)
    num_repeated = int((number_N[ours] > 0).sum())
    return Match(BY_IDS, ours[order], theirs[order], num_repeated)


def _numbers(pair_N: np.ndarray) -> np.ndarray:
    """How many rows of the same pair come before each row: int64 [N]."""
    order = np.argsort(pair_N, kind="stable")
    _, start, count = np.unique(pair_N[order], return_index=True, return_counts=True)
    number_N = np.empty(len(pair_N), dtype=np.int64)
    number_N[order] = np.arange(len(pair_N)) - np.repeat(start, count)
    return number_N


def match_notes(teacher: Labelled, student: Labelled, match: Match) -> list[str]:
    counts = {}
    for labels, matched in ((teacher, match.teacher), (student, match.student)):
        counts[f"rows of {labels.where} without a readable label, left out"] = labels.num_without_label
        unmatched = len(labels.grades) - len(matched)
        counts[f"labels of {labels.where} that the other set has no row for, left out"] = unmatched
    repeated = "pairs that occur several times in both sets are matched in order; rows beyond the first"
    counts[repeated] = match.num_repeated
    return [f"{what}: {count:,}" for what, count in counts.items() if count]


# ------------------------------------------------------------------------------
# What is compared of a student and its teacher, and how it is resampled.


def kl_rows(teacher_NK: np.ndarray, student_NK: np.ndarray) -> np.ndarray:
    """KL(teacher ‖ student) of each row, Σ_k p_T(k) log(p_T(k) / p_S(k)): float64 [N], nats, 0 where both are equal,
    NaN where either is.

    A student's probability counts as 1e-12 at least: a softmax in float32 may round to 0 what it does not mean as
    impossible.
    """
    ratio_NK = np.log(np.maximum(teacher_NK, TINY)) - np.log(np.maximum(student_NK, TINY))
    return np.asarray(np.where(teacher_NK == 0, 0.0, teacher_NK * ratio_NK).sum(1))


@dataclass(frozen=True)
class PairedRows:
    """Rows that both sets label.

    Args:
        query: int64 [N], 0..Q-1, none left out.
        docs: int64 [N], in the order of document ids.
        grades: int64 [N], of the first set and of the second.
        probs: float64 [N, K], NaN where a row has no distribution.
    """

    query: np.ndarray
    docs: np.ndarray
    grades: tuple[np.ndarray, np.ndarray]
    probs: tuple[np.ndarray, np.ndarray]

    @property
    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """What rows are ordered by, see `_scores`."""
        return _scores(self.grades[0], self.probs[0]), _scores(self.grades[1], self.probs[1])


def paired_rows(first: Labelled, second: Labelled, match: Match, grades: int) -> tuple[PairedRows, pa.LargeBinaryArray]:
    """Matched rows as arrays, and the ids of their queries, by number."""
    rows = pa.array(match.teacher)
    query_N, query_names = codes_of(first.query_ids.take(rows))
    doc_N, _ = codes_of(first.doc_ids.take(rows))
    first_probs_NK = _probs_of(first, match.teacher, grades)
    second_probs_NK = _probs_of(second, match.student, grades)
    paired = PairedRows(
        query=query_N,
        docs=doc_N,
        grades=(first.grades[match.teacher], second.grades[match.student]),
        probs=(first_probs_NK, second_probs_NK),
    )
    return paired, query_names


class TeacherStatistics:
    """Statistics of two label sets for each other, by query: of a student with its teacher for gold."""

    def __init__(self, rows: PairedRows, num_queries: int, grades: int) -> None:
        num_rows = len(rows.query)
        self.distances = [mean_of_rows(kl_rows(*rows.probs), rows.query, num_queries)]
        """KL(teacher ‖ student)."""
        confusion = confusion_by_group(*rows.grades, rows.query, num_groups=num_queries, grades=grades)
        self.counts = Sums(confusion, num_rows)
        self.tau_by_query = tau_by_query(rows.query, *rows.scores, num_queries=num_queries)
        self.tau = mean_of_queries(self.tau_by_query)
        self.notes = []
        without = num_rows - self.distances[0].over
        if without:
            self.notes.append(f"matched rows without a distribution on both sides, left out of KL: {without:,}")
        flat = num_queries - self.tau.over
        if flat:
            self.notes.append(
                f"queries where teacher or student scores every row alike, left out of their Kendall tau: {flat:,}"
            )


def _distance(number: int) -> Callable[[Any], Mapping[str, Measured]]:
    return measured(lambda rows: rows.distances[number] if rows.distances[number].over else None, mean)


TAU = measured(lambda rows: rows.tau, mean)
AGREEMENT = Metric(
    name="agreement",
    title="agreement",
    direction="higher",
    unit="rows",
    measure=OfCounts(accuracy),
    what="share of equal grades",
)
KAPPA = Metric(
    name="kappa",
    title="Cohen kappa",
    direction="higher",
    unit="rows",
    measure=OfCounts(lambda counts_KK: kappa(counts_KK, power=0)),
    what="the same beyond chance",
)
AGAINST_TEACHER = (
    Metric(
        name="kl",
        title="mean KL(teacher ‖ student), nats",
        direction="lower",
        unit="rows",
        measure=_distance(0),
        what="over rows where both have a distribution",
    ),
    AGREEMENT,
    KAPPA,
    Metric(
        name="kendall_tau",
        title="Kendall tau of expected grades, by query",
        direction="higher",
        unit="queries",
        measure=TAU,
        what="tau-b of the expected grades; mean over queries where both vary",
    ),
)
"""Metrics of a student against its teacher, in the order in which they are shown."""


def _probs_of(labelled: Labelled, rows: np.ndarray, grades: int) -> np.ndarray:
    """Distributions of some rows, [N, K]; NaN where there are none."""
    if labelled.probs is None:
        return np.full((len(rows), grades), np.nan)
    return np.asarray(labelled.probs[rows])


def _scores(grades_N: np.ndarray, probs_NK: np.ndarray) -> np.ndarray:
    """Expected grades, or the grade where there is no distribution; to 6 digits, which float32 keeps."""
    expected_N = probs_NK @ np.arange(probs_NK.shape[1])
    return np.round(np.where(np.isnan(expected_N), grades_N, expected_N), 6)


# ------------------------------------------------------------------------------
# Rows that two sets of labels share, and how each query's ranking moves between them.


def query_moves(rows: PairedRows, tau_G: np.ndarray, *, depth: int) -> dict[str, np.ndarray]:
    """How each query moved from the first set to the second, [Q] each: its `rows`, the mean scores `mean_a` and
    `mean_b`, their `change`, `kendall_tau` of the two orders (NaN where either set scores all rows alike),
    `entered_top`, documents of the second set's top that are not in the first's, `top`, the size of both, and
    `first_changed`, whether another document comes first.

    Equal scores are ordered by document id, descending, as everywhere.

    Args:
        tau_G: Kendall tau of the two orders.
    """
    count = np.bincount(rows.query)
    first, second = rows.scores
    entered = np.zeros(len(count), dtype=np.int64)
    changed = np.zeros(len(count), dtype=bool)
    tops = [np.lexsort((-rows.docs, -score, rows.query)) for score in (first, second)]
    start = 0
    for query, size in enumerate(count):
        ours, theirs = (top[start : start + min(size, depth)] for top in tops)
        entered[query] = len(np.setdiff1d(theirs, ours, assume_unique=True))
        changed[query] = ours[0] != theirs[0]
        start += size
    means = [np.bincount(rows.query, score) / count for score in (first, second)]
    return {
        "rows": count,
        "mean_a": means[0],
        "mean_b": means[1],
        "change": means[1] - means[0],
        "kendall_tau": tau_G,
        "entered_top": entered,
        "top": np.minimum(count, depth),
        "first_changed": changed,
    }


def js_rows(first_NK: np.ndarray, second_NK: np.ndarray) -> np.ndarray:
    """Jensen–Shannon divergence of each row: float64 [N], nats, 0 where both are equal, ln 2 where they share no grade.

    Source:
        Lin 1991: ½ KL(p ‖ m) + ½ KL(q ‖ m), m = ½ (p + q).
    """
    middle_NK = (first_NK + second_NK) / 2
    divergence_N = (kl_rows(first_NK, middle_NK) + kl_rows(second_NK, middle_NK)) / 2
    return np.asarray(np.clip(divergence_N, 0.0, math.log(2.0)))


# ------------------------------------------------------------------------------
# Two label sets over the same rows, neither of them the truth: agreement, shift of grades, distance of distributions,
# and how the order of each query's documents changes, all with intervals over queries.
#
# Letters: N rows, G queries, K grades.


class PairedStatistics(TeacherStatistics):
    """Statistics of two runs, by query.

    Args:
        depth: of the top that is compared.
    """

    def __init__(self, rows: PairedRows, num_queries: int, grades: int, *, depth: int) -> None:
        super().__init__(rows, num_queries, grades)
        self.depth = depth
        self.moves = query_moves(rows, self.tau_by_query, depth=depth)
        has_probs = ~np.isnan(rows.probs[0][:, 0]) & ~np.isnan(rows.probs[1][:, 0])
        query_M = rows.query[has_probs]
        first_MK = rows.probs[0][has_probs]
        second_MK = rows.probs[1][has_probs]
        grade_K = np.arange(grades)
        values = (np.ones(len(query_M)), first_MK @ grade_K, second_MK @ grade_K)
        sums = [np.bincount(query_M, value_M, minlength=num_queries) for value_M in values]
        self.expected = Sums(np.stack(sums, axis=1), len(query_M))
        """Rows with distributions in both sets, sum of the expected grades of the first, of the second."""
        self.distances.append(mean_of_rows(kl_rows(second_MK, first_MK), query_M, num_queries))
        self.distances.append(mean_of_rows(js_rows(first_MK, second_MK), query_M, num_queries))
        """KL(A ‖ B), KL(B ‖ A) and JS, of these rows."""
        entered_share = self.moves["entered_top"] / np.maximum(self.moves["top"], 1)
        self.stayed = mean_of_queries(1 - entered_share)
        self.first_changed = mean_of_queries(self.moves["first_changed"].astype(float))

    def figures(self, *, resamples: int, seed: int) -> dict[str, MetricValue]:
        """Every metric with its 95 % interval over queries."""
        num_queries = len(self.tau_by_query)
        metrics = MetricSet(PAIRED, self, num_groups=num_queries)
        intervals = bootstrap(metrics.resampled, num_groups=num_queries, resamples=resamples, seed=seed)
        return metrics.with_intervals(intervals)


def _of_expected(formula: Formula) -> Callable[[Any], Mapping[str, Measured]]:
    return measured(lambda rows: rows.expected if rows.expected.over else None, formula)


def _mean_grade(counts_KK: np.ndarray, side: int) -> np.ndarray:
    """Of the first set (0) or of the second (1)."""
    grade_K = np.arange(counts_KK.shape[-1])
    return np.asarray(counts_KK.sum(-1 - side) @ grade_K / counts_KK.sum((-2, -1)))


PAIRED = (
    AGREEMENT,
    KAPPA,
    Metric(
        name="kappa_quadratic",
        title="Cohen kappa, quadratic",
        direction="higher",
        unit="rows",
        measure=OfCounts(lambda counts: kappa(counts, power=2)),
        what="with a disagreement of (a − b)²",
    ),
    Metric(
        name="mean_grade_a",
        title="mean grade, A",
        direction="neither",
        unit="rows",
        measure=OfCounts(lambda counts: _mean_grade(counts, 0)),
        what="of A's labels",
    ),
    Metric(
        name="mean_grade_b",
        title="mean grade, B",
        direction="neither",
        unit="rows",
        measure=OfCounts(lambda counts: _mean_grade(counts, 1)),
        what="of B's labels",
    ),
    Metric(
        name="mean_grade_difference",
        title="mean grade, B - A",
        direction="neither",
        unit="rows",
        measure=OfCounts(lambda counts: _mean_grade(counts, 1) - _mean_grade(counts, 0)),
        what="how much higher B grades",
    ),
    Metric(
        name="mean_expected_a",
        title="mean expected grade, A",
        direction="neither",
        unit="rows",
        measure=_of_expected(lambda sums: sums[..., 1] / sums[..., 0]),
        what="of A's distributions",
    ),
    Metric(
        name="mean_expected_b",
        title="mean expected grade, B",
        direction="neither",
        unit="rows",
        measure=_of_expected(lambda sums: sums[..., 2] / sums[..., 0]),
        what="of B's distributions",
    ),
    Metric(
        name="mean_expected_difference",
        title="mean expected grade, B - A",
        direction="neither",
        unit="rows",
        measure=_of_expected(lambda sums: sums[..., 2] / sums[..., 0] - sums[..., 1] / sums[..., 0]),
        what="how much higher B's distributions lie",
    ),
    Metric(
        name="kl_a_b",
        title="mean KL(A ‖ B), nats",
        direction="lower",
        unit="rows",
        measure=_distance(0),
        what="over rows where both have a distribution",
    ),
    Metric(
        name="kl_b_a",
        title="mean KL(B ‖ A), nats",
        direction="lower",
        unit="rows",
        measure=_distance(1),
        what="over rows where both have a distribution",
    ),
    Metric(
        name="js",
        title="mean Jensen-Shannon, nats",
        direction="lower",
        unit="rows",
        measure=_distance(2),
        what="over rows where both have a distribution",
    ),
    Metric(
        name="kendall_tau",
        title="Kendall tau, by query",
        direction="higher",
        unit="queries",
        measure=TAU,
        what="tau-b of the two orders; mean over queries where both vary",
    ),
    Metric(
        name="overlap@{}",
        title="share of the top {} that stays",
        direction="higher",
        unit="queries",
        measure=lambda rows: {str(rows.depth): Measured(rows.stayed, share)},
        what="documents of B's top that are in A's",
    ),
    Metric(
        name="first_changed",
        title="queries with another first",
        direction="lower",
        unit="queries",
        measure=measured(lambda rows: rows.first_changed, share),
        what="share of queries where another document comes first",
    ),
)
"""Metrics of two label sets of which neither is the truth, in the order in which they are shown."""


# ------------------------------------------------------------------------------
# A student against its teacher and gold: their labels compared with each other and with gold grades, row by row.
#
# Rows of two label sets are matched by their row of the input where both were made from the same one, else by
# (query_id, doc_id); what only one set has is counted and left out, so that no figure compares different rows.
#
# Letters: N rows, G queries, K grades.


@dataclass(frozen=True)
class StudentComparison:
    """A student compared with its teacher, and both with gold grades.

    Args:
        counts: labels of both sets (`teacher`, `student`), rows by which set has them, their `queries`, rows
            `with_distributions` on both sides, and how many gold judges.
        against_teacher: those of `AGAINST_TEACHER`.
        confusion: rows teacher, columns student.
        against_gold: None without gold.
    """

    matched_by: str
    counts: dict[str, int]
    against_teacher: dict[str, MetricValue]
    confusion: list[list[int]]
    against_gold: BothByGold | None
    notes: list[str]


def judge_both(
    teacher: Labelled,
    student: Labelled,
    match: Match,
    gold: GoldRows,
    *,
    grades: int,
    resamples: int,
    seed: int,
    pass_at: Sequence[int] = (),
    lexical: np.ndarray | None = None,
    qrels: str = "gold",
) -> BothByGold:
    """Both sets by gold, over matched rows of which at least one has a grade. Query and document ids are the teacher's
    for both, so that both have the same groups.

    Args:
        gold: of the matched rows.
        pass_at: the k of pass@k, see `manifests.metrics.evaluation.evaluate`.
        lexical: BM25 of each row that has a gold grade.
        qrels: what to call gold in an error.
    Raises:
        InputError: too few samples for a k, or a gold chunk is not one of its document's.
    """
    matched = pa.array(match.teacher)
    shared = {"query_id": teacher.query_ids.take(matched), "doc_id": teacher.doc_ids.take(matched), **gold.columns}

    def judge(labels: Labelled, rows: np.ndarray) -> Judged:
        return judged_rows(
            with_columns(labels.rows.take(pa.array(rows)), shared),
            grades,
            where=labels.where,
            qrels=qrels,
            lexical=lexical,
        )

    return evaluate_both(
        judge(teacher, match.teacher),
        judge(student, match.student),
        resamples=resamples,
        seed=seed,
        pass_at=pass_at,
    )


def compare(
    teacher: Labelled,
    student: Labelled,
    match: Match,
    gold: GoldRows | None,
    *,
    grades: int,
    resamples: int,
    seed: int,
    **judging: Any,
) -> StudentComparison:
    """Compare over matched rows, of which there is at least one.

    Args:
        gold, judging: see `judge_both`; None without gold.
    """
    rows, query_names = paired_rows(teacher, student, match, grades)
    num_queries = len(query_names)
    statistics = TeacherStatistics(rows, num_queries, grades)
    metrics = MetricSet(AGAINST_TEACHER, statistics, num_groups=num_queries)
    intervals = bootstrap(metrics.resampled, num_groups=num_queries, resamples=resamples, seed=seed)
    notes = [*statistics.notes, *match_notes(teacher, student, match)]
    against_gold = None
    if gold is not None and gold.counts["judged"]:
        against_gold = judge_both(
            teacher,
            student,
            match,
            gold,
            grades=grades,
            resamples=resamples,
            seed=seed,
            **judging,
        )
        notes += dict.fromkeys([*against_gold.teacher.notes, *against_gold.student.notes])
    counts = {
        "teacher": len(teacher.grades),
        "student": len(student.grades),
        "matched": len(match.teacher),
        "only_teacher": len(teacher.grades) - len(match.teacher),
        "only_student": len(student.grades) - len(match.student),
        "with_distributions": metrics.over("kl"),
        "queries": num_queries,
    }
    counts |= gold.counts if gold else {"judged": 0, "unjudged": 0, "gold_null": 0}
    confusion = statistics.counts.by_group.sum(0).tolist()
    return StudentComparison(
        matched_by=match.how,
        counts=counts,
        against_teacher=metrics.with_intervals(intervals),
        confusion=confusion,
        against_gold=against_gold,
        notes=notes,
    )
