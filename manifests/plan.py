"""The immutable plan of an output and its recipe; receipts of committed chunks, and the proof that no row is lost."""

from __future__ import annotations

import functools
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from relabel.manifests import failpoints
from relabel.manifests.errors import ManifestError, RelabelError, StaleRunError
from relabel.manifests.files import absolute_path
from relabel.manifests.inputs import Dataset, InputFile, changed_files
from relabel.manifests.labels import (
    ANSWERS,
    LABELS,
    QUARANTINE,
    SCHEMA_VERSION,
    AnswerRow,
    LabelRow,
    QuarantineRow,
    parquet_bytes,
    table_of,
)
from relabel.manifests.phi import PhiTable
from relabel.manifests.process import WhenUsed
from relabel.manifests.records import (
    canonical_json,
    difference_text,
    differing,
    digest_of,
    fields_of,
    plain,
    read_in_threads,
    read_record,
    readable_json,
    sealed_json,
    sha256_bytes,
)
from relabel.manifests.secrets import redacted
from relabel.manifests.specs import Columns, TableFormat
from relabel.manifests.store import Store, read_if_there

pc = WhenUsed("pyarrow.compute")

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


def read_file_of(store: Store, file: FileRef, advice: Callable[[], str], *, check_bytes: bool = True) -> bytes:
    """The bytes of a data file.

    Args:
        advice: gives what to do, where something is wrong.
    Raises:
        ManifestError: it is missing, or its sha256 is another; ends in the advice.
    """
    try:
        data = store.read(file.path)
    except FileNotFoundError as exc:
        raise ManifestError(f"{store.root}/{file.path}: committed, but missing. {advice()}") from exc
    if check_bytes and sha256_bytes(data) != file.sha256:
        raise ManifestError(f"{store.root}/{file.path}: its sha256 is not the one committed. {advice()}")
    return data


