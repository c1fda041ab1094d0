"""Receipts of committed chunks, how a chunk is committed, and the proof that no row is lost."""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from relabel.manifests import failpoints
from relabel.manifests.errors import ManifestError, RelabelError
from relabel.manifests.records import (
    digest_of,
    read_in_threads,
    read_record,
    sealed_json,
    sha256_bytes,
)
from relabel.manifests.schemas import ANSWERS, LABELS, QUARANTINE, AnswerRow, LabelRow, QuarantineRow, parquet_bytes
from relabel.manifests.secrets import redacted
from relabel.manifests.store import Store

# ------------------------------------------------------------------------------
# Receipts: the proof that a chunk is committed, and the only way to its files.
#
# `receipts/shard-00003/chunk-000017.json` is created once, if absent; that is the commit point. `retry` adds
# `chunk-000017.2.json` with the rows it asked again, all that were in quarantine: a row's state is that of its highest
# attempt. Times live here and never in label files.


logger = logging.getLogger(__name__)

RECEIPT_VERSION = 1


class ChunkId(NamedTuple):
    """A chunk of a shard, and the attempt at it: 1 for the run, 2 and up for retries."""

    shard: int
    chunk: int
    attempt: int = 1

    @property
    def receipt_name(self) -> str:
        suffix = "" if self.attempt == 1 else f".{self.attempt}"
        return f"receipts/shard-{self.shard:05d}/chunk-{self.chunk:06d}{suffix}.json"


@dataclass(frozen=True, slots=True)
class FileRef:
    """A data file: name relative to the output, row count, sha256 of its bytes."""

    path: str
    rows: int
    sha256: str


def read_file_of(store: Store, file: FileRef, advice: str, *, check_bytes: bool = True) -> bytes:
    """The bytes of a data file.

    Raises:
        ManifestError: it is missing, or its sha256 is another; ends in the advice.
    """
    where = f"{store.root}/{file.path}"
    try:
        data = store.read(file.path)
    except FileNotFoundError as exc:
        raise ManifestError(f"{where}: committed, but missing. {advice}") from exc
    if check_bytes and sha256_bytes(data) != file.sha256:
        raise ManifestError(f"{where}: its sha256 is not the one committed. {advice}")
    return data


@dataclass(frozen=True, slots=True)
class ReusedRows:
    """Rows that a chunk took over from an earlier output: which output, as it was found, and how many.

    `manifest_sha256` is None for an output that was not finished; `receipts_sha256` names what it held in either case.
    `engines` are the identities (`mixing.engine_identity`) of all engines that made that output's labels, whichever of
    them answered for these rows; empty in receipts of an earlier relabel.
    """

    output: str
    fingerprint: str
    manifest_sha256: str | None
    receipts_sha256: str
    rows: int
    engines: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MergedFrom:
    """Which attempt of which run a receipt of a merged output repeats, and the digest of what that held
    (`Receipt.content_digest`).
    """

    output: str
    fingerprint: str
    sha256: str


