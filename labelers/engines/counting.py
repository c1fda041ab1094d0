"""A model's prompts and their tokens, by its own tokenizer, without its weights: for `relabel plan --exact` and
`relabel ask --dry-run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from relabel.labelers.engines.api_tokenizer import TokenizerFolder
from relabel.labelers.engines.checkpoints import resolve_checkpoint
from relabel.labelers.engines.tokens import Prompt, PromptEncoder
from relabel.manifests.asks import Ask
from relabel.manifests.specs import EngineSpec


def prompt_encoder(
    spec: EngineSpec, folder: TokenizerFolder, *, overlong: Literal["truncate", "quarantine"] = "truncate"
) -> PromptEncoder:
    """What makes prompts of asks.

    Raises:
        ModelError, ConfigError: it has none, or its chat template can't be used.
        MissingExtraError: transformers is absent.
    """
    tokenizer = folder.load("Rendering prompts")
    return PromptEncoder(tokenizer, overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs)


def checkpoint_token_counter(
    spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"], cache_dir: str | None
) -> Callable[[Ask], int]:
    """A function from an ask to the tokens that it is encoded as, cut where it would be cut.

    Raises:
        ModelError, ConfigError, MissingExtraError: no model is named, or see `prompt_encoder`.
    """
    resolved = resolve_checkpoint(spec, cache_dir)
    encoder = prompt_encoder(spec, TokenizerFolder(resolved.path, resolved.reference), overlong=overlong)

    def count(ask: Ask) -> int:
        found = encoder.encode(ask, max_prompt_tokens=spec.max_prompt_tokens)
        return len(found.ids) if isinstance(found, Prompt) else 0  # a prompt that does not fit is not asked

    return count
