"""What a server says of a request that it refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from manifests.secrets.redaction import redacted

_TOO_LONG_CODES = frozenset({"context_length_exceeded", "string_above_max_length"})
_TOO_LONG_TEXTS = (
    "maximum context length",
    "maximum model length",
    "context length exceeded",
    "context window",
    "prompt is too long",
)
_FILTER_CODES = frozenset({"content_filter", "content_policy_violation", "moderation_blocked"})


class Complaint(NamedTuple):
    """What a server says about a request that it did not answer."""

    code: str
    message: str

    @property
    def is_too_long(self) -> bool:
        """Whether the prompt did not fit into the model's context."""
        return self.code in _TOO_LONG_CODES or any(text in self.message.lower() for text in _TOO_LONG_TEXTS)

    @property
    def is_filtered(self) -> bool:
        """Whether the server's content filter refused."""
        return self.code in _FILTER_CODES


def read_complaint(payload: Any) -> Complaint:
    """Code and message of an error, as far as it has any; servers differ."""
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    if not isinstance(error, dict):
        return Complaint("", shown(error) if isinstance(error, str) else "")
    code, message = error.get("code") or error.get("type"), error.get("message") or error.get("detail")
    return Complaint(
        str(code) if isinstance(code, str | int) else "", shown(message) if isinstance(message, str) else ""
    )


_SHOWN_CHARS = 200


def shown(text: str) -> str:
    """A server's words in one short line without control characters."""
    # a server may echo the key; before a part is taken, which would go unnoticed
    plain = redacted(text[: 64 * _SHOWN_CHARS])
    line = " ".join("".join(c if c.isprintable() else " " for c in plain[: 4 * _SHOWN_CHARS]).split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"
