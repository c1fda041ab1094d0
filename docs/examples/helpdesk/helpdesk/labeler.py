"""`resolves`: does a help article resolve a ticket, and by which sentence?"""

from collections.abc import Generator
from pathlib import Path

from relabel.labelers.evidence import read_evidence
from relabel.labelers.prompts import Prompts
from relabel.labelers.registry import Labeler
from relabel.labelers.verdicts import Reader, token_budget
from relabel.manifests.asks import Answer, AnswerFormat, Ask, Choice, Decision, Fragment, Sampling
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.specs import TextOptions


class ResolvesOptions(TextOptions):
    name: str = "resolves"
    product: str = "our product"
    """What the tickets are about; shown in the prompt."""


class Resolves(Labeler):
    """One turn: a sentence of the article, then a grade."""

    Options = ResolvesOptions
    columns = (LabelColumn("step_at", "float32", "Where in the article the step begins, 0 to 1; null without a step."),)

    def __init__(self, options: ResolvesOptions) -> None:
        prompts = Prompts(Path(__file__).parent / "templates", options.templates)
        settings = {"grades": options.grades, "product": options.product}
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._user = prompts.turn("user", "user.j2", data=("query", "document"), settings=settings)
        self.template_digests = prompts.digests
        grades = tuple(map(str, range(options.grades)))
        self._format = AnswerFormat((Fragment("step", options.max_text_tokens), Choice("score", grades)))
        self._decisions = (Decision("score", "<score>", grades),)
        self._reader = Reader(self._format)
        self._max_tokens = token_budget(self._format)
        self._sampling = Sampling(options.temperature, options.top_p)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        answer = yield self._ask(pair)
        sections = self._reader.read(answer)  # VerdictError if it is out of format
        evidence = read_evidence(sections["step"], pair.document)  # VerdictError if the article does not hold it
        grade = int(sections["score"])
        distribution = answer.distributions.get("score")
        flags = [*answer.flags, "no_distribution"] if distribution is None else list(answer.flags)
        step_at = evidence[0].start / len(pair.document) if evidence else None
        return Label(grade, distribution, {"step_at": step_at}, evidence=evidence, flags=flags)

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "my lamp does not start", "d", "Hold the button for five seconds."))]

    def _ask(self, pair: Pair) -> Ask:
        messages = (self._system, self._user.message(pair.query, pair.document))
        return Ask(
            "verdict",
            messages,
            self._format,
            self._max_tokens,
            self._decisions,
            fragment_source=pair.document,
            sampling=self._sampling,
        )
