"""`variants`: several search queries for one question. Asked once a query, for every row of it; no document reaches the
prompt, and rows get no grade.

Source: R2RAG (papers, section 3.2 and appendix A.2): two to n queries, n 3 for a simple question and 5 for a complex
one. The sentences are ours.
"""

import functools
from collections.abc import Generator
from typing import ClassVar, Literal

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, Prompts, Turn
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.labelers.searching import ASPECT, PREVIOUS_QUERIES, SearchOptions, folded
from relabel.labelers.verdicts import Reader, lines_of, token_budget
from relabel.manifests.asks import Answer, AnswerFormat, Ask, Lines, Sampling, Text
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.specs import LabelerOptions, ThinkOptions

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
        self._turn(False, 0)  # a bad template fails here
        self._turn(True, 1)
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
            None,
            None,
            {"variants": list(variants.values())},
            reasoning=sections["think"],
            flags=list(answer.flags),
        )

    def probe(self) -> list[Ask]:
        return [self._ask(EXAMPLE)]

    def _ask(self, pair: Pair) -> Ask:
        aspect = pair.columns.get(ASPECT.name, "")
        previous = pair.columns.get(PREVIOUS_QUERIES.name, ())
        turn = self._turn(bool(aspect), len(previous))
        format = self._reader.format
        values = [pair.query]
        if aspect:
            values.append(aspect)
        messages = (self._system, turn.message(*values, *previous))
        return Ask(
            "variants",
            messages,
            format,
            token_budget(format),
            shared_by=pair.query_id,
            sampling=self._sampling,
        )

    def _make_turn(self, has_aspect: bool, num_previous: int) -> Turn:
        counts = {"previous_queries": num_previous}
        data = ("query", "aspect", *counts) if has_aspect else ("query", *counts)
        return self._prompts.turn(
            "user",
            "user.j2",
            data=data,
            settings={**self._settings, "has_aspect": has_aspect, "num_previous": num_previous},
            counts=counts,
        )
