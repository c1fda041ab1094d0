"""The plan of an output, which is immutable: what it labels, how the work is cut, and the files that hold both."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests import failpoints
from relabel.manifests.digests import digest_of, readable_json, sha256_bytes
from relabel.manifests.errors import ManifestError, StaleRunError
from relabel.manifests.inputs.dataset import InputFile
from relabel.manifests.phi import PhiTable
from relabel.manifests.records import checked, fault_of, plain, read_record, version_of
from relabel.manifests.row_files import table_of
from relabel.manifests.specs import Columns, TableFormat
from relabel.manifests.storage.filesystems import absolute_path
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there

# Shape legend: R rows, Q queries, S shards

PLAN_NAME = "plan.json"
PLAN_VERSION = 1
ROUNDS_NAME = "rounds.json"
"""What the output of `relabel rounds` holds; each of its rounds is a run in a folder below."""


class RowIdFile(NamedTuple):
    """The row ids of a scattered shard, kept beside the plan."""

    path: str
    rows: int
    sha256: str


class ShardPlan(NamedTuple):
    """One shard: rows `first_row .. first_row + rows`, or, where queries lie scattered, the row ids in a file beside
    the plan.

    `chunks` are row counts in the shard's own order; chunk k covers the rows after those of chunks 0..k-1.
    """

    rows: int
    first_row: int | None
    row_ids: RowIdFile | None
    chunks: list[int]
    estimated_tokens: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedLabeler:
    """The labeler: K grades, and its rule map where it has one."""

    name: str
    grades: int
    phi: PhiTable | None = None


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """How the work was cut; `chunk_rows` is None where each shard has what fits it."""

    shards: int
    chunk_rows: int | None


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """The snapshot of a table that was planned; ids as text (`TableSnapshot.identity`)."""

    format: TableFormat
    id: str
    snapshot: str
    since: str | None

    def __str__(self) -> str:
        return f"snapshot {self.snapshot}" + (f" since {self.since}" if self.since is not None else "")


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """A plan's parts, as far as readers of its labels need them.

    Args:
        model: digest.
        schema: version of the label files.
        label_columns: the labeler's own, name and kind.
        kind: `student` for scores.
        table: what the input is a snapshot of; None for plain files.
    """

    columns: Columns
    labeler: PlannedLabeler
    model: str
    schema: int
    cut: PlannedCut
    label_columns: list[tuple[str, str]]
    kind: str | None = None
    table: PlannedTable | None = None


def facts_of(parts: dict[str, Any]) -> PlanFacts:
    """Read a plan's parts.

    Raises:
        ManifestError: one is missing or is not what it should be.
    """
    what, advice = "its `parts` are not a job's", "Restore it, or use another output folder."
    return read_record(PlanFacts, parts, PLAN_NAME, what, advice)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a worker needs to know besides the spec.

    Args:
        fingerprint: digest of `parts`; every receipt carries it.
        parts: what makes a label what it is (inputs, columns, labeler, templates, engine, model, schema, cut),
            readable.
        rows, queries: counts over the rows in use.
        is_scattered: rows of one query do not all lie together, so that shards carry row ids.
        text_bytes: uncompressed bytes of the columns that a run reads, once.
    """

    name: str
    fingerprint: str
    parts: dict[str, Any]
    rows: int
    queries: int
    is_scattered: bool
    text_bytes: int
    files: list[InputFile]
    shards: list[ShardPlan]

    @property
    def read_ratio(self) -> float:
        """Bytes that all shards together read, over one reading of the data: 1 where queries lie together, up to the
        number of shards.
        """
        return sum(shard.read_bytes for shard in self.shards) / self.text_bytes if self.text_bytes else 1.0

    @property
    def facts(self) -> PlanFacts:
        """What readers of the labels need of the parts.

        Raises:
            ManifestError: as `facts_of`.
        """
        return facts_of(self.parts)

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk: as the job had them, else those of the largest one."""
        return self.facts.cut.chunk_rows or max((max(shard.chunks, default=1) for shard in self.shards), default=1)

    @property
    def num_chunks(self) -> int:
        return sum(len(shard.chunks) for shard in self.shards)


def write_plan(store: RunStore, plan: Plan, beside: Mapping[str, bytes]) -> bool:
    """Make a plan durable, row ids first. Returns False if a plan is there already (the caller reads and checks that
    one).

    Raises:
        StaleRunError: the place is that of a search in rounds; nothing was written.
    """
    if read_if_there(store, ROUNDS_NAME) is not None:
        raise StaleRunError(
            f"{store.root}: belongs to a search in rounds ({ROUNDS_NAME}), each of which is a run in a folder below. "
            "Name another `output`."
        )
    failpoints.hit("before_plan_rows")
    for name, data in beside.items():
        store.put(name, data)
    failpoints.hit("before_plan")
    held = replace(plan, files=[file._replace(path=absolute_path(file.path)) for file in plan.files])
    was_created = store.create(PLAN_NAME, readable_json({"version": PLAN_VERSION, **plain(held)}))
    failpoints.hit("after_plan")
    return was_created


def load_plan(store: RunStore) -> Plan | None:
    """The plan of an output, or None if it has none.

    Raises:
        ManifestError: it can't be read as a plan, or another version of relabel wrote it.
    """
    data = read_if_there(store, PLAN_NAME)
    return None if data is None else parse_plan(data, f"{store.root}/{PLAN_NAME}")


def plan_to_read(store: RunStore) -> Plan | None:
    """As `load_plan`, for who reads labels.

    Raises:
        ManifestError: there is none, and the output is that of a search in rounds; names its rounds.
    """
    plan = load_plan(store)
    if plan is None:
        refuse_rounds(store)
    return plan


def refuse_rounds(store: RunStore) -> None:
    """Called where an output has no plan: that of a search in rounds has one for each round.

    Raises:
        ManifestError: it is such an output; names its rounds.
    """
    if read_if_there(store, ROUNDS_NAME) is None:
        return
    places = (f"round-{number}" for number in itertools.count(1))
    begun = list(itertools.takewhile(lambda place: read_if_there(store, f"{place}/{PLAN_NAME}") is not None, places))
    named = ", ".join(f"{store.root}/{place}" for place in begun)
    raise ManifestError(
        f"{store.root}: the output of a search in rounds, each of which is a run of its own. "
        + (f"Name one: {named}." if named else "None is begun: run `relabel rounds` with its job file.")
    )


def parse_plan(data: bytes, where: str) -> Plan:
    """The plan that a file holds.

    Raises:
        ManifestError: as `load_plan`.
    """
    try:
        held = json.loads(data)
        version = version_of(held)
        if version != PLAN_VERSION:
            raise ManifestError(f"{where}: written as version {version}; this relabel reads {PLAN_VERSION}.")
        plan = checked(Plan, held)
        if digest_of(plan.parts) != plan.fingerprint:
            raise ManifestError(f"{where}: damaged: its fingerprint is not that of its parts. Restore it from a copy.")
        return plan
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not a plan ({fault_of(exc)}). Restore it, or use another output folder."
        ) from exc


def shard_row_ids(store: RunStore, shard: ShardPlan) -> np.ndarray:
    """Row ids of a shard in its own order, int64.

    Raises:
        ManifestError: the row-id file is missing or is not the one that was planned.
    """
    if shard.row_ids is None:
        first = shard.first_row or 0
        return np.arange(first, first + shard.rows)
    try:
        data = store.read(shard.row_ids.path)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{store.root}/{shard.row_ids.path}: named by the plan, but missing. Restore it from a copy."
        ) from exc
    if sha256_bytes(data) != shard.row_ids.sha256:
        raise ManifestError(
            f"{store.root}/{shard.row_ids.path}: its sha256 is not the planned one. Restore it from a copy."
        )
    found: np.ndarray = table_of(data).column("row_id").to_numpy()
    return found


def chunk_row_ids(store: RunStore, shard: ShardPlan) -> list[np.ndarray]:
    """Row ids of a shard, int64, by chunk.

    Raises:
        ManifestError: as `shard_row_ids`.
    """
    return np.split(shard_row_ids(store, shard), np.cumsum(shard.chunks)[:-1])


def row_id_file(number: int, rows: np.ndarray) -> tuple[RowIdFile, dict[str, bytes]]:
    """The file of a scattered shard's row ids, int64, that must lie beside its plan: what the plan says of it, and its
    bytes by name.
    """
    data = _row_id_bytes(rows)
    digest = sha256_bytes(data)
    path = f"plan/rows-{number:05d}-{digest[:16]}.parquet"
    return RowIdFile(path, len(rows), digest), {path: data}


def _row_id_bytes(rows: np.ndarray) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"row_id": pa.array(rows, pa.int64())})
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding="DELTA_BINARY_PACKED",
        write_statistics=False,
    )
    return sink.getvalue()
