"""Keys and values of all rows in flight, in one buffer a layer; rows come and go without a copy of the others.

Every row begins at column 0, so a column is a position. A prefill writes a block of neighbouring rows, a decoding step
writes one column per row, each at its own row's end; what lies beyond a row's end is masked by the caller and
overwritten later. Rows in use are always the first ones: when one leaves, the last one moves into its place.
"""

# R rows, H key-value heads, T columns, D width of a head

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

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
