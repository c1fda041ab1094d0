"""What a student learns from, as records: the part of its manifest that is known before it is trained. Fields are in
the order of the JSON; those that JSON may do without are None there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from relabel.manifests.records import LEFT_OUT


@dataclass(frozen=True)
class SourceRows:
    """Rows of a source of labels; of a file all that it holds, of a run also by what became of them."""

    in_: Annotated[int, Field(alias="in")]
    labelled: int | None = field(default=None, metadata=LEFT_OUT)
    reused: int | None = field(default=None, metadata=LEFT_OUT)
    quarantined: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class LearnedLabels:
    """A source of labels: a run, or a file, which has no name, labeler, model and fingerprint.

    Args:
        manifest_sha256, sha256: of a run's manifest, of a file.
        rows_by_status: of a file.
        labels: those that could be used.
    """

    path: str
    kind: Literal["run", "file"]
    name: str | None = field(default=None, metadata=LEFT_OUT)
    labeler: str | None = field(default=None, metadata=LEFT_OUT)
    model: str | None = field(default=None, metadata=LEFT_OUT)
    fingerprint: str | None = field(default=None, metadata=LEFT_OUT)
    manifest_sha256: str | None = field(default=None, metadata=LEFT_OUT)
    sha256: str | None = field(default=None, metadata=LEFT_OUT)
    rows: SourceRows | None = field(default=None, metadata=LEFT_OUT)
    quarantined_by_status: dict[str, int] | None = field(default=None, metadata=LEFT_OUT)
    rows_by_status: dict[str, int] | None = field(default=None, metadata=LEFT_OUT)
    over_limit: bool | None = field(default=None, metadata=LEFT_OUT)
    weight: float
    labels: int


@dataclass(frozen=True, kw_only=True)
class LearnedGold:
    """Where gold comes from.

    Args:
        grade: column of the grades; None where gold says other things.
        sets, answers: columns of the chunks and of the answers that are wanted.
        rows, without_grade, inputs_sha256: of gold that was learned from.
        graded_rows: rows of the distillation that have a grade.
    """

    path: str
    grade: str | None
    map: dict[int, int] | None = None
    sets: str | None = field(default=None, metadata=LEFT_OUT)
    answers: str | None = field(default=None, metadata=LEFT_OUT)
    rows: int | None = field(default=None, metadata=LEFT_OUT)
    without_grade: int | None = field(default=None, metadata=LEFT_OUT)
    inputs_sha256: str | None = field(default=None, metadata=LEFT_OUT)
    joined_by: str | None = field(default=None, metadata=LEFT_OUT)
    graded_rows: int = 0


@dataclass(frozen=True)
class ExampleCounts:
    """Rows of a distillation."""

    all: int
    labelled: int
    gold_alone: int


@dataclass(frozen=True)
class SplitSide:
    """One side; `texts_seen_in_train` counts its queries whose text a training query has under another id."""

    rows: int
    queries: int
    texts_seen_in_train: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class SplitShares:
    """Expected shares of the queries."""

    dev: float
    test: float


@dataclass(frozen=True)
class SplitFacts:
    """How rows were split; `sha256` says which query lies where."""

    by: str
    seed: int
    shares: SplitShares
    train: SplitSide
    dev: SplitSide
    test: SplitSide
    sha256: str

    def sides(self) -> dict[str, SplitSide]:
        """Train, dev and test, by name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}


@dataclass(frozen=True)
class DataFacts:
    """All of it.

    Args:
        rows_by_head: rows that train each head.
    """

    labels: list[LearnedLabels]
    gold: LearnedGold | None
    rows: ExampleCounts
    rows_by_head: dict[str, int]
    split: SplitFacts
