"""How many bytes a server's reply may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REPLY_BASE_BYTES = 1 << 20
REPLY_BYTES_PER_SENT = 4
"""Some servers repeat the prompt, as text or ids."""
REPLY_BYTES_PER_TOKEN = 1024
REPLY_BYTES_PER_LOGPROB = 256
TOKENS_UNLIMITED = 32_768
"""An answer's tokens where `extra_body` takes the limit away."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Fields of a request that hold it."""


def reply_limit(body: Mapping[str, Any] | None, sent_bytes: int) -> int:
    """Most bytes that the reply to a request can rightly hold, generously: by its answer's tokens and their
    log-probabilities.

    Args:
        body: the request; None for a list of models, for which the base must do.
        sent_bytes: its length.
    """
    if body is None:
        return 16 * REPLY_BASE_BYTES
    logprobs = max(
        (int(body[name]) for name in ("logprobs", "top_logprobs") if isinstance(body.get(name), int)), default=0
    )
    per_token = REPLY_BYTES_PER_TOKEN + REPLY_BYTES_PER_LOGPROB * logprobs
    return REPLY_BASE_BYTES + REPLY_BYTES_PER_SENT * sent_bytes + most_output(body) * per_token


def most_output(body: Mapping[str, Any]) -> int:
    """Most tokens that the answer to a request can have."""
    return next(
        (body[name] for name in LIMITS if isinstance(body.get(name), int)),
        TOKENS_UNLIMITED,
    )
