"""What a training by reinforcement leaves beside the model, as Parquet: names and columns, for whoever reads it without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

NODES = ("r", "s", "a", "q_s", "q_a", "p_s", "p_a")
"""Grade, subject score, attribute score, and the four texts: of query and product, on subject and attribute."""
ROLLOUTS_NAME = "rollouts.parquet"
EDGES_NAME = "edges.parquet"
ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("row_id", pa.int64()),
        ("sample", pa.int32()),
        ("texts", pa.list_(pa.string())),
        ("grade", pa.int8()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("format_ok", pa.bool_()),
        ("fault", pa.string()),
        ("detail", pa.string()),
        ("tokens", pa.int32()),
        ("node_rewards", pa.list_(pa.float64())),
        ("node_advantages", pa.list_(pa.float64())),
    ]
)
EDGE_SCHEMA = pa.schema(
    [("step", pa.int64()), ("edge", pa.string()), ("logit", pa.float64()), ("coefficient", pa.float64())]
)


PARTS = "rollouts"
"""Folder beside the checkpoints, with all rollouts up to each of them."""


def parts_of(held: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts that a checkpoint names, by name their sha256; None in what relabel 0.1 wrote.

    Args:
        held: what it keeps of the rollouts.
    """
    parts = held.get("parts", {})
    digests = parts if isinstance(parts, dict) else held.get("digests", {})  # older ones kept a list beside them
    return {name: digests.get(name) for name in parts}


class RolloutRow(NamedTuple):
    """One row of `ROLLOUTS_NAME`, in the order of `ROLLOUT_SCHEMA`, and the columns of the training's method."""

    step: int
    row_id: int
    sample: int
    texts: list[str] | None
    grade: int | None
    reward: float | None
    advantage: float
    format_ok: bool
    fault: str | None
    detail: str | None
    tokens: int
    node_rewards: list[float] | None
    node_advantages: list[float] | None
    further: Mapping[str, Any]

    @staticmethod
    def of(values: dict[str, Any]) -> RolloutRow:
        """Plain values by column."""
        own = {name: values.pop(name) for name in ROLLOUT_SCHEMA.names}
        return RolloutRow(**own, further=values)
