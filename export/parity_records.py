"""The parity of a bundle's models as its manifest holds it: what every reader relies on; the manifest holds more beside
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from manifests.errors import ManifestError
from manifests.records import checked, fault_of


@dataclass(frozen=True, slots=True)
class F1Loss:
    """Points of macro F1 that a model loses against the student, with a 95 % interval over queries."""

    loss_points: float
    loss_low: float
    loss_high: float


@dataclass(frozen=True, slots=True)
class NdcgLoss:
    """None where no query can be ranked."""

    loss: float | None


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """A model against the student in batches of one size; `tau` is None where the student tells no two documents of a
    query apart.
    """

    max_abs: float
    flip_share: float
    tau: float | None
    judged_by: str
    f1_macro: F1Loss
    ndcg: Annotated[NdcgLoss, Field(alias="ndcg@10")]


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """One bound of a precision's gate."""

    check: str
    value: float
    bound: float
    has_passed: bool


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row whose probabilities differ much: where it lies, and both distributions, None for what is not finite."""

    source: str
    row: int
    batch_size: int
    is_flip: bool
    max_abs: float | None
    student: list[float | None]
    model: list[float | None]


@dataclass(frozen=True, slots=True)
class ModelParity:
    """One model against the student; `could_lose` as in `parity.could_lose`, absent in bundles of earlier days."""

    precision: str
    rows: int
    queries: int
    is_weak: bool
    by_batch_size: Annotated[dict[str, SizeFigures], Field(min_length=1)]
    checks: list[ParityCheck]
    has_passed: bool
    worst: list[WorstRow]
    could_lose: float | None = None

    @property
    def figures(self) -> list[SizeFigures]:
        """By batch size, as compared."""
        return list(self.by_batch_size.values())

    @property
    def flip_share(self) -> float:
        """Of the worst batch size."""
        return max(one.flip_share for one in self.figures)


@dataclass(frozen=True, slots=True)
class ParityBounds:
    """Of the spec, what is said beside the figures."""

    min_pairs: int
    batch_sizes: list[int]
    int8_max_f1_loss: float | None = None


@dataclass(frozen=True, slots=True)
class Parity:
    """All models of a bundle against its student."""

    spec: ParityBounds
    provider: str
    onnxruntime: str
    models: Annotated[list[ModelParity], Field(min_length=1)]


def read_parity(held: Any, where: str) -> Parity:
    """The section `parity` of a bundle's manifest.

    Args:
        where: the manifest, for messages.
    Raises:
        ManifestError: it is damaged; names the key.
    """
    try:
        return checked(Parity, held)
    except ValueError as exc:
        raise ManifestError(
            f"{where}: its parity is not as this relabel writes it ({fault_of(exc)}). Restore it from a copy."
        ) from exc
