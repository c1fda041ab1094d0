"""A3: LLM judges overrate, they call more passages relevant than humans do."""

from pathlib import Path

import numpy as np

from benchmarks.claims.judges import RELEVANT, JudgeYear, judge_years, num_queries
from benchmarks.claims.page import NO_N, Claim, Figure, Row, draw_intervals, figure, smallest, verdict


def claim(folder: Path) -> Claim:
    """The share of judge-years with more relevant passages than the humans have."""
    years = list(judge_years(folder))
    ratios = []
    smallests = []
    is_over = []
    is_over_R = []
    for year in years:
        ratio = ratio_of(year, year.counts)
        ratio_R = ratio_of(year, year.resampled)
        ratios.append(figure(f"ratio {year.name}", ratio, ratio_R, ".2f"))
        smallests.append(smallest(ratio_R))
        is_over.append(ratio > 1)
        is_over_R.append(ratio_R > 1)
    share = figure("share", np.mean(is_over), np.mean(is_over_R, axis=0), ".2f")
    apart = sum(one.low > 1 for one in ratios)
    under = sum(one.high < 1 for one in ratios)
    return Claim(
        name="overrating",
        title="LLM judges overrate",
        source="arXiv:2411.08275, 2501.17969",
        answer=f"LLM judges call more passages relevant than humans do: {sum(is_over)} of {len(years)} published runs.",
        here=verdict(share, 0.5),
        there=NO_N,
        headline=share,
        rows=[
            Row("n", f"{len(years)} runs of judges, {num_queries(years)} queries", "one judge; nine judges"),
            Row("runs with more relevant passages than humans have", share, "“stricter” humans, in words"),
            Row("interval of the ratio above 1, below 1", f"{apart}, {under} of {len(years)}", "no intervals"),
            *(by_year(name, years) for name in sorted({one.year for one in years})),
            Row(
                "smallest excess that n could show, median", Figure("smallest", float(np.median(smallests)), form=".2f")
            ),
        ],
        how="Relevant is grade 2 and more for humans and for judges of grades 0 to 3, 1 for yes and no, 4 and "
        "more of 0 to 5. Passages are those of TREC's pools. Several runs are of one model, so runs are no "
        "independent sample.",
        draw=lambda axes: draw_intervals(axes, ratios, 1, "passages that the judge calls relevant, humans = 1, by run"),
        drawn=ratios,
    )


def by_year(name: str, years: list[JudgeYear]) -> Row:
    """The mean ratio of a year's judges."""
    held = [one for one in years if one.year == name]
    mean = np.mean([ratio_of(one, one.counts) for one in held])
    mean_R = np.mean([ratio_of(one, one.resampled) for one in held], axis=0)
    what = f"times as many, mean of {len(held)} runs of {name.replace('dl', 'DL 20')}"
    return Row(what, figure(f"mean ratio {name}", mean, mean_R, ".2f"))


def ratio_of(year: JudgeYear, count_XHJ: np.ndarray) -> np.ndarray:
    """Relevant passages by the judge, over those by humans, of the pairs that the judge saw."""
    by_judge_X = count_XHJ[..., RELEVANT[year.scale] :].sum((-1, -2))
    by_human_X = count_XHJ[..., 2:, :].sum((-1, -2))
    return by_judge_X / by_human_X