@dataclass(frozen=True, slots=True)
class ReusedRows:
    """Rows that a chunk took over from an earlier output: which output, as it was found, and how many.

    `manifest_sha256` is None for an output that was not finished; `receipts_sha256` names what it held in either case.
    `engines` are the identities of all engines that made its labels (`run_manifest.engine_identity`), whichever
    of them answered for these rows; empty in receipts of an earlier relabel.
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
    what = "not a receipt"
    advice = "Restore it from a copy, or move it away to have the chunk done again."
    where = f"{store.root}/{name}"
    data = store.read(name)
    return read_record(
        Receipt,
        data,
        where,
        what,
        advice,
        version=RECEIPT_VERSION,
        check=_check_counts,
    )


def _check_counts(receipt: Receipt) -> None:
    for moment in (receipt.started, receipt.committed):
        datetime.fromisoformat(moment)
    for stage, counts in receipt.stages.items():
        missing = {"asks", "prompt_tokens", "cached_tokens", "output_tokens"} - counts.keys()
        if missing:
            raise ValueError(f"`stages.{stage}.{min(missing)}` is missing")


_RECEIPT_NAME = re.compile(r".*shard-(\d+)/chunk-(\d+)(?:\.(\d+))?\.json", re.ASCII)


def parse_receipt_name(name: str) -> ChunkId | None:
    """The chunk that a receipt's name belongs to; None if the name is not a receipt's."""
    match = _RECEIPT_NAME.fullmatch(name)
    if match is None:
        return None
    shard, chunk, attempt = match.groups()
    return ChunkId(int(shard), int(chunk), int(attempt or 1))


# ------------------------------------------------------------------------------
# The commit of a chunk: its files, then its receipt, created if absent.


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """What became of a chunk's rows.

    Args:
        answers: those that rows of a query share.
        schema: of the output's label files.
    """

    labels: Sequence[LabelRow]
    quarantine: Sequence[QuarantineRow]
    answers: Sequence[AnswerRow] = ()
    schema: pa.Schema = LABELS


@dataclass(frozen=True, slots=True)
class WorkFacts:
    """Who did the work on a chunk, when, with which engine and at what cost; see `Receipt` for each."""

    fingerprint: str
    stages: dict[str, dict[str, int]]
    seconds: float
    engine: dict[str, Any]
    worker: str
    epoch: int
    started: str
    committed: str
    execution: str = ""


@dataclass(frozen=True, slots=True)
class ReusedWork:
    """What a chunk took over from earlier outputs: rows, by the output that they came from, and shared answers."""

    rows: Sequence[ReusedRows] = ()
    answers: int = 0


NOTHING_REUSED = ReusedWork()


def commit_chunk(
    store: Store,
    chunk: ChunkId,
    rows: FinishedRows,
    work: WorkFacts,
    reused: ReusedWork = NOTHING_REUSED,
) -> Receipt | None:
    """Write a chunk's data files, then its receipt if nobody else did.

    File names carry a digest of their bytes, so that two workers with the same rows write the same file and a loser
    with other rows harms nobody. What a loser spent is kept under `lost/`, as the receipt that it would have
    been.

    Returns:
        The receipt, or None if another worker committed this chunk first.
    """
    quarantine = [_without_secrets(row) for row in rows.quarantine]
    failpoints.hit("before_labels")
    label_file = _put_rows(store, "labels", chunk, rows.labels, rows.schema)
    failpoints.hit("after_labels")
    quarantine_file = _put_rows(store, "quarantine", chunk, quarantine, QUARANTINE)
    failpoints.hit("after_quarantine")
    answer_file = _put_rows(store, "answers", chunk, rows.answers, ANSWERS)
    failpoints.hit("after_answers")
    statuses = Counter(ok=len(rows.labels)) if rows.labels else Counter[str]()
    statuses.update(row.status for row in quarantine)
    receipt = replace(
        _receipt_without_rows(chunk, work),
        rows=len(rows.labels) + len(quarantine),
        labels=label_file,
        quarantine=quarantine_file,
        statuses=dict(statuses),
        answers=answer_file,
        reused=list(reused.rows),
        reused_answers=reused.answers,
    )
    failpoints.hit("before_receipt")
    was_first = store.create(receipt.id.receipt_name, sealed_json(fields_of(receipt)))
    failpoints.hit("after_receipt")
    if was_first:
        return receipt
    _note_loss(store, receipt)
    return None


def _receipt_without_rows(chunk: ChunkId, work: WorkFacts) -> Receipt:
    return Receipt(
        fingerprint=work.fingerprint,
        shard=chunk.shard,
        chunk=chunk.chunk,
        attempt=chunk.attempt,
        rows=0,
        labels=None,
        quarantine=None,
        statuses={},
        stages=work.stages,
        seconds=round(work.seconds, 3),
        engine=work.engine,
        worker=work.worker,
        epoch=work.epoch,
        started=work.started,
        committed=work.committed,
        write_id=secrets.token_hex(8),
        execution=work.execution,
    )


def _without_secrets(row: QuarantineRow) -> QuarantineRow:
    """A row whose reasons, which may hold what a server wrote, show no secret; what the model wrote stays."""
    tries = [{**attempt, "reason": redacted(attempt["reason"])} for attempt in row.tries]
    return row._replace(reason=redacted(row.reason), tries=tries)


NO_CHUNK = -1
"""Shard of a receipt that is no chunk's."""


def note_health_check(store: Store, check: ChunkId, work: WorkFacts) -> None:
    """Keep what asks took that showed whether an engine still works, under `lost/`: no row comes of them.

    Args:
        check: of shard `NO_CHUNK`, with the number of the check as its chunk.
    """
    _note_loss(store, _receipt_without_rows(check, work))


def _note_loss(store: Store, receipt: Receipt) -> None:
    """Note the work that came to nothing, for who counts it. A store that is out of order loses that note alone."""
    folder = "health" if receipt.shard == NO_CHUNK else f"shard-{receipt.shard:05d}"
    name = f"lost/{folder}/chunk-{receipt.chunk:06d}-{receipt.write_id}.json"
    try:
        store.put(name, sealed_json(fields_of(receipt)))
    except (RelabelError, OSError) as exc:
        logger.info("%s/%s: can't be written (%s)", store.root, name, exc)


def _put_rows(store: Store, kind: str, chunk: ChunkId, rows: Sequence[Any], schema: pa.Schema) -> FileRef | None:
    """Write the rows of one kind; None where there are none."""
    if not rows:
        return None
    return put_data(store, kind, chunk, parquet_bytes(rows, schema), len(rows))


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
        adds_up = receipt.rows == labels + quarantine and by_status == (labels, receipt.rows)
        if receipt.rows != waiting or not adds_up or receipt.rows_reused > labels:
            return False
        waiting = quarantine
    return True


