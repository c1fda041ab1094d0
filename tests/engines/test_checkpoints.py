"""What a checkpoint's directory tells before any weight is loaded."""

from __future__ import annotations

import pytest

from labelers.engines.checkpoints import count_parameters


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral"])
def test_the_headers_of_the_weights_count_what_torch_counts(model_dir, kind):
    from transformers import AutoModelForCausalLM

    folder = model_dir(kind)
    assert count_parameters(folder) == AutoModelForCausalLM.from_pretrained(folder).num_parameters()
