"""A run's folder: what is committed, what its receipts add up to, the proof of all rows, the manifest, the labels."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests import failpoints
from relabel.manifests.asks import Charge
from relabel.manifests.errors import InputError, ManifestError, RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.labels import CASCADE_COLUMNS, QUARANTINE, SCHEMA_VERSION, label_schema, table_of
from relabel.manifests.plan import (
    PLAN_NAME,
    ChunkId,
    Fates,
    FileRef,
    Plan,
    Receipt,
    ReusedRows,
    RunRows,
    agree,
    chunk_row_ids,
    facts_of,
    load_plan,
    load_receipt,
    parse_plan,
    parse_receipt_name,
    prove_chunk,
    read_file_of,
    refuse_rounds,
)
from relabel.manifests.records import (
    LEFT_OUT,
    canonical_json,
    plain,
    read_record,
    sealed_json,
    sha256_bytes,
)
from relabel.manifests.store import Store, map_concurrent, open_run_store, read_if_there

# ------------------------------------------------------------------------------
# Which engines made a set of labels, and whether they are one.
#
# Labels of two engines, models or precisions in one set are two teachers under one name. So a run refuses to go on with
# another engine than the one that began it, and outputs of different ones are not merged, unless the user says so; then
# the manifest says so too.


IDENTITY = ("family", "version", "model_digest", "dtype", "device")
"""What must agree. Of the device only its kind (`cuda`, `cpu`): which of a node's GPUs answered is no difference, a CPU
is one.
"""


def engine_identity(facts: Mapping[str, Any]) -> dict[str, str]:
    """What of an engine's facts (as receipts hold them) decides whether its labels may be mixed with others."""
    found = {name: str(facts.get(name, "")) for name in IDENTITY}
    return found | {"device": found["device"].partition(":")[0]}


