"""Rollouts that vLLM writes in the training's own process, on one GPU (`make gpu`, in an environment of its own)."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.manifests.files import Storage
from tests.distill.conftest import make_pairs
from tests.teachers.models import write_tiny_decoder

pytestmark = pytest.mark.gpu(1)
pytest.importorskip("vllm", reason="rollouts by vLLM have an environment of their own: make gpu")


@pytest.mark.parametrize("sleep", [False, True])
def test_a_teacher_learns_from_answers_that_vllm_wrote(sleep: bool, tmp_path: Path) -> None:
    import pyarrow as pa

    pairs = tmp_path / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(make_pairs()[:12]), pairs)
    values: dict[str, Any] = {
        "name": "tiny",
        "method": "grpo",
        "init": str(write_tiny_decoder(tmp_path / "model")),
        "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 8},
        "data": {"gold": {"path": str(pairs)}},
        "rollouts": {"group": 4, "vllm": {"sleep": sleep}},
        "train": {"max_steps": 2, "batch_size": 4, "accumulation": 2, "max_tokens": 4000, "learning_rate": 1e-3},
        "output": str(tmp_path / "out"),
    }
    train_teacher(read_teacher_spec(values, where="teacher.yaml"), Storage(), start="new", report=lambda _: None)
    assert pq.read_table(tmp_path / "out" / "rollouts.parquet").num_rows == 16
    curve = pq.read_table(tmp_path / "out" / "curves.parquet").to_pylist()
    assert {row["step"] for row in curve} == {1, 2}
