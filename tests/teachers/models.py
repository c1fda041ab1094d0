"""A tiny random model that teachers start from."""

from pathlib import Path

from tests.engines.conftest import make_tokenizer


def write_tiny_decoder(folder: Path, *, layers: int = 2, heads: int = 4) -> Path:
    """A causal language model that reads prompts of a byte a token, with ChatML."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 or 1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