@read_in_threads
@dataclass(frozen=True, slots=True)
class Receipt:
    """What one commit holds.

    Args:
        fingerprint: of the plan that the work belongs to.
        rows: rows asked in this attempt: labels + quarantine.
        statuses: rows by status.
        stages: per stage, requests answered (`asks`) and their `prompt_tokens`, `cached_tokens` and `output_tokens`; a
            shared ask counts once, in the chunk that first needed it.
        seconds: wall time from the chunk's first row to its commit; chunks overlap, so these do not add up to a run's
            time.
        engine: what answered; empty where nothing was asked.
        answers: answers that rows of a query share, for runs to come; no row's state depends on them.
        reused: rows of `labels` that were reused, by the output that they came from.
        reused_answers: shared answers that were reused.
        epoch: of the lease that its writer held; 0 for a local lock, and if the lease was lost.
        execution: drawn for the command that the writer worked for; all workers of one command share it.
        write_id: drawn for this one write, so that its bytes are nobody else's: a writer that lost the reply knows its
            own receipt by it.
        replaces: this attempt holds all rows of the chunk again, and those before it count no more: how a merge follows
            sources.
        merged_from: of a merged output.
    """

    fingerprint: str
    shard: int
    chunk: int
    attempt: int
    rows: int
    labels: FileRef | None
    quarantine: FileRef | None
    statuses: dict[str, int]
    stages: dict[str, dict[str, int]]
    seconds: float
    engine: dict[str, Any]
    worker: str
    epoch: int
    started: str
    committed: str
    answers: FileRef | None = None
    reused: list[ReusedRows] = field(default_factory=list)
    reused_answers: int = 0
    write_id: str = ""
    replaces: bool = False
    merged_from: MergedFrom | None = None
    execution: str = ""
    version: int = field(default=RECEIPT_VERSION)

    @property
    def id(self) -> ChunkId:
        return ChunkId(self.shard, self.chunk, self.attempt)

    @property
    def rows_reused(self) -> int:
        return sum(source.rows for source in self.reused)

    @property
    def content_digest(self) -> str:
        """sha256 over what was committed, but for who wrote it and when, and under which number."""
        return digest_of({name: value for name, value in asdict(self).items() if name not in _NO_CONTENT})


_NO_CONTENT = frozenset(
    (
        "shard",
        "chunk",
        "attempt",
        "seconds",
        "worker",
        "epoch",
        "started",
        "committed",
        "execution",
        "write_id",
        "replaces",
        "merged_from",
    )
)


def load_receipt(store: Store, name: str) -> Receipt:
    """Read one receipt.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    what, advice = "not a receipt", "Restore it from a copy, or move it away to have the chunk done again."
    where, data = f"{store.root}/{name}", store.read(name)
    return read_record(Receipt, data, where, what, advice, version=RECEIPT_VERSION, check=_check_counts)


def _check_counts(receipt: Receipt) -> None:
    for moment in (receipt.started, receipt.committed):
        datetime.fromisoformat(moment)
    for stage, counts in receipt.stages.items():
        if missing := {"asks", "prompt_tokens", "cached_tokens", "output_tokens"} - counts.keys():
            raise ValueError(f"`stages.{stage}.{min(missing)}` is missing")


def parse_receipt_name(name: str) -> ChunkId | None:
    """The chunk that a receipt's name belongs to; None if the name is not a receipt's."""
    match = re.fullmatch(r".*shard-(\d+)/chunk-(\d+)(?:\.(\d+))?\.json", name, re.ASCII)
    return ChunkId(*(int(number or 1) for number in match.groups())) if match else None


# ------------------------------------------------------------------------------
# The commit of a chunk: its files, then its receipt, created if absent.


def commit_chunk(
    store: Store,
    chunk: ChunkId,
    labels: list[LabelRow],
    quarantine: list[QuarantineRow],
    *,
    schema: pa.Schema = LABELS,
    answers: Sequence[AnswerRow] = (),
    fingerprint: str,
    stages: dict[str, dict[str, int]],
    seconds: float,
    engine: dict[str, Any],
    worker: str,
    epoch: int,
    started: str,
    committed: str,
    reused: Sequence[ReusedRows] = (),
    reused_answers: int = 0,
    execution: str = "",
) -> Receipt | None:
    """Write a chunk's data files, then its receipt if nobody else did.

    File names carry a digest of their bytes, so that two workers with the same rows write the same file and a loser
    with other rows harms nobody. What a loser spent is kept under `lost/`, as the receipt that it would have
    been.

    Args:
        schema: of the output's label files.
        answers: those that rows of a query share.
        fingerprint, stages, seconds, engine, worker, epoch, started, committed, reused, reused_answers, execution: see
            `Receipt`.
    Returns:
        The receipt, or None if another worker committed this chunk first.
    """
    # reasons may hold what a server wrote, and show no secret; what the model wrote stays
    quarantine = [
        row._replace(
            reason=redacted(row.reason), tries=[{**one, "reason": redacted(one["reason"])} for one in row.tries]
        )
        for row in quarantine
    ]
    failpoints.hit("before_labels")
    label_file = _put_rows(store, "labels", chunk, labels, schema)
    failpoints.hit("after_labels")
    quarantine_file = _put_rows(store, "quarantine", chunk, quarantine, QUARANTINE)
    failpoints.hit("after_quarantine")
    answer_file = _put_rows(store, "answers", chunk, list(answers), ANSWERS)
    failpoints.hit("after_answers")
    receipt = Receipt(
        fingerprint=fingerprint,
        shard=chunk.shard,
        chunk=chunk.chunk,
        attempt=chunk.attempt,
        rows=len(labels) + len(quarantine),
        labels=label_file,
        quarantine=quarantine_file,
        statuses=dict(Counter(["ok"] * len(labels) + [row.status for row in quarantine])),
        stages=stages,
        seconds=round(seconds, 3),
        engine=engine,
        worker=worker,
        epoch=epoch,
        started=started,
        committed=committed,
        answers=answer_file,
        reused=list(reused),
        reused_answers=reused_answers,
        write_id=secrets.token_hex(8),
        execution=execution,
    )
    failpoints.hit("before_receipt")
    was_first = store.create(chunk.receipt_name, sealed_json(asdict(receipt)))
    failpoints.hit("after_receipt")
    if was_first:
        return receipt
    # note the work that was for nothing, for anyone who counts it; a store that is out of order loses no more than
    # that note
    name = f"lost/shard-{receipt.shard:05d}/chunk-{receipt.chunk:06d}-{receipt.write_id}.json"
    try:
        store.put(name, sealed_json(asdict(receipt)))
    except (RelabelError, OSError) as exc:
        logger.info("%s/%s: can't be written (%s)", store.root, name, exc)
    return None


def _put_rows(store: Store, kind: str, chunk: ChunkId, rows: list[Any], schema: pa.Schema) -> FileRef | None:
    return put_data(store, kind, chunk, parquet_bytes(rows, schema), len(rows)) if rows else None


def put_data(store: Store, kind: str, chunk: ChunkId, data: bytes, rows: int) -> FileRef:
    """Write a data file of a chunk under a name that carries its bytes' digest."""
    digest = sha256_bytes(data)
    suffix = "" if chunk.attempt == 1 else f".{chunk.attempt}"
    name = f"{kind}/shard-{chunk.shard:05d}/chunk-{chunk.chunk:06d}{suffix}-{digest[:16]}.parquet"
    store.put(name, data)
    return FileRef(name, rows, digest)


