"""Logits of many rows: batches of like length, and softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distill.students.token_rows import PairTexts, TokenRow, pad_multiple_for

BATCH_TOKENS = 8192
"""Tokens of a scoring batch, padding included: fills two cores and is a small bite for a GPU."""


def logits_of_rows(
    module: Any, texts: PairTexts, rows: Sequence[TokenRow], heads: dict[str, int], *, batch_tokens: int = BATCH_TOKENS
) -> dict[str, np.ndarray]:
    """Logits of token rows in their order, by head float32 [B, K]; longest rows first, so that memory peaks at once or
    never.
    """
    import torch

    out = {name: np.zeros((len(rows), grades), dtype=np.float32) for name, grades in heads.items()}
    device = next(module.parameters()).device
    with torch.inference_mode():
        for chosen in length_batches([len(row.ids) for row in rows], batch_tokens):
            batch = texts.collate([rows[place] for place in chosen], pad_multiple=pad_multiple_for(device))
            found = module(**{name: tensor.to(device) for name, tensor in batch.items()})
            for name, values_BK in found.items():
                out[name][chosen] = values_BK.float().cpu().numpy()
    return out


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[np.ndarray]:
    """Places of rows, longest first, in batches of at most `batch_tokens` tokens with padding (a longer row stands
    alone).
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


def softmax(logits_BK: np.ndarray) -> np.ndarray:
    """Rows of probabilities, float32, from logits."""
    shifted = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)
