"""Generated token ids as the labeler's own reader gets them from an engine, with what decoding would hide judged here.

Decoding drops control tokens, so a text alone can look well formed where the tokens are not: the format is judged on
token ids. An answer without an end token was cut off, and is read by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relabel.labelers.engines.checkpoints import special_ids
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.manifests.asks import Answer
from relabel.manifests.errors import VerdictError


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
        self._pieces: dict[int, bytes] = {}

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token stands for in the answer's text; none for a control token, nor for an id beyond the
        tokenizer's vocabulary (models' logits are often wider).
        """
        known = self._pieces
        for one in ids:
            if one not in known:
                known[one] = b"" if self._is_silent(one) else self._token_bytes(one)
        return [known[one] for one in ids]

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
        body = ids[:-1] if ids and ids[-1] in self.end_ids else ids
        if len(body) == len(ids) or len(body) > max_tokens:
            raise VerdictError("truncated", f"no end token after {min(len(body), max_tokens)} tokens")
        for place, one in enumerate(body):
            if self._is_silent(one):
                raise VerdictError("format", f"token {place + 1} of the answer is a control token")
        return Answer(0, self.text(body) if text is None else text, "stop", output_tokens=len(body))

    def _is_silent(self, one: int) -> bool:
        return one in self._silent_ids or one >= self._vocab_size
