"""`review`: do the documents found for a question suffice, which of them matter, and what should be searched next?
Asked once a query, of all its documents together; every row takes its part of the answer.

Source: R2RAG (papers, section 3.3 and appendix A.4), with the paper's tags. The sentences are ours.
"""

import functools
from collections.abc import Generator, Mapping
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, Prompts, Turn
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.labelers.searching import (
    ASPECT,
    PREVIOUS_DOCS,
    PREVIOUS_QUERIES,
    PREVIOUS_SUMMARIES,
    SearchOptions,
    folded,
)
from relabel.labelers.showing import (
    CHARS_PER_TOKEN,
    LEAST_CHARS,
    SHRINK,
    OfOneQuery,
    Shown,
    documents_within,
    place_among_siblings,
    with_siblings,
)
from relabel.labelers.verdicts import Reader, indices_of, token_budget
from relabel.manifests.asks import Answer, AnswerFormat, Ask, Choice, Decision, Indices, Sampling, Text
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.specs import LabelerOptions

WORDS = ("no", "yes")


class ReviewOptions(SearchOptions):
    """Options of `review`."""

    grades: Literal[2] = 2
    """Two: a row's document was named as one that matters (1), or it was shown and not named (0)."""
    window_tokens: int = Field(25_000, ge=256)
    """Room for documents, at four characters a token; those that do not fit are left out from the end. Where
    `engine.max_prompt_tokens` is less, that is the limit.
    """


class _Shape(NamedTuple):
    """What a prompt holds, and how much of it: one prompt a shape is rendered."""

    has_aspect: bool = False
    num_previous_queries: int = 0
    num_previous_summaries: int = 0
    num_documents: int = 0
    has_kept: bool = False


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
        self._turns(_Shape())  # a bad template fails here
        self._turns(
            _Shape(
                has_aspect=True,
                num_previous_queries=1,
                num_previous_summaries=1,
                num_documents=1,
                has_kept=True,
            )
        )
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
        answer = yield ask
        while answer.finish == "overlong" and shown.num_chars > LEAST_CHARS:
            ask, shown = self._ask(pair, int(shown.num_chars * SHRINK))
            answer = yield ask
        assert ask.format is not None
        sections = Reader(ask.format).read(answer)
        useful = indices_of(sections["useful-docs"])
        shown_ids = [sibling.doc_id for sibling in pair.siblings[: len(shown.texts)]]
        check(sections, useful, shown_ids, pair)
        number = 1 + place_among_siblings(pair)
        if number > len(shown_ids):
            raise VerdictError(
                "overlong", f"the prompt had room for {len(shown_ids)} documents; this is number {number}"
            )
        distribution = answer.distributions.get("sufficient")
        flags: list[str] = []
        if shown.is_cut and number == len(shown_ids):
            flags.append("document_truncated")
        if shown.num_left_out > 0:
            flags.append("documents_left_out")
        flags += answer.flags
        if pair.doc_id in pair.columns.get(PREVIOUS_DOCS.name, ()):
            flags.append("kept_before")
        if distribution is None:
            flags.append("no_distribution")
        columns = {
            "is_sufficient": sections["is-sufficient"] == "yes",
            "sufficient_probs": list(distribution.probs) if distribution else None,
            "sufficient_outside_mass": distribution.outside_mass if distribution else None,
            "new_query": sections["new-query"] or None,
            "useful": [shown_ids[index - 1] for index in useful],
            "summary": sections["useful-docs-summary"] or None,
        }
        return Label(int(number in useful), None, columns, flags=list(dict.fromkeys(flags)))

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
        numbered = enumerate(pair.siblings[: len(shown.texts)], start=1)
        kept_numbers = ", ".join(str(number) for number, sibling in numbered if sibling.doc_id in kept_ids)
        shape = _Shape(
            has_aspect=bool(aspect),
            num_previous_queries=len(queries),
            num_previous_summaries=len(summaries),
            num_documents=len(shown.texts),
            has_kept=bool(kept_numbers),
        )
        values = [pair.query]
        if aspect:
            values.append(aspect)
        values += [*queries, *summaries, *shown.texts]
        if kept_numbers:
            values.append(kept_numbers)
        system, user = self._turns(shape)
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
            (system.message(), user.message(*values)),
            format,
            token_budget(format),
            decisions=(Decision("sufficient", "<is-sufficient>", WORDS),),
            shared_by=pair.query_id,
            sampling=Sampling(self._options.temperature, self._options.top_p),
        )
        return ask, shown

    def _make_turns(self, shape: _Shape) -> tuple[Turn, Turn]:
        counts = {
            "previous_queries": shape.num_previous_queries,
            "previous_summaries": shape.num_previous_summaries,
            "documents": shape.num_documents,
        }
        settings = {
            "has_aspect": shape.has_aspect,
            "has_kept": shape.has_kept,
            "num_previous_queries": shape.num_previous_queries,
            "num_previous_summaries": shape.num_previous_summaries,
        }
        data = ["query"]
        if shape.has_aspect:
            data.append("aspect")
        data += counts
        if shape.has_kept:
            data.append("kept")
        system = self._prompts.turn("system", "system.j2", data=(), settings=settings)
        user = self._prompts.turn(
            "user",
            "user.j2",
            data=tuple(data),
            settings=settings,
            counts=counts,
        )
        return system, user


def check(sections: Mapping[str, str], useful: list[int], shown_ids: list[str], pair: Pair) -> None:
    """The rules between an answer's sections and with the rounds before, where `Reader` has held each to its own.

    Raises:
        VerdictError: `format`: a new query was searched before, or is the question or what is searched now; or a
            document is named twice or was kept before.
    """
    columns = pair.columns
    new_query = sections["new-query"]
    # the side that is searched now was a query too
    searched = ("", pair.query, *columns.get(PREVIOUS_QUERIES.name, ()), columns.get(ASPECT.name, ""))
    if new_query and folded(new_query) in map(folded, searched):
        raise VerdictError(
            "format", f"the new query holds no word, is the question or was searched before: {new_query[:60]!r}"
        )
    if len(set(useful)) < len(useful):
        raise VerdictError("format", f"a document is named twice: {sections['useful-docs'][:60]!r}")
    again = [number for number in useful if shown_ids[number - 1] in columns.get(PREVIOUS_DOCS.name, ())]
    if again:
        raise VerdictError("format", f"document {again[0]} was kept in an earlier round")
