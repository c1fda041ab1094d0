"""The openai engine's side of HTTP: its options, what a server replies, what that costs, and a client with bounded
concurrency and retries. Only this module sends the key.

Its neighbours: `openai_complaints.py` (what an error is about), `openai_streams.py` (replies in pieces) and
`openai_evidence.py` (which model answered, and what it read).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, NamedTuple, NoReturn, TypeVar
from urllib.parse import SplitResult, urlsplit

import pydantic_core
from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator

from relabel.labelers.engines.openai_complaints import (
    Complaint,
    Subject,
    reset_of_headers,
    wait_of_headers,
)
from relabel.labelers.engines.openai_complaints import read_complaint as read_complaint  # for readers of batches too
from relabel.labelers.engines.openai_complaints import shown as shown
from relabel.labelers.engines.openai_evidence import ModelNames, PromptCounts
from relabel.labelers.engines.openai_streams import StreamEndError, StreamError, is_stream, joined_stream
from relabel.manifests.asks import Charge, Finish
from relabel.manifests.errors import ConfigError, ModelError, RelabelError, ServerGoneError, StoreError
from relabel.manifests.files import out_of_files
from relabel.manifests.process import require
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText, price_of

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# Options. A key is named here, never held: `api_key_env` is the name of an environment variable, and `jobs` hands its
# value to the engine apart from the spec. Messages show neither a key nor an address that may hold a password.


class OpenAiArgs(EngineArgs):
    """Options of the openai engine."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {
            "base_url",
            "api_key_env",
            "concurrency",
            "timeout_s",
            "max_tries",
            "backoff_s",
            "max_backoff_s",
            "max_wait_s",
            "price_per_million_input",
            "price_per_million_output",
            "batch",
            "batch_poll_s",
            "other_model",
            "cache_dir",
        }
    )
    secret_variables: ClassVar[frozenset[str]] = frozenset({"api_key_env"})
    """Options that name an environment variable whose value is passed to the engine alone."""

    base_url: str
    """Where the API's paths begin: `http://127.0.0.1:8000/v1`. Host and port may change from run to run; the path is
    part of the model's identity, since some providers name the deployment in it.
    """
    served_model: str = Field(min_length=1)
    """The model's name at the server (`GET /models` lists them)."""
    mode: Literal["auto", "tokens", "chat"] = "auto"
    """`tokens`: prompts as token ids, exact distributions; `engine.model` names the tokenizer. `chat`: messages as
    text, no distributions. `auto` takes `tokens` where `engine.model` is given and the server can do it. Write it out
    to be refused rather than degraded.
    """
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key; never the key itself. Without one, no key is sent."""
    concurrency: int = Field(32, ge=1, le=4096)
    """Most requests at the server at once. An own vLLM on a GPU wants 128 and more; a provider's rate limit less."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest that one request may take, seconds; then it is tried again."""
    max_tries: int = Field(6, ge=1, le=100)
    """Tries of one request (busy or failing server, time-out, broken connection, garbled reply) until its row is given
    up, as `engine`.
    """
    backoff_s: float = Field(1.0, ge=0)
    """Before try n + 1 the engine waits a random time of up to backoff_s * 2^(n-1) seconds; `Retry-After` is heeded on
    top.
    """
    max_backoff_s: float = Field(60.0, ge=0)
    """Upper end of that random time, seconds."""
    max_wait_s: float = Field(600.0, ge=0)
    """A wait that the server demands (`Retry-After`) beyond this many seconds ends the run, to be continued later (exit
    20).
    """
    price_per_million_input: float | None = Field(None, ge=0)
    """Price of a million prompt tokens, in any currency; cached ones count in full."""
    price_per_million_output: float | None = Field(None, ge=0)
    """Price of a million output tokens."""
    other_model: Literal["refuse", "flag"] = "refuse"
    """An answer under another model's name than `served_model`, or a release of it, or the name that the start was
    answered under: `refuse` asks again, and gives the row up as `engine` in the end; `flag` takes it, with the flag
    `other_model`.
    """
    batch: bool = False
    """Hand asks over as batches (`/batches`), at half of these prices, answered within a day. Wants `mode: chat`."""
    batch_poll_s: float = Field(30.0, gt=0)
    """Between two requests for a batch's state, seconds."""
    constrain: bool = True
    """`tokens` mode: hold answers to their format by a grammar where the server takes one (`structured_outputs`, as
    vLLM does).
    """
    assistant_prefill: Literal["refuse", "message", "continue"] = "refuse"
    """`chat` mode, for labelers that begin the answer: `message` sends the beginning as a last assistant message,
    `continue` adds vLLM's `continue_final_message`; `refuse` does not start.
    """
    control_texts: tuple[str, ...] = ()
    """`chat` mode: further texts that are control tokens of the model; rows whose data hold one are refused."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the chat API calls its limit; newer OpenAI models want `max_completion_tokens`."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request that generates text (`{reasoning_effort: low}`); null takes a field away that
    would be sent. No secrets here: it is stored with the run.
    """
    cache_dir: PathText | None = None
    """Where fetched tokenizers are kept. Default: `~/.cache/relabel`."""

    @property
    def sends_batches(self) -> bool:
        """See `EngineArgs.sends_batches`; other engines' `batch` is a size."""
        return self.batch

    @model_validator(mode="after")
    def _batches_are_chat(self) -> OpenAiArgs:
        if self.batch and self.mode != "chat":
            raise ValueError("batches hold chat requests: write mode: chat, or leave batch out")
        return self


