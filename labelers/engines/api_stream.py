"""A chat reply that comes in pieces (server-sent events), put together as if it had come whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relabel.labelers.engines.api_complaints import read_complaint
from relabel.labelers.engines.api_replies import THOUGHTS, ReplyError, parse_reply, parts_of

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
"""What a request says to have its answer in pieces, and its tokens counted all the same."""
_END = b"[DONE]"


def is_stream(headers: Mapping[str, str]) -> bool:
    """Whether a reply comes in pieces: a server may send it whole, asked or not."""
    return headers.get("content-type", "").startswith("text/event-stream")


def whole_stream(raw: bytes) -> dict[str, Any]:
    """What the reply would have been in one piece.

    Raises:
        ReplyError: a piece has not the form of one, or the stream ended before the answer did.
    """
    stream = ChatStream(lambda *_: None)
    stream.feed(raw + b"\n")
    return stream.whole()


class ChatStream:
    """Reads a stream as it comes.

    Args:
        written: called with all of the answer's text and of the thought so far, at each piece.
    """

    def __init__(self, written: Callable[[str, str], None]) -> None:
        self._written = written
        self._rest = b""
        self._texts: dict[str, str] = {}
        self._finish: Any = None
        self._usage: Any = None
        self._fault: Any = None
        self._has_ended = False

    def feed(self, block: bytes) -> None:
        """More bytes of the reply.

        Raises:
            ReplyError: a piece has not the form of one.
        """
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            name, _, data = line.strip().partition(b":")
            if name == b"data":  # others are comments and fields that this API has no use for
                self._take(data.strip())

    def whole(self) -> dict[str, Any]:
        """What a reply in one piece would have been.

        Raises:
            ReplyError: the stream ended before the answer did.
        """
        if self._fault is not None:
            return {"error": self._fault}
        if not self._has_ended:
            raise ReplyError("the stream ended before the answer did")
        return {"choices": [{"message": self._texts, "finish_reason": self._finish}], "usage": self._usage}

    def _take(self, data: bytes) -> None:
        if data == _END:
            self._has_ended = True
            return
        piece = parse_reply(data)
        choices = piece.get("choices", []) if isinstance(piece, dict) else None
        if not isinstance(choices, list) or len(choices) > 1:
            raise ReplyError("a piece of the stream has not the form of one")
        if (not choices or (isinstance(choices[0], dict) and "error" in choices[0])) and read_complaint(piece).is_said:
            self._fault = piece
            return
        self._usage = piece.get("usage") or self._usage
        for choice in choices:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                raise ReplyError("a piece of the stream has no `delta`")
            self._finish = choice.get("finish_reason") or self._finish
            text, thought = parts_of(delta.get("content"))
            found = {"content": text, "thinking": thought, "refusal": delta.get("refusal") or ""}
            found |= {name: "".join(parts_of(delta[name])) for name in THOUGHTS if delta.get(name)}
            if not isinstance(found["refusal"], str):
                raise ReplyError("a piece's `refusal` is not text")
            for name, more in found.items():
                if more:
                    self._texts[name] = self._texts.get(name, "") + more
            if any(found[name] for name in found.keys() - {"refusal"}):
                thoughts = (self._texts[name] for name in THOUGHTS if name in self._texts)
                self._written(self._texts.get("content", ""), next(thoughts, ""))