def engines_of(asked: Iterable[Mapping[str, Any]], taken: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All engines that made a set of labels: those that were asked, and the identities of those whose labels were
    reused.
    """
    found = [dict(facts) for facts in asked if facts]
    for identity in map(engine_identity, taken):
        if identity not in map(engine_identity, found):
            found.append(dict(identity))
    return found


def engines_differ(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What differs between engines, a phrase each (`version: 0.26.0 and 0.32.0`); empty for one engine or none."""
    identities = [engine_identity(facts) for facts in engines if facts]
    values = {name: sorted({identity[name] for identity in identities}) for name in IDENTITY}
    return [f"{name}: {' and '.join(one or 'none' for one in held)}" for name, held in values.items() if len(held) > 1]


# ------------------------------------------------------------------------------
# What a run is expected to take, and what it may spend.


class Range(NamedTuple):
    """A number with its 95 % interval. Exact numbers have `low == value == high`."""

    low: float
    value: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Range:
        return cls(value, value, value)

    def __mul__(self, other: object) -> Range:  # a tuple's `*` repeats it, which no range wants
        if isinstance(other, Range):
            return Range(self.low * other.low, self.value * other.value, self.high * other.high)
        assert isinstance(other, int | float)
        return Range(self.low * other, self.value * other, self.high * other)

    def plus(self, other: Range) -> Range:
        """The sum, as if both missed in the same direction: wide rather than wrong."""
        return Range(self.low + other.low, self.value + other.value, self.high + other.high)

    def rounded(self, digits: int = 0) -> Range:
        return Range(*(round(one, digits) for one in self))


class Limits(NamedTuple):
    """`run.max_tokens` and `run.max_cost`; None is no limit."""

    max_tokens: int | None = None
    max_cost: float | None = None

    @property
    def is_set(self) -> bool:
        return self != (None, None)

    def hold(self, charge: Charge) -> bool:
        """Whether that much is within the limits."""
        return (self.max_tokens is None or charge.tokens <= self.max_tokens) and (
            self.max_cost is None or charge.cost <= self.max_cost
        )


@dataclass(frozen=True, slots=True)
class BudgetState:
    """How much of a budget is spent, by receipts; None means no limit."""

    max_tokens: int | None
    max_cost: float | None
    spent_tokens: int
    spent_cost: float

    @property
    def text(self) -> str:
        """For people, in a phrase."""
        tokens = "" if self.max_tokens is None else f"{self.spent_tokens:,} of {self.max_tokens:,} tokens spent"
        cost = "" if self.max_cost is None else f"{self.spent_cost:,.4f} of {self.max_cost:,.4f} in money spent"
        return "; ".join(filter(None, (tokens, cost)))


# ------------------------------------------------------------------------------
# A run's `manifest.json` as a record: what ran, on what, and what became of every row. Fields are in the order of
# the JSON.
#
# Readers rely on the fields without a default.


MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class EngineMix:
    """Whether labels of different engines were allowed, and what differs between those that are there."""

    allowed: bool = False
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MergedSource:
    """An output that was merged, as it was found; its rows begin at `first_row_id` of the merged input."""

    output: str
    fingerprint: str
    manifest_sha256: str | None = None
    receipts_sha256: str | None = None
    first_row_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """The manifest of any output.

    Args:
        receipts_sha256, receipts_listing_sha256: of the receipts' contents, and of what a listing shows of them.
        engines: all that made the labels; `engines_asked` are those that were asked here.
        provenance: the plan's parts.
        merged_from: of a merged output.
        variables: of the spec's `${...}`, by name; of an output which was labelled or scored where it lies.
        budget: where the job had one.
    """

    version: int
    relabel: str = ""
    name: str = ""
    fingerprint: str
    plan_sha256: str | None = None
    receipts_sha256: str
    receipts_listing_sha256: str
    rows: RunRows
    quarantined_by_status: dict[str, int]
    conservation: str = ""
    failed_fraction: float = 0.0
    max_failed_fraction: float
    over_limit: bool
    stages: dict[str, dict[str, int]]
    worker_seconds: float
    engines: list[dict[str, Any]]
    engines_asked: list[dict[str, Any]]
    mixed: EngineMix = EngineMix()
    canary: list[dict[str, Any]] = field(default_factory=list)
    reused_from: list[ReusedRows]
    provenance: dict[str, Any] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)
    labels: list[FileRef]
    quarantine: list[FileRef]
    answers: list[FileRef]
    merged_from: list[MergedSource] | None = field(default=None, metadata=LEFT_OUT)
    cascade: CascadeAudit | None = field(default=None, metadata=LEFT_OUT)
    variables: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)
    budget: BudgetState | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class CascadeAudit:
    """Who labelled a cascade's rows, and how often the teacher disagreed with the cheap labels.

    Args:
        alpha: bound of the mean loss a query.
        threshold: of the cheap answer's confidence.
        queries: of the calibration.
        cheap, teacher, calibration, audited: rows; all but the first were asked of the teacher.
        loss: mean loss a query, by the audited pairs, with 95 % bounds; None where too few were audited.
    """

    alpha: float
    threshold: float
    queries: int
    cheap: int
    teacher: int
    calibration: int
    audited: int
    loss: float | None
    low: float | None
    high: float | None

    @property
    def is_alarm(self) -> bool:
        """Whether the loss has left its bound, and not by the chance of the draw alone."""
        return self.low is not None and self.low > self.alpha

    @property
    def text(self) -> str:
        """In a line."""
        rows = self.cheap + self.teacher + self.calibration + self.audited
        saved = f"{self.cheap:,} of {rows:,} rows ({self.cheap / max(1, rows):.0%}) without the teacher"
        if self.loss is None:
            return f"{saved}; too few pairs audited to say what that costs (alpha {self.alpha:g})"
        lost = f"loss {self.loss:.4f} ({self.low:.4f} to {self.high:.4f}) by {self.audited:,} audited pairs"
        return f"{saved}; {lost}, alpha {self.alpha:g}" + (": ABOVE THE BOUND" if self.is_alarm else "")