# ------------------------------------------------------------------------------
# The proof that no row is lost: what the files of a chunk hold, row by row, against the plan and against the words of
# its receipts.
#
# Each attempt at a chunk takes up exactly the rows that wait: the first one all that were planned, a retry all that the
# attempt before it left in quarantine. So each row has one state, that of its highest attempt, and the quarantine of a
# chunk is the file that its last receipt names.


SHOWN = 10
ReadColumns = Callable[[FileRef, pa.Schema, list[str]], pa.Table]
"""Reads some columns of a committed file."""


@dataclass(frozen=True)
class RunRows:
    """Rows of a run by what became of them, as a manifest states them."""

    in_: Annotated[int, Field(alias="in")]
    labelled: int
    reused: int
    quarantined: int


@dataclass(frozen=True)
class Fates:
    """Rows by what became of them, counted in the files: labels asked here, labels reused, and, by status, rows in
    quarantine.
    """

    labelled: int = 0
    reused: int = 0
    quarantined: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_quarantined(self) -> int:
        return sum(self.quarantined.values())

    @property
    def rows(self) -> int:
        return self.labelled + self.reused + self.num_quarantined

    def by_kind(self) -> RunRows:
        """As a manifest states them."""
        return RunRows(self.rows, self.labelled, self.reused, self.num_quarantined)

    def plus(self, other: Fates) -> Fates:
        """Both together."""
        quarantined = Counter(self.quarantined) + Counter(other.quarantined)
        return Fates(self.labelled + other.labelled, self.reused + other.reused, dict(sorted(quarantined.items())))


