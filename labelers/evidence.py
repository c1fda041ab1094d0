"""Verbatim evidence, where in the document a quoted fragment is or that it is not there; and `r3a`, which grades by it.

The one normalisation: Unicode NFC, every run of white space folded to one space, none at either end. A fragment is
found if its normal form is a substring of the document's normal form that begins and ends between characters, an accent
never parted from its letter. The span is in code points of the original document. A fragment that is a substring as it
is there is found as it is, accents or not.

Several fragments: one a line. A text of several lines that is found whole is one fragment; otherwise every line that is
not blank has to be found by itself. `none`, in any case, is no evidence, even where the document holds that word.

Source: R3A, section 2 (the extract must be in the document); the normalisation is ours.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Generator
from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts, Turn
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.labelers.verdicts import Reader, is_none, lines_of, token_budget
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    Fragment,
    Message,
    Role,
    Sampling,
    Section,
    Text,
)
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, Pair, Span
from relabel.manifests.specs import LabelerOptions, TextOptions, ThinkOptions

_PIECES = re.compile(r"\s+|\S+")
_FIRST_NAME = 0xF0000  # planes 15 and 16 are for private use: 131,071 names for clusters of several code points
# a document's clusters beyond those; no fragment ever holds it, so they are found only as they are
_NAMELESS = chr(0x10FFFF)


def read_evidence(content: str, document: str) -> tuple[Span, ...]:
    """The spans that an extract quotes, in the order quoted; empty for `none`.

    Args:
        content: what the model wrote between the tags.
        document: what it was to quote.
    Raises:
        VerdictError: `format`: a fragment is not in the document, or there is neither a fragment nor `none`.
    """
    content = content.strip()
    if is_none(content):
        return ()
    if not content:
        raise VerdictError("format", "the extract is empty; expected none or a fragment of the document")
    at = document.find(content)
    if at >= 0:
        return (Span(at, at + len(content), content),)
    index = _Index(document)
    if (whole := index.find(content)) is not None:
        return (whole,)
    spans = []
    for line in lines_of(content):
        if (span := index.find(line)) is None:
            raise VerdictError("format", f"the extract is not in the document: {line[:60]!r}")
        spans.append(span)
    return tuple(spans)


class _Index:
    """A document as a string of symbols, one a cluster, so that one linear `str.find` respects the clusters' edges.

    A cluster is what normalisation can't change across its edges: a character with all that composes with it or is
    reordered around it (combining marks, Hangul vowels and finals). A cluster whose normal form is one code point is
    that code point; a longer one gets a private symbol; a run of white space is one space.
    """

    __slots__ = ("_document", "_ends", "_names", "_starts", "_symbols")

    def __init__(self, document: str) -> None:
        self._document, self._names = document, dict[str, str]()
        self._symbols, self._starts, self._ends = self._symbolise(document, is_document=True)

    def find(self, fragment: str) -> Span | None:
        """Where the fragment first occurs, as it is or after normalisation; None if it does not."""
        at = self._document.find(fragment)
        if at >= 0:
            return Span(at, at + len(fragment), fragment)
        wanted = self._symbolise(fragment, is_document=False)[0].strip(" ")
        if not wanted or _NAMELESS in wanted:
            return None
        at = self._symbols.find(wanted)
        if at < 0:
            return None
        start, end = self._starts[at], self._ends[at + len(wanted) - 1]
        return Span(start, end, self._document[start:end])

    def _symbolise(self, text: str, *, is_document: bool) -> tuple[str, list[int], list[int]]:
        symbols: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        for piece in _PIECES.finditer(text):
            (start, end), word = piece.span(), piece.group()
            if word.isspace():
                symbols.append(" ")
                starts.append(start)
                ends.append(end)
            elif word.isascii():
                symbols.append(word)
                starts.extend(range(start, end))
                ends.extend(range(start + 1, end + 1))
            else:
                edges = [i for i, char in enumerate(word) if i == 0 or not _continues(char)]
                for left, right in zip(edges, [*edges[1:], len(word)], strict=True):
                    symbols.append(self._symbol(word[left:right], is_document))
                    starts.append(start + left)
                    ends.append(start + right)
        return "".join(symbols), starts, ends

    def _symbol(self, cluster: str, is_document: bool) -> str:
        if len(cluster) == 1 and cluster < "\x80":
            return cluster
        normal = unicodedata.normalize("NFC", cluster)
        if len(normal) == 1 and ord(normal) < _FIRST_NAME:
            return normal
        name = self._names.get(normal, _NAMELESS)
        if name == _NAMELESS and is_document and _FIRST_NAME + len(self._names) < ord(_NAMELESS):
            name = self._names[normal] = chr(_FIRST_NAME + len(self._names))
        return name


@functools.lru_cache(maxsize=4096)
def _continues(char: str) -> bool:
    """Whether normalisation may merge this character with, or move it before, the one in front of it."""
    first = unicodedata.normalize("NFD", char)[0]
    # nothing below the combining block continues
    return char >= "\u0300" and (unicodedata.combining(first) != 0 or first in _composing_seconds())


@functools.cache
def _composing_seconds() -> frozenset[str]:
    """Characters of combining class 0 that compose with one before them: Hangul vowels and finals, and a few Indic
    vowel signs.

    Read off the interpreter's own Unicode tables (about 15 ms, once), since they change with its version. Planes 0 and
    1: the others hold no composition of two characters.
    """
    # Hangul composes by rule, not by table
    hangul = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    parts = (unicodedata.decomposition(chr(code)).split() for code in range(0x20000))
    seconds = {chr(int(pair[1], 16)) for pair in parts if len(pair) == 2 and not pair[0].startswith("<")}
    return frozenset(hangul | {second for second in seconds if unicodedata.combining(second) == 0})


# ------------------------------------------------------------------------------
# `r3a`: relevance by way of the searcher's intent and a verbatim piece of evidence, in two turns of one conversation.
#
# Turn one reads the query and up to four documents found or clicked for it, reasons about what is wanted and states the
# intent. It never sees the document, so all documents of a query share it. Turn two goes on with the document:
# reasoning, extract, grade. The sentences are ours; scale, order and rules are the paper's. There is no hint on how to
# judge that the labelers it is compared with go without.
#
# Source: R3A (papers' section 2 and Table 4's ablations); the options `intent`, `extract`, `context` and `stages` are
# those ablations.


_MOST_CONTEXT = 4
"""Documents that the paper shows; the shapes for 0 and 4 are rendered at the start so that a bad
template fails there.
"""


class R3AOptions(ThinkOptions, TextOptions):
    """Options of `r3a`."""

    intent: bool = True
    """Have the intent stated. Without it the reasoning that leads to it stays, in a turn of its own as before: nothing
    but the tag goes.
    """
    extract: bool = True
    """Have the evidence copied from the document before the grade."""
    context: Literal["use", "none"] = "use"
    """Documents that hint at the query's intent: shown or left out."""
    context_is: Literal["found", "clicked"] = "found"
    """What the column of context documents holds, as the prompt says it: documents that a search found for the query,
    or those that people who typed it opened (the paper's).
    """
    max_context_chars: int = Field(2000, ge=1)
    """Each context document is cut to this many characters: they hint at the intent, and no engine may cut them for
    want of room.
    """
    stages: Literal[1, 2] = 2
    """Turns: 2 reasons about the query once, before any document, and shares that; 1 asks everything in one prompt, for
    each pair.
    """
    evidence: Literal["constrained", "checked"] = "checked"
    """`constrained` admits only one substring of the document, or none, while decoding, where the engine can; `checked`
    lets the model write (also several fragments, one a line) and refuses what is not in the document. Both are checked
    when read.
    """


