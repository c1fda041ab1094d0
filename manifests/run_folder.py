"""A run's folder as a whole: what is committed, what its receipts add up to, whether every row is accounted for, and
the manifest that states it.

Counting and resuming look at receipts alone, so their cost grows with chunks and never with rows; proving conservation
reads one narrow column of every committed file, once, when the last chunk is in.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError, ManifestError, RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import InputFile
from relabel.manifests.labels import LABELS, QUARANTINE, table_of
from relabel.manifests.plan import (
    PLAN_NAME,
    ChunkId,
    Fates,
    FileRef,
    Plan,
    Receipt,
    ReusedRows,
    agree,
    chunk_row_ids,
    load_plan,
    load_receipt,
    parse_plan,
    parse_receipt_name,
    prove_chunk,
    prove_chunks,
    read_file_of,
    refuse_rounds,
)
from relabel.manifests.records import canonical_json, sha256_bytes
from relabel.manifests.run_manifest import (
    MANIFEST_VERSION,
    CascadeAudit,
    EngineMix,
    RunManifest,
    engines_differ,
    engines_of,
    load_manifest,
)
from relabel.manifests.store import LocalStore, Store, map_concurrent, open_run_store

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
        return sum(stage["prompt_tokens"] for stage in stages), sum(stage["output_tokens"] for stage in stages)


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
        reused = itertools.chain.from_iterable(source.engines for source in self.reused_from)
        return engines_of(self.engines, reused)


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
    """What receipts add up to, as found under these names and etags.

    Args:
        chunks: of each all of its receipts, by attempt; the rows' states are those of the last.
    """
    num_chunks = 0
    labelled = 0
    reused = 0
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
        latest = receipts[-1]
        quarantined.update({status: count for status, count in latest.statuses.items() if status != "ok"})
        if latest.quarantine:
            quarantine.append(latest.quarantine)
        for receipt in receipts:
            if receipt.labels:
                labels.append(receipt.labels)
            if receipt.answers:
                answers.append(receipt.answers)
            digest.update(_digest_line(receipt))
            labelled += receipt.statuses.get("ok", 0) - receipt.rows_reused
            reused += receipt.rows_reused
            for source in receipt.reused:
                key = json.dumps(asdict(replace(source, rows=0)))
                rows_before = sources[key].rows if key in sources else 0
                sources[key] = replace(source, rows=rows_before + source.rows)
            first, last = spans.get(receipt.worker, (receipt.started, receipt.committed))
            spans[receipt.worker] = min(first, receipt.started), max(last, receipt.committed)
            if receipt.engine:
                engines.setdefault(json.dumps(receipt.engine, sort_keys=True), receipt.engine)
            for stage, counts in receipt.stages.items():
                stages[stage].update(counts)
    seconds = []
    for first, last in spans.values():
        span = datetime.fromisoformat(last) - datetime.fromisoformat(first)
        seconds.append(span.total_seconds())
    tally = Tally(
        labelled,
        reused,
        dict(quarantined),
        chunks_done=num_chunks,
        stages={stage: dict(counts) for stage, counts in stages.items()},
        worker_seconds=round(sum(seconds), 3),
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


def _digest_line(receipt: Receipt) -> bytes:
    """What `Snapshot.digest` is made of: a receipt's id, and the digests of its files."""
    digests = [file.sha256 if file else "-" for file in (receipt.labels, receipt.quarantine)]
    if receipt.answers:
        digests.append(receipt.answers.sha256)
    return f"{receipt.shard} {receipt.chunk} {receipt.attempt} {' '.join(digests)}\n".encode()


RECEIPTS_KEPT = 20_000
"""Receipts that a process keeps once read (they never change): about 50 MB."""
ROWS_PROVEN = 1 << 16
"""Rows of chunks that are proven together."""
Attempts = Mapping[int, Mapping[int, Sequence[int]]]
"""Attempts committed, by shard and chunk."""
CheckLabels = Callable[[FileRef, pa.Table], None]
"""Raises for a label file that holds something that is no label."""


def _some_rows(chunks: Iterable[list[Receipt]], most: int) -> Iterator[list[list[Receipt]]]:
    """Chunks in groups of about so many rows, at least one chunk each."""
    group: list[list[Receipt]] = []
    num_rows = 0
    for receipts in chunks:
        group.append(receipts)
        num_rows += receipts[0].rows
        if num_rows >= most:
            yield group
            group = []
            num_rows = 0
    if group:
        yield group


