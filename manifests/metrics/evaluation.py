"""All metrics of one or two label sets against gold, with baselines."""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from relabel.manifests.errors import ConfigError, InputError, UsageError
from relabel.manifests.labels import MOST_OUTSIDE_MASS, release_unused
from relabel.manifests.metrics.judged import METRICS, QUERY_METRICS, Judged, count_metrics
from relabel.manifests.metrics.metric import (
    BINS,
    DEPTH,
    NOTHING_DRAWN,
    Difference,
    Figures,
    MetricSet,
    MetricValue,
    QueryRanking,
    auc,
    cut_names,
    finite,
    interval_of,
    random_order,
    rank_queries,
    resampled,
)
from relabel.manifests.records import LEFT_OUT
from relabel.manifests.specs import nearest

# ------------------------------------------------------------------------------
# What figures labels get that no document was read for: one grade for all rows, a random order of each query, and the
# words that query and document share (BM25). A figure means something by its distance from these.
#
# Letters: N rows, K grades, G queries.


BM25_K1 = 1.2
BM25_B = 0.75
MOST_LEXICAL = 100_000
"""Rows that BM25 is computed for at most: 40 s of one core, of documents of 100 words."""
_WORD = re.compile(r"\w+")
BASELINE_NAMES = {"constant": "constant", "random": "random", "lexical": "BM25"}
"""What people read of a field of `Baselines`; another ranker's is called as the user calls it."""


@dataclass(frozen=True)
class Baselines:
    """Figures by name, as labels have them; None where one is not defined.

    Args:
        grade: of the constant baseline, the most frequent gold grade of the same rows, the lower of equals.
        constant: of that grade for every row: all figures of the confusion matrix, and Brier, of the gold grades'
            shares as every row's distribution.
        random: the expected figures of a random order of each query; empty where rows name no query.
        lexical: of `bm25` of query and document; empty where their texts are not known.
        rankings: by name, of other rankers' scores of the same rows; None without any.
    """

    grade: int
    constant: dict[str, float | None]
    random: dict[str, float | None]
    lexical: dict[str, float | None]
    rankings: dict[str, dict[str, float | None]] | None = field(default=None, metadata=LEFT_OUT)

    def of(self, figure: str) -> dict[str, float]:
        """The baselines that have a figure, by name."""
        values = {}
        by_kind = {"constant": self.constant, "random": self.random, "lexical": self.lexical}
        for kind, figures in (by_kind | (self.rankings or {})).items():
            value = figures.get(figure)
            if value is not None:
                values[kind] = value
        return values

    def words(self, kind: str) -> str:
        """A baseline in a sentence; another ranker's is called as the user calls it."""
        known = {"constant": f"the constant grade {self.grade}", "random": "a random order", "lexical": "BM25"}
        return known.get(kind, kind)

    def text(self, figure: str) -> str:
        """The baselines of a figure in words; empty where it has none."""
        return ", ".join(f"{value:.4f} {BASELINE_NAMES.get(kind, kind)}" for kind, value in self.of(figure).items())


def baselines(judged: Judged) -> Baselines:
    """The baselines of judged rows, of which there is at least one."""
    gold_N = judged.gold
    query_N = judged.queries
    grades = judged.grades
    gold_K = np.bincount(gold_N, minlength=grades)
    grade = int(gold_K.argmax())
    counts_KK = np.zeros((grades, grades))
    counts_KK[:, grade] = gold_K
    share_K = gold_K / gold_K.sum()
    constant = {name: float(value) for name, value in count_metrics(counts_KK).items()}
    constant["brier"] = float(1 - share_K @ share_K)
    cuts = [(f"auc_{name}", cut) for cut, name in enumerate(cut_names(grades), start=1)]
    random = {name: 0.5 for name, _ in cuts}
    if query_N is not None:
        random |= _ranked(random_order(query_N, judged.docs, gold_N, num_queries=judged.num_queries))
    lexical = dict[str, float | None]()
    if judged.lexical is not None:
        lexical = _figures_of_scores(judged.lexical, judged)
    rankings = {name: _figures_of_scores(score_N, judged) for name, score_N in judged.rankings.items()}
    return Baselines(
        grade,
        constant=_finite(constant),
        random=_finite(random),
        lexical=lexical,
        rankings=rankings or None,
    )


