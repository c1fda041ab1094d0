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


def test_routes_are_judged_by_the_gold_of_their_own_input(
    folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    rows = treed_rows(4, 3)
    for row in rows:
        row |= {"gold_answer_ids": [2], "gold_expand_ids": [4], "grade": 2}
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    changes = {"labeler": {"name": "route"}, "input": {"columns": {"document": ["document"]}}}
    assert relabel("run", write_job(changes)).code == 0
    files = json.loads((folder / "out/ecom/manifest.json").read_bytes())["labels"]
    labels = [row for file in files for row in pq.read_table(folder / "out/ecom" / file["path"]).to_pylist()]
    found = relabel("evaluate", "out/ecom", "--qrels", "pairs.parquet", "--output", "json").json["figures"]
    f1 = [2 * (2 in label["answer_ids"]) / (1 + len(label["answer_ids"])) for label in labels]
    assert (found["answer_f1"]["value"], found["answer_f1"]["over"]) == (pytest.approx(sum(f1) / 12), 12)
    precision = [(4 in label["expand_ids"]) / max(1, len(label["expand_ids"])) for label in labels]
    assert found["expand_precision"]["value"] == pytest.approx(sum(precision) / 12)
    assert found["refusal_accuracy"]["value"] is None
    assert (found["expelled_mean"]["value"], found["collapse_rate"]["value"]) == (0, 0)
