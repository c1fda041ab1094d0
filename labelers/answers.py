"""The answer in what a model wrote freely, without a grammar: the one whole answer in it, whatever wraps it.

For engines: what they hand on is then in its format to the letter, as `Reader` wants it, or what came, which no reader
takes. So a reader guesses nothing, an earlier turn is sent back without its chatter, and what is trained on its format
(`distill/teachers`) earns nothing by a wrapped answer.

- A thought in the text is no part of the verdict, whatever it quotes. Where the format begins with one, it is that.
- Outside of thoughts there is one whole answer, or the same one several times, and no other part of one.
- What is in a section stays what it is: marks of emphasis around a choice are taken off, and nothing is corrected.
- What the ask's own data holds word for word is an echo of it, and no answer: a document may hold a forged one.

All of it takes time linear in the text's length and the prompt's.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from relabel.labelers.verdicts import Reader, lines_of
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Indices,
    JsonIndices,
    JsonTexts,
    OptionLines,
    Section,
    Text,
    closing_of,
    opening_of,
)
from relabel.manifests.errors import VerdictError


class AnswerText(NamedTuple):
    """What an engine answers.

    Args:
        text: the answer alone, in its format; what came where there is none or more than one; nothing for an echo.
        detail: why it is no answer, where that can't be seen in the text.
    """

    text: str
    detail: str = ""


def answer_in(ask: Ask, written: str, *, thought: str = "", is_cut: bool = False) -> AnswerText:
    """The answer to an ask in what a model wrote. A text that is in the ask's format stays as it is.

    Args:
        written: without the ask's prefill.
        thought: what a server took out of it as the model's own thought.
        is_cut: it may go on.
    """
    if ask.format is None:
        return AnswerText(written)
    if not written.strip() and any(not mark.is_opening for mark in _marks_in(thought, ask.format)):
        # a server that took all of it for the thought, which may only name how it ends
        written = thought
        thought = ""
        is_cut = True
    text = ask.prefill + written
    answer = _exact(ask.format, text, thought) or _inside(ask.format, text, thought, is_cut=is_cut)
    if answer is None or not answer.text.startswith(ask.prefill):
        return AnswerText(_as_it_came(ask.format, written, thought, is_cut=is_cut))
    if answer.is_ambiguous:
        return AnswerText(written, "it holds answers that differ")
    if _is_echo(answer, ask):
        return AnswerText("", "the texts that were asked about hold the answer word for word: it is an echo of them")
    return AnswerText(answer.text.removeprefix(ask.prefill))


# ------------------------------------------------------------------------------
# Thoughts: where they begin and end in a text.


_THOUGHT_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "seed:think")
_EDGES = (
    *((f"<{tag}>", f"</{tag}>") for tag in _THOUGHT_TAGS),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
_KINDS: dict[str, tuple[str, bool]] = {}
"""By what a thought begins or ends with: how thoughts of its kind begin, and whether this is that."""
for _opening, _closing in _EDGES:
    _KINDS[_opening] = (_opening, True)
    _KINDS[_closing] = (_opening, False)
_MARK = re.compile("|".join(map(re.escape, _KINDS)))


class _Mark(NamedTuple):
    """Where a thought begins or ends.

    Args:
        kind: how thoughts of its kind begin.
    """

    start: int
    end: int
    kind: str
    is_opening: bool


class _Stretch(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


@dataclass(frozen=True)
class _Parted:
    """A text, parted into thoughts and what is outside of them.

    Args:
        is_sure: its thoughts can't be parted in another way.
    """

    thoughts: list[_Stretch]
    outside: list[_Stretch]
    is_sure: bool = True


def _thought_section(format: AnswerFormat) -> Text | None:
    """The section that a model's own thought is, in formats that begin with it."""
    first = format.sections[0]
    return first if isinstance(first, Text) and first.tag in _THOUGHT_TAGS else None


def _marks_in(text: str, format: AnswerFormat) -> list[_Mark]:
    """Marks of thoughts, in order; a section's tag is none, but for the thought's."""
    section = _thought_section(format)
    tags = {opening_of(other) for other in format.sections if other is not section}
    marks = [_Mark(*match.span(), *_KINDS[match.group()]) for match in _MARK.finditer(text)]
    return [mark for mark in marks if mark.kind not in tags]


def _partings(text: str, format: AnswerFormat) -> Iterator[_Parted]:
    """How a text may be parted, the most probable way first."""
    marks = _marks_in(text, format)
    yield _nested(text, marks)
    closings = [mark for mark in marks if not mark.is_opening]
    if len(closings) == 1 and marks[-1] is closings[0]:
        # a thought may name tags that it does not mean
        is_begun = marks[0].is_opening and not _has_words(text[: marks[0].start])
        thought = _Stretch(marks[0].end if is_begun else 0, closings[0].start)
        yield _Parted([thought], [_Stretch(closings[0].end, len(text))], is_sure=False)


