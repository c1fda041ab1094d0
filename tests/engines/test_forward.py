"""Rows of a cache against a plain forward pass, over families of models that treat attention differently."""

from __future__ import annotations

from typing import Any

import pytest

from relabel.manifests.errors import ModelError


def tiny(kind: str, **extra: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | extra))).eval()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("kind", "extra", "attention"),
    [
        ("qwen3", {"head_dim": 16}, "grouped"),
        ("mistral", {"sliding_window": 8}, "grouped"),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 8}, "grouped"),
        ("gemma2", {"head_dim": 16, "sliding_window": 8}, "eager"),
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 4}, "grouped"),
        ("granite", {"logits_scaling": 4.0}, "grouped"),
    ],
)
def test_rows_with_a_shared_prefix_say_what_the_model_says_alone(kind, extra, attention):
    import torch

    from relabel.labelers.engines.forward import GROUPED, Forward

    model = tiny(kind, **extra)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, *range(20 + 30 * row, 30 + 31 * row)] for row in range(4)]
    with torch.inference_mode():
        alone = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -2:] for ids in prompts]
        model.set_attn_implementation(GROUPED if attention == "grouped" else "eager")
        forward = Forward(model, torch.device("cpu"))
        forward.check()
        forward.cache.reserve(6, 64, used_rows=0, used_columns=0)
        forward.prefill([prompts[0][:12]], first_row=5, prefix=0)
        forward.cache.restore(forward.cache.snapshot(5, 12), 1, 5)
        before_last = forward.prefill([ids[12:-1] for ids in prompts], first_row=1, prefix=12)
        forward.cache.move(4, 0, len(prompts[3]) - 1)  # a row that takes the place of another keeps its past
        order = [3, 0, 1, 2]
        last = forward.decode([prompts[row][-1] for row in order], [len(prompts[row]) - 1 for row in order])
    for place, row in enumerate(order):
        assert float((before_last[row] - alone[row][0]).abs().max()) < 1e-3
        assert float((last[place] - alone[row][1]).abs().max()) < 1e-3


@pytest.mark.parametrize(("kind", "extra"), [("bloom", {"n_head": 4, "n_layer": 2}), ("mamba", {})])
def test_a_family_that_can_not_be_run_by_rows_is_refused(kind, extra):
    import torch

    from relabel.labelers.engines.forward import Forward

    with pytest.raises(ModelError, match=f"{kind}.*vllm"):
        Forward(tiny(kind, **extra), torch.device("cpu")).check()


def test_a_model_that_ignores_its_masks_is_found_out():
    import torch

    from relabel.labelers.engines.forward import Forward

    model = tiny("qwen2")
    forward = Forward(model, torch.device("cpu"))
    forward._masks = lambda columns, positions: {
        "full_attention": torch.zeros_like(columns - positions, dtype=torch.float32)
    }  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="logits are off"):
        forward.check()
