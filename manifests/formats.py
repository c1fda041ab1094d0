"""The shape of an answer, as data: a row of tagged sections that a grammar enforces, the fake engine imitates and a
reader checks.

An answer in this shape is `<tag>content</tag>` for each section, in order, once each, with nothing but white space
between them. One `AnswerFormat` a stage; it is static, so that engines can compile it once. A `Fragment` quotes
a document that differs from ask to ask: that text travels in `Ask.fragment_source`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Free text, at most `max_tokens` tokens long. Its closing tag is the first one that follows.

    `only_with` names a section before it and what that says, `""` for anything at all: the text is there if and
    only if it says that. A reader holds it to this, no grammar does.
    """

    tag: str
    max_tokens: int
    may_be_empty: bool = True
    only_with: tuple[str, str] | None = field(default=None, repr=False)  # keys of kept answers hold a format's repr


@dataclass(frozen=True, slots=True)
class Fragment:
    """`none`, or text found verbatim in `Ask.fragment_source`.

    `is_constrained` asks the engine to admit nothing else while decoding; the reader checks in any case.
    """

    tag: str
    max_tokens: int
    is_constrained: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Exactly one of `options`, as it is."""

    tag: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """One thing a line, `least` to `most` lines, none empty, each at most `max_line_tokens` tokens long."""

    tag: str
    least: int
    most: int
    max_line_tokens: int

    @property
    def max_tokens(self) -> int:
        """Most tokens that they take, line breaks included."""
        return self.most * (self.max_line_tokens + 1)


@dataclass(frozen=True, slots=True)
class Indices:
    """Whole numbers from 1 to `most`, separated by commas; or nothing. While decoding, `MOST_INDICES` at most."""

    tag: str
    most: int

    @property
    def max_tokens(self) -> int:
        """Most tokens that they take, commas included."""
        return min(self.most, MOST_INDICES) * (len(str(self.most)) + 2)


MOST_INDICES = 64
"""So that a list ends: no answer names more."""


@dataclass(frozen=True, slots=True)
class JsonIndices:
    """A JSON object with these keys in this order, each with a list of whole numbers from 1 to its bound; nothing but
    the empty list where that is 0. The whole answer, without a tag. While decoding, a list ends one beyond its bound.
    """

    keys: tuple[str, ...]
    mosts: tuple[int, ...]
    tag: str = field(default="", init=False)

    @property
    def max_tokens(self) -> int:
        """Most tokens that the object takes, each digit taken for a token."""
        each = zip(self.keys, self.mosts, strict=True)
        return sum(8 + len(key) + (most + 1) * (len(str(most)) + 2) for key, most in each)


@dataclass(frozen=True, slots=True)
class JsonTexts:
    """A JSON array of short texts, at most `most` of them, perhaps none. The whole answer, without a tag. While
    decoding, each has `max_text_tokens` tokens at most, and no `"` or backslash.
    """

    most: int
    max_text_tokens: int
    tag: str = field(default="", init=False)

    @property
    def max_tokens(self) -> int:
        """Most tokens that the array takes."""
        return 4 + self.most * (self.max_text_tokens + 4)


@dataclass(frozen=True, slots=True)
class OptionLines:
    """`alone`, or one of `options` a line. The whole answer, without a tag. While decoding, `MOST_OPTION_LINES` at
    most; a reader leaves the lines to its labeler.
    """

    options: tuple[str, ...]
    alone: str
    tag: str = field(default="", init=False)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest lines, two bytes of UTF-8 taken for one."""
        longest = sorted((len(one.encode()) for one in (*self.options, self.alone)), reverse=True)[:MOST_OPTION_LINES]
        return sum(size // 2 + 4 for size in longest)


MOST_OPTION_LINES = 16
"""So that an answer ends."""

Section = Text | Fragment | Choice | Lines | Indices | JsonIndices | JsonTexts | OptionLines


def opening_of(section: Section) -> str:
    """The tag that a section begins with; nothing where it has none."""
    return f"<{section.tag}>" if section.tag else ""


def closing_of(section: Section) -> str:
    """The tag that a section ends with."""
    return f"</{section.tag}>" if section.tag else ""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The sections of one answer, in order. Tags are unique and hold only a-z, `_` and `-`; a section without one
    is alone.
    """

    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        tags = [section.tag for section in self.sections]
        if tags == [""]:
            return
        if len(set(tags)) != len(tags):
            raise ValueError(f"an answer format names a tag twice: {tags}")
        for tag in tags:
            if not re.fullmatch("[a-z_-]*[a-z][a-z_-]*", tag):
                raise ValueError(f"tag {tag!r} holds something other than a-z, _ and -")
