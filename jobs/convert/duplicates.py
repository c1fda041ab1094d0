"""Pairs that occur more than once: with one value they are one row, with several the user says which holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relabel.jobs.convert.sources import Kind
from relabel.manifests.errors import InputError

Rule = Literal["error", "first", "mean", "keep"]
SHOWN = 5


@dataclass
class Duplicates:
    """What was found of them so far, bucket by bucket.

    Args:
        num_dropped: rows beyond the first of their pair.
        num_conflicts: pairs with several values.
        examples: of conflicts, for the message.
    """

    polars: Any
    rule: Rule
    kind: Kind
    num_dropped: int = 0
    num_conflicts: int = 0
    examples: list[str] = field(default_factory=list)
    _dropped: list[Any] = field(default_factory=list)
    _settled: list[Any] = field(default_factory=list)

    def settle(self, bucket: Any) -> Any:
        """One row a pair: a bucket (see `query_buckets`) without the rows beyond the first, and with settled values."""
        polars, pair = self.polars, ["query_id", "doc_id"]
        if self.rule == "keep":
            return bucket
        repeated = bucket.filter(polars.struct(pair).is_duplicated())
        if not repeated.height:
            return bucket
        repeated = repeated.with_columns(
            first=polars.col("row").min().over(pair), is_conflict=polars.col("value").n_unique().over(pair) > 1
        )
        dropped = repeated.filter(polars.col("row") != polars.col("first")).select("row")
        conflicts = repeated.filter("is_conflict")
        self._dropped.append(dropped)
        self.num_dropped += dropped.height
        self._note(conflicts)
        kept = bucket.join(dropped, on="row", how="anti", maintain_order="left")
        if self.rule != "mean" or not conflicts.height:
            return kept
        value, count = polars.col("value").sum(), polars.len().cast(polars.Int64)
        mean = (2 * value + count) // (2 * count) if self.kind == "grade" else polars.col("value").mean()
        settled = conflicts.group_by("first").agg(settled=mean).rename({"first": "row"})
        self._settled.append(settled)
        return _with(polars, kept, settled, "row", "value")

    @property
    def has_settled(self) -> bool:
        """Whether any value is not the source's own."""
        return bool(self._settled)

    def without(self, frame: Any, value: str, *, row: str) -> Any:
        """Rows of the source, with their position in `row`: the same rows left out, the same values settled as in the
        buckets.
        """
        polars = self.polars
        if self._dropped:
            self._dropped = [polars.concat(self._dropped)]
            frame = frame.join(self._dropped[0], left_on=row, right_on="row", how="anti", maintain_order="left")
        if self._settled:
            self._settled = [polars.concat(self._settled)]
            frame = _with(polars, frame, self._settled[0], row, value)
        return frame

    def _note(self, conflicts: Any) -> None:
        polars = self.polars
        pairs = conflicts.group_by("first", maintain_order=True).agg(polars.col("query_id", "doc_id").first(), "value")
        self.num_conflicts += pairs.height
        shown = pairs.head(SHOWN - len(self.examples)).select("query_id", "doc_id", "value")
        for query_id, doc_id, values in shown.iter_rows():
            listed = ", ".join(f"{value:g}" for value in values)
            self.examples.append(f"query {query_id}, document {doc_id}: {listed}")

    def refuse_conflicts(self, path: str) -> None:
        """Raise where pairs have several values and nobody said which holds.

        Raises:
            InputError: names them.
        """
        if self.num_conflicts and self.rule == "error":
            more = "; …" if self.num_conflicts > len(self.examples) else ""
            raise InputError(
                f"{path}: {self.num_conflicts:,} pairs have several {self.kind}s that differ "
                f"({'; '.join(self.examples)}{more}). Fix the source, or choose: --duplicates first or --duplicates "
                "mean; .jsonl and .parquet take --duplicates keep."
            )


def _with(polars: Any, frame: Any, settled: Any, row: str, column: str) -> Any:
    """A frame whose settled rows have their value; others keep what they have."""
    joined = frame.join(settled, left_on=row, right_on="row", how="left", maintain_order="left")
    value = polars.coalesce(polars.col("settled").cast(frame.schema[column]), polars.col(column))
    return joined.with_columns(value.alias(column)).drop("settled")
