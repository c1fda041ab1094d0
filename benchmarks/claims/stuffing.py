"""A7: judges call irrelevant passages relevant more often where they hold the query's words (after arXiv:2501.17969,
which puts them there; here nobody did). A student of each judge is asked the same.

The rule for students, set before their first run. For each judge of DL 2019 (of DL 2020, too, at first: cut for its CPU
time before any figure was seen), queries are split into five parts. A ridge regression learns from four parts which
passages the judge calls relevant, and scores the fifth. Its features are |u - v| and u * v of MiniLM-L6's vectors of
query and passage (64 tokens, not trained, as in `benchmarks/grow.py`), each with mean 0 and deviation 1 over the year's
pairs; the penalty is 10,000. The student calls as many passages relevant as its judge does, those with the highest
scores. It is fooled by words if the interval of its rise is above 0, and less than its judge if the interval of the
difference of the rises is below 0. Nothing else was tried. Students are not trained again on resamples, so intervals
are over queries that are asked, not over those that are learned from.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.judges import RELEVANT
from benchmarks.claims.page import COLOURS, NO_EFFECT, NO_N, Claim, Figure, Row, figure, resampled, smallest, verdict
from benchmarks.grow import frozen_features

# Q queries of a year, B bins of overlap, R resamples, N pairs of a year, L pairs of a judge, F features, X any axes

YEARS = {"dl19": "trec_dl19", "dl20": "trec_dl20", "dl21": "trec_dl21", "dl23": "llmjudge_dl23"}
TAUGHT_YEAR = "dl19"
NUM_PARTS = 5
PENALTY = 1e4
SEED = 7
EDGES = (0.25, 0.5, 0.75, 1.0)
BINS = ("less than a quarter", "a quarter to a half", "a half to three quarters", "three quarters or more", "all")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Fooled:
    """One judge of a year, over passages that humans grade 0.

    Args:
        seen, called: passages by query and bin, and those that the judge calls relevant, float64 [Q, B].
        resamples: how often each query is in each resample, [R, Q].
    """

    name: str
    seen: np.ndarray
    called: np.ndarray
    resamples: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """Of each bin, [B]."""
        return self.called.sum(0) / self.seen.sum(0)

    @property
    def shares_resampled(self) -> np.ndarray:
        """Of each resample and bin, [R, B]; NaN where it has none."""
        seen_RB = self.resamples @ self.seen
        return (self.resamples @ self.called) / np.where(seen_RB > 0, seen_RB, np.nan)


def claim(folder: Path) -> Claim:
    """The share called relevant by overlap, by judges and by their students."""
    years = [load_year(folder, year) for year in YEARS]
    found = [fooled(year, judge, judge.is_called) for year in years for judge in year.judges]
    shares_B = np.mean([one.shares for one in found], axis=0)
    shares_RB = np.mean([one.shares_resampled for one in found], axis=0)
    bins = [figure(name, shares_B[place], shares_RB[:, place]) for place, name in enumerate(BINS)]
    rise = figure("rise", rise_of(shares_B), rise_of(shares_RB))
    rises = [figure(f"rise {one.name}", rise_of(one.shares), rise_of(one.shares_resampled)) for one in found]
    apart = sum(one.low is not None and one.low > 0 for one in rises)
    taught = [one for one in found if one.name.startswith(TAUGHT_YEAR)]
    students = [student for year in years if year.name == TAUGHT_YEAR for student in students_of(year)]
    students_B = np.mean([one.shares for one in students], axis=0)
    return Claim(
        name="stuffing",
        title="Judges call irrelevant passages relevant more often where they hold the query's words",
        source="arXiv:2501.17969",
        answer=f"Of passages that humans call irrelevant, judges call {shares_B[-1]:.0%} relevant if all words of the "
        f"query are in them, and {shares_B[0]:.0%} if less than a quarter are. Nobody put the words there, so that "
        "they are the cause is not shown.",
        here=verdict(rise, 0),
        there=NO_N,
        n=Row(
            "n",
            f"{len(found)} runs of judges, {num_passages(folder):,} irrelevant passages",
            "9 models, words injected",
        ),
        headline=Row("called relevant, all words of the query in them less under a quarter", rise, "in words"),
        smallest=Row(
            "smallest rise that n could show",
            Figure("smallest", smallest(rise_of(shares_RB))),
            NO_EFFECT,
        ),
        rows=[
            *(Row(f"called relevant, words of the query in them: {one.name}", one) for one in bins),
            Row("runs whose interval of the rise is above 0", f"{apart} of {len(rises)}"),
            Row(f"the rise of the {len(taught)} runs of DL 2019", mean_rise("rise taught", taught)),
            Row("the rise of their students, frozen MiniLM", mean_rise("rise students", students)),
            Row("students less judges", mean_difference(students, taught)),
            Row(
                "called relevant by students, by bin",
                [Figure(f"student {name}", share) for name, share in zip(BINS, students_B, strict=True)],
            ),
        ],
        how="Words are compared in lower case, function words included; relevant is as in "
        "[overrating](overrating.md). The line is 0. The paper injects words into passages; here nobody did, so "
        "“holds” is about a difference between passages, not about an attack. Passages with more of the words may "
        "also be closer to the subject than the human's grade 0 shows. What words alone do to a judge, an "
        "[audit](../audit.md) asks: it puts them there. A student is a ridge regression on frozen vectors, learns from "
        "its judge's labels of other queries, and calls as many passages relevant as its judge.",
        gpu="newer judges, and students that are trained whole: `umbrela`, then `relabel distill`",
        draw=lambda axes: draw(axes, found, shares_B, students_B),
        drawn=rises,
    )


# ------------------------------------------------------------------------------
# Judges.


@dataclass(frozen=True)
class Judge:
    """The labels of one judge.

    Args:
        pair: place of each label's pair in the year, int [L].
        is_called: whether the judge calls it relevant, [L].
    """

    name: str
    pair: np.ndarray
    is_called: np.ndarray


@dataclass(frozen=True)
class Year:
    """The pairs of a year that any judge labelled.

    Args:
        pairs: columns query_id, query and body, N rows.
        query: place of each pair's query among the sorted ones, int [N].
        bin: of overlap, int [N].
        is_irrelevant: for humans, [N].
    """

    name: str
    pairs: pl.DataFrame
    query: np.ndarray
    bin: np.ndarray
    is_irrelevant: np.ndarray
    judges: list[Judge]


def load_year(folder: Path, name: str) -> Year:
    """Passages and judges."""
    keys = ["query_id", "doc_id"]
    rows = pl.read_parquet(folder / "llm_labels" / "llm_labels.parquet").filter(pl.col("dataset") == name)
    human = rows.unique(keys, keep="first", maintain_order=True).select(*keys, "human_grade")
    passages = pl.read_parquet(folder / YEARS[name] / "pairs.parquet").unique(keys, keep="first", maintain_order=True)
    passages = passages.select(*keys, "query", body=pl.col("body").fill_null(""))
    pairs = passages.join(human, on=keys).sort(keys).with_row_index("pair")
    rows = rows.join(pairs.select(*keys, "pair"), on=keys)
    rows = rows.with_columns(grade=pl.col("llm_label").str.strip_chars(" .").cast(pl.Int64)).sort("judge")
    judges = []
    for (judge, scale), own in rows.group_by("judge", "scale", maintain_order=True):
        is_called = own["grade"].to_numpy() >= RELEVANT[str(scale)]
        judges.append(Judge(f"{name} {judge}", own["pair"].to_numpy().astype(int), is_called))
    return Year(
        name=name,
        pairs=pairs,
        query=pairs["query_id"].rank("dense").to_numpy().astype(int) - 1,
        bin=np.array([bin_of(query, body) for query, body in pairs.select("query", "body").iter_rows()]),
        is_irrelevant=pairs["human_grade"].to_numpy() == 0,
        judges=judges,
    )


def fooled(year: Year, judge: Judge, is_called_L: np.ndarray) -> Fooled:
    """How a judge, or its student, calls the passages that humans grade 0."""
    num_queries = int(year.query.max()) + 1
    is_seen_L = year.is_irrelevant[judge.pair]
    pair = judge.pair[is_seen_L]
    place = (year.query[pair], year.bin[pair])
    seen = np.zeros((num_queries, len(BINS)))
    called = np.zeros((num_queries, len(BINS)))
    np.add.at(seen, place, 1)
    np.add.at(called, place, is_called_L[is_seen_L])
    return Fooled(judge.name, seen, called, resampled(year.name, num_queries))


def bin_of(query: str, body: str) -> int:
    """The place in `BINS` of a passage."""
    asked = set(_WORD.findall(query.lower()))
    held = asked & set(_WORD.findall(body.lower()))
    return sum(len(held) / len(asked) >= edge for edge in EDGES)


def rise_of(share_XB: np.ndarray) -> np.ndarray:
    """The last bin's share less the first one's, [X]."""
    return share_XB[..., -1] - share_XB[..., 0]


def mean_rise(name: str, found: list[Fooled]) -> Figure:
    """Mean of judges."""
    values = [rise_of(one.shares) for one in found]
    return figure(name, np.mean(values), np.mean([rise_of(one.shares_resampled) for one in found], axis=0))


def mean_difference(students: list[Fooled], judges: list[Fooled]) -> Figure:
    """Each student's rise less that of its judge, mean."""
    differences = []
    differences_R = []
    for student, judge in zip(students, judges, strict=True):
        assert student.name == judge.name
        differences.append(rise_of(student.shares) - rise_of(judge.shares))
        differences_R.append(rise_of(student.shares_resampled) - rise_of(judge.shares_resampled))
    return figure("students less judges", np.mean(differences), np.mean(differences_R, axis=0), "+.3f")


