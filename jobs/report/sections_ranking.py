"""The section of rankings: nDCG by query, and the queries that are worst."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from relabel.jobs.report.blocks import Block, Cell, Drawing, Fold, Section, Side, Table, title_over
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.plots import draw_histogram
from relabel.jobs.report.plotted import Bars
from relabel.jobs.report.sections_judged import JudgedRun, judged_queries
from relabel.manifests.ids import texts_of
from relabel.manifests.metrics.ranking import DEPTH, rank_queries

BINS = 20
WORST = 15


def ranking_section(judged: Sequence[JudgedRun]) -> Section:
    """nDCG query by query."""
    blocks: list[Block] = []
    groups: list[Bars] = []
    rows: list[tuple[str, str, float, int]] = []
    worst: list[list[Cell]] = []
    for one in judged:
        found = _ndcg(one)
        if found:
            counts, _ = np.histogram([value for _, value, _ in found], bins=BINS, range=(0.0, 1.0))
            groups.append(Bars(one.name, [], counts.tolist()))
            rows += [(one.name, query, value, docs) for query, value, docs in found]
            worst += [[one.name, query, value, docs] for query, value, docs in found[:WORST]]
    if groups:
        head = ("run", "query", f"ndcg@{DEPTH}", "judged documents")
        edges = [number / BINS for number in range(BINS + 1)]
        alt = " ".join(
            f"{group.name}: {_ndcg_text([value for run, _, value, _ in rows if run == group.name])}" for group in groups
        )
        svg = draw_histogram(groups, edges, label=f"nDCG@{DEPTH}", value="queries")
        title = title_over(f"nDCG@{DEPTH} by query", judged_queries(judged))
        blocks.append(Side([Drawing(title, svg, alt, csv_download("ndcg-by-query", head, rows), alt)]))
        each = (
            f", {WORST} of each run"
            if len(worst) == WORST * len(groups) > WORST
            else ", run by run"
            if len(groups) > 1
            else ""
        )
        blocks.append(
            Fold(f"The {len(worst)} queries where it is lowest{each}", [Table(head, worst, "Lowest first, run by run")])
        )
    return Section("ranking", "Queries", blocks)


def _ndcg_text(values: Sequence[float]) -> str:
    return (
        f"nDCG@{DEPTH} of {len(values):,} queries, from {min(values):.3f} to {max(values):.3f}, mean "
        f"{np.mean(values):.4f}."
    )


def _ndcg(one: JudgedRun) -> list[tuple[str, float, int]]:
    """Query, nDCG and judged documents, worst first; queries without a relevant document have none."""
    rows = one.judging.judged
    if rows.queries is None or rows.query_names is None:
        return []
    found = rank_queries(rows.queries, rows.docs, np.round(rows.scores, 6), rows.gold, num_queries=rows.num_queries)
    size_G = np.bincount(rows.queries, minlength=rows.num_queries).tolist()
    listed = zip(texts_of(rows.query_names), found.ndcg.tolist(), size_G, strict=True)
    return sorted((item for item in listed if not math.isnan(item[1])), key=lambda item: (item[1], item[0]))
