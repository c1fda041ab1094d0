"""A run's folder: what is committed, whether every row is accounted for, and its label files."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError, ManifestError, RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.labels import CASCADE_COLUMNS
from relabel.manifests.manifest import (
    MANIFEST_VERSION,
    CascadeAudit,
    EngineMix,
    RunManifest,
    Snapshot,
    digest_of_listing,
    engines_differ,
    load_manifest,
    snapshot_of,
    sum_receipts,
)
from relabel.manifests.plan import PLAN_NAME, Plan, chunk_row_ids, facts_of, load_plan, parse_plan, refuse_rounds
from relabel.manifests.receipts import (
    ChunkId,
    Fates,
    FileRef,
    Receipt,
    agree,
    load_receipt,
    parse_receipt_name,
    prove_chunk,
    read_file_of,
)
from relabel.manifests.records import sha256_bytes
from relabel.manifests.schemas import QUARANTINE, SCHEMA_VERSION, label_schema, table_of
from relabel.manifests.store import RunStore, map_concurrent, open_run_store

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

    def __init__(self, store: RunStore, plan: Plan) -> None:
        self.store = store
        self.plan = plan
        self._known: dict[str, tuple[str, Receipt]] = {}

    def attempts(self, shard: int) -> dict[int, list[int]]:
        """Attempts committed for each chunk of a shard, ascending, from receipt names alone.

        Raises:
            ManifestError: a receipt of a chunk that the plan does not have.
        """
        return self.attempts_in(self.store.names(f"receipts/shard-{shard:05d}")).get(shard, {})

    def listing(self) -> dict[str, str]:
        """Names and etags of all receipts, sorted."""
        return self.store.etags("receipts")

    def attempts_of_all(self) -> dict[int, dict[int, list[int]]]:
        """As `attempts`, for every shard that has any, from one listing."""
        return self.attempts_in(self.listing())

    def attempts_in(self, names: Iterable[str]) -> dict[int, dict[int, list[int]]]:
        """As `attempts_of_all`, as a listing found them."""
        found: dict[int, dict[int, list[int]]] = {}
        for name in names:
            chunk = parse_receipt_name(name)
            if (
                chunk is None
                or chunk.shard >= len(self.plan.shards)
                or chunk.chunk >= len(self.plan.shards[chunk.shard].chunks)
            ):
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
            for shard, found in sorted(self.attempts_in(etags).items())
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
                return snapshot_of(manifest, self.plan.num_chunks, etags)
        return sum_receipts(self.receipts_in(etags), listing_digest, etags)

    def quarantined_rows(self, receipt: Receipt) -> list[dict[str, Any]]:
        """The rows of a receipt's quarantine file, as plain values; empty if it has none."""
        if receipt.quarantine is None:
            return []
        return list(self.table(receipt.quarantine, QUARANTINE).to_pylist())

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
            (shard, chunk) for one in found for shard, chunks in self.attempts_in(one.etags).items() for chunk in chunks
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
    plan, tally = folder.plan, found.tally
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
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


# ------------------------------------------------------------------------------
# The committed labels of a run, as evaluation and merging open them.


_ALL_OF_THEM = "no labels but those of the whole run are a fair sample"


@dataclass(frozen=True)
class RunLabels:
    """A run's output, ready to be read.

    Args:
        labels, quarantine: its files: of the manifest, or of the receipts where it is not finished.
        num_quarantined: rows without a label.
        notes: remarks for a reader of a report.
    """

    root: str
    plan: Plan
    folder: RunFolder
    labels: list[FileRef]
    quarantine: list[FileRef]
    num_quarantined: int
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
    found = folder.snapshot()
    num_quarantined = found.tally.num_quarantined
    notes = []
    if manifest is None or manifest.receipts_sha256 != found.digest:
        state = f"{found.tally.rows:,} of {folder.plan.rows:,} rows are done"
        if manifest is not None:
            state += ", and its manifest is older than its receipts"
        if not allow_partial:
            raise ManifestError(
                f"{root}: not finished, {state}; {_ALL_OF_THEM}. "
                "Run the job again to finish it, or judge what is there with --allow-partial."
            )
        notes.append(f"{root} is not finished: {state}")
    if manifest is not None and manifest.over_limit:
        share = (
            f"{num_quarantined:,} of {manifest.rows.in_:,} rows are in quarantine, limit "
            f"{manifest.max_failed_fraction:.0%}"
        )
        if not allow_partial:
            raise ManifestError(
                f"{root}: over its quarantine limit ({share}); {_ALL_OF_THEM}. "
                "Complete it with `relabel retry`, or judge what is there with --allow-partial."
            )
        notes.append(f"{root} is over its quarantine limit: {share}")
    return RunLabels(root, folder.plan, folder, found.labels, found.quarantine, num_quarantined, notes)
