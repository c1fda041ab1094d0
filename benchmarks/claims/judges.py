"""Published LLM judges next to the humans of TREC DL 2019 to 2023, counted by query.

Letters: Q queries of a year, H the human's grade 0 to 3, J the judge's grade 0 to 5, R resamples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.claims.page import resampled

RELEVANT = {"0-3": 2, "0-1": 1, "0-5": 4}
"""From this grade on a judge of that scale calls a passage relevant."""


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
