"""Answer formats as llguidance grammars: while it decodes, the model can't leave the format, and its thinking ends in
time.

Sections follow each other with nothing between them. Two choices, both because llguidance's lexer never goes
back: a free text holds no `<` at all (else a closing tag would be read as text up to its last character, and then there
is no way on), which also keeps every tag unique in the answer; and a constrained fragment is a run of the document
without `<` that begins with something visible. A cap in tokens ends a text wherever it is, and the closing tag is
then the only way on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from relabel.labelers.engines.grammar_texts import render_grammar
from relabel.manifests.errors import ModelError
from relabel.manifests.extras import require
from relabel.manifests.formats import (
    AnswerFormat,
    Fragment,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_COMPILED = 64
"""Compiled grammars that are kept. Formats are a handful; constrained ones come once a document and are not kept."""

LEXER_FUEL = 20_000_000
"""llguidance's own limit of a million refuses quotations from documents above some 60,000 characters."""


logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles formats for one tokenizer, and hands out matchers at their start.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: width of the model's logits; often larger than the tokenizer's vocabulary.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._ll = require("llguidance", extra="cpu", purpose="Constrained decoding")
        self.tokenizer = _grammar_tokenizer(tokenizer, vocab_size=vocab_size, eos_ids=list(eos_ids))
        """llguidance's own view of it."""
        self._compiled: OrderedDict[tuple[AnswerFormat, str], Any] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        """Width of the masks that the matchers make."""
        return int(self.tokenizer.vocab_size)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for in text."""
        raw: bytes = self.tokenizer.decode_bytes([token])
        return raw

    def matcher(self, answer_format: AnswerFormat, *, prefill: str = "", fragment_source: str | None = None) -> Any:
        """A matcher that is at the start of what is still to be written.

        A document that llguidance can't take as a source leaves fragments free for that one answer: the reader checks
        them in any case.

        Raises:
            ModelError: llguidance refuses the grammar.
            ConfigError: the prefill does not begin an answer of this format.
        """
        if fragment_source is not None and any(
            isinstance(s, Fragment) and s.is_constrained for s in answer_format.sections
        ):
            try:
                return self._compile(render_grammar(answer_format, prefill=prefill, fragment_source=fragment_source))
            except ModelError as exc:
                logger.warning(
                    "a document of %d characters can't bind its quotation, which stays free: %s",
                    len(fragment_source),
                    exc,
                )
        key = (answer_format, prefill)
        if key not in self._compiled:
            self._compiled[key] = self._compile(render_grammar(answer_format, prefill=prefill))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return self._compiled[key].deep_copy()

    def _compile(self, grammar: str) -> Any:
        limits = self._ll.LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
        matcher = self._ll.LLMatcher(
            self.tokenizer, self._ll.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits
        )
        if matcher.is_error():
            raise ModelError(f"llguidance refuses the grammar of an answer format: {matcher.get_error()}")
        return matcher


def _grammar_tokenizer(tokenizer: Any, *, vocab_size: int, eos_ids: list[int]) -> Any:
    """llguidance's view of a tokenizer.

    llguidance 1.9 takes any added token in angle brackets for a control token, `</think>` among them, yet proposes it
    where that text is forced, and then refuses it. Where there are such tokens, it is given the vocabulary as bytes,
    with only the special ones marked.
    """
    hf = require("llguidance.hf", extra="cpu", purpose="Constrained decoding")
    library = require("llguidance", extra="cpu", purpose="Constrained decoding")
    plain = hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids)
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    if not any(plain.is_special_token(token) and not kind.special for token, kind in added.items()):
        return plain
    return library.LLTokenizer(
        library.TokenizerWrapper(_ByteVocabulary(tokenizer, plain, vocab_size)), eos_token=eos_ids
    )


class _ByteVocabulary:
    """A tokenizer as llguidance's wrapper wants it: the bytes of every id, the special ids, and a call that encodes
    text.
    """

    def __init__(self, tokenizer: Any, plain: Any, vocab_size: int) -> None:
        known = len(tokenizer)
        special = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special} | set(
            tokenizer.all_special_ids
        )
        unused = range(known, vocab_size)  # logits are often padded to a round width
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [plain.decode_bytes([token]) for token in range(known)] + [
            f"<|unused_{token}|>".encode() for token in unused
        ]
        self.special_token_ids = sorted(special | set(unused))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("takes text, not bytes")  # llguidance tries both
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids
