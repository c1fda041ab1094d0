"""The labelers whose one answer is about a whole query, for every row of it: `variants`, `review` and `evidence-set`;
and `ShortAnswers`, which says what a choice of evidence is worth."""

import bisect
import functools
import heapq
import itertools
import json
import unicodedata
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, cast

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, Prompts, Turn
from relabel.labelers.registry import EXAMPLE, Labeler, OnceAQueryOptions
from relabel.labelers.verdicts import Reader, index_lists_of, indices_of, lines_of, texts_of, token_budget
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    Indices,
    JsonIndices,
    JsonTexts,
    Lines,
    Sampling,
    Text,
)
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import InputColumn, Label, LabelColumn, Pair, Span, over_budget
from relabel.manifests.specs import LabelerOptions, TextOptions, ThinkOptions

# ------------------------------------------------------------------------------
# A search that goes on for several rounds: what `variants` and `review` are shown of the rounds before.
#
# Source: R2RAG, section 3.3 (papers); the columns' names are ours. `relabel rounds` is such a search: jobs/rounds.


ASPECT = InputColumn("aspect", "string", "The side of the question that this round searches.")
PREVIOUS_QUERIES = InputColumn("previous_queries", "list<string>", "Queries of the rounds before.")
PREVIOUS_SUMMARIES = InputColumn("previous_summaries", "list<string>", "Summaries of what was found in them.")
PREVIOUS_DOCS = InputColumn("previous_docs", "list<string>", "Ids of the documents that were kept in them.")


class SearchOptions(OnceAQueryOptions, TextOptions):
    """Options of `variants` and `review`."""

    temperature: float = Field(0.6, ge=0.0, le=5.0)
    """As in the paper; 0 is greedy."""
    top_p: float = Field(0.95, gt=0.0, le=1.0)
    """As in the paper; 1.0 is off."""


def folded(query: str) -> str:
    """A query in which case, white space and punctuation do not count (but `#` does, as in C#, and the like)."""
    kept = (
        " " if unicodedata.category(char)[0] == "P" and char not in "#%&*@" else char
        for char in unicodedata.normalize("NFKC", query).casefold()
    )
    return " ".join("".join(kept).split())


# ------------------------------------------------------------------------------
# Which documents of a query one prompt shows: as many as fit, in row order, the last of them perhaps in part.
#
# A labeler knows no tokenizer, so room is counted in characters first; where the engine answers that the prompt does
# not fit, less is shown and it is asked again, which costs the engine the counting and nothing more.


T = TypeVar("T")

CHARS_PER_TOKEN = 4
"""Characters that a token of room is taken for at first: English has 4 to 5. Fewer only mean that it is asked again."""
CHARS_PER_DOCUMENT = 16
"""Room that a document takes in addition to its text: its number and line breaks."""
LEAST_CHARS = 200
"""A document is cut to no less: what fits of the next one is left out where it is shorter."""
SHRINK = 0.8
"""Of what was shown, what is shown after the engine said that it does not fit."""


def with_siblings(pair: Pair) -> Pair:
    """The pair; one that came alone, without its query's other rows, is its own only sibling."""
    return pair if pair.siblings else pair._replace(siblings=(pair,))


def place_among_siblings(pair: Pair) -> int:
    """From 0. Siblings are in row order, and a query may have thousands, each of which needs its place."""
    return bisect.bisect_left(pair.siblings, pair.row_id, key=lambda sibling: sibling.row_id)


class OfOneQuery(Generic[T]):
    """What was made for the last query: its rows follow each other, and what they share is put together once."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], T] | None = None

    def get(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The same as last time, if the key is the same; tuples are the same only as one object, since comparing all
        documents of a query for each of its rows would be quadratic.
        """
        last = self._last
        if last is None or not all(
            one is other or (not isinstance(one, tuple) and one == other)
            for one, other in zip(key, last[0], strict=True)
        ):
            self._last = last = key, make()
        return last[1]