def load_manifest(store: Store) -> RunManifest | None:
    """The manifest of an output, or None if the run has not finished.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    data = read_if_there(store, MANIFEST_NAME)
    if data is None:
        return None
    where = f"{store.root}/{MANIFEST_NAME}"
    advice = "Move it away and run the job again."
    return read_record(
        RunManifest,
        data,
        where,
        "not a manifest",
        advice,
        version=MANIFEST_VERSION,
        check=_check_rows,
    )


def _check_rows(manifest: RunManifest) -> None:
    """Raise ValueError unless its rows add up, and its files hold them."""
    rows = manifest.rows
    labels, quarantine = (sum(file.rows for file in files) for files in (manifest.labels, manifest.quarantine))
    if (labels, quarantine, labels + quarantine) != (rows.labelled + rows.reused, rows.quarantined, rows.in_):
        in_files = {"labels": labels, "quarantine": quarantine}
        raise ValueError(f"its rows {plain(rows)} do not add up, or not to those of its files, {in_files}")


def write_manifest(store: Store, manifest: RunManifest) -> None:
    """Make the manifest durable: the last file of a run, replaced after a retry."""
    failpoints.hit("before_manifest")
    store.put(MANIFEST_NAME, sealed_json(plain(manifest)))
    failpoints.hit("after_manifest")


# ------------------------------------------------------------------------------
# The sums over the receipts of a run, or of some of its shards, at one moment.


NAMES_AT_A_TIME = 4096


@dataclass(frozen=True, kw_only=True)
class Tally(Fates):
    """What a run's receipts add up to; rows in quarantine are counted by their latest status. `worker_seconds` is from
    each worker's first row to its last commit, added up.
    """

    chunks_done: int
    stages: dict[str, dict[str, int]]
    worker_seconds: float

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all stages."""
        stages = self.stages.values()
        return sum(one["prompt_tokens"] for one in stages), sum(one["output_tokens"] for one in stages)


class Snapshot(NamedTuple):
    """A run's receipts as one pass found them.

    Args:
        labels: label files of all attempts; together they hold each labelled row once.
        quarantine: quarantine files of each chunk's highest attempt.
        answers: files with answers that rows share.
        engines: the different engines that were asked here; `all_engines` are those that made the labels, reused or
            not.
        reused_from: outputs that rows were reused from, with the rows of each.
        digest: over every receipt's name and its files' digests; it changes with any of them.
        listing_digest: over every receipt's name and its etag in this store, which a listing shows without reading one.
        etags: those names and etags: which receipts all this is about.
    """

    tally: Tally
    labels: list[FileRef]
    quarantine: list[FileRef]
    answers: list[FileRef]
    engines: list[dict[str, Any]]
    reused_from: list[ReusedRows]
    digest: str
    listing_digest: str
    etags: Mapping[str, str]

    @property
    def all_engines(self) -> list[dict[str, Any]]:
        return engines_of(self.engines, [engine for source in self.reused_from for engine in source.engines])


def digest_of_listing(etags: Mapping[str, str]) -> str:
    """`Snapshot.listing_digest`: sha256 of the canonical JSON of sorted names and their etags, written in parts."""
    digest = hashlib.sha256(b"{")
    left = iter(etags.items())
    before = b""
    while some := dict(itertools.islice(left, NAMES_AT_A_TIME)):
        digest.update(before + canonical_json(some)[1:-1])
        before = b","
    digest.update(b"}")
    return digest.hexdigest()