def args_of(spec: EngineSpec) -> OpenAiArgs:
    """The spec's options, checked beyond what a message that shows them may check.

    Raises:
        ConfigError: the address or the variable's name is off.
    """
    args = OpenAiArgs.of(spec)
    if re.fullmatch(r"[A-Z_][A-Z0-9_]{0,99}", args.api_key_env) is None:
        raise ConfigError(
            "engine.args.api_key_env: want the name of an environment variable (A-Z, 0-9, _), such as OPENAI_API_KEY. "
            "The value is not shown, since it may be the key itself."
        )
    server_address(args.base_url, key="engine.args.base_url")
    return args


def key_of(args: OpenAiArgs, secrets: Mapping[str, SecretStr]) -> str | None:
    """The key to send, or None.

    Raises:
        ConfigError: a variable was named and is not set, or what it holds can't be sent in a header.
    """
    key = secrets.get("api_key_env", SecretStr("")).get_secret_value().strip()
    if not key:
        if args.api_key_env != OpenAiArgs.model_fields["api_key_env"].default:  # a worker's spec sets all fields
            raise ConfigError(
                f"engine.args.api_key_env: the variable {args.api_key_env} is not set; set it to the server's key."
            )
        return None
    if re.fullmatch("[!-~]+", key) is None:  # the HTTP library would show it in its error
        raise ConfigError(
            f"the variable {args.api_key_env} holds white space or characters beyond ASCII; a key has neither."
        )
    return key


def server_address(url: str, *, key: str) -> SplitResult:
    """The parts of a server's address.

    Args:
        key: of the spec, for messages.
    Raises:
        ConfigError: it is no http address, or has a user, password or query.
    """
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine:
        raise ConfigError(f"{key}: want an address such as http://127.0.0.1:8000/v1 or https://api.openai.com/v1.")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{key}: want scheme, host, port and path alone; a user, password or query in it would be stored. A key "
            "goes into an environment variable."
        )
    return parts


# ------------------------------------------------------------------------------
# What a server replied, read strictly: a reply that is not of the API's form is no answer, and is never repaired into
# one.


_STOPS = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})
_LENGTHS = ("length", "max_tokens", "max_output_tokens", "context_window_exceeded")
_FILTERS = ("filter", "safety", "refusal", "recitation", "prohibited", "blocklist", "spii", "sensitive", "guardrail")
_BREAKS = ("abort", "error", "cancel", "insufficient_system_resource")
UNKNOWN_FINISH = "finish_unknown"
"""Flag of an answer whose end the server gives no known reason for: whether it is whole, its reader finds."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Fields of a message in which servers keep the model's thought apart, the same one perhaps twice."""
_TEXTS = ("text", "content", "thinking", "reasoning", "summary", "value")
MAX_COUNT = 10_000_000
"""No request has more tokens; what a server says beyond that is not a count."""


OTHER_MODEL = "other_model"
"""Flag of an answer under another model's name."""


class ReplyError(ValueError):
    """A reply without the API's form. Caught by the client, which asks again."""


class CutOffError(ReplyError):
    """A reply whose answer the server gave up halfway."""


class OtherModelError(ReplyError):
    """A reply of another model.

    Args:
        usage: what it is charged.
    """

    def __init__(self, message: str, usage: Usage) -> None:
        super().__init__(message)
        self.usage = usage


