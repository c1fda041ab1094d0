"""Logits of many rows, and softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distill.students.length_batches import batch_tokens_on, length_batches
from distill.students.token_rows import PairTexts, TokenRow, pad_multiple_for


def logits_of_rows(
    module: Any, texts: PairTexts, rows: Sequence[TokenRow], heads: dict[str, int], *, batch_tokens: int | None = None
) -> dict[str, np.ndarray]:
    """Logits of token rows in their order, by head float32 [B, K]; longest rows first, so that memory peaks at once or
    never.

    Args:
        batch_tokens: tokens of a batch, padding included; by default what suits the module's device.
    """
    import torch

    out = {name: np.zeros((len(rows), grades), dtype=np.float32) for name, grades in heads.items()}
    device = next(module.parameters()).device
    with torch.inference_mode():
        for chosen in length_batches([len(row.ids) for row in rows], batch_tokens or batch_tokens_on(device.type)):
            batch = texts.collate([rows[place] for place in chosen], pad_multiple=pad_multiple_for(device))
            found = module(**{name: tensor.to(device) for name, tensor in batch.items()})
            for name, values_BK in found.items():
                out[name][chosen] = values_BK.float().cpu().numpy()
    return out


def softmax(logits_BK: np.ndarray) -> np.ndarray:
    """Rows of probabilities, float32, from logits."""
    shifted = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)
