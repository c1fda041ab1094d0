"""The openai engine's side of HTTP: its options, what a server replies and complains of, what that costs, and a client
with bounded concurrency and retries. Only this module sends the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, NamedTuple, NoReturn, TypeVar
from urllib.parse import SplitResult, urlsplit

import pydantic_core
from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator

from relabel.manifests.asks import Charge, Finish
from relabel.manifests.errors import ConfigError, ModelError, ServerGoneError, StoreError
from relabel.manifests.files import out_of_files
from relabel.manifests.process import require
from relabel.manifests.secrets import redacted
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText, price_of

if TYPE_CHECKING:
    import httpx

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
    """A `Retry-After` beyond this many seconds ends the run, to be continued later (exit 20)."""
    price_per_million_input: float | None = Field(None, ge=0)
    """Price of a million prompt tokens, in any currency; cached ones count in full."""
    price_per_million_output: float | None = Field(None, ge=0)
    """Price of a million output tokens."""
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
# What a server says of a request that it did not answer, and what that is about: the row, the key, or money.
#
# Servers agree neither on status nor on form nor on words, and proxies change all three. So an error is read wherever
# it may be, and its codes and words are matched with what they are about (a prompt and too much of it), not against a
# list of servers.


_CREDIT = re.compile(
    r"insufficient (?:\w+ )?(?:quota|balance|credit|fund)|(?:quota|balance|credits?) (?:\w+ )?(?:exhausted|depleted)"
    r"|(?:balance|credits?) (?:\w+ ){0,2}(?:too low|insufficient|not enough|used up)|(?:out of|more|enough) credits?\b"
    r"|(?:credit|spend|spending|budget|billing hard) limit|(?:exceeded|reached|used|exhausted) (?:\w+ ){0,5}"
    r"(?:credits?|budget)\b|budget (?:has been )?exceeded|payment (?:is )?required|billing (?:error|not active|details)"
    r"|(?:enable|requires?|check your) (?:plan and )?billing|exceeded (?:your )?current quota|recharge|top up|arrear"
    r"|past invoices"
)
_FILTER = re.compile(
    r"content (?:filter|policy|management policy|exists risk)|moderation|guardrail|usage polic|inspection failed"
    r"|prohibited content|inappropriate content|flagged by|sensitive (?:content|word)"
)
_LONG = re.compile(r"\b(?:context|prompts?|inputs?|tokens?|messages?|sequence|model length|string|max seq len)\b")
_TOO = re.compile(
    r"exceed|too (?:long|large|many|big)\b|(?:longer|greater|larger|bigger|more|higher|less) than|overflow|beyond"
    r"|maximum (?:context|model|prompt|input|sequence)|must be (?:<|at most)|up to \d|reduce the (?:length|size|prompt)"
    r"|(?:not|n ?t) fit|length should be|above (?:the|max)"
)
_LIMIT_ALONE = re.compile(r"input should be|max (?:new |completion |output )?tokens|(?:completion|output) tokens")
"""Of the answer's limit, which is a setting, and no row's."""
_NO_ROOM = re.compile(r"\btokens\b.*?[ (=]-\d")
"""The room for the answer that a prompt leaves, less than none."""
_OTHERWISE = re.compile(
    r"rate limit|per (?:min|hour|day|sec|month)|\b[tr]p[md]\b|quota|queue|concurren|deadline|timed? ?out|memory"
    r"|requests|daily|hourly|weekly|monthly|today|\bfree\b|\b(?:plan|account|tier)\b"
)
_BUSY = re.compile(
    r"rate ?limit|too many requests|throttl|resource ?exhausted|overload|capacity|\bbusy\b|unavailable|\bloading\b"
)
_STATUSES = (
    (_BUSY, 429),
    (re.compile(r"unauthori|authentication|api key|permission"), 401),
    (re.compile(r"not found|not exist|unknown model"), 404),
    (re.compile(r"invalid|bad request|validation|unsupported|not supported"), 400),
)
_WAIT = re.compile(r"(?:again|retry|wait) (?:in |after |for )?(?:about )?(\d+(?:\.\d+)?) ?(ms|s|m)")
_WORDS = frozenset(
    {"message", "detail", "msg", "error_description", "status_msg", "reason", "loc"}  # `loc` is FastAPI's
    | {"error", "errors", "base_resp", "data", "metadata", "raw"}
)
_CODES = frozenset({"code", "type", "status", "error_type", "error_code", "status_code"})


class Complaint(NamedTuple):
    """What a server says about a request that it did not answer: its codes and kinds, and its words in one line."""

    codes: tuple[str, ...] = ()
    message: str = ""

    @property
    def wait_s(self) -> float:
        """Seconds after which to ask again, where the message says so; 0 where it does not."""
        found = _WAIT.search(self.message.lower())
        return float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[found[2]] if found else 0.0

    @property
    def status(self) -> int:
        """The HTTP status of its codes, of an error that came as a good reply; 500 where they name none."""
        named = (int(code) for code in self.codes if re.fullmatch("[45][0-9]{2}", code))
        return next(named, next((status for words, status in _STATUSES if words.search(self._plain)), 500))

    def subject(self, status: int, *, may_pass: bool = False) -> Literal["credit", "filter", "overlong", "busy", ""]:
        """What it is about; nothing where that is not known.

        Args:
            status: HTTP's.
            may_pass: the server says when to ask again: then no money has ended.
        """
        plain = self._plain
        may_pass = may_pass and status == 429 and "insufficient" not in plain
        if status == 402 or (_CREDIT.search(plain) and not may_pass):
            return "credit"
        about = _LIMIT_ALONE.sub(" ", plain)
        is_long = _LONG.search(about) and _TOO.search(about) and not _OTHERWISE.search(about)
        is_large = status == 413 or "request too large" in plain
        if is_large or (status not in (401, 403, 429) and (is_long or _NO_ROOM.search(plain))):
            return "overlong"
        if status < 500 and _FILTER.search(plain):
            return "filter"
        return "busy" if _BUSY.search(plain) else ""

    @property
    def _plain(self) -> str:
        apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", " ".join((*self.codes, self.message)))
        return re.sub(r"[_`'\"\s]+", " ", apart).lower()


def read_complaint(payload: Any) -> Complaint:
    """Codes and words of an error, wherever a server puts them; neither where there are none."""
    said = dict.fromkeys((kind, text) for kind, text in _said(payload) if text.strip())
    codes = [shown(text) for kind, text in said if kind == "code"]
    return Complaint(tuple(codes[:4]), shown(": ".join([text for kind, text in said if kind == "message"]), 1_000))


def _said(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield "message", value
    elif isinstance(value, list):
        for one in value[:4]:
            yield from _said(one)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name in _CODES and isinstance(inner, str | int) and not isinstance(inner, bool):
                yield "code", str(inner)
            elif name == "choices" and isinstance(inner, list):  # what they hold besides is an answer
                yield from _said([one.get("error") for one in inner if isinstance(one, dict)])
            elif name in _WORDS:
                yield from _said(inner)


def shown(text: str, most: int = 200) -> str:
    """A server's words in one short line without control characters."""
    plain = redacted(text[: 64 * most])  # a server may echo the key; before a part is taken, which would go unnoticed
    line = " ".join("".join(c if c.isprintable() else " " for c in plain).split())
    return line if len(line) <= most else line[: most - 1] + "…"


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


