"""How a job that names no size of chunks is cut: by its shards' rows alone, and never again once it was planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.manifests.shards import FEWEST_CHUNK_ROWS, MOST_CHUNK_ROWS, cut_queries, fitting_chunk_rows

UNNAMED: dict[str, Any] = {"run": {"chunk_rows": None}, "shards": 1}


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 8), (24, 8), (128, 8), (129, 9), (192, 12), (4080, 255), (4096, 256), (1_000_000, 256)]
)
def test_a_chunk_is_a_sixteenth_of_its_shard(rows: int, size: int) -> None:
    assert fitting_chunk_rows(rows) == size


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=200), shards=st.integers(1, 8), whole=st.booleans())
def test_each_shard_is_cut_by_its_own_rows(sizes: list[int], shards: int, whole: bool) -> None:
    cut = cut_queries(np.array(sizes), np.array(sizes) * 10.0, shards=shards, chunk_rows=None, whole=whole)
    for start, stop, chunks in zip(cut.bounds[:-1], cut.bounds[1:], cut.chunks, strict=True):
        size = fitting_chunk_rows(stop - start)
        assert FEWEST_CHUNK_ROWS <= size <= MOST_CHUNK_ROWS
        assert sum(chunks) == stop - start
        assert all(rows <= size or (whole and rows in sizes) for rows in chunks)


@pytest.fixture
def plan(relabel: Callable[..., Any], write_pairs: Callable[..., Path], folder: Path) -> Callable[..., dict[str, Any]]:
    """Plans a job and gives what its plan holds."""
    write_pairs()

    def planned(job: str) -> dict[str, Any]:
        assert relabel("plan", job).code == 0
        held: dict[str, Any] = json.loads((folder / "out/ecom/plan.json").read_bytes())
        return held

    return planned


def test_a_job_without_a_size_gets_chunks_that_fit(
    plan: Callable[..., dict[str, Any]], relabel: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    job = write_job(UNNAMED)
    held = plan(job)
    assert [shard["chunks"] for shard in held["shards"]] == [[8, 8, 8]]
    assert held["parts"]["cut"] == {"shards": 1, "chunk_rows": None}
    assert relabel("run", job).code == 0
    assert relabel("verify", "out/ecom").code == 0


@pytest.mark.parametrize("size", [256, 5])
def test_an_output_that_was_planned_keeps_its_chunks_and_fingerprint(
    plan: Callable[..., dict[str, Any]],
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    folder: Path,
    size: int,
) -> None:
    """256 was the default once: such an output goes on with a job file that names no size."""
    was = plan(write_job({"run": {"chunk_rows": size}, "shards": 2}))
    job = write_job({**UNNAMED, "shards": 2})
    assert relabel("run", job, "--shard", "1/2").code == 0
    assert relabel("run", job).code == 0
    assert json.loads((folder / "out/ecom/plan.json").read_bytes()) == was
    assert was["parts"]["cut"] == {"shards": 2, "chunk_rows": size}
    assert len(list(folder.glob("out/ecom/receipts/*/*.json"))) == sum(len(one["chunks"]) for one in was["shards"])
    assert relabel("verify", "out/ecom").code == 0


def test_another_size_or_number_of_shards_is_another_cut(
    plan: Callable[..., dict[str, Any]], relabel: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    plan(write_job(UNNAMED))
    relabel("run", write_job({**UNNAMED, "run": {"chunk_rows": 8}})).refused(3, "cut.chunk_rows: was null, is 8")
    relabel("run", write_job({**UNNAMED, "shards": 2})).refused(3, "cut.shards: was 1, is 2")
