"""A7: judges call irrelevant passages relevant when they hold the query's words (arXiv:2501.17969). Here nobody put
the words there.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.judges import RELEVANT
from benchmarks.claims.page import COLOURS, NO_N, Claim, Figure, Row, figure, resampled, smallest, verdict

# Q queries of a year, B bins of overlap, R resamples, X any axes

YEARS = {"dl19": "trec_dl19", "dl20": "trec_dl20", "dl21": "trec_dl21", "dl23": "llmjudge_dl23"}
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
    """The share called relevant by overlap."""
    found = [judge for year in YEARS for judge in fooled(folder, year)]
    shares_B = np.mean([one.shares for one in found], axis=0)
    shares_RB = np.mean([one.shares_resampled for one in found], axis=0)
    bins = [figure(name, shares_B[place], shares_RB[:, place]) for place, name in enumerate(BINS)]
    rise = figure("rise", shares_B[-1] - shares_B[0], shares_RB[:, -1] - shares_RB[:, 0])
    rises = [figure(f"rise {one.name}", rise_of(one.shares), rise_of(one.shares_resampled)) for one in found]
    apart = sum(one.low is not None and one.low > 0 for one in rises)
    return Claim(
        name="stuffing",
        title="Judges call irrelevant passages relevant if they hold the query's words",
        source="arXiv:2501.17969",
        answer=f"Of passages that humans call irrelevant, judges call {shares_B[-1]:.0%} relevant if all words of the "
        f"query are in them, and {shares_B[0]:.0%} if less than a quarter are.",
        here=verdict(rise, 0),
        there=NO_N,
        headline=rise,
        rows=[
            Row(
                "n",
                f"{len(found)} runs of judges, {num_passages(folder):,} irrelevant passages",
                "9 models, words injected",
            ),
            *(Row(f"called relevant, words of the query in them: {one.name}", one) for one in bins),
            Row("last less first", rise, "in words"),
            Row("smallest rise that n could show", Figure("smallest", smallest(shares_RB[:, -1] - shares_RB[:, 0]))),
            Row("runs whose interval of the rise is above 0", f"{apart} of {len(rises)}"),
        ],
        how="Words are compared in lower case, function words included; relevant is as in "
        "[overrating](overrating.md). The paper injects words into passages; here nobody did, so passages "
        "with more words may also be closer to the subject than the human's grade 0 shows. The rise is an "
        "upper bound of what words alone do.",
        draw=lambda axes: draw(axes, found, shares_B),
        drawn=rises,
    )


def fooled(folder: Path, year: str) -> list[Fooled]:
    """The judges of a year."""
    keys = ["query_id", "doc_id"]
    passages = pl.read_parquet(folder / YEARS[year] / "pairs.parquet").unique(keys, keep="first", maintain_order=True)
    overlap = [bin_of(query, body or "") for query, body in zip(passages["query"], passages["body"], strict=True)]
    passages = passages.select(*keys, bin=pl.Series(overlap))
    rows = pl.read_parquet(folder / "llm_labels" / "llm_labels.parquet")
    rows = rows.filter(pl.col("dataset") == year).join(passages, on=keys)
    rows = rows.with_columns(grade=pl.col("llm_label").str.strip_chars(" .").cast(pl.Int64)).sort("judge")
    queries = rows["query_id"].unique().sort()
    found = []
    for (judge, scale), own in rows.filter(pl.col("human_grade") == 0).group_by("judge", "scale", maintain_order=True):
        query = queries.search_sorted(own["query_id"]).to_numpy()
        place = own["bin"].to_numpy()
        seen = np.zeros((len(queries), len(BINS)))
        called = np.zeros((len(queries), len(BINS)))
        np.add.at(seen, (query, place), 1)
        np.add.at(called, (query, place), own["grade"].to_numpy() >= RELEVANT[str(scale)])
        found.append(Fooled(f"{year} {judge}", seen, called, resampled(year, len(queries))))
    return found


def bin_of(query: str, body: str) -> int:
    """The place in `BINS` of a passage."""
    asked = set(_WORD.findall(query.lower()))
    held = asked & set(_WORD.findall(body.lower()))
    return sum(len(held) / len(asked) >= edge for edge in EDGES)


def rise_of(share_XB: np.ndarray) -> np.ndarray:
    """The last bin's share less the first one's, [X]."""
    return share_XB[..., -1] - share_XB[..., 0]


def num_passages(folder: Path) -> int:
    """Of those that humans call irrelevant and some judge labelled."""
    rows = pl.read_parquet(folder / "llm_labels" / "llm_labels.parquet").filter(pl.col("human_grade") == 0)
    return rows.select("dataset", "query_id", "doc_id").unique().height


def draw(axes: Any, found: list[Fooled], shares_B: np.ndarray) -> None:
    """A line a judge, and the mean."""
    for one in found:
        axes.plot(range(len(BINS)), one.shares, color=COLOURS[3], linewidth=0.6)
    axes.plot(range(len(BINS)), shares_B, "o-", color=COLOURS[0], linewidth=2)
    axes.set(xlabel="share of the query's words in the passage", ylabel="called relevant, of irrelevant")
    axes.set_xticks(range(len(BINS)), ("< 1/4", "1/4 to 1/2", "1/2 to 3/4", "≥ 3/4", "all"))