def sum_receipts(chunks: Iterable[Sequence[Receipt]], listing_digest: str, etags: Mapping[str, str]) -> Snapshot:
    """What receipts say together, as found under these names and etags.

    Args:
        chunks: of each all of its receipts, by attempt; the rows' states are those of the last.
    """
    num_chunks = labelled = reused = 0
    quarantined = Counter[str]()
    stages = defaultdict[str, Counter[str]](Counter)
    labels = list[FileRef]()
    quarantine = list[FileRef]()
    answers = list[FileRef]()
    engines = dict[str, dict[str, Any]]()
    sources = dict[str, ReusedRows]()
    spans: dict[str, tuple[str, str]] = {}
    """By worker: its first start and last commit."""
    digest = hashlib.sha256()
    for receipts in chunks:
        num_chunks += 1
        quarantined.update({status: count for status, count in receipts[-1].statuses.items() if status != "ok"})
        quarantine += [receipts[-1].quarantine] if receipts[-1].quarantine else []
        for receipt in receipts:
            labels += [receipt.labels] if receipt.labels else []
            answers += [receipt.answers] if receipt.answers else []
            files = [file.sha256 if file else "-" for file in (receipt.labels, receipt.quarantine)]
            files += [receipt.answers.sha256] if receipt.answers else []
            digest.update(f"{receipt.shard} {receipt.chunk} {receipt.attempt} {' '.join(files)}\n".encode())
            labelled += receipt.statuses.get("ok", 0) - receipt.rows_reused
            reused += receipt.rows_reused
            for source in receipt.reused:
                key = json.dumps(asdict(replace(source, rows=0)))
                sources[key] = replace(source, rows=source.rows + (sources[key].rows if key in sources else 0))
            first, last = spans.get(receipt.worker, (receipt.started, receipt.committed))
            spans[receipt.worker] = min(first, receipt.started), max(last, receipt.committed)
            if receipt.engine:
                engines.setdefault(json.dumps(receipt.engine, sort_keys=True), receipt.engine)
            for stage, counts in receipt.stages.items():
                stages[stage].update(counts)
    moments = ((datetime.fromisoformat(first), datetime.fromisoformat(last)) for first, last in spans.values())
    tally = Tally(
        labelled,
        reused,
        dict(quarantined),
        chunks_done=num_chunks,
        stages={stage: dict(counts) for stage, counts in stages.items()},
        worker_seconds=round(sum((last - first).total_seconds() for first, last in moments), 3),
    )
    return Snapshot(
        tally=tally,
        labels=labels,
        quarantine=quarantine,
        answers=answers,
        engines=list(engines.values()),
        reused_from=list(sources.values()),
        digest=digest.hexdigest(),
        listing_digest=listing_digest,
        etags=etags,
    )


# ------------------------------------------------------------------------------
# A run's folder as a whole: what is committed, whether every row is accounted for, and the manifest that says so.
#
# Counting and resuming look at receipts alone, so their cost grows with chunks and never with rows; proving
# conservation reads one narrow column of every committed file, once, when the last chunk is in.


RECEIPTS_KEPT = 20_000
"""Receipts that a process keeps once read (they never change): about 50 MB."""
_RESTORE = "Restore it from a copy, or move its receipt away to redo the chunk."
Attempts = Mapping[int, Mapping[int, Sequence[int]]]
"""Attempts committed, by shard and chunk."""


def open_planned(root: str, storage: Storage, otherwise: RelabelError) -> RunFolder:
    """An output that was planned.

    Args:
        otherwise: raised where there is no plan.
    Raises:
        ManifestError: the plan is damaged, or the output is that of a search in rounds.
    """
    store = open_run_store(root, storage)
    plan = load_plan(store)
    if plan is None:
        refuse_rounds(store)
        raise otherwise
    return RunFolder(store, plan)


