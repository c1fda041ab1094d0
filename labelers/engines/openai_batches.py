"""Asks by a provider's batches: chat requests uploaded as a file, answered within a day at half the price.

A batch is paid when it is handed over. What it answered is looked for until it is there, or until the provider says
that it never will be; a batch of which nothing could be read is never handed over again by itself. So the provider's
name for each batch is kept in a record, which a later execution finds.

Read on in this order: `Batches.answer` (which requests are in a batch already), `_hand_over`, `_results` (looking until
a batch has ended and its files are there), `_take` (what becomes of each request). What providers write is read in
`openai_batch_replies.py`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from relabel.labelers.engines.openai_batch_replies import (
    Batch,
    Line,
    Results,
    read_batch,
    read_lines,
    read_listing,
    results_of,
)
from relabel.labelers.engines.openai_client import ApiClient, content_of
from relabel.labelers.engines.openai_failures import Failure, Unanswered
from relabel.labelers.engines.openai_modes import ChatWork, answer_of
from relabel.labelers.engines.openai_options import OpenAiArgs
from relabel.labelers.engines.openai_replies import OtherModelError
from relabel.manifests import failpoints
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.errors import ModelError, ServerGoneError
from relabel.manifests.records import BatchRecord, BatchRecords, digest_of
from relabel.manifests.secrets import counted
from relabel.manifests.specs import BATCH_PRICE

logger = logging.getLogger(__name__)

URL = "/v1/chat/completions"
PART_REQUESTS = 50_000
"""Most requests of a batch."""
PART_BYTES = 100 << 20
"""Most bytes of its file; providers take 200 MB."""
PATIENCE_LOOKS = 60
"""Looks in a row, `engine.args.batch_poll_s` apart, at a batch that shows neither work nor its results; then the run
ends, and the next one looks again. Files have come minutes after the end of their batch.
"""
LOOKS_FOR_LOST = 3
"""Looks into the provider's list for a batch whose reply was lost: a list may be late."""
FAILED_IN_A_ROW = 3
"""Batches that answer nothing before the run ends: it is not the requests."""
MOST_WARNINGS = 5
"""Of one batch."""

Works = Mapping[str, ChatWork]
"""Requests by what names them in a batch (`custom_id`)."""


class Look(NamedTuple):
    """What one look at a batch showed.

    Args:
        lacks: what is not there; empty if all is.
        results: as far as they are there, of a batch that has ended.
        is_at_work: the provider is still working on it, which may take a day.
        unanswered: a request of this look that got no reply.
    """

    lacks: str
    results: Results | None = None
    is_at_work: bool = False
    unanswered: Unanswered | None = None


