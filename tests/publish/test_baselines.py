"""A channel is not pointed at a student that reads no better than a constant grade or shared words, unless asked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.export.bundles import open_bundle, seal_bundle

BOUNDS = {"grade": 1, "constant": {"accuracy": 0.5, "kappa": 0.0}, "random": {}, "lexical": {"ndcg@10": 0.8}}


@pytest.mark.parametrize(
    ("student", "named"),
    [
        ({"rows": 9, "accuracy": 0.4, "kappa": 0.1, "ndcg@10": 0.9}, "accuracy 0.4000, the constant baseline 0.5000"),
        ({"rows": 9, "accuracy": 0.6, "kappa": 0.1, "ndcg@10": 0.7}, "ndcg@10 0.7000, the lexical baseline 0.8000"),
    ],
)
def test_a_channel_takes_a_student_below_a_baseline_with_anyway_alone(
    relabel: Callable[..., Any], tmp_path: Path, bundle: Callable[..., Path], student: dict[str, Any], named: str
) -> None:
    folder, store = bundle(), str(tmp_path / "store")
    lineage = {"student": {"metrics": {"test": {"rows": 9, "student": student, "baselines": BOUNDS}}}}
    seal_bundle(folder, {"name": "ecom", "lineage": lineage, "grades": 3})
    done = relabel("publish", str(folder), store, "--channel", "stable")
    assert done.code == 5
    assert named in done.err
    assert not (tmp_path / "store" / "ecom").exists()
    assert relabel("publish", str(folder), store).code == 0
    moves = ("channel", "set", f"{store}/ecom", "stable", open_bundle(folder).version)
    done = relabel(*moves)
    assert done.code == 5
    assert named in done.err
    assert not (tmp_path / "store" / "ecom" / "channels").exists()
    assert relabel(*moves, "--anyway").code == 0
    assert relabel("publish", str(folder), store, "--channel", "candidate", "--anyway").code == 0
