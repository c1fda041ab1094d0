"""The openai engine: a teacher at any OpenAI-compatible server, in the exact way where the server can, else as chat;
or by the provider's batches.

Requests run in a thread with an event loop of its own: `submit` never waits, `poll` waits for the first answer.
Importing this file loads no HTTP library. Read on: `openai_options.py`, `openai_client.py` (tries and
limits), `openai_modes.py` (the two ways to ask) and `openai_batches.py`.
"""

import asyncio
import contextlib
import hashlib
import logging
import queue
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import SecretStr

from relabel.labelers.engines.openai_batches import PART_REQUESTS, Batches
from relabel.labelers.engines.openai_client import CHARS_PER_TOKEN, ApiClient
from relabel.labelers.engines.openai_complaints import shown
from relabel.labelers.engines.openai_modes import ChatMode, ChatWork, TokensMode
from relabel.labelers.engines.openai_options import OpenAiArgs, args_of, key_of, server_address
from relabel.labelers.engines.openai_replies import MAX_COUNT
from relabel.labelers.engines.transformers import TokenizerFolder, tokenizer_folder
from relabel.manifests.asks import POLL_S, Answer, Ask, Charge, Engine, EngineFacts, Request
from relabel.manifests.errors import ConfigError, EngineCrashError, ModelError
from relabel.manifests.process import require
from relabel.manifests.records import BatchRecords
from relabel.manifests.secrets import counted
from relabel.manifests.specs import EngineArgs, EngineSpec, price_of

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

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
        args = args_of(spec)
        self._args = args
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
        self._server = dict[str, Any]()
        self._remarks = list[str]()
        self._capacity = args.concurrency * 2  # so that a freed slot finds the next one ready
        self._in_flight = 0
        self._answers: queue.SimpleQueue[list[Answer] | Exception] = queue.SimpleQueue()
        self._fault: Exception | None = None
        self._batches: Batches | None = None
        self._unsent = list[ChatWork]()
        self._running = set[asyncio.Task[Any]]()
        self._client = ApiClient(args, key, pause=pause)
        portals = require("anyio.from_thread", extra="openai", purpose="The openai engine")
        self._until_closed = contextlib.ExitStack()
        self._loop: BlockingPortal = self._until_closed.enter_context(portals.start_blocking_portal())
        self._is_open = True
        self._is_broken = False
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
        client = engine._client
        listed = counted(len(client.listed), "model")
        head = f"{client.at} lists {listed} and answers as {args.served_model} ({engine._mode.name} mode)"
        return ". ".join([head, *(remark.removesuffix(".") for remark in remarks)])

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Try a short answer of every stage at the server, and report what will not be had."""
        remarks = [*self._remarks, *self._mode.prepare(asks)]
        if self._client.is_counting:
            remarks.append(
                f"The server at {self._client.at} counts no tokens: they are counted here, {CHARS_PER_TOKEN} bytes for "
                "each."
            )
        return remarks

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
            works = self._unsent
            self._unsent = []
            self._loop.start_task_soon(self._reporting_faults, partial(self._batches.answer, works))
        ready: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            arrived = self._answers.get(timeout=POLL_S)
            while True:
                if isinstance(arrived, list):
                    ready += arrived
                else:
                    self._fault = self._fault or arrived
                arrived = self._answers.get_nowait()
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
        client = self._client
        num_tokens = client.counts["prompt_tokens"] + client.counts["output_tokens"]
        charge = client.lost.plus(Charge(num_tokens, client.cost))
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
        self._is_open = False
        self._is_broken = True
        self._loop.call(self._end)
        self._until_closed.close()
        logger.info("openai engine: %s", ", ".join(f"{name} {n}" for name, n in self.costs().items() if n is not None))

    def _start(
        self, spec: EngineSpec, folder: TokenizerFolder | None, overlong: Literal["truncate", "quarantine"]
    ) -> ChatMode | TokensMode:
        """Find out what is served, and choose the mode."""
        args = self._args
        client = self._client
        loop = self._loop
        models = loop.call(client.model_names)
        if models and args.served_model not in models:
            self._remarks.append(
                f"The server at {client.at} does not list {args.served_model!r}; it lists {client.names}. It is asked "
                "all the same."
            )
        served = models.get(args.served_model, {})
        for name in ("owned_by", "root"):
            if isinstance(served.get(name), str):
                self._server[name] = shown(served[name])
        context = served.get("max_model_len")
        if type(context) is int and 0 < context <= MAX_COUNT:
            self._server["max_model_len"] = context
        if args.mode != "chat" and folder is not None:
            tokens = TokensMode(
                client,
                loop,
                spec,
                args,
                overlong=overlong,
                folder=folder,
                context=self._server.get("max_model_len"),
            )
            why = tokens.detect()
            if why is None:
                return tokens
            if args.mode == "tokens":
                raise ModelError(f"engine.args.mode is tokens, which the server at {client.at} can't: {why}.")
            self._remarks.append(f"The server at {client.at} is used as a chat API: {why}.")
        return ChatMode(
            client,
            loop,
            spec,
            args,
            overlong=overlong,
            folder=folder,
        )

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
    since the weights can't be digested from here. A gateway serves other models by other paths; `/v1` at the end,
    often forgotten, makes none.
    """
    path = server_address(args.base_url, key="engine.args.base_url").path.rstrip("/").removesuffix("/v1") + "/v1"
    tokenizer = folder.digest if folder is not None else "none"
    return hashlib.sha256(f"openai server: {path} {args.served_model}; tokenizer: {tokenizer}".encode()).hexdigest()
