"""Every rollout of a training, and the graph's coefficients by step, as Parquet.

Rollouts are written in parts, each as far as a checkpoint goes, before that checkpoint is there. A training that goes
on from a checkpoint keeps the parts that it names and drops what came after.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.teachers.rollout_files import (
    EDGE_SCHEMA,
    EDGES_NAME,
    PARTS,
    ROLLOUT_SCHEMA,
    ROLLOUTS_NAME,
    parts_of,
)
from relabel.distill.teachers.rollouts import Rollout
from relabel.distill.teachers.scores import Score
from relabel.distill.training.disk_errors import sync_files, writing
from relabel.manifests.digests import first_changed, sha256_file
from relabel.manifests.errors import ManifestError


@dataclass
class RolloutCounts:
    """How many rollouts there were, the tokens that the model wrote, and those that it was given."""

    rollouts: int = 0
    tokens: int = 0
    prompt_tokens: int = 0


class RolloutLog:
    """Rollouts that are not yet written, the edges, and counts of all rollouts.

    Args:
        folder: where the parts go, beside the checkpoints; None keeps nothing.
        columns: further ones of the method, filled from `Score.columns`.
    """

    def __init__(self, folder: Path | None, *, columns: Sequence[pa.Field] = ()) -> None:
        self._schema = pa.schema([*ROLLOUT_SCHEMA, *columns])
        self._folder = None if folder is None else folder / PARTS
        self._pending: list[dict[str, Any]] = []
        self._parts: dict[str, str | None] = {}  # by name, its sha256; None in what relabel 0.1 wrote
        self.edges: list[list[Any]] = []
        self.counts = RolloutCounts()

    def add(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
        *,
        advantages: Sequence[float],
        node_advantages: Sequence[Sequence[float]] | None,
        group: int,
    ) -> None:
        """Add what was generated for a step.

        Args:
            group: rollouts of one prompt; they follow each other.
        """
        if self._folder is None:
            return
        for place, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            self.counts.rollouts += 1
            self.counts.tokens += rollout.num_own
            self.counts.prompt_tokens += len(rollout.prompt_ids) + len(rollout.completion_ids) - rollout.num_own
            self._pending.append(
                {
                    "step": step,
                    "row_id": rollout.pair.row_id,
                    "sample": place % group,
                    "texts": [turn.text for turn in rollout.turns],
                    "grade": None if rollout.label is None else rollout.label.grade,
                    "reward": None if math.isnan(score.reward) else score.reward,
                    "advantage": advantages[place],
                    "format_ok": rollout.label is not None,
                    "fault": rollout.fault or None,
                    "detail": rollout.detail or None,
                    "tokens": rollout.num_own,
                    "node_rewards": None if score.base is None else list(score.base),
                    "node_advantages": None if node_advantages is None else list(node_advantages[place]),
                    **score.columns,
                }
            )

    def add_edges(self, step: int, logits: Sequence[float], alpha: Mapping[str, float]) -> None:
        """Add the coefficients, by edge, as they are after a step."""
        self.edges += [[step, edge, logit, value] for (edge, value), logit in zip(alpha.items(), logits, strict=True)]

    def flush(self, step: int) -> list[str]:
        """Write what is pending as the part of a checkpoint's step; the names of all parts."""
        if self._folder is not None and self._pending:
            name = f"step-{step:06d}.parquet"
            self._folder.mkdir(parents=True, exist_ok=True)
            with writing(self._folder, self._folder.parent):
                (self._folder / name).write_bytes(_parquet(pa.Table.from_pylist(self._pending, schema=self._schema)))
                sync_files(self._folder, name)
            self._parts[name] = sha256_file(self._folder / name)
            self._pending = []
        return list(self._parts)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of a step keeps; all that is pending is written."""
        self.flush(step)
        return {"parts": dict(self._parts), "edges": self.edges, "counts": asdict(self.counts)}

    def go_on(self, held: Mapping[str, Any]) -> None:
        """Take up what a checkpoint keeps; nothing begins anew.

        Raises:
            ManifestError: a part is missing, or not as it was written.
        """
        self._parts = parts_of(held)
        self._pending = []
        self.edges = [list(one) for one in held.get("edges", [])]
        self.counts = RolloutCounts(**held.get("counts", {}))
        if self._folder is not None and (bad := first_changed(self._folder, self._parts)) is not None:
            raise ManifestError(
                f"{self._folder / bad}: rollouts that the checkpoint names are missing, or not as they were written. "
                "Train again with --restart."
            )

    def write(self, folder: Path, *, step: int) -> None:
        """Write `ROLLOUTS_NAME`, and `EDGES_NAME` where there are edges, into the finished model's folder."""
        parts = self.flush(step)
        if self._folder is not None:
            tables = [pq.read_table(self._folder / name) for name in parts]
            table = pa.concat_tables(tables) if tables else self._schema.empty_table()
            (folder / ROLLOUTS_NAME).write_bytes(_parquet(table.combine_chunks()))  # however often it was stopped
        if self.edges:
            columns = [
                pa.array(column, kind.type)
                for column, kind in zip(zip(*self.edges, strict=True), EDGE_SCHEMA, strict=True)
            ]
            table = pa.Table.from_arrays(columns, schema=EDGE_SCHEMA)
            (folder / EDGES_NAME).write_bytes(_parquet(table))


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()
