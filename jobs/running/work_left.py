"""What is left to do of some shards: chunks without a receipt, or, at a retry, chunks of its round that still hold
quarantined rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from relabel.jobs.planning.open_runs import OpenRun
from relabel.manifests.errors import StoreUnreachableError
from relabel.manifests.runs.receipts import ChunkId, Receipt
from relabel.manifests.runs.run_folder import Attempts
from relabel.manifests.schemas import LABELS, QuarantineRow


class WorkLeft:
    """Looked up in the receipts whenever asked, since others work too.

    Args:
        shards: the plan's shards that are looked at.
        is_retry: quarantined rows of committed chunks are the work, instead of chunks without a receipt.
        retries: chunks of this round of retries and their attempt, by shard, where somebody chose the round already.

    Attributes:
        whole: the listing behind `seen` where it left nothing to do, so that a run need not list again to say so.
    """

    def __init__(
        self, opened: OpenRun, shards: list[int], *, is_retry: bool, retries: dict[int, dict[int, int]] | None = None
    ) -> None:
        self.opened = opened
        self.shards = shards
        self.is_retry = is_retry
        self.whole: Mapping[str, str] | None = None
        self.retries = retries if retries is not None else self._retry_round() if is_retry else {}

    @functools.cached_property
    def seen(self) -> dict[int, dict[int, list[int]]]:
        """What was committed at the first look, from one listing. Receipts stay, so what is done here is done."""
        folder = self.opened.folder
        etags = folder.listing()
        found = folder.attempts_in(etags)
        if not self.is_retry and sum(map(len, found.values())) == self.opened.plan.num_chunks:
            self.whole = etags
        return found

    def done_since(self, shard: int, now: Mapping[int, Sequence[int]]) -> dict[ChunkId, int]:
        """Rows of the chunks of a shard that were open at the first look and are committed now.

        Args:
            now: attempts by chunk, as somebody has just seen them. Those of a retry are no news: nobody helps with one.
        """
        if self.is_retry:
            return {}
        before, rows = self.seen.get(shard, {}), self.opened.plan.shards[shard].chunks
        return {ChunkId(shard, chunk): rows[chunk] for chunk in now if chunk not in before}

    def rows_before(self) -> int:
        """Rows of these shards that were committed at the first look; at a retry, which goes over them, none."""
        planned = self.opened.plan.shards
        return 0 if self.is_retry else sum(planned[shard].rows for shard in self.shards) - self.rows_to_ask()

    def rows_to_ask(self) -> int:
        """Rows of the chunks to work on, as they were at the first look."""
        folder = self.opened.folder
        if not self.is_retry:
            shards = self.opened.plan.shards
            return sum(shards[shard].chunks[chunk] for shard in self.shards for chunk in self.todo(shard, self.seen))
        return sum(
            receipts[-1].quarantine.rows
            for shard in self.shards
            for receipts in folder.chunk_receipts(shard)
            if receipts[-1].quarantine is not None and receipts[-1].chunk in self.retries.get(shard, {})
        )

    def todo(self, shard: int, seen: Attempts | None = None) -> dict[int, int]:
        """Chunks of a shard that should still be worked on, and the attempt that it would be.

        Args:
            seen: attempts by shard and chunk, where somebody has just looked.
        Raises:
            StoreUnreachableError: at a retry, a listing lacks receipts that were seen before.
        """
        done = self.opened.folder.attempts(shard) if seen is None else seen.get(shard, {})
        if not self.is_retry:
            return {chunk: 1 for chunk in range(len(self.opened.plan.shards[shard].chunks)) if chunk not in done}
        attempts = self.retries.get(shard, {})
        self._refuse_lost(shard, attempts.keys() - done.keys())
        return {chunk: attempt for chunk, attempt in attempts.items() if len(done[chunk]) == attempt - 1}

    def open_shards(self) -> list[int]:
        """Those of the shards that still have work in them, whoever does it; from one listing."""
        one = self.shards[0] if len(self.shards) == 1 else None
        folder = self.opened.folder
        seen = folder.attempts_of_all() if one is None else {one: folder.attempts(one)}
        return [shard for shard in self.shards if self.todo(shard, seen)]

    def _retry_round(self) -> dict[int, dict[int, int]]:
        """Chunks to retry and their attempt, by shard.

        Retries go in rounds: where a round was cut short (some chunks of the run are an attempt ahead of others that
        still hold quarantined rows), only the ones that lag are asked, so that a retry that was killed and called again
        ends where an undisturbed one ends.
        """
        folder = self.opened.folder
        every_attempt = (len(done) for chunks in self.seen.values() for done in chunks.values())
        level = max(every_attempt, default=1)
        found: dict[int, dict[int, int]] = {}
        lagging: dict[int, dict[int, int]] = {}
        for shard in self.shards:
            for receipts in folder.chunk_receipts(shard):
                if self._is_askable(receipts):
                    chunk, attempt = receipts[0].chunk, receipts[-1].attempt + 1
                    found.setdefault(shard, {})[chunk] = attempt
                    if attempt <= level:
                        lagging.setdefault(shard, {})[chunk] = attempt
        return lagging or found

    def settled_rows(self, shard: int) -> dict[int, QuarantineRow]:
        """Quarantined rows of a shard that this round leaves as they are, by row id: those of queries that have labels,
        where all rows of a query take theirs from one answer. Another one would come to be beside it.
        """
        attempts = self.retries.get(shard, {})
        return {
            row.row_id: row
            for receipts in self.opened.folder.chunk_receipts(shard)
            for row in self._settled([one for one in receipts if one.attempt < attempts.get(one.chunk, 0)])
        }

    def num_settled(self) -> int:
        """Quarantined rows of the whole run that no retry would ask, as `settled_rows` has it."""
        if not self.opened.job.reads.whole_query:
            return 0
        folder, shards = self.opened.folder, range(len(self.opened.plan.shards))
        return sum(len(self._settled(receipts)) for shard in shards for receipts in folder.chunk_receipts(shard))

    def _settled(self, receipts: list[Receipt]) -> list[QuarantineRow]:
        folder = self.opened.folder
        if not receipts or not self.opened.job.reads.whole_query:
            return []
        labels = [folder.table(one.labels, LABELS, ["query_id"]) for one in receipts if one.labels is not None]
        labelled = {query_id for table in labels for query_id in table["query_id"].to_pylist()}
        waiting = folder.quarantined_rows(receipts[-1])
        return [QuarantineRow(**row) for row in waiting if row["query_id"] in labelled]

    def _is_askable(self, receipts: list[Receipt]) -> bool:
        """Whether any quarantined row of a chunk may be asked again."""
        quarantine = receipts[-1].quarantine
        return quarantine is not None and len(self._settled(receipts)) < quarantine.rows

    def quarantined_ids(self, shard: int) -> dict[int, set[int]]:
        """Row ids to ask again, by chunk of a shard: what the attempt before this round's left in quarantine, whatever
        came since.

        Raises:
            StoreUnreachableError: a listing lacks receipts that were seen before.
        """
        folder, attempts = self.opened.folder, self.retries.get(shard, {})
        found = {
            receipt.chunk: {row["row_id"] for row in folder.quarantined_rows(receipt)}
            for receipts in folder.chunk_receipts(shard)
            for receipt in receipts
            if receipt.attempt + 1 == attempts.get(receipt.chunk)
        }
        self._refuse_lost(shard, attempts.keys() - found.keys())
        return found

    def _refuse_lost(self, shard: int, missing: set[int]) -> None:
        if missing:
            raise StoreUnreachableError(
                f"{self.opened.store.root}/receipts: a listing lacks what was there a moment ago (shard {shard}, "
                f"chunks {sorted(missing)[:5]}). Run the same command again."
            )