def open_planned(root: str, storage: Storage, otherwise: RelabelError) -> RunFolder:
    """An output that was planned.

    Args:
        otherwise: raised where there is no plan.
    Raises:
        InputError: a file is there.
        ManifestError: the plan is damaged, or the output is that of a search in rounds.
    """
    store = open_run_store(root, storage)
    if isinstance(store, LocalStore) and Path(store.root).is_file():
        raise InputError(
            f"{root}: a file, and this needs a run's output folder, by which the texts are found. A label file has "
            "labels alone."
        )
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
        if names is None:
            names = self.listing()
        by_shard: dict[int, dict[int, list[int]]] = {}
        for name in names:
            chunk = parse_receipt_name(name)
            if chunk is None or not self._is_planned(chunk):
                raise ManifestError(
                    f"{self.store.root}/{name}: no such chunk in the plan. This file does not belong here; move it "
                    "away."
                )
            attempts = by_shard.setdefault(chunk.shard, {}).setdefault(chunk.chunk, [])
            bisect.insort(attempts, chunk.attempt)
        return by_shard

    def _is_planned(self, chunk: ChunkId) -> bool:
        shards = self.plan.shards
        return chunk.shard < len(shards) and chunk.chunk < len(shards[chunk.shard].chunks)

    def new_receipts(self, before: Attempts, now: Attempts, etags: Mapping[str, str]) -> Iterator[Receipt]:
        """Receipts among those listed now (a snapshot's etags, and the attempts in them) that were not there at an
        earlier look.
        """
        names = []
        for shard, chunks in now.items():
            for chunk, attempts in chunks.items():
                seen = before.get(shard, {}).get(chunk, ())
                names += [ChunkId(shard, chunk, attempt).receipt_name for attempt in attempts if attempt not in seen]
        return map_concurrent(self.store, lambda name: self._receipt(name, etags[name]), names)

    def engines_asked(self) -> list[dict[str, Any]]:
        """The engine that was asked last in each shard, by its receipts from the last one back: a worker that starts
        reads one a shard, and not those of all chunks.
        """
        etags = self.listing()

        def last_of(ids: list[ChunkId]) -> dict[str, Any]:
            for chunk in reversed(ids):
                name = chunk.receipt_name
                engine = self._receipt(name, etags[name]).engine
                if engine:
                    return engine
            return {}

        ids_by_shard = [
            [ChunkId(shard, chunk, attempt) for chunk in sorted(chunks) for attempt in chunks[chunk]]
            for shard, chunks in self.attempts_of_all(etags).items()
        ]
        return [engine for engine in map_concurrent(self.store, last_of, ids_by_shard) if engine]

    def lost_receipts(self) -> Iterator[Receipt]:
        """Of chunks that were asked, and that another worker had committed by then; and of asks about the engine's
        health, which are no chunk's.
        """
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
        names = []
        num_attempts = []
        for shard, chunks in sorted(self.attempts_of_all(etags).items()):
            for chunk, attempts in sorted(chunks.items()):
                if attempts != list(range(1, len(attempts) + 1)):
                    name = ChunkId(shard, chunk).receipt_name
                    raise ManifestError(
                        f"{self.store.root}/{name}: attempts {attempts} are there; one is missing. Restore it from a "
                        "copy."
                    )
                names += [ChunkId(shard, chunk, attempt).receipt_name for attempt in attempts]
                num_attempts.append(len(attempts))
        receipts = map_concurrent(self.store, lambda name: self._receipt(name, etags[name]), names)
        for count in num_attempts:
            yield self._checked(list(itertools.islice(receipts, count)))

    def _checked(self, receipts: list[Receipt]) -> list[Receipt]:
        """A chunk's receipts, without those that a later one replaced; they agree with each other and with the plan."""
        first = max((at for at, receipt in enumerate(receipts) if receipt.replaces), default=0)
        receipts = receipts[first:]
        planned = self.plan.shards[receipts[0].shard]
        if not agree(receipts, planned.chunks[receipts[0].chunk]):
            rows_by_chunk = chunk_row_ids(self.store, planned)
            read = functools.partial(self._columns, check_bytes=False, check_labels=None)
            # raises, and names the rows
            prove_chunk(receipts, rows_by_chunk[receipts[0].chunk], read, root=self.store.root)
        return receipts

    def snapshot(
        self,
        *,
        believes_manifest: bool = True,
        manifest: RunManifest | None = None,
        etags: Mapping[str, str] | None = None,
    ) -> Snapshot:
        """What all receipts add up to.

        Args:
            manifest: as it was read a moment ago; of a million receipts it is some hundred megabytes.
            etags: a `listing` of a moment ago, likewise.
            believes_manifest: where the manifest was made of just these receipts (by their names and etags), take its
                word instead of reading them all again.
        """
        etags = self.listing() if etags is None else etags
        listing_digest = digest_of_listing(etags)
        if believes_manifest:
            manifest = manifest or load_manifest(self.store)
            if manifest is not None and manifest.receipts_listing_sha256 == listing_digest:
                return self._snapshot_of(manifest, etags)
        return sum_receipts(self.receipts_in(etags), listing_digest, etags)

    def _snapshot_of(self, manifest: RunManifest, etags: Mapping[str, str]) -> Snapshot:
        """What the receipts add up to that a manifest was made of."""
        tally = Tally(
            manifest.rows.labelled,
            manifest.rows.reused,
            manifest.quarantined_by_status,
            chunks_done=self.plan.num_chunks,
            stages=manifest.stages,
            worker_seconds=manifest.worker_seconds,
        )
        return Snapshot(
            tally=tally,
            labels=manifest.labels,
            quarantine=manifest.quarantine,
            answers=manifest.answers,
            engines=manifest.engines_asked,
            reused_from=manifest.reused_from,
            digest=manifest.receipts_sha256,
            listing_digest=manifest.receipts_listing_sha256,
            etags=etags,
        )

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
        advice = functools.partial(self._redo_advice, file)
        data = read_file_of(self.store, file, advice, check_bytes=check_bytes)
        try:
            table = table_of(data, columns)
        except (pa.ArrowException, OSError) as exc:
            raise ManifestError(f"{path}: not readable as Parquet. {advice()}") from exc
        if table.num_rows != file.rows:
            raise ManifestError(f"{path}: {table.num_rows} rows, committed were {file.rows}.")
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        if not table.schema.equals(schema):
            raise ManifestError(f"{path}: its schema is not this version's. Read it with the relabel that wrote it.")
        return table

    def _redo_advice(self, file: FileRef) -> str:
        chunk = re.search(r"shard-\d+/chunk-\d+", file.path)
        receipt = f"{self.store.root}/receipts/{chunk[0]}*.json" if chunk else "its receipt"
        return f"Restore it from a copy; or move {receipt} away and run the job again, which redoes the chunk."

    def prove(self, snapshot: Snapshot, *, check_bytes: bool) -> Fates:
        """Prove that every planned row is there and has exactly one state, from the files that these receipts name.

        Args:
            snapshot: of the receipts; commits that came after it are not seen.
            check_bytes: also compare every file's sha256; otherwise only narrow columns are read.
        Raises:
            ManifestError: a chunk has no receipt; or names a receipt, its files, and up to ten row ids that are lost or
                doubled.
        """
        total = Fates()
        for _, fates in self._proofs(snapshot.etags, check_bytes=check_bytes, check_labels=None):
            total = total.plus(fates)
        return total

    def proven_snapshot(self, check_labels: CheckLabels) -> tuple[Snapshot, Fates]:
        """`snapshot` of all receipts, and `prove` of it, sha256 and all; each receipt is read once.

        Args:
            check_labels: is called with each label file, of which it is given `grade` and `probs`.
        Raises:
            ManifestError: as `prove`.
        """
        etags = self.listing()
        total = Fates()

        def proven_chunks() -> Iterator[list[Receipt]]:
            nonlocal total
            for chunks, fates in self._proofs(etags, check_bytes=True, check_labels=check_labels):
                total = total.plus(fates)
                yield from chunks

        snapshot = sum_receipts(proven_chunks(), digest_of_listing(etags), etags)
        return snapshot, total

    def _proofs(
        self, etags: Mapping[str, str], *, check_bytes: bool, check_labels: CheckLabels | None
    ) -> Iterator[tuple[list[list[Receipt]], Fates]]:
        """Some chunks at a time, as receipts of these names, and what became of their rows."""
        unfinished = self.open_chunks(etags)
        if unfinished:
            shard = min(unfinished)
            chunks = unfinished[shard]
            raise ManifestError(
                f"{self.store.root}: shard {shard} is not finished: {len(chunks)} of "
                f"{len(self.plan.shards[shard].chunks)} chunks have no "
                f"receipt (the first is {chunks[0]}). Run the job again."
            )
        # where files are read several at a time, each chunk is proven by itself
        most_rows = ROWS_PROVEN if self.store.readers <= 1 else 1
        receipts_by_chunk = self.receipts_in(etags)
        for shard, of_shard in itertools.groupby(receipts_by_chunk, key=lambda receipts: receipts[0].shard):
            rows_by_chunk = chunk_row_ids(self.store, self.plan.shards[shard])

            def proved(
                chunks: list[list[Receipt]], rows_by_chunk: list[np.ndarray] = rows_by_chunk
            ) -> tuple[list[list[Receipt]], Fates]:
                planned = [rows_by_chunk[receipts[0].chunk] for receipts in chunks]
                read = functools.partial(self._columns, check_bytes=check_bytes, check_labels=check_labels)
                return chunks, prove_chunks(chunks, planned, read, root=self.store.root)

            yield from map_concurrent(self.store, proved, _some_rows(of_shard, most_rows))

    def _columns(
        self,
        file: FileRef,
        schema: pa.Schema,
        columns: list[str],
        *,
        check_bytes: bool,
        check_labels: CheckLabels | None,
    ) -> pa.Table:
        """Columns of a committed file, whose labels are checked on the way."""
        if check_labels is None or schema is not LABELS:
            return self.table(file, schema, columns, check_bytes=check_bytes)
        table = self.table(file, schema, [*columns, "grade", "probs"], check_bytes=check_bytes)
        check_labels(file, table)
        return table

    def open_chunks(self, *listings: Iterable[str]) -> dict[int, list[int]]:
        """Chunks without a receipt, by shard; of several places where parts of this run were done, whose receipts have
        these names, those that none of them has.
        """
        done = defaultdict[int, set[int]](set)
        for names in listings:
            for shard, attempts_by_chunk in self.attempts_of_all(names).items():
                done[shard].update(attempts_by_chunk)
        unfinished = {}
        for shard, planned in enumerate(self.plan.shards):
            chunks = [chunk for chunk in range(len(planned.chunks)) if chunk not in done[shard]]
            if chunks:
                unfinished[shard] = chunks
        return unfinished

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