class R3A(Labeler):
    """The R3A labeler. Flags: `evidence_missing` (grade 1 or more with no extract), `evidence_unneeded` (grade 0 with
    one), `context_truncated`, `no_distribution`, and the answers' own.
    """

    Options: ClassVar[type[LabelerOptions]] = R3AOptions

    def __init__(self, options: R3AOptions) -> None:
        self._options = options
        self.uses_context = options.context != "none"
        self._sampling = Sampling(options.temperature, options.top_p)
        is_constrained = options.extract and options.evidence == "constrained"
        self._settings = {
            "grades": options.grades,
            "intent": options.intent,
            "extract": options.extract,
            "one_fragment": options.evidence == "constrained",
            "clicked": options.context_is == "clicked",
        }
        self._prompts = Prompts(BUILT_IN / "r3a", options.templates, shared=SHARED)
        self._turn = functools.cache(self._make_turn)
        self._system = self._turn("system.j2").message()
        for num_context in (0, _MOST_CONTEXT) if self.uses_context else (0,):
            self._first_turn(num_context)
        if options.stages == 2:
            self._turn("verdict.j2", ("document",))
        self.template_digests = self._prompts.digests

        grades = tuple(map(str, range(options.grades)))
        think, score = Text("think", options.max_think_tokens), Choice("score", grades)
        understood: tuple[Section, ...] = (
            (think, Text("intent", options.max_text_tokens, may_be_empty=False)) if options.intent else (think,)
        )
        before = (think,) if options.stages == 2 else understood
        fragment = Fragment("extract", options.max_text_tokens, is_constrained)
        self._intent = Reader(AnswerFormat(understood))
        self._verdict = Reader(AnswerFormat((*before, fragment, score) if options.extract else (*before, score)))
        # No substring of an empty document can be quoted: there, a constrained extract is `none`.
        none = AnswerFormat((*before, Choice("extract", ("none",)), score))
        self._empty_format = none if is_constrained else self._verdict.format
        self._decisions = (Decision("score", "<score>", grades),)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """Two asks (one with `stages: 1`), then the label.

        Raises:
            VerdictError: an answer is out of format, or its extract is not in the document.
        """
        flags = ["context_truncated"] * (
            self.uses_context and any(len(text) > self._options.max_context_chars for text in pair.context)
        )
        said: dict[str, str] = {}
        first = ""
        if self._options.stages == 2:
            answer = yield self._intent_ask(pair)
            said, first = self._intent.read(answer), answer.text
            flags += answer.flags
        answer = yield self._verdict_ask(pair, first)
        said |= self._verdict.read(answer)
        flags += answer.flags
        grade, distribution = int(said["score"]), answer.distributions.get("score")
        evidence = read_evidence(said["extract"], pair.document) if self._options.extract else ()
        if self._options.extract and bool(evidence) != (grade > 0):
            flags.append("evidence_missing" if grade > 0 else "evidence_unneeded")
        if distribution is None:
            flags.append("no_distribution")
        flags = list(dict.fromkeys(flags))
        return Label(grade, distribution, {}, evidence, said.get("intent"), said["think"], flags)

    def probe(self) -> list[Ask]:
        """Both turns (or the one) for a made-up pair; the second goes on from a made-up first answer."""
        context = ("Prune in late winter, before the buds swell.",) if self.uses_context else ()
        pair = EXAMPLE._replace(context=context)
        made = {"think": "A gardener's question.", "intent": "Steps for pruning rose bushes."}
        earlier = "\n".join(f"<{one.tag}>{made[one.tag]}</{one.tag}>" for one in self._intent.format.sections)
        return [*([self._intent_ask(pair)] if self._options.stages == 2 else []), self._verdict_ask(pair, earlier)]

    def _intent_ask(self, pair: Pair) -> Ask:
        format = self._intent.format
        return Ask(
            "intent" if self._options.intent else "think",
            self._opening(pair),
            format,
            token_budget(format),
            shared_by=pair.query_id,
            sampling=self._sampling,
        )

    def _verdict_ask(self, pair: Pair, first_answer: str) -> Ask:
        """The same conversation, continued, with the first answer as the model's own turn; or all in one turn."""
        if self._options.stages == 2:
            earlier = Message(
                "assistant",
                self._intent.turn_parts(first_answer),
                tuple(section.tag for section in self._intent.format.sections),
            )
            verdict = self._turn("verdict.j2", ("document",)).message(pair.document)
            messages = (*self._opening(pair), earlier, verdict)
        else:
            messages = self._opening(pair, pair.document)
        source = pair.document if self._options.extract else None
        format = self._verdict.format if pair.document.strip() else self._empty_format
        return Ask(
            "verdict",
            messages,
            format,
            token_budget(self._verdict.format),
            self._decisions,
            "",
            source,
            None,
            self._sampling,
        )

    def _opening(self, pair: Pair, *document: str) -> tuple[Message, ...]:
        longest = self._options.max_context_chars
        context = [text[:longest] for text in pair.context] if self.uses_context else []
        return self._system, self._first_turn(len(context)).message(pair.query, *context, *document)

    def _first_turn(self, num_context: int) -> Turn:
        if self._options.stages == 2:
            return self._turn("intent.j2", ("query", "context"), num_context)
        return self._turn("single.j2", ("query", "context", "document"), num_context)

    def _make_turn(self, file: str, data: tuple[str, ...] = (), num_context: int = 0) -> Turn:
        role: Role = "user" if data else "system"
        return self._prompts.turn(role, file, data=data, settings=self._settings, num_context=num_context)
