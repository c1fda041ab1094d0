"""How the work is cut: shards of whole queries, chunks within them, and the fingerprint that ties an output to one job.

Deciding is pure (`cut_queries`); `make_plan` reads footers and the query-id column and nothing else; `write_plan` makes
it durable. A plan is immutable: the same input and spec give the same plan, and a run whose plan does not match its
spec or input is refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from manifests import failpoints
from manifests.digests import canonical_json, digest_of, readable_json, sha256_bytes
from manifests.errors import InputError, ManifestError, StaleRunError
from manifests.inputs.dataset import Dataset, InputFile, changed_files, open_parquet
from manifests.inputs.input_faults import reading
from manifests.phi import PhiTable
from manifests.records import checked, fault_of, plain, version_of
from manifests.runs.label_keys import engine_parts, parts_as_of
from manifests.schemas import SCHEMA_VERSION, table_of
from manifests.specs import Columns
from manifests.storage.filesystems import absolute_path
from manifests.storage.run_store_ports import RunStore

# Shape legend: R rows, Q queries, S shards

PLAN_NAME = "plan.json"
PLAN_VERSION = 1
BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of text per token: English web text measures 4.1 to 4.5 on Qwen2.5's and SmolLM2's tokenizers."""
TOKENS_PER_PROMPT = 250.0
"""Tokens of instructions around a pair, counted on the built-in templates; used only to balance
shards and to estimate.
"""


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
    """How the work was cut."""

    shards: int
    chunk_rows: int


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """A plan's parts, as far as readers of its labels need them.

    Args:
        model: digest.
        schema: version of the label files.
        label_columns: the labeler's own, name and kind; None in plans of versions before they were declared.
        kind: `student` for scores.
    """

    columns: Columns
    labeler: PlannedLabeler
    model: str
    schema: int
    cut: PlannedCut
    label_columns: list[tuple[str, str]] | None = None
    kind: str | None = None


def facts_of(parts: dict[str, Any]) -> PlanFacts:
    """Read a plan's parts.

    Raises:
        ValueError: as `checked`.
    """
    return checked(PlanFacts, parts)


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
        """What readers of the labels need of the parts."""
        return facts_of(self.parts)

    @property
    def num_chunks(self) -> int:
        return sum(len(shard.chunks) for shard in self.shards)


class Cut(NamedTuple):
    """Shards as ranges over the rows in shard order, the chunks of each, and the weight of each."""

    bounds: list[int]
    chunks: list[list[int]]
    weights: list[float]


def fingerprint_parts(
    dataset: Dataset,
    *,
    limit: int | None,
    overlong: str,
    labeler: dict[str, Any],
    label_columns: Mapping[str, str],
    templates: dict[str, str],
    stages: dict[str, str],
    engine: dict[str, Any],
    model_digest: str,
    cut: dict[str, int],
) -> dict[str, Any]:
    """What ties an output to one job, as plain values whose differences a person can read.

    Input paths are not part of it: a data set may move, its identity is what its footers say.

    Args:
        label_columns: those that the labeler declares, name → kind, in their order in the label files.
        stages: a digest of each stage's ask as it is rendered for a made-up pair (`label_keys.stage_digests`): it names
            the stage that a changed template belongs to, and changes also where the code that renders it does.
    """
    parts: dict[str, Any] = {
        "inputs": digest_of([list(file.identity) for file in dataset.files]),
        "limit": limit,
        "overlong": overlong,
        "columns": dataset.columns.model_dump(mode="json"),
        "labeler": labeler,
        "label_columns": list(label_columns.items()),
        "templates": templates,
        "stages": stages,
        "engine": engine,
        "model": model_digest,
        "schema": SCHEMA_VERSION,
        "cut": cut,
    }
    if dataset.reads.columns:
        parts["input_columns"] = [one.name for one in dataset.reads.columns]
    if dataset.reads.siblings:  # a chunk that cut a query would hold some of its siblings
        parts["whole_queries"] = True
    held: dict[str, Any] = json.loads(canonical_json(parts))  # as a plan that was written and read back holds them
    return held


def cut_queries(
    sizes_Q: np.ndarray, weights_Q: np.ndarray, *, shards: int, chunk_rows: int, whole: bool = False
) -> Cut:
    """Cut queries, in their order, into shards of nearly equal weight and chunks of whole queries.

    Args:
        sizes_Q: rows per query, int64, each at least 1.
        weights_Q: estimated tokens per query, float64.
        shards: how many; with fewer queries than shards some stay empty.
        chunk_rows: most rows a chunk; only a query larger than that is split over chunks.
        whole: not even that one is split; it is a chunk of its own.
    Returns:
        `bounds` of length shards + 1 over the rows in query order, the chunks' row counts per shard, and the shards'
        weights.
    """
    middles_Q = np.cumsum(weights_Q) - weights_Q / 2
    total = float(weights_Q.sum())
    shard_of_Q = np.minimum((middles_Q * (shards / total)).astype(np.int64), shards - 1)
    query_bounds_S = np.searchsorted(shard_of_Q, np.arange(shards + 1))
    rows_before_Q = np.concatenate([[0], np.cumsum(sizes_Q)])
    chunks = [
        _cut_chunks(sizes_Q[start:stop].tolist(), chunk_rows, whole=whole)
        for start, stop in zip(query_bounds_S[:-1].tolist(), query_bounds_S[1:].tolist(), strict=True)
    ]
    weights_before_Q = np.concatenate([[0.0], np.cumsum(weights_Q)])
    return Cut(rows_before_Q[query_bounds_S].tolist(), chunks, np.diff(weights_before_Q[query_bounds_S]).tolist())