class Batches:
    """Has requests answered by batches.

    Args:
        deliver: takes the answers of a batch together, so that what they lead to is one batch again; from the engine's
            own thread.
    """

    def __init__(
        self, client: ApiClient, args: OpenAiArgs, records: BatchRecords, deliver: Callable[[list[Answer]], None]
    ) -> None:
        self._client = client
        self._args = args
        self._records = records
        self._deliver = deliver
        self._own = set[str]()
        """Names of the batches of this execution."""
        self._fetched = dict[str, asyncio.Task[Results]]()
        self._failed_in_a_row = 0
        self._is_answered = False
        """Whether the model that was asked has answered in a batch."""
        self._unread = set[str]()
        """Requests, whatever their seed, whose line could not be read in a batch of which others could."""
        self._asked_once_more = set[str]()
        """Those of them that another batch held since."""
        self.adopted = dict[int, Ask]()
        """Requests in flight that an earlier execution has paid for."""

    async def answer(self, works: list[ChatWork]) -> None:
        """Have all of them answered; returns when they are.

        Raises:
            ServerGoneError: the provider does not give the results, or fails batch after batch.
            ModelError: it takes no batches, or nothing of one can be read.
        """
        named = _named(works)
        records = await asyncio.to_thread(self._records.load)
        earlier = [record for record in records if record.name not in self._own]
        for record in earlier:
            self._unread.update(record.unread)
        latest_first = sorted(earlier, key=lambda record: -record.created)
        await self._answer(named, latest_first, tries=0)

    async def _answer(self, works: Works, known: Sequence[BatchRecord], tries: int) -> None:
        """Take up those that batches of earlier executions hold, the latest first, and hand the others over.

        Args:
            tries: how many batches of this execution have held them.
        """
        takes = []
        left = dict(works)
        for number, record in enumerate(known, start=1):
            paid = {ask: left.pop(ask) for ask in sorted(left.keys() & set(record.asks))}
            if paid:
                self.adopted |= {work.request.id: work.request.ask for work in paid.values()}
                takes.append(self._take(record, paid, known[number:], tries))
        for part in _parts(left):
            record = await self._hand_over(part)
            takes.append(self._take(record, part, (), tries + 1))
        await asyncio.gather(*takes)

    # --------------------------------------------------------------------------
    # Handing over.

    async def _hand_over(self, works: Works) -> BatchRecord:
        """Upload requests and begin their batch; each step is on record before it is taken.

        Raises:
            ModelError: the server takes no such files, or no batches.
            ServerGoneError: it takes none for now, or gives no sign of what became of this one.
        """
        record = BatchRecord(
            name=secrets.token_hex(8),
            asks=sorted(works),
            created=time.time(),
            unread=sorted(self._unread & set(map(_seedless, works.values()))),
        )
        self._own.add(record.name)
        await self._keep(record)
        failpoints.hit("before_batch_file")
        file = await self._upload(record, works)
        record = await self._keep(replace(record, file=file))
        failpoints.hit("before_batch")
        record = await self._begin(record)
        failpoints.hit("after_batch")
        await self._keep(record)
        failpoints.hit("after_batch_record")
        return record

    async def _keep(self, record: BatchRecord) -> BatchRecord:
        await asyncio.to_thread(self._records.keep, record)
        return record

    async def _upload(self, record: BatchRecord, works: Works) -> str:
        """The provider's name for the file of these requests."""
        lines = [{"custom_id": ask, "method": "POST", "url": URL, "body": work.body} for ask, work in works.items()]
        text = "\n".join(content_of(line).decode() for line in lines)
        file = await self._client.upload(f"relabel-{record.name}.jsonl", text, read_batch)
        if isinstance(file, Failure):
            why = file.detail
        elif not file.name:
            why = f"its reply names no file: {file.text}"
        else:
            return file.name
        raise ModelError(f"engine.args.batch: the server at {self._client.at} takes no files for batches: {why}.")

    async def _begin(self, record: BatchRecord) -> BatchRecord:
        """Submit a batch once: if no reply came, the server's list is searched for it before it is submitted again.

        Returns:
            Its record with the provider's name for it.
        """
        body = {
            "input_file_id": record.file,
            "endpoint": URL,
            "completion_window": "24h",
            "metadata": {"relabel": record.name},
        }
        why = ""
        for _ in range(self._args.max_tries):
            outcome = await self._client.try_once("POST", "/batches", read_batch, body)
            if isinstance(outcome, Failure):
                await self._keep(replace(record, file=""))  # it was refused: there is nothing to look for
                raise ModelError(
                    f"engine.args.batch: the server at {self._client.at} takes no batches: {outcome.detail}."
                )
            if isinstance(outcome, Batch) and outcome.name:
                return replace(record, batch=outcome.name)
            if isinstance(outcome, Batch):  # it took the batch, and does not name it
                record = await self._keep(replace(record, reply=outcome.text))
                num_looks = LOOKS_FOR_LOST
            else:
                why = outcome.reason
                num_looks = LOOKS_FOR_LOST if outcome.may_be_charged else 1
                await self._pause(self._args.backoff_s, outcome)
            batch = await self._search(record, num_looks)
            if batch:
                return replace(record, batch=batch)
        raise ServerGoneError(
            f"the server at {self._client.at} takes no batch now ({why}); the same command continues later."
        )

    async def _search(self, record: BatchRecord, num_looks: int) -> str:
        """The provider's name for a batch whose reply named none; empty if it is not in the provider's list.

        Raises:
            ServerGoneError: the provider took it, and does not list it; or there is no list.
        """
        for look in range(num_looks):
            if look > 0:
                await self._pause(self._args.batch_poll_s)
            batch = await self._find(record)
            if batch:
                return batch
        if record.reply:
            raise ServerGoneError(
                f"the server at {self._client.at} took a batch (its file: {record.file}), answered with a text that "
                f"names none, and does not list it: {record.reply}. {self._way_out(record)}"
            )
        return ""

    async def _find(self, record: BatchRecord) -> str:
        """Look once through the provider's list."""
        after = ""
        seen = set[str]()
        while True:
            listing = await self._client.send("GET", f"/batches?limit=100{after}", read_listing)
            if isinstance(listing, Failure):
                if not record.file:  # it was not even uploaded
                    return ""
                raise ServerGoneError(
                    f"the server at {self._client.at} does not list its batches ({listing.detail}), and gave no name "
                    f"to one that may have been handed over (its file: {record.file}). {self._way_out(record)}"
                )
            for batch in listing.batches:
                if batch.label == record.name or (record.file and batch.input_file == record.file):
                    return batch.name
            names = [batch.name for batch in listing.batches]
            if not listing.has_more or seen.issuperset(names):
                return ""
            seen.update(names)
            after = f"&after={names[-1]}"

    # --------------------------------------------------------------------------
    # Looking for results.

    async def _results(self, record: BatchRecord) -> Results:
        """What came of a batch, once it has ended and its files are there.

        Raises:
            ServerGoneError: they are not there after `PATIENCE_LOOKS`.
        """
        if not record.batch:
            num_looks = LOOKS_FOR_LOST if record.reply else 1
            record = replace(record, batch=await self._search(record, num_looks))
            if not record.batch:
                return Results()
            await self._keep(record)
        contents = dict[str, list[Line]]()
        looks_without_news = 0
        warnings = set[str]()
        while True:
            look = await self._look(record, contents)
            if look.results is not None and not look.lacks:
                return look.results
            if look.is_at_work:
                looks_without_news = 0
            else:
                looks_without_news += 1
                if look.lacks not in warnings and len(warnings) < MOST_WARNINGS:
                    warnings.add(look.lacks)
                    logger.warning("batch %s at %s: %s. Looking on.", record.batch, self._client.at, look.lacks)
            if looks_without_news >= PATIENCE_LOOKS:
                if look.results is not None and look.results.is_usable:
                    return look.results
                raise ServerGoneError(
                    f"batch {record.batch} at {self._client.at}: {look.lacks}, after {looks_without_news} looks. "
                    f"{self._way_out(record)}"
                )
            await self._pause(self._args.batch_poll_s, look.unanswered)

    async def _look(self, record: BatchRecord, contents: dict[str, list[Line]]) -> Look:
        """Look once at a batch, and at its files if it has ended.

        Args:
            contents: of files that were read, by the provider's name; added to.
        """
        batch = await self._client.try_once("GET", f"/batches/{record.batch}", read_batch)
        if isinstance(batch, Failure):
            return Look(f"the server does not show it ({batch.detail})")
        if isinstance(batch, Unanswered):
            return Look(f"the server does not show it ({batch.reason})", unanswered=batch)
        if batch.state == "waiting":
            return Look("it has not ended", is_at_work=True)
        if batch.state == "unknown":
            return Look(f"its status is {batch.status}, which is no known word: {batch.text}")
        absent = ""
        unanswered: Unanswered | None = None
        for file in batch.files:
            if file in contents:
                continue
            lines = await self._client.try_once("GET", f"/files/{file}/content", read_lines)
            if isinstance(lines, list):
                contents[file] = lines
            elif isinstance(lines, Unanswered):
                absent = f"its file {file} can't be read ({lines.reason})"
                unanswered = lines
            else:
                absent = f"its file {file} can't be read ({lines.detail})"
        results = results_of(batch, contents, set(record.asks))
        lacks = absent or results.lack()
        if len(results.lines) == len(record.asks):
            lacks = ""
        elif lacks and not absent:
            contents.pop(batch.output, None)  # it may still be written
        return Look(lacks, results, unanswered=unanswered)

    async def _pause(self, seconds: float, unanswered: Unanswered | None = None) -> None:
        """Wait so long, or as long as the server wants.

        Raises:
            ServerGoneError: it wants no request for longer than `max_wait_s`.
        """
        wanted_s = unanswered.wait_s if unanswered is not None else 0.0
        if wanted_s > self._args.max_wait_s:
            raise ServerGoneError(
                f"the server at {self._client.at} wants no request for {wanted_s:.0f} s, more than "
                f"engine.args.max_wait_s = {self._args.max_wait_s:g}. Run the same command again then; it finds the "
                "batches that are out."
            )
        await self._client.pause(max(seconds, wanted_s))

    def _way_out(self, record: BatchRecord) -> str:
        """What to do about a batch that gives nothing, for a message."""
        return (
            f"It is paid for, so its {counted(len(record.asks), 'request')} will not be handed over again. The same "
            "command looks again, with the key and address of that time. If the provider says that the batch is lost, "
            f"remove batches/{record.name}.json from the output: they are paid for once more then."
        )

    # --------------------------------------------------------------------------
    # Taking results.

    async def _take(self, record: BatchRecord, works: Works, known: Sequence[BatchRecord], tries: int) -> None:
        """Answer requests from a batch, once it has ended; those that it left go on.

        Args:
            known: earlier batches that may hold what this one left.
            tries: how many batches of this execution have held them.
        """
        if record.name not in self._fetched:
            self._fetched[record.name] = asyncio.create_task(self._results(record))
        results = await self._fetched[record.name]
        is_own = record.name in self._own
        if results.batch is not None:
            self._asked_once_more.update(record.unread)
        self._refuse_unreadable(record, results, works)
        answers = list[Answer]()
        given_up = list[Answer]()
        foreign = list[Answer]()
        left = dict[str, ChatWork]()
        fault: ServerGoneError | None = None
        for ask, work in works.items():
            line = results.lines.get(ask)
            answer: Answer | None = None
            try:
                if line is not None:
                    answer = self._read(line, work, is_own=is_own)
            except ServerGoneError as exc:  # what else the batch holds is paid for
                fault = exc
            except OtherModelError as exc:
                foreign.append(
                    Answer(
                        work.request.id,
                        "",
                        "error",
                        detail=str(exc),
                        flags=work.flags,
                    )
                )
                continue
            if answer is not None:
                answers.append(answer)
                continue
            if is_own and results.may_be_charged(line):
                self._client.doubt(work.body, BATCH_PRICE)
            self.adopted.pop(work.request.id, None)
            if self._may_go_on(line, work, tries):
                left[ask] = work
            else:
                given_up.append(_given_up(line, work, tries))
        if foreign and not answers:
            self._refuse_foreign(record, foreign[0].detail)
        self._deliver(answers + given_up + foreign)
        if not record.is_read:
            name = record.batch if results.batch is None else results.batch.name
            await self._keep(replace(record, batch=name or record.batch, is_read=True))
        if is_own:
            del self._fetched[record.name]
            if fault is not None:  # an earlier execution's is no news: its asks are asked again
                raise fault
            await self._heed_failures(results, is_answered=bool(answers))
        if left:
            await self._answer(left, known, tries)

    def _refuse_unreadable(self, record: BatchRecord, results: Results, works: Works) -> None:
        """End the run at a batch of which no line can be read, unless it holds nothing but rows of which that is known:
        the lines of others in their batches could be read, so they are given up alone.

        Raises:
            ModelError: with the server's own text.
        """
        if results.batch is None or results.is_readable or results.batch.is_unanswered:
            return
        if self._unread.issuperset(map(_seedless, works.values())):
            return
        raise ModelError(
            f"batch {record.batch or results.batch.name} at {self._client.at}: it has ended ({results.batch.status}), "
            f"and no line of its files can be read: {results.sample}. {self._way_out(record)}"
        )

    def _refuse_foreign(self, record: BatchRecord, why: str) -> None:
        """End the run at a batch that another model answered: asked again, its rows would be paid again.

        Raises:
            ModelError: no other batch of this execution has been answered by the model that was asked.
        """
        if self._is_answered:
            return
        raise ModelError(
            f"batch {record.batch} at {self._client.at}: {why}. engine.args.other_model: flag takes its answers, with "
            f"a flag, and pays nothing again. {self._way_out(record)}"
        )

    def _read(self, line: Line, work: ChatWork, *, is_own: bool) -> Answer | None:
        """The answer that a line of a batch's files holds; None if it has to be asked again.

        Raises:
            OtherModelError: another model answered.
            ServerGoneError: the credit is used up.
        """
        if line.reply is not None:
            try:
                reply = self._client.counted(line.reply, work.body)
            except OtherModelError as exc:
                if is_own:
                    self._client.charge(exc.usage, BATCH_PRICE)
                raise
            if is_own:
                self._client.charge(reply.usage, BATCH_PRICE)
            self._is_answered = True
            return answer_of(work, reply)
        if line.error is None:
            return None
        refused = self._client.judge(line.status or 200, line.error)
        return None if refused is None else answer_of(work, refused)

    def _may_go_on(self, line: Line | None, work: ChatWork, tries: int) -> bool:
        """Whether a request that a batch left may go into another: once more, where its line could not be read."""
        if line is not None and not line.is_readable:
            key = _seedless(work)
            if key in self._asked_once_more:
                return False
            self._unread.add(key)
        return tries < self._args.max_tries

    async def _heed_failures(self, results: Results, *, is_answered: bool) -> None:
        """Wait after a batch that answered nothing, before what it left is handed over again.

        Raises:
            ServerGoneError: too many did, or the credit is used up.
        """
        batch = results.batch
        if is_answered or batch is None or batch.state == "completed" or not batch.is_unanswered:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= FAILED_IN_A_ROW or batch.complaint.subject(200) == "credit":
            raise ServerGoneError(
                f"the server at {self._client.at} answered nothing of the last {self._failed_in_a_row} batches: "
                f"{batch.complaint.message or batch.text}. Mend that; the same command then continues."
            )
        await self._client.pause(self._args.batch_poll_s)