class Usage(NamedTuple):
    """Tokens of one reply, by the server's own count; `cached` ones are among the prompt's."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class Reply(NamedTuple):
    """One answer.

    Args:
        token_ids: ids of the generated tokens, where the server gives them.
        prompt_ids: ids of the prompt as the server saw it, where it gives them.
        logprobs: log-probabilities at the first generated token by token id, where they were asked for and given.
        detail: why it was refused or is of no use.
        reasoning: what the server keeps apart as the model's thought.
        raw: the message as it came, where it is more than its text.
        flags: what a reader of the label should know.
        model: the name that the server gives the model that answered; empty where it gives none.
    """

    text: str
    finish: Finish
    usage: Usage
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    logprobs: dict[int, float] = {}  # noqa: RUF012 — never written to
    detail: str = ""
    reasoning: str = ""
    raw: str = ""
    flags: tuple[str, ...] = ()
    model: str = ""


TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Logprob = Annotated[float, Field(gt=-1e9, le=1e-3, strict=True)]
"""A little above 0 by rounding."""


class _Logprobs(BaseModel):
    top_logprobs: list[dict[str, Logprob] | None] | None = None


class _TextChoice(BaseModel):
    finish_reason: str | None = None
    text: str
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None


class _ChatChoice(BaseModel):
    finish_reason: str | None = None
    message: dict[str, Any]


ChoiceT = TypeVar("ChoiceT", _TextChoice, _ChatChoice)


class _Choices(BaseModel, Generic[ChoiceT]):
    choices: tuple[ChoiceT]
    usage: Any = None
    model: Any = None

    @property
    def model_name(self) -> str:
        return shown(self.model) if isinstance(self.model, str) else ""


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_reply(raw: bytes) -> Any:
    """A reply's JSON.

    Raises:
        ReplyError: it is none: cut off, nested too deep, NaN, half a character.
    """
    try:
        return pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError:
        raise ReplyError("the reply is not complete JSON") from None


def read_as(model: type[ModelT], raw: bytes) -> ModelT:
    """A reply as a record; see `parse_reply` and `validated`."""
    return validated(model, parse_reply(raw))


def validated(model: type[ModelT], payload: Any) -> ModelT:
    """A reply's JSON as a record.

    Raises:
        ReplyError: it has another form.
    """
    try:
        return model.model_validate(payload)
    except ValidationError as exc:
        fault = exc.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, fault["loc"][:4]))
        raise ReplyError(f"the reply has another form: {where or 'all of it'}: {fault['msg']}") from None


def read_completion(payload: Any) -> Reply:
    """The one choice of `/completions`.

    Raises:
        ReplyError: the payload has not the form of a completion.
    """
    found = validated(_Choices[_TextChoice], payload)
    choice = found.choices[0]
    finish, detail, flags = _finish(choice.finish_reason, choice.text)
    tops = (choice.logprobs.top_logprobs if choice.logprobs is not None else None) or [None]
    named = {key.removeprefix("token_id:"): one for key, one in (tops[0] or {}).items() if key.startswith("token_id:")}
    logprobs = {int(token): one for token, one in named.items() if re.fullmatch("[0-9]{1,10}", token)}
    return Reply(
        text=choice.text,
        finish=finish,
        usage=_usage(found.usage),
        token_ids=choice.token_ids,
        prompt_ids=choice.prompt_token_ids,
        logprobs=logprobs,
        detail=detail,
        flags=flags,
        model=found.model_name,
    )


def read_chat(payload: Any) -> Reply:
    """The one choice of `/chat/completions`. A refusal is `refused`, whatever its text says.

    Raises:
        ReplyError: the payload has not the form of a chat completion.
    """
    found = validated(_Choices[_ChatChoice], payload)
    usage = _usage(found.usage)
    message = found.choices[0].message
    content = message.get("content")
    refusal = message.get("refusal")
    if not isinstance(refusal, str | None):
        raise ReplyError("the message's `refusal` is not text")
    text, *thoughts = _parts_of("" if content is None else content)
    thoughts += ("".join(_parts_of(message[name])) for name in THOUGHTS if message.get(name) is not None)
    reasoning = next((thought for thought in thoughts if thought.strip()), "")
    raw = json.dumps(message, ensure_ascii=False) if reasoning or text != (content or "") or refusal else ""
    if refusal:
        detail = f"the model declined: {shown(refusal)}"
        return Reply(
            "",
            "refused",
            usage,
            detail=detail,
            raw=raw,
            model=found.model_name,
        )
    finish, detail, flags = _finish(found.choices[0].finish_reason, text + reasoning)
    if reasoning and not text.strip() and finish == "stop":
        detail = detail or "the reply holds the model's thought and no answer"
    return Reply(
        text,
        finish,
        usage,
        detail=detail,
        reasoning=reasoning,
        raw=raw,
        flags=flags,
        model=found.model_name,
    )


def _parts_of(content: Any) -> tuple[str, str]:
    """Text and thought of a message's content: text, parts with a type each, or lists of them.

    Raises:
        ReplyError: it is none of these.
    """
    if isinstance(content, str):
        return content, ""
    if isinstance(content, list):
        texts, thoughts = zip(("", ""), *map(_parts_of, content), strict=True)
        return "".join(texts), "".join(thoughts)
    if not isinstance(content, dict) or not isinstance(content.get("type"), str):
        raise ReplyError("the message's `content` is not text")
    held = next((content[name] for name in _TEXTS if content.get(name) is not None), "")
    text = "".join(_parts_of(held))
    is_thought = re.search("think|thought|reason", content["type"]) is not None or content.get("thought") is True
    return ("", text) if is_thought else (text, "")


def _finish(reason: str | None, text: str) -> tuple[Finish, str, tuple[str, ...]]:
    """How an answer ended, what there is to say of that, and its flags. Servers write the reasons in any case."""
    lowered = (reason or "").lower()
    if lowered in _STOPS:
        return "stop", "", ()
    if any(word in lowered for word in _LENGTHS):
        return "length", "", ()
    if any(word in lowered for word in _FILTERS):
        return "refused", "the server's content filter stopped the answer", ()
    if any(word in lowered for word in _BREAKS) or not (reason or text.strip()):
        raise CutOffError(f"the answer was cut off (finish_reason {shown(lowered) or 'absent'})")
    if not reason:
        return "length", "the answer came without finish_reason", (UNKNOWN_FINISH,)
    why = f"the answer ended with finish_reason {shown(reason)!r}"
    return ("stop", why, (UNKNOWN_FINISH,)) if text.strip() else ("error", why, ())


def _usage(usage: Any) -> Usage:
    """What the server counted, as it is charged: providers agree neither on whether cached tokens are among the
    prompt's nor on whether the model's thoughts are among the answer's.
    """
    counts = usage if isinstance(usage, dict) else {}
    prompt = _count(counts, "prompt_tokens")
    output = _count(counts, "completion_tokens")
    total = _count(counts, "total_tokens")
    cached = _count(counts.get("prompt_tokens_details"), "cached_tokens")
    thought = _count(counts.get("completion_tokens_details"), "reasoning_tokens")
    if cached > prompt > 0:
        prompt += cached
    if thought > output:
        output += thought
    if prompt > 0:
        output = max(output, total - prompt)
    return Usage(prompt, cached, output)


def _count(counts: Any, name: str) -> int:
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


# ------------------------------------------------------------------------------
# What a run has asked of a server so far: requests, tries, tokens as the server counted them, money.


CHARS_PER_TOKEN = 4
"""Bytes of UTF-8, where neither the server nor a tokenizer counts tokens."""


# ------------------------------------------------------------------------------
# The client. A request is tried again after 408, 425, 429 and 5xx, time-outs, broken connections and replies without
# the API's form. Between tries it waits a random time below an exponential bound (full jitter), and no less than the
# server wants. What another try can't help is the row's fate (`Failure`) where the row may be the reason. An error may
# come as HTTP 200: it is handled by its own code.
#
# What would end the run (the credit is used up, the key is refused, the model is unknown, ...) is a suspicion, and the
# *trial request* decides it: the first one that was answered, at the start, which holds no row's text. If that is
# refused too, the run ends; if it is answered, the row is the reason. So no piece of a row's text that a server repeats
# in an error ends a run. At the start, where nothing was answered yet, the request is the trial itself.
#
# Not stamina: what decides here is whether a try may have been charged, how long the server wants us to wait, whether
# any server was there, and when to end the run. Of a retry library that would leave the loop of `send` alone.


T = TypeVar("T")

BUSY = frozenset({408, 425, 429, 498})
"""Statuses below 500 after which the same request may be answered."""
WAITS = frozenset({408, 425, 429, 498, 503, 529})
"""Statuses whose words may state a wait."""
NAME_TRIALS = 2
"""Requests that show whether a strange name of the model is always given."""
FAILED_IN_A_ROW = 32
"""Requests given up or refused (or twice the concurrency, if that is more) with no answer in between: the server is to
blame, not the rows.
"""
CONNECT_S = 10.0
"""Longest wait for a connection."""


class Failure(NamedTuple):
    """A request that got no answer.

    Args:
        finish: what that makes of its ask.
        detail: why, for a person.
        status: the HTTP status that decided it; 0 for none.
        suspicion: what ends the run, if the trial request is refused too.
        is_malformed: each try was a good reply in another form than the API's, always the same one.
    """

    finish: Finish
    detail: str
    status: int = 0
    suspicion: RelabelError | None = None
    is_malformed: bool = False

    def raise_at_start(self, stage: str, *, at: str) -> NoReturn:
        """End the start of an engine whose server does not answer a labeler's stage.

        Args:
            at: the server's address.
        Raises:
            ModelError: it refuses such requests.
            ServerGoneError: it does not answer.
        """
        if self.is_malformed:
            raise ModelError(
                f"the server at {at} answers stage {stage!r} with something else than the API's replies: "
                f"{self.detail}. Check engine.args.base_url, which ends in /v1 at most servers, and "
                "engine.args.extra_body."
            )
        if self.status == 0:
            raise ServerGoneError(
                f"the server at {at} is not ready: stage {stage!r}: {self.detail}. The same command may work later."
            )
        raise ModelError(
            f"the server at {at} does not take stage {stage!r}: {self.detail}. engine.args.extra_body: {{FIELD: null}} "
            "leaves a field out that it does not know, {stream: true} asks for a stream, engine.args.max_tokens_field "
            "names the answer's limit."
        )


class Unanswered(NamedTuple):
    """A try that may be repeated.

    Args:
        reason: why it failed.
        wait_s: how long the server wants us to wait.
        was_heard: whether anybody was there.
        may_be_charged: whether an answer may have been charged that did not reach us.
        malformed: what is wrong with the form of a good reply.
        suspicion: what ends the run, if the trial request is refused too.
    """

    reason: str
    wait_s: float = 0.0
    was_heard: bool = True
    may_be_charged: bool = False
    malformed: str = ""
    suspicion: RelabelError | None = None


class ApiClient:
    """One server's API.

    Args:
        key: sent as a bearer token and nowhere else; None sends none.
        pause: how to wait; tests put their own.
    """

    def __init__(self, args: OpenAiArgs, key: str | None, *, pause: Callable[[float], Awaitable[object]]) -> None:
        self.counts = Counter[str]()
        """Of requests, tries and tokens, decisions and start-up checks included, by name."""
        self.cost = 0.0
        """Of the tokens, in the prices' currency."""
        self.lost = Charge()
        """The most that replies may have been charged which were lost on the way."""
        self.slots = asyncio.Semaphore(args.concurrency)
        self.pause = pause
        self._args = args
        self._key = key
        self.at = shown(args.base_url)
        """The server's address, as messages name it."""
        self.notes: list[str] = []
        """What the replies of the start prove that the user should know; later ones are logged."""
        self._names = ModelNames(args.served_model)
        self._prompts = PromptCounts()
        self._noted = set[str]()
        self._is_started = False
        self._trial: tuple[str, dict[str, Any], Callable[[Any], Reply]] | None = None
        """The first request that was answered, to find out whether such still are."""
        self._trial_lock = asyncio.Lock()
        self._num_trials_answered = 0
        self._end: RelabelError | None = None
        """What the trial request proved to be the run's end."""
        self.listed: dict[str, dict[str, Any]] = {}
        """What the server lists, as `model_names` says."""
        self.is_counting = False
        """Whether tokens are counted here, since the server does not say."""
        self._num_heard = self._failed_in_a_row = 0
        self._library = library = require("httpx", extra="openai", purpose="The openai engine")
        self._free: list[httpx.AsyncClient] = []
        self._clients: list[httpx.AsyncClient] = []
        self._certificates: Any = False
        if args.base_url.startswith("https:"):  # 0.1 s to read them, so only where there is a connection to prove
            self._certificates = library.create_ssl_context(trust_env=False)
            self._certificates.load_default_certs()  # the machine's own and the library's

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()

    async def model_names(self) -> dict[str, dict[str, Any]]:
        """What the server lists at `/models`, by name; nothing if it has no such list, or not for this key.

        Raises:
            ServerGoneError: no server answers.
        """
        try:
            found = await self.send("GET", "/models", lambda raw: _model_names(parse_reply(raw)))
        except ModelError:  # a key may be good for answers alone: the first of them shows
            return {}
        if not isinstance(found, Failure):
            self.listed = found
        elif found.status == 0 and not found.is_malformed:
            raise ServerGoneError(f"the server at {self.at} is not ready: {found.detail}")
        return self.listed

    @property
    def names(self) -> str:
        """Models that the server lists, as a message shows them."""
        return shown(", ".join(sorted(self.listed)[:20]))

    async def post(
        self, path: str, body: dict[str, Any], read: Callable[[Any], Reply], *, is_trial: bool = False
    ) -> Reply | Failure:
        """Send a request until it is answered, or has failed for good, and count what it is charged.

        Args:
            read: makes an answer of the reply's JSON, or raises ReplyError.
            is_trial: an unknown path or model is a Failure as well, for finding out what the server offers.
        Raises:
            ModelError: the key is refused, or the server does not know the model.
            ServerGoneError: no server answers any request, or the server wants none for a long time.
        """
        outcome = await self.send(
            "POST",
            path,
            lambda raw: self.counted(read(parse_reply(raw)), body),
            body,
            is_trial=is_trial,
        )
        if isinstance(outcome, Failure):
            if not is_trial and (outcome.finish == "error" or outcome.status == 403) and outcome.status:
                await self._blame("refused all of", f", and that of the start: {outcome.detail}")
            return outcome
        self._trial = self._trial or (path, body, read)
        self.charge(outcome.usage)
        return outcome

    async def start_notes(self) -> list[str]:
        """What the replies of the start prove, for the user. If they bear a wholly different model's name, the trial
        request is asked again first: a gateway that has a name of its own for the model gives it always.
        """
        for _ in range(NAME_TRIALS):
            if self._names.adopted is not None and self._trial is not None:
                await self.post(*self._trial, is_trial=True)
        if self._names.adopted is not None:
            self._note(
                "adopted",
                f"The server at {self.at} answers as {self._names.adopted!r}, not as {self._args.served_model!r}: "
                "this is taken for its own name of that model.",
            )
        self._is_started = True
        return self.notes

    def counted(self, reply: Reply, body: Mapping[str, Any]) -> Reply:
        """A reply compared with what was asked, with its tokens: counted here where the server does not.

        Raises:
            OtherModelError: another model gave it, and such answers are refused.
        """
        reply = self._of_model(reply)
        usage = reply.usage
        prompt = body.get("prompt") or _text_of(body)
        if isinstance(prompt, str) and self._prompts.is_cut(prompt, usage.prompt):
            reply = self._cut(reply, len(prompt))
        if usage.prompt and (usage.output or not reply.text):
            return reply
        self.is_counting = True
        written = reply.token_ids if reply.token_ids is not None else reply.reasoning + reply.text
        prompt_tokens = usage.prompt or _num_tokens(prompt)
        output_tokens = usage.output or _num_tokens(written)
        return reply._replace(usage=Usage(prompt_tokens, usage.cached, output_tokens))

    def _of_model(self, reply: Reply) -> Reply:
        """The reply, flagged if another model gave it.

        Raises:
            OtherModelError: such answers are refused.
        """
        names = self._names
        adopted = names.adopted
        is_accepted = names.is_accepted(reply.model)
        if adopted is not None and names.adopted is None and self._is_started:
            self._note(
                "unadopted",
                f"The server at {self.at} now answers as {reply.model!r}, after {names.replies_as_adopted} answers as "
                f"{adopted!r}: those may be another model's. From here on such answers count as that.",
            )
        if is_accepted:
            if names.is_new_form(reply.model):
                self._note(
                    reply.model,
                    f"The server at {self.at} answers as {reply.model!r}, a form of {names.asked!r}.",
                )
            return reply
        if self._args.other_model == "flag":
            self._note(
                OTHER_MODEL,
                f"The server at {self.at} answers as another model, {reply.model!r} instead of {names.asked!r}: flag "
                f"`{OTHER_MODEL}`.",
            )
            return reply._replace(flags=(*reply.flags, OTHER_MODEL))
        self._note(
            OTHER_MODEL,
            f"The server at {self.at} answers as another model, {reply.model!r} instead of {names.asked!r}: such "
            "answers are not taken, and asked again. engine.args.other_model: flag takes them, with a flag.",
        )
        raise OtherModelError(
            f"the reply bears another model's name, {reply.model!r} instead of {names.asked!r}", reply.usage
        )

    def _cut(self, reply: Reply, num_chars: int) -> Reply:
        """What becomes of an answer to a prompt that the server cut."""
        count = reply.usage.prompt
        self._note(
            "cut",
            f"The server at {self.at} cuts long prompts: it counts {count} tokens of {num_chars} characters. Such rows "
            "are `overlong`. Give it more context (Ollama: num_ctx), or lower engine.max_prompt_tokens.",
        )
        why = f"the server read {count} tokens of a prompt of {num_chars} characters: it cut the rest"
        return reply._replace(text="", reasoning="", finish="overlong", detail=why)

    def _note(self, kind: str, message: str) -> None:
        """Tell the user something, each kind once."""
        if kind in self._noted:
            return
        self._noted.add(kind)
        if self._is_started:
            logger.warning("%s", message)
        else:
            self.notes.append(message)

    def charge(self, usage: Usage, part: float = 1.0) -> None:
        """Count a reply, at this part of the prices."""
        self.counts.update(prompt_tokens=usage.prompt, cached_tokens=usage.cached, output_tokens=usage.output)
        self.cost += price_of(self._args, usage.prompt, usage.output, part=part) or 0.0

    def doubt(self, body: dict[str, Any], part: float = 1.0) -> None:
        """Count a reply to a request that is lost: what the server charged for it can't be known. No prompt has more
        tokens than bytes; an answer without a limit is taken for 32,768.
        """
        limits = (body.get(name) for name in ("max_tokens", "max_completion_tokens"))
        prompt = len(content_of(body))
        output = next((one for one in limits if isinstance(one, int)), 32_768)
        self.lost = self.lost.plus(Charge(prompt + output, price_of(self._args, prompt, output, part=part) or 0.0))

    async def upload(self, name: str, text: str, read: Callable[[bytes], T]) -> T | Failure:
        """Send a file for batches; one that is sent twice costs nothing."""
        file = (name, text.encode("utf-8", "replace"), "application/jsonl")
        form = self._library.Request("POST", "http://server", data={"purpose": "batch"}, files={"file": file})
        return await self.send(
            "POST",
            "/files",
            read,
            form.read(),
            kind=form.headers["content-type"],
        )

    def judge(self, status: int, payload: Any) -> Failure | None:
        """What a batch's reply that is no answer means for its ask; None where another try may help.

        Raises:
            ServerGoneError: it says that the credit is used up, by a status or code of its own.
        """
        complaint = _complaint(self._without_key(json.dumps(payload).encode()))
        if status == 200 and not any(complaint):
            return None
        outcome = self._refused(status, complaint, is_trial=True)
        if outcome.suspicion is None:
            return outcome if isinstance(outcome, Failure) else None
        named = complaint.status if status == 200 else status
        if named in (401, 402) or complaint.is_of_credit:
            raise outcome.suspicion
        return None  # words alone

    async def send(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        content: dict[str, Any] | bytes | None = None,
        *,
        is_trial: bool = True,
        kind: str = "application/json",
    ) -> T | Failure:
        """Try a request until it is answered, or has failed for good.

        Args:
            content: a body, whose answer each try may be charged for; or bytes.
            is_trial: it holds no row: what it is refused for is never the row's.
            kind: of the content.
        """
        heard_before = self._num_heard
        tries: list[Unanswered] = []
        is_settled = False
        while True:
            outcome = await self._try(
                method,
                path,
                read,
                content,
                is_trial=is_trial,
                kind=kind,
            )
            suspicion = outcome.suspicion if isinstance(outcome, Failure | Unanswered) else None
            if suspicion is not None and not is_settled:
                if is_trial or self._trial is None:
                    raise suspicion
                await self._settle(suspicion)
                is_settled = True
            if not isinstance(outcome, Unanswered):
                return outcome
            if outcome.may_be_charged and isinstance(content, dict):
                self.doubt(content)
            tries.append(outcome)
            if len(tries) >= self._args.max_tries:
                break
            if outcome.wait_s > self._args.max_wait_s:
                raise self._wants_none(outcome.wait_s)
            self.counts["retries"] += 1
            bound = min(self._args.max_backoff_s, self._args.backoff_s * 2.0 ** (len(tries) - 1))
            await self.pause(outcome.wait_s + random.uniform(0.0, bound))
        self.counts["given_up"] += 1
        last = tries[-1].reason
        if not any(attempt.was_heard for attempt in tries) and self._num_heard == heard_before:
            raise ServerGoneError(
                f"no server answers at {self.at} (engine.args.base_url), after {len(tries)} tries: {last}. "
                "Start the server, or fix the address; the same command then continues."
            )
        await self._blame("answered none of", f", each tried {self._args.max_tries} times; the last time: {last}")
        forms = {attempt.malformed for attempt in tries}
        return Failure(
            "error",
            f"no usable reply in {len(tries)} tries; the last one: {last}",
            is_malformed=len(forms) == 1 and "" not in forms,
        )

    async def try_once(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        content: dict[str, Any] | bytes | None = None,
        *,
        kind: str = "application/json",
    ) -> T | Failure | Unanswered:
        """One request that holds no row."""
        outcome = await self._try(
            method,
            path,
            read,
            content,
            is_trial=True,
            kind=kind,
        )
        if isinstance(outcome, Failure | Unanswered) and outcome.suspicion is not None:
            raise outcome.suspicion
        return outcome

    async def _try(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        content: dict[str, Any] | bytes | None,
        *,
        is_trial: bool,
        kind: str,
    ) -> T | Failure | Unanswered:
        """One request. The errors of the HTTP library hold the request, and that the key: none is chained or shown."""
        library = self._library
        self.counts["http_requests"] += 1
        raw = content_of(content) if isinstance(content, dict) else content
        try:
            async with asyncio.timeout(self._args.timeout_s):  # httpx's own limit restarts with every byte
                reply = await self._request(method, path, raw, kind)
        except (TimeoutError, library.ReadTimeout, library.WriteTimeout):
            return Unanswered(f"no reply within {self._args.timeout_s:g} s", may_be_charged=True)
        except (library.ConnectError, library.ConnectTimeout) as exc:
            why = out_of_files(exc)
            if why is not None:
                raise StoreError(f"engine.args.concurrency is {self._args.concurrency}, and {why}") from None
            return Unanswered(f"no connection ({shown(str(exc)) or type(exc).__name__})", was_heard=False)
        except library.RequestError as exc:
            return Unanswered(f"the connection broke ({type(exc).__name__})", may_be_charged=True)
        self._num_heard += 1
        plain = self._without_key(reply.content)
        body = content if isinstance(content, dict) else {}
        if reply.status_code != 200:
            return self._refused(
                reply.status_code,
                _complaint(plain),
                body=body,
                wait_s=wait_of_headers(reply.headers),
                reset_s=reset_of_headers(reply.headers),
                is_trial=is_trial,
            )
        try:
            if method == "POST" and is_stream(plain, reply.headers.get("content-type", "")):
                plain = joined_stream(plain)
            found = read(plain)
        except OtherModelError as exc:
            self.charge(exc.usage)
            return Unanswered(str(exc))
        except StreamEndError as exc:
            return Unanswered(str(exc), may_be_charged=True)
        except StreamError as exc:
            return Unanswered(str(exc), may_be_charged=True, malformed=str(exc))
        except ReplyError as exc:
            complaint = _complaint(plain, otherwise=Complaint())
            if method == "POST" and any(complaint):
                return self._refused(200, complaint, body=body, is_trial=is_trial)
            return Unanswered(
                f"{exc} ({_words(plain) or 'it is empty'})",
                may_be_charged=True,
                malformed="" if isinstance(exc, CutOffError) else str(exc),
            )
        if method == "POST":  # some list their models to anybody
            self._failed_in_a_row = 0
        return found

    async def _request(self, method: str, path: str, content: bytes | None, kind: str) -> httpx.Response:
        """One request and its whole reply, by a client of its own, which is put back.

        httpx scans its whole pool at every request: one client with 64 connections took 6 ms of CPU a request, 64
        clients with one each take 1 ms (2026-11-20).
        """
        timeout_s = self._args.timeout_s
        library = self._library
        if not self._free:
            # trust_env is off: the environment (proxies, .netrc with other credentials) is not this folder's to read.
            # Redirects stay off, as httpx has them: they would carry the key elsewhere.
            key = {"authorization": f"Bearer {self._key}"} if self._key else {}
            client = library.AsyncClient(
                headers={"accept-encoding": "gzip", **key},
                timeout=library.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
                limits=library.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=20.0),
                trust_env=False,
                verify=self._certificates,
            )
            self._clients.append(client)
            self._free.append(client)
        client = self._free.pop()
        try:
            headers = {"content-type": kind} if content is not None else {}
            url = self._args.base_url.rstrip("/") + path
            return await client.request(method, url, content=content, headers=headers)
        finally:
            self._free.append(client)

    async def _blame(self, did: str, why: str) -> None:
        """Count a request without a usable answer, and end the run if the server, rather than single rows, is the
        cause.

        Args:
            did: the server, of the last requests.
        """
        self._failed_in_a_row += 1
        number = self._failed_in_a_row
        if number < max(FAILED_IN_A_ROW, 2 * self._args.concurrency):
            return
        self._failed_in_a_row = 0
        await self._settle(
            ServerGoneError(
                f"the server at {self.at} {did} the last {number} requests{why}. Fix the server; the same command "
                "then continues."
            )
        )

    async def _settle(self, suspicion: RelabelError) -> None:
        """Ask the trial request again: if it is not answered, the run ends; else the rows are the reason.

        Raises:
            RelabelError: what the trial request is refused for, or the suspicion.
        """
        num_answered = self._num_trials_answered
        async with self._trial_lock:
            if self._end is not None:
                raise self._end
            if self._num_trials_answered > num_answered:  # another row's suspicion was settled in the meantime
                return
            try:
                is_answered = self._trial is not None and await self._is_answered(*self._trial)
            except RelabelError as exc:
                self._end = exc
                raise
            if not is_answered:
                self._end = suspicion
                raise suspicion
            self._num_trials_answered += 1

    async def _is_answered(self, path: str, body: dict[str, Any], read: Callable[[Any], Reply]) -> bool:
        """Whether the trial request is, in as many tries as any.

        Raises:
            RelabelError: it is refused in a way that ends the run.
        """
        for number in range(self._args.max_tries):
            outcome = await self._try(
                "POST",
                path,
                lambda raw: self.counted(read(parse_reply(raw)), body),
                body,
                is_trial=False,
                kind="application/json",
            )
            if isinstance(outcome, Reply):
                self.charge(outcome.usage)
                return True
            if outcome.suspicion is not None:
                raise outcome.suspicion
            if isinstance(outcome, Failure):
                return False
            if outcome.may_be_charged:
                self.doubt(body)
            if outcome.wait_s > self._args.max_wait_s:
                raise self._wants_none(outcome.wait_s)
            bound = min(self._args.max_backoff_s, self._args.backoff_s * 2.0**number)
            await self.pause(outcome.wait_s + random.uniform(0.0, bound))
        return False

    def _refused(
        self,
        status: int,
        complaint: Complaint,
        *,
        is_trial: bool,
        body: Mapping[str, Any] = MappingProxyType({}),
        wait_s: float = 0.0,
        reset_s: float = 0.0,
    ) -> Failure | Unanswered:
        """What a reply that is no answer means: the row's fate, another try, or perhaps the run's end (`suspicion`).

        Args:
            body: of the request.
            wait_s: how long the headers want us to wait.
            reset_s: when they say that a limit is reset, if nothing demands a wait.
        """
        report = f"HTTP {status}" + (f": {shown(complaint.message)}" if complaint.message else "")
        status = complaint.status if status == 200 else status
        wait_s = wait_s or complaint.delay_s
        subject = _subject(complaint, status, body, may_pass=wait_s > 0 or complaint.wait_s > 0)
        status = 500 if status == 200 else status  # an error that names no status
        is_busy = status in BUSY or (status >= 500 and status != 501) or (subject == "busy" and status in (400, 403))
        if subject == "credit":
            no_credit = ServerGoneError(
                f"the server at {self.at} says that the credit or quota is used up ({report}). Raise it there; the "
                "same command then continues with the rows that are open."
            )
            if is_busy or status == 402:
                return Unanswered(report, wait_s, suspicion=no_credit)
            return Failure("error", f"the server refused the request ({report})", status, no_credit)
        if subject == "overlong":
            return Failure("overlong", f"the server finds the prompt too long ({report})", status)
        if is_busy:
            return self._busy(
                status,
                complaint,
                report,
                wait_s,
                reset_s,
            )
        if subject == "filter" and status != 401:
            return Failure("refused", f"the server's content filter refused the request ({report})", status)
        if status == 401 or (status == 403 and (self._trial is None or not is_trial)):
            return self._key_refused(status, complaint, report)
        if status == 403:
            return Failure("refused", f"the server refused the request ({report})", status)
        detail = f"the server refused the request ({report})"
        if status == 404 and not is_trial:
            lists = f"; it lists {self.names}" if self.listed else ""
            unknown = ModelError(
                f"the server at {self.at} knows no model {self._args.served_model!r}, or no such path ({report})"
                f"{lists}. Check engine.args.served_model, and engine.args.base_url, which ends in /v1 at most servers."
            )
            return Failure("error", detail, status, unknown)
        if 300 <= status < 400:
            elsewhere = ModelError(
                f"the server at {self.at} sends us elsewhere (HTTP {status}); write that address into "
                "engine.args.base_url."
            )
            return Failure("error", detail, status, elsewhere)
        return Failure("error", detail, status)

    def _busy(self, status: int, complaint: Complaint, report: str, wait_s: float, reset_s: float) -> Unanswered:
        """A try to be repeated. A wait that is in words counts where the status speaks of a wait, and ends no run
        by itself.
        """
        if wait_s > 0 or status not in WAITS:
            return Unanswered(report, wait_s)
        words_s = complaint.wait_s
        if words_s > self._args.max_wait_s:
            return Unanswered(report, suspicion=self._wants_none(words_s))
        if words_s == 0 and reset_s <= self._args.max_wait_s:
            words_s = reset_s
        return Unanswered(report, words_s)

    def _key_refused(self, status: int, complaint: Complaint, report: str) -> Failure:
        """A refusal for the key, unless the trial request is answered: then moderation of the row, at some providers,
        where it does not speak of a key.
        """
        variable = self._args.api_key_env
        have = f"the key in {variable}" if self._key else f"requests without a key ({variable} is not set)"
        # of a key that is not accepted the server's own words stay out: some repeat a part of it
        why = report if status == 403 else f"HTTP {status}"
        suspicion: RelabelError
        if self._trial is None:
            suspicion = ModelError(
                f"the server at {self.at} refuses {have} ({why}). Put a valid key into that variable, or name "
                "another in api_key_env."
            )
        else:
            suspicion = ServerGoneError(
                f"the server at {self.at} now refuses {have}, and the request of the start too ({why}). Have it "
                "opened again, or put another key into that variable; the same command then continues."
            )
        is_moderation = status == 403 and not complaint.is_of_key
        return Failure(
            "refused" if is_moderation else "error",
            f"the server refused the request ({why})",
            status,
            suspicion,
        )

    def _wants_none(self, wait_s: float) -> ServerGoneError:
        return ServerGoneError(
            f"the server at {self.at} wants no request for {wait_s:.0f} s, more than engine.args.max_wait_s = "
            f"{self._args.max_wait_s:g}. Run the same command again then; what is committed stays."
        )

    def _without_key(self, raw: bytes) -> bytes:
        """A server that repeats our key is not quoted."""
        return raw.replace(self._key.encode(), b"***") if self._key is not None and len(self._key) > 3 else raw


