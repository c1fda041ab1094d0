"""A run's folder as a whole: what is committed, whether every row is accounted for, and the manifest that says so.

Counting and resuming look at receipts alone, so their cost grows with chunks and never with rows; proving conservation reads one narrow
column of every committed file, once, when the last chunk is in.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from manifests import failpoints
from manifests.digests import readable_json, sha256_bytes
from manifests.errors import ManifestError
from manifests.plans import PLAN_NAME, Plan, shard_row_ids
from manifests.receipts import ChunkId, FileRef, Receipt, load_receipt, parse_receipt_name
from manifests.records import checked, fault_of
from manifests.schemas import LABELS, QUARANTINE
from manifests.store import LocalStore

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


class Tally(NamedTuple):
    """What a run's receipts add up to. `quarantined` counts rows by their latest status, without `ok`."""

    rows: int
    labelled: int
    quarantined: dict[str, int]
    chunks_done: int
    stages: dict[str, dict[str, int]]

    @property
    def num_quarantined(self) -> int:
        return sum(self.quarantined.values())


class Snapshot(NamedTuple):
    """A run's receipts as one pass found them.

    Args:
        labels: label files of all attempts; together they hold each labelled row once.
        quarantine: quarantine files of each chunk's highest attempt.
        engines: the different engines that made them.
        digest: over every receipt's name and its files' digests; it changes with any of them.
    """

    tally: Tally
    labels: list[FileRef]
    quarantine: list[FileRef]
    engines: list[dict[str, Any]]
    digest: str


@dataclass(frozen=True, slots=True)
class ManifestCore:
    """What every reader of a manifest relies on; a manifest holds more beside it."""

    version: int
    fingerprint: str
    rows: dict[str, int]
    receipts_sha256: str
    max_failed_fraction: float
    over_limit: bool
    labels: list[FileRef]
    quarantine: list[FileRef]


