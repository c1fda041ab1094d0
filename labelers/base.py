"""Base classes of labelers with a single ask: `OneAsk` for one formatted answer, `ThinkScore` for reasoning and then a
grade, `DecisionAlone` and `YesNo` for one decision without generated tokens."""

from __future__ import annotations

import bisect
import functools
import heapq
import inspect
import json
import unicodedata
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from pydantic import Field, StringConstraints

from relabel.labelers.prompts import BUILT_IN, SHARED, TEMPLATES_READ, Prompts, Turn
from relabel.labelers.registry import Labeler, labeler_class
from relabel.labelers.verdicts import Reader, decided, lines_of, token_budget
from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    JsonIndices,
    Lines,
    Sampling,
    Section,
    Text,
)
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import InputColumn, Label, LabelColumn, Pair
from relabel.manifests.specs import DecisionOptions, LabelerOptions, TextOptions, ThinkOptions

# ------------------------------------------------------------------------------
# A search that goes on for several rounds: what `variants` and `review` are shown of the rounds before.
#
# Source: R2RAG, section 3.3 (papers); the columns' names are ours. `relabel rounds` is such a search: jobs/rounds.


ASPECT = InputColumn("aspect", "string", "The side of the question that this round searches.")
PREVIOUS_QUERIES = InputColumn("previous_queries", "list<string>", "Queries of the rounds before.")
PREVIOUS_SUMMARIES = InputColumn("previous_summaries", "list<string>", "Summaries of what was found in them.")
PREVIOUS_DOCS = InputColumn("previous_docs", "list<string>", "Ids of the documents that were kept in them.")


class OnceAQueryOptions(LabelerOptions):
    """Options of a labeler whose one answer is about a whole query: rows can't vote on their parts of it."""

    samples: Literal[1] = 1
    """One: all rows of a query take their label from the same answer."""


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
# Chunks of a query's documents: which are shown, and whether they are the document's own.


CHUNKS = InputColumn("chunks", "list<chunk>", "The document's chunks, as `relabel pairs chunk` writes them.", True)


class Chunk(NamedTuple):
    """A chunk of a document, as the column holds it."""

    n: int
    heading_path: Sequence[str]
    text: str
    token_len: int
    start: int
    end: int


class ShownChunks(NamedTuple):
    """How many chunks of each document are shown, and the room that they take, in tokens."""

    counts: tuple[int, ...]
    num_tokens: int


