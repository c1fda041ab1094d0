"""A5: a few human judgments make a judge's figures safe (arXiv:2407.02464, prediction-powered inference)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claims.judges import NEWER_JUDGES
from benchmarks.claims.page import (
    COLOURS,
    NO_EFFECT,
    NO_N,
    POWER,
    RESAMPLES,
    Claim,
    Figure,
    Row,
    figure,
    resampled,
    verdict,
)
from benchmarks.claims.rankings import ROUNDING, collections, difference
from benchmarks.systems_coverage import NDCG, Collection, drawn
from relabel.manifests.metrics.prediction_powered import FEWEST_TO_FIT, plain_mean, powered_mean

# R draws of queries, P pairs of systems, Q queries, G queries that humans judged

GOLD = (5, 10, 20)
LINE = 0.94
"""A hundredth below the promised .95, which Student's t does not hold on these pairs even by humans alone."""
SEED = 7
NUM_PAIRS = 60
"""Of a judge, drawn from those of the lexical systems."""


@dataclass(frozen=True)
class Draws:
    """Of each draw, a mean over judges and pairs, [R].

    Args:
        covered, by_humans: the share of intervals that hold the truth, by judge and humans, and by humans alone.
        normal: the first, with a normal quantile and the judge's weight 1.
        width, width_of_humans: of the intervals.
    """

    covered: np.ndarray
    by_humans: np.ndarray
    normal: np.ndarray
    width: np.ndarray
    width_of_humans: np.ndarray


@dataclass(frozen=True)
class AtGold:
    """What some number of human queries gives; the width has that by humans alone as 1."""

    gold: int
    covered: Figure
    by_humans: Figure
    normal: Figure
    width: Figure


def claim(folder: Path) -> Claim:
    """Coverage and width with 5, 10 and 20 human queries."""
    found = [at_gold(folder, gold) for gold in GOLD]
    ten = found[1]
    alone = [one.by_humans.value for one in found]
    return Claim(
        name="few-humans",
        title="A few human queries make a judge's figures safe",
        source="arXiv:2407.02464",
        answer=f"With ten queries judged by humans, the 95 % interval of a comparison holds the truth in "
        f"{ten.covered.value:.1%} of cases and is {1 - ten.width.value:.0%} narrower than by these humans alone.",
        here=verdict(ten.covered, LINE),
        there=NO_N,
        n=Row("n", "29 runs of judges, 114 queries, 60 pairs of systems each, 1,000 draws", "in plots"),
        headline=Row("10 human queries: intervals that hold the truth", ten.covered, "in plots"),
        smallest=Row(
            "smallest shortfall that n could show, 10 human queries",
            Figure("smallest", shortfall(ten.covered)),
            NO_EFFECT,
        ),
        rows=[
            *(Row(f"{one.gold}: the same", one.covered) for one in found if one is not ten),
            *(Row(f"{one.gold}: the same, normal quantile and weight 1", one.normal) for one in found),
            *(Row(f"{one.gold}: the same, humans alone", one.by_humans) for one in found),
            *(Row(f"{one.gold}: width, humans alone = 1", one.width) for one in found),
        ],
        how="A draw takes as many queries of a year as it has, with replacement; humans judged the first 5, 10 or "
        "20 of them. Pairs are of lexical systems, the figure is the difference in nDCG@10, the truth its "
        "mean over all queries. Intervals on this page are over draws. The line is .94, a hundredth below "
        f"the promised .95, which Student's t does not hold here even by humans alone ({min(alone):.3f} to "
        f"{max(alone):.3f}). At a line of .95 the claim could not be shown. A normal quantile is what "
        "prediction-powered inference was published with (arXiv:2301.09633); relabel takes Student's t.",
        gpu=NEWER_JUDGES,
        draw=lambda axes: draw(axes, found),
    )