class _Attempt(NamedTuple):
    """An attempt at a chunk: the row ids that it was to ask, int64, and what its files hold.

    Args:
        is_last: what it left in quarantine is in quarantine.
    """

    receipt: Receipt
    wanted: np.ndarray
    labels: pa.Table
    failures: pa.Table
    is_last: bool


def prove_chunks(
    chunks: Sequence[Sequence[Receipt]], planned: Sequence[np.ndarray], read: ReadColumns, *, root: str
) -> Fates:
    """`prove_chunk` of several chunks together: for some hundred rows nearly all of the time goes into the calls.

    Args:
        planned: the row ids of each chunk, int64.
    Raises:
        ManifestError: as `prove_chunk`, of the first chunk at fault.
    """
    tables: dict[str, pa.Table] = {}

    def read_once(file: FileRef, schema: pa.Schema, columns: list[str]) -> pa.Table:
        if file.path not in tables:
            tables[file.path] = read(file, schema, columns)
        return tables[file.path]

    attempts: list[_Attempt] = []
    for receipts, planned_R in zip(chunks, planned, strict=True):
        attempts += _attempts(receipts, planned_R, read_once)
    if _all_hold(attempts):
        return _fates_of(attempts)
    total = Fates()
    for receipts, planned_R in zip(chunks, planned, strict=True):
        total = total.plus(prove_chunk(receipts, planned_R, read_once, root=root))
    return total


def _attempts(receipts: Sequence[Receipt], planned_R: np.ndarray, read: ReadColumns) -> Iterator[_Attempt]:
    """The attempts at a chunk, each of which asked what the one before it left."""
    waiting_R = planned_R
    for receipt in receipts:
        labels = _no_labels() if receipt.labels is None else read(receipt.labels, LABELS, _OF_LABELS)
        failures = _no_failures() if receipt.quarantine is None else read(receipt.quarantine, QUARANTINE, _OF_FAILURES)
        yield _Attempt(receipt, waiting_R, labels.select(_OF_LABELS), failures, receipt is receipts[-1])
        waiting_R = failures["row_id"].to_numpy()


def _all_hold(attempts: Sequence[_Attempt]) -> bool:
    """Whether each attempt holds just the rows that it was to ask, and its receipt states what became of them.

    Letters: A attempts; L labels, F failures and W wanted rows of all attempts.
    """
    labels = pa.concat_tables([attempt.labels for attempt in attempts])
    failures = pa.concat_tables([attempt.failures for attempt in attempts])
    attempt_A = np.arange(len(attempts))
    attempt_L = np.repeat(attempt_A, [attempt.labels.num_rows for attempt in attempts])
    attempt_F = np.repeat(attempt_A, [attempt.failures.num_rows for attempt in attempts])
    attempt_W = np.repeat(attempt_A, [len(attempt.wanted) for attempt in attempts])
    wanted_W = np.concatenate([attempt.wanted for attempt in attempts])
    held_LF = np.concatenate([labels["row_id"].to_numpy(), failures["row_id"].to_numpy()])
    attempt_LF = np.concatenate([attempt_L, attempt_F])
    wanted_order = np.lexsort((wanted_W, attempt_W))
    held_order = np.lexsort((held_LF, attempt_LF))
    if not np.array_equal(attempt_W[wanted_order], attempt_LF[held_order]):
        return False
    if not np.array_equal(wanted_W[wanted_order], held_LF[held_order]):
        return False
    if _counted(labels["status"]).keys() - {"ok"}:
        return False
    by_status = [Counter(ok=attempt.labels.num_rows) for attempt in attempts]
    for number, status in zip(attempt_F.tolist(), failures["status"].to_pylist(), strict=True):
        if status == "ok":
            return False
        by_status[number][status] += 1
    is_reused_L = labels["reused"].fill_null(False).to_numpy()
    reused_A = np.bincount(attempt_L[is_reused_L], minlength=len(attempts)).tolist()
    for (receipt, *_), statuses, num_reused in zip(attempts, by_status, reused_A, strict=True):
        if (receipt.rows, receipt.rows_reused) != (statuses.total(), num_reused):
            return False
        if statuses != Counter(receipt.statuses):
            return False
    return True


