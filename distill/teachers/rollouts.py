"""Rollouts: a labeler's whole conversation about a pair, written by the model that is trained, with the text span of
each token.

The labeler itself asks and reads, so prompts are those of `relabel run`, token for token, and no answer is readable
here that would not be readable there. A later turn goes on from the tokens that were sampled, not from another spelling
of their text; what the chat template puts between two answers is part of the rollout, and not the model's own.

Decoding drops control tokens, so a text alone can be well formed where the tokens are not: the format is judged on
token ids. An answer without an end token was cut off, and is read by nobody.
"""

from __future__ import annotations

import codecs
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import Overlong, PromptEncoder, extends, special_ids
from relabel.labelers.registry import Labeler
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Label, Pair


class AnswerTokens:
    """Reads the token ids of answers.

    Args:
        tokenizer: a fast tokenizer of transformers.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, *, end_ids: Sequence[int]) -> None:
        self.end_ids = frozenset(end_ids)
        self._silent_ids = special_ids(tokenizer) | self.end_ids
        self._token_bytes = GrammarCompiler(tokenizer, vocab_size=len(tokenizer), eos_ids=end_ids).token_bytes
        self._vocab_size = len(tokenizer)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token in the answer's text; none for a control token, nor for an id beyond the
        tokenizer's vocabulary (models' logits are often wider).
        """
        return list(map(self._token_bytes, ids))

    def text(self, ids: Sequence[int]) -> str:
        """The answer's text, as an engine gives it."""
        return b"".join(self.pieces(ids)).decode("utf-8", errors="replace")

    def answer(self, ids: Sequence[int], *, max_tokens: int, text: str | None = None) -> Answer:
        """What an engine would answer.

        Args:
            text: theirs, where it is known.
            max_tokens: of the ask; the end token is not counted.
        Raises:
            VerdictError: `truncated` without an end token within the limit; `format` with a control token before it.
        """
        has_end = bool(ids) and ids[-1] in self.end_ids
        body = ids[:-1] if has_end else ids
        if not has_end or len(body) > max_tokens:
            raise VerdictError("truncated", f"no end token after {min(len(body), max_tokens)} tokens")
        for number, token in enumerate(body, start=1):
            if token in self._silent_ids or token >= self._vocab_size:
                raise VerdictError("format", f"token {number} of the answer is a control token")
        return Answer(0, self.text(body) if text is None else text, "stop", output_tokens=len(body))


_OVERLONG = Answer(0, "", "overlong")


class AskedIds(list[int]):
    """A prompt's token ids, which know what they ask: as `Generate` gets them.

    Args:
        number: of the conversation, among those that are rolled out together.
    """

    def __init__(self, ask: Ask, ids: Sequence[int], number: int = 0) -> None:
        super().__init__(ids)
        self.ask = ask
        self.number = number


Generate = Callable[[Sequence[AskedIds]], Sequence[list[int]]]
"""Prompts as token ids to answers as token ids, each up to its end token, which is included."""


