"""What a server says of a request that it did not answer, and what that is about: the row, the key, or money.

Servers agree neither on status nor on form nor on words, and proxies change all three. So an error is read wherever it
may be, and its codes and words are held against what they are about (a prompt and too much of it), not against a list
of servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from relabel.manifests.secrets.redaction import redacted

Subject = Literal["credit", "filter", "overlong", "busy", "other"]

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
    (re.compile(r"unauthori|authentication|api key|permission"), 401),
    (re.compile(r"not found|not exist|unknown model"), 404),
    (re.compile(r"invalid|bad request|validation|unsupported|not supported"), 400),
)
_WAIT = re.compile(r"(?:again|retry|wait) (?:in |after |for )?(?:about )?(\d+(?:\.\d+)?) ?(ms|s|m)")
_WORDS = frozenset({"message", "detail", "msg", "error_description", "status_msg", "reason"})
_WITHIN = frozenset({"error", "errors", "base_resp", "data", "metadata", "raw"})
_CODES = frozenset({"code", "type", "status", "error_type", "error_code", "status_code"})
_DEEPEST = 6
_READ_CHARS = 1_000
_SHOWN_CHARS = 200


class Complaint(NamedTuple):
    """What a server says about a request that it did not answer.

    Args:
        codes: its codes and kinds, as they are.
        message: its words in one line.
        param: the field of the request that it is about, where it names one.
    """

    codes: tuple[str, ...] = ()
    message: str = ""
    param: str = ""

    @property
    def is_said(self) -> bool:
        """Whether there is any error at all."""
        return bool(self.codes or self.message)

    @property
    def wait_s(self) -> float:
        """Seconds after which to ask again, where the message says so; 0 where it does not."""
        found = _WAIT.search(self.message.lower())
        return float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[found[2]] if found else 0.0

    @property
    def status(self) -> int:
        """The HTTP status that its codes stand for, of an error that came as a good reply; 500 where nobody knows."""
        numbers = (int(code) for code in self.codes if re.fullmatch("[45][0-9]{2}", code))
        if _BUSY.search(self._plain):
            return next(numbers, 429)
        return next(numbers, next((status for found, status in _STATUSES if found.search(self._plain)), 500))

    def subject(self, status: int, *, may_pass: bool = False) -> Subject:
        """What it is about.

        Args:
            status: HTTP's.
            may_pass: the server says when to ask again: then no money has ended.
        """
        plain = self._plain
        may_pass = may_pass and status == 429 and "insufficient" not in plain
        if status == 402 or (_CREDIT.search(plain) and not may_pass):
            return "credit"
        is_large = status == 413 or "request too large" in plain
        if is_large or (status not in (401, 403, 429) and _is_long(plain)):
            return "overlong"
        if status < 500 and _FILTER.search(plain):
            return "filter"
        return "busy" if _BUSY.search(plain) else "other"

    @property
    def _plain(self) -> str:
        apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", " ".join((*self.codes, self.message)))
        return re.sub(r"[_`'\"\s]+", " ", apart).lower()


def _is_long(plain: str) -> bool:
    about = _LIMIT_ALONE.sub(" ", plain)
    is_long = _LONG.search(about) and _TOO.search(about) and not _OTHERWISE.search(about)
    return bool(is_long or _NO_ROOM.search(plain))


def read_complaint(payload: Any) -> Complaint:
    """Codes and words of an error, wherever a server puts them; nothing where there are none."""
    said: dict[str, list[str]] = {"code": [], "message": [], "param": []}
    for kind, text in _said(payload, 0):
        if text.strip() and text not in said[kind]:
            said[kind].append(text)
    codes = tuple(shown(code) for code in said["code"][:4])
    return Complaint(codes, shown(": ".join(said["message"]), _READ_CHARS), shown("".join(said["param"][:1])))


def _said(value: Any, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield "message", value
    elif isinstance(value, list) and depth < _DEEPEST:
        for one in value[:3]:
            yield from _said(one, depth + 1)
    elif isinstance(value, dict) and depth < _DEEPEST:
        for name, inner in value.items():
            if name in _CODES and isinstance(inner, str | int) and not isinstance(inner, bool):
                yield "code", str(inner)
            elif name == "param" and isinstance(inner, str):
                yield "param", inner
            elif name == "loc" and isinstance(inner, list):  # of FastAPI
                yield "message", ".".join(map(str, inner[:4]))
            elif name == "choices" and isinstance(inner, list):
                yield from _said([one.get("error") for one in inner if isinstance(one, dict)], depth + 1)
            elif name in _WORDS | _WITHIN:
                yield from _said(inner, depth + 1)


def shown(text: str, most: int = _SHOWN_CHARS) -> str:
    """A server's words in one short line without control characters."""
    # a server may echo the key; before a part is taken, which would go unnoticed
    plain = redacted(text[: 64 * most])
    line = " ".join("".join(c if c.isprintable() else " " for c in plain[: 4 * most]).split())
    return line if len(line) <= most else line[: most - 1] + "…"