def _lasting(file: InputFile) -> dict[str, Any]:
    """An input file as a manifest states it: without its stamp, which no copy need have."""
    values = file._asdict()
    del values["stamp"]
    return values


def build_manifest(
    folder: RunFolder,
    snapshot: Snapshot,
    *,
    spec: dict[str, Any],
    max_failed_fraction: float,
    relabel_version: str,
    canaries: Sequence[dict[str, Any]] = (),
    allow_mixed: bool = False,
    cascade: CascadeAudit | None = None,
) -> RunManifest:
    """Prove that every row is accounted for, and state it with all that a reader of the labels needs.

    Args:
        snapshot: of the receipts, read under the manifest's lock.
        canaries: the outcome of asking labelled rows again.
        allow_mixed: the user allowed labels of different engines in one output.
        cascade: who labelled its rows, of a cascade.
    Raises:
        ManifestError: a row is lost or doubled, or a chunk is missing.
    """
    plan = folder.plan
    tally = snapshot.tally
    fates = folder.prove(snapshot, check_bytes=False)
    failed = fates.num_quarantined / fates.rows if fates.rows else 0.0
    return RunManifest(
        version=MANIFEST_VERSION,
        relabel=relabel_version,
        name=plan.name,
        fingerprint=plan.fingerprint,
        plan_sha256=_plan_digest(folder),
        receipts_sha256=snapshot.digest,
        receipts_listing_sha256=snapshot.listing_digest,
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
        engines=snapshot.all_engines,
        engines_asked=snapshot.engines,
        mixed=EngineMix(allow_mixed, engines_differ(snapshot.all_engines)),
        canary=list(canaries),
        reused_from=snapshot.reused_from,
        provenance=plan.parts,
        inputs=[_lasting(file) for file in plan.files],
        spec=spec,
        labels=snapshot.labels,
        quarantine=snapshot.quarantine,
        answers=snapshot.answers,
        cascade=cascade,
    )
