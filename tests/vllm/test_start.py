"""Starting the engine: what reaches vLLM, what is refused, and options that change what the model computes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from relabel.manifests.asks import Request
from relabel.manifests.errors import ConfigError, MissingExtraError, ModelError
from relabel.manifests.specs import EngineSpec
from tests.engines.conftest import CHATML, ask_for, make_tokenizer, run_all
from tests.engines.test_transformers import SCORE, requests_for

from .conftest import KV_CACHE_GIB, save_model

THINKING = CHATML.replace(
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
)
LORA_RANK, LORA_ALPHA = 4, 8


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The `EngineArgs` that vLLM's engine would have been started with; it is not."""
    from vllm.v1.engine.llm_engine import LLMEngine

    seen: list[Any] = []

    def stop(engine_args: Any, **_: Any) -> Any:
        seen.append(engine_args)
        raise RuntimeError("far enough")

    monkeypatch.setattr(LLMEngine, "from_engine_args", stop)
    return seen


def adapter(folder: Path) -> Path:
    """A LoRA on the query projections, written by hand, wide enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(3)
    tensors = {}
    for layer in range(2):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(LORA_RANK, 64)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(64, LORA_RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_parallelism_fp8_and_adapters_reach_vllms_own_arguments(start, passed, tmp_path):
    lora = str(adapter(tmp_path / "lora"))
    with pytest.raises(ModelError, match="far enough"):
        start(fresh=True, tensor_parallel_size=2, quantization="fp8", lora=lora, gpu_memory_utilization=0.7)
    (got,) = passed
    assert (got.tensor_parallel_size, got.quantization, got.gpu_memory_utilization) == (2, "fp8", 0.7)
    assert (got.enable_lora, got.max_loras, got.max_lora_rank) == (True, 1, 8)
    assert (got.enable_prefix_caching, got.logprobs_mode) == (True, "raw_logprobs")


def test_limits_hold_in_the_started_engine(start):
    engine = start(
        max_num_seqs=5, max_model_len=512, dtype="bfloat16", extra={"max_num_batched_tokens": 640, "block_size": 64}
    )
    config = engine._engine.vllm_config
    assert (config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens) == (5, 640)
    assert (config.model_config.max_model_len, str(config.model_config.dtype)) == (512, "torch.bfloat16")
    assert (config.cache_config.block_size, config.cache_config.kv_cache_memory_bytes) == (
        64,
        int(KV_CACHE_GIB * 2**30),
    )
    assert config.model_config.enforce_eager
    assert engine.capacity == 10


def test_an_adapter_answers_every_request(start, model_dir, finished, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = adapter(tmp_path / "lora")
    engine = start(lora=str(folder))
    run_all(engine, requests_for(6, decisions=(SCORE,)))
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype="float32", attn_implementation="eager").eval()
    before = _own(model, finished[0])
    tensors = load_file(folder / "adapter_model.safetensors")
    for layer, block in enumerate(model.model.layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        delta = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"] * (LORA_ALPHA / LORA_RANK)
        with torch.no_grad():
            block.self_attn.q_proj.weight += delta
    for row in finished:
        assert row.found["score"][1].probs == pytest.approx(_own(model, row), abs=1e-4)
    assert _own(model, finished[0]) != pytest.approx(before, abs=1e-2)
    assert engine.facts().model_digest != engine._resolved.digest


def _own(model: Any, row: Any) -> list[float]:
    import torch

    place = row.places[0]
    end = bytes(row.written).index(place.marker) + len(place.marker)
    before = [token for token, token_end in zip(row.tokens, row.ends, strict=True) if token_end <= end]
    with torch.no_grad():
        logits = model(torch.tensor([[*row.prompt, *before]])).logits[0, -1].double()
    return torch.softmax(logits[list(place.label_ids)], -1).tolist()  # type: ignore[no-any-return]


def test_the_chat_template_is_given_whether_to_think(tmp_path, running, finished):
    from relabel.labelers.engines.vllm import Vllm

    folder = save_model(tmp_path / "thinker")
    make_tokenizer(template=THINKING).save_pretrained(folder)
    ends = {}
    for thinks in (True, False):
        args = Vllm.Args(
            dtype="float32", max_num_seqs=4, kv_cache_space_gib=KV_CACHE_GIB, cache_dir=str(tmp_path / "cache")
        )
        spec = EngineSpec(name="vllm", model=str(folder), args=args, chat_template_kwargs={"enable_thinking": thinks})
        running.close()
        engine = Vllm(spec)
        try:
            run_all(engine, [Request(1, ask_for("q", "d"), 0)])
            ends[thinks] = engine._encoder.decode(finished[-1].prompt)
        finally:
            engine.close()
    assert ends[True].endswith("<|im_start|>assistant\n")
    assert ends[False] == ends[True] + "<think>\n\n</think>\n\n"


def test_an_argument_that_vllm_does_not_have_is_a_config_error(start):
    with pytest.raises(ConfigError, match=r"engine\.args\.extra: .*'max_num_batched_token'"):
        start(fresh=True, extra={"max_num_batched_token": 5})


def test_a_model_that_vllm_can_not_load_is_a_model_error_and_the_next_one_starts(start, model_dir, tmp_path):
    from relabel.labelers.engines.vllm import Vllm

    broken = Path(shutil.copytree(model_dir(), tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    args = Vllm.Args(dtype="float32", kv_cache_space_gib=KV_CACHE_GIB, cache_dir=str(tmp_path / "cache"))
    start(fresh=True).close()
    with pytest.raises(ModelError, match="vLLM can't start"):
        Vllm(EngineSpec(name="vllm", model=str(broken), args=args))
    assert run_all(start(fresh=True), requests_for(1))[0].finish == "stop"


def test_no_device_is_said_in_so_many_words(monkeypatch):
    import vllm.platforms

    from relabel.labelers.engines.vllm import Vllm

    class Nothing:
        device_type = ""

    monkeypatch.setattr(vllm.platforms, "_current_platform", Nothing())
    with pytest.raises(MissingExtraError, match="no device"):
        Vllm.check(EngineSpec(name="vllm", model="m"))


def test_starting_running_and_closing_writes_nothing_to_stdout(start, capfd):
    engine = start(fresh=True)
    run_all(engine, requests_for(2, decisions=(SCORE,)))
    engine.close()
    assert capfd.readouterr().out == ""
