"""Verbatim evidence: where in the document a quoted fragment is, or that it is not there.

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
import re
import unicodedata
from collections.abc import Generator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.base import (
    CHUNKS,
    SHRINK,
    Chunk,
    OfOneQuery,
    OnceAQueryOptions,
    ShownChunks,
    chunks_of,
    chunks_within,
    first_fault,
    place_among_siblings,
    text_of,
    with_siblings,
)
from relabel.labelers.prompts import BUILT_IN, Prompts
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import Reader, index_lists_of, is_none, texts_of, token_budget
from relabel.manifests.asks import Answer, AnswerFormat, Ask, JsonIndices, JsonTexts, Sampling
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, LabelColumn, Pair, Span, over_budget
from relabel.manifests.specs import LabelerOptions

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
    whole = index.find(content)
    if whole is not None:
        return (whole,)
    spans = []
    for line in content.split("\n"):
        if not (line := line.strip()):
            continue
        span = index.find(line)
        if span is None:
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
        self._document = document
        self._names: dict[str, str] = {}
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
            start, end = piece.span()
            word = piece.group()
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
    if char < "\u0300":  # nothing below the combining block continues
        return False
    first = unicodedata.normalize("NFD", char)[0]
    return unicodedata.combining(first) != 0 or first in _composing_seconds()


@functools.cache
def _composing_seconds() -> frozenset[str]:
    """Characters of combining class 0 that compose with one before them: Hangul vowels and finals, and a few Indic
    vowel signs.

    Read off the interpreter's own Unicode tables (about 15 ms, once), since they change with its version. Planes 0 and
    1: the others hold no composition of two characters.
    """
    # Hangul composes by rule, not by table
    found = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for code in range(0x20000):
        parts = unicodedata.decomposition(chr(code)).split()
        if (
            len(parts) == 2
            and not parts[0].startswith("<")
            and unicodedata.combining(second := chr(int(parts[1], 16))) == 0
        ):
            found.add(second)
    return frozenset(found)


# ------------------------------------------------------------------------------
# `evidence-set`: the smallest set of chunks of a query's documents that suffices to answer it. Asked once a query, of
# all its documents together; every row takes its own document's part.
#
# Source: RES-RAG (papers, sections 3.1 and 3.2, appendix C). Chunks are numbered from 1. The sentences are ours.


EVIDENCE_SET = "evidence-set"
"""The labeler's name."""
TOKENS_PER_CHUNK = 8
"""Room that a chunk takes in addition to its text: its number, its headings' marks and a line break."""


class EvidenceSetOptions(OnceAQueryOptions):
    """Options of `evidence-set`."""

    name: str = EVIDENCE_SET
    """A registered labeler."""
    grades: Literal[2] = 2
    """Two: a row's document gave chunks (1), or it was shown and gave none (0)."""
    window_tokens: int = Field(7000, ge=256)
    """Room for chunks, by their `token_len`. More than fits is left out from the end of whichever document is longest.
    Where `engine.max_prompt_tokens` is less, that is the limit.
    """
    max_documents: int = Field(100, ge=1, le=1000)
    """Most documents of a query that are shown, in row order."""