def _cut_chunks(sizes: list[int], chunk_rows: int, *, whole: bool) -> list[int]:
    chunks: list[int] = []
    filled = 0
    for size in sizes:
        if filled and filled + size > chunk_rows:
            chunks.append(filled)
            filled = 0
        filled += size
        while filled > chunk_rows and not whole:
            chunks.append(chunk_rows)
            filled -= chunk_rows
    if filled:
        chunks.append(filled)
    return chunks


def make_plan(
    dataset: Dataset, parts: dict[str, Any], *, name: str, shards: int, chunk_rows: int
) -> tuple[Plan, dict[str, bytes]]:
    """Read the query ids and cut the work.

    Returns:
        The plan, and the files that must lie beside it (name → bytes): row ids of scattered shards.
    Raises:
        InputError: a null query id, or a file that can't be read.
    """
    found = _scan_queries(dataset)
    # no query is in two shards, so that those beyond the number of queries would be empty, and each costs time wherever
    # shards are counted
    cut = cut_queries(
        found.sizes_Q,
        found.weights_Q,
        shards=min(shards, len(found.sizes_Q)),
        chunk_rows=chunk_rows,
        whole=dataset.reads.siblings,
    )
    is_scattered = found.num_runs != len(found.sizes_Q)
    order_R = _rows_by_query(dataset) if is_scattered else None
    group_starts, group_bytes = _groups(dataset)
    beside: dict[str, bytes] = {}
    planned = []
    for number, (start, stop) in enumerate(zip(cut.bounds[:-1], cut.bounds[1:], strict=True)):
        row_ids: RowIdFile | None = None
        if order_R is None:
            touched = _groups_of_range(group_starts, start, stop)
        else:
            rows_S = order_R[start:stop]
            touched = np.unique(np.searchsorted(group_starts, rows_S, side="right") - 1)
            if len(rows_S):
                row_ids, file = _row_id_file(number, rows_S)
                beside |= file
        planned.append(
            ShardPlan(
                rows=stop - start,
                first_row=start if order_R is None else None,
                row_ids=row_ids,
                chunks=cut.chunks[number],
                estimated_tokens=round(cut.weights[number]),
                read_bytes=int(group_bytes[touched].sum()),
            )
        )
    plan = Plan(
        name=name,
        fingerprint=digest_of(parts),
        parts=parts,
        rows=dataset.rows,
        queries=len(found.sizes_Q),
        is_scattered=is_scattered,
        text_bytes=int(group_bytes.sum()),
        files=list(dataset.files),
        shards=planned,
    )
    return plan, beside


def write_plan(store: RunStore, plan: Plan, beside: dict[str, bytes]) -> bool:
    """Make a plan durable, row ids first. Returns False if a plan is there already (the caller reads and checks that
    one).
    """
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
    try:
        data = store.read(PLAN_NAME)
    except FileNotFoundError:
        return None
    return parse_plan(data, f"{store.root}/{PLAN_NAME}")


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


def is_plan_of(plan: Plan, parts: dict[str, Any]) -> bool:
    """Whether a plan is that of the job whose parts these are."""
    parts = parts_as_of(parts, plan.parts)
    return plan.parts == parts or (
        "engine" in plan.parts and {**plan.parts, "engine": engine_parts(plan.parts)} == parts
    )


def check_plan(plan: Plan, dataset: Dataset, parts: dict[str, Any], *, output: str) -> None:
    """Refuse to go on with a plan made for other inputs or another job.

    Raises:
        StaleRunError: names every file that changed, or every setting that differs.
    """
    if is_plan_of(plan, parts):
        return
    changed = changed_files(plan.files, dataset.files) if plan.parts.get("inputs") != parts.get("inputs") else []
    differences = list(_differences(_settings(plan.parts), _settings(parts_as_of(parts, plan.parts))))
    if changed:
        listed = "\n  ".join(changed[:20]) + (f"\n  … and {len(changed) - 20} more" if len(changed) > 20 else "")
        raise StaleRunError(
            f"{output}: the inputs are not those that were planned, and an output never grows or changes its input. "
            f"Changed:\n  {listed}\n"
            "Restore the files, or label the new ones into another output."
            + (f" Settings differ too: {'; '.join(differences)}." if differences else "")
        )
    listed = "\n  ".join(differences[:20]) + (
        f"\n  … and {len(differences) - 20} more" if len(differences) > 20 else ""
    )
    raise StaleRunError(
        f"{output}: belongs to another job. Different:\n  {listed}\nUse another `output`, or restore the spec."
    )


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