def _nested(text: str, marks: Sequence[_Mark]) -> _Parted:
    """Thoughts end where all is closed that was opened in them. One that is closed and was never opened began in the
    prompt, where a template opens it: all before is the thought, unless the text begins with another one.
    """
    thoughts: list[_Stretch] = []
    outside: list[_Stretch] = []
    may_be_opened = not marks or not marks[0].is_opening or _has_words(text[: marks[0].start])
    kind = ""
    depth = 0
    begun = 0
    at = 0
    for mark in marks:
        if depth == 0 and mark.is_opening:
            outside.append(_Stretch(at, mark.start))
            kind = mark.kind
            depth = 1
            begun = mark.end
        elif depth == 0 and may_be_opened:
            thoughts = [_Stretch(0, mark.start)]
            outside = []
            at = mark.end
            may_be_opened = False
        elif depth and mark.kind == kind:
            depth += 1 if mark.is_opening else -1
            if depth == 0:
                thoughts.append(_Stretch(begun, mark.start))
                at = mark.end
    if depth == 0:
        outside.append(_Stretch(at, len(text)))
    return _Parted(thoughts, outside)


# ------------------------------------------------------------------------------
# The one answer of a text: what it is to the letter, or what is inside of it.


@dataclass(frozen=True)
class _Found:
    """The answer of a text.

    Args:
        text: in its format.
        pieces: what a document would have to hold for it to be an echo; none where an answer quotes by its nature.
        is_ambiguous: there are others that differ.
    """

    text: str
    pieces: tuple[str, ...] = ()
    is_ambiguous: bool = False


def _exact(format: AnswerFormat, text: str, thought: str) -> _Found | None:
    """The answer that a text is to the letter; None where it is none, or its thought was taken out of it."""
    first = format.sections[0]
    if isinstance(first, OptionLines):
        lines = lines_of(text)
        is_exact = bool(lines) and all(line.startswith(_beginnings(first)) and line == _line_of(line) for line in lines)
        return _Found(text, tuple(lines)) if is_exact else None
    if not _is_in_format(format, text):
        return None
    if isinstance(first, JsonIndices):
        return _Found(text, (text,))
    if isinstance(first, JsonTexts):
        return _Found(text)  # an array of short texts is made of what the data holds
    contents = {tag: text[start:end] for tag, (start, end) in Reader(format).spans(text).items()}
    section = _thought_section(format)
    if section is None:
        return _Found(text, tuple(f"<{tag}>{content}</{tag}>" for tag, content in contents.items()))
    own = contents.pop(section.tag)
    if thought.strip() and not own.strip():
        return None
    pieces = [f"<{tag}>{content}</{tag}>" for tag, content in contents.items()]
    return _Found(text, (own, *pieces) if pieces else ())


def _inside(format: AnswerFormat, text: str, thought: str, *, is_cut: bool) -> _Found | None:
    """The one answer inside of a text; None where there is none."""
    for parted in _partings(text, format):
        wholes = _wholes(format, text, parted)
        if any(whole.value != wholes[0].value for whole in wholes):
            return _Found(text, is_ambiguous=True)
        if wholes:
            return _finished(
                format,
                text,
                parted,
                wholes,
                thought,
                is_cut=is_cut,
            )
    return None


def _finished(
    format: AnswerFormat, text: str, parted: _Parted, wholes: Sequence[_Whole], thought: str, *, is_cut: bool
) -> _Found | None:
    """An answer with its thought; None where that is missing, a section is off, or all may still be a thought."""
    whole = wholes[0]
    spans = list(itertools.chain.from_iterable(same.spans for same in wholes))
    words = [stretch for stretch in _without(parted.outside, spans) if _has_words(text[slice(*stretch)])]
    start = spans[0].start if spans else len(text)
    if words and not parted.is_sure:
        return None
    if is_cut and words and words[0].start < start:
        return None
    section = _thought_section(format)
    if section is None:
        return _Found(whole.text, whole.pieces) if _is_in_format(format, whole.text) else None
    thoughts = [text[slice(*stretch)] for stretch in parted.thoughts if stretch.end <= start]
    if not thoughts and not thought.strip():
        return None
    if not thoughts and not spans and (words or is_cut):
        return None
    last_thought = next((own for own in reversed(thoughts) if own.strip()), thought)
    answer = _section_text(section, _harmless(format, last_thought))
    if whole.text:
        answer += f"\n{whole.text}"
    pieces = whole.pieces
    if spans and not words:  # among other words a verdict may be a quotation, whatever the model thought before
        pieces = (last_thought, *pieces)
    return _Found(answer, pieces) if _is_in_format(format, answer) else None