class Shown(NamedTuple):
    """The first documents of a query, as far as one prompt shows them.

    Args:
        texts: of the documents shown, in row order.
        num_chars: room that they take.
        is_cut: the last of them is not whole.
        num_left_out: documents after them.
    """

    texts: tuple[str, ...]
    num_chars: int
    is_cut: bool
    num_left_out: int


def documents_within(documents: Sequence[str], num_chars: int) -> Shown:
    """The first documents that fit into so many characters. The one at which the room ends is cut if `LEAST_CHARS` of
    it or more fit, and left out with all after it if not.
    """
    texts: list[str] = []
    left = num_chars
    for document in documents:
        room = left - CHARS_PER_DOCUMENT
        if len(document) > room:
            if room >= LEAST_CHARS:
                texts.append(document[:room])
                return Shown(tuple(texts), num_chars, True, len(documents) - len(texts))
            break
        texts.append(document)
        left = room - len(document)
    return Shown(tuple(texts), num_chars - left, False, len(documents) - len(texts))


# ------------------------------------------------------------------------------
# `variants`: several search queries for one question. Asked once a query, for every row of it; no document reaches
# the prompt, and rows get no grade. Source: R2RAG (papers, section 3.2 and appendix A.2): two to n queries, n 3 for
# a simple question and 5 for a complex one. The sentences are ours.


_FEWEST = 2


class VariantsOptions(SearchOptions, ThinkOptions):
    """Options of `variants`."""

    grades: Literal[0] = 0
    """None: the label is a list of queries."""
    max_variants: int = Field(3, ge=_FEWEST, le=20)
    """Most queries for one question: 3 suit a simple one, 5 a complex one."""


class Variants(Labeler):
    """Asks for queries that lead to an answer together. Flags: those of the answer."""

    Options: ClassVar[type[LabelerOptions]] = VariantsOptions
    columns = (LabelColumn("variants", "list<string>", "The queries, as written, without repetitions."),)
    input_columns = (ASPECT, PREVIOUS_QUERIES)
    reads_document = False

    def __init__(self, options: VariantsOptions) -> None:
        self._prompts = Prompts(BUILT_IN / "variants", options.templates)
        self._settings = {"most": options.max_variants}
        self._system = self._prompts.turn("system", "system.j2", data=(), settings=self._settings).message()
        self._turn = functools.lru_cache(maxsize=64)(self._make_turn)
        for shape in ((False, 0), (True, 1)):  # a bad template fails here
            self._turn(*shape)
        self.template_digests = self._prompts.digests
        queries = Lines("queries", _FEWEST, options.max_variants, options.max_text_tokens)
        self._reader = Reader(AnswerFormat((Text("think", options.max_think_tokens), queries)))
        self._sampling = Sampling(options.temperature, options.top_p)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, the same for all rows of the query.

        Raises:
            VerdictError: the answer is out of format, or holds fewer than two queries that are not the question.
        """
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)
        variants: dict[str, str] = {}
        for line in lines_of(sections["queries"]):
            variants.setdefault(folded(line), line)
        variants.pop(folded(pair.query), None)
        if len(variants) < _FEWEST:
            raise VerdictError("format", f"{len(variants)} queries that differ from the question, expected {_FEWEST}")
        return Label(
            None, None, {"variants": list(variants.values())}, reasoning=sections["think"], flags=list(answer.flags)
        )

    def probe(self) -> list[Ask]:
        return [self._ask(EXAMPLE)]

    def _ask(self, pair: Pair) -> Ask:
        aspect, previous = pair.columns.get(ASPECT.name, ""), pair.columns.get(PREVIOUS_QUERIES.name, ())
        turn, format = self._turn(bool(aspect), len(previous)), self._reader.format
        messages = (self._system, turn.message(pair.query, *filter(None, (aspect,)), *previous))
        return Ask("variants", messages, format, token_budget(format), shared_by=pair.query_id, sampling=self._sampling)

    def _make_turn(self, has_aspect: bool, num_previous: int) -> Turn:
        counts = {"previous_queries": num_previous}
        data = ("query", *["aspect"] * has_aspect, *counts)
        return self._prompts.turn(
            "user",
            "user.j2",
            data=data,
            settings={**self._settings, "has_aspect": has_aspect, "num_previous": num_previous},
            counts=counts,
        )


# ------------------------------------------------------------------------------
# `review`: do the documents found for a question suffice, which of them matter, and what should be searched next?
# Asked once a query, of all its documents together; every row takes its part of the answer. Source: R2RAG (papers,
# section 3.3 and appendix A.4), with the paper's tags. The sentences are ours.


WORDS = ("no", "yes")


class ReviewOptions(SearchOptions):
    """Options of `review`."""

    grades: Literal[2] = 2
    """Two: a row's document was named as one that matters (1), or it was shown and not named (0)."""
    window_tokens: int = Field(25_000, ge=256)
    """Room for documents, at four characters a token; those that do not fit are left out from the end. Where
    `engine.max_prompt_tokens` is less, that is the limit.
    """


