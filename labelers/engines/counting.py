"""How many tokens a prompt has, by a model's own tokenizer, without its weights: for `relabel plan --exact`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from labelers.engines.checkpoints import load_tokenizer, resolve_checkpoint
from labelers.engines.tokens import Prompt, PromptEncoder
from manifests.asks import Ask
from manifests.extras import require
from manifests.specs import EngineSpec


def checkpoint_token_counter(
    spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"], cache_dir: str | None
) -> Callable[[Ask], int]:
    """A function from an ask to the tokens that it is encoded as, cut where it would be cut.

    Raises:
        ModelError: no model is named, or it has no tokenizer.
        MissingExtraError: transformers is absent.
    """
    library = require("transformers", extra="cpu", purpose="Counting tokens")
    tokenizer = load_tokenizer(library, resolve_checkpoint(spec, cache_dir))
    encoder = PromptEncoder(tokenizer, overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs)

    def count(ask: Ask) -> int:
        found = encoder.encode(ask, max_prompt_tokens=spec.max_prompt_tokens)
        return len(found.ids) if isinstance(found, Prompt) else 0  # a prompt that does not fit is not asked

    return count