class EvidenceSet(Labeler):
    """Asks for the chunks that suffice. Flags: `chunks_left_out` (of the row's document), `chunk_twice`, and the
    answer's own.
    """

    Options: ClassVar[type[LabelerOptions]] = EvidenceSetOptions
    columns = (
        LabelColumn("selected", "list<int16>", "Numbers of the chunks chosen, most important first, as written."),
        LabelColumn("shown", "int32", "How many chunks of the document were shown."),
        LabelColumn("num_chunks", "int32", "How many it has."),
        LabelColumn("selected_tokens", "int32", "Tokens of the chunks chosen, each once."),
        LabelColumn("over_budget", "float32", "0 up to the root of the chunks shown, 0.5 up to all of them, else 1."),
    )
    input_columns = (CHUNKS,)
    uses_siblings = True

    def __init__(self, options: EvidenceSetOptions) -> None:
        self._options = options
        self._prompts = Prompts(BUILT_IN / EVIDENCE_SET, options.templates)
        self._system = self._prompts.turn("system", "system.j2", data=(), settings={}).message()
        self._sampling = Sampling(options.temperature, options.top_p)
        self._asks: OfOneQuery[tuple[Ask, ShownChunks]] = OfOneQuery()
        self._faults: OfOneQuery[str | None] = OfOneQuery()
        self.probe()  # a bad template fails here
        self.template_digests = self._prompts.digests

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, the same for all rows of the query; another with fewer chunks while the engine finds it too long.

        Raises:
            VerdictError: a document of the query has chunks that are not its own, which every row would be shown; the
                answer is not the JSON object wanted; `overlong` for a row of whose document nothing was shown.
        """
        pair = with_siblings(pair)
        if fault := self._faults.get((pair.siblings,), lambda: first_fault(self._candidates(pair))):
            raise VerdictError("format", fault)
        chunks = chunks_of(pair)
        ask, shown = self._ask(pair, self._options.window_tokens)
        while (answer := (yield ask)).finish == "overlong" and any(shown.counts):
            ask, shown = self._ask(pair, int(shown.num_tokens * SHRINK))
        assert ask.format is not None
        content = Reader(ask.format).read(answer)[""]
        place = place_among_siblings(pair)
        num_shown = shown.counts[place] if place < len(shown.counts) else 0
        if num_shown == 0 and (chunks or place >= len(shown.counts)):
            raise VerdictError("overlong", f"the prompt had no room for document {place + 1} of {len(pair.siblings)}")
        selected = index_lists_of(content, ask.format.sections[0])[place]
        chosen = [chunks[number - 1] for number in dict.fromkeys(selected)]
        flags = ["chunks_left_out"] * (num_shown < len(chunks)) + ["chunk_twice"] * (len(chosen) < len(selected))
        columns = {
            "selected": selected,
            "shown": num_shown,
            "num_chunks": len(chunks),
            "selected_tokens": sum(chunk.token_len for chunk in chosen),
            "over_budget": over_budget(len(selected), num_shown),
        }
        evidence = tuple(Span(one.start, one.end, pair.document[one.start : one.end]) for one in chosen)
        return Label(int(bool(selected)), None, columns, evidence, flags=[*flags, *answer.flags])

    def probe(self) -> list[Ask]:
        text = "Cut back to an outward bud in late winter."
        chunk = Chunk(n=1, heading_path=["Roses"], text=text, token_len=9, start=0, end=len(text))
        row = Pair(0, "q", "how to prune roses", "d", text, (), {CHUNKS.name: (chunk._asdict(),)})
        return [self._ask(with_siblings(row), self._options.window_tokens)[0]]

    def _candidates(self, pair: Pair) -> tuple[Pair, ...]:
        return pair.siblings[: self._options.max_documents]

    def _ask(self, pair: Pair, window: int) -> tuple[Ask, ShownChunks]:
        return self._asks.get((pair.query, pair.siblings, window), lambda: self._make(pair, window))

    def _make(self, pair: Pair, window: int) -> tuple[Ask, ShownChunks]:
        documents = [chunks_of(sibling) for sibling in self._candidates(pair)]
        shown = chunks_within([[one.token_len + TOKENS_PER_CHUNK for one in chunks] for chunks in documents], window)
        texts = [text_of(one) for chunks, count in zip(documents, shown.counts, strict=True) for one in chunks[:count]]
        ends = list(itertools.accumulate(shown.counts))
        settings = {"documents": list(zip([0, *ends], ends, strict=False))}
        counts = {"chunks": len(texts)}
        turn = self._prompts.turn("user", "user.j2", data=("query", "chunks"), settings=settings, counts=counts)
        keys = tuple(f"Document_{number}" for number in range(1, len(documents) + 1))
        format = AnswerFormat((JsonIndices(keys, shown.counts),))
        messages = (self._system, turn.message(pair.query, *texts))
        ask = Ask("select", messages, format, token_budget(format), shared_by=pair.query_id, sampling=self._sampling)
        return ask, shown


# ------------------------------------------------------------------------------
# Short answers to a question from chosen evidence alone: what RES-RAG's frozen generator is asked, and how its answer
# is read. Not a labeler: it says what a choice of evidence is worth.
#
# Source: RES-RAG (papers, equation 7, appendix C, figure 6). The sentences are ours.


MOST_ANSWERS = 8
"""Answers of a question, at most."""
MAX_TEXT_TOKENS = 32
"""Tokens of one, at most."""


class ShortAnswers:
    """Asks for answers, greedily."""

    def __init__(self) -> None:
        self._prompts = Prompts(BUILT_IN / "short-answers")
        self._system = self._prompts.turn("system", "system.j2", data=(), settings={}).message()
        self._format = AnswerFormat((JsonTexts(MOST_ANSWERS, MAX_TEXT_TOKENS),))
        self._reader = Reader(self._format)
        self.probe()  # a bad template fails here
        self.template_digests = self._prompts.digests
        """sha256 of every prompt template, by file name."""

    def ask(self, query: str, evidence: Sequence[str], jsonld: Sequence[str]) -> Ask:
        """The ask for one choice.

        Args:
            evidence: texts of the chunks chosen, in the order of documents and choice.
            jsonld: what the documents' pages say of themselves, an object each.
        """
        counts = {"evidence": len(evidence), "jsonld": len(jsonld)}
        turn = self._prompts.turn("user", "user.j2", data=("query", *counts), settings={}, counts=counts)
        messages = (self._system, turn.message(query, *evidence, *jsonld))
        return Ask("answer", messages, self._format, token_budget(self._format))

    def read(self, answer: Answer) -> list[str]:
        """The answers, best first; none where the evidence does not suffice.

        Raises:
            VerdictError: it is no JSON array of texts, or there is no answer at all.
        """
        return texts_of(self._reader.read(answer)[""])

    def probe(self) -> list[Ask]:
        """For `Engine.prepare`."""
        return [self.ask("how to prune roses", ("Cut back to an outward bud in late winter.",), ())]
