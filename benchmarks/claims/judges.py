"""Published LLM judges next to the humans of TREC DL 2019 to 2023, counted by query.

Letters: Y judge-years, Q queries of a year, H the human's grade 0 to 3, J the judge's grade 0 to 5, R resamples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.claims.page import Figure, figure, resampled, smallest

RELEVANT = {"0-3": 2, "0-1": 1, "0-5": 4}
"""From this grade on a judge of that scale calls a passage relevant."""


NEWER_JUDGES = "newer judges: `umbrela` on the same pairs, `--set engine.model=…`"
"""What a GPU would add to figures of published runs."""


@dataclass(frozen=True)
class JudgeYear:
    """What one judge said of one year's passages.

    Args:
        of_queries: pairs by query and both grades, float64 [Q, H, J]; a query that the judge did not see has none.
        resamples: how often each query is in each resample, [R, Q].
    """

    year: str
    judge: str
    scale: str
    of_queries: np.ndarray
    resamples: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.year} {self.judge}"

    @property
    def counts(self) -> np.ndarray:
        """Pairs by both grades, [H, J]."""
        return self.of_queries.sum(0)

    @property
    def resampled(self) -> np.ndarray:
        """The same of each resample, [R, H, J]."""
        return np.tensordot(self.resamples, self.of_queries, axes=1)


def judge_years(folder: Path) -> Iterator[JudgeYear]:
    """All of them, by year and judge."""
    grade = pl.col("llm_label").str.strip_chars(" .").cast(pl.Int64)
    rows = pl.read_parquet(folder / "llm_labels" / "llm_labels.parquet").with_columns(grade=grade)
    for (year,), of_year in rows.sort("dataset", "judge").group_by("dataset", maintain_order=True):
        queries = of_year["query_id"].unique().sort()
        weight_RQ = resampled(str(year), len(queries))
        for (judge, scale), own in of_year.group_by("judge", "scale", maintain_order=True):
            count_QHJ = np.zeros((len(queries), 4, 6))
            query = queries.search_sorted(own["query_id"]).to_numpy()
            np.add.at(count_QHJ, (query, own["human_grade"].to_numpy(), own["grade"].to_numpy()), 1)
            yield JudgeYear(str(year), str(judge), str(scale), count_QHJ, weight_RQ)


def four_grades(folder: Path) -> list[JudgeYear]:
    """Judges of grades 0 to 3."""
    return [one for one in judge_years(folder) if one.scale == "0-3"]


def num_queries(years: list[JudgeYear]) -> int:
    """Queries of all years together."""
    return sum({one.year: len(one.of_queries) for one in years}.values())


@dataclass(frozen=True)
class OfRuns:
    """What a measure gives for each judge-year, with intervals.

    Args:
        figures: by judge-year, [Y].
        resamples: the same of each resample, [Y, R].
    """

    figures: list[Figure]
    resamples: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """Without intervals, [Y]."""
        return np.array([one.value for one in self.figures])

    def mean(self, name: str, form: str) -> Figure:
        """Over judge-years."""
        return figure(name, self.values.mean(), self.resamples.mean(0), form)

    def share_above(self, name: str, line: float) -> Figure:
        """Of the judge-years, those above the line."""
        return figure(name, (self.values > line).mean(), (self.resamples > line).mean(0), ".2f")

    def num_above(self, line: float) -> int:
        """Judge-years whose interval is above the line."""
        return sum(one.low is not None and one.low > line for one in self.figures)

    def num_below(self, line: float) -> int:
        """Judge-years whose interval is below the line."""
        return sum(one.high is not None and one.high < line for one in self.figures)

    def median(self, name: str, form: str) -> Figure:
        """Over judge-years, without interval."""
        return Figure(name, float(np.median(self.values)), form=form)

    def smallest(self, form: str) -> Figure:
        """The smallest effect that one judge-year could show, median."""
        return Figure("smallest", float(np.median([smallest(value_R) for value_R in self.resamples])), form=form)


def of_runs(
    name: str,
    years: list[JudgeYear],
    measure: Callable[[JudgeYear, np.ndarray], np.ndarray],
    form: str = ".3f",
) -> OfRuns:
    """A measure of counts [..., H, J], of each judge-year."""
    figures = []
    resamples = []
    for year in years:
        value_R = measure(year, year.resampled)
        figures.append(figure(f"{name} {year.name}", measure(year, year.counts), value_R, form))
        resamples.append(value_R)
    return OfRuns(figures, np.array(resamples))