class Review(Labeler):
    """Asks whether a query's documents suffice. Flags: `document_truncated`, `documents_left_out`, `kept_before` (the
    row's document is in `previous_docs`), `no_distribution`, and the answer's own.
    """

    Options: ClassVar[type[LabelerOptions]] = ReviewOptions
    columns = (
        LabelColumn("is_sufficient", "bool", "Whether the documents suffice to answer the query."),
        LabelColumn("sufficient_probs", "list<float32>", "Probabilities of no and yes to that."),
        LabelColumn("sufficient_outside_mass", "float32", "Probability of everything but no and yes there."),
        LabelColumn("new_query", "string", "What should be searched next; null where the documents suffice."),
        LabelColumn("useful", "list<string>", "Ids of the documents that matter, the most important first."),
        LabelColumn("summary", "string", "What those documents are about; null where none matters."),
    )
    input_columns = (ASPECT, PREVIOUS_QUERIES, PREVIOUS_SUMMARIES, PREVIOUS_DOCS)
    uses_siblings = True

    def __init__(self, options: ReviewOptions) -> None:
        self._options = options
        self._prompts = Prompts(BUILT_IN / "review", options.templates)
        self._turns = functools.lru_cache(maxsize=64)(self._make_turns)
        for count in (0, 1):  # a bad template fails here
            self._turns(bool(count), count, count, count, bool(count))
        self.template_digests = self._prompts.digests
        self._asks: OfOneQuery[tuple[Ask, Shown]] = OfOneQuery()

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, the same for all rows of the query; another with fewer documents while the engine finds it too long.

        Raises:
            VerdictError: the answer is out of format or at odds with itself (see `check`); `overlong` for a row of
                whose document nothing was shown.
        """
        pair = with_siblings(pair)
        ask, shown = self._ask(pair, self._options.window_tokens * CHARS_PER_TOKEN)
        while (answer := (yield ask)).finish == "overlong" and shown.num_chars > LEAST_CHARS:
            ask, shown = self._ask(pair, int(shown.num_chars * SHRINK))
        assert ask.format is not None
        said = Reader(ask.format).read(answer)
        useful = indices_of(said["useful-docs"])
        shown_ids = [sibling.doc_id for sibling in pair.siblings[: len(shown.texts)]]
        check(said, useful, shown_ids, pair)
        place = 1 + place_among_siblings(pair)
        if place > len(shown_ids):
            raise VerdictError(
                "overlong", f"the prompt had room for {len(shown_ids)} documents; this is number {place}"
            )
        distribution = answer.distributions.get("sufficient")
        flags = [
            *["document_truncated"] * (shown.is_cut and place == len(shown_ids)),
            *["documents_left_out"] * (shown.num_left_out > 0),
            *answer.flags,
            *["kept_before"] * (pair.doc_id in pair.columns.get(PREVIOUS_DOCS.name, ())),
            *["no_distribution"] * (distribution is None),
        ]
        columns = {
            "is_sufficient": said["is-sufficient"] == "yes",
            "sufficient_probs": list(distribution.probs) if distribution else None,
            "sufficient_outside_mass": distribution.outside_mass if distribution else None,
            "new_query": said["new-query"] or None,
            "useful": [shown_ids[number - 1] for number in useful],
            "summary": said["useful-docs-summary"] or None,
        }
        return Label(int(place in useful), None, columns, flags=list(dict.fromkeys(flags)))

    def probe(self) -> list[Ask]:
        return [self._ask(with_siblings(EXAMPLE), self._options.window_tokens * CHARS_PER_TOKEN)[0]]

    def _ask(self, pair: Pair, num_chars: int) -> tuple[Ask, Shown]:
        return self._asks.get((pair.query, pair.siblings, pair.columns, num_chars), lambda: self._make(pair, num_chars))

    def _make(self, pair: Pair, num_chars: int) -> tuple[Ask, Shown]:
        shown = documents_within([sibling.document for sibling in pair.siblings], num_chars)
        aspect = pair.columns.get(ASPECT.name, "")
        queries = pair.columns.get(PREVIOUS_QUERIES.name, ())
        summaries = pair.columns.get(PREVIOUS_SUMMARIES.name, ())
        kept_ids = set(pair.columns.get(PREVIOUS_DOCS.name, ()))
        places = enumerate(pair.siblings[: len(shown.texts)], start=1)
        kept = ", ".join(str(number) for number, sibling in places if sibling.doc_id in kept_ids)
        system, user = self._turns(bool(aspect), len(queries), len(summaries), len(shown.texts), bool(kept))
        said = (*filter(None, (aspect,)), *queries, *summaries, *shown.texts, *filter(None, (kept,)))
        most = self._options.max_text_tokens
        words = WORDS if any(text.strip() for text in shown.texts) else WORDS[:1]  # without any text none can suffice
        format = AnswerFormat(
            (
                Choice("is-sufficient", words),
                Text("new-query", most, only_with=("is-sufficient", "no")),
                Indices("useful-docs", len(shown.texts)),
                Text("useful-docs-summary", most, only_with=("useful-docs", "")),
            )
        )
        ask = Ask(
            "review",
            (system.message(), user.message(pair.query, *said)),
            format,
            token_budget(format),
            (Decision("sufficient", "<is-sufficient>", WORDS),),
            shared_by=pair.query_id,
            sampling=Sampling(self._options.temperature, self._options.top_p),
        )
        return ask, shown

    def _make_turns(
        self, has_aspect: bool, num_queries: int, num_summaries: int, num_documents: int, has_kept: bool
    ) -> tuple[Turn, Turn]:
        counts = {
            "previous_queries": num_queries,
            "previous_summaries": num_summaries,
            "documents": num_documents,
        }
        settings = {
            "has_aspect": has_aspect,
            "has_kept": has_kept,
            "num_previous_queries": num_queries,
            "num_previous_summaries": num_summaries,
        }
        data = ("query", *["aspect"] * has_aspect, *counts, *["kept"] * has_kept)
        system = self._prompts.turn("system", "system.j2", data=(), settings=settings)
        return system, self._prompts.turn("user", "user.j2", data=data, settings=settings, counts=counts)


def check(said: Mapping[str, str], useful: list[int], shown_ids: list[str], pair: Pair) -> None:
    """The rules between an answer's sections and with the rounds before, where `Reader` has held each to its own.

    Raises:
        VerdictError: `format`: a new query was searched before, or is the question or what is searched now; or a
            document is named twice or was kept before.
    """
    columns, new_query = pair.columns, said["new-query"]
    # the side that is searched now was a query too
    searched = ("", pair.query, *columns.get(PREVIOUS_QUERIES.name, ()), columns.get(ASPECT.name, ""))
    if new_query and folded(new_query) in map(folded, searched):
        raise VerdictError(
            "format", f"the new query holds no word, is the question or was searched before: {new_query[:60]!r}"
        )
    if len(set(useful)) < len(useful):
        raise VerdictError("format", f"a document is named twice: {said['useful-docs'][:60]!r}")
    if again := [number for number in useful if shown_ids[number - 1] in columns.get(PREVIOUS_DOCS.name, ())]:
        raise VerdictError("format", f"document {again[0]} was kept in an earlier round")


# ------------------------------------------------------------------------------
# Chunks of a query's documents: which are shown, and whether they are the document's own.


CHUNKS = InputColumn("chunks", "list<chunk>", "The document's chunks, as `relabel pairs chunk` writes them.", True)


Chunk = dict[str, Any]
"""A chunk of a document, as the column holds it: `n`, `heading_path`, `text`, `token_len`, `start` and `end`."""


def chunks_within(sizes: Sequence[Sequence[int]], room: int) -> tuple[tuple[int, ...], int]:
    """How many chunks of each document fit into so many tokens, and the tokens that they take: chunks go from the end
    of the document that is longest just then, of equals the last one.

    Args:
        sizes: tokens of each chunk, by document.
    """
    counts, totals = [len(one) for one in sizes], [sum(one) for one in sizes]
    longest = [(-total, -place) for place, total in enumerate(totals) if counts[place]]
    heapq.heapify(longest)
    num_tokens = sum(totals)
    while num_tokens > room and longest:
        place = -heapq.heappop(longest)[1]
        counts[place] -= 1
        size = sizes[place][counts[place]]
        totals[place] -= size
        num_tokens -= size
        if counts[place]:
            heapq.heappush(longest, (-totals[place], -place))
    return tuple(counts), num_tokens


def rendered_sets(section: JsonIndices, wanted: Sequence[Sequence[int]]) -> str:
    """The answer that chooses these chunks, as far as they are shown, each once.

    Args:
        wanted: chunk numbers by document, most important first; of documents that are not shown, too.
    """
    held = zip(section.keys, section.mosts, wanted, strict=False)
    return json.dumps({key: list(dict.fromkeys(n for n in one if 1 <= n <= most)) for key, most, one in held})


def chunk_texts(pair: Pair, selected: Sequence[int]) -> list[str]:
    """Texts of these chunks of a document, each once and under its headings, as the prompt shows them."""
    chunks = chunks_of(pair)
    return [text_of(chunks[number - 1]) for number in dict.fromkeys(selected)]


def chunks_of(pair: Pair) -> Sequence[Chunk]:
    """The document's chunks."""
    return cast("Sequence[Chunk]", pair.columns.get(CHUNKS.name, ()))


