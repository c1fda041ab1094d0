"""Replies that come as a stream of server-sent events, read into the ordinary reply that they are the pieces of: where
`extra_body` asks for one (some models give nothing else), or where a server sends one unasked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pydantic_core


class StreamError(ValueError):
    """A stream that holds something else than the pieces of a reply."""


class StreamEndError(StreamError):
    """A stream that ended before its answer."""


def is_stream(raw: bytes, content_type: str) -> bool:
    """Whether a reply is a stream, by its header or by its first line."""
    if raw.lstrip()[:1] in (b"{", b"["):
        return False
    is_named = content_type.strip().lower().startswith("text/event-stream")
    return is_named or re.match(rb"\s*(?:data|event|id|retry)?:", raw) is not None


def joined_stream(raw: bytes) -> bytes:
    """The reply that a stream's pieces make together, as JSON; an error within the stream is the whole reply.

    Raises:
        StreamError: it is no stream of a reply.
        StreamEndError: it ended before its answer.
    """
    reply: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    is_whole = False
    for data in _events(raw):
        if data == "[DONE]":
            is_whole = True
            continue
        piece = _piece(data)
        if piece.get("error"):
            return pydantic_core.to_json(piece)
        for choice in _choices_of(piece):
            number = choice.get("index")
            known = choices.setdefault(number if isinstance(number, int) else 0, {})
            _add_choice(known, choice)
            is_whole = is_whole or bool(known.get("finish_reason"))
        reply |= {name: value for name, value in piece.items() if name != "choices" and value is not None}
    if not is_whole or not choices:
        raise StreamEndError("the stream ended before its answer")
    reply["choices"] = list(choices.values())
    return pydantic_core.to_json(reply, inf_nan_mode="null")


def _events(raw: bytes) -> Iterator[str]:
    """The data of each event; comments and the names of events are left out."""
    lines: list[str] = []
    for line in [*raw.decode("utf-8", "replace").splitlines(), ""]:
        if line.startswith("data:"):
            lines.append(line.removeprefix("data:").removeprefix(" "))
        elif not line.strip() and lines:
            yield "\n".join(lines).strip()
            lines = []


def _piece(data: str) -> dict[str, Any]:
    try:
        piece = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError:
        raise StreamError("a piece of the stream is not complete JSON") from None
    if not isinstance(piece, dict):
        raise StreamError("a piece of the stream is no JSON object")
    return piece


def _choices_of(piece: dict[str, Any]) -> list[dict[str, Any]]:
    choices = piece.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, dict)]


def _add_choice(known: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add a piece's part of a choice. A chat's text is in `delta`, a completion's next to that."""
    delta = choice.get("delta")
    message = choice.get("message")
    if isinstance(delta, dict) and delta:
        known["message"] = _merged(known.get("message", {}), delta)
    elif isinstance(message, dict) and not (known.get("message") or {}).get("content"):  # the whole, once, at the end
        known["message"] = message
    elif isinstance(delta, dict):
        known.setdefault("message", {})
    rest = {name: value for name, value in choice.items() if name not in ("delta", "message")}
    for name in ("text", "token_ids", "logprobs"):
        if rest.get(name) is not None:
            known[name] = _merged(known.get(name), rest[name])
            del rest[name]
    known |= {name: value for name, value in rest.items() if value is not None}


_SINGLE = frozenset({"role", "type", "id", "index", "name", "format"})
"""Fields that each piece repeats."""


def _merged(known: Any, added: Any) -> Any:
    """What is known and what a piece adds to it: texts and lists go on, the fields of objects each for itself."""
    if known is None or added is None:
        return known if added is None else added
    if isinstance(known, dict) and isinstance(added, dict):
        merged = dict(known)
        for name, value in added.items():
            is_single = name in _SINGLE and value is not None
            merged[name] = value if is_single else _merged(known.get(name), value)
        return merged
    if isinstance(known, str) and isinstance(added, str):
        return known + added
    if isinstance(known, list) and isinstance(added, list):
        return known + added
    return added
