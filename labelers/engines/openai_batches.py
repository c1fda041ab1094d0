"""Batch mode of the openai engine: chat requests uploaded as files that the provider completes within a day at half the
price."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relabel.labelers.engines.openai_chat import ChatWork, answer_of
from relabel.labelers.engines.openai_client import ApiClient, Failure
from relabel.labelers.engines.openai_connections import HttpReply, OpenAiArgs
from relabel.labelers.engines.openai_replies import NOT_SAID, ReplyError, parse_reply, read_chat, read_complaint, shown
from relabel.manifests import failpoints
from relabel.manifests.asks import Answer
from relabel.manifests.errors import ModelError, ServerGoneError
from relabel.manifests.records import BatchRecord, BatchRecords, digest_of

PATH = "/batches"
URL = "/v1/chat/completions"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
PART_BYTES = 100 << 20
"""Providers take files of up to 200 MB."""
PART_REQUESTS = 50_000
FAILED_IN_A_ROW = 3
"""Batches that fail as a whole before the run ends: it is not the requests."""
LISTED = 100

Works = Mapping[str, ChatWork]


class Batches:
    """Has requests answered by batches.

    Args:
        deliver: takes the answers of a batch together, so that what they lead to is one batch again; from the engine's
            own thread.
        pause: how to wait between two requests for a batch's state.
    """

    def __init__(
        self,
        client: ApiClient,
        args: OpenAiArgs,
        records: BatchRecords,
        deliver: Callable[[list[Answer]], None],
        pause: Callable[[float], Any],
    ) -> None:
        self._client, self._args, self._records, self._deliver, self._pause = client, args, records, deliver, pause
        self._own: set[str] = set()
        self._passed: set[tuple[str, str]] = set()  # a batch and an ask that it left unanswered
        self._lines: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._tries = Counter[str]()
        self._failed_in_a_row = 0
        self._unpaid: set[str] = set()
        self._fault: ServerGoneError | None = None
        self.adopted: set[int] = set()
        """Requests in flight that an earlier execution has paid for."""

    async def answer(self, works: list[ChatWork]) -> None:
        """Have all of them answered; returns when they are."""
        await self._answer(_named(works))

    async def _answer(self, works: Works) -> None:
        known = sorted(await asyncio.to_thread(self._records.load), key=lambda record: -record.created)
        groups: list[tuple[BatchRecord, Works]] = []
        left = dict(works)
        for record in known:
            mine = left.keys() & set(record.asks) if record.name not in self._own else set()
            found = {ask: left.pop(ask) for ask in sorted(mine) if (record.name, ask) not in self._passed}
            if found:
                self.adopted |= {work.request.id for work in found.values()}
                groups.append((record, found))
        for part in _parts(left):
            self._tries.update(list(part))
            groups.append((await self._hand_over(part), part))
        await asyncio.gather(*(self._take(record, part) for record, part in groups))

    async def _take(self, record: BatchRecord, works: Works) -> None:
        """Answer requests from a batch, once it has ended; those that it left go on."""
        lines = await self._fetched(record)
        left: dict[str, ChatWork] = {}
        answers: list[Answer] = []
        for ask, work in works.items():
            answer = await self._read(lines.get(ask), work, is_own=record.name in self._own)
            if answer is not None:
                answers.append(answer)
                continue
            if record.name in self._own and record.name not in self._unpaid and not _is_error(lines.get(ask)):
                self._client.charge_batch(NOT_SAID, work.body)  # it may have been answered, which nobody can know
            self.adopted.discard(work.request.id)
            self._passed.add((record.name, ask))
            if self._tries[ask] >= self._args.max_tries:
                detail = f"no usable answer in {self._tries[ask]} batches"
                answers.append(Answer(work.request.id, "", "error", detail=detail, flags=work.flags))
            else:
                left[ask] = work
        self._deliver(answers)
        if self._fault is not None:
            raise self._fault
        if record.name in self._own:
            del self._lines[record.name]
        if left:
            await self._answer(left)

    async def _fetched(self, record: BatchRecord) -> dict[str, Any]:
        """What came of a batch, by ask; fetched once."""
        if record.name not in self._lines:
            self._lines[record.name] = asyncio.create_task(self._fetch(record))
        return await self._lines[record.name]

    async def _fetch(self, record: BatchRecord) -> dict[str, Any]:
        batch = record.batch or await self._find(record.name)
        ended = None if batch is None else await self._ended(batch)
        if ended is None:
            return {}
        lines: dict[str, Any] = {}
        for key in ("error_file_id", "output_file_id"):
            if isinstance(name := ended.get(key), str) and name:
                found = await self._client.fetch(f"/files/{name}/content", _read_lines)
                lines |= {} if isinstance(found, Failure) else found
        if ended.get("status") != "failed":
            self._failed_in_a_row = 0
            return lines
        self._failed_in_a_row += 1
        self._unpaid.add(record.name)
        if self._failed_in_a_row >= FAILED_IN_A_ROW or read_complaint(ended).subject(200) == "credit":
            why = shown(read_complaint(ended.get("errors")).message) or "it does not say why"
            raise ServerGoneError(
                f"the server at {self._client.at} failed {self._failed_in_a_row} batches in a row: {why}. "
                "Mend that; the same command then continues."
            )
        await self._pause(self._args.batch_poll_s)
        return lines

    async def _ended(self, batch: str) -> dict[str, Any] | None:
        """A batch that has ended; None for one that the server does not know any more."""
        while True:
            found = await self._client.fetch(f"{PATH}/{batch}", _read_object)
            if isinstance(found, Failure):
                if found.status == 404:
                    return None
                raise ServerGoneError(f"the server at {self._client.at} does not show its batches: {found.detail}")
            if found.get("status") in ENDED:
                return found
            await self._pause(self._args.batch_poll_s)

    async def _find(self, name: str) -> str | None:
        """The server's own name for a batch of ours; None where it has none."""
        after = ""
        while True:
            found = await self._client.fetch(f"{PATH}?limit={LISTED}{after}", _read_object)
            if isinstance(found, Failure):
                raise ServerGoneError(f"the server at {self._client.at} does not list its batches: {found.detail}")
            held = [one for one in found.get("data") or () if isinstance(one, dict) and isinstance(one.get("id"), str)]
            for one in held:
                if isinstance(one.get("metadata"), dict) and one["metadata"].get("relabel") == name:
                    return str(one["id"])
            if not found.get("has_more") or not held:
                return None
            after = f"&after={held[-1]['id']}"

    async def _hand_over(self, works: Works) -> BatchRecord:
        record = BatchRecord(secrets.token_hex(8), sorted(works), time.time())
        self._own.add(record.name)
        await asyncio.to_thread(self._records.keep, record)
        failpoints.hit("before_batch_file")
        lines = [{"custom_id": ask, "method": "POST", "url": URL, "body": work.body} for ask, work in works.items()]
        file = await self._client.upload(
            "/files", f"relabel-{record.name}.jsonl", "\n".join(map(_json, lines)), _read_object
        )
        if isinstance(file, Failure) or not isinstance(file.get("id"), str):
            why = f": {file.detail}" if isinstance(file, Failure) else ""
            raise ModelError(f"engine.args.batch: the server at {self._client.at} takes no files for batches{why}.")
        failpoints.hit("before_batch")
        record = replace(record, batch=await self._begin(record.name, file["id"]))
        failpoints.hit("after_batch")
        await asyncio.to_thread(self._records.keep, record)
        failpoints.hit("after_batch_record")
        return record

    async def _begin(self, name: str, file: str) -> str:
        """Submit a batch once: if no reply came, the server's list is searched for it before it is submitted again."""
        body = {
            "input_file_id": file,
            "endpoint": URL,
            "completion_window": "24h",
            "metadata": {"relabel": name},
        }
        for _ in range(self._args.max_tries):
            found = await self._client.post_once(PATH, body, _read_object)
            if isinstance(found, Failure):
                raise ModelError(
                    f"engine.args.batch: the server at {self._client.at} takes no batches: {found.detail}."
                )
            if found is not None and isinstance(found.get("id"), str):
                return str(found["id"])
            await self._pause(self._args.backoff_s)
            if (batch := await self._find(name)) is not None:
                return batch
        raise ServerGoneError(f"the server at {self._client.at} takes no batch now; the same command continues later.")

    async def _read(self, line: Any, work: ChatWork, *, is_own: bool) -> Answer | None:
        """The answer that a line of a batch's files holds; None if it has to be asked again."""
        reply = line.get("response") if isinstance(line, dict) else None
        if not isinstance(reply, dict) or not isinstance(status := reply.get("status_code"), int):
            return None
        body = reply.get("body")
        if status == 200:
            with contextlib.suppress(ReplyError):  # it may be an error all the same
                found = self._client.counted(read_chat(body), work.body)
                if is_own:
                    self._client.charge_batch(found.usage, work.body)
                return answer_of(work, found)
        try:
            refused = await self._client.judge(HttpReply(status, {}, json.dumps(body).encode()))
        except ServerGoneError as exc:
            # what else the batch holds is paid for; of one that an earlier execution handed over it is asked again
            self._fault = exc if is_own else None
            return None
        return None if refused is None else answer_of(work, refused)


