"""Options of the openai engine, and the key and address that they name.

A key is named here, never held: `api_key_env` is the name of an environment variable, and `jobs` hands its value to the
engine apart from the spec. Messages show neither a key nor an address that may hold a password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, SecretStr, model_validator

from relabel.manifests.errors import ConfigError
from relabel.manifests.specs import EngineArgs, EngineSpec, PathText


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
    runs_elsewhere: ClassVar[bool] = True

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
