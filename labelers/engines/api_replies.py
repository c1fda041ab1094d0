"""What a server replied, read strictly: a reply that is not of the API's form is no answer, and is never mended into one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from labelers.engines.api_costs import Usage
from manifests.asks import Finish

_STOPS = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})
_LENGTHS = frozenset({"length", "max_tokens"})
_TOKEN_KEY = "token_id:"
_SHOWN_CHARS = 200

_TOO_LONG_CODES = frozenset({"context_length_exceeded", "string_above_max_length"})
_TOO_LONG_TEXTS = ("maximum context length", "maximum model length", "context length exceeded", "context window", "prompt is too long")
_FILTER_CODES = frozenset({"content_filter", "content_policy_violation", "moderation_blocked"})


class ReplyError(ValueError):
    """A reply without the API's form. Caught by the client, which asks again."""


class Reply(NamedTuple):
    """One answer.

    Args:
        token_ids: ids of the generated tokens, where the server gives them.
        prompt_ids: ids of the prompt as the server saw it, where it gives them.
        logprobs: log-probabilities at the first generated token by token id, where they were asked for and given.
        detail: why it was refused or is of no use.
    """

    text: str
    finish: Finish
    usage: Usage
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    logprobs: dict[int, float] = {}  # noqa: RUF012 — never written to
    detail: str = ""


class Complaint(NamedTuple):
    """What a server says about a request that it did not answer."""

    code: str
    message: str

    @property
    def is_too_long(self) -> bool:
        return self.code in _TOO_LONG_CODES or any(text in self.message.lower() for text in _TOO_LONG_TEXTS)

    @property
    def is_filtered(self) -> bool:
        return self.code in _FILTER_CODES


def read_completion(payload: Any) -> Reply:
    """The one choice of `/completions`.

    Raises:
        ReplyError: the payload has not the form of a completion.
    """
    choice, usage = _only_choice(payload)
    text = choice.get("text")
    if not isinstance(text, str):
        raise ReplyError("the choice holds no `text`")
    finish, detail = _finish(choice.get("finish_reason"))
    return Reply(
        text, finish, usage, _ids(choice.get("token_ids")), _ids(choice.get("prompt_token_ids")), _logprobs(choice.get("logprobs")), detail
    )


def read_chat(payload: Any) -> Reply:
    """The one choice of `/chat/completions`. A refusal is `refused`, whatever its text says.

    Raises:
        ReplyError: the payload has not the form of a chat completion.
    """
    choice, usage = _only_choice(payload)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise ReplyError("the choice holds no `message`")
    content, refusal = message.get("content"), message.get("refusal")
    if not isinstance(content, str | None) or not isinstance(refusal, str | None):
        raise ReplyError("the message's `content` or `refusal` is no text")
    if refusal:
        return Reply("", "refused", usage, detail=f"the model declined: {shown(refusal)}")
    finish, detail = _finish(choice.get("finish_reason"))
    return Reply(content or "", finish, usage, detail=detail)


def read_complaint(payload: Any) -> Complaint:
    """Code and message of an error, as far as it has any; servers differ."""
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    if not isinstance(error, dict):
        return Complaint("", shown(error) if isinstance(error, str) else "")
    message = error.get("message") or error.get("detail") or ""
    return Complaint(str(error.get("code") or error.get("type") or ""), shown(message if isinstance(message, str) else repr(message)))


def read_model_names(payload: Any) -> dict[str, dict[str, Any]]:
    """What `/models` lists, by name; nothing if it has another form."""
    data = payload.get("data") if isinstance(payload, dict) else None
    return {str(model["id"]): model for model in data if isinstance(model, dict) and "id" in model} if isinstance(data, list) else {}


def shown(text: str) -> str:
    """A server's words in one short line without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _SHOWN_CHARS]).split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"


def _only_choice(payload: Any) -> tuple[dict[str, Any], Usage]:
    if not isinstance(payload, dict):
        raise ReplyError("the reply is no JSON object")
    choices = payload.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else "no"
        raise ReplyError(f"the reply holds {count} choices, expected 1")
    return choices[0], _usage(payload.get("usage"))


def _finish(reason: Any) -> tuple[Finish, str]:
    if reason in _STOPS:
        return "stop", ""
    if reason in _LENGTHS:
        return "length", ""
    if reason == "content_filter":
        return "refused", "the server's content filter stopped the answer"
    if not isinstance(reason, str) or reason in ("abort", "error"):
        raise ReplyError(f"the answer was cut off (finish_reason {shown(str(reason))})")
    return "error", f"the answer ended with finish_reason {shown(reason)!r}"


def _usage(usage: Any) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(usage.get("prompt_tokens")), _count(cached), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _ids(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value):
        return None
    return value


def _logprobs(value: Any) -> dict[int, float]:
    tops = value.get("top_logprobs") if isinstance(value, dict) else None
    first = tops[0] if isinstance(tops, list) and tops else None
    found: dict[int, float] = {}
    for key, logprob in first.items() if isinstance(first, dict) else ():
        number = key.removeprefix(_TOKEN_KEY)
        if key != number and number.isdecimal() and isinstance(logprob, int | float) and math.isfinite(logprob):
            found[int(number)] = float(logprob)
    return found
