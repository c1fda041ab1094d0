"""What a student's training consumes, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from relabel.distill.students.collator import Collator
from relabel.distill.training.batches import BatchPlan


@dataclass
class Feed:
    """Batches of one of the processes that train, and what they are looked at with.

    Args:
        plan: the batches of all processes.
        collator: row numbers to tensors.
        dev_figures: figures of the module on dev, by name; None without a dev split.
        accumulation: batches of an optimizer step, in each process.
        process: number of this one.
        num_processes: that share the batches in turn.
    """

    plan: BatchPlan
    collator: Collator
    dev_figures: Callable[[Any], dict[str, float]] | None
    accumulation: int
    process: int = 0
    num_processes: int = 1

    @property
    def num_batches(self) -> int:
        """Of an epoch, in each process."""
        return len(self.plan) // self.num_processes

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps of an epoch; the last one may have fewer batches."""
        return math.ceil(self.num_batches / self.accumulation)

    def epochs_at(self, step: int) -> float:
        """Passes over the rows that so many steps make."""
        whole, rest = divmod(step, self.epoch_steps)
        return whole + rest * self.accumulation / self.num_batches

    def rows_of_steps(self, first: int, last: int) -> Iterator[list[list[int]]]:
        """Row numbers of this process's batches in each step, from behind the first to the last."""
        for step in range(first, last):
            epoch, place = divmod(step, self.epoch_steps)
            if step == first or place == 0:
                self.plan.set_epoch(epoch)
                own = list(self.plan)[self.process :: self.num_processes]
            yield own[place * self.accumulation : (place + 1) * self.accumulation]
