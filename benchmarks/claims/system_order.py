"""A4: the order of systems survives an LLM judge (arXiv:2411.08275: UMBRELA and humans over 77 runs)."""

from math import sqrt
from pathlib import Path

import numpy as np

from benchmarks.claims.judges import NEWER_JUDGES
from benchmarks.claims.page import (
    POWER,
    SHOWN,
    Claim,
    Figure,
    Row,
    draw_intervals,
    figure_by_deviation,
    smallest,
    verdict,
)
from benchmarks.claims.rankings import Judged, judged, kept, tau

LINE = 0.95
"""Of the pairs that differ, the judge should have so many in the humans' order."""


def claim(folder: Path) -> Claim:
    """Kendall's tau, and pairs in the same order."""
    lexical = judged(folder, "lexical")
    taus = [figure_by_deviation(f"tau {one.name}", tau_of(one), tau_of_resamples(one), ".2f") for one in lexical]
    kept_lexical = mean_kept("lexical", lexical)
    kept_foreign = mean_kept("foreign", judged(folder, "foreign"))
    kept_own = mean_kept("own", judged(folder, "own"))
    effect = smallest(np.mean([kept_of_resamples(one) for one in lexical], axis=0))
    return Claim(
        name="system-order",
        title="The order of systems survives an LLM judge",
        source="arXiv:2411.08275",
        answer=f"Of systems that differ, a judge has {kept_lexical.value:.0%} of lexical pairs in the humans' order, "
        f"{kept_foreign.value:.0%} of pairs of other judges' rankings, and {kept_own.value:.0%} of pairs with its own.",
        here=verdict(kept_lexical, LINE),
        there=SHOWN,
        n=Row("n", "29 runs of judges, 114 queries, 22 lexical systems", "one judge, 77 runs of 19 teams"),
        headline=Row("pairs in the humans' order, lexical systems", kept_lexical, "“correlate highly”, by τ"),
        smallest=Row(
            "smallest difference of that share that n could show · smallest τ",
            (Figure("smallest", effect), Figure("smallest tau", smallest_tau(22), form=".2f")),
            f"τ of {paper_tau()}",
        ),
        rows=[
            Row("the same, rankings by other judges and BM25", kept_foreign),
            Row("the same, the judge's own ranking and one of those", kept_own),
            *(by_year(year, lexical) for year in ("dl19", "dl20", "dl21")),
            *(of_gpt4(one) for one in taus if one.name.endswith("umbrela_zeroshot_gpt-4")),
        ],
        how="Pairs count whose mean nDCG@10 differs by .02 or more for humans; the line is 95 % of the lexical "
        "ones. Systems are rankings of the judged pools: BM25 in 16 settings and six simpler scores, so "
        "neighbours are closer than the runs of a track, and τ is lower. A judge's own ranking has passages "
        "by its grades, so that it finds none better: it cannot judge itself, and a few human grades are [the "
        "remedy](few-humans.md). The smallest τ is that of independent rankings.",
        gpu=NEWER_JUDGES,
        draw=lambda axes: draw_intervals(axes, taus, 0, "Kendall's τ of 22 lexical systems, by judge"),
        drawn=taus,
    )


def mean_kept(kind: str, found: list[Judged]) -> Figure:
    """Pairs in the same order, mean of the judges that have any which differ."""
    mean = np.nanmean([kept_of(one) for one in found])
    mean_R = np.nanmean([kept_of_resamples(one) for one in found], axis=0)
    return figure_by_deviation(f"kept {kind}", mean, mean_R)


def by_year(year: str, lexical: list[Judged]) -> Row:
    """Mean tau of a year's judges."""
    held = [one for one in lexical if one.name.startswith(year)]
    mean_R = np.mean([tau_of_resamples(one) for one in held], axis=0)
    mean = figure_by_deviation(f"mean tau {year}", np.mean([tau_of(one) for one in held]), mean_R, ".2f")
    return Row(f"Kendall's τ, lexical systems, mean of {len(held)} runs of {year.replace('dl', 'DL 20')}", mean)


def of_gpt4(found: Figure) -> Row:
    """Tau of the paper's prompt with GPT-4."""
    return Row(f"the same of UMBRELA with GPT-4, {found.name[4:8].replace('dl', 'DL 20')}", found, "“correlate highly”")


def smallest_tau(num_systems: int) -> float:
    """From the standard error of Kendall's tau of independent rankings."""
    return POWER * sqrt(2 * (2 * num_systems + 5) / (9 * num_systems * (num_systems - 1)))


def paper_tau() -> str:
    """That of the paper's 77 runs."""
    return f"{smallest_tau(77):.2f}"


def tau_of(one: Judged) -> float:
    """Over all queries."""
    return float(tau(one.humans, one.judge))


def tau_of_resamples(one: Judged) -> np.ndarray:
    """Of each resample."""
    return tau(one.humans_resampled, one.judge_resampled)


def kept_of(one: Judged) -> float:
    """Over all queries."""
    return float(kept(one.humans, one.judge))


def kept_of_resamples(one: Judged) -> np.ndarray:
    """Of each resample."""
    return kept(one.humans_resampled, one.judge_resampled)
