"""A teacher's `manifest.json` as records, and the names and columns of the rollout tables that training writes.
Importing it does not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from relabel.distill.students.manifest import LearnedGold, LearnedLabels, SplitSide
from relabel.distill.training.output import TrainedManifest, read_manifest
from relabel.manifests.records import LEFT_OUT

# ------------------------------------------------------------------------------
# A teacher's `manifest.json` as records.


TEACHER_MANIFEST_VERSION = 1


@dataclass(frozen=True)
class TeacherData:
    """What a teacher learned from.

    Args:
        rows: pairs that it learned from.
        dropped: rows left out, by reason.
        examples: prompts with an answer: a row of a labeler that asks twice has two, and rows of a query may share one.
        tokens, answer_tokens: of one pass over them; where answers are the model's own, all that it wrote in training.
        held_out: rows that it was evaluated on, where the method does so.
    """

    runs: list[LearnedLabels]
    gold: LearnedGold | None
    rows: int
    dropped: dict[str, int]
    examples: int
    tokens: int
    answer_tokens: int
    held_out: SplitSide | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class TeacherManifest(TrainedManifest):
    """The manifest of a teacher: how it was made.

    Args:
        labeler: its options, by name.
        templates: sha256 of its prompt templates, by file name.
    """

    kind: Literal["teacher"] = "teacher"
    method: str
    labeler: dict[str, Any]
    templates: dict[str, str]
    data: TeacherData


def read_teacher_manifest(data: bytes, where: str) -> TeacherManifest:
    """
    Raises:
        ManifestError: it is damaged, or of another version.
    """
    return read_manifest(data, where, TeacherManifest, kind="teacher")


# ------------------------------------------------------------------------------
# What a training by reinforcement writes in addition to the model, as Parquet: names and columns, read without torch.


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
"""Folder in that of the checkpoints, with all rollouts up to each of them."""
