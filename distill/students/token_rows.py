"""Rows of tokens, padded to one width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

PAD_MULTIPLE = 8
"""Batches are padded to a multiple of this many tokens: tensor cores want it, and few shapes spare a compiler
recompilations.
"""


class TokenRow(NamedTuple):
    """One pair as token ids; `types` are segment numbers (0 query, 1 document), None where the model knows none.

    `is_cut` says that the pair was too long and lost an end (with a tokenizer written in Python: that it may have,
    being of full length). `counts` are the query's, for a student that reads them.
    """

    ids: list[int]
    types: list[int] | None = None
    is_cut: bool = False
    counts: list[int] | None = None


class PairTexts(Protocol):
    """What turns pairs into token rows and rows into a batch."""

    max_tokens: int

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs, each at most `max_tokens` long."""
        ...

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """Padded int64 tensors [B, T] by the names that the student's module takes."""
        ...


def pad_multiple_for(device: object) -> int:
    """What widths are rounded up to: 8 for a GPU's matrix units and compiled shapes; a CPU would do 5 to 10 % more work
    on product titles for nothing.

    Args:
        device: a torch device, or what torch calls one.
    """
    return 1 if str(device) == "cpu" else PAD_MULTIPLE


def width_of(rows: Sequence[TokenRow], max_tokens: int, multiple: int) -> int:
    longest = max(len(row.ids) for row in rows)
    return min(-(-longest // multiple) * multiple, max(max_tokens, longest))


def padded(rows: Sequence[Sequence[int]], width: int, pad: int, *, is_left: bool) -> np.ndarray:
    out = np.full((len(rows), width), pad, dtype=np.int64)
    for number, row in enumerate(rows):
        if is_left:
            out[number, width - len(row) :] = row
        else:
            out[number, : len(row)] = row
    return out


def mask_of(rows: Sequence[TokenRow], width: int, *, is_left: bool) -> np.ndarray:
    lengths_B = np.array([len(row.ids) for row in rows])
    columns_T = np.arange(width)
    seen_BT = columns_T >= width - lengths_B[:, None] if is_left else columns_T < lengths_B[:, None]
    return seen_BT.astype(np.int64)


def tensors_of(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)) for name, values in batch.items()}