def _fates_of(attempts: Sequence[_Attempt]) -> Fates:
    """What became of the rows, by receipts that were proven."""
    labelled = 0
    reused = 0
    quarantined: Counter[str] = Counter()
    for attempt in attempts:
        receipt = attempt.receipt
        labelled += attempt.labels.num_rows - receipt.rows_reused
        reused += receipt.rows_reused
        if attempt.is_last:
            quarantined.update(receipt.statuses)
    del quarantined["ok"]
    return Fates(labelled, reused, dict(sorted((+quarantined).items())))


def prove_chunk(receipts: Sequence[Receipt], planned_R: np.ndarray, read: ReadColumns, *, root: str) -> Fates:
    """Prove that each planned row has exactly one state, and that the receipts state it.

    Args:
        receipts: of one chunk, by attempt.
        planned_R: the chunk's row ids, int64.
    Raises:
        ManifestError: names the receipt, the files and up to ten row ids that are lost, doubled or foreign.
    """
    labelled = 0
    reused = 0
    quarantined: Counter[str] = Counter()
    odd_as = "doubled or foreign ({})"
    for receipt, wanted_R, labels, failures, _ in _attempts(receipts, planned_R, read):
        where = f"{root}/{receipt.id.receipt_name}"
        rows_by_file = {}
        for file, table in ((receipt.labels, labels), (receipt.quarantine, failures)):
            if file:
                rows_by_file[file.path] = table["row_id"].to_numpy()
        _compare(wanted_R, rows_by_file, where, odd_as)
        quarantined = _counted(failures["status"])
        statuses = _counted(labels["status"])
        if statuses.keys() - {"ok"} or "ok" in quarantined:
            raise ManifestError(
                f"{where}: its labels have the status {dict(statuses)}, its quarantine {dict(quarantined)}. {_REDO}"
            )
        num_reused = pc.sum(labels["reused"]).as_py() or 0
        by_status = statuses + quarantined
        stated = receipt.rows, Counter(receipt.statuses), receipt.rows_reused
        if stated != (by_status.total(), by_status, num_reused):
            raise ManifestError(
                f"{where}: says {receipt.rows:,} rows, {receipt.statuses}, {receipt.rows_reused:,} reused; its "
                f"files ({', '.join(rows_by_file)}) hold {by_status.total():,}, {dict(by_status)}, {num_reused:,} "
                f"reused. {_REDO}"
            )
        labelled += labels.num_rows - num_reused
        reused += num_reused
        odd_as = "doubled or not in quarantine: {}"
    return Fates(labelled, reused, quarantined)


_REDO = (
    "Move this receipt and those of later attempts away and run what wrote it (run, retry or merge) again to redo it."
)


_OF_LABELS = ["row_id", "status", "reused"]
_OF_FAILURES = ["row_id", "status"]


@functools.cache
def _no_labels() -> pa.Table:
    return pa.schema([LABELS.field(name) for name in _OF_LABELS]).empty_table()


@functools.cache
def _no_failures() -> pa.Table:
    return pa.schema([QUARANTINE.field(name) for name in _OF_FAILURES]).empty_table()


def _counted(statuses: pa.ChunkedArray) -> Counter[str]:
    """How often each status occurs."""
    return Counter({row["values"]: row["counts"] for row in statuses.value_counts().to_pylist()})


def _compare(wanted_R: np.ndarray, files: dict[str, np.ndarray], where: str, odd_as: str) -> None:
    """Raise unless the files of an attempt hold exactly the rows that it was to ask. `odd_as` is
    what to call others.
    """
    held_R = np.concatenate([np.zeros(0, np.int64), *files.values()])
    if np.array_equal(np.sort(wanted_R), np.sort(held_R)):
        return
    want = Counter(wanted_R.tolist())
    have = Counter(held_R.tolist())
    lost = want - have
    odd = have - want
    to_blame = [path for path, rows_R in files.items() if not odd.keys().isdisjoint(rows_R.tolist())] or list(files)
    raise ManifestError(
        f"{where}: {lost.total()} rows lost (row ids {sorted(lost)[:SHOWN]}), {odd.total()} "
        f"{odd_as.format(sorted(odd)[:SHOWN])}, "
        f"by {' and '.join(to_blame) or 'its files, of which it has none'}. {_REDO}"
    )


# ------------------------------------------------------------------------------
# A recipe: what a run settles once about how its labels are made (labeler, templates, model, sampling, engine), as the
# `parts` of its plan hold it; and how two of them differ.


