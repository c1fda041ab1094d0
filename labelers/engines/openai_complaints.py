"""A server's errors in place of answers: what they are about, and how long it wants us to wait.

Servers agree neither on status nor on form nor on words, and proxies change all three. So an error is read wherever it
may be, and its codes and words are matched with what they are about (a prompt and too much of it), not against a list
of servers. Codes are the server's own. Words may be a piece of the row's text, which some servers repeat: they decide
the row's fate at most, never the run's (see `ApiClient`), and nothing with a status of 500 and more.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple

from relabel.manifests.secrets import redacted

Subject = Literal["credit", "filter", "overlong", "busy", ""]

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
_PLACE = re.compile(r"\b(?:pos|position|offset|index|line|column|char|character|byte) \d+")
_OTHERWISE = re.compile(
    r"rate limit|per (?:min|hour|day|sec|month)|\b[tr]p[md]\b|quota|queue|concurren|deadline|timed? ?out|memory"
    r"|requests|daily|hourly|weekly|monthly|today|\bfree\b|\b(?:plan|account|tier)\b"
)
_BUSY = re.compile(
    r"rate ?limit|too many requests|throttl|resource ?exhausted|overload|capacity|\bbusy\b|unavailable|\bloading\b"
)
_KEY = re.compile(r"access denied|unauthori|authentication|api key|permission|forbidden|deactivated|disabled|suspended")
_STATUSES = (
    (_BUSY, 429),
    (re.compile(r"unauthori|authentication|api key|permission"), 401),
    (re.compile(r"not found|not exist|unknown model"), 404),
    (re.compile(r"invalid|bad request|validation|unsupported|not supported"), 400),
)
_QUOTED = re.compile(
    r"""(?:(?<=\w\s)|(?<=\())(?:(['"`])(?:(?!\1).)*\s(?:(?!\1).)*(?:\1(?!\w)|$)|“[^”]*\s[^”]*(?:”|$)|«[^»]*(?:»|$))"""
)
"""Several words in quotation marks, within a sentence: text that is complained of. What follows a colon or a bracket
is an error passed on.
"""
_WORDS = frozenset(
    {"message", "detail", "msg", "error_description", "status_msg", "reason", "loc"}  # `loc` is FastAPI's
    | {"error", "errors", "base_resp", "data", "metadata", "raw"}
)
_CODES = frozenset({"code", "type", "status", "error_type", "error_code", "status_code"})
ECHO_WORDS = 5
"""So many words in a row that stand in the prompt as well are no words of the server's."""


class Complaint(NamedTuple):
    """An error in place of an answer: its codes and kinds, its words in one line, and the seconds that a field of it
    wants us to wait.
    """

    codes: tuple[str, ...] = ()
    message: str = ""
    delay_s: float = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds after which to ask again, where a field or the message states them; 0 where neither does."""
        return self.delay_s or _wait_of_words(self.message)

    @property
    def status(self) -> int:
        """The HTTP status of its codes, else of its words, of an error that came as a good reply; 200 where they name
        none.
        """
        named = (int(code) for code in self.codes if re.fullmatch("[45][0-9]{2}", code))
        plain = _plain(*self.codes, self.message)
        return next(named, next((status for words, status in _STATUSES if words.search(plain)), 200))

    @property
    def is_of_credit(self) -> bool:
        """Whether a code of its own means that no money is left."""
        return _CREDIT.search(_plain(*self.codes)) is not None

    @property
    def is_of_key(self) -> bool:
        """Whether codes or words are about the key."""
        return _KEY.search(_plain(*self.codes, self.message)) is not None

    def subject(self, status: int, *, may_pass: bool = False) -> Subject:
        """What it is about; nothing where that is not known.

        Args:
            status: HTTP's.
            may_pass: the server states when to ask again: then no money has ended.
        """
        # a server that broke down is no judge of the request: its words are often the text on which it did
        words = [] if status >= 500 else [_QUOTED.sub(" ", self.message)]
        plain = _plain(*self.codes, *words)
        if status == 402 or self._is_about_credit(plain, may_pass=may_pass and status == 429, status=status):
            return "credit"
        is_large = status == 413 or "request too large" in plain
        if is_large or (status not in (401, 403, 429) and _is_too_long(plain)):
            return "overlong"
        if status >= 500 and _counts_too_many(_plain(self.message)):
            return "overlong"
        if status < 500 and _FILTER.search(plain):
            return "filter"
        return "busy" if _BUSY.search(plain) else ""

    def without_echo(self, prompt: str) -> Complaint:
        """Without the words that it repeats of the prompt."""
        return self._replace(message=_without_echo(self.message, prompt))

    def _is_about_credit(self, plain: str, *, may_pass: bool, status: int) -> bool:
        if self.is_of_credit:
            return True
        if _CREDIT.search(plain) is None:
            return False
        is_limit_by_time = status == 429 and _BUSY.search(_plain(*self.codes)) is not None
        return "insufficient" in plain or not (may_pass or is_limit_by_time)


def _plain(*texts: str) -> str:
    """Codes and words in lower case, apart from one another, without marks."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", " ".join(texts))
    return re.sub(r"[_`'\"\s]+", " ", apart).lower()


def _is_too_long(plain: str) -> bool:
    about = _LIMIT_ALONE.sub(" ", plain)
    if _LONG.search(about) and _TOO.search(about) and not _OTHERWISE.search(about):
        return True
    return _NO_ROOM.search(plain) is not None


def _counts_too_many(plain: str) -> bool:
    """Whether it names what there is and the lower number that there may be; a place in the text is neither."""
    counts = [int(count) for count in re.findall(r"\d{1,9}", _PLACE.sub(" ", plain))]
    return len(counts) == 2 and counts[0] > counts[1] and _is_too_long(plain)


def _without_echo(message: str, prompt: str) -> str:
    matches = list(re.finditer(r"\w+", message))
    words = [match[0].lower() for match in matches]
    text = _as_words(re.findall(r"\w+", prompt.lower()))
    own: list[str] = []
    copied = start = 0
    while start + ECHO_WORDS <= len(words):
        end = start + ECHO_WORDS
        if _as_words(words[start:end]) not in text:
            start += 1
            continue
        while end < len(words) and _as_words(words[start : end + 1]) in text:
            end += 1
        own.append(message[copied : matches[start].start()])
        copied = matches[end - 1].end()
        start = end
    return " ".join([*own, message[copied:]])


def _as_words(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "


def read_complaint(payload: Any) -> Complaint:
    """Codes and words of an error, and the wait that it states, wherever a server puts them; none where it has none."""
    parts = dict.fromkeys((kind, text) for kind, text in _texts(payload) if text.strip())
    codes = [shown(text) for kind, text in parts if kind == "code"]
    message = ": ".join(text for kind, text in parts if kind == "message")
    return Complaint(tuple(codes[:4]), shown(message, 1_000), next(_delays(payload), 0.0))


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield "message", value
    elif isinstance(value, list):
        for item in value[:4]:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name in _CODES and isinstance(inner, str | int) and not isinstance(inner, bool):
                yield "code", str(inner)
            elif name == "choices" and isinstance(inner, list):  # what they hold besides is an answer
                yield from _texts([choice.get("error") for choice in inner if isinstance(choice, dict)])
            elif name in _WORDS:
                yield from _texts(inner)


def shown(text: str, most: int = 200) -> str:
    """A server's words in one short line without control characters."""
    plain = redacted(text[: 64 * most])  # a server may echo the key; before a part is taken, which would go unnoticed
    line = " ".join("".join(c if c.isprintable() else " " for c in plain).split())
    if len(line) > most:
        return line[: most - 1] + "…"
    return line


# ------------------------------------------------------------------------------
# Waits. All in seconds; 0 where nothing readable is reported.


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"\d{1,12}(?:\.\d{1,12})?"
_UNIT = r"(?:ms|millis(?:ec(?:ond)?s?)?|s|sec(?:ond)?s?|m|min(?:ute)?s?|h|hrs?|hours?|d|days?)(?![a-z])"
_SPAN = re.compile(rf"{_NUMBER} ?{_UNIT}(?:,? ?(?:and )?{_NUMBER} ?{_UNIT})*")
_ASKED = re.compile(r"\b(?:again|retry|wait)(?:ing)? (?:in |after |for )?(?:about |approximately |at least )?(?=\d)")
_DELAY_FIELDS = {
    "retrydelay": 1.0,
    "retryafter": 1.0,
    "retryafterseconds": 1.0,
    "retryafters": 1.0,
    "retryafterms": 0.001,
}
"""Fields of an error that state a wait, without case and marks, and the seconds of a bare number in them."""


def span_of(value: Any, *, unit_s: float = 1.0) -> float:
    """A stated span of time: 34, "34", "34.07s", "7m12s", "20ms", {"seconds": 34, "nanos": 0}.

    Args:
        unit_s: seconds of a bare number.
    """
    if isinstance(value, dict):
        return span_of(value.get("seconds")) + 1e-9 * span_of(value.get("nanos"))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value * unit_s if 0 < value < 1e12 else 0.0
    if not isinstance(value, str):
        return 0.0
    text = value.strip().lower()[:64]
    if re.fullmatch(r"\d{1,12}(?:\.\d{1,12})?", text):
        return float(text) * unit_s
    return _parts_s(text) if _SPAN.fullmatch(text) else 0.0


def _parts_s(text: str) -> float:
    seconds = 0.0
    for number, unit in re.findall(rf"({_NUMBER}) ?({_UNIT})", text):
        name = "ms" if unit.startswith(("ms", "milli")) else unit[0]
        seconds += float(number) * _UNITS_S[name]
    return seconds


def _wait_of_words(message: str) -> float:
    plain = message.lower()
    for asked in _ASKED.finditer(plain):
        span = _SPAN.match(plain, asked.end())
        if span is not None:
            return _parts_s(span[0])
    return 0.0


def _delays(value: Any, depth: int = 6) -> Iterator[float]:
    """Waits that fields state, anywhere in an error (Google's stand in `details`)."""
    if depth == 0 or not isinstance(value, dict | list):
        return
    if isinstance(value, list):
        for item in value[:8]:
            yield from _delays(item, depth - 1)
        return
    for name, inner in value.items():
        unit_s = _DELAY_FIELDS.get(re.sub("[_-]", "", name.lower()))
        seconds = span_of(inner, unit_s=unit_s) if unit_s is not None else 0.0
        if seconds > 0:
            yield seconds
        else:
            yield from _delays(inner, depth - 1)


def wait_of_headers(headers: Mapping[str, str]) -> float:
    """The wait that headers demand: `Retry-After-Ms`, or `Retry-After` as a number, a span or a date."""
    precise = span_of(headers.get("retry-after-ms", ""), unit_s=0.001)
    stated = headers.get("retry-after", "")
    return precise or span_of(stated) or _until_date(stated)


def reset_of_headers(headers: Mapping[str, str]) -> float:
    """When the limit is reset that is used up (`x-ratelimit-reset-requests`, `-tokens`): advice, where no wait is
    demanded. The latest of those of which nothing remains.
    """
    latest = 0.0
    for name, value in headers.items():
        kind = re.fullmatch(r"x-ratelimit-reset(-[a-z-]+)?", name.lower())
        if kind is None:
            continue
        remaining = headers.get(f"x-ratelimit-remaining{kind[1] or ''}", "")
        if re.fullmatch(r"0+(?:\.0+)?", remaining.strip()):
            latest = max(latest, span_of(value))
    return latest


def _until_date(text: str) -> float:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0
