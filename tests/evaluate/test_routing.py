"""A run of `route` from its input to figures: gold by row of its own input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.reuse.test_tree_column import treed_rows


def _routed(folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str], gold: list[Any]) -> list[Any]:
    """A run over rows with this gold, a dict a row; its labels."""
    table = pa.Table.from_pylist(treed_rows(3, 2))
    for name in gold[0]:
        table = table.append_column(name, pa.array([row[name] for row in gold], pa.list_(pa.int64())))
    pq.write_table(table, folder / "pairs.parquet")
    changes = {"labeler": {"name": "route"}, "input": {"columns": {"document": ["document"]}}}
    assert relabel("run", write_job(changes)).code == 0
    files = json.loads((folder / "out/ecom/manifest.json").read_bytes())["labels"]
    return [row for file in files for row in pq.read_table(folder / "out/ecom" / file["path"]).to_pylist()]


@pytest.mark.parametrize("is_own_input", [True, False])
def test_without_grades_nodes_tell_them_and_a_row_that_does_not_tell_is_left_out(
    folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str], is_own_input: bool
) -> None:
    ids: list[tuple[Any, Any]] = [([2], [4]), ([5], None), ([], [4]), ([], []), ([], None), (None, [4])]
    grades = [2, 2, 1, 0]
    labels = _routed(
        folder, relabel, write_job, [{"gold_answer_ids": one, "gold_expand_ids": other} for one, other in ids]
    )
    if not is_own_input:
        kept = pq.read_table("pairs.parquet").select(["query_id", "doc_id", "gold_answer_ids", "gold_expand_ids"])
        pq.write_table(kept, "gold.parquet")
    gold = "pairs.parquet" if is_own_input else "gold.parquet"
    found = relabel("evaluate", "out/ecom", "--qrels", gold, "--output", "json").json
    assert (found["counts"]["judged"], found["counts"]["gold_null"]) == (4, 2)
    same = sum(label["grade"] == grade for label, grade in zip(labels, grades, strict=False))
    assert found["figures"]["accuracy"]["value"] == pytest.approx(same / 4)
    assert found["figures"]["answer_f1"]["over"] == 2
    assert found["figures"]["refusal_accuracy"]["over"] == 1
