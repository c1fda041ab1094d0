"""Receipts: the proof that a chunk is committed, and the only way to its files.

`receipts/shard-00003/chunk-000017.json` is created once, if absent; that is the commit point. `retry` adds
`chunk-000017.2.json` with the rows it asked again, all that were in quarantine: a row's state is that of its highest
attempt. Times live here and never in label files.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from relabel.manifests.digests import digest_of
from relabel.manifests.errors import ManifestError
from relabel.manifests.records import checked, fault_of, read_in_threads, unsealed, version_of
from relabel.manifests.storage.run_store_ports import RunStore

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


@dataclass(frozen=True, slots=True)
class ReusedRows:
    """Rows that a chunk took over from an earlier output: which output, as it was found, and how many.

    `manifest_sha256` is None for an output that was not finished; `receipts_sha256` names what it held in either case.
    `engines` are the identities (`mixing.engine_identity`) of all engines behind that output's labels, whichever of
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
        epoch: of the lease that its writer held; 0 for a local lock, and for a helper, which holds none.
        in_budget: what was asked is counted in the ledger, `budget/`.
        execution: drawn for the command that the writer worked for; all workers of one command share it.
        write_id: drawn for this one write, so that its bytes are nobody else's: a writer that lost the reply knows its
            own receipt by it.
        replaces: this attempt holds all rows of the chunk anew, and those before it count no more: how a merge follows
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
    in_budget: bool = False
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
        "in_budget",
        "write_id",
        "replaces",
        "merged_from",
    )
)


_COUNTS = frozenset(("asks", "prompt_tokens", "cached_tokens", "output_tokens"))


def load_receipt(store: RunStore, name: str) -> Receipt:
    """Read one receipt.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    try:
        held = unsealed(store.read(name))
        version = version_of(held)
        if version != RECEIPT_VERSION:
            raise ManifestError(
                f"{store.root}/{name}: written as version {version}; this relabel reads {RECEIPT_VERSION}."
            )
        receipt = checked(Receipt, held)
        for moment in (receipt.started, receipt.committed):
            datetime.fromisoformat(moment)
        for stage, counts in receipt.stages.items():
            if missing := _COUNTS - counts.keys():
                raise ValueError(f"`stages.{stage}.{min(missing)}` is missing")
        return receipt
    except ValueError as exc:
        raise ManifestError(
            f"{store.root}/{name}: not a receipt ({fault_of(exc)}). Restore it from a copy, or move it away to have "
            "the chunk done again."
        ) from exc


def parse_receipt_name(name: str) -> ChunkId | None:
    """The chunk that a receipt's name stands for; None for a name that is none."""
    folder, _, file = name.rpartition("/")
    stem, *rest = file.removesuffix(".json").split(".")
    if not file.endswith(".json") or not stem.startswith("chunk-") or len(rest) > 1:
        return None
    try:
        return ChunkId(
            int(folder.rpartition("shard-")[2]), int(stem.removeprefix("chunk-")), int(rest[0]) if rest else 1
        )
    except ValueError:
        return None