class ReplyError(ValueError):
    """A reply without the API's form. Caught by the client, which asks again."""


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
        choice.text,
        finish,
        _usage(found.usage),
        choice.token_ids,
        choice.prompt_token_ids,
        logprobs,
        detail,
        flags=flags,
    )


def read_chat(payload: Any) -> Reply:
    """The one choice of `/chat/completions`. A refusal is `refused`, whatever its text says.

    Raises:
        ReplyError: the payload has not the form of a chat completion.
    """
    found = validated(_Choices[_ChatChoice], payload)
    usage, message = _usage(found.usage), found.choices[0].message
    content, refusal = message.get("content"), message.get("refusal")
    if not isinstance(refusal, str | None):
        raise ReplyError("the message's `refusal` is not text")
    text, *thoughts = _parts_of("" if content is None else content)
    thoughts += ("".join(_parts_of(message[name])) for name in THOUGHTS if message.get(name) is not None)
    reasoning = next((thought for thought in thoughts if thought.strip()), "")
    raw = json.dumps(message, ensure_ascii=False) if reasoning or text != (content or "") or refusal else ""
    if refusal:
        return Reply("", "refused", usage, detail=f"the model declined: {shown(refusal)}", raw=raw)
    finish, detail, flags = _finish(found.choices[0].finish_reason, text + reasoning)
    if reasoning and not text.strip() and finish == "stop":
        detail = detail or "the reply holds the model's thought and no answer"
    return Reply(text, finish, usage, detail=detail, reasoning=reasoning, raw=raw, flags=flags)


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
        raise ReplyError(f"the answer was cut off (finish_reason {shown(lowered) or 'absent'})")
    if not reason:
        return "length", "the answer came without finish_reason", (UNKNOWN_FINISH,)
    why = f"the answer ended with finish_reason {shown(reason)!r}"
    return ("stop", why, (UNKNOWN_FINISH,)) if text.strip() else ("error", why, ())


