"""What a batch of a student's training holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relabel.distill.students.examples import Examples
from relabel.distill.students.token_rows import PAD_MULTIPLE, PairTexts, TokenRow

# B rows of a batch, K grades


class Collator:
    """Row numbers become a batch of tensors.

    A batch is `{"tokens": …, "targets": {head: [B, K]}, "weights": {head: [B]}, "row_weight": [B], "rows": int64 [B]}`.

    Args:
        pad_multiple: widths are rounded up to it, see `pad_multiple_for`.
    """

    def __init__(
        self, examples: Examples, tokens: Sequence[TokenRow], texts: PairTexts, *, pad_multiple: int = PAD_MULTIPLE
    ) -> None:
        self._pad_multiple = pad_multiple
        self._tokens = tokens
        self._texts = texts
        self._targets = {name: torch.from_numpy(values) for name, values in examples.targets.items()}
        self._weights = {name: torch.from_numpy(values) for name, values in examples.weights.items()}
        self._row_weight = torch.from_numpy(examples.row_weight)

    def __call__(self, rows: Sequence[int]) -> dict[str, Any]:
        """The batch of these rows, in their order."""
        index = torch.tensor(list(rows))
        return {
            "tokens": self._texts.collate([self._tokens[row] for row in rows], pad_multiple=self._pad_multiple),
            "targets": {name: values[index] for name, values in self._targets.items()},
            "weights": {name: values[index] for name, values in self._weights.items()},
            "row_weight": self._row_weight[index],
            "rows": index,
        }