def _named(works: list[ChatWork]) -> dict[str, ChatWork]:
    """Requests by what is asked, the seed included; the same one asked twice is numbered."""
    seen = Counter[str]()
    named = dict[str, ChatWork]()
    for work in works:
        digest = digest_of(work.body)[:32]
        named[f"{digest}-{seen[digest]}"] = work
        seen[digest] += 1
    return named


def _seedless(work: ChatWork) -> str:
    """What is asked, whatever the seed: a row that is asked again has another."""
    return digest_of({name: value for name, value in work.body.items() if name != "seed"})[:32]


def _parts(works: Works) -> list[Works]:
    """Batches that a provider takes."""
    parts = list[dict[str, ChatWork]]()
    size_bytes = 0
    for ask, work in works.items():
        added_bytes = len(content_of(work.body))
        if not parts or size_bytes + added_bytes > PART_BYTES or len(parts[-1]) >= PART_REQUESTS:
            parts.append({})
            size_bytes = 0
        parts[-1][ask] = work
        size_bytes += added_bytes
    return list(parts)


def _given_up(line: Line | None, work: ChatWork, tries: int) -> Answer:
    detail = f"no usable answer in {tries} batches of this run"
    if line is not None and line.text:
        detail += f"; the last one: {line.text}"
    return Answer(
        work.request.id,
        "",
        "error",
        detail=detail,
        flags=work.flags,
    )