def _model_names(payload: Any) -> dict[str, dict[str, Any]]:
    """What `/models` lists, by name; nothing if it has another form."""
    data = payload.get("data") if isinstance(payload, dict) else None
    models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
    return {model["id"]: model for model in models if isinstance(model.get("id"), str)}


def _subject(complaint: Complaint, status: int, body: Mapping[str, Any], *, may_pass: bool) -> Subject:
    """What a complaint is about by the server's own words, without those of the prompt that it repeats."""
    subject = complaint.subject(status, may_pass=may_pass)
    if not subject or not complaint.message:
        return subject
    own = complaint.without_echo(_text_of(body))
    return subject if own == complaint else own.subject(status, may_pass=may_pass)


def _text_of(body: Mapping[str, Any]) -> str:
    """A request's prompt, as far as it is text."""
    prompt = body.get("prompt")
    if prompt is not None:
        return prompt if isinstance(prompt, str) else ""
    return "".join(turn["content"] for turn in body.get("messages", ()))


def _num_tokens(text: str | list[int]) -> int:
    """Tokens of a text, about; of ids, their number."""
    return len(text) if isinstance(text, list) else -(-len(text.encode("utf-8", "replace")) // CHARS_PER_TOKEN)


def _complaint(plain: bytes, otherwise: Complaint | None = None) -> Complaint:
    """What an error says, as far as it can be read: of JSON; of anything else its text, where nothing is given."""
    try:
        return read_complaint(parse_reply(plain))
    except ReplyError:
        return otherwise if otherwise is not None else Complaint(message=_words(plain))


def _words(raw: bytes) -> str:
    """What a reply says without the marks of a page."""
    return shown(re.sub(r"(?is)<(script|style).*?</\1>|<[^>]*>", " ", raw[: 64 << 10].decode("utf-8", "replace")))


def content_of(body: dict[str, Any]) -> bytes:
    """A request's body as it is sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
