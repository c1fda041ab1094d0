"""The openai engine: a teacher at any OpenAI-compatible server, in the exact way where the server can, else as chat;
or by the provider's batches.

Requests run in a thread with an event loop of its own: `submit` never waits, `poll` waits for the first answer.
Importing this file loads no HTTP library. Read on: `openai_client.py` (options, replies, tries and limits) and
`openai_modes.py` (the two ways to ask).
"""

import asyncio
import contextlib
import hashlib
import logging
import queue
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, SecretStr

from relabel.labelers.engines.openai_client import (
    CHARS_PER_TOKEN,
    MAX_COUNT,
    ApiClient,
    Failure,
    OpenAiArgs,
    ReplyError,
    Unanswered,
    args_of,
    content_of,
    key_of,
    read_as,
    read_chat,
    read_complaint,
    server_address,
    shown,
)
from relabel.labelers.engines.openai_modes import ChatMode, ChatWork, TokensMode, answer_of
from relabel.labelers.engines.transformers import TokenizerFolder, tokenizer_folder
from relabel.manifests import failpoints
from relabel.manifests.asks import POLL_S, Answer, Ask, Charge, Engine, EngineFacts, Request
from relabel.manifests.errors import ConfigError, EngineCrashError, ModelError, ServerGoneError
from relabel.manifests.process import require
from relabel.manifests.records import BatchRecord, BatchRecords, digest_of
from relabel.manifests.secrets import counted
from relabel.manifests.specs import BATCH_PRICE, EngineArgs, EngineSpec, price_of

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

# ------------------------------------------------------------------------------
# Batches: chat requests uploaded as files that the provider completes within a day at half the price.


URL = "/v1/chat/completions"
PART_REQUESTS = 50_000
FAILED_IN_A_ROW = 3
"""Batches that fail as a whole before the run ends: it is not the requests."""

Works = Mapping[str, ChatWork]


class _Response(BaseModel):
    status_code: int | None = None
    body: Any = None


class _Line(BaseModel):
    """A line of a batch's files. An ask that was not answered has no response, and costs nothing."""

    custom_id: str
    response: _Response | None = None


class _Named(BaseModel):
    """A file or batch as the provider shows it."""

    id: str
    status: str | None = None
    metadata: Any = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: Any = None


class _Listed(BaseModel):
    data: list[_Named] | None = None
    has_more: bool | None = None