class RunFolder:
    """Receipts of one output, read against its plan."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.store = store
        self.plan = plan
        self._known: dict[str, tuple[str, Receipt]] = {}

    def attempts(self, shard: int) -> dict[int, list[int]]:
        """Attempts committed for each chunk of a shard, ascending, from receipt names alone.

        Raises:
            ManifestError: a receipt of a chunk that the plan does not have.
        """
        return self.attempts_of_all(self.store.names(f"receipts/shard-{shard:05d}")).get(shard, {})

    def listing(self) -> dict[str, str]:
        """Names and etags of all receipts, sorted."""
        return self.store.etags("receipts")

    def attempts_of_all(self, names: Iterable[str] | None = None) -> dict[int, dict[int, list[int]]]:
        """As `attempts`, for every shard that has any, from one listing: these names, or a new one."""
        found: dict[int, dict[int, list[int]]] = {}
        for name in self.listing() if names is None else names:
            chunk = parse_receipt_name(name)
            planned = self.plan.shards[chunk.shard : chunk.shard + 1] if chunk else []
            if chunk is None or not planned or chunk.chunk >= len(planned[0].chunks):
                raise ManifestError(
                    f"{self.store.root}/{name}: no such chunk in the plan. This file does not belong here; move it "
                    "away."
                )
            bisect.insort(found.setdefault(chunk.shard, {}).setdefault(chunk.chunk, []), chunk.attempt)
        return found

    def new_receipts(self, before: Attempts, now: Attempts, etags: Mapping[str, str]) -> Iterator[Receipt]:
        """Receipts among those listed now (a snapshot's etags, and the attempts in them) that were not there at an
        earlier look.
        """
        names = [
            ChunkId(shard, chunk, attempt).receipt_name
            for shard, done in now.items()
            for chunk, attempts in done.items()
            for attempt in attempts
            if attempt not in before.get(shard, {}).get(chunk, ())
        ]
        return map_concurrent(self.store, lambda name: self._receipt(name, etags[name]), names)

    def lost_receipts(self) -> Iterator[Receipt]:
        """Of chunks that were asked, and that another worker had committed by then."""
        return map_concurrent(self.store, lambda name: load_receipt(self.store, name), list(self.store.etags("lost")))

    def pending(self, shard: int) -> list[int]:
        """Chunks of a shard without a receipt, ascending."""
        done = self.attempts(shard)
        return [chunk for chunk in range(len(self.plan.shards[shard].chunks)) if chunk not in done]

    def chunk_receipts(self, shard: int) -> Iterator[list[Receipt]]:
        """The receipts of each committed chunk of a shard, by attempt, from the one on that holds all of the chunk's
        rows.

        Raises:
            ManifestError: a receipt is damaged, belongs to another plan, or skips an attempt.
        """
        return self.receipts_in(self.store.etags(f"receipts/shard-{shard:05d}"))

    def receipts_in(self, etags: Mapping[str, str]) -> Iterator[list[Receipt]]:
        """The receipts of these names, chunk by chunk in order; read several at a time where the store is slow to
        answer.
        """
        chunks = [
            [ChunkId(shard, chunk, attempt) for attempt in attempts]
            for shard, found in sorted(self.attempts_of_all(etags).items())
            for chunk, attempts in sorted(found.items())
        ]
        for ids in chunks:
            attempts = [one.attempt for one in ids]
            if attempts != list(range(1, len(attempts) + 1)):
                name = ids[0]._replace(attempt=1).receipt_name
                raise ManifestError(
                    f"{self.store.root}/{name}: attempts {attempts} are there; one is missing. Restore it from a copy."
                )
        names = [one.receipt_name for ids in chunks for one in ids]
        receipts = map_concurrent(self.store, lambda name: self._receipt(name, etags[name]), names)
        for ids in chunks:
            yield self._checked(list(itertools.islice(receipts, len(ids))))

    def _checked(self, receipts: list[Receipt]) -> list[Receipt]:
        """A chunk's receipts, without those that a later one replaced; they agree with each other and with the plan."""
        first = max((at for at, receipt in enumerate(receipts) if receipt.replaces), default=0)
        receipts = receipts[first:]
        planned = self.plan.shards[receipts[0].shard]
        if not agree(receipts, planned.chunks[receipts[0].chunk]):
            rows_by_chunk = chunk_row_ids(self.store, planned)
            # raises, and says which rows
            self._prove_chunk(receipts, rows_by_chunk[receipts[0].chunk], check_bytes=False)
        return receipts

    def snapshot(
        self,
        *,
        believes_manifest: bool = True,
        manifest: RunManifest | None = None,
        etags: Mapping[str, str] | None = None,
    ) -> Snapshot:
        """What all receipts say together.

        Args:
            manifest: as it was read a moment ago; of a million receipts it is some hundred megabytes.
            etags: a `listing` of a moment ago, likewise.
            believes_manifest: where the manifest was made of just these receipts (their names and etags say so), take
                its word instead of reading them all again.
        """
        etags = self.listing() if etags is None else etags
        listing_digest = digest_of_listing(etags)
        if believes_manifest:
            manifest = manifest or load_manifest(self.store)
            if manifest is not None and manifest.receipts_listing_sha256 == listing_digest:
                rows = manifest.rows
                tally = Tally(
                    rows.labelled,
                    rows.reused,
                    manifest.quarantined_by_status,
                    chunks_done=self.plan.num_chunks,
                    stages=manifest.stages,
                    worker_seconds=manifest.worker_seconds,
                )
                files = manifest.labels, manifest.quarantine, manifest.answers
                digest = manifest.receipts_sha256
                sources = manifest.reused_from
                return Snapshot(
                    tally,
                    *files,
                    manifest.engines_asked,
                    sources,
                    digest,
                    listing_digest,
                    etags,
                )
        return sum_receipts(self.receipts_in(etags), listing_digest, etags)

    def quarantined_rows(self, receipt: Receipt) -> list[dict[str, Any]]:
        """The rows of a receipt's quarantine file, as plain values; empty if it has none."""
        return self.table(receipt.quarantine, QUARANTINE).to_pylist() if receipt.quarantine else []

    def table(
        self, file: FileRef, schema: pa.Schema, columns: list[str] | None = None, *, check_bytes: bool = True
    ) -> pa.Table:
        """Read a committed file.

        Raises:
            ManifestError: it is missing, its bytes or row count are not those committed, or its schema is another.
        """
        path = f"{self.store.root}/{file.path}"
        data = read_file_of(self.store, file, _RESTORE, check_bytes=check_bytes)
        try:
            table = table_of(data, columns)
        except (pa.ArrowException, OSError) as exc:
            raise ManifestError(f"{path}: not readable as Parquet. {_RESTORE}") from exc
        if table.num_rows != file.rows:
            raise ManifestError(f"{path}: {table.num_rows} rows, committed were {file.rows}.")
        if not table.schema.equals(schema if columns is None else pa.schema([schema.field(name) for name in columns])):
            raise ManifestError(f"{path}: its schema is not this version's. Read it with the relabel that wrote it.")
        return table

    def prove(self, found: Snapshot, *, check_bytes: bool) -> Fates:
        """Prove that every planned row is there and has exactly one state, from the files that these receipts name.

        Args:
            found: the receipts; commits that came after it are not seen.
            check_bytes: also compare every file's sha256 (`verify`); otherwise only narrow columns are read.
        Raises:
            ManifestError: a chunk has no receipt; or names a receipt, its files, and up to ten row ids that are lost or
                doubled.
        """
        for shard, left in self.open_chunks(found).items():
            raise ManifestError(
                f"{self.store.root}: shard {shard} is not finished: {len(left)} of "
                f"{len(self.plan.shards[shard].chunks)} chunks have no "
                f"receipt (the first is {left[0]}). Run the job again."
            )
        total = Fates()
        for shard, chunks in itertools.groupby(self.receipts_in(found.etags), key=lambda receipts: receipts[0].shard):
            rows_by_chunk = chunk_row_ids(self.store, self.plan.shards[shard])

            def proved(receipts: list[Receipt], rows_by_chunk: list[np.ndarray] = rows_by_chunk) -> Fates:
                return self._prove_chunk(receipts, rows_by_chunk[receipts[0].chunk], check_bytes=check_bytes)

            total = functools.reduce(Fates.plus, map_concurrent(self.store, proved, chunks), total)
        return total

    def _prove_chunk(self, receipts: list[Receipt], planned_R: np.ndarray, *, check_bytes: bool) -> Fates:
        return prove_chunk(
            receipts, planned_R, functools.partial(self.table, check_bytes=check_bytes), root=self.store.root
        )

    def open_chunks(self, *found: Snapshot) -> dict[int, list[int]]:
        """Chunks without a receipt, by shard; of several places where parts of this run were done, those that none of
        them has.
        """
        done = {
            (shard, chunk)
            for one in found
            for shard, chunks in self.attempts_of_all(one.etags).items()
            for chunk in chunks
        }
        planned = ((shard, range(len(one.chunks))) for shard, one in enumerate(self.plan.shards))
        left = {shard: [chunk for chunk in chunks if (shard, chunk) not in done] for shard, chunks in planned}
        return {shard: chunks for shard, chunks in left.items() if chunks}

    def _receipt(self, name: str, etag: str) -> Receipt:
        known = self._known.get(name)
        if known is not None and known[0] == etag:
            return known[1]
        try:
            receipt = load_receipt(self.store, name)
        except FileNotFoundError as exc:
            raise ManifestError(
                f"{self.store.root}/{name}: it was there a moment ago, and is gone. Run the same command again."
            ) from exc
        if receipt.fingerprint != self.plan.fingerprint:
            raise ManifestError(
                f"{self.store.root}/{name}: belongs to another job (fingerprint {receipt.fingerprint[:12]}, "
                f"the plan's is {self.plan.fingerprint[:12]}). Move it away to have the chunk done again."
            )
        if receipt.id != parse_receipt_name(name):
            raise ManifestError(
                f"{self.store.root}/{name}: holds the receipt {receipt.id.receipt_name}. Restore both from a copy, or "
                "move them away to have their chunks done again."
            )
        if len(self._known) < RECEIPTS_KEPT:
            self._known[name] = etag, receipt
        return receipt


def _plan_digest(folder: RunFolder) -> str:
    """sha256 of plan.json, read again and checked to be the plan that was used: a reply that was cut short would be
    in the manifest for good.
    """
    where = f"{folder.store.root}/{PLAN_NAME}"
    data = folder.store.read(PLAN_NAME)
    if parse_plan(data, where) != folder.plan:
        raise ManifestError(
            f"{where}: not the plan that this run began with. Restore it from a copy, and run the same command again."
        )
    return sha256_bytes(data)


def build_manifest(
    folder: RunFolder,
    found: Snapshot,
    *,
    spec: dict[str, Any],
    max_failed_fraction: float,
    relabel_version: str,
    canaries: Sequence[dict[str, Any]] = (),
    allow_mixed: bool = False,
    cascade: CascadeAudit | None = None,
) -> RunManifest:
    """Prove that every row is accounted for, and say so with all that a reader of the labels needs.

    Args:
        found: the receipts, read under the manifest's lock.
        canaries: the outcome of asking labelled rows again.
        allow_mixed: the user allowed labels of different engines in one output.
        cascade: who labelled its rows, of a cascade.
    Raises:
        ManifestError: a row is lost or doubled, or a chunk is missing.
    """
    plan = folder.plan
    tally = found.tally
    fates = folder.prove(found, check_bytes=False)
    failed = fates.num_quarantined / fates.rows if fates.rows else 0.0
    return RunManifest(
        version=MANIFEST_VERSION,
        relabel=relabel_version,
        name=plan.name,
        fingerprint=plan.fingerprint,
        plan_sha256=_plan_digest(folder),
        receipts_sha256=found.digest,
        receipts_listing_sha256=found.listing_digest,
        rows=fates.by_kind(),
        quarantined_by_status=dict(fates.quarantined),
        conservation=(
            "rows in = labelled + reused + quarantined, each row once, compared with the plan as multisets of row ids"
        ),
        failed_fraction=round(failed, 6),
        max_failed_fraction=max_failed_fraction,
        over_limit=failed > max_failed_fraction,
        stages=tally.stages,
        worker_seconds=tally.worker_seconds,
        engines=found.all_engines,
        engines_asked=found.engines,
        mixed=EngineMix(allow_mixed, engines_differ(found.all_engines)),
        canary=list(canaries),
        reused_from=found.reused_from,
        provenance=plan.parts,
        inputs=[file._asdict() for file in plan.files],
        spec=spec,
        labels=found.labels,
        quarantine=found.quarantine,
        answers=found.answers,
        cascade=cascade,
    )


# ------------------------------------------------------------------------------
# Label files by the plan that they were written under: which columns they hold, and all of them read as rows of one
# kind.


def own_columns(parts: dict[str, Any]) -> dict[str, str]:
    """The columns that a plan's labeler adds to its labels, name → kind."""
    return dict(facts_of(parts).label_columns)


def labeler_columns(parts: dict[str, Any]) -> dict[str, str]:
    """As `own_columns`, without those of a cascade: what a label of an earlier run must have."""
    left_out = {column.name for column in CASCADE_COLUMNS} if "cascade" in parts else set()
    return {name: kind for name, kind in own_columns(parts).items() if name not in left_out}


def file_schema(parts: dict[str, Any]) -> pa.Schema:
    """How the label files of a plan with these parts lie."""
    return label_schema(own_columns(parts))


def joined_form(plans: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The parts that say how label files lie, for files with a place for all labels of some plans: the columns of each
    after one another.

    Args:
        plans: what to call each in an error, and its parts.
    Raises:
        ManifestError: a plan is of a version whose labels can't be mixed with others, or two have a column of one name
            and two kinds.
    """
    columns: dict[str, str] = {}
    for where, parts in plans:
        version = facts_of(parts).schema
        if version != SCHEMA_VERSION:
            raise ManifestError(
                f"{where}: has label files of version {version}, which don't merge with others. Label it again."
            )
        for name, kind in own_columns(parts).items():
            if columns.setdefault(name, kind) != kind:
                raise ManifestError(
                    f"{where}: its column `{name}` holds {kind}, that of an output named before it {columns[name]}."
                )
    return {"schema": SCHEMA_VERSION, "label_columns": [list(column) for column in columns.items()]}


def read_labels(
    folder: RunFolder, file: FileRef, names: list[str] | None = None, *, check_bytes: bool = True
) -> pa.Table:
    """A committed label file's columns, the labeler's own after the others.

    Args:
        names: those to read, all by default; what the file does not have is left out.
    Raises:
        ManifestError: as `RunFolder.table`.
    """
    schema = file_schema(folder.plan.parts)
    return folder.table(
        file, schema, [name for name in schema.names if names is None or name in names], check_bytes=check_bytes
    )


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table's columns in the order of a schema, null where the table has none; columns that the schema does not name
    are left out.
    """
    held = {name: table[name] for name in table.column_names}
    columns = [held[one.name] if one.name in held else pa.nulls(table.num_rows, one.type) for one in schema]
    return pa.Table.from_arrays(columns, schema=schema)


# ------------------------------------------------------------------------------
# The committed labels of a run, as evaluation and merging open them.


@dataclass(frozen=True)
class RunLabels:
    """A run's output, ready to be read.

    Args:
        found: by the manifest, or by the receipts where it is not finished.
        notes: remarks for a reader of a report.
    """

    root: str
    plan: Plan
    folder: RunFolder
    found: Snapshot
    notes: list[str]

    @property
    def grades(self) -> int:
        """K."""
        return self.plan.facts.labeler.grades


def open_run_labels(root: str, storage: Storage, *, allow_partial: bool) -> RunLabels:
    """The files of an output folder, none of them read yet.

    Raises:
        InputError: the folder holds no run.
        ManifestError: the run is not finished, or over its quarantine limit, and `allow_partial` is off; or a file is
            damaged.
    """
    no_run = f"{root}: a folder without {PLAN_NAME}, so no run's output. Give a run's output folder, or a label file."
    folder = open_planned(root, storage, InputError(no_run))
    manifest = load_manifest(folder.store)
    found = folder.snapshot(manifest=manifest)
    advice = dict[str, str]()
    if manifest is None or manifest.receipts_sha256 != found.digest:
        older = "" if manifest is None else ", and its manifest is older than its receipts"
        state = f"not finished: {found.tally.rows:,} of {folder.plan.rows:,} rows are done{older}"
        advice[state] = "Run the job again to finish it"
    if manifest is not None and manifest.over_limit:
        share = f"{found.tally.num_quarantined:,} of {manifest.rows.in_:,} rows are in quarantine"
        state = f"over its quarantine limit: {share}, limit {manifest.max_failed_fraction:.0%}"
        advice[state] = "Complete it with `relabel retry`"
    for state in () if allow_partial else advice:
        raise ManifestError(
            f"{root}: {state}; no labels but those of the whole run are a fair sample. {advice[state]}, or judge what "
            "is there with --allow-partial."
        )
    return RunLabels(
        root,
        folder.plan,
        folder,
        found,
        [f"{root} is {state}" for state in advice],
    )
