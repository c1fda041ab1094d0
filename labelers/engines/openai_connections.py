"""Options of the openai engine and the HTTP connections to its server. Only this module sends the key."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, SecretStr, model_validator

from relabel.manifests.errors import ConfigError
from relabel.manifests.process import require
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText

if TYPE_CHECKING:
    import httpx

# ------------------------------------------------------------------------------
# Options of the openai engine, and what they say about the server: its address, its key, what identifies it.
#
# A key is named here, never held: `api_key_env` is the name of an environment variable, and `jobs` hands its value to
# the engine apart from the spec. Messages of this file show neither a key nor an address that may hold a password.


KEY_OPTION = "api_key_env"
"""The option that names the variable with the key, and the key's name among an engine's secrets."""

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_KEY = re.compile(r"[!-~]+")


class OpenAiArgs(EngineArgs):
    """Options of the openai engine."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {
            "base_url",
            KEY_OPTION,
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
    secret_variables: ClassVar[frozenset[str]] = frozenset({KEY_OPTION})
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
    if _VARIABLE.fullmatch(args.api_key_env) is None:
        raise ConfigError(
            "engine.args.api_key_env: want the name of an environment variable (A-Z, 0-9, _), such as OPENAI_API_KEY. "
            "The value is not shown, since it may be the key itself."
        )
    _address(args)
    return args


def identity(args: OpenAiArgs) -> str:
    """What names the server's model whatever host serves it: the address's path and the served name."""
    return f"{_address(args).path.rstrip('/')} {args.served_model}"


def key_of(args: OpenAiArgs, secrets: Mapping[str, SecretStr]) -> str | None:
    """The key to send, or None.

    Raises:
        ConfigError: a variable was named and is not set, or what it holds can't be sent in a header.
    """
    secret = secrets.get(KEY_OPTION)
    key = secret.get_secret_value().strip() if secret is not None else ""
    if not key:
        if args.api_key_env != OpenAiArgs.model_fields[KEY_OPTION].default:  # a worker's spec sets all fields
            raise ConfigError(
                f"engine.args.api_key_env: the variable {args.api_key_env} is not set; set it to the server's key."
            )
        return None
    if _KEY.fullmatch(key) is None:  # the HTTP library would show it in its error
        raise ConfigError(
            f"the variable {args.api_key_env} holds white space or characters beyond ASCII; a key has neither."
        )
    return key


def server_address(url: str, *, key: str, secrets_go: str = "leave them out.") -> SplitResult:
    """The parts of a server's address.

    Args:
        key: of the spec, for messages.
        secrets_go: what to do with a user, password or query.
    Raises:
        ConfigError: it is no http address, or has those.
    """
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_fine = False
    if not is_fine:
        raise ConfigError(f"{key}: want an address such as http://127.0.0.1:8000/v1 or https://api.openai.com/v1.")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{key}: want scheme, host, port and path alone. A user, password or query in it would be stored; "
            f"{secrets_go}"
        )
    return parts


def _address(args: OpenAiArgs) -> SplitResult:
    return server_address(
        args.base_url,
        key="engine.args.base_url",
        secrets_go="put the key into the variable that engine.args.api_key_env names.",
    )


# ------------------------------------------------------------------------------
# How many tokens an answer may have.


TOKENS_UNLIMITED = 32_768
"""An answer's tokens where `extra_body` takes the limit away."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Fields of a request that hold it."""


def most_output(body: Mapping[str, Any]) -> int:
    """Most tokens that the answer to a request can have."""
    return next(
        (body[name] for name in LIMITS if isinstance(body.get(name), int)),
        TOKENS_UNLIMITED,
    )


# ------------------------------------------------------------------------------
# Connections to one server, one for each request in flight; the only place that sends the key.
#
# httpx scans its whole pool at every request: one client with 64 connections took 6 ms of CPU a request, 64
# clients with one each take 1 ms (2026-11-20). So a request takes a client of its own, and puts it back.


CONNECT_S = 10.0
"""Longest wait for a connection."""


class Connections:
    """Clients, made as they are needed.

    trust_env is off: the environment (proxies, .netrc with other credentials) is not this folder's to read. Redirects
    stay off, as httpx has them: they would carry the key elsewhere.

    Args:
        key: sent as a bearer token; None sends none.
    """

    def __init__(self, args: OpenAiArgs, key: str | None) -> None:
        self._library = library = require("httpx", extra="openai", purpose="The openai engine")
        self._base = args.base_url.rstrip("/")
        self._headers = {"accept-encoding": "gzip", **({"authorization": f"Bearer {key}"} if key else {})}
        self._timeout = library.Timeout(args.timeout_s, connect=min(CONNECT_S, args.timeout_s))
        self._certificates: ssl.SSLContext | None = None
        if self._base.startswith("https:"):  # 0.1 s to read them, so only where there is a connection to prove
            self._certificates = library.create_ssl_context(trust_env=False)
            self._certificates.load_default_certs()  # the machine's own and the library's
        self._free: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        kind: str = "application/json",
    ) -> httpx.Response:
        """One request and its whole reply.

        Args:
            kind: of the content.
        Raises:
            httpx.RequestError: as it comes. It holds the request, and that the key: not to be chained.
        """
        client = self._free.pop() if self._free else self._open()
        try:
            headers = {"content-type": kind} if content is not None else {}
            return await client.request(method, self._base + path, content=content, headers=headers)
        finally:
            self._free.append(client)

    async def close(self) -> None:
        """Close every client."""
        for client in self._all:
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        limits = self._library.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=20.0)
        verify = self._certificates if self._certificates is not None else False
        client: httpx.AsyncClient = self._library.AsyncClient(
            headers=self._headers, timeout=self._timeout, limits=limits, trust_env=False, verify=verify
        )
        self._all.append(client)
        return client