class Batches:
    """Has requests answered by batches.

    Args:
        deliver: takes the answers of a batch together, so that what they lead to is one batch again; from the engine's
            own thread.
    """

    def __init__(
        self, client: ApiClient, args: OpenAiArgs, records: BatchRecords, deliver: Callable[[list[Answer]], None]
    ) -> None:
        self._client, self._args, self._records, self._deliver = client, args, records, deliver
        self._own: set[str] = set()
        self._fetched: dict[str, asyncio.Task[tuple[dict[str, _Response], bool]]] = {}
        self._failed_in_a_row = 0
        self.adopted: dict[int, Ask] = {}
        """Requests in flight that an earlier execution has paid for."""

    async def answer(self, works: list[ChatWork]) -> None:
        """Have all of them answered; returns when they are."""
        # by what is asked, its seed included; the same one asked twice is numbered
        seen, named = Counter[str](), dict[str, ChatWork]()
        for work in works:
            digest = digest_of(work.body)[:32]
            named[f"{digest}-{seen[digest]}"] = work
            seen[digest] += 1
        known = sorted(await asyncio.to_thread(self._records.load), key=lambda record: -record.created)
        await self._answer(named, [record for record in known if record.name not in self._own], tries=0)

    async def _answer(self, works: Works, known: Sequence[BatchRecord], tries: int) -> None:
        """Take up those that batches of earlier executions hold, the latest first, and hand the others over.

        Args:
            tries: how many batches of this execution have held them.
        """
        taken: list[tuple[BatchRecord, Works, Sequence[BatchRecord], int]] = []
        left = dict(works)
        for number, record in enumerate(known, start=1):
            if found := {ask: left.pop(ask) for ask in sorted(left.keys() & set(record.asks))}:
                self.adopted |= {work.request.id: work.request.ask for work in found.values()}
                taken.append((record, found, known[number:], tries))
        for part in _parts(left):
            taken.append((await self._hand_over(part), part, (), tries + 1))
        await asyncio.gather(*(self._take(*group) for group in taken))

    async def _take(self, record: BatchRecord, works: Works, known: Sequence[BatchRecord], tries: int) -> None:
        """Answer requests from a batch, once it has ended; those that it left go on."""
        if record.name not in self._fetched:
            self._fetched[record.name] = asyncio.create_task(self._fetch(record))
        lines, is_paid = await self._fetched[record.name]
        is_own = record.name in self._own
        left, answers = dict[str, ChatWork](), list[Answer]()
        fault: ServerGoneError | None = None
        for ask, work in works.items():
            line, answer = lines.get(ask), None
            try:
                answer = self._read(line, work, is_own=is_own) if line is not None else None
            except ServerGoneError as exc:  # what else the batch holds is paid for
                fault = exc
            if answer is None:
                if is_own and is_paid and (line is None or line.status_code == 200):
                    self._client.doubt(work.body, BATCH_PRICE)  # it may have been answered: nobody can know
                self.adopted.pop(work.request.id, None)
                if tries < self._args.max_tries:
                    left[ask] = work
                    continue
                answer = Answer(
                    work.request.id, "", "error", detail=f"no usable answer in {tries} batches", flags=work.flags
                )
            answers.append(answer)
        self._deliver(answers)
        if is_own:
            del self._fetched[record.name]
            if fault is not None:  # an earlier execution's is no news: its asks are asked again
                raise fault
        if left:
            await self._answer(left, known, tries)

    async def _fetch(self, record: BatchRecord) -> tuple[dict[str, _Response], bool]:
        """What came of a batch, by ask, and whether what is not there may be charged."""
        batch = record.batch or await self._find(record.name)
        ended = None if batch is None else await self._ended(batch)
        if ended is None:
            return {}, True
        lines: dict[str, _Response] = {}
        for name in filter(None, (ended.error_file_id, ended.output_file_id)):
            found = await self._client.send("GET", f"/files/{name}/content", _read_lines)
            lines |= {} if isinstance(found, Failure) else found
        if ended.status != "failed":
            self._failed_in_a_row = 0
            return lines, True
        self._failed_in_a_row += 1
        complaint = read_complaint(ended.errors)
        if self._failed_in_a_row >= FAILED_IN_A_ROW or complaint.subject(200) == "credit":
            why = shown(complaint.message) or "it does not say why"
            raise ServerGoneError(
                f"the server at {self._client.at} failed {self._failed_in_a_row} batches in a row: {why}. "
                "Mend that; the same command then continues."
            )
        await self._client.pause(self._args.batch_poll_s)
        return lines, False

    async def _ended(self, batch: str) -> _Named | None:
        """A batch that has ended; None for one that the server does not know any more."""
        while True:
            found = await self._client.send("GET", f"/batches/{batch}", partial(read_as, _Named))
            if isinstance(found, Failure):
                if found.status == 404:
                    return None
                raise ServerGoneError(f"the server at {self._client.at} does not show its batches: {found.detail}")
            if found.status in ("completed", "failed", "expired", "cancelled"):
                return found
            await self._client.pause(self._args.batch_poll_s)

    async def _find(self, name: str) -> str | None:
        """The server's own name for a batch of ours; None where it has none."""
        after = ""
        while True:
            found = await self._client.send("GET", f"/batches?limit=100{after}", partial(read_as, _Listed))
            if isinstance(found, Failure):
                raise ServerGoneError(f"the server at {self._client.at} does not list its batches: {found.detail}")
            for one in found.data or ():
                if isinstance(one.metadata, dict) and one.metadata.get("relabel") == name:
                    return one.id
            if not found.has_more or not found.data:
                return None
            after = f"&after={found.data[-1].id}"

    async def _hand_over(self, works: Works) -> BatchRecord:
        record = BatchRecord(secrets.token_hex(8), sorted(works), time.time())
        self._own.add(record.name)
        await asyncio.to_thread(self._records.keep, record)
        failpoints.hit("before_batch_file")
        lines = [{"custom_id": ask, "method": "POST", "url": URL, "body": work.body} for ask, work in works.items()]
        text = "\n".join(content_of(line).decode() for line in lines)
        file = await self._client.upload(f"relabel-{record.name}.jsonl", text, partial(read_as, _Named))
        if isinstance(file, Failure):
            raise ModelError(
                f"engine.args.batch: the server at {self._client.at} takes no files for batches: {file.detail}."
            )
        failpoints.hit("before_batch")
        record = replace(record, batch=await self._begin(record.name, file.id))
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
            found = await self._client.try_once("POST", "/batches", partial(read_as, _Named), body)
            if isinstance(found, Failure):
                raise ModelError(
                    f"engine.args.batch: the server at {self._client.at} takes no batches: {found.detail}."
                )
            if not isinstance(found, Unanswered):
                return found.id
            await self._client.pause(self._args.backoff_s)
            if (batch := await self._find(name)) is not None:
                return batch
        raise ServerGoneError(f"the server at {self._client.at} takes no batch now; the same command continues later.")

    def _read(self, line: _Response, work: ChatWork, *, is_own: bool) -> Answer | None:
        """The answer that a line of a batch's files holds; None if it has to be asked again.

        Raises:
            ServerGoneError: it says that the credit is used up.
        """
        if not line.status_code:
            return None
        if line.status_code == 200:
            with contextlib.suppress(ReplyError):  # it may be an error all the same
                found = self._client.counted(read_chat(line.body), work.body)
                if is_own:
                    self._client.charge(found.usage, BATCH_PRICE)
                return answer_of(work, found)
        refused = self._client.judge(line.status_code, line.body)
        return None if refused is None else answer_of(work, refused)