def _figures_of_scores(score_N: np.ndarray, judged: Judged) -> dict[str, float | None]:
    """What can be measured of scores that only rank: AUC of each cut and, where rows name queries, their order."""
    names = cut_names(judged.grades)
    figures = {f"auc_{name}": auc(score_N, judged.gold >= cut) for cut, name in enumerate(names, start=1)}
    if judged.queries is not None:
        ranking = rank_queries(
            judged.queries,
            judged.docs,
            score_N,
            judged.gold,
            num_queries=judged.num_queries,
        )
        figures |= _ranked(ranking)
    return _finite(figures)


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in figures.items()}


def _ranked(ranking: QueryRanking) -> dict[str, float]:
    means = {f"ndcg@{DEPTH}": ranking.ndcg, "kendall_tau": ranking.tau, "bad_case_rate": ranking.bad_case}
    return {name: float(np.nanmean(value_G)) for name, value_G in means.items() if not np.isnan(value_G).all()}


def bm25(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """BM25 of each (query, document), float64 [N]: how many and how rare the words are that both have.

    Words are runs of letters and digits, case folded; the collection is the different documents of these pairs.

    Source:
        Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework"; with Lucene's idf, never negative.
    """
    counts = {text: Counter(_words(text)) for _, text in pairs}
    length = {text: count.total() for text, count in counts.items()}
    mean = max(1, sum(length.values())) / max(1, len(length))
    num_with = Counter[str]()
    for count in counts.values():
        num_with.update(count.keys())
    score_N = np.zeros(len(pairs))
    for row, (query, text) in enumerate(pairs):
        norm = BM25_K1 * (1 - BM25_B + BM25_B * length[text] / mean)
        for word in _words(query):
            times = counts[text][word]
            if times:
                rarity = math.log(1 + (len(counts) - num_with[word] + 0.5) / (num_with[word] + 0.5))
                score_N[row] += rarity * times * (BM25_K1 + 1) / (times + norm)
    return np.round(score_N, 9)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def outside_mass_text(mean: float) -> str:
    """A warning where the mean mass outside the grades is high; empty where it is not, or not known (NaN)."""
    if not mean >= MOST_OUTSIDE_MASS:
        return ""
    return (
        f"on average {mean:.2f} of the teacher's probability lies outside the grades: its distributions say little, "
        "and its prompt or its format of answers may be wrong"
    )


BOUNDS = (("accuracy", "constant"), ("kappa", "constant"), (f"ndcg@{DEPTH}", "lexical"))
"""Figures that a student has to beat a baseline by, before a channel is pointed at it."""


@dataclass(frozen=True)
class NotBeaten:
    """A baseline that some labels are below in a figure; `kind` as in `Baselines`."""

    figure: str
    value: float
    kind: str
    bound: float


def baselines_not_beaten(figures: Mapping[str, float | None], baselines: Baselines) -> list[NotBeaten]:
    """Which baselines some labels are not above; where all is right, nothing can be."""
    return [
        NotBeaten(name, value, kind, bound)
        for name, value, kind, bound in _bounded(figures, baselines)
        if value <= bound and value < 1.0
    ]


def _bounded(figures: Mapping[str, float | None], baselines: Baselines) -> Iterator[tuple[str, float, str, float]]:
    """Each figure that has a baseline: its name and value, the baseline's kind and value. Constants have kappa 0."""
    for name, kind in BOUNDS:
        value = figures.get(name)
        bound = baselines.of(name).get(kind, 0.0 if name == "kappa" else None)
        if value is not None and bound is not None:
            yield name, value, kind, bound


def not_beaten(figures: Mapping[str, float | None], baselines: Baselines) -> list[str]:
    """The same as `baselines_not_beaten` in words."""
    return [
        f"{missed.figure} {missed.value:.4f}, the {BASELINE_NAMES[missed.kind]} baseline {missed.bound:.4f}"
        for missed in baselines_not_beaten(figures, baselines)
    ]


def not_shown_to_beat(
    figures: Mapping[str, float | None], intervals: Mapping[str, Sequence[float]] | None, baselines: Baselines
) -> list[str]:
    """Which baselines some labels are above by no more than chance explains: the 95 % interval holds them. In words."""
    found = []
    for name, value, kind, bound in _bounded(figures, baselines):
        if intervals is None or name not in intervals:
            continue
        low, high = intervals[name]
        if low <= bound < value:
            found.append(f"{name} {low:.4f} to {high:.4f} holds the {BASELINE_NAMES[kind]} baseline {bound:.4f}")
    return found


# ------------------------------------------------------------------------------
# All figures of judged labels, each with its 95 % interval: which are computed, over what, and in which order they are
# shown.
#
# Letters: N rows, G groups (queries, or rows where there is no query), K grades.


@dataclass(frozen=True)
class Evaluation:
    """What is known of judged labels.

    Args:
        confusion: rows gold, columns label; empty where rows are ranked by scores.
        resampled: `queries` or `rows`; `num_groups` of them.
        reliability: bins of confidence (`from`, `to`) that hold a row: `rows`, mean `confidence`, and `accuracy`, the
            share whose most probable grade is gold; None without distributions.
        baselines: of the same rows.
    """

    grades: int
    figures: dict[str, MetricValue]
    confusion: list[list[int]]
    resampled: str
    num_groups: int
    reliability: list[dict[str, float]] | None
    notes: list[str]
    baselines: Baselines


def evaluate(
    judged: Judged,
    *,
    resamples: int = 1000,
    seed: int = 7,
    pass_at: Sequence[int] = (),
) -> Evaluation:
    """Compute every figure that the rows allow.

    Args:
        judged: at least one row.
        seed: of the resamples.
        pass_at: the k of pass@k, each 1 or more; by default the powers of two and the number of samples that every
            sampled row has.
    Raises:
        InputError: a k without so many samples.
    """
    (evaluation,), _ = _evaluated([judged], resamples, seed, pass_at)
    return evaluation


def _evaluated(
    sets: Sequence[Judged], resamples: int, seed: int, pass_at: Sequence[int]
) -> tuple[list[Evaluation], dict[tuple[int, str], np.ndarray]]:
    """Sets of the same rows: what is known of each, and the values of its metrics in the same resamples, [R] each, by
    the set's number and the metric.

    Raises:
        InputError: a set has samples, and not enough for each k, or none has some.
    """
    fewest = min((judged.fewest_samples for judged in sets if judged.fewest_samples), default=0)
    if pass_at and max(pass_at) > fewest:
        raise InputError(
            f"--pass-at {max(pass_at)}: a judged label has {fewest} samples. Label with `labeler.samples`, or leave "
            "the option out."
        )
    release_unused()  # what the rows were read and joined with
    sets = [replace(judged, pass_at=pass_at) for judged in sets]
    metrics = [MetricSet(METRICS, judged, num_groups=judged.num_groups) for judged in sets]
    release_unused()
    num_groups = sets[0].num_groups
    same = baselines(sets[0])

    def values(weight_RG: np.ndarray) -> dict[tuple[int, str], np.ndarray]:
        by_metric = {}
        for number, measured in enumerate(metrics):
            for name, value_R in measured.resampled(weight_RG).items():
                by_metric[number, name] = value_R
        return by_metric

    drawn = resampled(values, num_groups=num_groups, resamples=resamples, seed=seed)
    evaluations = []
    for number, (judged, measured) in enumerate(zip(sets, metrics, strict=True)):
        intervals = {name: interval_of(value_R) for (of, name), value_R in drawn.items() if of == number}
        reliability = None
        if judged.reliability is not None:
            reliability = reliability_table(judged.reliability.by_group.sum(0))
        evaluations.append(
            Evaluation(
                grades=judged.grades,
                figures=measured.with_intervals(intervals),
                confusion=[] if judged.counts is None else judged.counts.by_group.sum(0).tolist(),
                resampled="rows" if judged.queries is None else "queries",
                num_groups=num_groups,
                reliability=reliability,
                notes=_notes(judged, measured),
                baselines=same,
            )
        )
    return evaluations, drawn


def intervals_of(figures: Mapping[str, MetricValue], names: Collection[str]) -> dict[str, tuple[float, float]]:
    """The intervals of figures that are named, without those that are the same in every draw."""
    intervals = {}
    for name, figure in figures.items():
        if name not in names or figure.low is None or figure.high is None:
            continue
        if figure.low < figure.high:
            intervals[name] = figure.low, figure.high
    return intervals


def reliability_table(bins_B3: np.ndarray) -> list[dict[str, float]]:
    """Bins of confidence that hold a row."""
    return [
        {
            "from": number / BINS,
            "to": (number + 1) / BINS,
            "rows": int(count),
            "confidence": total / count,
            "accuracy": correct / count,
        }
        for number, (count, total, correct) in enumerate(bins_B3.tolist())
        if count
    ]


FEW_QUERIES = 10
"""With fewer, an interval of resampled queries is too narrow: of two, it can't reach beyond both."""
FEWEST_QUERIES = 5
"""With fewer, no verdict is given."""


def _notes(judged: Judged, metrics: MetricSet) -> list[str]:
    """What of the rows is in no metric, or not in all."""
    rows = len(judged.gold)
    groups = judged.num_groups
    num_without = rows - int(judged.has_probs.sum())
    notes = []
    if judged.ranked_by is not None:
        notes.append("scores only rank: there are no figures of grades")
    elif num_without == rows:
        notes.append(
            "no label has a distribution: AUC and ranking take the written grade for a score, whose many ties cost "
            "AUC; there is no ECE and no Brier score"
        )
    elif num_without:
        without = f"{num_without:,} of {rows:,} judged labels have no distribution"
        notes.append(f"{without}: AUC, ECE and Brier are over those that have one; ranking takes the label for a score")
    if judged.ranking is None:
        notes.append("labels name no query: rows are resampled as if independent, and nothing is ranked")
    else:
        short = int((np.bincount(judged.groups, minlength=groups) < DEPTH).sum())
        if short:
            notes.append(
                f"queries with fewer than {DEPTH} judged rows, whose top {DEPTH} is all they have: {short:,} of "
                f"{groups:,}"
            )
        without_relevant = int(np.isnan(judged.ranking.ndcg).sum())
        flat = int(np.isnan(judged.ranking.tau).sum())
        if without_relevant:
            notes.append(f"queries without a relevant document, left out of nDCG: {without_relevant:,}")
        if flat:
            notes.append(f"queries with equal scores or equal grades throughout, left out of Kendall tau: {flat:,}")
    if judged.passes:
        lacking = rows - next(iter(judged.passes.values())).over
        if lacking:
            notes.append(f"judged labels without samples, left out of pass@k: {lacking:,}")
    if groups < 2:
        notes.append("one query or row alone: there is nothing to resample, so no intervals")
    elif judged.queries is not None and groups < FEW_QUERIES:
        notes.append(f"{groups} queries: intervals over so few are too narrow to rely on; judge {FEW_QUERIES} or more")
    for metric in QUERY_METRICS:
        lacking = groups - metrics.over(metric.name) if metric.name in metrics.values else 0
        if lacking:
            notes.append(f"queries without a value, left out of {metric.title}: {lacking:,}")
    return notes


# ------------------------------------------------------------------------------
# Two sets of labels by the same gold, and the difference of their figures.


@dataclass(frozen=True)
class BothByGold:
    """Teacher and student by gold, over the matched rows that are judged; student minus teacher."""

    teacher: Evaluation
    student: Evaluation
    difference: dict[str, Difference]


def evaluate_both(
    first: Judged, second: Judged, *, resamples: int = 1000, seed: int = 7, pass_at: Sequence[int] = ()
) -> BothByGold:
    """Judge two label sets of the same rows: the figures of each, and second minus first with the interval of a paired
    bootstrap.

    An AUC by distributions and one by written grades are not subtracted: they are not the same figure.

    Args:
        first, second: the same rows in the same order, so that gold grades and queries are equal.
        pass_at: see `evaluate`; of the sets that have samples.
    """
    (ours, theirs), drawn = _evaluated([first, second], resamples, seed, pass_at)
    differences = Figures[Difference]()
    are_all_alike = True
    for name, our_figure in ours.figures.items():
        their_figure = theirs.figures.get(name)
        if their_figure is None:
            continue
        if our_figure.is_by_grade != their_figure.is_by_grade:
            are_all_alike = False
            continue
        low, high = interval_of(drawn[1, name] - drawn[0, name]) if drawn else NOTHING_DRAWN
        step = None
        if our_figure.value is not None and their_figure.value is not None:
            step = their_figure.value - our_figure.value
        differences[name] = Difference(step, finite(low), finite(high))
    if not are_all_alike:
        theirs.notes.append("one set's AUC is by distributions, the other's by written grades: they are not subtracted")
    return BothByGold(ours, theirs, differences)


# ------------------------------------------------------------------------------
# Gates: what a figure must reach before work goes on, as a spec (`macro_f1: ">=0.9*teacher"`) or a flag has it.
# `parse_gate(name, text)` reads one, `judge_gate(gate, figures, teacher)` holds it against figures. A figure that
# falls short raises nothing: the caller keeps what was made, shows the verdict and ends with exit code 5.


TEACHER = "teacher"
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_BOUND = re.compile(
    rf"(?P<sign>>=|<=|>|<)\s*(?:(?P<number>{_NUMBER})\s*(?:\*\s*(?P<times>{TEACHER}))?|(?P<plain>{TEACHER}))"
)
_FLAG = re.compile(r"(?P<name>[^<>=\s]+)\s*(?P<bound>[<>].*)")


@dataclass(frozen=True)
class Gate:
    """A figure and its bound.

    Args:
        name: the figure as it was written.
        figure: its own name.
        text: the bound as it was written.
        sign: `>=`, `<=`, `>` or `<`.
        number: the bound, or what the teacher's figure is multiplied by.
        is_of_teacher: the bound is `number` times the teacher's figure.
    """

    name: str
    figure: str
    text: str
    sign: str
    number: float
    is_of_teacher: bool


@dataclass(frozen=True)
class GateVerdict:
    """The outcome of a gate.

    Args:
        value, bound: the figure and what it was compared with; None where one is undefined, which never passes.
        has_passed: whether it holds, for the value itself.
        interval: 95 % interval of the value, for a reader; None where the caller knows none.
    """

    gate: str
    figure: str
    value: float | None
    bound: float | None
    has_passed: bool
    interval: list[float] | None = field(default=None, kw_only=True, metadata=LEFT_OUT)

    def __str__(self) -> str:
        value, bound = ("undefined" if number is None else f"{number:.4f}" for number in (self.value, self.bound))
        if self.interval is not None:
            low, high = self.interval
            value += f" ({low:.4f} to {high:.4f})"
        return f"{self.gate}: {'passed' if self.has_passed else 'refused'}, {self.figure} is {value}, the bound {bound}"


def parse_gate(name: str, text: str) -> Gate:
    """Read a gate.

    Args:
        name: a figure of `relabel evaluate`, or one of a metric's `aliases`.
        text: a sign and a bound: `>=0.62`, `<0.1`, `>=0.9*teacher`, `>=teacher`.
    Raises:
        ConfigError: it is not that.
    """
    found = _BOUND.fullmatch(text.strip())
    sign, written, times, plain = found.group("sign", "number", "times", "plain") if found else ("", None, None, None)
    number = 1.0 if written is None else float(written)
    if not sign or not name or not math.isfinite(number):
        raise ConfigError(
            f'require: `{name}: "{text}"` is no gate. Write a sign and a bound, for instance ">=0.62" or '
            f'">=0.9*{TEACHER}".'
        )
    figure = next((metric.name for metric in METRICS if name in metric.aliases), name)
    return Gate(
        name=name,
        figure=figure,
        text=text.strip(),
        sign=sign,
        number=number,
        is_of_teacher=bool(times or plain),
    )


def parse_gates(require: Mapping[str, str]) -> list[Gate]:
    """The gates of a spec's `require`, in its order.

    Raises:
        ConfigError: see `parse_gate`.
    """
    return [parse_gate(name, text) for name, text in require.items()]


def parse_flag(text: str) -> Gate:
    """A gate in one piece, `macro_f1>=0.9*teacher`.

    Raises:
        UsageError: it is none.
    """
    found = _FLAG.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--require {text}: write a figure, a sign and a bound, for instance --require 'macro_f1>=0.9*{TEACHER}'"
        )
    try:
        return parse_gate(*found.group("name", "bound"))
    except ConfigError as exc:
        raise UsageError(
            f"--require {text}: the bound `{found['bound']}` is neither a number nor a number times `{TEACHER}`."
        ) from exc