PERSON_LABEL = b"relabel label 1"
SETTLED = ("model", "engine", "overlong")
"""Parts of a plan that every answer depends on."""
_NOT_IN_A_LABEL = frozenset({"attempts"})
"""Options that decide how often an unreadable answer is asked again, and never how a readable one is read."""
BY_CONTENT = "by its files"
"""Replaces a path among an engine's options in the fingerprint: its content is part of the model's digest, and where
it lies is no part of a label.
"""


def recipe_parts(parts: dict[str, Any]) -> dict[str, Any]:
    """What a plan's `parts` hold about how a label is made: everything but the input and how the work is cut.

    The prompt's limit stays in (`engine.max_prompt_tokens`, `overlong`): which documents it would cut is known only
    once they are encoded.
    """
    labeler = {key: value for key, value in parts["labeler"].items() if key not in _NOT_IN_A_LABEL}
    return {
        "labeler": labeler,
        "templates": parts["templates"],
        "stages": parts.get("stages"),
        "model": parts["model"],
        "engine": parts["engine"],
        "overlong": parts["overlong"],
    }


def recipe_digest(parts: dict[str, Any]) -> bytes:
    """32 bytes that represent `recipe_parts`."""
    return blake2b(canonical_json(recipe_parts(parts)), digest_size=32, person=PERSON_LABEL).digest()


