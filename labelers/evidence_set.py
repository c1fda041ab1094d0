"""`evidence-set`: the smallest set of chunks of a query's documents that suffices to answer it. Asked once a query, of
all its documents together; every row takes its own document's part.

Source: RES-RAG (papers, sections 3.1 and 3.2, appendix C). Chunks are numbered from 1. The sentences are ours.
"""

import itertools
import json
from collections.abc import Generator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.chunks import CHUNKS, Chunk, chunks_of, chunks_within, first_fault, text_of
from relabel.labelers.prompts import BUILT_IN, Prompts
from relabel.labelers.registry import EXAMPLE, Labeler, OnceAQueryOptions
from relabel.labelers.showing import SHRINK, OfOneQuery, place_among_siblings, with_siblings
from relabel.labelers.verdicts import Reader, index_lists_of, token_budget
from relabel.manifests.asks import Answer, AnswerFormat, Ask, JsonIndices, Sampling
from relabel.manifests.errors import VerdictError
from relabel.manifests.evidence_sets import over_budget
from relabel.manifests.labels import Label, LabelColumn, Pair, Span
from relabel.manifests.specs import LabelerOptions

EVIDENCE_SET = "evidence-set"
"""The labeler's name."""
TOKENS_PER_CHUNK = 8
"""Room that a chunk takes in addition to its text: its number, its headings' marks and a line break."""


class EvidenceSetOptions(OnceAQueryOptions):
    """Options of `evidence-set`."""

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
        self._asks: OfOneQuery[tuple[Ask, tuple[int, ...], int]] = OfOneQuery()
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
        fault = self._faults.get((pair.siblings,), lambda: first_fault(pair.siblings[: self._options.max_documents]))
        if fault:
            raise VerdictError("format", fault)
        chunks = chunks_of(pair)
        ask, counts, num_tokens = self._ask(pair, self._options.window_tokens)
        answer = yield ask
        while answer.finish == "overlong" and any(counts):
            ask, counts, num_tokens = self._ask(pair, int(num_tokens * SHRINK))
            answer = yield ask
        assert ask.format is not None
        content = Reader(ask.format).read(answer)[""]
        number = place_among_siblings(pair)
        num_shown = counts[number] if number < len(counts) else 0
        if num_shown == 0 and (chunks or number >= len(counts)):
            raise VerdictError("overlong", f"the prompt had no room for document {number + 1} of {len(pair.siblings)}")
        selected = index_lists_of(content, ask.format.sections[0])[number]
        chosen = [chunks[index - 1] for index in dict.fromkeys(selected)]
        flags: list[str] = []
        if num_shown < len(chunks):
            flags.append("chunks_left_out")
        if len(chosen) < len(selected):
            flags.append("chunk_twice")
        columns = {
            "selected": selected,
            "shown": num_shown,
            "num_chunks": len(chunks),
            "selected_tokens": sum(chunk["token_len"] for chunk in chosen),
            "over_budget": over_budget(len(selected), num_shown),
        }
        return Label(
            int(bool(selected)),
            None,
            columns,
            evidence=tuple(Span(chunk["start"], chunk["end"], chunk["text"]) for chunk in chosen),
            flags=[*flags, *answer.flags],
        )

    def probe(self) -> list[Ask]:
        text = EXAMPLE.document
        chunk = {"n": 1, "heading_path": ["Roses"], "text": text, "token_len": 9, "start": 0, "end": len(text)}
        example = with_siblings(EXAMPLE._replace(columns={CHUNKS.name: (chunk,)}))
        return [self._ask(example, self._options.window_tokens)[0]]

    def _ask(self, pair: Pair, window: int) -> tuple[Ask, tuple[int, ...], int]:
        return self._asks.get((pair.query, pair.siblings, window), lambda: self._make(pair, window))

    def _make(self, pair: Pair, window: int) -> tuple[Ask, tuple[int, ...], int]:
        documents = [chunks_of(sibling) for sibling in pair.siblings[: self._options.max_documents]]
        counts, num_tokens = chunks_within(list(map(_sizes, documents)), window)
        texts: list[str] = []
        for chunks, count in zip(documents, counts, strict=True):
            texts += map(text_of, chunks[:count])
        ends = list(itertools.accumulate(counts))
        settings = {"documents": list(zip([0, *ends], ends, strict=False))}
        turn = self._prompts.turn(
            "user",
            "user.j2",
            data=("query", "chunks"),
            settings=settings,
            counts={"chunks": len(texts)},
        )
        keys = tuple(f"Document_{number}" for number in range(1, len(documents) + 1))
        format = AnswerFormat((JsonIndices(keys, counts),))
        messages = (self._system, turn.message(pair.query, *texts))
        ask = Ask(
            "select",
            messages,
            format,
            token_budget(format),
            shared_by=pair.query_id,
            sampling=Sampling(self._options.temperature, self._options.top_p),
        )
        return ask, counts, num_tokens


def _sizes(chunks: Sequence[Chunk]) -> list[int]:
    """Tokens that each chunk takes in the prompt."""
    return [chunk["token_len"] + TOKENS_PER_CHUNK for chunk in chunks]


def rendered_sets(section: JsonIndices, wanted: Sequence[Sequence[int]]) -> str:
    """The answer that chooses these chunks, as far as they are shown, each once.

    Args:
        wanted: chunk numbers by document, most important first; of documents that are not shown, too.
    """
    sets: dict[str, list[int]] = {}
    for key, most, numbers in zip(section.keys, section.mosts, wanted, strict=False):
        shown = [number for number in numbers if 1 <= number <= most]
        sets[key] = list(dict.fromkeys(shown))
    return json.dumps(sets)
