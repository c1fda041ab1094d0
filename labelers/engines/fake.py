"""The `fake` engine: well-formed or malformed answers without a model, for demos, tests and trying out specs."""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import math
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from relabel.manifests.asks import (
    DOCUMENT_FIELD,
    POLL_S,
    Answer,
    Ask,
    Choice,
    Distribution,
    Engine,
    EngineFacts,
    Finish,
    Fragment,
    Indices,
    JsonIndices,
    JsonTexts,
    Lines,
    OptionLines,
    Request,
    Section,
    Text,
    closing_of,
    opening_of,
)
from relabel.manifests.errors import ConfigError, EngineCrashError, ModelError
from relabel.manifests.specs import EngineArgs, EngineSpec, Fraction

# ------------------------------------------------------------------------------
# What a made-up answer holds: well-formed text in any `AnswerFormat`, true fragments of the document, and garbage of a
# dozen kinds.


CHARS_PER_TOKEN = 4
"""A token of the fake engine."""
REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "I’m sorry, I won't judge this text.",
)
_THOUGHTS = (
    "The subject is close to what was asked.",
    "It stays with generalities for most of its length.",
    "One passage speaks to the question itself.",
    "The rest is beside the point.",
    "A reader would still have to look elsewhere.",
    "The wording differs but the matter is the same.",
    "There is little to hold against the query.",
    "It names the thing but not what is asked of it.",
)
_WAYS = ("how to", "what is", "best", "reasons for", "guide to", "examples of", "against", "history of")


def made_contents(
    sections: Sequence[Section], choices: Sequence[int], query: str, thought: str, source: str, bits: int
) -> list[str]:
    """The contents of the tags, section by section."""
    contents: dict[str, str] = {}
    left = iter(choices)
    # where several things are described, some are `none`
    has_short_texts = sum(isinstance(section, Text) and section.tag != "think" for section in sections) > 1
    for section in sections:
        if isinstance(section, Choice):
            content = section.options[next(left)]
        elif isinstance(section, Fragment):
            # One in 32 goes against the grade, so that the labelers' flags occur.
            is_quoting = (not choices or choices[-1] > 0) != (bits & 31 == 0)
            content = _fragment(source, bits, section.max_tokens * CHARS_PER_TOKEN) if is_quoting else "none"
        elif not isinstance(section, Text):
            content = _MAKERS[type(section)](section, query, bits)
        elif section.tag == "think":
            content = thought[: section.max_tokens * CHARS_PER_TOKEN]
        elif section.only_with is not None:
            other, wanted = section.only_with
            is_wanted = contents[other] == wanted if wanted else bool(contents[other])
            one_line = Lines(section.tag, 1, 1, section.max_tokens)
            content = _lines(one_line, query, bits) if is_wanted else ""
        elif has_short_texts and bits >> 6 & 7 == 0:
            content = "none"
        else:
            words = query.replace("<", " ").split()
            if len(words) > 3:
                words = words[bits % 3 :]
            content = " ".join(words)[: section.max_tokens * CHARS_PER_TOKEN].strip()
            if not content and not section.may_be_empty:
                content = "unclear"
        bits = bits >> 9 | (bits & 0x1FF) << 55
        contents[section.tag] = content
    return list(contents.values())


def _fragment(source: str, bits: int, most_chars: int) -> str:
    """A piece of the source from word edge to word edge, or `none` where there is none without markup."""
    if not source:
        return "none"
    start = source.rfind(" ", 0, bits % len(source)) + 1
    wanted = min(most_chars, 24 + (bits >> 32) % 96)
    end = len(source)
    if start + wanted < len(source):
        end = source.rfind(" ", start, start + wanted + 1)
    if end <= start:
        end = start + wanted
    # Up to the first `<`: a document's own tags must not end the section.
    piece = source[start:end].partition("<")[0].strip()
    return "none" if not piece or piece.lower() == "none" else piece


