"""Forward passes of one decoder over rows of a `RowCache`: a prefill of a block of rows, or one more token for every
row.

Masks and positions are made here, since rows begin at column 0 and end where they end. Only each row's last logits are
ever computed.
"""

# B rows, S new tokens, P prefix columns, T columns, V vocabulary

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from relabel.labelers.engines.kv_cache import RowCache, Window
from relabel.manifests.errors import ModelError

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
        mixes the rows of a batch, would give labels that look right. Takes six forward passes of a few tokens, and five
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
        # Padding stands to the right, where a causal mask keeps it from everything that counts.
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
