"""Logits of many rows, softmax, and whether a row is answered alike alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.distill.students.token_rows import PairTexts, TokenRow, pad_multiple_for
from relabel.manifests.errors import ModelError

# B rows, X numbers of an answer

PROBES = (
    ("red running shoes for women with wide feet, size 40", "A light shoe with a soft sole. " * 8),
    ("red shoes", "Shoes for women."),
    ("shoes", ""),
)
"""Pairs of three lengths, the longest first: packed, the second one has a row before it and one after it."""
LEAK_TOLERANCE = 3e-5
"""Largest difference between a row's answer alone and in a batch, relative to the answer. In float32, sums in another
order make up to 1.5e-6 (MiniLM, SmolLM2, a Qwen of 1.5B, 80 tiny models); what leaks made 2e-4 to 1.4 (padded:
convbert, nystromformer, fnet, rwkv, xlstm; packed: opt, bloom, mpt, gpt_oss, and all with a recurrence but lfm2).
"""
COARSE_TOLERANCE = 1e-2
"""The same where torch may multiply in TF32 or bfloat16."""


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


def refuse_leaks(answer: Callable[[list[Any]], np.ndarray], rows: Sequence[Any], where: str) -> None:
    """Answer a row alone and between others: an architecture that mixes rows, or reads their padding, gives scores that
    depend on the size of batches.

    Args:
        answer: one batch's answers, float [B, X], in the order of its rows.
        rows: of `PROBES`.
        where: what the message begins with.
    Raises:
        ModelError: the two differ by more than rounding, or the model can't take such a batch.
    """
    import torch

    try:
        alone_X, together_X = answer([rows[1]])[0], answer(list(rows))[1]
    except (TypeError, ValueError) as exc:
        raise ModelError(f"{where}: can't be run on padded batches ({type(exc).__name__}: {exc}).") from exc
    is_exact = torch.get_float32_matmul_precision() == "highest"
    difference = float(np.abs(together_X - alone_X).max() / (np.abs(alone_X).max() or 1.0))
    if difference > (LEAK_TOLERANCE if is_exact else COARSE_TOLERANCE):
        raise ModelError(
            f"{where}: its answer to a row changes with the other rows of a batch, by {difference:.1e} of the answer: "
            "scores would depend on --batch-tokens. If student.batching is packed, set it to padded; else take another "
            "model."
        )


def softmax(logits_BK: np.ndarray) -> np.ndarray:
    """Rows of probabilities, float32, from logits."""
    shifted = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)