def _named(works: list[ChatWork]) -> dict[str, ChatWork]:
    """Requests by what is asked, its seed included; the same one asked twice is numbered."""
    seen, named = Counter[str](), dict[str, ChatWork]()
    for work in works:
        digest = digest_of(work.body)[:32]
        named[f"{digest}-{seen[digest]}"] = work
        seen[digest] += 1
    return named


def _parts(works: Works) -> list[Works]:
    """Batches that a provider takes."""
    parts: list[dict[str, ChatWork]] = []
    size = 0
    for ask, work in works.items():
        added = len(_json(work.body)) * 4
        if not parts or size + added > PART_BYTES or len(parts[-1]) >= PART_REQUESTS:
            parts.append({})
            size = 0
        parts[-1][ask] = work
        size += added
    return list(parts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read_object(raw: bytes) -> dict[str, Any]:
    found = parse_reply(raw)
    if not isinstance(found, dict):
        raise ReplyError("the reply is not a JSON object")
    return found


def _read_lines(raw: bytes) -> dict[str, Any]:
    """Lines by ask; one that can't be read is none, and its ask is put again."""
    found: dict[str, Any] = {}
    for line in raw.splitlines():
        try:
            held = parse_reply(line)
        except ReplyError:
            continue
        if isinstance(held, dict) and isinstance(held.get("custom_id"), str):
            found[held["custom_id"]] = held
    return found


def _is_error(line: Any) -> bool:
    """Whether a line says that its request was not answered, which costs nothing."""
    reply = line.get("response") if isinstance(line, dict) else None
    return isinstance(line, dict) and (reply.get("status_code") != 200 if isinstance(reply, dict) else True)
