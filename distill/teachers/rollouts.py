"""Rollouts: a labeler's whole conversation about a pair, written by the model that is trained.

The labeler itself asks and reads, so prompts are those of `relabel run`, token for token, and no answer is readable
here that would not be readable there. A later turn goes on from the tokens that were sampled, not from another spelling
of their text; what the chat template puts between two answers is part of the rollout, and not the model's own.

No grammar holds answers whose format is to be learned: with one, every format would be right. `res-rag` alone, whose
chooser earns nothing by its format, has one (`res_rag_trainer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relabel.distill.teachers.answer_tokens import AnswerTokens
from relabel.labelers.engines.tokens import Overlong, PromptEncoder, extends
from relabel.labelers.registry import Labeler
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Label, Pair

Generate = Callable[[Sequence[list[int]]], Sequence[list[int]]]
"""Prompts as token ids to answers as token ids, each up to its end token, which is included."""
_OVERLONG = Answer(0, "", "overlong")


class AskedIds(list[int]):
    """A prompt's token ids, which know what they ask: as `Generate` gets them."""

    def __init__(self, ask: Ask, ids: Sequence[int]) -> None:
        super().__init__(ids)
        self.ask = ask


class FirstPrompt(NamedTuple):
    """What a conversation begins with.

    Args:
        ask: the first one whose prompt fits.
        ids: that prompt's tokens.
        overlong: asks before it whose prompt did not fit; the labeler was told, and shows less.
    """

    ask: Ask
    ids: list[int]
    overlong: int


@dataclass(slots=True)
class WrittenTurn:
    """One answer of the model.

    Args:
        ask: what it answers.
        start: where it begins among the rollout's completion ids.
        ids: its tokens, the end token included where it has one.
        text: their text, without control tokens; before it the thought that the chat template opens, if it does.
    """

    ask: Ask
    start: int
    ids: list[int]
    text: str


@dataclass(slots=True)
class Rollout:
    """One conversation and what came of it.

    Args:
        pair: what it is about.
        prompt_ids: the first prompt.
        completion_ids: all answers, and the template's tokens between them.
        is_own: for each of those, whether the model wrote it.
        turns: the answers, in order.
        label: what was read; None where there is no readable label.
        fault: why not, as a row's status in a run would be; empty where there is a label.
        detail: what is wrong, for a person.
    """

    pair: Pair
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    is_own: list[bool] = field(default_factory=list)
    turns: list[WrittenTurn] = field(default_factory=list)
    label: Label | None = None
    fault: str = ""
    detail: str = ""

    @property
    def num_own(self) -> int:
        """Tokens that the model wrote."""
        return sum(self.is_own)


