"""One walk of a labeler over one pair: what it asks next, and when it is asked again."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from relabel.labelers.registry import Labeler
from relabel.manifests.asks import Answer, Ask, Distribution, Sampling
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.specs import LabelerOptions


@dataclass(slots=True, eq=False)
class OpenPair:
    """A pair whose trajectories are under way; its row goes to `work.rows[index]`."""

    work: Any
    index: int
    pair: Pair
    outcomes: list[Trajectory] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sample of a pair: the labeler's generator, the answers it was sent, and what failed on the way.

    `label` is set at a good end, `failure` at a bad one; `refused_as` is the last answer's status if it was unreadable.
    """

    open: OpenPair
    sample: int
    generator: Generator[Ask, Answer, Label] | None = None
    answers: list[Answer] = field(default_factory=list)
    ask: Ask | None = None
    attempt: int = 0
    tries: list[dict[str, Any]] | None = None
    label: Label | None = None
    failure: VerdictError | None = None
    refused_as: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0

    def begin(self, labeler: Labeler) -> bool:
        """Take the first ask. True if there is one; False if the walk has ended without."""
        self.generator = labeler.label(self.open.pair)
        try:
            return self._step(None)
        except VerdictError as exc:
            self.failure = exc
            return False

    def take(self, answer: Answer, labeler: Labeler, options: LabelerOptions) -> bool:
        """Send an answer and take the next ask, or the same one again with another attempt number if the answer was
        unreadable.

        Returns:
            True if `ask` now wants an answer; False at the end, with `label` or `failure` set.
        """
        self.prompt_tokens += answer.prompt_tokens
        self.output_tokens += answer.output_tokens
        self.refused_as = None
        assert self.ask is not None
        for decision in self.ask.decisions:
            found = answer.distributions.get(decision.name)
            if found is not None and not _is_distribution(found, len(decision.labels)):
                answer = replace(
                    answer, finish="error", detail=f"the engine gave no probabilities at {decision.marker}: {found}"
                )
        try:
            return self._step(answer)
        except VerdictError as exc:
            return self._retry(answer, exc, labeler, options)

    def _step(self, answer: Answer | None) -> bool:
        assert self.generator is not None
        try:
            self.ask = next(self.generator) if answer is None else self.generator.send(answer)
        except StopIteration as end:
            self.label = end.value
            self.generator = None
            return False
        if answer is not None:
            self.answers.append(answer)
            self.attempt = 0
        return True

    def _retry(self, answer: Answer, error: VerdictError, labeler: Labeler, options: LabelerOptions) -> bool:
        assert self.ask is not None
        if self.tries is None:
            self.tries = []
        self.tries.append(
            {
                "stage": self.ask.stage,
                "attempt": self.attempt + 1,
                "finish": answer.finish,
                "text": answer.text,
                "reason": error.reason if not answer.detail else f"{error.reason} ({answer.detail})",
            }
        )
        self.attempt += 1
        self.refused_as = error.status
        if self.attempt >= options.attempts or error.status == "overlong":
            self.failure = error
            self.generator = None
            return False
        # a generator that raised is spent: walk a new one through the good answers up to the stage that failed
        self.generator = labeler.label(self.open.pair)
        self.ask = next(self.generator)
        for earlier in self.answers:
            self.ask = self.generator.send(earlier)
        self.ask = asked_again(self.ask, options)
        return True


def asked_again(ask: Ask, options: LabelerOptions) -> Ask:
    """An ask as it is put a second time: drawn, since a greedy answer would only come again."""
    drawn = ask.sampling
    return replace(ask, sampling=Sampling(max(drawn.temperature, options.retry_temperature), drawn.top_p))


def _is_distribution(found: Distribution, num_labels: int) -> bool:
    """Numbers that can be probabilities. A model whose numbers overflow (float16, one long document) gives NaN, and
    NaN's argmax is 0.
    """
    probs = found.probs
    # every comparison with NaN is false, so NaN fails here too
    return (
        len(probs) == num_labels
        and min(probs) >= 0.0
        and abs(sum(probs) - 1.0) < 1e-3
        and 0.0 <= found.outside_mass <= 1.0
    )