# ------------------------------------------------------------------------------
# Students.


def students_of(year: Year) -> Iterator[Fooled]:
    """The student of each judge of a year."""
    feature_NF = frozen_features(year.pairs.select("query", title="body")).astype(np.float64)
    feature_NF -= feature_NF.mean(0)
    scale_F = feature_NF.std(0)
    feature_NF /= np.where(scale_F > 0, scale_F, 1.0)  # u * v is 0 throughout in two of MiniLM's dimensions
    num_queries = int(year.query.max()) + 1
    part_Q = np.random.default_rng(SEED).permutation(num_queries) % NUM_PARTS
    for judge in year.judges:
        score_L = held_out_scores(feature_NF[judge.pair], judge.is_called, part_Q[year.query[judge.pair]])
        order_L = np.argsort(-score_L, kind="stable")
        is_called_L = np.zeros(len(score_L), dtype=bool)
        is_called_L[order_L[: judge.is_called.sum()]] = True
        yield fooled(year, judge, is_called_L)


def held_out_scores(feature_LF: np.ndarray, is_called_L: np.ndarray, part_L: np.ndarray) -> np.ndarray:
    """Ridge regression with an intercept: each part's scores by what the other parts teach, float64 [L]."""
    score_L = np.empty(len(part_L))
    for part in range(NUM_PARTS):
        is_held = part_L == part
        learned_LF = feature_LF[~is_held]
        mean_F = learned_LF.mean(0)
        target_L = is_called_L[~is_held].astype(float)
        centred_LF = learned_LF - mean_F
        inner_FF = centred_LF.T @ centred_LF + PENALTY * np.eye(len(mean_F))
        weight_F = np.linalg.solve(inner_FF, centred_LF.T @ (target_L - target_L.mean()))
        score_L[is_held] = target_L.mean() + (feature_LF[is_held] - mean_F) @ weight_F
    return score_L


# ------------------------------------------------------------------------------


def num_passages(folder: Path) -> int:
    """Of those that humans call irrelevant and some judge labelled."""
    rows = pl.read_parquet(folder / "llm_labels" / "llm_labels.parquet").filter(pl.col("human_grade") == 0)
    return rows.select("dataset", "query_id", "doc_id").unique().height


def draw(axes: Any, found: list[Fooled], shares_B: np.ndarray, students_B: np.ndarray) -> None:
    """A line a judge, their mean, and the students' mean."""
    for one in found:
        axes.plot(range(len(BINS)), one.shares, color=COLOURS[3], linewidth=0.6)
    axes.plot(range(len(BINS)), shares_B, "o-", color=COLOURS[0], linewidth=2, label="judges, mean")
    axes.plot(range(len(BINS)), students_B, "s--", color=COLOURS[1], label="students of DL 2019, mean")
    axes.legend(frameon=False, loc="upper left")
    axes.set(xlabel="share of the query's words in the passage", ylabel="called relevant, of irrelevant")
    axes.set_xticks(range(len(BINS)), ("< 1/4", "1/4 to 1/2", "1/2 to 3/4", "≥ 3/4", "all"))