def _usage(usage: Any) -> Usage:
    held = usage if isinstance(usage, dict) else {}
    details = held.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    counts = (held.get("prompt_tokens"), cached, held.get("completion_tokens"))
    return Usage(*(one if type(one) is int and 0 <= one <= MAX_COUNT else 0 for one in counts))


# ------------------------------------------------------------------------------
# What a run has asked of a server so far: requests, tries, tokens as the server counted them, money.


CHARS_PER_TOKEN = 4
"""Bytes of UTF-8, where neither the server nor a tokenizer counts tokens."""


# ------------------------------------------------------------------------------
# The client. A request is tried again after 408, 425, 429 and 5xx, time-outs, broken connections and replies without
# the API's form. Between tries it waits a random time below an exponential bound (full jitter), and no less than the
# server wants. What another try can't help is the row's fate (`Failure`) where the row may be the reason, and the run's
# where it can't be: no server, the key is refused, the model is unknown, the credit is used up. An error may come as
# HTTP 200: it is handled by its own code.
#
# Not stamina: what decides here is whether a try may have been charged, how long the server wants us to wait, whether
# any server was there, and when to end the run. Of a retry library that would leave the loop of `send` alone.


T = TypeVar("T")

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
    """

    finish: Finish
    detail: str
    status: int = 0

    def raise_at_start(self, stage: str, *, at: str) -> NoReturn:
        """End the start of an engine whose server does not answer a labeler's stage.

        Args:
            at: the server's address.
        Raises:
            ModelError: it refuses such requests.
            ServerGoneError: it does not answer.
        """
        if self.status == 0:
            raise ServerGoneError(
                f"the server at {at} is not ready: stage {stage!r}: {self.detail}. The same command may work later."
            )
        raise ModelError(
            f"the server at {at} does not take stage {stage!r}: {self.detail}. engine.args.extra_body: {{FIELD: null}} "
            "leaves a field out that it does not know, engine.args.max_tokens_field names the answer's limit."
        )


class Unanswered(NamedTuple):
    """A try that may be repeated: why it failed, how long the server wants us to wait, whether anybody was there, and
    whether an answer may have been charged that did not reach us.
    """

    reason: str
    wait_s: float = 0.0
    was_heard: bool = True
    may_be_charged: bool = False


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
        self._args, self._key = args, key
        self.at = shown(args.base_url)
        """The server's address, as messages name it."""
        self._accepted: tuple[str, dict[str, Any], Callable[[Any], Reply]] | None = None
        """The first request that was answered, to find out whether such still are."""
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
        elif found.status == 0:
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
        found = await self.send("POST", path, lambda raw: read(parse_reply(raw)), body, is_trial=is_trial)
        if isinstance(found, Failure):
            if not is_trial and (found.finish == "error" or found.status == 403) and found.status:
                await self._blame("refused all of", f", and that of the start: {found.detail}")
            return found
        self._accepted = self._accepted or (path, body, read)
        found = self.counted(found, body)
        self.charge(found.usage)
        return found

    def counted(self, found: Reply, body: Mapping[str, Any]) -> Reply:
        """A reply with its tokens, counted here where the server does not."""
        usage = found.usage
        if usage.prompt and (usage.output or not found.text):
            return found
        self.is_counting = True
        prompt = body.get("prompt") or "".join(turn["content"] for turn in body.get("messages", ()))
        ids = found.token_ids if found.token_ids is not None else found.reasoning + found.text
        sizes = [
            len(one) if isinstance(one, list) else -(-len(one.encode("utf-8", "replace")) // CHARS_PER_TOKEN)
            for one in (prompt, ids)
        ]
        return found._replace(usage=Usage(usage.prompt or sizes[0], usage.cached, usage.output or sizes[1]))

    def charge(self, usage: Usage, part: float = 1.0) -> None:
        """Count a reply, at this part of the prices."""
        self.counts.update(prompt_tokens=usage.prompt, cached_tokens=usage.cached, output_tokens=usage.output)
        self.cost += price_of(self._args, usage.prompt, usage.output, part=part) or 0.0

    def doubt(self, body: dict[str, Any], part: float = 1.0) -> None:
        """Count a reply to a request that is lost: what the server charged for it can't be known. No prompt has more
        tokens than bytes; an answer without a limit is taken for 32,768.
        """
        limits = (body.get(name) for name in ("max_tokens", "max_completion_tokens"))
        prompt, output = len(content_of(body)), next((one for one in limits if isinstance(one, int)), 32_768)
        self.lost = self.lost.plus(Charge(prompt + output, price_of(self._args, prompt, output, part=part) or 0.0))

    async def upload(self, name: str, text: str, read: Callable[[bytes], T]) -> T | Failure:
        """Send a file for batches; one that is sent twice costs nothing."""
        file = (name, text.encode("utf-8", "replace"), "application/jsonl")
        form = self._library.Request("POST", "http://server", data={"purpose": "batch"}, files={"file": file})
        return await self.send("POST", "/files", read, form.read(), kind=form.headers["content-type"])

    def judge(self, status: int, payload: Any) -> Failure | None:
        """What a batch's reply that is no answer means for its ask; None where another try may help.

        Raises:
            ServerGoneError: it says that the credit is used up.
        """
        complaint = _complaint(self._without_key(json.dumps(payload).encode()))
        if status == 200 and not any(complaint):
            return None
        found = self._refused(status, complaint, is_trial=True)
        return found if isinstance(found, Failure) else None

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
            kind: of the content.
        """
        heard_before = self._num_heard
        tries: list[Unanswered] = []
        while True:
            outcome = await self.try_once(method, path, read, content, is_trial=is_trial, kind=kind)
            if not isinstance(outcome, Unanswered):
                return outcome
            if outcome.may_be_charged and isinstance(content, dict):
                self.doubt(content)
            tries.append(outcome)
            if len(tries) >= self._args.max_tries:
                break
            if outcome.wait_s > self._args.max_wait_s:
                raise ServerGoneError(
                    f"the server at {self.at} wants no request for {outcome.wait_s:.0f} s, more than "
                    f"engine.args.max_wait_s = {self._args.max_wait_s:g}. Run the same command again then; what is "
                    "committed stays."
                )
            self.counts["retries"] += 1
            bound = min(self._args.max_backoff_s, self._args.backoff_s * 2.0 ** (len(tries) - 1))
            await self.pause(outcome.wait_s + random.uniform(0.0, bound))
        self.counts["given_up"] += 1
        last = tries[-1].reason
        if not any(one.was_heard for one in tries) and self._num_heard == heard_before:
            raise ServerGoneError(
                f"no server answers at {self.at} (engine.args.base_url), after {len(tries)} tries: {last}. "
                "Start the server, or fix the address; the same command then continues."
            )
        await self._blame("answered none of", f", each tried {self._args.max_tries} times; the last time: {last}")
        return Failure("error", f"no usable reply in {len(tries)} tries; the last one: {last}")

    async def try_once(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        content: dict[str, Any] | bytes | None = None,
        *,
        is_trial: bool = True,
        kind: str = "application/json",
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
            if (why := out_of_files(exc)) is not None:
                raise StoreError(f"engine.args.concurrency is {self._args.concurrency}, and {why}") from None
            return Unanswered(f"no connection ({shown(str(exc)) or type(exc).__name__})", was_heard=False)
        except library.RequestError as exc:
            return Unanswered(f"the connection broke ({type(exc).__name__})", may_be_charged=True)
        self._num_heard += 1
        plain = self._without_key(reply.content)
        if reply.status_code != 200:
            return self._refused(
                reply.status_code,
                _complaint(plain),
                _wanted_wait(reply.headers.get("retry-after", "")),
                is_trial=is_trial,
            )
        try:
            found = read(plain)
        except ReplyError as exc:
            complaint = _complaint(plain, otherwise=Complaint())
            if method == "POST" and any(complaint):
                return self._refused(200, complaint, is_trial=is_trial)
            return Unanswered(f"{exc} ({_words(plain) or 'it is empty'})", may_be_charged=True)
        if method == "POST":  # some list their models to anybody
            self._failed_in_a_row = 0
        return found

    async def _request(self, method: str, path: str, content: bytes | None, kind: str) -> httpx.Response:
        """One request and its whole reply, by a client of its own, which is put back.

        httpx scans its whole pool at every request: one client with 64 connections took 6 ms of CPU a request, 64
        clients with one each take 1 ms (2026-11-20).
        """
        timeout_s, library = self._args.timeout_s, self._library
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
        if self._accepted is None or isinstance(await self.post(*self._accepted, is_trial=True), Failure):
            raise ServerGoneError(
                f"the server at {self.at} {did} the last {number} requests{why}. Fix the server; the same command "
                "then continues."
            )

    def _refused(
        self, status: int, complaint: Complaint, wait_s: float = 0.0, *, is_trial: bool
    ) -> Failure | Unanswered:
        """What a reply that is no answer means: the row's fate, or another try.

        Raises:
            ServerGoneError, ModelError: the run's fate.
        """
        said = f"HTTP {status}" + (f": {shown(complaint.message)}" if complaint.message else "")
        status = complaint.status if status == 200 else status
        wait_s = wait_s or complaint.wait_s
        subject = complaint.subject(status, may_pass=wait_s > 0)
        if subject == "credit":
            raise ServerGoneError(
                f"the server at {self.at} says that the credit or quota is used up ({said}). Raise it there; the same "
                "command then continues with the rows that are open."
            )
        if subject == "overlong":
            return Failure("overlong", f"the server finds the prompt too long ({said})", status)
        if (
            status in (408, 425, 429, 498)
            or (status >= 500 and status != 501)
            or (subject == "busy" and status in (400, 403))
        ):
            return Unanswered(said, wait_s)
        if status == 401 or (status == 403 and self._accepted is None):
            variable = self._args.api_key_env
            have = f"the key in {variable}" if self._key else f"no key ({variable} is not set)"
            # of a key that is not accepted the server's own words stay out: some repeat a part of it
            why = said if status == 403 else f"HTTP {status}"
            raise ModelError(
                f"the server at {self.at} refuses {have} ({why}). Put a valid key into that variable, or name "
                "another in api_key_env."
            )
        if status == 403 or subject == "filter":  # moderation, at some providers
            who = "the server's content filter" if subject == "filter" else "the server"
            return Failure("refused", f"{who} refused the request ({said})", status)
        if status == 404 and not is_trial:
            raise ModelError(
                f"the server at {self.at} knows no model {self._args.served_model!r}, or no such path ({said})"
                f"{f'; it lists {self.names}' if self.listed else ''}. Check engine.args.served_model, and "
                "engine.args.base_url, which ends in /v1 at most servers."
            )
        if 300 <= status < 400:
            raise ModelError(
                f"the server at {self.at} sends us elsewhere (HTTP {status}); write that address into "
                "engine.args.base_url."
            )
        return Failure("error", f"the server refused the request ({said})", status)

    def _without_key(self, raw: bytes) -> bytes:
        """A server that repeats our key is not quoted."""
        return raw.replace(self._key.encode(), b"***") if self._key is not None and len(self._key) > 3 else raw


def _model_names(payload: Any) -> dict[str, dict[str, Any]]:
    """What `/models` lists, by name; nothing if it has another form."""
    data = payload.get("data") if isinstance(payload, dict) else None
    models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
    return {model["id"]: model for model in models if isinstance(model.get("id"), str)}


def _complaint(plain: bytes, otherwise: Complaint | None = None) -> Complaint:
    """What an error says, as far as it can be read: of JSON; of anything else its text, where nothing is given."""
    try:
        return read_complaint(parse_reply(plain))
    except ReplyError:
        return otherwise if otherwise is not None else Complaint(message=_words(plain))


def _words(raw: bytes) -> str:
    """What a reply says without the marks of a page."""
    return shown(re.sub(r"(?is)<(script|style).*?</\1>|<[^>]*>", " ", raw[: 64 << 10].decode("utf-8", "replace")))


def _wanted_wait(text: str) -> float:
    """Seconds that `Retry-After` asks for: a number, or a date; 0 where it says nothing readable."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def content_of(body: dict[str, Any]) -> bytes:
    """A request's body as it is sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
