"""Verbatim evidence, where in the document a quoted fragment is or that it is not there; `r3a`, which grades by it; and
`route`, which selects the passages that answer a question.

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
import itertools
import json
import re
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts, Turn
from relabel.labelers.registry import EXAMPLE, Labeler, Recalled
from relabel.labelers.review import CHARS_PER_DOCUMENT, CHARS_PER_TOKEN, SHRINK
from relabel.labelers.verdicts import Reader, is_none, lines_of, token_budget, unreadable
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    Fragment,
    Message,
    OptionLines,
    Role,
    Sampling,
    Section,
    Text,
)
from relabel.manifests.errors import InputError, VerdictError
from relabel.manifests.labels import COLUMN, InputColumn, Label, LabelColumn, Node, Pair, Span, Tree, read_tree
from relabel.manifests.process import require
from relabel.manifests.records import checked, plain
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
        return Label(grade, distribution, {}, evidence, said.get("intent"), said["think"], list(dict.fromkeys(flags)))

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


# ------------------------------------------------------------------------------
# The part of a document's tree that a router sees: all headings, and the content that is lit just now.
#
# Source: RDR2 (papers, section 3.2 and appendix A.1): first a retrieved passage with its neighbours; then, heading by
# heading, content that was not lit before in its place. The subtree keeps its size, and ids stay those of the tree.


@dataclass(frozen=True)
class Subtree:
    """A value: `light` and `expand` give another.

    Args:
        lit: ids of the content that is visible now.
        seen: ids of all content that is or was.
    """

    tree: Tree = field(repr=False)
    lit: frozenset[int] = frozenset()
    seen: frozenset[int] = frozenset()

    def light(self, matched: Iterable[int]) -> Subtree:
        """With these content nodes lit, and nothing else but their siblings, ancestors and descendants: their content
        siblings, all content that those hold, and content that holds them.
        """
        found: set[int] = set()
        for parent, id in {self.tree.nodes[id].parent: id for id in matched}.items():
            found |= self._holding(id) | self.own_content(parent)
        return self._lit(found)

    def expand(self, heading: int) -> Subtree:
        """With the heading's own content lit, as far as none of it was before, in place of what is lit now; the same
        subtree where there is no such content.
        """
        new = self.own_content(heading) - self.seen
        above = {holder for id in new for holder in self._holding(id)}
        return self._lit(new | above) if new else self

    def own_content(self, heading: int) -> frozenset[int]:
        """Content below a node with no heading in between; of a heading without any, that of its subheadings."""
        found: set[int] = set()
        waiting = [heading]
        while waiting:
            children = self.tree.children[waiting.pop()]
            own = {id for child in children for id in self._content_in(child)}
            found |= own
            waiting += () if own else children
        return frozenset(found)

    @functools.cached_property
    def visible(self) -> tuple[Node, ...]:
        """All headings and what is lit, in document order."""
        return tuple(node for node in self.tree.nodes if self.is_visible(node.id))

    def is_visible(self, id: int) -> bool:
        """Whether there is such a node, and it is a heading or lit."""
        return 0 <= id < len(self.tree.nodes) and (not self.tree.nodes[id].is_content or id in self.lit)

    @functools.cached_property
    def collapsed(self) -> frozenset[int]:
        """Headings below which nothing is lit; that there is something to light is not shown, so it does not count."""
        above = {holder.id for id in self.lit for holder in self.tree.ancestors(id)}
        return frozenset(node.id for node in self.tree.nodes if not node.is_content) - above

    def _lit(self, found: Iterable[int]) -> Subtree:
        lit = frozenset(found)
        return Subtree(self.tree, lit, self.seen | lit)

    def _holding(self, id: int) -> set[int]:
        return {node.id for node in self.tree.ancestors(id) if node.is_content}

    def _content_in(self, id: int) -> Iterator[int]:
        """The node and all below it; nothing of a heading."""
        waiting = [id]
        while waiting:
            id = waiting.pop()
            if self.tree.nodes[id].is_content:
                yield id
                waiting += self.tree.children[id]


def one_line(text: str) -> str:
    """A text whose line breaks and other white space are single spaces."""
    return " ".join(text.split())


# ------------------------------------------------------------------------------
# A router's answer: one action a line, on nodes of the subtree that it was shown.
#
# Source: RDR2 (papers, section 3.3): `[ANSWER] id: prefix` takes a content node, `[EXPAND] id: prefix` unfolds a
# collapsed heading, `[REFUSE]` is alone. The prefix ties the id to its text; what counts as one is ours: three words
# at least, or all of a text that has fewer.


ANSWER, EXPAND, REFUSE = "[ANSWER]", "[EXPAND]", "[REFUSE]"
OPTION_WORDS = 5
"""Words of the prefixes that a grammar admits."""
_WORD_CHARS = 40
_WORD = re.compile(rf"[\u3040-\u30ff\u3400-\u9fff]|[^\s<\u3040-\u30ff\u3400-\u9fff]{{1,{_WORD_CHARS}}}")
"""What is between spaces or `<`, which begins the control tokens of many models, so that no prefix wants it; each
character of Chinese and Japanese, which have no spaces; 40 characters at most.
"""
OPTION_CHARS = OPTION_WORDS * (_WORD_CHARS + 1)
"""Longest prefix that a grammar admits."""
_ACTION = re.compile(r"(\[ANSWER\]|\[EXPAND\]) (0|[1-9][0-9]{0,8}):(?:\s+(.*))?", re.DOTALL)


class Actions(NamedTuple):
    """What an answer says.

    Args:
        answers, expands: ids of the nodes of legal actions, each once, in the order written.
        refused: it says `[REFUSE]` and no action that is legal.
        expelled: lines that are meant as an action and are not legal.
        fault: why the first line that is no legal action is none, whether meant as one or not; None without such lines.
    """

    answers: tuple[int, ...]
    expands: tuple[int, ...]
    refused: bool
    expelled: int
    fault: str | None


def options_of(subtree: Subtree) -> tuple[str, ...]:
    """The legal actions, each with a prefix of `OPTION_WORDS` words."""
    found = []
    for node in subtree.visible:
        if node.is_content or node.id in subtree.collapsed:
            text = one_line(node.text)
            words = list(itertools.islice(_WORD.finditer(text), OPTION_WORDS))
            prefix = one_line(text[: words[-1].end()].replace("<", " ")) if words else ""
            found.append(f"{ANSWER if node.is_content else EXPAND} {node.id}: {prefix}".rstrip())
    return tuple(found)


def read_actions(text: str, subtree: Subtree) -> Actions:
    """Read an answer line by line; blank lines say nothing."""
    ids: dict[str, dict[int, None]] = {ANSWER: {}, EXPAND: {}}
    faults: list[str] = []
    expelled = num_refusals = 0
    for line in filter(None, map(str.strip, text.split("\n"))):
        if line == REFUSE:
            num_refusals += 1
        elif fault := _fault(line, subtree):
            faults.append(f"{fault}: {line[:60]!r}")
            expelled += line.startswith((ANSWER, EXPAND, REFUSE))
        else:
            kind, _, rest = line.partition(" ")
            ids[kind][int(rest.partition(":")[0])] = None
    has_actions = any(ids.values())
    if num_refusals and has_actions:
        faults.append(f"{REFUSE} is given together with actions")
        expelled, num_refusals = expelled + num_refusals, 0
    if not (has_actions or num_refusals or faults):
        faults.append("there is no action")
    return Actions(tuple(ids[ANSWER]), tuple(ids[EXPAND]), num_refusals > 0, expelled, next(iter(faults), None))


def _fault(line: str, subtree: Subtree) -> str | None:
    said = _ACTION.fullmatch(line)
    if said is None:
        return "no action"
    kind, id, prefix = said[1], int(said[2]), said[3] or ""
    if not subtree.is_visible(id):
        return f"node {id} is not visible"
    node = subtree.tree.nodes[id]
    if kind == ANSWER and not node.is_content:
        return f"node {id} is a heading, which answers nothing"
    if kind == EXPAND and id not in subtree.collapsed:
        return f"node {id} is no collapsed heading"
    words, wanted = _words(prefix), _words(node.text)
    is_prefix = words == wanted[: len(words)] and len(words) >= min(3, len(wanted))
    return None if is_prefix else f"the text does not begin that of node {id}"


def _words(text: str) -> list[str]:
    """Case, white space and how an accented letter is written do not count."""
    return [unicodedata.normalize("NFC", word).casefold() for word in _WORD.findall(text)]


# ------------------------------------------------------------------------------
# A step of `route` as its label keeps it, JSON: what was unfolded, shown and answered. And the way back: which answer
# it holds.


NODES_FIELD = "nodes"
"""What the texts of nodes are called in the prompt."""


@dataclass(frozen=True)
class RouteStep:
    """One ask and its answer.

    Args:
        expanded: heading that was unfolded for it; None for what a passage lights.
        lit: content that was shown.
        chars: of all nodes' texts as shown: which of several asks with ever shorter texts it was. None in labels of
            the first versions.
        answers, expands: nodes of legal actions, in the order written.
        expelled: lines meant as an action that were not legal.
    """

    expanded: int | None
    lit: tuple[int, ...]
    answers: tuple[int, ...]
    expands: tuple[int, ...]
    refused: bool
    expelled: int
    chars: int | None = None


def read_step(text: str) -> RouteStep:
    """The step that a label keeps.

    Raises:
        ValueError: it is none.
    """
    return checked(RouteStep, json.loads(text))


# ------------------------------------------------------------------------------
# Where in a document a retrieved passage comes from: exactly where its text is, else where the document
# reads most like it.
#
# Source: RDR2 (papers, section 3.3): a window of the passage's length slides over the document, and the one at the
# least edit distance is taken. A retriever cuts and cleans pages in its own way, so passages are seldom verbatim in
# them.


MOST_CHARS = 1000
"""A longer passage is searched by its beginning: time grows with the product of both lengths."""
_MOST_WINDOWS = 40
"""Windows that are compared to each passage's length of document. Prose takes a tenth of it; in a text that repeats
itself without end, all windows are near, and the search stops at the nearest so far.
"""


class PassagePlace(NamedTuple):
    """A piece of the document, `document[start:end]`, and its edit distance to the passage, or to its first
    `MOST_CHARS` characters; 0 where it is all of the document.
    """

    start: int
    end: int
    distance: int


def align(passage: str, document: str) -> PassagePlace | None:
    """The window of the passage's length that is nearest to it; the first of equals. All of the document for a passage
    that is as long or longer; None where more than half of the passage would have to be changed: two texts of one
    language that have nothing to do with each other are at about three quarters.

    Raises:
        MissingExtraError: the passage is not in the document verbatim, and rapidfuzz is not installed.
    """
    size, start = len(passage), document.find(passage)
    if size >= len(document):
        return PassagePlace(0, len(document), 0)
    if start >= 0:
        return PassagePlace(start, start + size, 0)
    rapidfuzz = require("rapidfuzz", extra="pairs", purpose="Finding a passage that is not there verbatim")
    distance = rapidfuzz.distance.Levenshtein.distance
    head = passage[:MOST_CHARS]
    least, at = len(head) // 2 + 1, 0
    for _ in range(_MOST_WINDOWS * len(document) // len(head)):
        if at > len(document) - size:
            break
        found = distance(head, document[at : at + len(head)])
        if found < least:
            start, least = at, found
        # A window moved by one character loses one and gains one, so its distance changes by two at most: from a window
        # that is far off, those that can't be better are stepped over.
        at += (found - least) // 2 + 1
    return PassagePlace(start, start + size, least) if start >= 0 else None


def content_at(tree: Tree, place: PassagePlace) -> list[int]:
    """Ids of the content nodes that a place lies in, in order: of which more lies there than the edits explain; where
    there is none, the one of which most does.

    So a passage that was cut a character early or late, or is a few characters off at its ends, has no more nodes than
    the passage itself.
    """
    overlaps = {
        node.id: min(node.end, place.end) - max(node.start, place.start) for node in tree.nodes if node.is_content
    }
    found = [id for id, overlap in overlaps.items() if overlap > place.distance + 1]
    most = max(overlaps, key=overlaps.__getitem__, default=None)
    return found or ([] if most is None or overlaps[most] <= 0 else [most])


# ------------------------------------------------------------------------------
# `route`: which passages of a document answer a question, and which headings to unfold next; for each retrieved
# passage, and again for what each unfolded heading brings to light.
#
# Source: RDR2 (papers, section 3 and appendix A.1). The sentences are ours.


TREE = InputColumn(COLUMN, "list<node>", "The document's tree, as `relabel pairs tree` writes it.", True)
PASSAGES = InputColumn("passages", "list<string>", "Passages of the document that were retrieved, the best first.")


class RouteOptions(LabelerOptions):
    """Options of `route`."""

    grades: Literal[3] = 3
    """Three: some node answers (2), none does and a heading was to be unfolded (1), neither (0)."""
    passages: int = Field(5, ge=1, le=100)
    """Most passages of a document that are read, each with a subtree of its own."""
    expansions: int = Field(5, ge=0, le=100)
    """Most headings of a document that are unfolded, each asked about again; 0 asks once a passage."""
    expelled: Literal["quarantine", "keep"] = "quarantine"
    """What becomes of an answer with a line that is no legal action: it is asked again and in the end quarantined; or
    the line is left out and counted.
    """
    window_tokens: int = Field(7000, ge=256)
    """Room for nodes, at four characters a token; longer texts are cut. Where `engine.max_prompt_tokens` is less, that
    is the limit.
    """


class Route(Labeler):
    """Asks for actions on a document's tree. Flags: `passage_not_found`, `document_truncated` (a node's text),
    `expelled`, `collapsed` (an answer without a line that is an action), and the answer's own.
    """

    Options: ClassVar[type[LabelerOptions]] = RouteOptions
    columns = (
        LabelColumn("answer_ids", "list<int32>", "Ids of the nodes that answer, in the order given."),
        LabelColumn("expand_ids", "list<int32>", "Ids of the headings that were to be unfolded, in the order given."),
        LabelColumn("refused", "bool", "Whether it was said that nothing answers, and nothing was to be unfolded."),
        LabelColumn("expelled", "int32", "Lines meant as an action that were not legal, where those are kept."),
        LabelColumn("steps", "list<string>", "Each ask as JSON: what was unfolded, lit, answered and to be unfolded."),
    )
    input_columns = (TREE, PASSAGES)
    recalls = True

    def __init__(self, options: RouteOptions) -> None:
        self._options, self._room = options, options.window_tokens * CHARS_PER_TOKEN
        self._prompts = Prompts(BUILT_IN / "route", options.templates)
        self._system = self._prompts.turn("system", "system.j2", data=(), settings={"words": OPTION_WORDS}).message()
        self.probe()  # a bad template fails here
        self.template_digests = self._prompts.digests

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """An ask for each passage that lights other content than those before, and one for each heading unfolded.

        Raises:
            VerdictError: the tree is not of the document; an answer has a line that is no legal action, where those
                are not kept, or nothing else.
        """
        try:
            subtree = Subtree(read_tree(pair.columns.get(TREE.name, ()), pair.document))
        except InputError as exc:
            raise VerdictError("format", str(exc)) from exc
        flags: dict[str, None] = {}
        matches: dict[tuple[int, ...], None] = {}
        for passage in pair.columns.get(PASSAGES.name, ())[: self._options.passages]:
            place = align(passage, pair.document)
            if matched := content_at(subtree.tree, place) if place is not None else []:
                matches[tuple(matched)] = None
            else:
                flags["passage_not_found"] = None
        steps: list[RouteStep] = []
        left = self._options.expansions
        for ids in matches or [()]:
            subtree = subtree.light(ids)
            waiting: list[int | None] = [None]
            while waiting:
                if (heading := waiting.pop(0)) is not None:
                    unfolded = subtree.expand(heading)
                    if unfolded is subtree or not left:
                        continue
                    subtree, left = unfolded, left - 1
                steps.append((yield from self._step(pair, subtree, heading, flags)))
                waiting += steps[-1].expands
        answers = list(dict.fromkeys(id for step in steps for id in step.answers))
        expands = list(dict.fromkeys(id for step in steps for id in step.expands))
        columns = {
            "answer_ids": answers,
            "expand_ids": expands,
            "refused": not answers and not expands and any(step.refused for step in steps),
            "expelled": sum(step.expelled for step in steps),
            "steps": [json.dumps(plain(step)) for step in steps],
        }
        evidence = tuple(Span(node.start, node.end, node.text) for node in (subtree.tree.nodes[id] for id in answers))
        return Label(2 if answers else int(bool(expands)), None, columns, evidence, flags=list(flags))

    def recall(self, row: Mapping[str, Any], ask: Ask, number: int) -> Recalled:
        """What a step of a label answers; see `Labeler.recall`. A line that was expelled, whose text it does
        not hold, is replaced by another one that is not legal.
        """
        if number >= len(row["steps"]):
            raise VerdictError("format", "the label has fewer steps than are asked")
        step, turn = read_step(row["steps"][number]), ask.messages[-1]
        shown = (part for name, part in zip(turn.fields, turn.parts[1::2], strict=True) if name == NODES_FIELD)
        if step.chars != sum(map(len, shown)):
            return Recalled(Answer(0, "", "overlong"), "")
        assert ask.format is not None
        (section,) = ask.format.sections
        assert isinstance(section, OptionLines)
        option_of = {int(option.split(" ")[1].rstrip(":")): option for option in section.options}
        try:
            legal = "\n".join(option_of[id] for id in (*step.answers, *step.expands)) or REFUSE * step.refused
        except KeyError as exc:
            raise VerdictError("format", f"no action on node {exc} is legal") from exc
        return Recalled(Answer(0, "\n".join([legal, *[ANSWER] * step.expelled]), "stop"), legal)

    def probe(self) -> list[Ask]:
        text = EXAMPLE.document
        nodes = (Node(0, "structure", 0, "Roses", 0, 0, -1), Node(1, "content", 1, text, 0, len(text), 0))
        subtree = Subtree(read_tree([node._asdict() for node in nodes], text)).light([1])
        return [self._ask(EXAMPLE.query, subtree, _view(subtree, self._room)[0])]

    def _step(
        self, pair: Pair, subtree: Subtree, heading: int | None, flags: dict[str, None]
    ) -> Generator[Ask, Answer, RouteStep]:
        """One ask; another with shorter texts while the engine finds it too long.

        Args:
            heading: that was unfolded; None for what a passage lights.
        """
        view = _view(subtree, self._room)
        ask = self._ask(pair.query, subtree, view[0])
        while (answer := (yield ask)).finish == "overlong":
            before, view = view, _view(subtree, int(view[1] * SHRINK))
            if view == before:
                break
            ask = self._ask(pair.query, subtree, view[0])
        assert ask.format is not None
        said = read_actions(Reader(ask.format).read(answer)[""], subtree)
        if said.fault is not None and self._options.expelled == "quarantine":
            raise unreadable(answer, said.fault)
        texts, _, is_cut = view
        held = {"document_truncated": is_cut, "expelled": said.expelled, "collapsed": not any(said[:4])}
        flags |= dict.fromkeys([*(flag for flag, holds in held.items() if holds), *answer.flags])
        lit, num_chars = tuple(sorted(subtree.lit)), sum(map(len, texts))
        return RouteStep(heading, lit, said.answers, said.expands, said.refused, said.expelled, num_chars)

    def _ask(self, query: str, subtree: Subtree, texts: tuple[str, ...]) -> Ask:
        marks = ["\t" * node.level + str(node.id) for node in subtree.visible]
        data, settings = ("query", NODES_FIELD), {"marks": marks}
        turn = self._prompts.turn("user", "user.j2", data=data, settings=settings, counts={NODES_FIELD: len(marks)})
        format = AnswerFormat((OptionLines(options_of(subtree), REFUSE),))
        return Ask(
            "route",
            (self._system, turn.message(query, *texts)),
            format,
            token_budget(format),
            sampling=Sampling(self._options.temperature, self._options.top_p),
        )


def _view(subtree: Subtree, room: int) -> tuple[tuple[str, ...], int, bool]:
    """The texts of a subtree's nodes, the room that they take, and whether one is cut: all to one length, so that they
    fit. What an action's prefix needs stays in any case.
    """
    lines = [one_line(node.text) for node in subtree.visible]
    most_chars = longest = max(map(len, lines))
    while True:
        texts = tuple(line[:most_chars] for line in lines)
        num_chars = sum(map(len, texts)) + CHARS_PER_DOCUMENT * len(texts)
        if num_chars <= room or most_chars <= OPTION_CHARS:
            return texts, num_chars, most_chars < longest
        most_chars = max(OPTION_CHARS, int(most_chars * SHRINK))