def shard_row_id_file(shard: ShardPlan, number: int, rows: np.ndarray) -> tuple[ShardPlan, dict[str, bytes]]:
    """A scattered shard with other row ids, int64, and the file of them that must lie beside its
    plan (name → bytes).
    """
    row_ids, file = _row_id_file(number, rows)
    return shard._replace(row_ids=row_ids), file


def _row_id_file(number: int, rows: np.ndarray) -> tuple[RowIdFile, dict[str, bytes]]:
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


class _Queries(NamedTuple):
    """Queries in order of first appearance: rows and estimated prompt tokens of each, and how many runs of equal ids
    the rows form.
    """

    sizes_Q: np.ndarray  # noqa: N815
    weights_Q: np.ndarray  # noqa: N815
    num_runs: int


def _scan_queries(dataset: Dataset) -> _Queries:
    """One pass over the query ids; memory grows with queries, not with rows."""
    sizes_Q, weights_Q = np.zeros(0, np.int64), np.zeros(0, np.float64)
    num_runs, last = 0, -1
    for codes, weight in _coded_ids(dataset):
        # counted from here: a pass over all queries for each batch would make the whole quadratic
        first = int(codes.min())
        sizes = np.bincount(codes - first)
        stop = first + len(sizes)
        if stop > len(sizes_Q):
            grown = max(stop, 2 * len(sizes_Q))
            sizes_Q, weights_Q = (
                np.concatenate([old, np.zeros(grown - len(old), old.dtype)]) for old in (sizes_Q, weights_Q)
            )
        sizes_Q[first:stop] += sizes
        weights_Q[first:stop] += sizes * weight
        num_runs += int(np.count_nonzero(codes[1:] != codes[:-1])) + int(codes[0] != last)
        last = int(codes[-1])
    queries = int(np.count_nonzero(sizes_Q))
    return _Queries(sizes_Q[:queries], weights_Q[:queries], num_runs)


def _rows_by_query(dataset: Dataset) -> np.ndarray:
    """Row ids, int64, grouped by query in order of first appearance, in row order within a query."""
    codes_R = np.concatenate([codes.astype(np.int32) for codes, _ in _coded_ids(dataset)])
    return np.argsort(codes_R, kind="stable")


def _coded_ids(dataset: Dataset) -> Iterator[tuple[np.ndarray, float]]:
    """For each run of rows within a row group: a code per row, numbered by first appearance of its query, and the
    estimated tokens a row.

    A footer knows a row group's bytes and no row's, so the estimate is flat within a row group.
    """
    known: dict[Any, int] = {}
    name = dataset.columns.query_id
    done = 0
    for file, groups in zip(dataset.files, dataset.group_bytes, strict=True):
        if done >= dataset.rows:
            return
        before = done
        with open_parquet(file.path, dataset.storage) as parquet, reading(file.path):
            for number, (rows, size) in enumerate(groups):
                weight = TOKENS_PER_PROMPT + size / max(rows, 1) / BYTES_PER_TOKEN
                for batch in parquet.iter_batches(batch_size=1 << 17, row_groups=[number], columns=[name]):
                    column = batch.column(name).slice(0, dataset.rows - done)
                    if not len(column):
                        return
                    if column.null_count:
                        row = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0]) + done - before
                        raise InputError(
                            f"{file.path}: `{name}` is null in row {row} of the file. Every row needs a query id; "
                            "fix it."
                        )
                    if pa.types.is_dictionary(column.type):
                        column = column.cast(column.type.value_type)
                    encoded = column.dictionary_encode()
                    codes = np.array(
                        [known.setdefault(value, len(known)) for value in encoded.dictionary.to_pylist()], np.int64
                    )
                    yield codes[encoded.indices.to_numpy()], weight
                    done += len(column)


def _groups_of_range(group_starts: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Numbers of the row groups that hold the rows start..stop."""
    if start == stop:
        return np.zeros(0, np.int64)
    first, last = np.searchsorted(group_starts, [start, stop - 1], side="right") - 1
    return np.arange(first, last + 1)


def _groups(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """First row id of every row group that is in use, and its bytes in the columns read."""
    flat = [group for groups in dataset.group_bytes for group in groups if group[0]]
    starts = np.concatenate([[0], np.cumsum([rows for rows, _ in flat])[:-1]]).astype(np.int64)
    in_use = starts < dataset.rows
    return starts[in_use], np.array([size for _, size in flat], dtype=np.int64)[in_use]


def _settings(parts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parts.items() if key != "inputs"}


def _differences(was: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from _differences(was.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif was != now:
        yield f"{path}: was {json.dumps(was)}, is {json.dumps(now)}"
