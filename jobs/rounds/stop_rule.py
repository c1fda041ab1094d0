"""When a search is over."""

from __future__ import annotations

from typing import Literal

from relabel.manifests.specs import RoundsSpec

StopReason = Literal["sufficient", "tokens", "rounds"]


def stop_reason(useful_tokens: int, *, is_sufficient: bool, num_rounds: int, limits: RoundsSpec) -> StopReason | None:
    """Why a search ends after a round; None if it goes on. Of several reasons the first of `StopReason`.

    Args:
        useful_tokens: of the documents that were found to matter, over all rounds.
        is_sufficient: what the last review says.
        num_rounds: done so far, the last one included.
    Source:
        R2RAG, section 3.3: sufficient, over 20,000 tokens, or the fifth round.
    """
    if is_sufficient:
        return "sufficient"
    if useful_tokens > limits.max_tokens:
        return "tokens"
    return "rounds" if num_rounds >= limits.max_rounds else None
