"""The rows of a chunk that cheap judges label, and the columns that say who labelled which row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relabel.jobs.run.chunks import ChunkWork
from relabel.manifests.cascade import Cascade
from relabel.manifests.receipts import ReusedRows
from relabel.manifests.schemas import LabelRow

CHEAP = -1
"""Source of a row in `ChunkWork.sources`; earlier outputs are numbered from 0."""


def take_cheap(cascade: Cascade, work: ChunkWork) -> int:
    """Settle the rows of a chunk that the cheap judges are sure of, but for those that are known or drawn for the
    audit. Returns how many.
    """
    before, cheap = work.left, cascade.cheap
    place_N, by_N = cascade.places(work.pairs)
    for index in np.flatnonzero(by_N == "cheap").tolist():
        if work.rows[index] is not None:
            continue
        pair, probs_K = work.pairs[index], cheap.probs_PK[place_N[index]]
        row = LabelRow(
            row_id=pair.row_id,
            query_id=pair.query_id,
            doc_id=pair.doc_id,
            status="ok",
            grade=int(cheap.grade_P[place_N[index]]),
            probs=probs_K.tolist(),
            outside_mass=None,
            expected_grade=float(probs_K @ np.arange(len(probs_K))),
            evidence=[],
            intent=None,
            reasoning=None,
            flags=[],
            samples=None,
            prompt_tokens=0,
            output_tokens=0,
            reused=True,
            key=None,  # so that no later run takes it for the teacher's
            origin=cascade.origin,
        )
        work.take_over(index, row, CHEAP)
    return before - work.left


def with_sources(cascade: Cascade, work: ChunkWork) -> list[LabelRow]:
    """A chunk's labels with the columns of a cascade."""
    place_N, by_N = cascade.places(work.pairs)
    found = []
    for row, place, by in zip(work.rows, place_N.tolist(), by_N.tolist(), strict=True):
        if isinstance(row, LabelRow):
            known_by = "calibration" if row.query_id in cascade.queries else "teacher"
            columns = {
                "answered_by": known_by if by == "cheap" and row.key is not None else by,  # asked by an earlier run
                "cheap_grade": None if place < 0 else int(cascade.cheap.grade_P[place]),
                "cheap_confidence": None if place < 0 else float(cascade.cheap.confidence_P[place]),
            }
            found.append(row._replace(columns={**row.columns, **columns}))
    return found


def cheap_sources(cascade: Cascade, work: ChunkWork) -> list[ReusedRows]:
    """What a chunk's receipt says of its cheap rows: all of them under the first judge."""
    rows = work.sources[CHEAP]
    return [replace(judge, rows=0 if at else rows) for at, judge in enumerate(cascade.judges)] if rows else []
