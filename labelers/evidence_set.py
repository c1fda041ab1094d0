"""RES-RAG: the `evidence-set` labeler, which selects the smallest sufficient set of chunks, and the short answers of
its frozen generator."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, Prompts
from relabel.labelers.query_inputs import (
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
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import Reader, index_lists_of, texts_of, token_budget
from relabel.manifests.asks import Answer, Ask, Sampling
from relabel.manifests.errors import VerdictError
from relabel.manifests.formats import AnswerFormat, JsonIndices, JsonTexts
from relabel.manifests.labels import Label, LabelColumn, Pair, Span, over_budget
from relabel.manifests.specs import LabelerOptions

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