def agree(receipts: Sequence[Receipt], num_planned: int) -> bool:
    """Whether a chunk's receipts agree with each other and with the plan, by their own words; `prove_chunk` checks what
    is wrong.

    Args:
        receipts: of one chunk, by attempt.
        num_planned: rows of the chunk in the plan.
    """
    waiting = num_planned
    for receipt in receipts:
        labels, quarantine = (file.rows if file else 0 for file in (receipt.labels, receipt.quarantine))
        by_status = receipt.statuses.get("ok", 0), sum(receipt.statuses.values())
        is_as_said = receipt.rows == labels + quarantine and by_status == (labels, receipt.rows)
        if receipt.rows != waiting or not is_as_said or receipt.rows_reused > labels:
            return False
        waiting = quarantine
    return True


def prove_chunk(receipts: Sequence[Receipt], planned_R: np.ndarray, read: ReadColumns, *, root: str) -> Fates:
    """Prove that each planned row has exactly one state, and that the receipts say so.

    Args:
        receipts: of one chunk, by attempt.
        planned_R: the chunk's row ids, int64.
    Raises:
        ManifestError: names the receipt, the files and up to ten row ids that are lost, doubled or foreign.
    """
    labelled = reused = 0
    quarantined: Counter[str] = Counter()
    waiting_R, odd_as = planned_R, "doubled or foreign ({})"
    for receipt in receipts:
        where = f"{root}/{receipt.id.receipt_name}"
        labels = _read(receipt.labels, LABELS, ["row_id", "status", "reused"], read)
        failures = _read(receipt.quarantine, QUARANTINE, ["row_id", "status"], read)
        files = (receipt.labels, labels), (receipt.quarantine, failures)
        found = {file.path: table["row_id"].to_numpy() for file, table in files if file}
        _compare(waiting_R, found, where, odd_as)
        quarantined = Counter(failures["status"].to_pylist())
        statuses = Counter(labels["status"].to_pylist())
        if statuses.keys() - {"ok"} or "ok" in quarantined:
            raise ManifestError(
                f"{where}: its labels have the status {dict(statuses)}, its quarantine {dict(quarantined)}. {_REDO}"
            )
        taken = pc.sum(labels["reused"]).as_py() or 0
        held = statuses + quarantined
        if (receipt.rows, Counter(receipt.statuses), receipt.rows_reused) != (held.total(), held, taken):
            raise ManifestError(
                f"{where}: says {receipt.rows:,} rows, {receipt.statuses}, {receipt.rows_reused:,} reused; its "
                f"files ({', '.join(found)}) hold {held.total():,}, {dict(held)}, {taken:,} reused. {_REDO}"
            )
        labelled += labels.num_rows - taken
        reused += taken
        waiting_R, odd_as = failures["row_id"].to_numpy(), "doubled or not in quarantine: {}"
    return Fates(labelled, reused, quarantined)


_REDO = (
    "Move this receipt and those of later attempts away and run what wrote it (run, retry or merge) again to redo it."
)


def _read(file: FileRef | None, schema: pa.Schema, columns: list[str], read: ReadColumns) -> pa.Table:
    if file is not None:
        return read(file, schema, columns)
    return pa.schema([schema.field(name) for name in columns]).empty_table()


def _compare(wanted_R: np.ndarray, files: dict[str, np.ndarray], where: str, odd_as: str) -> None:
    """Raise unless the files of an attempt hold exactly the rows that it was to ask. `odd_as` is
    what to call others.
    """
    found_R = np.concatenate([np.zeros(0, np.int64), *files.values()])
    if np.array_equal(np.sort(wanted_R), np.sort(found_R)):
        return
    want, have = Counter(wanted_R.tolist()), Counter(found_R.tolist())
    lost, odd = want - have, have - want
    named = [path for path, rows_R in files.items() if not odd.keys().isdisjoint(rows_R.tolist())] or list(files)
    raise ManifestError(
        f"{where}: {lost.total()} rows lost (row ids {sorted(lost)[:SHOWN]}), {odd.total()} "
        f"{odd_as.format(sorted(odd)[:SHOWN])}, "
        f"by {' and '.join(named) or 'its files, of which it has none'}. {_REDO}"
    )
