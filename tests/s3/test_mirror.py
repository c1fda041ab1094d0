"""A machine that is lost with its disk: the training goes on elsewhere, from the checkpoints at a URL."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

from relabel.distill.teachers.spec import ROLLOUTS_NAME, read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.manifests.errors import StaleRunError
from relabel.manifests.files import Storage
from tests.distill.conftest import make_pairs
from tests.teachers.models import write_tiny_decoder

ROOT = Path(__file__).parents[2]
LEASE_S = 3.0
LOST = f"""
import json, os, signal, sys, time
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.manifests import failpoints
from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store

spec = read_teacher_spec(json.loads(sys.argv[1]), where="here")
steps = []

def hit(name):
    steps.append(name)
    if steps.count("after_training_step") == 5:
        while "checkpoint-000004/digests.json" not in open_run_store(spec.train.mirror, Storage()).names(""):
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

failpoints.hit = hit
train_teacher(spec, Storage(lease_s={LEASE_S}))
"""


@pytest.mark.slow
def test_a_training_whose_machine_is_lost_goes_on_elsewhere_to_the_last_bit(s3: str, tmp_path: Path) -> None:
    base = write_tiny_decoder(tmp_path / "base")
    pairs = tmp_path / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(make_pairs()[:8]), pairs)
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "system.j2").write_text("Judge.")
    (templates / "user.j2").write_text("{{ query }}: {{ document }}")

    def values(output: str, mirror: str | None = f"{s3}/mirror") -> dict[str, Any]:
        train = {"max_steps": 6, "batch_size": 4, "accumulation": 1, "save_every": 2, "max_tokens": 4000}
        return {
            "name": "tiny",
            "method": "grpo",
            "init": str(base),
            "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 1, "templates": str(templates)},
            "data": {"gold": {"path": str(pairs)}},
            "rollouts": {"group": 2},
            "train": {**train, "device": "cpu", "precision": "fp32", "mirror": mirror},
            "output": str(tmp_path / output),
        }

    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", LOST, json.dumps(values("lost"))]
    lost = subprocess.run(call, env=around, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert lost.returncode == -signal.SIGKILL, lost.stderr
    shutil.rmtree(tmp_path / "lost")
    time.sleep(LEASE_S + 1)  # the lost machine's lease
    said: list[str] = []

    def go(output: str, start: Any, mirror: str | None = f"{s3}/mirror") -> Path:
        spec = read_teacher_spec(values(output, mirror), where="here")
        train_teacher(spec, Storage(lease_s=LEASE_S), start=start, report=said.append)
        return tmp_path / output

    with pytest.raises(StaleRunError, match="checkpoint-000004 of a training is there"):
        go("elsewhere", "new")
    elsewhere = go("elsewhere", "resume")
    assert "resuming from checkpoint-000004" in said
    undisturbed = go("undisturbed", "new", None)
    for name in ("model.safetensors", ROLLOUTS_NAME, "curves.parquet"):
        assert (elsewhere / name).read_bytes() == (undisturbed / name).read_bytes(), name