def _parts(works: Works) -> list[Works]:
    """Batches that a provider takes: files of up to 200 MB."""
    parts: list[dict[str, ChatWork]] = []
    size = 0
    for ask, work in works.items():
        added = len(content_of(work.body))
        if not parts or size + added > 100 << 20 or len(parts[-1]) >= PART_REQUESTS:
            parts.append({})
            size = 0
        parts[-1][ask] = work
        size += added
    return list(parts)


def _read_lines(raw: bytes) -> dict[str, _Response]:
    """Responses by ask; a line that can't be read is none, and its ask is put again."""
    found: dict[str, _Response] = {}
    for text in raw.splitlines():
        with contextlib.suppress(ReplyError):
            line = read_as(_Line, text)
            found[line.custom_id] = line.response or _Response()
    return found


# ------------------------------------------------------------------------------
# The engine.


logger = logging.getLogger(__name__)


class OpenAi(Engine):
    """Engine over an OpenAI-compatible server.

    Args:
        spec: the job's `engine`.
        overlong: what happens to a prompt that is too long.
        secrets: by option (`api_key_env`), the value of the variable that it names.
        pause: how to wait between tries, for tests.
    Raises:
        ConfigError: the address, or the key that was named, is off.
        ModelError: the server refuses the key, does not know the model, or can't do what `engine.args.mode` wants.
        ServerGoneError: no server answers.
        MissingExtraError: httpx, or transformers for the tokens mode, is absent.
    """

    Args: ClassVar[type[EngineArgs]] = OpenAiArgs

    def __init__(
        self,
        spec: EngineSpec,
        *,
        overlong: Literal["truncate", "quarantine"] = "truncate",
        secrets: Mapping[str, SecretStr] | None = None,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._args = args = args_of(spec)
        key = key_of(args, secrets or {})
        httpx = require("httpx", extra="openai", purpose="The openai engine")
        folder = _tokenizer_of(spec, args)
        if args.mode == "tokens" and folder is None:
            raise ModelError(
                "engine.args.mode: tokens makes prompts here, so it needs the tokenizer: set engine.model to the "
                "server's model."
            )
        self._version = f"httpx-{httpx.__version__}"
        self._digest = _served_digest(args, folder)
        self._server, self._remarks = dict[str, Any](), list[str]()
        self._capacity = args.concurrency * 2  # so that a freed slot finds the next one ready
        self._in_flight = 0
        self._answers: queue.SimpleQueue[list[Answer] | Exception] = queue.SimpleQueue()
        self._fault: Exception | None = None
        self._batches: Batches | None = None
        self._unsent, self._running = list[ChatWork](), set[asyncio.Task[Any]]()
        self._client = ApiClient(args, key, pause=pause)
        portals = require("anyio.from_thread", extra="openai", purpose="The openai engine")
        self._until_closed = contextlib.ExitStack()
        self._loop: BlockingPortal = self._until_closed.enter_context(portals.start_blocking_portal())
        self._is_open, self._is_broken = True, False
        try:
            self._mode = self._start(spec, folder, overlong)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """Digest of the served name, the address's path, and the tokenizer's files; of the weights nothing is known
        here.
        """
        args = args_of(spec)
        return _served_digest(args, _tokenizer_of(spec, args))

    @staticmethod
    def check(spec: EngineSpec) -> None:
        """Packages and options. The server is not called."""
        args = args_of(spec)
        require("httpx", extra="openai", purpose="The openai engine")
        if args.mode == "tokens" or (args.mode == "auto" and spec.model is not None):
            for module in ("transformers", "llguidance"):
                require(module, extra="cpu", purpose="The tokens mode of the openai engine")

    @staticmethod
    def try_server(spec: EngineSpec, asks: Sequence[Ask], secrets: Mapping[str, SecretStr]) -> str:
        """With two tries at most: nobody waits for rows."""
        args = args_of(spec)
        hasty = args.model_copy(update={"max_tries": min(args.max_tries, 2)})
        engine = OpenAi(spec.model_copy(update={"args": hasty}), secrets=secrets)
        try:
            remarks = engine.prepare(asks)
        finally:
            engine.close()
        client, listed = engine._client, counted(len(engine._client.listed), "model")
        head = f"{client.at} lists {listed} and answers as {args.served_model} ({engine._mode.name} mode)"
        return ". ".join([head, *(remark.removesuffix(".") for remark in remarks)])

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Try a short answer of every stage at the server, and say what will not be had."""
        remark = f"The server at {self._client.at} counts no tokens: they are counted here, {CHARS_PER_TOKEN} bytes for"
        return [*self._remarks, *self._mode.prepare(asks), *[f"{remark} each."] * self._client.is_counting]

    @property
    def capacity(self) -> int:
        return max(self._capacity - self._in_flight, 0)

    def submit(self, request: Request) -> None:
        if not self._is_open:
            raise EngineCrashError("the openai engine is closed; start another one.")
        self._in_flight += 1
        work = self._mode.admit(request)
        if isinstance(work, Answer):
            self._answers.put([work])
        elif self._batches is not None and isinstance(work, ChatWork):
            self._unsent.append(work)
        else:
            self._loop.start_task_soon(self._reporting_faults, partial(self._ask, work))

    def poll(self) -> list[Answer]:
        if self._fault is not None:
            raise self._fault
        if not self._in_flight:
            return []
        if self._batches is not None and self._unsent:
            works, self._unsent = self._unsent, []
            self._loop.start_task_soon(self._reporting_faults, partial(self._batches.answer, works))
        ready: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            found = self._answers.get(timeout=POLL_S)
            while True:
                if isinstance(found, list):
                    ready += found
                else:
                    self._fault = self._fault or found
                found = self._answers.get_nowait()
        self._in_flight -= len(ready)
        if self._batches is not None:
            for answer in ready:
                self._batches.adopted.pop(answer.request_id, None)
        if self._fault is not None and not ready:  # else the next call raises it
            raise self._fault
        return ready

    def rendered(self, ask: Ask) -> list[str] | None:
        return self._mode.encoder.shown(ask) if isinstance(self._mode, TokensMode) else None

    def facts(self) -> EngineFacts:
        args = self._args
        return EngineFacts(
            family="openai",
            version=self._version,
            model=args.served_model,
            model_digest=self._digest,
            device="remote",
            notes=("the server's weights are not digested",),
            details={
                "mode": self._mode.name,
                "distributions": self._mode.name == "tokens",
                "price_per_million": {"input": args.price_per_million_input, "output": args.price_per_million_output},
                **self._server,
                **self._mode.details,
            },
        )

    def costs(self) -> dict[str, Any]:
        """Requests, tries, tokens by the server's count and money so far."""
        names = ("http_requests", "retries", "given_up", "prompt_tokens", "cached_tokens", "output_tokens")
        has_prices = {self._args.price_per_million_input, self._args.price_per_million_output} != {None}
        counts = {name: self._client.counts[name] for name in names}
        return {**counts, "cost": self._client.cost if has_prices else None}

    def most(self, ask: Ask) -> Charge:
        """What an ask is charged for at most, if each of its requests is answered at the first try.

        Raises:
            ConfigError: `extra_body` takes the limit of its answer away.
        """
        limit = self._args.extra_body.get(self._args.max_tokens_field, ask.max_tokens)
        if not isinstance(limit, int):
            raise ConfigError(
                f"engine.args.extra_body takes {self._args.max_tokens_field} away: no answer has a limit then, and a "
                "budget can't be kept. Leave it in, or remove run.max_tokens and run.max_cost."
            )
        prompt, output = self._mode.most_tokens(ask, limit)
        return Charge(prompt + output, price_of(self._args, prompt, output) or 0.0)

    def charged(self) -> Charge:
        """What was charged so far at most, without what is in flight. Once it is closed, less what is in flight in
        batches that an earlier execution paid for.
        """
        client, counts = self._client, self._client.counts
        charge = client.lost.plus(Charge(counts["prompt_tokens"] + counts["output_tokens"], client.cost))
        if self._batches is not None and not self._is_open:
            for ask in self._batches.adopted.values():
                charge = charge.minus(self.most(ask))
        return charge

    def use_records(self, records: BatchRecords) -> None:
        """Send asks as batches from here on, if the spec wants that; `relabel ask` gives no records, and does not."""
        if self._args.batch:
            self._batches = Batches(self._client, self._args, records, self._answers.put)
            self._capacity = PART_REQUESTS

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open, self._is_broken = False, True
        self._loop.call(self._end)
        self._until_closed.close()
        logger.info("openai engine: %s", ", ".join(f"{name} {n}" for name, n in self.costs().items() if n is not None))

    def _start(
        self, spec: EngineSpec, folder: TokenizerFolder | None, overlong: Literal["truncate", "quarantine"]
    ) -> ChatMode | TokensMode:
        """Find out what is served, and choose the mode."""
        args, client, loop = self._args, self._client, self._loop
        models = loop.call(client.model_names)
        if models and args.served_model not in models:
            self._remarks.append(
                f"The server at {client.at} does not list {args.served_model!r}; it lists {client.names}. It is asked "
                "all the same."
            )
        served = models.get(args.served_model, {})
        self._server |= {
            name: shown(served[name]) for name in ("owned_by", "root") if isinstance(served.get(name), str)
        }
        context = served.get("max_model_len")
        if type(context) is int and 0 < context <= MAX_COUNT:
            self._server["max_model_len"] = context
        if args.mode != "chat" and folder is not None:
            tokens = TokensMode(
                client, loop, spec, args, overlong=overlong, folder=folder, context=self._server.get("max_model_len")
            )
            if (why := tokens.detect()) is None:
                return tokens
            if args.mode == "tokens":
                raise ModelError(f"engine.args.mode is tokens, which the server at {client.at} can't: {why}.")
            self._remarks.append(f"The server at {client.at} is used as a chat API: {why}.")
        return ChatMode(client, loop, spec, args, overlong=overlong, folder=folder)

    async def _ask(self, work: Any) -> None:
        """One ask from its first request to its answer."""
        async with self._client.slots:
            if not self._is_broken:  # else what waits would still be sent, and paid for
                self._answers.put([await self._mode.answer(work)])

    async def _end(self) -> None:
        """Requests end before their connections: one answered after these were closed would leave its own open."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    async def _reporting_faults(self, do: Callable[[], Awaitable[None]]) -> None:
        """Work in the loop's thread. Whatever goes wrong reaches the caller through the queue."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await do()
        except Exception as exc:  # noqa: BLE001 — `poll` raises it: a fault in this thread must not leave the run waiting for ever
            self._is_broken = True
            self._answers.put(exc)


def _tokenizer_of(spec: EngineSpec, args: OpenAiArgs) -> TokenizerFolder | None:
    """The folder that `engine.model` names for a server's model, never its weights; None if it names nothing.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
    """
    return None if spec.model is None else tokenizer_folder(spec.model, args.cache_dir)


def _served_digest(args: OpenAiArgs, folder: TokenizerFolder | None) -> str:
    """In place of a digest of the server's model: its name, the address's path whatever the host, and the tokenizer,
    since the weights can't be digested from here.
    """
    path = server_address(args.base_url, key="engine.args.base_url").path.rstrip("/")
    tokenizer = folder.digest if folder is not None else "none"
    return hashlib.sha256(f"openai server: {path} {args.served_model}; tokenizer: {tokenizer}".encode()).hexdigest()