def _json_indices(section: JsonIndices, _query: str, bits: int) -> str:
    """For each key up to three numbers, none twice."""
    lists: dict[str, list[int]] = {}
    for key, most in zip(section.keys, section.mosts, strict=True):
        bits = (bits * 0x9E3779B97F4A7C15 + 1) & 0xFFFF_FFFF_FFFF_FFFF
        chosen: list[int] = []
        if most:
            chosen = list(dict.fromkeys((bits >> shift) % most + 1 for shift in (20, 33, 47)))
        lists[key] = chosen[: (bits >> 60) % 4]
    return json.dumps(lists)


def _json_texts(section: JsonTexts, query: str, bits: int) -> str:
    """Up to two words of what is asked; now and then nothing."""
    words = query.split() or ["unclear"]
    chosen = dict.fromkeys(words[(bits >> shift) % len(words)] for shift in (3, 17))
    most_chars = section.max_text_tokens * CHARS_PER_TOKEN
    texts = [word[:most_chars] for word in chosen]
    return json.dumps(texts[: min(bits % 4, section.most)], ensure_ascii=False)


def _indices(section: Indices, _query: str, bits: int) -> str:
    """Up to three numbers, none twice."""
    if not section.most:
        return ""
    chosen = dict.fromkeys((bits >> shift) % section.most + 1 for shift in (3, 17, 31))
    return ", ".join(map(str, list(chosen)[: bits % 4]))


def _option_lines(section: OptionLines, _query: str, bits: int) -> str:
    """Up to three options, none twice; now and then what is alone."""
    if not section.options or bits & 3 == 0:
        return section.alone
    chosen = dict.fromkeys((bits >> shift) % len(section.options) for shift in (3, 17, 31))
    return "\n".join(section.options[number] for number in list(chosen)[: 1 + (bits >> 48) % 3])


