"""The commit of a chunk: its files, then its receipt, created if absent."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import pyarrow as pa

from relabel.manifests import failpoints
from relabel.manifests.digests import sha256_bytes
from relabel.manifests.errors import RelabelError
from relabel.manifests.records import sealed_json
from relabel.manifests.row_files import parquet_bytes
from relabel.manifests.runs.receipts import ChunkId, FileRef, Receipt, ReusedRows, logger
from relabel.manifests.schemas import ANSWERS, LABELS, QUARANTINE, AnswerRow, LabelRow, QuarantineRow
from relabel.manifests.secrets.redaction import redacted
from relabel.manifests.storage.run_store_ports import RunStore


class ChunkFacts(NamedTuple):
    """What a committer knows about a chunk besides its rows."""

    fingerprint: str
    id: ChunkId
    stages: dict[str, dict[str, int]]
    seconds: float
    engine: dict[str, Any]
    worker: str
    epoch: int
    started: str
    committed: str
    answers: Sequence[AnswerRow] = ()
    reused: Sequence[ReusedRows] = ()
    reused_answers: int = 0
    in_budget: bool = False
    execution: str = ""


def _redacted(row: QuarantineRow) -> QuarantineRow:
    """A row whose reasons, which may hold what a server wrote, show no secret. What the model wrote stays."""
    tries = [{**one, "reason": redacted(one["reason"])} for one in row.tries]
    return row._replace(reason=redacted(row.reason), tries=tries)


def commit_chunk(
    store: RunStore,
    facts: ChunkFacts,
    labels: list[LabelRow],
    quarantine: list[QuarantineRow],
    *,
    schema: pa.Schema = LABELS,
) -> Receipt | None:
    """Write a chunk's data files, then its receipt if nobody else did.

    File names carry a digest of their bytes, so that two workers with the same rows write the same file and a loser
    with other rows harms nobody. What a loser asked in vain is kept under `lost/`, as the receipt that it would have
    been.

    Args:
        schema: of the output's label files.
    Returns:
        The receipt, or None if another worker committed this chunk first.
    """
    quarantine = [_redacted(row) for row in quarantine]
    failpoints.hit("before_labels")
    label_file = _put_rows(store, "labels", facts.id, labels, schema)
    failpoints.hit("after_labels")
    quarantine_file = _put_rows(store, "quarantine", facts.id, quarantine, QUARANTINE)
    failpoints.hit("after_quarantine")
    answer_file = _put_rows(store, "answers", facts.id, list(facts.answers), ANSWERS)
    failpoints.hit("after_answers")
    statuses: dict[str, int] = {"ok": len(labels)} if labels else {}
    for row in quarantine:
        statuses[row.status] = statuses.get(row.status, 0) + 1
    receipt = Receipt(
        fingerprint=facts.fingerprint,
        shard=facts.id.shard,
        chunk=facts.id.chunk,
        attempt=facts.id.attempt,
        rows=len(labels) + len(quarantine),
        labels=label_file,
        quarantine=quarantine_file,
        statuses=statuses,
        stages=facts.stages,
        seconds=round(facts.seconds, 3),
        engine=facts.engine,
        worker=facts.worker,
        epoch=facts.epoch,
        started=facts.started,
        committed=facts.committed,
        answers=answer_file,
        reused=list(facts.reused),
        reused_answers=facts.reused_answers,
        write_id=secrets.token_hex(8),
        in_budget=facts.in_budget,
        execution=facts.execution,
    )
    failpoints.hit("before_receipt")
    was_first = store.create(facts.id.receipt_name, sealed_json(asdict(receipt)))
    failpoints.hit("after_receipt")
    if was_first:
        return receipt
    _keep_lost(store, receipt)
    return None


def _keep_lost(store: RunStore, receipt: Receipt) -> None:
    """Note the work that was for nothing, for whoever counts it; a store that is out of order loses no more than that
    note.
    """
    name = f"lost/shard-{receipt.shard:05d}/chunk-{receipt.chunk:06d}-{receipt.write_id}.json"
    try:
        store.put(name, sealed_json(asdict(receipt)))
    except (RelabelError, OSError) as exc:
        logger.info("%s/%s: can't be written (%s)", store.root, name, exc)


def _put_rows(store: RunStore, kind: str, chunk: ChunkId, rows: list[Any], schema: pa.Schema) -> FileRef | None:
    if not rows:
        return None
    return put_data(store, kind, chunk, parquet_bytes(rows, schema), len(rows))


def put_data(store: RunStore, kind: str, chunk: ChunkId, data: bytes, rows: int) -> FileRef:
    """Write a data file of a chunk under a name that carries its bytes' digest."""
    digest = sha256_bytes(data)
    suffix = "" if chunk.attempt == 1 else f".{chunk.attempt}"
    name = f"{kind}/shard-{chunk.shard:05d}/chunk-{chunk.chunk:06d}{suffix}-{digest[:16]}.parquet"
    store.put(name, data)
    return FileRef(name, rows, digest)
