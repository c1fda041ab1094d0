"""What the spec says is what vLLM's own arguments say. These tests need no vLLM."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relabel.labelers.engines.vllm import OURS, VllmArgs, plan_engine_args
from relabel.labelers.registry import engine_class
from relabel.manifests.errors import ConfigError, MissingExtraError, ModelError
from relabel.manifests.specs import EngineSpec, validate_spec

MODEL = Path("models/m")


def planned(*, is_cpu: bool = False, **options: Any) -> dict[str, Any]:
    return plan_engine_args(VllmArgs(**options), MODEL, is_cpu=is_cpu)


def adapter(folder: Path, rank: int, **more: Any) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, **more}))
    return str(folder)


def test_every_option_reaches_vllm_under_its_name(tmp_path):
    lora = adapter(tmp_path / "a", 12)
    got = planned(
        dtype="bfloat16",
        tensor_parallel_size=4,
        quantization="fp8",
        lora=lora,
        max_num_seqs=64,
        max_model_len=4096,
        gpu_memory_utilization=0.85,
        kv_cache_space_gib=2,
        enforce_eager=True,
        extra={"max_num_batched_tokens": 16384},
    )
    assert got == {
        "model": "models/m",
        "dtype": "bfloat16",
        "load_format": "safetensors",
        "tensor_parallel_size": 4,
        "quantization": "fp8",
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.85,
        "kv_cache_memory_bytes": 2 * 2**30,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "structured_outputs_config": {"backend": "guidance"},
        "max_num_batched_tokens": 16384,
    }


def test_what_is_not_said_is_left_to_vllm_and_a_cpu_gets_a_small_cache():
    gpu, cpu = planned(), planned(is_cpu=True)
    assert not {"quantization", "max_num_seqs", "gpu_memory_utilization", "kv_cache_memory_bytes", "enable_lora"} & set(
        gpu
    )
    assert (gpu["enforce_eager"], gpu["max_model_len"]) == (False, -1)
    assert (cpu["enforce_eager"], cpu["kv_cache_memory_bytes"]) == (True, 4 * 2**30)


def test_prompts_share_small_blocks_on_a_cpu_unless_the_user_wants_others():
    assert "block_size" not in planned()
    assert planned(is_cpu=True)["block_size"] == 32
    assert planned(is_cpu=True, extra={"block_size": 64})["block_size"] == 64


def test_the_widest_part_of_an_adapter_decides_its_room(tmp_path):
    assert planned(lora=adapter(tmp_path / "a", 8, rank_pattern={"q_proj": 40}))["max_lora_rank"] == 64
    with pytest.raises(ModelError, match="rank 600"):
        planned(lora=adapter(tmp_path / "b", 600))
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        planned(lora=str(tmp_path / "none"))


def test_inline_under_a_grammar_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"constrain: false.*after the mask"):
        validate_spec(VllmArgs, {"decisions": "inline"}, where="job.yaml")
    assert validate_spec(VllmArgs, {"decisions": "inline", "constrain": False}, where="job.yaml").decisions == "inline"


@pytest.mark.parametrize("name", [*sorted(OURS), "dtype", "lora"])
def test_extra_can_not_undo_what_exactness_rests_on(name):
    with pytest.raises(ConfigError, match=name):
        validate_spec(VllmArgs, {"extra": {name: "x"}}, where="job.yaml")


def test_only_what_never_changes_a_label_stays_out_of_the_fingerprint():
    kept = set(VllmArgs.model_fields) - VllmArgs.speed_only
    assert VllmArgs.speed_only < set(VllmArgs.model_fields)
    assert kept == {"dtype", "quantization", "lora", "constrain", "max_model_len", "extra"}


def test_importing_the_engine_loads_no_heavy_package():
    code = (
        "import sys, relabel.labelers.engines.vllm; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'llguidance') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_vllm_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    engine = engine_class("vllm")
    with pytest.raises(MissingExtraError, match=r"vllm: run `pip install 'relabel-ir\[vllm\]'`"):
        engine.check(EngineSpec(name="vllm", model="m"))
    with pytest.raises(MissingExtraError, match=r"relabel-ir\[vllm\]"):
        engine(EngineSpec(name="vllm", model="m"), overlong="truncate")
