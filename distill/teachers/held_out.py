"""Looks at held-out rows: the policy answers them without sampling, and what it earns there is noted.

Nothing is drawn from the generators of the training, and nothing is left in them: a training with looks and one without
sample the same rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from relabel.distill.teachers.rollouts import Dialogues, Generate
from relabel.distill.teachers.scores import GoldRow, Scored, answer_figures, roll_rows
from relabel.distill.training import checkpoints

SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class HeldOut:
    """Rows that nobody trains on.

    Args:
        scored: what all answers earn.
        batch: rows that are answered at once.
    """

    def __init__(self, rows: Sequence[GoldRow], dialogues: Dialogues, scored: Scored, *, batch: int) -> None:
        self._rows, self._dialogues, self._scored, self._batch = rows, dialogues, scored, batch

    def figures(self, generate: Generate) -> dict[str, float]:
        """What the answers earn, as `answer_figures` has it."""
        rollouts = []
        for start in range(0, len(self._rows), self._batch):
            rollouts += roll_rows(self._dialogues, self._rows[start : start + self._batch], generate)
        return answer_figures(rollouts, self._scored(rollouts, self._rows))


@contextmanager
def greedy(trainer: Any) -> Iterator[None]:
    """The most probable token each time, and generators as they were, while TRL's trainer generates."""
    if trainer.use_vllm:  # which draws from a generator of its own
        vllm = trainer.vllm_generation
        temperature, vllm.temperature = vllm.temperature, 0.0
        try:
            yield
        finally:
            vllm.temperature = temperature
        return
    sampled = trainer.generation_config, trainer.generation_kwargs
    states = checkpoints.random_states()
    kept = {name: value for name, value in trainer.generation_kwargs.items() if name not in SAMPLING}
    trainer.generation_kwargs = {**kept, "do_sample": False}
    trainer.generation_config = GenerationConfig(**trainer.generation_kwargs, disable_compile=True)
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = sampled
        checkpoints.restore_random(*states)
