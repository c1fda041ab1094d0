"""What rollouts are tried with: a byte-level tokenizer made by hand, and answers that are written for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from distill.teachers.answer_tokens import AnswerTokens
from distill.teachers.rollouts import Dialogues, Generate
from labelers.engines.checkpoints import end_ids
from labelers.engines.tokens import PromptEncoder
from labelers.registry import Labeler
from tests.engines.conftest import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer)


@pytest.fixture(scope="session")
def tokens(tokenizer: Any) -> AnswerTokens:
    return AnswerTokens(tokenizer, end_ids=end_ids(None, tokenizer))


@pytest.fixture(scope="session")
def dialogues(encoder: PromptEncoder, tokens: AnswerTokens) -> Callable[..., Dialogues]:
    def make(labeler: Labeler, *, max_prompt_tokens: int = 8192) -> Dialogues:
        return Dialogues(labeler, encoder, tokens, max_prompt_tokens=max_prompt_tokens)

    return make


@pytest.fixture(scope="session")
def writes(encoder: PromptEncoder, tokenizer: Any) -> Callable[..., Generate]:
    """A model that writes one text a turn, and keeps the prompts that it was shown in `seen`."""

    def make(texts: Sequence[str], *, seen: list[list[int]] | None = None, end: str | None = "<|im_end|>") -> Generate:
        left = list(texts)

        def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
            if seen is not None:
                seen.extend(list(one) for one in prompts)
            text = left.pop(0)
            ids = encoder.encode_text(text) + ([] if end is None else [tokenizer.convert_tokens_to_ids(end)])
            return [list(ids) for _ in prompts]

        return generate

    return make
