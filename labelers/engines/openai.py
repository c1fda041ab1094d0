"""The openai engine: a teacher at any OpenAI-compatible server, in the exact way where the server can, else as
chat.

Requests run in a thread with an event loop of its own: `submit` never waits, `poll` waits for the first answer.
Importing this file loads no HTTP library. Read on: `api_options.py` (what can be set), `api_client.py` (tries and
limits), `api_tokens.py` and `api_chat.py` (the two ways).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import SecretStr

from relabel.labelers.engines.checkpoints import TokenizerFolder, find_tokenizer, served_digest
from relabel.labelers.engines.openai_batches import PART_REQUESTS, Batches
from relabel.labelers.engines.openai_chat import ChatMode, ChatWork
from relabel.labelers.engines.openai_client import CHARS_PER_TOKEN, ApiClient
from relabel.labelers.engines.openai_connections import OpenAiArgs, args_of, key_of
from relabel.labelers.engines.openai_replies import MAX_COUNT, shown
from relabel.manifests.asks import POLL_S, Answer, Ask, Charge, Engine, EngineFacts, Request
from relabel.manifests.errors import ConfigError, EngineCrashError, ModelError, ServerGoneError
from relabel.manifests.process import require
from relabel.manifests.records import BatchRecords
from relabel.manifests.secrets import counted
from relabel.manifests.specs import EngineArgs, EngineSpec, price_of

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

WAITING_PER_SLOT = 2
"""Requests taken for each that may be at the server, so that a freed slot finds the next one ready."""

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
        key = key_of(args, secrets or {})
        httpx = require("httpx", extra="openai", purpose="The openai engine")
        folder = find_tokenizer(spec, args)
        if args.mode == "tokens" and folder is None:
            raise ModelError(
                "engine.args.mode: tokens makes prompts here, so it needs the tokenizer: set engine.model to the "
                "server's model."
            )
        self._args, self._folder = args, folder
        self._server: dict[str, Any] = {}
        self._version = f"httpx-{httpx.__version__}"
        self._digest = served_digest(args, folder)
        self._capacity = args.concurrency * WAITING_PER_SLOT
        self._in_flight = 0
        self._answers: queue.SimpleQueue[Answer | list[Answer] | Exception] = queue.SimpleQueue()
        self._fault: Exception | None = None
        self._remarks: list[str] = []
        self._client = ApiClient(args, key, pause=pause)
        self._pause = pause
        self._batches: Batches | None = None
        self._unsent: list[ChatWork] = []
        self._flying: dict[int, Ask] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._until_closed = contextlib.ExitStack()
        portals = require("anyio.from_thread", extra="openai", purpose="The openai engine")
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
        return served_digest(args, find_tokenizer(spec, args))

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
            try:
                remarks = engine.prepare([replace(ask, max_tokens=min(ask.max_tokens, 1)) for ask in asks])
            except (ModelError, ServerGoneError):  # some refuse small limits
                remarks = engine.prepare(asks)
        finally:
            engine.close()
        client, mode = engine._client, engine._mode.name
        listed = counted(len(client.listed), "model")
        head = f"{client.at} lists {listed} and answers as {args.served_model} ({mode} mode)"
        return ". ".join([head, *(remark.removesuffix(".") for remark in remarks)])

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Try a short answer of every stage at the server, and say what will not be had."""
        remarks = [*self._remarks, *self._mode.prepare(asks, self._loop)]
        if self._client.is_counting:
            by = f"{CHARS_PER_TOKEN} bytes for each"
            if self._folder is not None:
                tokenizer, by = self._folder.load(), f"by the tokenizer of {self._folder.reference!r}"
                self._client.num_tokens = lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)
            remarks.append(f"The server at {self._client.at} counts no tokens: they are counted here, {by}.")
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
            self._answers.put(work)
        elif self._batches is not None:
            self._flying[request.id] = request.ask
            self._unsent.append(work)
        else:
            self._loop.start_task_soon(self._reporting_faults, partial(self._ask, work))

    def poll(self) -> list[Answer]:
        if self._fault is not None:
            raise self._fault
        if not self._in_flight:
            return []
        if self._unsent:
            assert self._batches is not None
            works, self._unsent = self._unsent, []
            self._loop.start_task_soon(self._reporting_faults, partial(self._batches.answer, works))
        ready: list[Answer] = []
        fault: Exception | None = None
        try:
            found = self._answers.get(timeout=POLL_S)
            while True:
                if isinstance(found, Answer):
                    ready.append(found)
                elif isinstance(found, list):
                    ready += found
                else:
                    fault = fault or found
                found = self._answers.get_nowait()
        except queue.Empty:
            pass
        self._in_flight -= len(ready)
        if self._batches is not None:
            for answer in ready:
                self._flying.pop(answer.request_id, None)
                self._batches.adopted.discard(answer.request_id)
        if fault is not None:
            self._fault = fault
            if not ready:  # else the next call raises it
                raise fault
        return ready

    def rendered(self, ask: Ask) -> list[str] | None:
        return None if isinstance(self._mode, ChatMode) else self._mode.rendered(ask)

    def facts(self) -> EngineFacts:
        args = self._args
        prices = {"input": args.price_per_million_input, "output": args.price_per_million_output}
        return EngineFacts(
            family="openai",
            version=self._version,
            model=args.served_model,
            model_digest=self._digest,
            device="remote",
            notes=("the server's weights are not digested",),
            details={
                "mode": self._mode.name,
                "distributions": self._mode.has_distributions,
                "price_per_million": prices,
                **self._server,
                **self._mode.details(),
            },
        )

    def costs(self) -> dict[str, Any]:
        """Requests, tries, tokens by the server's count and money so far; see `Costs`."""
        return self._client.costs.with_batches(self._client.batch_costs)

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
        charge = Charge()
        for costs in (self._client.costs, self._client.batch_costs):
            charge = charge.plus(Charge(costs.at_most.prompt + costs.at_most.output, costs.cost_at_most))
        if self._batches is not None and not self._is_open:
            for request_id in self._batches.adopted:
                charge = charge.minus(self.most(self._flying[request_id]))
        return charge

    def use_records(self, records: BatchRecords) -> None:
        """Send asks as batches from here on, if the spec wants that; `relabel ask` gives no records, and does not."""
        if self._args.batch:
            self._batches = Batches(self._client, self._args, records, self._answers.put, self._pause)
            self._capacity = PART_REQUESTS

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open, self._is_broken = False, True
        self._loop.call(self._end)
        self._until_closed.close()
        logger.info(
            "openai engine: %s",
            ", ".join(f"{name} {value}" for name, value in self.costs().items() if value is not None),
        )

    def _start(
        self, spec: EngineSpec, folder: TokenizerFolder | None, overlong: Literal["truncate", "quarantine"]
    ) -> Any:
        """Find out what is served, and choose the mode."""
        args = self._args
        models = self._loop.call(self._client.model_names)
        if models and args.served_model not in models:
            self._remarks.append(
                f"The server at {self._client.at} does not list {args.served_model!r}; it lists "
                f"{self._client.names}. It is asked all the same."
            )
        served = (models or {}).get(args.served_model, {})
        self._server |= {
            name: shown(served[name]) for name in ("owned_by", "root") if isinstance(served.get(name), str)
        }
        context = served.get("max_model_len")
        if isinstance(context, bool) or not isinstance(context, int) or not 0 < context <= MAX_COUNT:
            context = None
        if context is not None:
            self._server["max_model_len"] = context
        if args.mode == "chat" or folder is None:
            own = folder.control_texts() if folder is not None else None
            return ChatMode(self._client, spec, args, overlong=overlong, own_control_texts=own)
        from relabel.labelers.engines.openai_tokens import TokensMode

        tokenizer = folder.load()
        tokens = TokensMode(
            self._client, spec, args, tokenizer, reference=folder.reference, context=context, overlong=overlong
        )
        why = tokens.detect(self._loop)
        if why is None and (args.mode == "tokens" or tokens.has_distributions):
            return tokens
        if args.mode == "tokens":
            raise ModelError(
                f"engine.args.mode is tokens, and the server at {self._client.at} takes no token ids: {why}."
            )
        self._remarks.append(
            f"The server at {self._client.at} is used as a chat API: "
            f"{why or 'it takes token ids, but does not answer `logprob_token_ids`'}."
        )
        return ChatMode(self._client, spec, args, overlong=overlong, own_control_texts=folder.control_texts())

    async def _ask(self, work: Any) -> None:
        """One ask from its first request to its answer."""
        async with self._client.slots:
            if not self._is_broken:  # else what waits would still be sent, and paid for
                self._answers.put(await self._mode.answer(work))

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