def _is_in_format(format: AnswerFormat, text: str) -> bool:
    try:
        Reader(format).read(Answer(0, text, "stop"))
    except VerdictError:
        return False
    return True


def _as_it_came(format: AnswerFormat, written: str, thought: str, *, is_cut: bool) -> str:
    """A text that is no answer, for a reader to report why: with the thought that a server took out of it."""
    section = _thought_section(format)
    if section is None or not thought.strip() or written.lstrip().startswith(opening_of(section)):
        return written
    harmless = _harmless(format, thought)
    if is_cut and not written.strip():
        return f"{opening_of(section)}{harmless}"
    return f"{_section_text(section, harmless)}\n{written.lstrip()}"


def _section_text(section: Section, content: str) -> str:
    return f"{opening_of(section)}{content}{closing_of(section)}"


def _harmless(format: AnswerFormat, thought: str) -> str:
    """A thought that may quote the format, with its tags in square brackets: it is no part of the verdict."""
    tags = "|".join(re.escape(section.tag) for section in format.sections)
    return re.sub(rf"<(/?(?:{tags}))>", r"[\1]", thought)


# ------------------------------------------------------------------------------
# Whole answers, by the form of their format.


@dataclass(frozen=True)
class _Whole:
    """A whole answer in a text, without a thought.

    Args:
        spans: where its sections or lines are, tags included.
        text: as its format wants it.
        value: its content; equal for equal answers.
        pieces: as they are in the text, what a document would have to hold for it to be an echo.
    """

    spans: tuple[_Stretch, ...]
    text: str
    value: Any
    pieces: tuple[str, ...]


def _wholes(format: AnswerFormat, text: str, parted: _Parted) -> list[_Whole]:
    """All whole answers outside of thoughts, readable or not; none where other parts of one are there as well."""
    first = format.sections[0]
    if isinstance(first, JsonIndices):
        return _objects(first, text, parted.outside)
    if isinstance(first, JsonTexts):
        return _arrays(text, parted.outside)
    if isinstance(first, OptionLines):
        return _blocks(first, text, parted.outside)
    thought = _thought_section(format)
    sections = [section for section in format.sections if section is not thought]
    if sections:
        return _tagged(sections, text, parted.outside)
    return [_Whole((), "", None, ())]  # the thought is all that was asked for


def _tagged(sections: Sequence[Section], text: str, outside: Iterable[_Stretch]) -> list[_Whole]:
    """Rows of sections: each of their tags in its turn, and no tag else."""
    edges: list[str] = []
    for section in sections:
        edges += [opening_of(section), closing_of(section)]
    tag = re.compile("|".join(map(re.escape, edges)))
    tags: list[re.Match[str]] = []
    for stretch in outside:
        within = list(tag.finditer(text, *stretch))
        if len(within) % 2:
            return []  # a section begins here and ends beyond a thought, or never
        tags += within
    wholes: list[_Whole] = []
    for first in range(0, len(tags), len(edges)):
        row = tags[first : first + len(edges)]
        if [match.group() for match in row] != edges:
            return []
        wholes.append(_row(sections, text, row))
    return wholes


def _row(sections: Sequence[Section], text: str, tags: Sequence[re.Match[str]]) -> _Whole:
    """One answer, by its tags."""
    spans: list[_Stretch] = []
    contents: list[str] = []
    for section, opening, closing in zip(sections, tags[::2], tags[1::2], strict=True):
        spans.append(_Stretch(opening.start(), closing.end()))
        contents.append(_value_of(section, text[opening.end() : closing.start()].strip()))
    texts = [_section_text(section, content) for section, content in zip(sections, contents, strict=True)]
    return _Whole(tuple(spans), "\n".join(texts), contents, tuple(text[slice(*span)] for span in spans))


def _value_of(section: Section, content: str) -> str:
    """A section's content; a choice or numbers without marks of emphasis around them."""
    if not isinstance(section, Choice | Indices):
        return content
    if isinstance(section, Choice) and content in section.options:
        return content
    return _EMPHASIZED.sub(r"\2", content).strip()


_EMPHASIZED = re.compile(r"\A([*_`]{1,3})([^*_`]*)\1\Z")
_OBJECT = re.compile(r"\{[^{}]*+(\}?)")
_KEY = re.compile(r'"([^"]*+)"(?=\s*+:)')
_ITEM = r'(?:"(?:[^"\\]|\\.)*+"|-?[0-9][0-9.eE+-]*+)\s*+'
_ARRAY = re.compile(rf"\[\s*+(?:{_ITEM}(?:,\s*+{_ITEM})*+)?+\]", re.DOTALL)


