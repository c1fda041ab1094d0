"""Scoring many pairs with a student: token rows sorted by length, batches of a token budget, calibrated distributions
in the order given.

A call scores one block of rows (the run's chunk) and its batches follow from that block alone, never from what was
scored before or beside it, so that a block that is scored again gives the same bits on the same machine (unless memory
ran out, which makes batches smaller).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.distill.students.logits import softmax
from relabel.distill.students.students import StudentModel
from relabel.distill.students.token_rows import TokenRow, pad_multiple_for
from relabel.manifests.errors import ModelError
from relabel.manifests.phi import PhiTable

logger = logging.getLogger(__name__)

# B rows, K grades


class PairScorer(Protocol):
    """What a score run asks: a student, or an exported one."""

    @property
    def phi(self) -> PhiTable:
        """The rule map of a student with subject and attribute heads."""
        ...

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs, cut as in training."""
        ...

    def score(
        self, rows: Sequence[TokenRow], on_progress: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """Calibrated distributions, see `Scorer.score`."""
        ...


class Scorer:
    """A student at work.

    Args:
        student: on its device, in eval mode.
        batch_tokens: tokens of a batch, padding included; by default what suits the device.
    """

    def __init__(self, student: StudentModel, *, batch_tokens: int | None = None) -> None:
        self.student = student
        self.batch_tokens = batch_tokens or batch_tokens_on(student.device)
        self._pad_multiple = pad_multiple_for(student.device)

    @property
    def phi(self) -> PhiTable:
        """Of the student's record."""
        return self.student.record.phi

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs, cut as in training."""
        return self.student.texts.encode(pairs)

    def score(
        self, rows: Sequence[TokenRow], on_progress: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """Calibrated distributions.

        Args:
            rows: one or more.
            on_progress: called after each batch with the number of its rows; False gives up.
        Returns:
            By head, float32 [B, K] in the order of the rows; a row whose logits are not finite has NaN. None if
            `on_progress` gave up.
        Raises:
            ModelError: not even one pair fits into the device's memory.
        """
        import torch

        order: list[int] = []
        logits: list[dict[str, Any]] = []
        with torch.inference_mode():
            for places in length_batches([len(row.ids) for row in rows], self.batch_tokens):
                logits.append(self._forward([rows[place] for place in places]))
                order += places
                if not on_progress(len(places)):
                    return None
            # one transfer a head and block: a GPU is not waited for between batches
            found = {name: torch.cat([batch[name] for batch in logits]).float().cpu().numpy() for name in logits[0]}
        out = {}
        for name, values_BK in found.items():
            sorted_BK = np.empty_like(values_BK)
            sorted_BK[order] = values_BK
            out[name] = _distributions(sorted_BK, self.student.record.temperature.get(name, 1.0))
        return out

    def _forward(self, rows: list[TokenRow]) -> dict[str, Any]:
        """Logits of one batch, still on the device; a batch that does not fit into memory is halved, and so are all
        later ones.
        """
        import torch

        held = self.student.texts.collate(rows, pad_multiple=self._pad_multiple)
        batch = {name: tensor.to(self.student.device) for name, tensor in held.items()}
        try:
            found: dict[str, Any] = self.student.module(**batch)
            return found
        except torch.OutOfMemoryError as exc:
            if len(rows) == 1:
                raise ModelError(
                    f"a single pair of {len(rows[0].ids)} tokens does not fit into the memory of "
                    f"{self.student.device}. Free some, or name another --device."
                ) from exc
        middle = len(rows) // 2
        self.batch_tokens = max(1, self.batch_tokens // 2)
        torch.cuda.empty_cache()
        logger.warning(
            "a batch of %d rows does not fit into the device's memory; batches now hold %d tokens (--batch-tokens)",
            len(rows),
            self.batch_tokens,
        )
        halves = [self._forward(rows[:middle]), self._forward(rows[middle:])]
        return {name: torch.cat([half[name] for half in halves]) for name in halves[0]}


def _distributions(logits_BK: np.ndarray, temperature: float) -> np.ndarray:
    is_finite_B = np.isfinite(logits_BK).all(axis=1)
    found = np.full(logits_BK.shape, np.nan, dtype=np.float32)
    found[is_finite_B] = softmax(logits_BK[is_finite_B] / temperature)
    return found