def text_of(chunk: Chunk) -> str:
    return "\n".join(filter(None, (" > ".join(chunk["heading_path"]), chunk["text"])))


def first_fault(pairs: Sequence[Pair]) -> str | None:
    """What is wrong with the first chunk that is not of its document; None where all are."""
    for pair in pairs:
        for number, one in enumerate(chunks_of(pair), start=1):
            if why := _fault(one, number, pair.document):
                return f"document {pair.doc_id}: chunk {number} {why}"
    return None


def _fault(chunk: Chunk, number: int, document: str) -> str | None:
    """Chunks are numbered from 1, each is a piece of the document, and none is of less than no tokens. An input may
    hold null anywhere.
    """
    start, end, size = chunk["start"], chunk["end"], chunk["token_len"]
    if None in (chunk["n"], start, end, size, *chunk["heading_path"]):
        return "is null, or has a null in it"
    if chunk["n"] != number or not 0 <= start <= end <= len(document) or document[start:end] != chunk["text"]:
        return (
            f"is not the document's characters {start} to {end}: both must come from one `relabel pairs chunk`, and "
            "`n` counts from 1"
        )
    return f"has a `token_len` of {size}, expected 0 or more" if size < 0 else None


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
        if fault := self._faults.get(
            (pair.siblings,), lambda: first_fault(pair.siblings[: self._options.max_documents])
        ):
            raise VerdictError("format", fault)
        chunks = chunks_of(pair)
        ask, counts, num_tokens = self._ask(pair, self._options.window_tokens)
        while (answer := (yield ask)).finish == "overlong" and any(counts):
            ask, counts, num_tokens = self._ask(pair, int(num_tokens * SHRINK))
        assert ask.format is not None
        content = Reader(ask.format).read(answer)[""]
        place = place_among_siblings(pair)
        num_shown = counts[place] if place < len(counts) else 0
        if num_shown == 0 and (chunks or place >= len(counts)):
            raise VerdictError("overlong", f"the prompt had no room for document {place + 1} of {len(pair.siblings)}")
        selected = index_lists_of(content, ask.format.sections[0])[place]
        chosen = [chunks[number - 1] for number in dict.fromkeys(selected)]
        flags = ["chunks_left_out"] * (num_shown < len(chunks)) + ["chunk_twice"] * (len(chosen) < len(selected))
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
            tuple(Span(one["start"], one["end"], one["text"]) for one in chosen),
            flags=[*flags, *answer.flags],
        )

    def probe(self) -> list[Ask]:
        text = EXAMPLE.document
        chunk = {"n": 1, "heading_path": ["Roses"], "text": text, "token_len": 9, "start": 0, "end": len(text)}
        return [
            self._ask(with_siblings(EXAMPLE._replace(columns={CHUNKS.name: (chunk,)})), self._options.window_tokens)[0]
        ]

    def _ask(self, pair: Pair, window: int) -> tuple[Ask, tuple[int, ...], int]:
        return self._asks.get((pair.query, pair.siblings, window), lambda: self._make(pair, window))

    def _make(self, pair: Pair, window: int) -> tuple[Ask, tuple[int, ...], int]:
        documents = [chunks_of(sibling) for sibling in pair.siblings[: self._options.max_documents]]
        counts, num_tokens = chunks_within(
            [[one["token_len"] + TOKENS_PER_CHUNK for one in chunks] for chunks in documents], window
        )
        texts = [text_of(one) for chunks, count in zip(documents, counts, strict=True) for one in chunks[:count]]
        ends = list(itertools.accumulate(counts))
        settings = {"documents": list(zip([0, *ends], ends, strict=False))}
        turn = self._prompts.turn(
            "user", "user.j2", data=("query", "chunks"), settings=settings, counts={"chunks": len(texts)}
        )
        format = AnswerFormat(
            (JsonIndices(tuple(f"Document_{number}" for number in range(1, len(documents) + 1)), counts),)
        )
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


