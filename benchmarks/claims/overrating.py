"""A3: LLM judges overrate, they call more passages relevant than humans do."""

from pathlib import Path

import numpy as np

from benchmarks.claims.judges import NEWER_JUDGES, RELEVANT, JudgeYear, OfRuns, judge_years, num_queries, of_runs
from benchmarks.claims.page import NO_EFFECT, NO_N, Claim, Row, draw_intervals, figure, verdict


def claim(folder: Path) -> Claim:
    """The share of judge-years with more relevant passages than the humans have."""
    years = list(judge_years(folder))
    ratios = of_runs("ratio", years, ratio_of, ".2f")
    share = ratios.share_above("share", 1)
    return Claim(
        name="overrating",
        title="LLM judges overrate",
        source="arXiv:2411.08275, 2501.17969",
        answer=f"LLM judges call more passages relevant than humans do: {(ratios.values > 1).sum()} of {len(years)} "
        "published runs.",
        here=verdict(share, 0.5),
        there=NO_N,
        n=Row("n", f"{len(years)} runs of judges, {num_queries(years)} queries", "one judge; nine judges"),
        headline=Row("runs with more relevant passages than humans have", share, "“stricter” humans, in words"),
        smallest=Row("smallest excess that n could show, median of runs", ratios.smallest(".2f"), NO_EFFECT),
        rows=[
            Row(
                "interval of the ratio above 1, below 1",
                f"{ratios.num_above(1)}, {ratios.num_below(1)} of {len(years)}",
                "no intervals",
            ),
            *(by_year(name, years, ratios) for name in sorted({one.year for one in years})),
        ],
        how="Relevant is grade 2 and more for humans and for judges of grades 0 to 3, 1 for yes and no, 4 and "
        "more of 0 to 5. The line is one half of the runs. Passages are those of TREC's pools. Several runs are of "
        "one model, so runs are no independent sample.",
        gpu=NEWER_JUDGES,
        draw=lambda axes: draw_intervals(
            axes, ratios.figures, 1, "passages that the judge calls relevant, humans = 1, by run"
        ),
        drawn=ratios.figures,
    )


def by_year(name: str, years: list[JudgeYear], ratios: OfRuns) -> Row:
    """The mean ratio of a year's judges."""
    is_own = np.array([one.year == name for one in years])
    mean_R = ratios.resamples[is_own].mean(0)
    what = f"times as many, mean of {is_own.sum()} runs of {name.replace('dl', 'DL 20')}"
    return Row(what, figure(f"mean ratio {name}", ratios.values[is_own].mean(), mean_R, ".2f"))


def ratio_of(year: JudgeYear, count_XHJ: np.ndarray) -> np.ndarray:
    """Relevant passages by the judge, over those by humans, of the pairs that the judge saw."""
    by_judge_X = count_XHJ[..., RELEVANT[year.scale] :].sum((-1, -2))
    by_human_X = count_XHJ[..., 2:, :].sum((-1, -2))
    return by_judge_X / by_human_X
