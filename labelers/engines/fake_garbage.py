"""Answers of the fake engine that are out of format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from relabel.labelers.engines.fake_texts import AnswerPlan
from relabel.manifests.formats import (
    Choice,
    JsonIndices,
    JsonTexts,
    OptionLines,
    Section,
)

_OFF_SCALE = ("1.", "2/2", "-1", "11", "two", "0 or 1", "²", "")


def made_garbage(plan: AnswerPlan, contents: list[str], text: str, bits: int) -> str:
    """An answer that no reader may take for a verdict."""
    if isinstance(plan.format.sections[0], JsonIndices):
        return _JSON_GARBAGE[(bits >> 8) % len(_JSON_GARBAGE)](text)
    if isinstance(plan.format.sections[0], JsonTexts):
        return _TEXTS_GARBAGE[(bits >> 8) % len(_TEXTS_GARBAGE)](text)
    if isinstance(plan.format.sections[0], OptionLines):
        return _LINES_GARBAGE[(bits >> 8) % len(_LINES_GARBAGE)](text)
    return _GARBAGE[(bits >> 8) % len(_GARBAGE)](plan.format.sections, contents, text, bits >> 16)


def _tagged(sections: Sequence[Section], contents: Sequence[str]) -> str:
    return "\n".join(f"<{s.tag}>{c}</{s.tag}>" for s, c in zip(sections, contents, strict=True))


def _swapped(sections: Sequence[Section], contents: list[str], text: str, _bits: int) -> str:
    return _tagged(sections[::-1], contents[::-1]) if len(sections) > 1 else f"{text}{text}"


def _off_scale(sections: Sequence[Section], contents: list[str], text: str, bits: int) -> str:
    choices = [i for i, section in enumerate(sections) if isinstance(section, Choice)]
    if not choices:
        return text.replace(">", "", 1)
    changed = list(contents)
    changed[choices[bits % len(choices)]] = _OFF_SCALE[(bits >> 8) % len(_OFF_SCALE)]
    return _tagged(sections, changed)


def _json(sections: Sequence[Section], _contents: list[str], _text: str, _bits: int) -> str:
    return "{" + ", ".join(f'"{s.tag}": "{i}"' for i, s in enumerate(sections)) + "}"


_JSON_GARBAGE: tuple[Callable[[str], str], ...] = (
    lambda _text: "",
    lambda text: text[:-1],
    lambda text: f"{text}\n{text}",
    lambda text: f"Here you are: {text}",
    lambda text: f"```json\n{text}\n```",
    lambda text: text.replace("]", "", 1),
    lambda text: text.replace("[", "[0, ", 1).replace(", ]", "]"),
    lambda text: text.replace("[", '["one", ', 1).replace(", ]", "]"),
    lambda text: text.replace("Document_", "Doc_", 1),
    lambda text: text.replace("{", '{"Document_0": [], ', 1),
    lambda _text: "[]",
)
_TEXTS_GARBAGE: tuple[Callable[[str], str], ...] = (
    lambda _text: "",
    lambda text: text[:-1],
    lambda text: f"Here you are: {text}",
    lambda text: f"```json\n{text}\n```",
    lambda text: json.dumps({"answer": text}),
    lambda text: f"[{text}]",
)
_LINES_GARBAGE: tuple[Callable[[str], str], ...] = (
    lambda _text: "",
    lambda _text: " \n\t\u00a0 \n",
    lambda text: f"Here you are:\n{text}",
    lambda text: f"{text}\nHope this helps!",
    lambda text: f"```\n{text}\n```",
    lambda text: f"- {text}",
    lambda text: text.replace("]", "", 1),
    lambda text: f"{text}\n[ANSWER] 999999999: nothing of this document",
    lambda text: f"{text}\n[EXPAND]",
    lambda text: text.lower(),
    lambda text: json.dumps({"answer": text}),
)
_GARBAGE: tuple[Callable[[Sequence[Section], list[str], str, int], str], ...] = (
    lambda _sections, _contents, _text, _bits: "",
    lambda _sections, _contents, _text, _bits: " \n\t\u00a0 \n",
    lambda _sections, contents, _text, _bits: "\n".join(contents),  # no tags
    lambda _sections, _contents, text, _bits: f"{text}\n{text}",  # everything twice
    lambda _sections, _contents, text, _bits: f"{text}\nHope this helps!",
    lambda sections, _contents, text, _bits: f"<{sections[-1].tag}>{text}",  # the last tag echoed in front
    lambda sections, _contents, _text, _bits: "".join(f"<{s.tag}>" for s in sections),  # opened, never closed
    lambda _sections, _contents, text, _bits: text[:-1],
    lambda _sections, _contents, _text, bits: f"final score: {bits % 3}\nscore: {(bits >> 4) % 4}",
    _swapped,
    _off_scale,
    _json,
)
