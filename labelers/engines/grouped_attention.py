"""Attention whose keys and values several heads share, without copies of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "relabel_grouped"
"""Name under which our attention is registered with transformers."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention that reads each key and value once for all query heads that share it.

    transformers repeats keys and values per query head where there is a mask: for SmolLM2 (9 heads on 3) it copied the
    whole cache threefold at every step. While decoding, the query heads of a group stand in as so many query positions
    instead. A square mask is always the plain causal one here (see `Forward.prefill`), for which the kernel needs no
    mask.
    """
    B, num_heads, S, D = query.shape
    if attention_mask is None or kwargs.get("position_bias") is not None or kwargs.get("s_aux") is not None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    if S == 1:
        folded = query.view(B, key.shape[1], -1, D)
        mask = attention_mask.expand(B, 1, folded.shape[2], key.shape[2])
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(B, num_heads, 1, -1).transpose(1, 2), None
    is_causal = getattr(attention_mask, "is_plain_causal", False)
    mask = None if is_causal else attention_mask
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