def _objects(section: JsonIndices, text: str, outside: Iterable[_Stretch]) -> list[_Whole]:
    """Objects with a key of the format; what holds no object in itself."""
    keys = frozenset(section.keys)
    wholes: list[_Whole] = []
    for stretch in outside:
        for match in _OBJECT.finditer(text, *stretch):
            if keys.isdisjoint(_KEY.findall(match.group())):
                continue
            if not match[1]:
                return []
            wholes.append(_json(match))
    return wholes


def _arrays(text: str, outside: Iterable[_Stretch]) -> list[_Whole]:
    wholes: list[_Whole] = []
    for stretch in outside:
        wholes += map(_json, _ARRAY.finditer(text, *stretch))
    return wholes


def _json(match: re.Match[str]) -> _Whole:
    text = match.group()
    try:
        value = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        value = text
    return _Whole((_Stretch(*match.span()),), text, value, (text,))


_BULLET = re.compile(r"\A(?:[-*+•]|[0-9]{1,3}[.)])\s+")
_EMPHASIZED_BEGINNING = re.compile(r"\A(\*\*|__|\*|_|`)(.+?)\1")


def _beginnings(section: OptionLines) -> tuple[str, ...]:
    """How lines of an answer begin: `[ANSWER]`."""
    return (section.alone, *dict.fromkeys(option.partition(" ")[0] for option in section.options))


def _blocks(section: OptionLines, text: str, outside: Iterable[_Stretch]) -> list[_Whole]:
    """Lines of an answer that follow each other; none where other lines name one of their beginnings."""
    beginnings = _beginnings(section)
    blocks: list[list[tuple[_Stretch, str]]] = []
    for stretch in outside:
        blocks.append([])
        at = stretch.start
        for line in text[slice(*stretch)].splitlines(keepends=True):
            span = _Stretch(at, at + len(line))
            at = span.end
            plain = _line_of(line)
            if plain.startswith(beginnings):
                blocks[-1].append((span, plain))
            elif any(beginning in plain for beginning in beginnings):
                return []
            elif _has_words(line):
                blocks.append([])
    wholes: list[_Whole] = []
    for block in filter(None, blocks):
        lines = tuple(line for _, line in block)
        wholes.append(_Whole(tuple(span for span, _ in block), "\n".join(lines), lines, lines))
    return wholes


def _line_of(line: str) -> str:
    """A line of an answer without its bullet, emphasis and what ends a turn."""
    plain = _CONTROL.sub("", line).strip()
    plain = _BULLET.sub("", plain)
    plain = _EMPHASIZED_BEGINNING.sub(r"\2", plain)
    for mark in ("**", "`"):
        if plain.count(mark) % 2:  # emphasis that begins or ends at another line
            plain = plain.removeprefix(mark).removesuffix(mark)
    return plain


# ------------------------------------------------------------------------------
# What is around an answer, and what is an echo.


_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|<eos>|<pad>")
"""Control tokens of chat templates, written out in the text."""
_FENCE = re.compile(r"(?:```|~~~)[\w+-]*")
_FOLDED_AWAY = str.maketrans("", "", "*_`#")
_HTML = {"lt": "<", "#60": "<", "#x3c": "<", "gt": ">", "#62": ">", "#x3e": ">", "quot": '"', "#34": '"', "#x22": '"'}
_HTML_SPELLING = re.compile(rf"&(?:amp;)*({'|'.join(_HTML)});", re.IGNORECASE)


def _has_words(text: str) -> bool:
    """Whether there is more than white space, fences, emphasis and control tokens: quotation marks count as words."""
    return bool(_FENCE.sub("", _CONTROL.sub("", text)).translate(_FOLDED_AWAY).strip())


def _without(outside: Iterable[_Stretch], spans: Sequence[_Stretch]) -> list[_Stretch]:
    """What is outside of thoughts, less these spans; both are in order."""
    rest: list[_Stretch] = []
    number = 0
    for stretch in outside:
        at = stretch.start
        while number < len(spans) and spans[number].start < stretch.end:
            rest.append(_Stretch(at, spans[number].start))
            at = spans[number].end
            number += 1
        rest.append(_Stretch(at, stretch.end))
    return rest


def _is_echo(answer: _Found, ask: Ask) -> bool:
    """Whether the data of its ask holds all of an answer."""
    if not answer.pieces:
        return False
    texts = itertools.chain.from_iterable(message.parts[1::2] for message in ask.messages)
    data = "\0".join(map(_folded, texts))
    return all(_folded(piece) in data for piece in answer.pieces)


def _folded(text: str) -> str:
    """A text in which white space, case, emphasis and the way in which HTML spells it do not count."""
    plain = _HTML_SPELLING.sub(lambda match: _HTML[match[1].lower()], text)
    return "".join(plain.translate(_FOLDED_AWAY).casefold().split())