def judge_gate(
    gate: Gate, figures: Mapping[str, float | None], teacher: Mapping[str, float | None] | None
) -> GateVerdict:
    """Hold a gate against figures.

    Args:
        figures: by name; None where a figure is undefined.
        teacher: the same of the teacher; None where there is no teacher.
    Raises:
        ConfigError: no such figure (names the nearest), or the gate names a teacher that is not there.
    """
    if gate.figure not in figures:
        hint = nearest(gate.figure, list(figures))
        raise ConfigError(
            f"require: no figure `{gate.name}`; known are {', '.join(figures)}."
            + (f" Did you mean `{hint}`?" if hint else "")
        )
    if gate.is_of_teacher and teacher is None:
        raise ConfigError(
            f"require: `{gate.name}{gate.text}` needs the teacher's figure, and there is no teacher here to compare "
            "with."
        )
    value = figures[gate.figure]
    unit = 1.0 if teacher is None or not gate.is_of_teacher else teacher.get(gate.figure)
    bound = None if unit is None else gate.number * unit
    has_passed = value is not None and bound is not None and _COMPARE[gate.sign](value, bound)
    return GateVerdict(
        f"{gate.name}{gate.text}",
        gate.figure,
        value,
        bound,
        has_passed,
    )


def judge_gates(
    gates: Sequence[Gate], figures: Mapping[str, float | None], teacher: Mapping[str, float | None] | None
) -> list[GateVerdict]:
    """`judge_gate` for each."""
    return [judge_gate(gate, figures, teacher) for gate in gates]
