"""Answer formats as grammars: their text in llguidance's Lark dialect, and the compiled matchers that constrain
decoding."""

import functools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any, cast

from relabel.labelers.engines.tokens import Prompt, quotable, special_ids
from relabel.manifests.asks import (
    MOST_INDICES,
    MOST_OPTION_LINES,
    AnswerFormat,
    Ask,
    Choice,
    Fragment,
    Indices,
    JsonIndices,
    JsonTexts,
    Lines,
    OptionLines,
    Section,
    Text,
    closing_of,
    opening_of,
)
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.process import require

# ------------------------------------------------------------------------------
# An answer's format as the text of a grammar, in llguidance's dialect of Lark.


_JSON_PLAIN = r'[^"\\\x00-\x1f]'
_JSON_VISIBLE = r'[^"\\\s\x00-\x1f]'
"""A character of a JSON string that needs no escape, and one that is no white space."""


def render_grammar(answer_format: AnswerFormat, *, prefill: str = "", fragment_source: str | None = None) -> str:
    """The Lark grammar of what is still to be written once `prefill` is there.

    Args:
        answer_format: the sections.
        prefill: how the answer begins. A closed section in it is done with; a section that is open goes on with its
            content.
        fragment_source: the document that constrained fragments quote; None leaves them free.
    Raises:
        ConfigError: the prefill does not begin an answer of this format.
    """
    sections, open_content = _remaining(answer_format, prefill)
    row: list[str] = []
    rules: list[str] = []
    for number, section in enumerate(sections):
        name = f"s{number}"
        content = open_content if number == 0 else None
        if section.tag and content is None:
            row.append(_literal(opening_of(section)))
        row.append(name)
        if section.tag:
            row.append(_literal(closing_of(section)))
        rules += _rules(section, name, content or "", fragment_source)
    start = " ".join(row) if row else '""'
    return f"start: {start}\n" + "\n".join(rules) + "\n"


def _rules(section: Section, name: str, content: str, source: str | None) -> list[str]:
    if isinstance(section, Choice):
        left = [option[len(content) :] for option in section.options if option.startswith(content)]
        if not left:
            raise ConfigError(
                f"the prefill opens <{section.tag}> with {content!r}, which begins none of {list(section.options)}."
            )
        return [f"{name}: " + " | ".join(_literal(option) for option in left)]
    if isinstance(section, Text):
        pattern = "[^<]*" if section.may_be_empty or content.strip() else r"[^<\s][^<]*"
        return [f"{name}[max_tokens={section.max_tokens}]: /{pattern}/"]
    if isinstance(section, JsonIndices):
        return _index_rules(section, name)
    if isinstance(section, JsonTexts):
        text = f"{name}t"
        more = f'(", " {text}){{0,{section.most - 1}}}'
        return [
            f'{name}: "[]" | "[" {text} {more} "]"',
            f'{text}: "\\"" {name}c "\\""',
            f"{name}c[max_tokens={section.max_text_tokens}]: /{_JSON_VISIBLE}{_JSON_PLAIN}*/",
        ]
    if isinstance(section, OptionLines):
        if not section.options:
            return [f"{name}: {_literal(section.alone)}"]
        return [
            f'{name}: {_literal(section.alone)} | {name}l ("\\n" {name}l){{0,{MOST_OPTION_LINES - 1}}}',
            f"{name}l: " + " | ".join(map(_literal, section.options)),
        ]
    if isinstance(section, Indices):
        return [f"{name}: " + (_number_list(section.most, MOST_INDICES) if section.most else '""')]
    if isinstance(section, Lines):
        more = ""
        if section.most > 1:
            more = f'("\\n" {name}l){{{section.least - 1},{section.most - 1}}}'
        return [f"{name}: {name}l {more}", f"{name}l[max_tokens={section.max_line_tokens}]: /[^<\\s][^<\\n]*/"]
    free = f"{name}[max_tokens={section.max_tokens}]"
    if content:
        return [f"{free}: /[^<]*/"]
    if not section.is_constrained or source is None:
        return [f"{free}: /[^<\\s][^<]*/"]
    if not re.search(r"[^<\s]", source):
        return [f'{name}: "none"']
    term = f"SOURCE{name[1:]}"
    return [
        f'{name}: "none" | {name}q',
        f"{name}q[max_tokens={section.max_tokens}]: {term}Q",
        f"{term}Q: /[^<\\s][^<]*/ & {term}",
        f'{term}: %regex {{ "substring_chars": {json.dumps(source)} }}',
    ]


def _index_rules(section: JsonIndices, name: str) -> list[str]:
    """A JSON object of lists of numbers, with a rule for each key that has any."""
    row: list[str] = []
    rules: list[str] = []
    for number, (key, most) in enumerate(zip(section.keys, section.mosts, strict=True)):
        before = ", " if row else "{"
        row.append(_literal(f"{before}{json.dumps(key)}: ["))
        if most:
            row.append(f"{name}k{number}")
            rules.append(f"{name}k{number}: {_number_list(most, most + 1)}")
        row.append('"]"')
    return [f"{name}: {' '.join(row)} {_literal('}')}", *rules]


def _number_list(most: int, longest: int) -> str:
    number = _numbers(most)
    return f"/(({number})(, ?({number})){{0,{longest - 1}}})?/"


def _numbers(most: int) -> str:
    """A regular expression of the numbers from 1 to `most`, as they are written without leading zeros."""
    digits = str(most)
    patterns = [f"[1-9]{_digits(length - 1)}" for length in range(1, len(digits))]
    for number, digit in enumerate(digits):  # as `most` before this digit, and less at it
        least = 1 if number == 0 else 0
        if int(digit) > least:
            patterns.append(f"{digits[:number]}[{least}-{int(digit) - 1}]{_digits(len(digits) - number - 1)}")
    return "|".join([*patterns, digits])


def _digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _remaining(answer_format: AnswerFormat, prefill: str) -> tuple[Sequence[Section], str | None]:
    """Sections that are not closed in the prefill, and the content so far of the first of them, or None if it is not
    open.
    """
    rest = prefill
    sections = answer_format.sections
    if "think" not in {section.tag for section in sections}:
        # an empty thought put before the answer, as templates of thinking models do
        rest = re.sub(r"\A\s*<think>.*?</think>", "", rest, flags=re.DOTALL)
    for number, section in enumerate(sections):
        rest = rest.lstrip()
        opening = f"<{section.tag}>"
        if not rest:
            return sections[number:], None
        if not rest.startswith(opening):
            raise ConfigError(
                f"the prefill {prefill!r} does not begin an answer of {''.join(map(opening_of, sections))}: "
                f"{rest!r} is not {opening}…"
            )
        content, closing, after = rest[len(opening) :].partition(f"</{section.tag}>")
        if not closing:
            return sections[number:], content
        rest = after
    if rest.strip():
        raise ConfigError(f"the prefill {prefill!r} continues after the answer's last section.")
    return (), None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ------------------------------------------------------------------------------
# Answer formats as llguidance grammars: while it decodes, the model can't leave the format, and its thinking ends in
# time.
#
# Sections follow each other with nothing between them. Two choices, both because llguidance's lexer never goes back: a
# free text holds no `<` at all (else a closing tag would be read as text up to its last character, and then there is no
# way on), which also keeps every tag unique in the answer; and a constrained fragment is a run of the document without
# `<` that begins with something visible. A cap in tokens ends a text wherever it is, and the closing tag is then the
# only way on.


