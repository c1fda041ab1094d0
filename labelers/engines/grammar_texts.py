"""An answer's format as the text of a grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from relabel.manifests.errors import ConfigError
from relabel.manifests.formats import (
    MOST_INDICES,
    MOST_OPTION_LINES,
    AnswerFormat,
    Choice,
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

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        is_open = number == 0 and open_content is not None
        content = open_content if is_open and open_content is not None else ""
        name = f"s{number}"
        if not section.tag:
            row.append(name)
        else:
            row += ([] if is_open else [_literal(opening_of(section))]) + [name, _literal(closing_of(section))]
        rules += _rules(section, name, content, fragment_source)
    return "start: " + (" ".join(row) if row else '""') + "\n" + "\n".join(rules) + "\n"


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
        row: list[str] = []
        for number, (key, most) in enumerate(zip(section.keys, section.mosts, strict=True)):
            row += [
                _literal(f"{', ' if row else '{'}{json.dumps(key)}: ["),
                *([f"{name}k{number}"] if most else []),
                '"]"',
            ]
        rules = [f"{name}k{n}: {_number_list(most, most + 1)}" for n, most in enumerate(section.mosts) if most]
        return [f"{name}: {' '.join(row)} {_literal('}')}", *rules]
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
        if content:
            raise ConfigError(f"the prefill begins the numbers of <{section.tag}>; it may open them and no more.")
        if not section.most:
            return [f'{name}: ""']
        return [f"{name}: {_number_list(section.most, MOST_INDICES)}"]
    if isinstance(section, Lines):
        if content:
            raise ConfigError(f"the prefill begins the lines of <{section.tag}>; it may open them and no more.")
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


def _number_list(most: int, longest: int) -> str:
    one = _numbers(most)
    return f"/(({one})(, ?({one})){{0,{longest - 1}}})?/"


def _numbers(most: int) -> str:
    """A regular expression of the numbers from 1 to `most`, as they are written without leading zeros."""
    digits = str(most)
    found = [f"[1-9]{_digits(length - 1)}" for length in range(1, len(digits))]
    for place, digit in enumerate(digits):  # as `most` before this place, and less at it
        least = 1 if place == 0 else 0
        if int(digit) > least:
            found.append(f"{digits[:place]}[{least}-{int(digit) - 1}]{_digits(len(digits) - place - 1)}")
    return "|".join([*found, digits])


def _digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _remaining(answer_format: AnswerFormat, prefill: str) -> tuple[Sequence[Section], str | None]:
    """Sections that are not closed in the prefill, and the content so far of the first of them, or None if it is not
    open.
    """
    rest = prefill
    tags = {section.tag for section in answer_format.sections}
    if prefill and "" in tags:
        raise ConfigError(f"the prefill {prefill!r} begins no answer without tags.")
    if "think" not in tags:  # an empty thought put before the answer, as templates of thinking models do
        rest = re.sub(r"\A\s*<think>.*?</think>", "", rest, flags=re.DOTALL)
    sections = answer_format.sections
    for number, section in enumerate(sections):
        rest = rest.lstrip()
        opening = f"<{section.tag}>"
        if not rest:
            return sections[number:], None
        if not rest.startswith(opening):
            raise ConfigError(
                f"the prefill {prefill!r} does not begin an answer of {_row(answer_format)}: {rest!r} is not {opening}…"
            )
        content, closing, after = rest[len(opening) :].partition(f"</{section.tag}>")
        if not closing:
            return sections[number:], content
        rest = after
    if rest.strip():
        raise ConfigError(f"the prefill {prefill!r} continues after the answer's last section.")
    return (), None


def _row(answer_format: AnswerFormat) -> str:
    return "".join(f"<{section.tag}>" for section in answer_format.sections)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
