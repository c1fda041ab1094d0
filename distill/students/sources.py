"""What a student learns from, and is judged by: labels with the texts of their pairs, and gold."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from relabel.manifests.specs import Columns, PathText, PatternText, Spec


class PairsSource(Spec):
    """Where the texts of a label file's rows are."""

    path: tuple[PatternText, ...]
    """Parquet file, folder, glob or a list; a label's `row_id` is a row's place in them."""
    columns: Columns = Columns()
    """Their columns."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class LabelSource(Spec):
    """One set of labels."""

    path: PathText = Field(min_length=1)
    """Output folder of a finished run, or a Parquet file with the label schema."""
    weight: float = Field(1.0, gt=0.0, le=1000.0)
    """Weight of each of its rows in the loss."""
    pairs: PairsSource | None = None
    """Texts of a label file's rows; a run knows its own."""
    allow_over_limit: bool = False
    """Take a run with more quarantined rows than its limit allows: what is missing is seldom a fair sample."""


class GoldSource(Spec):
    """Gold: to judge by, and with `loss.gold_weight` above 0 to learn from."""

    path: PathText = Field(min_length=1)
    """Parquet with texts and grades, or with grades alone (then also TREC qrels, CSV, TSV or JSONL); may be a label
    run's own input. A folder of Parquet where it is learned from.
    """
    grade: str = "grade"
    """Column of the grade."""
    map: dict[int, int] | None = None
    """Brings grades to the labels' scale, say {0: 0, 1: 1, 2: 1, 3: 2}."""
    columns: Columns = Columns()
    """Columns of the texts and ids."""
    duplicates: Literal["error", "mean", "first"] = "error"
    """A pair whose grades differ, where grades are joined by (query_id, doc_id)."""
