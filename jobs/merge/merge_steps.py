"""What of each output goes into a merged one: its receipts and their files, rebased."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from relabel.jobs.merge.sources import MergedRun, MergeSource
from relabel.manifests.errors import ManifestError
from relabel.manifests.row_files import table_bytes
from relabel.manifests.runs.chunk_commits import put_data
from relabel.manifests.runs.label_files import conformed, file_schema
from relabel.manifests.runs.plans import (
    chunk_row_ids,
)
from relabel.manifests.runs.proofs import prove_chunk
from relabel.manifests.runs.receipts import FileRef, MergedFrom, Receipt
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.schemas import ANSWERS, QUARANTINE


@dataclass(frozen=True, slots=True)
class MergeStep:
    """A chunk of the merged output, what it holds, and what its source has beyond that.

    Args:
        held: its receipts, by attempt.
        todo: receipts of the source to be repeated after them.
        is_anew: they are all that the source has: what is held came from elsewhere, or was done again there.
        planned_R: row ids of the chunk.
    """

    run: MergedRun
    source: MergeSource
    merged: RunFolder
    shard: int
    held: list[Receipt]
    todo: list[Receipt]
    is_anew: bool
    planned_R: np.ndarray  # noqa: N815

    def stage(self) -> list[Receipt]:
        """Write the data files, and prove the chunk as it will be with the receipts that are returned, and not yet
        written.
        """
        tables: dict[str, pa.Table] = {}
        first = self.held[-1].attempt + 1 if self.held else 1
        receipts = [self._repeated(receipt, number, tables) for number, receipt in enumerate(self.todo, first)]

        def read(file: FileRef, schema: pa.Schema, columns: list[str]) -> pa.Table:
            if file.path in tables:
                return tables[file.path].select(columns)
            return self.merged.table(file, schema, columns, check_bytes=False)

        chain = receipts if self.is_anew else [*self.held, *receipts]
        try:
            prove_chunk(chain, self.planned_R, read, root=self.merged.store.root)
        except ManifestError as exc:
            where = f"{self.source.path}, shard {self.shard - self.run.first_shard}, chunk {self.todo[0].chunk}"
            raise ManifestError(
                f"merge: {where}: a row is lost or doubled there, so it was not merged. `relabel verify "
                f"{self.source.path}` says more."
            ) from exc
        return receipts

    def _repeated(self, receipt: Receipt, attempt: int, tables: dict[str, pa.Table]) -> Receipt:
        run, target = self.run, receipt.id._replace(shard=self.shard, attempt=attempt)

        def copied(
            kind: str, file: FileRef | None, schema: pa.Schema, merged: pa.Schema | None = None
        ) -> FileRef | None:
            if file is None:
                return None
            table = _rebased(self.source.folder.table(file, schema), run.first_row, run.plan.fingerprint)
            if merged is not None and merged != schema:
                table = conformed(table, merged)
            written = put_data(self.merged.store, kind, target, table_bytes(table), file.rows)
            tables[written.path] = table
            return written

        return replace(
            receipt,
            fingerprint=self.merged.plan.fingerprint,
            shard=target.shard,
            attempt=attempt,
            labels=copied("labels", receipt.labels, file_schema(run.plan.parts), file_schema(self.merged.plan.parts)),
            quarantine=copied("quarantine", receipt.quarantine, QUARANTINE),
            answers=copied("answers", receipt.answers, ANSWERS),
            replaces=self.is_anew and bool(self.held) and receipt is self.todo[0],
            merged_from=MergedFrom(self.source.path, run.plan.fingerprint, receipt.content_digest),
        )


def steps_of(run: MergedRun, merged: RunFolder) -> Iterator[MergeStep]:
    """The chunks of a run of which the merged output does not hold what the best of the sources has."""

    def place(one: tuple[MergeSource, list[Receipt]]) -> tuple[int, int]:
        return one[1][0].shard, one[1][0].chunk

    streams = [
        zip(itertools.repeat(source), source.folder.receipts_of(source.found), strict=False) for source in run.sources
    ]
    chunks = (list(group) for _, group in itertools.groupby(heapq.merge(*streams, key=place), key=place))
    for shard, offers_by_chunk in itertools.groupby(chunks, key=lambda offers: offers[0][1][0].shard):
        moved = run.first_shard + shard
        rows_by_chunk = chunk_row_ids(merged.store, merged.plan.shards[moved])
        held_by_chunk = {receipts[0].chunk: receipts for receipts in merged.chunk_receipts(moved)}
        for offers in offers_by_chunk:
            chunk = offers[0][1][0].chunk
            held = held_by_chunk.get(chunk, [])
            done = [receipt.merged_from.sha256 if receipt.merged_from else "" for receipt in held]
            source, receipts, goes_on = min(
                ((source, receipts, _begins_with(receipts, done)) for source, receipts in offers),
                key=lambda offer: (offer[1][-1].quarantine.rows if offer[1][-1].quarantine else 0, not offer[2]),
            )
            todo = receipts[len(done) :] if goes_on else receipts
            if todo:
                yield MergeStep(run, source, merged, moved, held, todo, not goes_on, rows_by_chunk[chunk])


def _begins_with(receipts: list[Receipt], done: list[str]) -> bool:
    """Whether the first of a chunk's receipts are those that were repeated already."""
    return len(done) <= len(receipts) and done == [receipt.content_digest for receipt in receipts[: len(done)]]


def _rebased(table: pa.Table, first_row: int, fingerprint: str) -> pa.Table:
    """Row ids counted on, and the run that asked a row named where that went without saying."""
    if "row_id" in table.column_names:
        rows = pa.array(table["row_id"].to_numpy() + first_row, pa.int64())
        table = table.set_column(0, table.schema.field("row_id"), rows)
    if "origin" in table.column_names:
        at = table.column_names.index("origin")
        table = table.set_column(at, table.schema.field("origin"), table["origin"].fill_null(fingerprint))
    return table
