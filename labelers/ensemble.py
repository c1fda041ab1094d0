"""`ensemble`: one soft label from several instructions. One decision an instruction, no generated token; the label is
the mean of their distributions. Each instruction comes after the document, so an engine that caches prefixes reads
query and document once.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import ClassVar

from pydantic import Field, field_validator

from relabel.labelers.direct import DirectOptions
from relabel.labelers.one_ask import Instruction
from relabel.labelers.prompts import BUILT_IN, SHARED, Prompts
from relabel.labelers.registry import EXAMPLE, Labeler
from relabel.labelers.verdicts import decided, mean_distribution
from relabel.manifests.asks import Answer, Ask, Decision, Distribution
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.specs import LabelerOptions


class EnsembleOptions(DirectOptions):
    """Options of `ensemble`."""

    instructions: list[Instruction] = Field(
        [
            "Judge whether a person who typed this query would be content with it.",
            "Judge by the facts that the document states.",
            "Be strict: a document that is only near the subject deserves one of the lowest grades.",
        ],
        min_length=2,
        max_length=32,
    )
    """What to judge by: a sentence or a few for each ask, put between the document and "Give the grade."."""

    @field_validator("instructions")
    @classmethod
    def _each_once(cls, instructions: list[str]) -> list[str]:
        if len(set(instructions)) < len(instructions):
            raise ValueError("the same instruction is there twice")
        return instructions


class Ensemble(Labeler):
    """Asks for a distribution after each instruction; the label is the mode of their mean, the lower one of equals.

    A pair with an answer without a distribution gets no label: the mean of fewer is a different label. Flags: those of
    the answers.
    """

    Options: ClassVar[type[LabelerOptions]] = EnsembleOptions
    columns = (
        LabelColumn("judge_probs", "list<float32>", "p(grade) by each instruction, in their order, K values each."),
    )

    def __init__(self, options: EnsembleOptions) -> None:
        prompts = Prompts(BUILT_IN / "ensemble", options.templates, shared=SHARED)
        settings = {"grades": options.grades}
        self._system = prompts.turn("system", "system.j2", data=(), settings=settings).message()
        self._users = [
            prompts.turn(
                "user", "user.j2", data=("query", "document"), settings={**settings, "instruction": instruction}
            )
            for instruction in options.instructions
        ]
        self.template_digests = prompts.digests
        self._decision = Decision("score", "<score>", tuple(map(str, range(options.grades))))

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask an instruction.

        Raises:
            VerdictError: an answer holds no distribution over the grades.
        """
        judges: list[Distribution] = []
        flags: list[str] = []
        for ask in self._asks(pair):
            answer = yield ask
            judges.append(decided(answer, self._decision))
            flags.extend(flag for flag in answer.flags if flag not in flags)
        mean = mean_distribution(judges)
        judge_probs = list(itertools.chain.from_iterable(judge.probs for judge in judges))
        return Label(mean.argmax, mean, {"judge_probs": judge_probs}, flags=flags)

    def probe(self) -> list[Ask]:
        return self._asks(EXAMPLE)

    def _asks(self, pair: Pair) -> list[Ask]:
        return [
            Ask(
                stage=f"judge_{number}",
                messages=(self._system, user.message(pair.query, pair.document)),
                format=None,
                max_tokens=0,
                decisions=(self._decision,),
                prefill="<score>",
            )
            for number, user in enumerate(self._users, 1)
        ]
