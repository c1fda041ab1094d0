"""Every rollout of a training, and the graph's coefficients by step, as Parquet.

Rollouts are written in parts, each as far as a checkpoint goes, before that checkpoint is there. A training that goes
on from a checkpoint keeps the parts that it names and drops what came after.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.teachers.rewards import Score
from relabel.distill.teachers.rollouts import Rollout
from relabel.distill.teachers.spec import EDGE_SCHEMA, EDGES_NAME, PARTS, ROLLOUT_SCHEMA, ROLLOUTS_NAME
from relabel.distill.training.output import sync_files, writing
from relabel.manifests.errors import ManifestError
from relabel.manifests.labels import table_bytes
from relabel.manifests.records import first_changed, sha256_file


class LoggedRollout(NamedTuple):
    """A rollout as it is written down, which processes can send each other.

    Args:
        values: by column.
        other_tokens: those that the model did not write: prompts, and what the template puts between turns.
    """

    values: dict[str, Any]
    other_tokens: int


def as_logged(
    step: int,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    *,
    advantages: Sequence[float],
    group: int,
) -> list[LoggedRollout]:
    """What was generated for a step.

    Args:
        group: rollouts of one prompt; they follow each other.
    """
    logged = []
    for number, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
        values = {
            "step": step,
            "row_id": rollout.pair.row_id,
            "sample": number % group,
            "texts": [turn.text for turn in rollout.turns],
            "grade": None if rollout.label is None else rollout.label.grade,
            "reward": None if math.isnan(score.reward) else score.reward,
            "advantage": advantages[number],
            "format_ok": rollout.label is not None,
            "fault": rollout.fault or None,
            "detail": rollout.detail or None,
            "tokens": rollout.num_own,
            "node_rewards": None if score.base is None else list(score.base),
            **score.columns,
        }
        others = len(rollout.prompt_ids) + len(rollout.completion_ids) - rollout.num_own
        logged.append(LoggedRollout(values, others))
    return logged


class RolloutLog:
    """Rollouts that are not yet written, the edges, and counts of all rollouts.

    Args:
        folder: of the checkpoints; the parts go there.
        columns: further ones of the method, filled from `Score.columns`.
    """

    def __init__(self, folder: Path, *, columns: Sequence[pa.Field] = ()) -> None:
        self._schema = pa.schema([*ROLLOUT_SCHEMA, *columns])
        self._folder = folder / PARTS
        self._pending: list[dict[str, Any]] = []
        self._parts: dict[str, str] = {}  # sha256 by name
        self.edges: list[list[Any]] = []
        self.counts = Counter[str]()

    def add(self, rollouts: Sequence[LoggedRollout]) -> None:
        """Add what was generated for a step, by all processes; only the one that writes has to."""
        for values, other_tokens in rollouts:
            self.counts.update(rollouts=1, tokens=values["tokens"], prompt_tokens=other_tokens)
            self._pending.append(values)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of a step keeps; all that is pending is written as its part."""
        if self._pending:
            name = f"step-{step:06d}.parquet"
            self._folder.mkdir(parents=True, exist_ok=True)
            with writing(self._folder, self._folder.parent):
                (self._folder / name).write_bytes(table_bytes(pa.Table.from_pylist(self._pending, schema=self._schema)))
                sync_files(self._folder, name)
            self._parts[name] = sha256_file(self._folder / name)
            self._pending = []
        return {"parts": dict(self._parts), "edges": self.edges, "counts": dict(self.counts)}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint keeps.

        Raises:
            ManifestError: a part is missing, or not as it was written.
        """
        self._parts = dict(state["parts"])
        self._pending = []
        self.edges = [list(edge) for edge in state["edges"]]
        self.counts = Counter(state["counts"])
        bad = first_changed(self._folder, self._parts)
        if bad is not None:
            raise ManifestError(
                f"{self._folder / bad}: rollouts that the checkpoint names are missing, or not as they were written. "
                "Train again with --restart."
            )

    def write(self, folder: Path, *, step: int) -> None:
        """Write `ROLLOUTS_NAME`, and `EDGES_NAME` where there are edges, into the finished model's folder."""
        tables = [pq.read_table(self._folder / name) for name in self.state(step)["parts"]]
        whole = pa.concat_tables([*tables, self._schema.empty_table()]).combine_chunks()  # however often it was stopped
        (folder / ROLLOUTS_NAME).write_bytes(table_bytes(whole))
        if self.edges:
            rows = [dict(zip(EDGE_SCHEMA.names, edge, strict=True)) for edge in self.edges]
            (folder / EDGES_NAME).write_bytes(table_bytes(pa.Table.from_pylist(rows, schema=EDGE_SCHEMA)))
