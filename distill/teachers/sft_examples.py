"""Turns as token ids: the prompt as an engine encodes it, then the answer, and which of its tokens are reasoning."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from relabel.distill.teachers.answered_rows import AnsweredRow, AnsweredRows
from relabel.distill.teachers.bases import TeacherBase
from relabel.distill.teachers.chosen_sets import choices
from relabel.distill.teachers.segments import token_parts
from relabel.distill.teachers.turns import AnsweredTurn, UnlearnableError, turns_of
from relabel.labelers.engines.decisions import resolve_labels
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import Overlong
from relabel.manifests.asks import Decision

REASONING = 0


class Example(NamedTuple):
    """One prompt with its answer, packed: five bytes a token, where a list would take eight and more.

    Args:
        ids: of both.
        is_reasoning: of each token of the answer, the last ones of `ids`: 1 or 0.
        row: number of the row that it is of.
    """

    ids: array[int]
    is_reasoning: bytes
    row: int

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.is_reasoning)


@dataclass
class AnswerExamples:
    """All examples.

    Args:
        dropped: rows that gave none, by reason.
        rows: how many rows gave some.
    """

    examples: list[Example]
    dropped: Counter[str]
    rows: int

    @property
    def digest(self) -> str:
        """Of all token ids and of what is masked."""
        total = hashlib.sha256()
        for example in self.examples:
            total.update(f"{len(example.ids)} {example.num_answer}\n".encode())
            total.update(np.array(example.ids, dtype="<i4").tobytes())
            total.update(example.is_reasoning)
        return total.hexdigest()


def make_examples(
    answered: AnsweredRows, base: TeacherBase, *, max_tokens: int, is_preliminary: bool = False
) -> AnswerExamples:
    """Examples of all rows; what rows of a query share is one example.

    Args:
        max_tokens: of prompt and answer.
        is_preliminary: the first grade is the whole answer.
    Raises:
        ModelError: the grades are not one token each.
    """
    encoder = AnswerEncoder(base)
    found: list[Example] = []
    seen: set[tuple[str, bytes]] = set()
    dropped: Counter[str] = Counter()
    rows = 0
    for number, row in enumerate(answered.rows):
        try:
            if row.sets is not None:
                made = [encoder.longest_of(choices(answered, row), row, number, max_tokens=max_tokens)]
            else:
                turns = turns_of(answered, row, is_preliminary=is_preliminary)
                made = [(turn, encoder.encode(turn, row, number, max_tokens=max_tokens)) for turn in turns]
        except UnlearnableError as exc:
            dropped[exc.args[0]] += 1
            continue
        rows += 1
        for turn, example in made:
            if turn.ask.shared_by is not None:
                key = turn.ask.stage, hashlib.sha256(example.ids.tobytes()).digest()
                if key in seen:
                    continue
                seen.add(key)
            found.append(example)
    return AnswerExamples(found, dropped, rows)


class AnswerEncoder:
    """Makes turns into token ids, for one model."""

    def __init__(self, base: TeacherBase) -> None:
        self._base = base
        self._encoder = base.encoder
        self._label_ids = functools.cache(self._resolved)

    def encode(self, turn: AnsweredTurn, row: AnsweredRow, number: int, *, max_tokens: int) -> Example:
        """One example.

        Raises:
            UnlearnableError: there is no room for it, or the evidence stands in what was cut off the document.
        """
        if turn.label is not None:
            (decision,) = turn.ask.decisions
            answer, is_reasoning = [self._label_ids(decision)[turn.label]], [False]
        else:
            opened = self._encoder.opened_for(turn.ask).strip()  # in the prompt already
            answer = self._encoder.encode_answer((turn.parts[0].removeprefix(opened), *turn.parts[1:]))
            is_reasoning = [part == REASONING for part in self._parts(answer, turn, opened)]
            answer, is_reasoning = [*answer, self._base.end_id], [*is_reasoning, False]
        prompt = self._encoder.encode(turn.ask, max_prompt_tokens=max_tokens - len(answer))
        if isinstance(prompt, Overlong):
            raise UnlearnableError(f"too long for {max_tokens} tokens")
        evidence = row.label.evidence if row.label is not None else []
        seen = prompt.cut_document
        if seen is not None and any(str(span["text"]) not in seen for span in evidence):
            raise UnlearnableError("whose evidence stands where the document was cut off")
        return Example(array("i", prompt.ids + answer), bytes(is_reasoning), number)

    def longest_of(
        self, turns: Iterable[AnsweredTurn], row: AnsweredRow, number: int, *, max_tokens: int
    ) -> tuple[AnsweredTurn, Example]:
        """The first turn that there is room for, of ever shorter ones.

        Raises:
            UnlearnableError: there is room for none.
        """
        for turn in turns:
            with contextlib.suppress(UnlearnableError):
                return turn, self.encode(turn, row, number, max_tokens=max_tokens)
        raise UnlearnableError(f"too long for {max_tokens} tokens, or without a chunk")

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        """Knows each token's bytes; takes a second to make, and grades alone do without."""
        vocabulary = int(self._base.config.get_text_config().vocab_size)
        return GrammarCompiler(self._base.tokenizer, vocab_size=vocabulary, eos_ids=[self._base.end_id])

    def _parts(self, answer: list[int], turn: AnsweredTurn, opened: str) -> list[int]:
        pieces = [opened.encode(), *map(self._compiler.token_bytes, answer)]
        return token_parts(pieces, {REASONING: turn.reasoning})[1:]

    def _resolved(self, decision: Decision) -> tuple[int, ...]:
        return resolve_labels(self._encoder, decision, tokenizer_name=self._base.resolved.reference)