def recipe_differences(was: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    """What differs between two plans' recipes, by part (`labeler`, `templates`, …): the names of the settings that
    changed. Of another labeler its name alone, since its other settings, its stages and templates follow from that.
    """
    names: dict[str, list[str]] = {}
    for path, *_ in differing(recipe_parts(was), recipe_parts(now)):
        part, _, name = path.partition(".")
        names.setdefault(part, []).append(name or part)
    if "name" in names.get("labeler", ()):
        names["labeler"] = ["name"]
        for part in ("stages", "templates"):
            names.pop(part, None)
    return names


def stages_changed(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Stages of a plan's parts whose answers to the same texts may differ from another plan's, in order.

    A stage goes on from the answers before it, which its own ask shows, so a changed first stage changes those after
    it.
    """
    stages = list(now["stages"])
    if any(was[part] != now[part] for part in SETTLED):
        return stages
    before = was.get("stages") or {}
    return [stage for stage in stages if before.get(stage) != now["stages"][stage]]


# ------------------------------------------------------------------------------
# The plan of an output, which is immutable: what it labels, how the work is cut, and the files that hold both.


# Shape legend: R rows, Q queries, S shards

PLAN_NAME = "plan.json"
PLAN_VERSION = 1
ROUNDS_NAME = "rounds.json"
"""What the output of `relabel rounds` holds; each of its rounds is a run in a folder below."""


class ShardPlan(NamedTuple):
    """One shard: rows `first_row .. first_row + rows`, or, where queries lie scattered, the row ids in a file next to
    the plan.

    `chunks` are row counts in the shard's own order; chunk k covers the rows after those of chunks 0..k-1.
    """

    rows: int
    first_row: int | None
    row_ids: FileRef | None
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
        cut: `shards` and `chunk_rows`; None where they are by the rows.
        kind: `student` for scores.
        table: what the input is a snapshot of; None for plain files.
    """

    columns: Columns
    labeler: PlannedLabeler
    model: str
    schema: int
    cut: dict[str, int | None]
    label_columns: list[tuple[str, str]]
    kind: str | None = None
    table: PlannedTable | None = None


def facts_of(parts: dict[str, Any]) -> PlanFacts:
    """Read a plan's parts.

    Raises:
        ManifestError: one is missing or is not what it should be.
    """
    what = "its `parts` are not a job's"
    advice = "Restore it, or use another output folder."
    return read_record(
        PlanFacts,
        parts,
        PLAN_NAME,
        what,
        advice,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a worker needs to know apart from the spec.

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
    def input_rows(self) -> int:
        """Of the files, with those that are not in use (`input.limit`)."""
        return sum(file.rows for file in self.files)

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
        chunk_rows = self.facts.cut["chunk_rows"]
        if chunk_rows:
            return chunk_rows
        return max((max(shard.chunks, default=1) for shard in self.shards), default=1)

    @property
    def num_chunks(self) -> int:
        return sum(len(shard.chunks) for shard in self.shards)


def write_plan(store: Store, plan: Plan, plan_files: Mapping[str, bytes]) -> bool:
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
    for name, data in plan_files.items():
        store.put(name, data)
    failpoints.hit("before_plan")
    planned = replace(plan, files=[file._replace(path=absolute_path(file.path)) for file in plan.files])
    was_created = store.create(PLAN_NAME, readable_json({"version": PLAN_VERSION, **plain(planned)}))
    failpoints.hit("after_plan")
    return was_created


def load_plan(store: Store) -> Plan | None:
    """The plan of an output, or None if it has none.

    Raises:
        ManifestError: it can't be read as a plan, or another version of relabel wrote it.
    """
    data = read_if_there(store, PLAN_NAME)
    return None if data is None else parse_plan(data, f"{store.root}/{PLAN_NAME}")


def refuse_rounds(store: Store) -> None:
    """Called where an output has no plan: that of a search in rounds has one for each round.

    Raises:
        ManifestError: it is such an output; names its rounds.
    """
    if read_if_there(store, ROUNDS_NAME) is None:
        return
    rounds: list[str] = []
    while read_if_there(store, f"round-{len(rounds) + 1}/{PLAN_NAME}") is not None:
        rounds.append(f"{store.root}/round-{len(rounds) + 1}")
    advice = f"Name one: {', '.join(rounds)}." if rounds else "None is begun: run `relabel rounds` with its job file."
    raise ManifestError(f"{store.root}: the output of a search in rounds, each of which is a run of its own. {advice}")


def parse_plan(data: bytes, where: str) -> Plan:
    """The plan that a file holds.

    Raises:
        ManifestError: as `load_plan`.
    """
    advice = "Restore it, or use another output folder."
    plan = read_record(
        Plan,
        data,
        where,
        "not a plan",
        advice,
        version=PLAN_VERSION,
    )
    if digest_of(plan.parts) != plan.fingerprint:
        raise ManifestError(f"{where}: damaged: its fingerprint is not that of its parts. Restore it from a copy.")
    return plan


def shard_row_ids(store: Store, shard: ShardPlan) -> np.ndarray:
    """Row ids of a shard in its own order, int64.

    Raises:
        ManifestError: the row-id file is missing or is not the one that was planned.
    """
    if shard.row_ids is None:
        return np.arange(shard.rows) + (shard.first_row or 0)
    data = read_file_of(store, shard.row_ids, lambda: "Restore it from a copy.")
    return np.asarray(table_of(data).column("row_id").to_numpy())


def chunk_row_ids(store: Store, shard: ShardPlan) -> list[np.ndarray]:
    """Row ids of a shard, int64, by chunk.

    Raises:
        ManifestError: as `shard_row_ids`.
    """
    return np.split(shard_row_ids(store, shard), np.cumsum(shard.chunks)[:-1])


ROW_IDS = pa.schema([("row_id", pa.int64())])
ROW_GROUP_ROWS = 1 << 20


def row_group_sizes(rows: int) -> list[int]:
    """How many rows each row group of a shard's row ids has."""
    return [min(ROW_GROUP_ROWS, rows - start) for start in range(0, rows, ROW_GROUP_ROWS)]


class RowIdFile:
    """The file of a scattered shard's row ids that must lie next to its plan, written a row group at a time."""

    def __init__(self) -> None:
        self._rows = 0
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(
            self._sink,
            ROW_IDS,
            compression="zstd",
            use_dictionary=False,
            column_encoding="DELTA_BINARY_PACKED",
            write_statistics=False,
        )

    def add(self, rows: np.ndarray) -> None:
        """The next row ids, int64: as many as `row_group_sizes` says."""
        self._rows += len(rows)
        self._writer.write_table(pa.table([pa.array(rows, pa.int64())], schema=ROW_IDS))

    def finish(self, number: int) -> tuple[FileRef, dict[str, bytes]]:
        """The file's reference in the plan, and its bytes by name.

        Args:
            number: the shard's.
        """
        self._writer.close()
        data = self._sink.getvalue().to_pybytes()
        digest = sha256_bytes(data)
        path = f"plan/rows-{number:05d}-{digest[:16]}.parquet"
        return FileRef(path, self._rows, digest), {path: data}


# ------------------------------------------------------------------------------
# The fingerprint: what ties an output to one job, and whose plan a plan is.


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
    cut: dict[str, int | None],
) -> dict[str, Any]:
    """What ties an output to one job, as plain values whose differences a person can read.

    Input paths are not part of it: a data set may move, its identity is in its footers.

    Args:
        label_columns: those that the labeler declares, name → kind, in their order in the label files.
        stages: a digest of each stage's ask as it is rendered for a made-up pair (`reuse.stage_digests`): it names
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
    if dataset.table is not None:
        parts["table"] = dataset.table.identity
    if dataset.reads.columns:
        parts["input_columns"] = [column.name for column in dataset.reads.columns]
    if dataset.reads.siblings:  # a chunk that cut a query would hold some of its siblings
        parts["whole_queries"] = True
    return dict(json.loads(canonical_json(parts)))  # as a plan that was written and read back holds them


def template_name(digest: str) -> str:
    """Where the template with this sha256 is kept, in the output: so that it can be compared when it changed."""
    return f"plan/template-{digest[:16]}.j2"


def check_plan(plan: Plan, dataset: Dataset, parts: dict[str, Any], *, output: str) -> None:
    """Refuse to go on with a plan made for other inputs or another job.

    Raises:
        StaleRunError: names every file that changed, or every setting that differs.
    """
    now = {**parts, "cut": _cut_as_planned(plan.parts.get("cut"), parts.get("cut"))}
    if plan.parts == now:
        return
    changed = []
    if plan.parts.get("inputs") != parts.get("inputs"):
        changed = changed_files(plan.files, dataset.files)
    changes = list(_changes(plan.parts, now))
    if changed:
        also = f"\n   Settings differ too:{_listed(changes)}" if changes else ""
        raise StaleRunError(
            f"{output}: the inputs are not those that were planned, and an output never grows or changes its input. "
            f"Changed:{_listed(changed)}\n  Restore the files; or label the new ones into another `output`, with "
            f"`reuse: [{output}]` in the job for the labels of texts that stayed.{also}"
        )
    taken_over = ""
    if recipe_digest(plan.parts) == recipe_digest(parts):
        taken_over = f" (`reuse: [{output}]` in the job takes over the labels of the same texts)"
    way = f"Use another `output`{taken_over}, or restore the spec."
    if "kind" in parts:  # of `relabel score`, which has options and no spec
        way = "Give another --to, or the options and the model as they were."
    raise StaleRunError(
        f"{output}: belongs to another job. Different:{_listed(changes)}\n"
        f"  {way}"
        f"{_audit_to_restore(plan.parts.get('cascade'), parts.get('cascade'))}"
    )


def _audit_to_restore(planned: dict[str, Any] | None, cascade: dict[str, Any] | None) -> str:
    """How to go on where less of a cascade would be audited than was planned: the share is derived, so the job does not
    name what it was. Before 0.1.0, all of a small input was audited.
    """
    if planned is None or cascade is None or planned["audit"] <= cascade["audit"]:
        return ""
    return f" `cascade.audit: {planned['audit']:g}` in the job restores the audit."


def _cut_as_planned(planned: Any, cut: Any) -> Any:
    """How a job cuts its work: where it names no number, that of the plan holds."""
    if not planned or not cut:
        return cut
    return {name: planned.get(name) if value is None else value for name, value in cut.items()}


def _listed(lines: list[str]) -> str:
    shown = lines[:20]
    if len(lines) > 20:
        shown.append(f"… and {len(lines) - 20} more")
    return "".join(f"\n  {line}" for line in shown)


def _changes(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs, a phrase each. What follows from a difference that is shown is left out: stages that ask otherwise,
    and of another labeler its settings, columns and templates.
    """
    is_asked_otherwise = any(was.get(key) != now.get(key) for key in ("labeler", "templates"))
    is_other_labeler = was.get("labeler", {}).get("name") != now.get("labeler", {}).get("name")
    left_out = {"inputs"}
    if is_asked_otherwise:
        left_out.add("stages")
    if is_other_labeler:
        left_out |= {"templates", "label_columns"}
    for key in sorted({*was, *now} - left_out):
        for path, before, after in differing(was.get(key), now.get(key), key):
            if is_other_labeler and path.startswith("labeler.") and path != "labeler.name":
                continue
            if path.startswith("templates."):
                yield f"{path}: another text than the planned one" + (f", {template_name(before)}" if before else "")
            else:
                yield difference_text(path, before, after)
