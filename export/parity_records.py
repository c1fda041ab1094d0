"""The parity of a bundle's models as its manifest holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from relabel.manifests.records import LEFT_OUT, read_record


@dataclass(frozen=True, slots=True)
class F1Loss:
    """Macro F1 of both, and the points of it that a model loses against the student, with a 95 % interval over
    queries.
    """

    student: float
    model: float
    loss_points: float
    loss_low: float
    loss_high: float


@dataclass(frozen=True, slots=True)
class NdcgLoss:
    """nDCG@10 of both; None where no query can be ranked."""

    student: float | None
    model: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class OrderCounts:
    """Pairs of documents of one query: those that the student orders by more than the margin, and all."""

    ordered: Annotated[int, Field(validation_alias=AliasChoices("ordered", "told_apart"))]  # until 2026-11-22
    of: int
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """A model against the student in batches of one size.

    Args:
        max_abs: the largest |Δp|.
        tau: Kendall's, by query; None where the student orders no two documents of a query.
        flip_low, flip_high: bounds of `flip_share`, 95 %, over queries; absent with one query, and in bundles of
            earlier days.
        tau_low, tau_high: its bounds, 95 %, over queries; absent with fewer than two, and in bundles of earlier days.
        orders: absent in bundles of earlier days.
        judged_by: whose grades macro F1 and nDCG are by: `gold`, `teacher`, or the student's own.
        judged_queries: 0 in bundles of earlier days.
    """

    is_finite: bool
    max_abs: float
    max_abs_by_head: dict[str, float]
    flips: int
    flip_share: float
    flip_share_by_head: dict[str, float]
    flip_low: float | None = field(default=None, metadata=LEFT_OUT)
    flip_high: float | None = field(default=None, metadata=LEFT_OUT)
    tau: float | None
    tau_low: float | None = field(default=None, metadata=LEFT_OUT)
    tau_high: float | None = field(default=None, metadata=LEFT_OUT)
    orders: OrderCounts | None = field(default=None, metadata=LEFT_OUT)
    judged_by: str
    judged_rows: int
    judged_queries: int = 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParity:
    """One model against the student.

    Args:
        could_lose: as in `parity.could_lose`; absent in bundles of earlier days.
        doubts: as in `parity.doubts_of`, sentences.
        worst: the rows that differ most.
    """

    precision: str
    rows: int
    queries: int
    is_weak: bool
    by_batch_size: Annotated[dict[str, SizeFigures], Field(min_length=1)]
    checks: list[ParityCheck]
    has_passed: bool
    could_lose: float | None = None
    doubts: list[str] = field(default_factory=list)
    worst: list[WorstRow]

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
    """Of the spec, what is said beside the figures; the manifest holds all of it."""

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
    return read_record(Parity, held, where, "its parity is not as this relabel writes it", "Restore it from a copy.")
