"""Rollouts that vLLM writes for a teacher trained in two processes: prompts are divided, and each step is written by
the weights of the one before.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "rollout_processes.py"
STEPS, GROUP, PROMPTS = 3, 2, 4
"""Prompts of a step, of both processes together."""
RATE = 1e-2


def trained(folder: Path, model: Path, vllm: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each of two processes saw of each step."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm`")
    pytest.importorskip("trl", reason="the train extra is not installed")
    rows = [
        {"query_id": f"q{number}", "query": "red shoes", "doc_id": f"d{number}", "document": "a red shoe " * number}
        for number in range(1, 13)
    ]
    pq.write_table(pa.Table.from_pylist([{**row, "grade": place % 3} for place, row in enumerate(rows)]), folder / "p")
    spec = {
        "name": "tiny",
        "method": "grpo",
        "init": str(model),
        "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 8},
        "data": {"gold": {"path": str(folder / "p"), "grade": "grade"}},
        "rollouts": {"group": GROUP, "vllm": vllm},
        "train": {
            "max_steps": STEPS,
            "batch_size": 2,
            "accumulation": 2,
            "learning_rate": RATE,
            "warmup": 0,
            "max_tokens": 2000,
            "device": "cpu",
            "precision": "fp32",
            "seed": 7,
        },
        "output": str(folder / "out"),
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the sampler would be compiled: minutes
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    call = [*launch, str(SCRIPT), str(folder)]
    done = subprocess.run(call, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if line.startswith("[rank"))[
        -8000:
    ]
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def assert_divided(folder: Path, seen: list[list[dict[str, Any]]]) -> None:
    """Each process has whole groups of its own prompts, and all of them are in the table."""
    rollouts = pq.read_table(folder / "out" / "rollouts.parquet").to_pylist()
    for step in range(STEPS):
        own = [set(of_rank[step]["prompts"]) for of_rank in seen]
        assert [len(prompts) for prompts in own] == [PROMPTS // 2] * 2
        assert not own[0] & own[1]
        rows = [(row["row_id"], row["sample"]) for row in rollouts if row["step"] == step + 1]
        assert sorted(rows) == sorted((row, sample) for row in own[0] | own[1] for sample in range(GROUP))


def assert_follows(seen: list[list[dict[str, Any]]], *, compared: int) -> None:
    """vLLM has the policy's weights whenever it writes, and these change."""
    for of_rank in seen:
        assert all(step["compared"] >= compared for step in of_rank)
        assert max(step["apart"] for step in of_rank) < RATE / 2, "a step moves most weights by the rate"
        assert len({step["norm"] for step in of_rank}) == STEPS
        assert all(value <= 0 for step in of_rank for values in step["logprobs"] for value in values)
    first, second = ([step["norm"] for step in of_rank] for of_rank in seen)
    assert first == second


def test_each_process_writes_its_own_prompts_with_a_vllm_of_its_own(
    model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    seen = trained(tmp_path, model_dir(), {})
    assert_divided(tmp_path, seen)
    assert_follows(seen, compared=5)  # norms, embeddings: vLLM stacks other matrices