class RunFolder:
    """Receipts of one output, read against its plan."""

    def __init__(self, store: LocalStore, plan: Plan) -> None:
        self.store = store
        self.plan = plan

    def attempts(self, shard: int) -> dict[int, list[int]]:
        """Attempts committed for each chunk of a shard, ascending, from receipt names alone.

        Raises:
            ManifestError: a receipt of a chunk that the plan does not have.
        """
        found: dict[int, list[int]] = {}
        for name in self.store.names(f"receipts/shard-{shard:05d}"):
            chunk = parse_receipt_name(name)
            if chunk is None or chunk.chunk >= len(self.plan.shards[shard].chunks):
                raise ManifestError(f"{self.store.root}/{name}: no such chunk in the plan. This file does not belong here; move it away.")
            found.setdefault(chunk.chunk, []).append(chunk.attempt)
        for attempts in found.values():
            attempts.sort()
        return found

    def pending(self, shard: int) -> list[int]:
        """Chunks of a shard without a receipt, ascending."""
        done = self.attempts(shard)
        return [chunk for chunk in range(len(self.plan.shards[shard].chunks)) if chunk not in done]

    def chunk_receipts(self, shard: int) -> Iterator[list[Receipt]]:
        """The receipts of each committed chunk of a shard, by attempt.

        Raises:
            ManifestError: a receipt is damaged, belongs to another plan, or skips an attempt.
        """
        for chunk, attempts in sorted(self.attempts(shard).items()):
            if attempts != list(range(1, len(attempts) + 1)):
                name = ChunkId(shard, chunk).receipt_name
                raise ManifestError(f"{self.store.root}/{name}: attempts {attempts} are there; one is missing. Restore it from a copy.")
            yield [self._receipt(ChunkId(shard, chunk, attempt)) for attempt in attempts]

    def snapshot(self) -> Snapshot:
        """Read all receipts once."""
        labelled = chunks_done = rows = 0
        quarantined: Counter[str] = Counter()
        stages: dict[str, Counter[str]] = {}
        labels: list[FileRef] = []
        quarantine: list[FileRef] = []
        engines: dict[str, dict[str, Any]] = {}
        digest = hashlib.sha256()
        for shard in range(len(self.plan.shards)):
            for receipts in self.chunk_receipts(shard):
                chunks_done += 1
                rows += self.plan.shards[shard].chunks[receipts[0].chunk]
                latest = receipts[-1]
                quarantined.update({status: count for status, count in latest.statuses.items() if status != "ok"})
                quarantine += [latest.quarantine] if latest.quarantine else []
                for receipt in receipts:
                    labels += [receipt.labels] if receipt.labels else []
                    labelled += receipt.labels.rows if receipt.labels else 0
                    engines.setdefault(json.dumps(receipt.engine, sort_keys=True), receipt.engine)
                    for stage, counts in receipt.stages.items():
                        stages.setdefault(stage, Counter()).update(counts)
                    files = [file.sha256 if file else "-" for file in (receipt.labels, receipt.quarantine)]
                    digest.update(f"{receipt.shard} {receipt.chunk} {receipt.attempt} {' '.join(files)}\n".encode())
        plain = {stage: dict(counts) for stage, counts in stages.items()}
        tally = Tally(rows, labelled, dict(quarantined), chunks_done, plain)
        return Snapshot(tally, labels, quarantine, list(engines.values()), digest.hexdigest())

    def quarantined_rows(self, receipt: Receipt) -> list[dict[str, Any]]:
        """The rows of a receipt's quarantine file, as plain values; empty if it has none."""
        if receipt.quarantine is None:
            return []
        return list(self.table(receipt.quarantine, QUARANTINE).to_pylist())

    def table(self, file: FileRef, schema: pa.Schema, columns: list[str] | None = None, *, check_bytes: bool = True) -> pa.Table:
        """Read a committed file.

        Raises:
            ManifestError: it is missing, its bytes or row count are not those committed, or its schema is another.
        """
        path = f"{self.store.root}/{file.path}"
        try:
            data = self.store.read(file.path)
        except FileNotFoundError as exc:
            raise ManifestError(
                f"{path}: committed, but missing. Restore it from a copy, or move its receipt away to redo the chunk."
            ) from exc
        if check_bytes and sha256_bytes(data) != file.sha256:
            raise ManifestError(f"{path}: its sha256 is not the one committed. Restore it, or move its receipt away to redo the chunk.")
        try:
            table = pq.read_table(io.BytesIO(data), columns=columns, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as exc:
            raise ManifestError(f"{path}: not readable as Parquet. Restore it, or move its receipt away to redo the chunk.") from exc
        if table.num_rows != file.rows:
            raise ManifestError(f"{path}: {table.num_rows} rows, committed were {file.rows}.")
        if columns is None and not table.schema.equals(schema):
            raise ManifestError(f"{path}: its schema is not this version's. Read it with the relabel that wrote it.")
        return table

    def prove_shard(self, shard: int, *, check_bytes: bool) -> int:
        """Prove that a shard's rows are all there, each once: as multisets of row ids, planned = labelled + quarantined.

        Args:
            check_bytes: also compare every file's sha256 (`verify`); otherwise only the row ids are read.
        Returns:
            Rows accounted for.
        Raises:
            ManifestError: names the chunk, and up to ten row ids that are lost or doubled.
        """
        planned_R = shard_row_ids(self.store, self.plan.shards[shard])
        bounds = [0, *itertools.accumulate(self.plan.shards[shard].chunks)]
        for receipts in self.chunk_receipts(shard):
            chunk = receipts[0].chunk
            found_R = self._rows_of(receipts, check_bytes=check_bytes)
            _compare(planned_R[bounds[chunk] : bounds[chunk + 1]], found_R, f"{self.store.root}: shard {shard}, chunk {chunk}")
        missing = self.pending(shard)
        if missing:
            raise ManifestError(
                f"{self.store.root}: shard {shard} is not finished: {len(missing)} of {len(bounds) - 1} chunks have no receipt "
                f"(the first is {missing[0]}). Run the job again."
            )
        return len(planned_R)

    def _rows_of(self, receipts: list[Receipt], *, check_bytes: bool) -> np.ndarray:
        kept: list[np.ndarray] = []
        waiting = np.array([], dtype=np.int64)
        for receipt in receipts:
            labelled = self._row_ids(receipt.labels, LABELS, check_bytes=check_bytes)
            quarantined = self._row_ids(receipt.quarantine, QUARANTINE, check_bytes=check_bytes)
            if receipt.attempt > 1:
                asked = np.concatenate([labelled, quarantined])
                stray = np.setdiff1d(asked, waiting)
                if len(stray) or len(np.unique(asked)) != len(asked):
                    name = ChunkId(receipt.shard, receipt.chunk, receipt.attempt).receipt_name
                    raise ManifestError(f"{self.store.root}/{name}: a retry of rows that were not in quarantine: {stray[:10].tolist()}.")
                waiting = np.setdiff1d(waiting, asked)
            kept.append(labelled)
            waiting = np.concatenate([waiting, quarantined])
        return np.concatenate([*kept, waiting])

    def _row_ids(self, file: FileRef | None, schema: pa.Schema, *, check_bytes: bool) -> np.ndarray:
        if file is None:
            return np.array([], dtype=np.int64)
        found: np.ndarray = self.table(file, schema, ["row_id"], check_bytes=check_bytes).column("row_id").to_numpy()
        return found

    def _receipt(self, chunk: ChunkId) -> Receipt:
        receipt = load_receipt(self.store, chunk.receipt_name)
        if receipt.fingerprint != self.plan.fingerprint:
            raise ManifestError(
                f"{self.store.root}/{chunk.receipt_name}: belongs to another job (fingerprint {receipt.fingerprint[:12]}, "
                f"the plan's is {self.plan.fingerprint[:12]}). Move it away to have the chunk done again."
            )
        return receipt


def build_manifest(
    folder: RunFolder, found: Snapshot, *, spec: dict[str, Any], max_failed_fraction: float, relabel_version: str
) -> dict[str, Any]:
    """Prove that every row is accounted for, and say so with all that a reader of the labels needs.

    Args:
        found: the receipts, read under the manifest's lock.
    Raises:
        ManifestError: a row is lost or doubled, or a chunk is missing.
    """
    plan, tally = folder.plan, found.tally
    proved = sum(folder.prove_shard(shard, check_bytes=False) for shard in range(len(plan.shards)))
    failed = tally.num_quarantined / proved if proved else 0.0
    return {
        "version": MANIFEST_VERSION,
        "relabel": relabel_version,
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "plan_sha256": sha256_bytes(folder.store.read(PLAN_NAME)),
        "receipts_sha256": found.digest,
        "rows": {"in": proved, "labelled": tally.labelled, "reused": 0, "quarantined": tally.num_quarantined},
        "quarantined_by_status": dict(sorted(tally.quarantined.items())),
        "conservation": "rows in = labelled + reused + quarantined, compared as multisets of row ids",
        "failed_fraction": round(failed, 6),
        "max_failed_fraction": max_failed_fraction,
        "over_limit": failed > max_failed_fraction,
        "stages": tally.stages,
        "engines": found.engines,
        "provenance": plan.parts,
        "inputs": [file._asdict() for file in plan.files],
        "spec": spec,
        "labels": [asdict(file) for file in found.labels],
        "quarantine": [asdict(file) for file in found.quarantine],
    }


def write_manifest(store: LocalStore, manifest: dict[str, Any]) -> None:
    """Make the manifest durable: the last file of a run, replaced after a retry."""
    failpoints.hit("before_manifest")
    store.put(MANIFEST_NAME, readable_json(manifest))
    failpoints.hit("after_manifest")


def load_manifest(store: LocalStore) -> dict[str, Any] | None:
    """The manifest of an output, or None if the run has not finished.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    try:
        held: dict[str, Any] = json.loads(store.read(MANIFEST_NAME))
        version = held["version"]
        if version == MANIFEST_VERSION:
            checked(ManifestCore, held)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as exc:
        raise ManifestError(f"{store.root}/{MANIFEST_NAME}: not a manifest ({fault_of(exc)}). Move it away and run the job again.") from exc
    if version != MANIFEST_VERSION:
        raise ManifestError(f"{store.root}/{MANIFEST_NAME}: written as version {version}; this relabel reads {MANIFEST_VERSION}.")
    return held


def _compare(planned_R: np.ndarray, found_R: np.ndarray, where: str) -> None:
    planned_R, found_R = np.sort(planned_R), np.sort(found_R)
    if np.array_equal(planned_R, found_R):
        return
    want, have = Counter(planned_R.tolist()), Counter(found_R.tolist())
    lost, doubled = want - have, have - want
    raise ManifestError(
        f"{where}: {lost.total()} rows lost (row ids {sorted(lost)[:10]}), {doubled.total()} doubled or foreign ({sorted(doubled)[:10]}). "
        "Move the chunk's receipt away and run the job again to redo it."
    )
