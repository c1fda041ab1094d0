"""What a server replied, read strictly: a reply that is not of the API's form is no answer, and is never repaired into
one.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple, NoReturn, TypeGuard

from relabel.labelers.engines.api_complaints import shown
from relabel.labelers.engines.api_costs import Usage
from relabel.manifests.asks import Finish

_STOPS = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})
_LENGTHS = ("length", "max_tokens", "max_output_tokens", "context_window_exceeded")
_FILTERS = ("filter", "safety", "refusal", "recitation", "prohibited", "blocklist", "spii", "sensitive", "guardrail")
_BREAKS = ("abort", "error", "cancel", "insufficient_system_resource")
UNKNOWN_FINISH = "finish_unknown"
"""Flag of an answer whose end the server gives no known reason for: whether it is whole, its reader finds."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Fields of a message in which servers keep the model's thought apart, the same one perhaps twice."""
DEEPEST_PART = 8
_TEXTS = ("text", "content", "thinking", "reasoning", "summary", "value")
_TOKEN_KEY = "token_id:"

MAX_COUNT = 10_000_000
"""No request has more tokens; what a server says beyond that is not a count."""
MAX_TOKEN_ID = 2**31 - 1
MAX_ID_DIGITS = 10
ROUNDING = 1e-3
"""How far above 0 a log-probability may lie."""
MAX_DIGITS = 40
"""A number with more of them is none of the API's."""


class ReplyError(ValueError):
    """A reply without the API's form. Caught by the client, which asks again."""


def parse_reply(raw: bytes) -> Any:
    """A reply's JSON.

    Raises:
        ReplyError: it is none: cut off, nested too deep, a key twice in one object, NaN, numbers of more than
            `MAX_DIGITS` digits.
    """
    try:
        return json.loads(raw, parse_constant=_refuse, parse_int=_integer, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise ReplyError("the reply is not complete JSON") from None


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


def read_completion(payload: Any) -> Reply:
    """The one choice of `/completions`.

    Raises:
        ReplyError: the payload has not the form of a completion.
    """
    choice, usage = _only_choice(payload)
    text = choice.get("text")
    if not _is_text(text):
        raise ReplyError("the choice holds no `text`")
    finish, detail, flags = _finish(choice.get("finish_reason"), text)
    return Reply(
        text,
        finish,
        usage,
        _ids(choice.get("token_ids")),
        _ids(choice.get("prompt_token_ids")),
        _logprobs(choice.get("logprobs")),
        detail,
        flags=flags,
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
    if not (refusal is None or _is_text(refusal)):
        raise ReplyError("the message's `refusal` is not text")
    text, *thoughts = parts_of(content)
    thoughts += ("".join(parts_of(message.get(name))) for name in THOUGHTS)
    reasoning = next((thought for thought in thoughts if thought.strip()), "")
    raw = json.dumps(message, ensure_ascii=False) if reasoning or text != (content or "") or refusal else ""
    if refusal:
        return Reply("", "refused", usage, detail=f"the model declined: {shown(refusal)}", raw=raw)
    finish, detail, flags = _finish(choice.get("finish_reason"), text + reasoning)
    if reasoning and not text.strip() and finish == "stop":
        detail = detail or "the reply holds the model's thought and no answer"
    return Reply(text, finish, usage, detail=detail, reasoning=reasoning, raw=raw, flags=flags)


def parts_of(content: Any, depth: int = 0) -> tuple[str, str]:
    """Text and thought of a message's content: text, parts with a type each, lists of them, or nothing.

    Raises:
        ReplyError: it is none of these.
    """
    if _is_text(content):
        return content, ""
    if content is None and depth == 0:
        return "", ""
    if isinstance(content, list) and depth < DEEPEST_PART:
        texts, thoughts = zip(("", ""), *(parts_of(part, depth + 1) for part in content), strict=True)
        return "".join(texts), "".join(thoughts)
    if not isinstance(content, dict) or depth >= DEEPEST_PART or not isinstance(content.get("type"), str):
        raise ReplyError("the message's `content` is not text")
    held = next((content[name] for name in _TEXTS if content.get(name) is not None), "")
    text = "".join(parts_of(held, depth + 1))
    is_thought = re.search("think|thought|reason", content["type"]) is not None or content.get("thought") is True
    return ("", text) if is_thought else (text, "")


def read_model_names(payload: Any) -> dict[str, dict[str, Any]]:
    """What `/models` lists, by name; nothing if it has another form."""
    data = payload.get("data") if isinstance(payload, dict) else None
    models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
    return {model["id"]: model for model in models if _is_text(model.get("id"))}


def _only_choice(payload: Any) -> tuple[dict[str, Any], Usage]:
    if not isinstance(payload, dict):
        raise ReplyError("the reply is not a JSON object")
    choices = payload.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else "no"
        raise ReplyError(f"the reply holds {count} choices, expected 1")
    return choices[0], _usage(payload.get("usage"))


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


def _integer(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _refuse("too many digits")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _refuse("a key twice")


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether it is text that can be written down: JSON may hold half a character (`\\ud800`)."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _finish(reason: Any, text: str) -> tuple[Finish, str, tuple[str, ...]]:
    """How an answer ended, what there is to say of that, and its flags. Servers write the reasons in any case."""
    said = reason if _is_text(reason) else ""
    lowered = said.lower()
    if lowered in _STOPS:
        return "stop", "", ()
    if any(word in lowered for word in _LENGTHS):
        return "length", "", ()
    if any(word in lowered for word in _FILTERS):
        return "refused", "the server's content filter stopped the answer", ()
    if any(word in lowered for word in _BREAKS):
        raise ReplyError(f"the answer was cut off (finish_reason {shown(said)})")
    if reason is not None and not _is_text(reason):
        raise ReplyError("the `finish_reason` is not text")
    if not said:
        if not text.strip():
            raise ReplyError("the answer was cut off (no finish_reason)")
        return "length", "the answer came without finish_reason", (UNKNOWN_FINISH,)
    why = f"the answer ended with finish_reason {shown(said)!r}"
    return ("stop", why, (UNKNOWN_FINISH,)) if text.strip() else ("error", why, ())


def _usage(usage: Any) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(usage.get("prompt_tokens")), _count(cached), _count(usage.get("completion_tokens")))


def _count(value: Any) -> int:
    return value if _is_number_to(value, MAX_COUNT) else 0


def _is_number_to(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(_is_number_to(one, MAX_TOKEN_ID) for one in value):
        raise ReplyError("the token ids are not a list of ids")
    return value


def _logprobs(value: Any) -> dict[int, float]:
    """Log-probabilities by token id at the first position, of what names its tokens by id; nothing where none were
    given.
    """
    tops = value.get("top_logprobs") if isinstance(value, dict) else value
    first = tops[0] if isinstance(tops, list) and tops else None if tops == [] else tops
    if first is None:
        return {}
    if not isinstance(tops, list) or not isinstance(first, dict):
        raise ReplyError("the log-probabilities have another form")
    found: dict[int, float] = {}
    for key, logprob in first.items():
        number = key.removeprefix(_TOKEN_KEY)
        if (
            isinstance(logprob, bool)
            or not isinstance(logprob, int | float)
            or not math.isfinite(logprob)
            or logprob > ROUNDING
        ):
            raise ReplyError("a log-probability is not a number up to 0")
        if key != number and number.isascii() and number.isdecimal() and len(number) <= MAX_ID_DIGITS:
            found[int(number)] = float(logprob)
    return found