def chunks_within(sizes: Sequence[Sequence[int]], room: int) -> ShownChunks:
    """What fits into so many tokens: chunks go from the end of the document that is longest just then, of equals the
    last one.

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
    return ShownChunks(tuple(counts), num_tokens)


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


def chunks_of(pair: Pair) -> tuple[Chunk, ...]:
    held: Sequence[dict[str, Any]] = pair.columns.get(CHUNKS.name, ())
    return tuple(Chunk(**one) for one in held)


def text_of(chunk: Chunk) -> str:
    return "\n".join(filter(None, (" > ".join(chunk.heading_path), chunk.text)))


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
    start, end, size = chunk.start, chunk.end, chunk.token_len
    if None in (chunk.n, start, end, size, *chunk.heading_path):
        return "is null, or has a null in it"
    if chunk.n != number or not 0 <= start <= end <= len(document) or document[start:end] != chunk.text:
        return (
            f"is not the document's characters {start} to {end}: both must come from one `relabel pairs chunk`, and "
            "`n` counts from 1"
        )
    return f"has a `token_len` of {size}, expected 0 or more" if size < 0 else None


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
        if last is None or not all(map(_is_same, key, last[0])):
            self._last = last = key, make()
        return last[1]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, tuple) and bool(one == other))


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

    @property
    def flags(self) -> list[str]:
        """What a label says of documents that were cut or left out."""
        return ["document_truncated"] * self.is_cut + ["documents_left_out"] * (self.num_left_out > 0)


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
# Base classes of labelers with a single ask: `OneAsk` for one formatted answer, `ThinkScore` for reasoning and then
# a grade, `DecisionAlone` and `YesNo` for one decision without generated tokens.


Instruction = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
"""What to judge by, in words; not blank."""

EXAMPLE = Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter.")
"""The made-up pair of `probe`."""

# ------------------------------------------------------------------------------
# One ask about a query and its document, answered in one format: what labelers share whose answers differ alone.


class OneAsk(Labeler):
    """Renders `system.j2` (fixed for a run) and `user.j2` (the pair). A subclass reads the answer.

    Args:
        sections: that an answer has; none where nothing but decisions is wanted.
        settings: of the templates.
        prefill: what the answer begins with.
        stage: of the ask.
    """

    Options: ClassVar[type[LabelerOptions]]
    template_set: ClassVar[str]
    """Folder in `labelers/templates`."""
    data: ClassVar[tuple[str, ...]] = ("query", "document")
    """What of a pair `user.j2` holds."""
    example: ClassVar[Pair] = EXAMPLE
    """What `probe` asks about."""

    def __init__(
        self,
        options: LabelerOptions,
        sections: Sequence[Section],
        decisions: Sequence[Decision],
        settings: Mapping[str, Any],
        *,
        prefill: str = "",
        stage: str = "verdict",
    ) -> None:
        prompts = Prompts(BUILT_IN / self.template_set, options.templates, shared=SHARED)
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=self.data, settings=settings)
        self.template_digests = prompts.digests
        format = AnswerFormat(tuple(sections))
        self._reader, self._max_tokens = Reader(format), token_budget(format)
        self._format = format if sections else None
        self._decisions, self._prefill, self._stage = tuple(decisions), prefill, stage
        self._sampling = Sampling(options.temperature, options.top_p)

    def probe(self) -> list[Ask]:
        return [self._ask(self.example)]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(*(getattr(pair, name) for name in self.data)))
        shared_by = None if self.reads_document else pair.query_id
        return Ask(
            self._stage,
            messages,
            self._format,
            self._max_tokens,
            self._decisions,
            self._prefill,
            None,
            shared_by,
            self._sampling,
        )


# ------------------------------------------------------------------------------
# One turn, two sections: reasoning, then a grade. What `umbrela` and `r1` share; they differ in their prompts and
# default scale.


class ThinkScore(OneAsk):
    """Asks for `<think>` and `<score>`. Flags: `no_distribution`, and the answer's own. A subclass says which templates
    it uses.
    """

    def __init__(self, options: ThinkOptions) -> None:
        grades = tuple(map(str, range(options.grades)))
        sections = (Text("think", options.max_think_tokens), Choice("score", grades))
        settings = options.model_dump(include={"grades", "steps"})
        super().__init__(options, sections, (Decision("score", "<score>", grades),), settings)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask.

        Raises:
            VerdictError: the answer is out of format.
        """
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)
        distribution = answer.distributions.get("score")
        flags = list(answer.flags)
        if distribution is None:
            flags.append("no_distribution")
        return Label(int(sections["score"]), distribution, reasoning=sections["think"], flags=flags)


# ------------------------------------------------------------------------------
# One decision, read off the distribution right after the prompt. Nothing is generated.