LEXER_FUEL = 20_000_000
"""llguidance's own limit of a million refuses quotations from documents above some 60,000 characters."""
QUOTING_KEPT = 4
"""Grammars that quote a document are kept for the row's other samples, which are asked right after it: each takes
milliseconds to compile, and about a megabyte for 2,600 characters.
"""


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
        self.tokenizer = _grammar_tokenizer(self._ll, tokenizer, vocab_size=vocab_size, eos_ids=list(eos_ids))
        """llguidance's own view of it."""
        self.eos_ids = frozenset(eos_ids)
        self._silent_ids = self.eos_ids | special_ids(tokenizer)
        self.token_bytes = functools.cache(self._token_bytes)
        """The bytes of a token in an answer: none for control tokens and those that end it."""
        # formats are a handful
        self._compiled = functools.lru_cache(maxsize=64)(
            lambda format, prefill: self._compile(render_grammar(format, prefill=prefill))
        )
        self._compiled_quoting = functools.lru_cache(maxsize=QUOTING_KEPT)(self._compile)

    @property
    def vocab_size(self) -> int:
        """Width of the masks that the matchers make."""
        return int(self.tokenizer.vocab_size)

    def _token_bytes(self, token: int) -> bytes:
        is_text = token not in self._silent_ids and token < self.vocab_size
        return bytes(self.tokenizer.decode_bytes([token])) if is_text else b""

    def matcher(self, answer_format: AnswerFormat, *, prefill: str = "", fragment_source: str | None = None) -> Any:
        """A matcher that is at the start of what is still to be written.

        A document that llguidance can't take as a source leaves fragments free for that one answer: the reader checks
        them in any case.

        Raises:
            ModelError: llguidance refuses the grammar.
            ConfigError: the prefill does not begin an answer of this format.
        """
        if fragment_source is not None and is_quoting(answer_format):
            try:
                grammar = render_grammar(answer_format, prefill=prefill, fragment_source=fragment_source)
                return self._compiled_quoting(grammar).deep_copy()
            except ModelError as exc:
                logger.warning(
                    "a document of %d characters can't bind its quotation, which stays free: %s",
                    len(fragment_source),
                    exc,
                )
        return self._compiled(answer_format, prefill).deep_copy()

    def bind(self, ask: Ask, prompt: Prompt) -> Any:
        """The matcher of an ask with a format, for its prompt as the model will see it."""
        assert ask.format is not None
        return self.matcher(ask.format, prefill=prompt.begins, fragment_source=quotable(ask, prompt))

    def _compile(self, grammar: str) -> Any:
        matcher = self._ll.LLMatcher(
            self.tokenizer,
            self._ll.LLMatcher.grammar_from_lark(grammar),
            log_level=0,
            limits=self._ll.LLParserLimits(initial_lexer_fuel=LEXER_FUEL),
        )
        if matcher.is_error():
            raise ModelError(f"llguidance refuses the grammar of an answer format: {matcher.get_error()}")
        return matcher


def is_quoting(answer_format: AnswerFormat) -> bool:
    """Whether each answer has a grammar of its own, since it quotes a document: milliseconds, without Python's lock."""
    return any(isinstance(section, Fragment) and section.is_constrained for section in answer_format.sections)


def _grammar_tokenizer(library: Any, tokenizer: Any, *, vocab_size: int, eos_ids: list[int]) -> Any:
    """llguidance's view of a tokenizer.

    llguidance 1.9 takes any added token in angle brackets for a control token, `</think>` among them, yet proposes it
    where that text is forced, and then refuses it. Where there are such tokens, it is given the vocabulary as bytes,
    with only the special ones marked.
    """
    hf = require("llguidance.hf", extra="cpu", purpose="Constrained decoding")
    plain = hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids)
    added = tokenizer.added_tokens_decoder
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
        unused = range(known, vocab_size)  # logits are often padded to a round width
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [plain.decode_bytes([token]) for token in range(known)] + [
            f"<|unused_{token}|>".encode() for token in unused
        ]
        self.special_token_ids = sorted(special_ids(tokenizer) | set(unused))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("takes text, not bytes")  # llguidance tries both
        return cast("list[int]", self._backend.encode(text, add_special_tokens=False).ids)
