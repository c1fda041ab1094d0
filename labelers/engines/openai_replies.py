"""Replies of an OpenAI-compatible server, parsed strictly: completions, chat replies and error bodies,
with the usage and costs they report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeGuard

from relabel.manifests.asks import Charge, Finish
from relabel.manifests.secrets import redacted

# ------------------------------------------------------------------------------
# What a server says of a request that it did not answer, and what that is about: the row, the key, or money.
#
# Servers agree neither on status nor on form nor on words, and proxies change all three. So an error is read wherever
# it may be, and its codes and words are matched with what they are about (a prompt and too much of it), not against a
# list of servers.


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
    """

    codes: tuple[str, ...] = ()
    message: str = ""

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
        """The HTTP status of its codes, of an error that came as a good reply; 500 where they name none."""
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
    said: dict[str, list[str]] = {"code": [], "message": []}
    for kind, text in _said(payload, 0):
        if text.strip() and text not in said[kind]:
            said[kind].append(text)
    codes = tuple(shown(code) for code in said["code"][:4])
    return Complaint(codes, shown(": ".join(said["message"]), _READ_CHARS))


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


# ------------------------------------------------------------------------------
# What a run has asked of a server so far: requests, tries, tokens as the server counted them, money.


class Usage(NamedTuple):
    """Tokens of one reply, by the server's own count; `cached` ones are among the prompt's."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


NOT_SAID = Usage()
"""What a server that counts no tokens says."""


@dataclass(slots=True)
class Costs:
    """Counts over all requests, decisions and start-up checks included. Written by the engine's own thread alone.

    Args:
        price_input, price_output: of a million tokens; None where no price was given.
        cost: of the tokens, in the prices' currency.
        lost: the most that replies may have been charged which were lost on the way.
    """

    price_input: float | None = None
    price_output: float | None = None
    requests: int = 0
    retries: int = 0
    given_up: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    lost: Charge = Charge()  # noqa: RUF009 — immutable

    def add(self, usage: Usage, part: float = 1.0) -> None:
        """Count a reply, at this part of the prices."""
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.output_tokens += usage.output
        self.cost += self._charge(usage, part).cost

    def doubt(self, most: Usage, part: float = 1.0) -> None:
        """Note a reply that is lost: what the server charged for it can't be known."""
        self.lost = self.lost.plus(self._charge(most, part))

    @property
    def at_most(self) -> Charge:
        """What was charged at most."""
        return self.lost.plus(Charge(self.prompt_tokens + self.output_tokens, self.cost))

    def by_name(self) -> dict[str, Any]:
        """Counts as a run records them."""
        has_price = self.price_input is not None or self.price_output is not None
        return {
            "http_requests": self.requests,
            "retries": self.retries,
            "given_up": self.given_up,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "cost": self.cost if has_price else None,
        }

    def _charge(self, usage: Usage, part: float) -> Charge:
        cost = usage.prompt * (self.price_input or 0.0) + usage.output * (self.price_output or 0.0)
        return Charge(usage.prompt + usage.output, part * cost / 1e6)


# ------------------------------------------------------------------------------
# What a server replied, read strictly: a reply that is not of the API's form is no answer, and is never repaired into
# one.


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
LEAST_LOGPROB, ROUNDING = -1e9, 1e-3
"""Between which a log-probability lies: a little above 0 by rounding."""


class ReplyError(ValueError):
    """A reply without the API's form. Caught by the client, which asks again."""


def parse_reply(raw: bytes) -> Any:
    """A reply's JSON.

    Raises:
        ReplyError: it is none: cut off, nested too deep, NaN.
    """
    try:
        return json.loads(raw, parse_constant=_refuse)
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
        if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not LEAST_LOGPROB < logprob <= ROUNDING:
            raise ReplyError("a log-probability is not a number up to 0")
        if key != number and number.isascii() and number.isdecimal() and len(number) <= MAX_ID_DIGITS:
            found[int(number)] = float(logprob)
    return found
