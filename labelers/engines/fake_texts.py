"""What a made-up answer says: well-formed text in any `AnswerFormat`, true fragments of the document, and garbage of a
dozen kinds.
"""

from __future__ import annotations

import json

from relabel.manifests.formats import (
    AnswerFormat,
    Choice,
    Fragment,
    Indices,
    JsonIndices,
    JsonTexts,
    Lines,
    OptionLines,
    Text,
    closing_of,
    opening_of,
)

CHARS_PER_TOKEN = 4
"""A token of the fake engine."""
REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "I’m sorry, I won't judge this text.",
)
_THOUGHTS = (
    "The subject is close to what was asked.",
    "It stays with generalities for most of its length.",
    "One passage speaks to the question itself.",
    "The rest is beside the point.",
    "A reader would still have to look elsewhere.",
    "The wording differs but the matter is the same.",
    "There is little to hold against the query.",
    "It names the thing but not what is asked of it.",
)
_WAYS = ("how to", "what is", "best", "reasons for", "guide to", "examples of", "against", "history of")


class AnswerPlan:
    """What there is to know of a format before the first ask in it."""

    __slots__ = ("format", "has_short_texts", "places", "steps")

    def __init__(self, format: AnswerFormat) -> None:
        self.format = format  # kept alive: plans are found by the format's id
        self.steps = tuple((section, opening_of(section), f"{closing_of(section)}\n") for section in format.sections)
        self.places = {section.tag: place for place, section in enumerate(format.sections)}
        short = [s for s in format.sections if isinstance(s, Text) and s.tag != "think"]
        self.has_short_texts = len(short) > 1  # where several things are described, some are `none`


def made_thought(hits: int, num_words: int, bits: int) -> str:
    """How many of the query's words were found, and two remarks that say nothing."""
    return f"{hits} of {num_words} words of the query stand here. {_THOUGHTS[bits & 7]} {_THOUGHTS[bits >> 3 & 7]}"


def made_contents(plan: AnswerPlan, choices: list[int], query: str, thought: str, source: str, bits: int) -> list[str]:
    """What stands between the tags, section by section."""
    contents: list[str] = []
    at = 0
    for section, _, _ in plan.steps:
        if isinstance(section, Choice):
            content = section.options[choices[at]]
            at += 1
        elif isinstance(section, Fragment):
            # One in 32 goes against the grade, so that the labelers' flags have something to say.
            is_quoting = (not choices or choices[-1] > 0) != (bits & 31 == 0)
            content = _fragment(source, bits, section.max_tokens * CHARS_PER_TOKEN) if is_quoting else "none"
        elif section.tag == "think":
            content = thought[: section.max_tokens * CHARS_PER_TOKEN]
        elif isinstance(section, JsonIndices):
            content = _json_indices(section, bits)
        elif isinstance(section, JsonTexts):
            content = _json_texts(section, query, bits)
        elif isinstance(section, OptionLines):
            content = _option_lines(section, bits)
        elif isinstance(section, Indices):
            content = _indices(section, bits)
        elif isinstance(section, Lines):
            content = _lines(section, query, bits)
        elif section.only_with is not None:
            said = contents[plan.places[section.only_with[0]]]
            is_wanted = said == section.only_with[1] if section.only_with[1] else bool(said)
            content = _lines(Lines(section.tag, 1, 1, section.max_tokens), query, bits) if is_wanted else ""
        else:
            content = _short_text(section, query, bits, is_none=plan.has_short_texts and bits >> 6 & 7 == 0)
        bits = bits >> 9 | (bits & 0x1FF) << 55
        contents.append(content)
    return contents


def _fragment(source: str, bits: int, most_chars: int) -> str:
    """A piece of the source from word edge to word edge, or `none` where there is none without markup."""
    if not source:
        return "none"
    start = source.rfind(" ", 0, bits % len(source)) + 1
    wanted = min(most_chars, 24 + (bits >> 32) % 96)
    end = source.rfind(" ", start, start + wanted + 1) if start + wanted < len(source) else len(source)
    if end <= start:
        end = start + wanted
    # Up to the first `<`: a document's own tags must not end the section.
    piece = source[start:end].partition("<")[0].strip()
    return "none" if not piece or piece.lower() == "none" else piece


def _short_text(section: Text, query: str, bits: int, *, is_none: bool) -> str:
    if is_none:
        return "none"
    words = query.replace("<", " ").split()
    text = " ".join(words[bits % 3 if len(words) > 3 else 0 :])[: section.max_tokens * CHARS_PER_TOKEN].strip()
    return text or ("" if section.may_be_empty else "unclear")


def _json_indices(section: JsonIndices, bits: int) -> str:
    """For each key up to three numbers, none twice."""
    held = {}
    for key, most in zip(section.keys, section.mosts, strict=True):
        bits = (bits * 0x9E3779B97F4A7C15 + 1) & 0xFFFF_FFFF_FFFF_FFFF
        chosen = dict.fromkeys((bits >> shift) % most + 1 for shift in (20, 33, 47)) if most else ()
        held[key] = list(chosen)[: (bits >> 60) % 4]
    return json.dumps(held)


def _json_texts(section: JsonTexts, query: str, bits: int) -> str:
    """Up to two words of what is asked; now and then nothing."""
    words = query.split() or ["unclear"]
    chosen = dict.fromkeys(words[(bits >> shift) % len(words)] for shift in (3, 17))
    texts = [word[: section.max_text_tokens * CHARS_PER_TOKEN] for word in chosen]
    return json.dumps(texts[: min(bits % 4, section.most)], ensure_ascii=False)


def _indices(section: Indices, bits: int) -> str:
    """Up to three numbers, none twice."""
    chosen = dict.fromkeys((bits >> shift) % section.most + 1 for shift in (3, 17, 31)) if section.most else ()
    return ", ".join(map(str, list(chosen)[: bits % 4]))


def _option_lines(section: OptionLines, bits: int) -> str:
    """Up to three options, none twice; now and then what stands alone."""
    if not section.options or bits & 3 == 0:
        return section.alone
    chosen = dict.fromkeys((bits >> shift) % len(section.options) for shift in (3, 17, 31))
    return "\n".join(section.options[place] for place in list(chosen)[: 1 + (bits >> 48) % 3])


def _lines(section: Lines, query: str, bits: int) -> str:
    """What is asked, said in several ways."""
    words = " ".join(query.replace("<", " ").split()) or "this"
    count = section.least + bits % (section.most - section.least + 1)
    ways = (f"{_WAYS[(bits + place) % len(_WAYS)]}{' more' * (place // len(_WAYS))}" for place in range(count))
    return "\n".join(f"{way} {words}"[: section.max_line_tokens * CHARS_PER_TOKEN].strip() for way in ways)
