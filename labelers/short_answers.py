"""Short answers to a question from chosen evidence alone: what RES-RAG's frozen generator is asked, and how its answer
is read. Not a labeler: it shows what a choice of evidence is worth.

Source: RES-RAG (papers, equation 7, appendix C, figure 6). The sentences are ours.
"""

from collections.abc import Sequence

from relabel.labelers.prompts import BUILT_IN, Prompts
from relabel.labelers.registry import EXAMPLE
from relabel.labelers.verdicts import Reader, texts_of, token_budget
from relabel.manifests.asks import Answer, AnswerFormat, Ask, JsonTexts

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
            jsonld: how the documents' pages describe themselves, an object each.
        """
        counts = {"evidence": len(evidence), "jsonld": len(jsonld)}
        turn = self._prompts.turn(
            "user",
            "user.j2",
            data=("query", *counts),
            settings={},
            counts=counts,
        )
        messages = (self._system, turn.message(query, *evidence, *jsonld))
        format = self._reader.format
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
