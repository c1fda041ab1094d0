"""What trains a student, whatever its kind: what it is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relabel.distill.students.bases import Base
from relabel.distill.students.examples import Examples
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_manifest import TrainingFacts
from relabel.distill.students.student_record import StudentRecord
from relabel.distill.students.token_rows import PairTexts, TokenRow
from relabel.distill.training.outcomes import Outcome


@dataclass
class TrainingInputs:
    """All that a training starts from.

    Args:
        tokens: of all rows of the examples.
        checkpoints: folder that a training which is resumed keeps them in.
        say: where progress goes.
    """

    spec: DistillSpec
    base: Base
    record: StudentRecord
    examples: Examples
    tokens: list[TokenRow]
    texts: PairTexts
    checkpoints: Path
    say: Callable[[str], None]


class Trainer(Protocol):
    """A function that trains a student of its kind."""

    def __call__(
        self, inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]
    ) -> tuple[Any, TrainingFacts, Outcome]:
        """Train.

        Args:
            dev_figures: figures of a module on dev.
        Returns:
            The trained module on the CPU, what there is to say about the training, and its curve and remarks.
        Raises:
            TrainingError: the loss is not finite.
            InputError: the rows do not do for what the spec asks.
        """
        ...
