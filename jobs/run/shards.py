"""Shards: which ones a worker takes, which chunks of them are open, and their log files."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence

from relabel.jobs.job import OpenRun
from relabel.manifests.errors import StoreUnreachableError, UsageError
from relabel.manifests.receipts import Receipt
from relabel.manifests.run import Attempts
from relabel.manifests.schemas import LABELS, QuarantineRow

logger = logging.getLogger(__name__)

SHARD_COUNT_VARIABLE = "RELABEL_SHARD_COUNT"
"""Number of workers, for schedulers that give an index and no count (a Kubernetes Indexed Job)."""


def choose_shards(text: str | None, num_shards: int, environment: Mapping[str, str] = os.environ) -> list[int]:
    """Shards of the plan that a worker takes: those j with j mod count = index.

    Args:
        text: `index/count` (0-based), `auto`, or None for all.
        num_shards: shards in the plan.
    Raises:
        UsageError: not of that form, an index outside 0..count-1, or `auto` without a scheduler.
    """
    if text is None:
        return list(range(num_shards))
    if text == "auto":
        index, count = _from_scheduler(environment)
        source = f"the scheduler's {index}/{count}"
    else:
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None:
            raise UsageError(f"--shard {text}: want INDEX/COUNT, counted from 0 (the first of four is 0/4), or auto.")
        index, count = int(match[1]), int(match[2])
        source = f"--shard {text}"
    if count < 1:
        raise UsageError(f"{source}: the count must be at least 1; 0/1 takes every shard.")
    if not 0 <= index < count:
        raise UsageError(
            f"{source}: the index must be one of 0 to {count - 1} (the last of {count} is {count - 1}/{count})."
        )
    return list(range(index, num_shards, count))


def _from_scheduler(environment: Mapping[str, str]) -> tuple[int, int]:
    if "SLURM_ARRAY_TASK_ID" in environment:
        number = _number(environment, "SLURM_ARRAY_TASK_ID")
        if SHARD_COUNT_VARIABLE in environment:
            # one failed task submitted again is an array of its own; the count says what it was part of
            return number, _number(environment, SHARD_COUNT_VARIABLE)
        first = _number(environment, "SLURM_ARRAY_TASK_MIN", 0)
        last = _number(environment, "SLURM_ARRAY_TASK_MAX")
        step = max(1, _number(environment, "SLURM_ARRAY_TASK_STEP", 1))
        count = (last - first) // step + 1
        if _number(environment, "SLURM_ARRAY_TASK_COUNT", count) != count:
            raise UsageError(
                f"--shard auto: Slurm's array {first}-{last}:{step} has gaps, so that some shards would fall to no "
                f"task. Submit the whole array 0-{count - 1}, or give INDEX/COUNT."
            )
        return (number - first) // step, count
    for index_name, count_name in (
        ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
        ("JOB_COMPLETION_INDEX", None),
    ):
        if index_name in environment:
            for name in (SHARD_COUNT_VARIABLE, count_name):
                if name is not None and name in environment:
                    return _number(environment, index_name), _number(environment, name)
            raise UsageError(
                f"--shard auto: {index_name} gives an index but no count. Set {SHARD_COUNT_VARIABLE} to the number of "
                "workers."
            )
    raise UsageError(
        "--shard auto: no scheduler's variable is set (SLURM_ARRAY_TASK_ID, AWS_BATCH_JOB_ARRAY_INDEX, "
        "JOB_COMPLETION_INDEX). Give INDEX/COUNT."
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, default)
    if not str(text).isdecimal():
        raise UsageError(
            f"--shard auto: the variable {name} is {'not set' if text is None else repr(text)}. Give INDEX/COUNT, for "
            "instance --shard 3/64."
        )
    return int(str(text))


class WorkLeft:
    """What is left to do of some shards: chunks without a receipt, or, at a retry, chunks of its round that still hold
    quarantined rows. Read from the receipts at each call, since others work too.

    Args:
        is_retry: quarantined rows of committed chunks are the work, instead of chunks without a receipt.
        execution: whose receipts show the round of retries that its workers are in.

    Attributes:
        whole: the listing of `seen` if it left nothing to do, so that a run need not list again to report that.
    """

    def __init__(self, opened: OpenRun, shards: list[int], *, is_retry: bool, execution: str = "") -> None:
        self.opened = opened
        self.shards = shards
        self.is_retry = is_retry
        self.whole: Mapping[str, str] | None = None
        self.retries = self._retry_round(execution) if is_retry else {}

    @functools.cached_property
    def seen(self) -> dict[int, dict[int, list[int]]]:
        """What was committed at the first listing. Receipts stay, so what is done here is done."""
        folder = self.opened.folder
        etags = folder.listing()
        found = folder.attempts_in(etags)
        if not self.is_retry and sum(map(len, found.values())) == self.opened.plan.num_chunks:
            self.whole = etags
        return found

    def rows_since(self, shard: int, now: Mapping[int, Sequence[int]]) -> int:
        """Rows of the chunks of a shard that were open at the first listing and are committed now; none at a retry.

        Args:
            now: attempts by chunk, from a recent listing.
        """
        before, rows = self.seen.get(shard, {}), self.opened.plan.shards[shard].chunks
        return 0 if self.is_retry else sum(rows[chunk] for chunk in now if chunk not in before)

    def rows_before(self) -> int:
        """Rows of these shards that were committed at the first listing; at a retry, which goes over them, none."""
        planned = self.opened.plan.shards
        return 0 if self.is_retry else sum(planned[shard].rows for shard in self.shards) - self.rows_to_ask()

    def rows_to_ask(self) -> int:
        """Rows of the chunks to work on, as of the first listing."""
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
            seen: attempts by shard and chunk, from a recent listing; by default the shard is listed now.
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
        """Those of the shards that still have work in them, for this worker or another; from one listing."""
        one = self.shards[0] if len(self.shards) == 1 else None
        folder = self.opened.folder
        seen = folder.attempts_of_all() if one is None else {one: folder.attempts(one)}
        return [shard for shard in self.shards if self.todo(shard, seen)]

    def _retry_round(self, execution: str) -> dict[int, dict[int, int]]:
        """Chunks to retry and their attempt, by shard.

        Retries go in rounds: where a round was cut short (some chunks of the run are an attempt ahead of others that
        still hold quarantined rows), only the ones that lag are asked, so that a retry that was killed and called again
        ends where an undisturbed one ends. Workers of one execution begin one round: one that starts late finds the
        receipts of the others, and does not begin the next.
        """
        level, own = 1, 0
        for chunks in self.seen.values():
            level = max([level, *map(len, chunks.values())])
        found: dict[int, dict[int, int]] = {}
        for shard in self.shards:
            for receipts in self.opened.folder.chunk_receipts(shard):
                own = max([own, *(one.attempt for one in receipts if one.execution == execution)])
                # whether any quarantined row of a chunk may be asked again
                quarantine = receipts[-1].quarantine
                if quarantine is not None and len(self._settled(receipts)) < quarantine.rows:
                    found.setdefault(shard, {})[receipts[0].chunk] = receipts[-1].attempt + 1
        lagging = {
            shard: late
            for shard, asked in found.items()
            if (late := {chunk: attempt for chunk, attempt in asked.items() if attempt <= (own or level)})
        }
        return lagging if own else lagging or found

    def settled_rows(self, shard: int) -> dict[int, QuarantineRow]:
        """Quarantined rows of a shard that this round leaves as they are, by row id: those of queries that have labels,
        where all rows of a query take theirs from one answer.
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