class FirstPrompt(NamedTuple):
    """What a conversation begins with.

    Args:
        ask: the first one whose prompt fits.
        ids: that prompt's tokens.
        overlong: asks before it whose prompt did not fit, after which the labeler shows less.
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

    def add(self, ids: Sequence[int], *, is_own: bool) -> None:
        """Add completion tokens."""
        self.completion_ids += ids
        self.is_own += [is_own] * len(ids)


def longest_answer(labeler: Labeler) -> int:
    """Most tokens of any one answer, its end token included.

    Raises:
        ConfigError: the labeler has the model write nothing.
    """
    asks = labeler.probe()
    if any(not ask.max_tokens or ask.prefill for ask in asks):
        raise ConfigError(
            "this labeler's teacher writes no answer of its own, so there is nothing to reward: take one whose "
            "teacher reasons (`r1`, `umbrela`, `r3a`, `graph-grpo`), or train it with `method: sft`."
        )
    return max(ask.max_tokens for ask in asks) + 1


def _num_chars(ask: Ask) -> int:
    return sum(len(message.text) for message in ask.messages)


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
        self.labeler = labeler
        self.tokens = tokens
        self._encoder = encoder
        self._max_prompt = max_prompt_tokens
        self._longest: Ask | None = None

    def first_prompt(self, pair: Pair) -> FirstPrompt | None:
        """The first prompt that fits: where one does not, a labeler may show less. None where none does,
        or nothing can be asked.
        """
        asker = self.labeler.label(pair)
        overlong = 0
        ask = None
        try:
            ask = next(asker)
            prompt = self._encoder.encode(ask, max_prompt_tokens=self._max_prompt)
            while isinstance(prompt, Overlong):
                ask = asker.send(_OVERLONG)
                overlong += 1
                prompt = self._encoder.encode(ask, max_prompt_tokens=self._max_prompt)
        except (StopIteration, VerdictError):
            if ask is not None:
                self._longest = max(self._longest or ask, ask, key=_num_chars)
            return None
        return FirstPrompt(ask, prompt.ids, overlong)

    def longest_overlong(self) -> int | None:
        """Tokens of the longest first prompt, by its characters, that did not fit; None if all did."""
        if self._longest is None:
            return None
        prompt = self._encoder.encode(self._longest, max_prompt_tokens=sys.maxsize)
        return prompt.num_tokens if isinstance(prompt, Overlong) else len(prompt.ids)

    def roll(
        self, pairs: Sequence[Pair], generate: Generate, *, firsts: Sequence[FirstPrompt | None] = ()
    ) -> list[Rollout]:
        """One rollout for each pair, turn by turn, all that go on together.

        Args:
            firsts: their first prompts, where they are known.
        Raises:
            ConfigError: a first prompt does not fit (`first_prompt`), or the chat template changes earlier turns.
        """
        talks = [self._open(number, pair, first) for number, (pair, first) in enumerate(zip_longest(pairs, firsts))]
        going = talks
        while going:
            so_far = [talk.rollout.prompt_ids + talk.rollout.completion_ids for talk in going]
            answers = generate([AskedIds(talk.ask, ids, talk.number) for talk, ids in zip(going, so_far, strict=True)])
            going = [talk for talk, ids in zip(going, answers, strict=True) if self._take(talk, list(ids))]
        return [talk.rollout for talk in talks]

    def _open(self, number: int, pair: Pair, first: FirstPrompt | None) -> _Talk:
        first = first or self.first_prompt(pair)
        if first is None:
            raise ConfigError(f"row {pair.row_id}: its prompt does not fit into {self._max_prompt} tokens.")
        asker = self.labeler.label(pair)
        ask = next(asker)
        for _ in range(first.overlong):
            ask = asker.send(_OVERLONG)
        return _Talk(number, asker, ask, first.ids, Rollout(pair, first.ids))

    def _take(self, talk: _Talk, ids: list[int]) -> bool:
        """Give the labeler an answer; whether it asks on."""
        rollout = talk.rollout
        text = self._encoder.opened_for(talk.ask) + self.tokens.text(ids)
        rollout.turns.append(WrittenTurn(talk.ask, len(rollout.completion_ids), ids, text))
        rollout.add(ids, is_own=True)
        try:
            ask = talk.asker.send(self.tokens.answer(ids, max_tokens=talk.ask.max_tokens, text=text))
        except StopIteration as end:
            rollout.label = end.value
            return False
        except VerdictError as exc:
            rollout.fault = exc.status
            rollout.detail = exc.reason
            return False
        prompt = self._encoder.encode(ask, max_prompt_tokens=self._max_prompt)
        if isinstance(prompt, Overlong):
            rollout.fault = "overlong"
            rollout.detail = f"turn {ask.stage} does not fit"
            return False
        between = self._between(talk.rendered, ids, prompt.ids)
        if ids[-1] == between[0]:
            between = between[1:]
        else:  # it ended its turn with another token than the template does, which no later prompt will hold
            rollout.completion_ids.pop()
            rollout.is_own.pop()
        rollout.add(between, is_own=False)
        talk.ask = ask
        talk.rendered = prompt.ids
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
    """A rollout on its way: its number among all, who asks, what was asked, and the last prompt as the template renders
    it.
    """

    number: int
    asker: Generator[Ask, Answer, Label]
    ask: Ask
    rendered: list[int]
    rollout: Rollout


NO_PART = -1
"""The part of what is between sections: tags, white space, the end of a turn."""

Span = tuple[int, int]


def token_spans(pieces: Iterable[bytes]) -> list[Span]:
    """The characters [start, end) of the decoded answer that each token completes; none where start is end.

    Args:
        pieces: the bytes of each token, in order. Bytes that are not UTF-8 become replacement characters.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return list(pairwise(accumulate((len(decoder.decode(piece)) for piece in pieces), initial=0)))


def token_parts(pieces: Sequence[bytes], spans: Mapping[int, Sequence[Span]]) -> list[int]:
    """The part of each token.

    Args:
        pieces: the bytes of each token; none for one that is not text.
        spans: by part, the characters [start, end) of the answer's text that are its own; they do not overlap.
    """
    ends = token_spans(pieces)
    length = ends[-1][1] if ends else 0
    for of_part in spans.values():
        length = max([length, *(end for _, end in of_part)])
    part_of = [NO_PART] * (length + 1)
    for part, of_part in spans.items():
        for start, end in of_part:
            part_of[start:end] = [part] * (end - start)
    return [
        _most(part_of[start : max(end, start + 1)]) if piece else NO_PART
        for piece, (start, end) in zip(pieces, ends, strict=True)
    ]


def _most(parts: Sequence[int]) -> int:
    counts = Counter(parts)
    return max(counts, key=lambda part: (counts[part], part != NO_PART))