class Dialogues:
    """Rolls out one labeler's conversations.

    Args:
        labeler: asks and reads.
        encoder: the prompts' encoder, as the engines have it.
        tokens: reads answers.
        max_prompt_tokens: longest prompt of any turn, as `engine.max_prompt_tokens` of a run.
    """

    def __init__(
        self, labeler: Labeler, encoder: PromptEncoder, tokens: AnswerTokens, *, max_prompt_tokens: int
    ) -> None:
        self._labeler, self._encoder, self._max_prompt = labeler, encoder, max_prompt_tokens
        self.tokens = tokens

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens of any one answer, its end token included.

        Raises:
            ConfigError: the labeler has the model write nothing.
        """
        most = [ask.max_tokens for ask in self._labeler.probe()]
        if not all(most) or any(ask.prefill for ask in self._labeler.probe()):
            raise ConfigError(
                "this labeler's teacher writes no answer of its own, so there is nothing to reward: take one whose "
                "teacher reasons (`r1`, `umbrela`, `r3a`, `graph-grpo`), or train it with `method: sft`."
            )
        return max(most) + 1

    def first_prompt(self, pair: Pair) -> FirstPrompt | None:
        """The first prompt that fits: a labeler that then shows less is told where one does not. None where none does,
        or nothing can be asked.
        """
        asker, overlong = self._labeler.label(pair), 0
        try:
            ask = next(asker)
            while isinstance(prompt := self._encoder.encode(ask, max_prompt_tokens=self._max_prompt), Overlong):
                ask, overlong = asker.send(_OVERLONG), overlong + 1
        except (StopIteration, VerdictError):
            return None
        return FirstPrompt(ask, prompt.ids, overlong)

    def roll(
        self, pairs: Sequence[Pair], generate: Generate, *, firsts: Sequence[FirstPrompt | None] = ()
    ) -> list[Rollout]:
        """One rollout for each pair, turn by turn, all that go on together.

        Args:
            firsts: their first prompts, where they are known.
        Raises:
            ConfigError: a first prompt does not fit (`first_prompt`), or the chat template renders earlier turns anew.
        """
        known = {id(pair): first for pair, first in zip(pairs, firsts, strict=False)}  # a pair's rollouts share it
        talks = [self._open(pair, known) for pair in pairs]
        going = talks
        while going:
            answers = generate([talk.context for talk in going])
            going = [talk for talk, ids in zip(going, answers, strict=True) if self._take(talk, list(ids))]
        return [talk.rollout for talk in talks]

    def _open(self, pair: Pair, known: dict[int, FirstPrompt | None]) -> _Talk:
        first = known.get(id(pair)) or self.first_prompt(pair)
        if first is None:
            raise ConfigError(f"row {pair.row_id}: its prompt does not fit into {self._max_prompt} tokens.")
        known[id(pair)] = first
        asker = self._labeler.label(pair)
        ask = next(asker)
        for _ in range(first.overlong):
            ask = asker.send(_OVERLONG)
        return _Talk(asker, ask, first.ids, Rollout(pair, first.ids))

    def _take(self, talk: _Talk, ids: list[int]) -> bool:
        """Give the labeler an answer; whether it asks on."""
        rollout = talk.rollout
        text = self._encoder.opened_for(talk.ask) + self.tokens.text(ids)
        rollout.turns.append(WrittenTurn(talk.ask, len(rollout.completion_ids), ids, text))
        talk.add(ids, is_own=True)
        try:
            ask = talk.asker.send(self.tokens.answer(ids, max_tokens=talk.ask.max_tokens, text=text))
        except StopIteration as end:
            rollout.label = end.value
            return False
        except VerdictError as exc:
            rollout.fault, rollout.detail = exc.status, exc.reason
            return False
        prompt = self._encoder.encode(ask, max_prompt_tokens=self._max_prompt)
        if isinstance(prompt, Overlong):
            rollout.fault, rollout.detail = "overlong", f"turn {ask.stage} does not fit"
            return False
        between = self._between(talk.rendered, ids, prompt.ids)
        if ids[-1] == between[0]:
            between = between[1:]
        else:  # it ended its turn with another token than the template does, which no later prompt will hold
            talk.drop_last()
        talk.add(between, is_own=False)
        talk.ask, talk.rendered = ask, prompt.ids
        return True

    def _between(self, before: list[int], answer: list[int], after: list[int]) -> list[int]:
        """The template's tokens from an answer's end to the next prompt's."""
        body = answer[:-1]
        if extends(before, after):
            start = len(before)
            if after[start : start + len(body)] == body and len(after) > start + len(body):
                return after[start + len(body) :]
            # The model spelled its text in other tokens than the tokenizer does: the first end token ends the turn.
            end = next((at for at in range(start, len(after)) if after[at] in self.tokens.end_ids), len(after))
            if end < len(after) and self.tokens.text(after[start:end]).strip() == self.tokens.text(body).strip():
                return after[end:]
        raise ConfigError(
            "the model's chat template renders earlier turns in another way when more turns follow, so a later turn "
            "can't go on from the answer as it was sampled. Set chat_template_kwargs, or a labeler of one turn (`r3a` "
            "with `stages: 1`)."
        )


@dataclass(slots=True)
class _Talk:
    """A rollout on its way: who asks, what was asked, and the last prompt as the template renders it."""

    asker: Generator[Ask, Answer, Label]
    ask: Ask
    rendered: list[int]
    rollout: Rollout

    @property
    def context(self) -> AskedIds:
        return AskedIds(self.ask, self.rollout.prompt_ids + self.rollout.completion_ids)

    def add(self, ids: Sequence[int], *, is_own: bool) -> None:
        self.rollout.completion_ids += ids
        self.rollout.is_own += [is_own] * len(ids)

    def drop_last(self) -> None:
        self.rollout.completion_ids.pop()
        self.rollout.is_own.pop()
