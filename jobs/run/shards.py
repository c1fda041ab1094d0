"""Which shards a worker takes, and what is left to do of them."""

import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence

from relabel.jobs.job import OpenRun
from relabel.manifests.errors import StoreUnreachableError, UsageError
from relabel.manifests.labels import LABELS, QuarantineRow
from relabel.manifests.plan import Receipt
from relabel.manifests.run_folder import Attempts

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
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is not None:
        index = int(match[1])
        count = int(match[2])
        choice = text
    elif text == "auto":
        index, count = _from_scheduler(environment)
        choice = f"auto, here {index}/{count}"
    else:
        raise UsageError(f"--shard {text}: want INDEX/COUNT, counted from 0 (the first of four is 0/4), or auto.")
    if not 0 <= index < count:
        raise UsageError(f"--shard {choice}: the index must be below the count (the last of four is 3/4).")
    return list(range(index, num_shards, count))


_INDEXES = {
    "SLURM_ARRAY_TASK_ID": "",
    "AWS_BATCH_JOB_ARRAY_INDEX": "AWS_BATCH_JOB_ARRAY_SIZE",
    "JOB_COMPLETION_INDEX": "",
}
"""A scheduler's variable that holds a worker's index, and the one that holds their count, if there is one."""


def _from_scheduler(environment: Mapping[str, str]) -> tuple[int, int]:
    name = next((variable for variable in _INDEXES if variable in environment), None)
    if name is None:
        raise UsageError(f"--shard auto: no scheduler's variable is set ({', '.join(_INDEXES)}). Give INDEX/COUNT.")
    # a task of Slurm that failed and is submitted again is an array of its own; the count says what it was part of
    for count_name in (SHARD_COUNT_VARIABLE, _INDEXES[name]):
        if count_name in environment:
            return _number(environment, name), _number(environment, count_name)
    if name != "SLURM_ARRAY_TASK_ID":
        raise UsageError(
            f"--shard auto: {name} gives an index but no count. Set {SHARD_COUNT_VARIABLE} to the number of workers."
        )
    first = _number(environment, "SLURM_ARRAY_TASK_MIN", "0")
    last = _number(environment, "SLURM_ARRAY_TASK_MAX")
    step = max(1, _number(environment, "SLURM_ARRAY_TASK_STEP", "1"))
    count = (last - first) // step + 1
    if _number(environment, "SLURM_ARRAY_TASK_COUNT", str(count)) != count:
        raise UsageError(
            f"--shard auto: Slurm's array {first}-{last}:{step} has gaps, so that some shards would fall to no task. "
            f"Submit the whole array 0-{count - 1}, or give INDEX/COUNT."
        )
    return (_number(environment, name) - first) // step, count


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not text.isdecimal():
        value = "not set" if text is None else repr(text)
        raise UsageError(f"--shard auto: the variable {name} is {value}. Give INDEX/COUNT, say --shard 3/64.")
    return int(text)


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
        etags = self.opened.folder.listing()
        attempts = self.opened.folder.attempts_of_all(etags)
        num_done = sum(map(len, attempts.values()))
        if not self.is_retry and num_done == self.opened.plan.num_chunks:
            self.whole = etags
        return attempts

    def rows_since(self, shard: int, now: Mapping[int, Sequence[int]]) -> int:
        """Rows of the chunks of a shard that were open at the first listing and are committed now; none at a retry.

        Args:
            now: attempts by chunk, from a recent listing.
        """
        if self.is_retry:
            return 0
        before = self.seen.get(shard, {})
        rows = self.opened.plan.shards[shard].chunks
        return sum(rows[chunk] for chunk in now if chunk not in before)

    def rows_to_ask(self) -> int:
        """Rows of the chunks to work on, as of the first listing."""
        count_of_shard = self._rows_to_retry if self.is_retry else self._rows_to_label
        return sum(map(count_of_shard, self.shards))

    def _rows_to_label(self, shard: int) -> int:
        rows = self.opened.plan.shards[shard].chunks
        return sum(rows[chunk] for chunk in self.todo(shard, self.seen))

    def _rows_to_retry(self, shard: int) -> int:
        retries = self.retries.get(shard, {})
        rows = 0
        for receipts in self.opened.folder.chunk_receipts(shard):
            last = receipts[-1]
            if last.quarantine is not None and last.chunk in retries:
                rows += last.quarantine.rows
        return rows

    def todo(self, shard: int, seen: Attempts | None = None) -> dict[int, int]:
        """Chunks of a shard that should still be worked on, and the attempt that it would be.

        Args:
            seen: attempts by shard and chunk, from a recent listing; by default the shard is listed now.
        Raises:
            StoreUnreachableError: at a retry, a listing lacks receipts that were seen before.
        """
        done = self.opened.folder.attempts(shard) if seen is None else seen.get(shard, {})
        if not self.is_retry:
            num_chunks = len(self.opened.plan.shards[shard].chunks)
            return {chunk: 1 for chunk in range(num_chunks) if chunk not in done}
        attempts = self.retries.get(shard, {})
        self._refuse_lost(shard, attempts.keys() - done.keys())
        return {chunk: attempt for chunk, attempt in attempts.items() if len(done[chunk]) == attempt - 1}

    def open_shards(self) -> list[int]:
        """Those of the shards that still have work in them, for this worker or another; from one listing."""
        seen = None if len(self.shards) == 1 else self.opened.folder.attempts_of_all()
        return [shard for shard in self.shards if self.todo(shard, seen)]

    def _retry_round(self, execution: str) -> dict[int, dict[int, int]]:
        """Chunks to retry and their attempt, by shard.

        Retries go in rounds: where a round was cut short (some chunks of the run are an attempt ahead of others that
        still hold quarantined rows), only the ones that lag are asked, so that a retry that was killed and called again
        ends where an undisturbed one ends. Workers of one execution begin one round: one that starts late finds the
        receipts of the others, and does not begin the next.
        """
        own = 0
        retries = dict[int, dict[int, int]]()
        for shard in self.shards:
            for receipts in self.opened.folder.chunk_receipts(shard):
                own = max([own, *(receipt.attempt for receipt in receipts if receipt.execution == execution)])
                last = receipts[-1]
                # whether any quarantined row of a chunk may be asked again
                if last.quarantine is not None and len(self._settled(receipts)) < last.quarantine.rows:
                    retries.setdefault(shard, {})[last.chunk] = last.attempt + 1
        lagging = _up_to_attempt(retries, own or self._level())
        if own:
            return lagging
        return lagging or retries

    def _level(self) -> int:
        """The highest attempt at any chunk."""
        chunks = itertools.chain.from_iterable(done.values() for done in self.seen.values())
        return max(map(len, chunks), default=1)

    def settled_rows(self, shard: int) -> dict[int, QuarantineRow]:
        """Quarantined rows of a shard that this round leaves as they are, by row id: those of queries that have labels,
        where all rows of a query take theirs from one answer.
        """
        attempts = self.retries.get(shard, {})
        settled = dict[int, QuarantineRow]()
        for receipts in self.opened.folder.chunk_receipts(shard):
            before = [receipt for receipt in receipts if receipt.attempt < attempts.get(receipt.chunk, 0)]
            settled |= {row.row_id: row for row in self._settled(before)}
        return settled

    def num_settled(self) -> int:
        """Quarantined rows of the whole run that no retry would ask, as `settled_rows` has it."""
        if not self.opened.job.reads.whole_query:
            return 0
        shards = range(len(self.opened.plan.shards))
        chunks = itertools.chain.from_iterable(map(self.opened.folder.chunk_receipts, shards))
        return sum(len(self._settled(receipts)) for receipts in chunks)

    def _settled(self, receipts: list[Receipt]) -> list[QuarantineRow]:
        folder = self.opened.folder
        if not receipts or not self.opened.job.reads.whole_query:
            return []
        labelled = set[str]()
        for receipt in receipts:
            if receipt.labels is not None:
                labelled.update(folder.table(receipt.labels, LABELS, ["query_id"])["query_id"].to_pylist())
        rows = folder.quarantined_rows(receipts[-1])
        return [QuarantineRow(**row) for row in rows if row["query_id"] in labelled]

    def quarantined_ids(self, shard: int) -> dict[int, set[int]]:
        """Row ids to ask again, by chunk of a shard: what the attempt before this round's left in quarantine, whatever
        came since.

        Raises:
            StoreUnreachableError: a listing lacks receipts that were seen before.
        """
        folder = self.opened.folder
        attempts = self.retries.get(shard, {})
        ids = dict[int, set[int]]()
        for receipt in itertools.chain.from_iterable(folder.chunk_receipts(shard)):
            if receipt.attempt + 1 == attempts.get(receipt.chunk):
                ids[receipt.chunk] = {row["row_id"] for row in folder.quarantined_rows(receipt)}
        self._refuse_lost(shard, attempts.keys() - ids.keys())
        return ids

    def isolated_ids(self, shard: int) -> dict[int, list[int]]:
        """Row ids of a shard to ask again over which engines went down, by chunk: those that no answer came for."""
        attempts = self.retries.get(shard, {})
        ids = dict[int, list[int]]()
        for receipt in itertools.chain.from_iterable(self.opened.folder.chunk_receipts(shard)):
            if receipt.attempt + 1 == attempts.get(receipt.chunk):
                rows = self.opened.folder.quarantined_rows(receipt)
                ids[receipt.chunk] = [row["row_id"] for row in rows if row["status"] == "engine" and not row["tries"]]
        return ids

    def _refuse_lost(self, shard: int, missing: set[int]) -> None:
        if missing:
            raise StoreUnreachableError(
                f"{self.opened.store.root}/receipts: a listing lacks what was there a moment ago (shard {shard}, "
                f"chunks {sorted(missing)[:5]}). Run the same command again."
            )


def _up_to_attempt(retries: Mapping[int, Mapping[int, int]], most: int) -> dict[int, dict[int, int]]:
    """Of chunks and their next attempt, by shard, those that come to no more than this attempt."""
    chosen = dict[int, dict[int, int]]()
    for shard, attempts in retries.items():
        late = {chunk: attempt for chunk, attempt in attempts.items() if attempt <= most}
        if late:
            chosen[shard] = late
    return chosen