def at_gold(folder: Path, gold: int) -> AtGold:
    """Means over draws, with intervals."""
    judges = [one for collection in collections(folder) for one in of_judges(collection, gold)]
    covered_R = np.mean([one.covered for one in judges], axis=0)
    by_humans_R = np.mean([one.by_humans for one in judges], axis=0)
    normal_R = np.mean([one.normal for one in judges], axis=0)
    width_R = np.mean([one.width for one in judges], axis=0)
    width_of_humans_R = np.mean([one.width_of_humans for one in judges], axis=0)
    weight_RR = resampled(f"draws {gold}", RESAMPLES) / RESAMPLES
    ratio = width_R.mean() / width_of_humans_R.mean()
    ratio_R = (weight_RR @ width_R) / (weight_RR @ width_of_humans_R)
    return AtGold(
        gold=gold,
        covered=figure(f"covered {gold}", covered_R.mean(), weight_RR @ covered_R),
        by_humans=figure(f"covered by humans {gold}", by_humans_R.mean(), weight_RR @ by_humans_R),
        normal=figure(f"covered normal {gold}", normal_R.mean(), weight_RR @ normal_R),
        width=figure(f"width {gold}", ratio, ratio_R, ".2f"),
    )


def of_judges(collection: Collection, gold: int) -> list[Draws]:
    """The draws of a year, by judge."""
    draw_RQ = drawn(collection, RESAMPLES, SEED)
    chooser = np.random.default_rng(SEED)
    found = []
    for judge in collection.judges:
        pairs = np.array(collection.pairs("lexical", judge))
        pairs = pairs[np.sort(chooser.permutation(len(pairs))[:NUM_PAIRS])]
        human_PQ = difference(collection.figures["human"][NDCG], pairs)
        judge_PQ = difference(collection.figures[judge][NDCG], pairs)
        found.append(draws_of(human_PQ, judge_PQ, draw_RQ, gold))
    return found


def draws_of(human_PQ: np.ndarray, judge_PQ: np.ndarray, draw_RQ: np.ndarray, gold: int) -> Draws:
    """Intervals of all pairs in all draws."""
    truth_P1 = human_PQ.mean(1, keepdims=True)
    human_PRG = human_PQ[:, draw_RQ[:, :gold]]
    judge_PRG = judge_PQ[:, draw_RQ[:, :gold]]
    other_PRQ = judge_PQ[:, draw_RQ[:, gold:]]
    both = powered_mean(human_PRG, judge_PRG, other_PRQ, is_fitted=gold >= FEWEST_TO_FIT)
    humans = plain_mean(human_PRG)
    value_PR = (human_PRG - judge_PRG).mean(-1) + other_PRQ.mean(-1)
    of_gold_PR = (human_PRG - judge_PRG).var(-1, ddof=1) / gold
    half_PR = 1.96 * np.sqrt(of_gold_PR + other_PRQ.var(-1, ddof=1) / other_PRQ.shape[-1])
    return Draws(
        covered=holds(both.low, both.high, truth_P1),
        by_humans=holds(humans.low, humans.high, truth_P1),
        normal=holds(value_PR - half_PR, value_PR + half_PR, truth_P1),
        width=(both.high - both.low).mean(0),
        width_of_humans=(humans.high - humans.low).mean(0),
    )


def holds(low_PR: np.ndarray, high_PR: np.ndarray, truth_P1: np.ndarray) -> np.ndarray:
    """The share of pairs whose interval holds the truth, [R]."""
    return ((low_PR <= truth_P1 + ROUNDING) & (truth_P1 - ROUNDING <= high_PR)).mean(0)


def shortfall(found: Figure) -> float:
    """By the width of the interval."""
    assert found.low is not None
    assert found.high is not None
    return POWER * (found.high - found.low) / (2 * 1.96)


def draw(axes: Any, found: list[AtGold]) -> None:
    """Coverage by number of human queries, and the promise."""
    gold = [one.gold for one in found]
    axes.axhline(0.95, color=COLOURS[1], linewidth=1)
    axes.plot(gold, [one.covered.value for one in found], "o-", color=COLOURS[0], label="judge and humans, t")
    axes.plot(gold, [one.normal.value for one in found], "o-", color=COLOURS[2], label="judge and humans, normal")
    axes.plot(gold, [one.by_humans.value for one in found], "o--", color=COLOURS[3], label="humans alone")
    axes.set(xlabel="queries judged by humans", ylabel="intervals that hold the truth", xticks=gold, ylim=(0.8, 1))
    axes.legend(frameon=False, loc="lower right")
