"""A chat reply as server-sent events, put together as if it had come whole: some servers stream without being asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relabel.labelers.engines.api_complaints import read_complaint
from relabel.labelers.engines.api_replies import THOUGHTS, ReplyError, parse_reply, parts_of

_END = b"[DONE]"


def is_stream(headers: Mapping[str, str]) -> bool:
    """Whether a reply comes as events."""
    return headers.get("content-type", "").startswith("text/event-stream")


def whole_stream(raw: bytes) -> dict[str, Any]:
    """What the reply would have been in one piece.

    Raises:
        ReplyError: a piece has not the form of one, or the stream ended before the answer did.
    """
    texts: dict[str, str] = {}
    finish = usage = None
    for line in raw.split(b"\n"):
        name, _, data = line.strip().partition(b":")
        if name != b"data":  # comments, and fields that this API has no use for
            continue
        if data.strip() == _END:
            return {"choices": [{"message": texts, "finish_reason": finish}], "usage": usage}
        piece = parse_reply(data.strip())
        choices = piece.get("choices", []) if isinstance(piece, dict) else None
        if not isinstance(choices, list) or len(choices) > 1:
            raise ReplyError("a piece of the stream has not the form of one")
        if (not choices or (isinstance(choices[0], dict) and "error" in choices[0])) and read_complaint(piece).is_said:
            return {"error": piece}
        usage = piece.get("usage") or usage
        for choice in choices:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                raise ReplyError("a piece of the stream has no `delta`")
            finish = choice.get("finish_reason") or finish
            text, thought = parts_of(delta.get("content"))
            found = {"content": text, "thinking": thought, "refusal": delta.get("refusal") or ""}
            found |= {name: "".join(parts_of(delta[name])) for name in THOUGHTS if delta.get(name)}
            if not isinstance(found["refusal"], str):
                raise ReplyError("a piece's `refusal` is not text")
            for key, more in found.items():
                if more:
                    texts[key] = texts.get(key, "") + more
    raise ReplyError("the stream ended before the answer did")