class DecisionAlone(OneAsk):
    """Asks for one distribution; the label is its mode, the lower one of equals. Its one ask is the same for all rows
    of a query if it does not read the document.

    Args:
        decision: the only one; also the name of the stage.
        prefill: what the answer begins with, up to the decision.
        settings: of the templates.
    """

    choices: ClassVar[str] = "the grades"
    """What the labels are, for messages."""

    def __init__(self, options: LabelerOptions, decision: Decision, prefill: str, settings: Mapping[str, Any]) -> None:
        super().__init__(options, (), (decision,), settings, prefill=prefill, stage=decision.name)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, whose answer holds no text but the distribution.

        Raises:
            VerdictError: `engine` if the distribution is absent or has another number of labels; `overlong` or
                `refused` by the finish.
        """
        answer = yield self._ask(pair)
        distribution = decided(answer, self._decisions[0], self.choices)
        return Label(distribution.argmax, distribution, flags=list(answer.flags))


# ------------------------------------------------------------------------------
# A yes or a no: grade 0 is no, grade 1 is yes, and `probs[1]` = p(yes) / (p(yes) + p(no)), which is also the expected
# grade. The labels are the lower-case words, right after `<answer>` or after an empty think block, so that no space
# comes between: ` yes` and `yes` are different tokens.
#
# Source: R2RAG (methods, section 4).


class YesNoOptions(DecisionOptions):
    """Options of a yes-or-no labeler."""

    grades: Literal[2] = 2
    """Two: 0 is no, 1 is yes."""
    think: Literal["none", "empty"] = "none"
    """How the answer begins: `none` with `<answer>`; `empty` with an empty think block and then the bare word, the form
    that Qwen3's rerankers were trained on. Chat models that think by default want `engine.chat_template_kwargs`
    instead, where their template has a switch.
    """


class YesNo(DecisionAlone):
    """A labeler that asks one question, to be answered by yes or no."""

    choices = "yes and no"

    def __init__(self, options: YesNoOptions, *, stage: str, **settings: str) -> None:
        is_bare = options.think == "empty"
        decision = Decision(stage, "</think>\n\n" if is_bare else "<answer>", ("no", "yes"))
        prefill = "<think>\n\n</think>\n\n" if is_bare else "<answer>"
        super().__init__(options, decision, prefill, {**settings, "think": options.think})


# ------------------------------------------------------------------------------
# Where a labeler's built-in prompt templates lie, so that they can be copied and edited.


def template_files(name: str) -> dict[str, bytes]:
    """A labeler's own templates and those of the shared ones that it uses, by file name.

    Its own are in `templates/NAME` or `templates` in the folder of the labeler's module.

    Raises:
        ConfigError: there is no such labeler, or it has no templates.
    """
    cls = labeler_class(name)
    templates = Path(inspect.getfile(cls)).parent / "templates"
    own = templates / name if (templates / name).is_dir() else templates
    used = cls(cls.Options(name=name)).template_digests
    found = {path.name: path.read_bytes() for path in own.glob("*.j2")}
    found |= {file: TEMPLATES_READ[digest] for file, digest in used.items()}
    if not found:
        raise ConfigError(f"labeler {name}: has no templates in {own}; its prompts can't be edited.")
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------
# `variants`: several search queries for one question. Asked once a query, for every row of it; no document reaches
# the prompt, and rows get no grade. Source: R2RAG (papers, section 3.2 and appendix A.2): two to n queries, n 3 for
# a simple question and 5 for a complex one. The sentences are ours.


_FEWEST = 2


class VariantsOptions(SearchOptions, ThinkOptions):
    """Options of `variants`."""

    name: str = "variants"
    """A registered labeler."""
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
        prompts = Prompts(BUILT_IN / "variants", options.templates)
        self._settings = {"most": options.max_variants}
        self._system = prompts.turn("system", "system.j2", data=(), settings=self._settings).message()
        self._turn = functools.lru_cache(maxsize=64)(functools.partial(self._make_turn, prompts))
        for shape in ((False, 0), (True, 1)):  # a bad template fails here
            self._turn(*shape)
        self.template_digests = prompts.digests
        queries = Lines("queries", _FEWEST, options.max_variants, options.max_text_tokens)
        self._format = AnswerFormat((Text("think", options.max_think_tokens), queries))
        self._reader = Reader(self._format)
        self._max_tokens = token_budget(self._format)
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
        return [self._ask(EXAMPLE._replace(document=""))]

    def _ask(self, pair: Pair) -> Ask:
        aspect, previous = pair.columns.get(ASPECT.name, ""), pair.columns.get(PREVIOUS_QUERIES.name, ())
        turn = self._turn(bool(aspect), len(previous))
        user = turn.message(pair.query, *((aspect,) if aspect else ()), *previous)
        messages = (self._system, user)
        return Ask(
            "variants", messages, self._format, self._max_tokens, shared_by=pair.query_id, sampling=self._sampling
        )

    def _make_turn(self, prompts: Prompts, has_aspect: bool, num_previous: int) -> Turn:
        data = ("query", *(("aspect",) if has_aspect else ()), "previous_queries")
        settings = {**self._settings, "has_aspect": has_aspect, "num_previous": num_previous}
        return prompts.turn("user", "user.j2", data=data, settings=settings, counts={"previous_queries": num_previous})