# ------------------------------------------------------------------------------
# Short answers to a question from chosen evidence alone: what RES-RAG's frozen generator is asked, and how its answer
# is read. Not a labeler: it says what a choice of evidence is worth.
#
# Source: RES-RAG (papers, equation 7, appendix C, figure 6). The sentences are ours.


MAX_TEXT_TOKENS = 32
"""Tokens of an answer, at most."""


class ShortAnswers:
    """Asks for eight answers at most, greedily."""

    def __init__(self) -> None:
        self._prompts = Prompts(BUILT_IN / "short-answers")
        self._system = self._prompts.turn("system", "system.j2", data=(), settings={}).message()
        self._reader = Reader(AnswerFormat((JsonTexts(8, MAX_TEXT_TOKENS),)))
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
        messages, format = (self._system, turn.message(query, *evidence, *jsonld)), self._reader.format
        return Ask("answer", messages, format, token_budget(format))

    def read(self, answer: Answer) -> list[str]:
        """The answers, best first; none where the evidence does not suffice.

        Raises:
            VerdictError: it is no JSON array of texts, or there is no answer at all.
        """
        return texts_of(self._reader.read(answer)[""])

    def probe(self) -> list[Ask]:
        """For `Engine.prepare`."""
        return [self.ask("how to prune roses", (EXAMPLE.document,), ())]