def _lines(section: Lines, query: str, bits: int) -> str:
    """What is asked, worded in several ways."""
    words = " ".join(query.replace("<", " ").split()) or "this"
    count = section.least + bits % (section.most - section.least + 1)
    lines: list[str] = []
    for number in range(count):
        way = _WAYS[(bits + number) % len(_WAYS)] + " more" * (number // len(_WAYS))
        lines.append(f"{way} {words}"[: section.max_line_tokens * CHARS_PER_TOKEN].strip())
    return "\n".join(lines)


_MAKERS: dict[type[Section], Callable[[Any, str, int], str]] = {
    JsonIndices: _json_indices,
    JsonTexts: _json_texts,
    OptionLines: _option_lines,
    Indices: _indices,
    Lines: _lines,
}


# ------------------------------------------------------------------------------
# Answers of the fake engine that are out of format.


_OFF_SCALE = ("1.", "2/2", "-1", "11", "two", "0 or 1", "²", "")


def made_garbage(sections: Sequence[Section], contents: list[str], text: str, bits: int) -> str:
    """An answer that no reader may take for a verdict."""
    untagged = _UNTAGGED_GARBAGE.get(type(sections[0]))
    if untagged is not None:
        return untagged[(bits >> 8) % len(untagged)](text)
    return _GARBAGE[(bits >> 8) % len(_GARBAGE)](sections, contents, text, bits >> 16)


def written(sections: Sequence[Section], contents: Sequence[str]) -> str:
    """The answer of these contents."""
    parts = zip(sections, contents, strict=True)
    return "\n".join([f"{opening_of(section)}{content}{closing_of(section)}" for section, content in parts])


def _off_scale(sections: Sequence[Section], contents: list[str], text: str, bits: int) -> str:
    choices = [i for i, section in enumerate(sections) if isinstance(section, Choice)]
    if not choices:
        return text.replace(">", "", 1)
    contents[choices[bits % len(choices)]] = _OFF_SCALE[(bits >> 8) % len(_OFF_SCALE)]
    return written(sections, contents)


_UNTAGGED_GARBAGE: dict[type[Section], tuple[Callable[[str], str], ...]] = {
    JsonIndices: (
        lambda _text: "",
        lambda text: text[:-1],
        lambda text: f"{text}\n{text}",
        lambda text: f"Here you are: {text}",
        lambda text: f"```json\n{text}\n```",
        lambda text: text.replace("]", "", 1),
        lambda text: text.replace("[", "[0, ", 1).replace(", ]", "]"),
        lambda text: text.replace("[", '["one", ', 1).replace(", ]", "]"),
        lambda text: text.replace("Document_", "Doc_", 1),
        lambda text: text.replace("{", '{"Document_0": [], ', 1),
        lambda _text: "[]",
    ),
    JsonTexts: (
        lambda _text: "",
        lambda text: text[:-1],
        lambda text: f"Here you are: {text}",
        lambda text: f"```json\n{text}\n```",
        lambda text: json.dumps({"answer": text}),
        lambda text: f"[{text}]",
    ),
    OptionLines: (
        lambda _text: "",
        lambda _text: " \n\t\u00a0 \n",
        lambda text: f"Here you are:\n{text}",
        lambda text: f"{text}\nHope this helps!",
        lambda text: f"```\n{text}\n```",
        lambda text: f"- {text}",
        lambda text: text.replace("]", "", 1),
        lambda text: f"{text}\n[ANSWER] 999999999: nothing of this document",
        lambda text: f"{text}\n[EXPAND]",
        lambda text: text.lower(),
        lambda text: json.dumps({"answer": text}),
    ),
}
_GARBAGE: tuple[Callable[[Sequence[Section], list[str], str, int], str], ...] = (
    lambda _sections, _contents, _text, _bits: "",
    lambda _sections, _contents, _text, _bits: " \n\t\u00a0 \n",
    lambda _sections, contents, _text, _bits: "\n".join(contents),  # no tags
    lambda _sections, _contents, text, _bits: f"{text}\n{text}",  # everything twice
    lambda _sections, _contents, text, _bits: f"{text}\nHope this helps!",
    lambda sections, _contents, text, _bits: f"<{sections[-1].tag}>{text}",  # the last tag echoed in front
    lambda sections, _contents, _text, _bits: "".join(f"<{s.tag}>" for s in sections),  # opened, never closed
    lambda _sections, _contents, text, _bits: text[:-1],
    lambda _sections, _contents, _text, bits: f"final score: {bits % 3}\nscore: {(bits >> 4) % 4}",
    lambda sections, contents, text, _bits: (
        written(sections[::-1], contents[::-1]) if len(sections) > 1 else f"{text}{text}"
    ),
    _off_scale,
    lambda sections, _contents, _text, _bits: json.dumps({s.tag: str(i) for i, s in enumerate(sections)}),
)


# ------------------------------------------------------------------------------
# `fake`: answers made up on the spot, for the demo, for tests and for trying a spec before there is a GPU.
#
# It answers any `AnswerFormat` with well-formed text, quotes true fragments of the document, and grades by how many of
# the query's words are in the document, with noise: labels vary and carry some signal. The same ask and seed give the
# same answer, whatever the order, the batch or the process. On request it misbehaves: garbage, cut answers, refusals,
# slowness, crashes.
#
# It knows words and formats, no labeler. Tokens are counted as four characters each.


VERSION = "1"
"""Changes whenever the same ask and seed give another answer."""

_LEVELS = 1024  # steps of the made-up certainty; fine enough that two pairs seldom tie in a ranking
_NOISE_SHARE = (
    0.35  # measured on word overlap alone: the grade follows the overlap, yet one overlap has two or three grades
)
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class FakeArgs(EngineArgs):
    """Options of the fake engine. Chances are per request and drawn from the ask and its seed, `p_crash` excepted."""

    speed_only: ClassVar[frozenset[str]] = frozenset(
        {"p_slow", "slow_s", "p_crash", "crash_on", "crash", "capacity", "batch", "latency_s"}
    )

    p_garbage: Fraction = 0.0
    """Chance of an answer that is out of format: no tags, doubled or swapped tags, a grade off the scale, JSON, an
    echo, nothing.
    """
    p_truncated: Fraction = 0.0
    """Chance of an answer that breaks off at its length limit. Asks for a decision alone can't break off."""
    p_refused: Fraction = 0.0
    """Chance of a refusal, by the server or in words."""
    p_slow: Fraction = 0.0
    """Chance of an answer that takes `slow_s` and is overtaken by others."""
    slow_s: float = Field(0.05, ge=0.0, le=3600.0)
    """How long a slow answer takes, in seconds."""
    p_crash: Fraction = 0.0
    """Chance that a request takes the engine down; sampled again in each engine process, so a restart gets past it."""
    crash_on: str | None = Field(None, min_length=1)
    """A text: every request whose data (query, document) holds it takes the engine down, each time it is asked."""
    crash: Literal["raise", "exit", "kill", "memory", "silence", "hang", "start", "hang_start"] = "raise"
    """How the engine goes down: by an error; its process ends; its process is killed; memory runs out; it swallows the
    request and works on; it never returns from `poll`; its process is killed each time it starts, whatever is asked; it
    never comes up.
    """
    capacity: int = Field(1024, ge=1)
    """Requests in flight at most."""
    batch: int = Field(64, ge=1)
    """Requests answered by one `poll`."""
    latency_s: float = Field(0.0, ge=0.0, le=3600.0)
    """Seconds that each `poll` takes, as a GPU's step would."""


class Fake(Engine):
    """The fake engine.

    Args:
        spec: its `args` are `FakeArgs`; it takes no `model`.
        overlong: whether the document of a prompt over `max_prompt_tokens` is cut, or the request answered `overlong`.
    """

    Args: ClassVar[type[EngineArgs]] = FakeArgs

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"] = "truncate") -> None:
        self._args = FakeArgs.of(spec)
        self._digest = self.model_digest(spec)
        self._may_cut = overlong == "truncate"
        self._max_chars = spec.max_prompt_tokens * CHARS_PER_TOKEN
        self._queue: list[Request] = []
        self._slow: list[tuple[float, int, Answer]] = []  # by when they are due
        self._is_down = False
        self._has_swallowed = False
        self._below_garbage = int(self._args.p_garbage * 2**24)
        self._below_truncated = self._below_garbage + int(self._args.p_truncated * 2**24)
        self._below_refused = self._below_truncated + int(self._args.p_refused * 2**24)
        self._below_slow = int(self._args.p_slow * 2**24)
        self._may_go_down = self._args.crash_on is not None or self._args.p_crash > 0

    @staticmethod
    def token_counter(spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> Callable[[Ask], int]:
        """Its own count: four characters a token, one more for the rest."""
        most_chars = spec.max_prompt_tokens * CHARS_PER_TOKEN

        def count(ask: Ask) -> int:
            num_chars = _parts_of(ask)[2]
            if num_chars > most_chars and overlong == "quarantine":
                return 0
            return min(num_chars, most_chars) // CHARS_PER_TOKEN + 1

        return count

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """In place of a model's digest: changes with `VERSION`.

        Raises:
            ModelError: the spec names a model.
        """
        if spec.model is not None:
            raise ModelError(
                f"engine.model = {spec.model!r}: the fake engine makes its answers up and takes no model; remove the "
                "key"
            )
        return hashlib.sha256(f"relabel fake engine {VERSION}".encode()).hexdigest()

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Check that labels are distinct and instructions fit; remark that answers are made up."""
        if self._args.crash == "start":
            os.kill(os.getpid(), signal.SIGKILL)
        while self._args.crash == "hang_start":
            time.sleep(60.0)
        for ask in asks:
            if self._answer(Request(0, ask, 0), 0).finish == "overlong":
                raise ConfigError(
                    f"stage {ask.stage!r} can't be asked: its instructions do not fit; raise engine.max_prompt_tokens"
                )
            for decision in ask.decisions:
                if len(set(decision.labels)) != len(decision.labels) or not decision.labels:
                    raise ModelError(
                        f"stage {ask.stage}: decision {decision.name} has labels {decision.labels}, expected distinct "
                        "ones"
                    )
        return [
            "The fake engine makes its answers up: grades follow the words that query and document share, and say "
            "nothing more."
        ]

    @property
    def capacity(self) -> int:
        return max(0, self._args.capacity - len(self._queue) - len(self._slow))

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def poll(self) -> list[Answer]:
        """Answer the next `batch` requests, those of earlier polls that were slow, or go down, as the arguments ask."""
        if self._is_down:
            raise EngineCrashError("the fake engine is down; start another")
        args = self._args
        ready: list[Answer] = []
        while self._queue and not ready:
            requests = self._queue[: args.batch]
            self._queue = self._queue[args.batch :]
            for request in requests:
                if self._may_go_down and self._is_fatal(request):
                    self._go_down()
                    continue
                draw = self._draw(request)
                answer = self._answer(request, draw)
                if self._below_slow and _mix(draw ^ 0x510) & 0xFFFFFF < self._below_slow:
                    heapq.heappush(self._slow, (time.monotonic() + args.slow_s, request.id, answer))
                else:
                    ready.append(answer)
            if args.latency_s:
                time.sleep(min(args.latency_s, POLL_S))
        if self._has_swallowed and not ready:
            time.sleep(POLL_S)  # seems to work on them
        if self._slow and not ready:
            time.sleep(min(max(0.0, self._slow[0][0] - time.monotonic()), POLL_S))
        while self._slow and self._slow[0][0] <= time.monotonic():
            ready.append(heapq.heappop(self._slow)[2])
        return ready

    def facts(self) -> EngineFacts:
        return EngineFacts(
            "fake",
            VERSION,
            "fake",
            self._digest,
            notes=("answers are made up",),
        )

    def close(self) -> None:
        self._queue.clear()
        self._slow.clear()

    def _is_fatal(self, request: Request) -> bool:
        wanted = self._args.crash_on
        if wanted is not None:
            for message in request.ask.messages:
                if any(wanted in text for text in message.parts[1::2]):
                    return True
        chance = self._args.p_crash
        return chance > 0 and random.random() < chance

    def _go_down(self) -> None:
        """Fail in the way that the arguments ask for. Returns only where the request is swallowed."""
        match self._args.crash:
            case "silence":
                self._has_swallowed = True
                return
            case "hang":
                while True:
                    time.sleep(3600.0)
            case "exit":
                os._exit(66)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        self._is_down = True
        self.close()
        if self._args.crash == "memory":
            raise MemoryError("the fake engine ran out of memory, as its arguments ask")
        raise EngineCrashError("the fake engine went down, as its arguments ask; what was in flight is lost")

    def _draw(self, request: Request) -> int:
        """64 bits from the ask's text and the seed. CRC-32 since it is the fastest digest at hand; nobody attacks a
        fake.
        """
        crc = 0
        for message in request.ask.messages:
            crc = _crc_of(message.parts, crc) if message.fields else _crc_of_template(message.parts, crc)
        return _mix(crc * 0x9E3779B97F4A7C15 ^ request.seed)

    def _answer(self, request: Request, draw: int) -> Answer:
        ask = request.ask
        query, document, num_chars = _parts_of(ask)
        flags: tuple[str, ...] = ()
        if num_chars > self._max_chars:
            num_left = len(document) - (num_chars - self._max_chars)
            if not self._may_cut or num_left <= 0:
                tokens = num_chars // CHARS_PER_TOKEN
                limit = self._max_chars // CHARS_PER_TOKEN
                return Answer(
                    request.id,
                    "",
                    "overlong",
                    detail=f"the prompt has {tokens} tokens, engine.max_prompt_tokens is {limit}",
                )
            document = document[:num_left]
            num_chars = self._max_chars
            flags = ("document_truncated",)
        text, finish, distributions = self._made(ask, draw, query, document)
        return Answer(
            request.id,
            text,
            finish,
            distributions,
            prompt_tokens=num_chars // CHARS_PER_TOKEN + 1,
            output_tokens=len(text) // CHARS_PER_TOKEN + 1 if text else 0,
            flags=flags,
        )

    def _made(self, ask: Ask, draw: int, query: str, document: str) -> tuple[str, Finish, dict[str, Distribution]]:
        """Text, finish and distributions of an answer."""
        roll = draw & 0xFFFFFF
        if self._below_truncated <= roll < self._below_refused:
            if ask.format is not None and draw >> 24 & 1:
                return REFUSALS[(draw >> 25) % len(REFUSALS)], "stop", {}
            return "", "refused", {}

        words = _words_of(query)
        head = document[:8192].lower()  # so that one of 400 KB costs no more than another
        hits = sum([word in head for word in words])
        overlap = hits / max(len(words), 1)
        if not document and not any(DOCUMENT_FIELD in message.fields for message in ask.messages):
            # of a query alone: the longer, up to 16 words, the more there is to it
            overlap = min(1.0, len(query.split()) / 16)
        base = (draw >> 24 & 0xFFFF) / 0x10000

        def chosen(options: Sequence[str], marker: str) -> Distribution:
            return _distribution(len(options), _level(overlap, base, _mix(draw + len(marker))))

        distributions = {name: chosen(labels, marker) for name, marker, labels in ask.decisions}
        if ask.format is None:
            return "", "length", {} if roll < self._below_garbage else distributions

        sections = ask.format.sections
        choices = [
            chosen(section.options, opening_of(section)).argmax for section in sections if isinstance(section, Choice)
        ]
        bits = _mix(draw ^ 0x7E47)
        source = document if ask.fragment_source is not None else ""
        subject = query or " ".join(document.replace("<", " ").split()[:4])  # of an ask that shows no query
        thought = (
            f"{hits} of {len(words)} words of the query stand here. {_THOUGHTS[bits & 7]} {_THOUGHTS[bits >> 3 & 7]}"
        )
        contents = made_contents(
            sections=sections,
            choices=choices,
            query=subject,
            thought=thought,
            source=source,
            bits=bits,
        )
        text = written(sections, contents)
        if roll < self._below_garbage:
            return made_garbage(sections, contents, text, bits), "stop", {}
        text = text.removeprefix(ask.prefill)
        if roll < self._below_truncated:
            return text[: bits % max(1, len(text))], "length", {}
        most_chars = ask.max_tokens * CHARS_PER_TOKEN
        if len(text) > most_chars:
            return text[:most_chars], "length", {}
        return text, "stop", distributions


def _crc_of(parts: tuple[str, ...], before: int) -> int:
    return zlib.crc32("".join(parts).encode("utf-8", "surrogatepass"), before)


_crc_of_template = functools.lru_cache(maxsize=64)(_crc_of)
"""Of a message without data, which all rows share."""


def _parts_of(ask: Ask) -> tuple[str, str, int]:
    """The query, the document (the last of each), and the number of characters of the whole prompt."""
    query = ""
    document = ""
    num_chars = len(ask.prefill)
    for _, parts, fields in ask.messages:
        num_chars += sum(map(len, parts))
        if not fields:
            continue
        for name, text in zip(fields, parts[1::2], strict=True):
            if name == "query":
                query = text
            elif name == DOCUMENT_FIELD:
                document = text
    return query, document, num_chars


@functools.lru_cache(maxsize=64)  # rows of one query follow each other
def _words_of(query: str) -> tuple[str, ...]:
    words = query.lower().split()
    return tuple(dict.fromkeys([word for word in words if len(word) > 2] or words))


def _mix(value: int) -> int:
    """64 well-stirred bits: two rounds of multiply and shift (the finaliser of splitmix64)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _level(overlap: float, base: float, bits: int) -> int:
    """How relevant, in 0.._LEVELS-1: the overlap, noise that all of an answer's choices share, and a little of their
    own.
    """
    noise = 0.75 * base + 0.25 * ((bits & 0xFFFF) / 0x10000)
    return int(((1.0 - _NOISE_SHARE) * overlap + _NOISE_SHARE * noise) * (_LEVELS - 1))


@functools.cache
def _distribution(num_labels: int, level: int) -> Distribution:
    """A bump over the labels, centred where the level lies between the first and the last."""
    centre = level / (_LEVELS - 1) * (num_labels - 1)
    weights = [math.exp(-2.0 * (k - centre) ** 2) for k in range(num_labels)]
    total = math.fsum(weights)
    return Distribution(tuple(weight / total for weight in weights), 0.001 + 0.0002 * (level * 37 % 101))
