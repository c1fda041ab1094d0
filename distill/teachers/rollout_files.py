"""What a training by reinforcement leaves beside the model, as Parquet: names and columns, for whoever reads it without
torch.
"""

from __future__ import annotations

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
