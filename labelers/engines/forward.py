"""Forward passes of a decoder over a batch of rows: grouped-query attention, the key-value cache, prefill and decode
steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from relabel.manifests.errors import ModelError

# ------------------------------------------------------------------------------
# Attention whose keys and values several heads share, without copies of them.


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
    whole cache threefold at every step. While decoding, query heads of a group are taken for so many query positions
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


# ------------------------------------------------------------------------------
# Keys and values of all rows in flight, in one buffer a layer; rows come and go without a copy of the others.
#
# Every row begins at column 0, so a column is a position. A prefill writes a block of neighbouring rows, a decoding
# step writes one column per row, each at its own row's end; what lies beyond a row's end is masked by the caller and
# overwritten later. Rows in use are always the first ones: when one leaves, the last one moves into its place.


# R rows, H key-value heads, T columns, D width of a head


COLUMN_STEP = 64
"""Buffers grow to a multiple of this many columns, so that a slightly longer row does not move everything again."""


@dataclass(slots=True)
class Window:
    """What the next forward pass writes: a block of rows from column `start`, or, with `ends`, one column per row."""

    first: int = 0
    last: int = 0
    start: int = 0
    stop: int = 0
    ends: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one layer: two buffers [R, H, T, D], made when the first keys show H and D."""

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a masked column still enters the sum, and 0 times NaN is NaN.
        return like.new_zeros((self.owner.num_rows, like.shape[1], self.owner.num_columns, like.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.owner.window
        if window.ends is None:
            self.keys[window.first : window.last, :, window.start : window.stop] = key_states
            self.values[window.first : window.last, :, window.start : window.stop] = value_states
        else:
            self.keys[window.rows, :, window.ends] = key_states[:, :, 0]
            self.values[window.rows, :, window.ends] = value_states[:, :, 0]
        block = slice(window.first, window.last)
        return self.keys[block, :, : window.stop], self.values[block, :, : window.stop]

    def resize(self, used_rows: int, used_columns: int) -> None:
        """Move what is in use into buffers of the owner's present size."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._buffer(old)
            new[:used_rows, :, :used_columns] = old[:used_rows, :, :used_columns]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.window.stop, 0

    def get_seq_length(self) -> int:
        return self.owner.window.start

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):  # type: ignore[misc]
    """All layers' buffers, and the window that the next forward pass writes.

    Args:
        num_layers: decoder layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self.window = Window()
        self.num_rows = 0
        self.num_columns = 0
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])

    def reserve(self, num_rows: int, num_columns: int, *, used_rows: int, used_columns: int) -> None:
        """Have at least `num_rows` x `num_columns`. Buffers shrink only while no row is in use."""
        columns = -(-num_columns // COLUMN_STEP) * COLUMN_STEP
        is_wasteful = used_rows == 0 and (self.num_columns > 2 * columns or self.num_rows > 2 * num_rows)
        if num_rows <= self.num_rows and columns <= self.num_columns and not is_wasteful:
            return
        keep = used_rows > 0
        self.num_rows = max(num_rows, self.num_rows) if keep else num_rows
        self.num_columns = max(columns, self.num_columns) if keep else columns
        for layer in self.layers:
            layer.resize(used_rows, used_columns)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one row over another's."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def snapshot(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A copy of a row's first `length` columns, a pair [H, length, D] a layer."""
        return [(layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone()) for layer in self.layers]

    def restore(self, saved: list[tuple[torch.Tensor, torch.Tensor]], first: int, last: int) -> None:
        """Begin the rows first..last-1 with what a snapshot holds."""
        for layer, (keys, values) in zip(self.layers, saved, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.keys[first:last, :, : keys.shape[1]] = keys
            layer.values[first:last, :, : values.shape[1]] = values


# ------------------------------------------------------------------------------
# Forward passes of one decoder over rows of a `RowCache`: a prefill of a block of rows, or one more token for every
# row.
#
# Masks and positions are made here, since rows begin at column 0 and end where they end. Only each row's last logits
# are ever computed.


# B rows, S new tokens, P prefix columns, T columns, V vocabulary


KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


class Forward:
    """Runs a decoder over the rows of its cache.

    Args:
        model: a causal language model of transformers, in eval mode.
        device: where it lies.
    Raises:
        ModelError: the model has layers that are no attention over keys and values.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        config = model.config.get_text_config()
        self.layer_types = _layer_types(config, model.config.model_type)
        self.sliding_window: int | None = getattr(config, "sliding_window", None)
        self.cache = RowCache(config.num_hidden_layers)
        self._last: torch.Tensor | None = None
        self._lowest = torch.finfo(model.dtype).min
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(
                f"models of type {model.config.model_type} have no output layer over a vocabulary; a decoder is needed."
            )
        head.register_forward_pre_hook(self._keep_last)
        self.vocab_size: int = head.weight.shape[0]

    def check(self) -> bool:
        """Run a few tokens our way and the model's own way, and compare the logits.

        Models differ in what they make of masks, positions and caches that they are handed; one that ignores ours, or
        mixes the rows of a batch, would give plausible labels. Takes six forward passes of a few tokens, and five
        more where rows can't be run together.

        Returns:
            Whether rows may be run together; False for a model that answers so only a row that is alone.
        Raises:
            ModelError: the model can't be run by rows of a cache, or says something else when it is.
        """
        ids = [token * 7919 % self.vocab_size for token in range(1, 25)]
        limit = 0.01 if self.model.dtype == torch.float32 else 0.25  # bfloat16 alone makes a few hundredths
        if self._difference([ids, ids[:11] + ids[21:]]) < limit:
            return True
        difference = self._difference([ids])
        if not difference < limit:
            raise ModelError(
                f"models of type {self.model.config.model_type} can't be run by this engine: its logits are off by "
                f"{difference:.3g} standard deviations (limit {limit}) against the model's own; try vllm."
            )
        return False

    def _difference(self, rows: Sequence[Sequence[int]]) -> float:
        """How far the last logits of rows that we run together, with a prefix that they share, lie from those that the
        model gives each alone; in standard deviations, of the worst row.
        """
        first, B = rows[0], len(rows)
        try:
            with torch.inference_mode():
                alone = (torch.tensor([row], device=self.device) for row in rows)
                own_BV = torch.cat([self.model(input_ids=ids, use_cache=False).logits[:, -1] for ids in alone]).float()
                self.cache.reserve(B, len(first), used_rows=0, used_columns=0)
                self.prefill([first[:8], first[:3]][:B], first_row=0, prefix=0)
                self.cache.restore(self.cache.snapshot(0, 8), 0, B)
                self.prefill([row[8:-3] for row in rows], first_row=0, prefix=8)
                for place in (-3, -2, -1):
                    ours_BV = self.decode([row[place] for row in rows], [len(row) + place for row in rows])
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as exc:
            raise ModelError(
                f"models of type {self.model.config.model_type} can't be run by this engine ({type(exc).__name__}); "
                "try vllm."
            ) from exc
        return float(((ours_BV - own_BV).abs().amax(1) / own_BV.std(1)).max())

    def prefill(self, suffixes: Sequence[Sequence[int]], *, first_row: int, prefix: int) -> torch.Tensor:
        """Run new rows whose first `prefix` columns are in the cache already.

        Args:
            suffixes: token ids after the prefix, at least one a row.
            first_row: the rows first_row.. take them, in order.
            prefix: columns that all of them share.
        Returns:
            Raw logits after each row's last token, float32 [B, V].
        """
        lengths = [len(suffix) for suffix in suffixes]
        B, S = len(lengths), max(lengths)
        padded = [[*suffix, *itertools.repeat(0, S - len(suffix))] for suffix in suffixes]
        ids_BS = torch.tensor(padded, device=self.device)
        positions_S = torch.arange(prefix, prefix + S, device=self.device)
        columns_T = torch.arange(prefix + S, device=self.device)
        self.cache.window = Window(first_row, first_row + B, prefix, prefix + S)
        # Padding is to the right, where a causal mask keeps it from everything that counts.
        masks = self._masks(columns_T[None, None, None, :], positions_S[None, None, :, None])
        if prefix == 0 and "sliding_attention" not in self.layer_types:
            for mask in masks.values():
                mask.is_plain_causal = True
        self._last = torch.tensor([length - 1 for length in lengths], device=self.device)
        return self._run(ids_BS, positions_S.expand(B, S), masks)

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append one token to each of the first rows, whose columns in use are `lengths`. Returns raw logits, float32
        [B, V].
        """
        B, T = len(tokens), max(lengths) + 1
        ends_B = torch.tensor(lengths, device=self.device)
        self.cache.window = Window(0, B, T - 1, T, ends_B, torch.arange(B, device=self.device))
        columns_T = torch.arange(T, device=self.device)
        masks = self._masks(columns_T[None, None, None, :], ends_B[:, None, None, None])
        self._last = None
        return self._run(torch.tensor(tokens, device=self.device)[:, None], ends_B[:, None], masks)

    def _masks(self, columns: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Additive masks by kind of layer: a position sees the columns up to itself, in a sliding layer only the last
        ones of them.
        """
        masks = {}
        for kind in self.layer_types:
            is_hidden = columns > positions
            if kind == "sliding_attention" and self.sliding_window is not None:
                is_hidden = is_hidden | (columns <= positions - self.sliding_window)
            masks[kind] = torch.zeros(is_hidden.shape, dtype=self.model.dtype, device=self.device).masked_fill_(
                is_hidden, self._lowest
            )
        return masks

    def _run(self, ids_BS: torch.Tensor, positions_BS: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            output = self.model(
                input_ids=ids_BS,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions_BS,
                past_key_values=self.cache,
                use_cache=True,
            )
        logits_BV: torch.Tensor = output.logits[:, -1].float()
        return logits_BV

    def _keep_last(self, _head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the head runs: only the row's last hidden state is worth V products."""
        if self._last is None:
            return None
        hidden = inputs[0]
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return (hidden[rows, self._last][:, None],)


def _layer_types(config: Any, model_type: str) -> tuple[str, ...]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    unknown = sorted(set(kinds) - KNOWN_LAYERS)
    if unknown:
        raise ModelError(
            f"models of type {model_type} have layers of kind {', '.join(unknown)}, which this engine can't run; try "
            "vllm."
        )
    return tuple(sorted(set(kinds)))
