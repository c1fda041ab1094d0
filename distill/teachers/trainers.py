"""What trains a teacher, whatever the method: what it is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from relabel.distill.teachers.bases import TeacherBase
from relabel.distill.teachers.teacher_manifest import TeacherData
from relabel.distill.training.memory import Halved
from relabel.distill.training.outcomes import Outcome
from relabel.manifests.records import LEFT_OUT
from relabel.manifests.storage.context import Storage


class Trained(NamedTuple):
    """What training left.

    Args:
        model: the causal language model of transformers, adapters merged, on the CPU.
        halved: whether memory ended at first.
        write_more: writes what the method leaves beside the model, into the teacher's folder.
    """

    model: Any
    outcome: Outcome
    halved: Halved
    write_more: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class TrainingTime:
    """How long a training would take, in seconds; looks at dev left out.

    Args:
        steps: that were timed.
        seconds: at their mean pace; `least` and `most` at that of the fastest and the slowest stretch.
    """

    steps: int
    seconds: float
    least: float
    most: float


@dataclass(frozen=True)
class TrainingEstimate:
    """What a training would do.

    Args:
        tokens: that the model reads, over all steps.
        look_tokens: read and written beside those, in looks at dev.
        dropped: rows left out, by reason.
        time: where it was measured.
    """

    rows: int
    examples: int
    steps: int
    tokens: int
    answer_tokens: int
    look_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    time: TrainingTime | None = field(default=None, metadata=LEFT_OUT)


class TeacherTrainer(Protocol):
    """One method at work on one spec. Making one reads and checks all data, and loads no weights.

    Raises:
        RelabelError: the data does not do for what the spec asks.
    """

    data: TeacherData
    """For the manifest."""
    digest: str
    """Of all that is learned from."""
    labeler: dict[str, Any]
    """Options of the labeler whose prompts are used."""
    templates: dict[str, str]
    """sha256 of its templates, by file name."""
    notes: list[str]
    """Remarks that the user should hear."""

    def __init__(self, spec: Any, base: TeacherBase, storage: Storage) -> None: ...

    def estimate(self) -> TrainingEstimate:
        """What `train` would do."""
        ...

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, going on from the last whole checkpoint.

        Args:
            checkpoints: folder that they are kept in.
            say: where progress goes.
        Raises:
            TrainingError: the loss is not finite, or memory runs out.
            ModelError: the weights can't be loaded.
        """
        ...


@runtime_checkable
class AsksAnEngine(Protocol):
    """A method that asks an engine on the way, some of whose options name secrets."""

    def take_secrets(self, secrets: Mapping[str, Any]) -> None:
        """Take the secrets' values, by option."""
        ...
