"""Reading rules for tagged answers: the sections of an `AnswerFormat` and their values, or a typed reason why there is
no verdict; and how several labels of a pair become one."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from relabel.manifests.asks import (
    Answer,
    AnswerFormat,
    Choice,
    Decision,
    Distribution,
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
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label

# ------------------------------------------------------------------------------
# Why there is no verdict in an answer: nothing was generated, it was refused, cut off, or out of format.


_REFUSAL = re.compile(
    r"(?:i(?:['’]m| am) (?:\w+ )?sorry|(?:i )?apologi[sz]e|sorry,|my apologies|as an ai\b|unfortunately,? i "
    r"|i (?:can ?not|can['’]t|won['’]t|will not|am unable|am not able|must decline|['’]m unable|['’]m not able)"
    r"|i['’]m (?:unable|not able)|(?:this|your) request (?:can ?not|violates))",
    re.IGNORECASE,
)


def require_generated(answer: Answer) -> None:
    """Raise where nothing was generated at all.

    Raises:
        VerdictError: `overlong` if the prompt did not fit, `engine` if the engine failed at this request.
    """
    if answer.finish == "overlong":
        raise VerdictError("overlong", answer.detail or "the prompt does not fit")
    if answer.finish == "error":
        raise VerdictError("engine", answer.detail or "the engine failed at this request")


def decided(answer: Answer, decision: Decision) -> Distribution:
    """The distribution of an answer that is a decision alone.

    Raises:
        VerdictError: `engine` if the distribution is absent or has another number of labels; `overlong` or `refused`
            by the finish.
    """
    require_generated(answer)
    if answer.finish == "refused":
        raise VerdictError("refused", answer.detail or "the server refused to answer")
    distribution = answer.distributions.get(decision.name)
    if distribution is None or len(distribution.probs) != len(decision.labels):
        raise VerdictError("engine", f"the engine gave no distribution over the labels {', '.join(decision.labels)}")
    return distribution


def unreadable(answer: Answer, reason: str) -> VerdictError:
    """Why there is no verdict in an answer that is out of format: `refused`, `truncated` or `format`; with the
    engine's own detail.
    """
    if answer.finish == "refused":
        return VerdictError("refused", answer.detail or "the server refused to answer")
    if answer.detail:
        reason = f"{reason} ({answer.detail})"
    if answer.finish == "length":
        return VerdictError("truncated", f"the answer ran into its length limit: {reason}")
    if _REFUSAL.match(answer.text[:300].lstrip()):
        return VerdictError("refused", f"the model declined: {reason}")
    return VerdictError("format", reason)


# ------------------------------------------------------------------------------
# What the content of a section is: lines, numbers, lists, texts.


def lines_of(content: str) -> list[str]:
    """The lines of a section, white space at their ends taken off, without blank ones."""
    return list(filter(None, map(str.strip, content.split("\n"))))


def indices_of(content: str) -> list[int]:
    """The numbers of a section, in their order; 0 for anything else."""
    if not content:
        return []
    return [_index_in(part.strip()) for part in content.split(",")]


def _index_in(text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if is_number else 0


def index_lists_of(content: str, section: Section) -> list[list[int]]:
    """The lists of a JSON answer, in the order of its keys.

    Raises:
        ValueError: it is no such object: other keys or another order, one twice, something else than whole numbers
            within their bounds, anything around it.
    """
    assert isinstance(section, JsonIndices)
    items = _loaded(content, object_pairs_hook=list)
    if not isinstance(items, list) or not all(isinstance(item, tuple) for item in items):
        raise ValueError("it is no object")
    if tuple(key for key, _ in items) != section.keys:
        raise ValueError(f"its keys are not {', '.join(section.keys)[:80]}")
    for (key, numbers), most in zip(items, section.mosts, strict=True):
        if not isinstance(numbers, list) or not all(type(number) is int and 1 <= number <= most for number in numbers):
            raise ValueError(f"{key} is no list of numbers of 1 to {most}")
    return [numbers for _, numbers in items]


def texts_of(content: str) -> list[str]:
    """The texts of a JSON array, white space at their ends taken off, without blank ones; a number is the text that it
    was written as.

    Raises:
        ValueError: it is no array of texts and numbers alone.
    """
    texts = _loaded(content, parse_int=str, parse_float=str)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it is no array of texts")
    return list(filter(None, map(str.strip, texts)))


def _loaded(content: str, **readers: Any) -> Any:
    """
    Raises:
        ValueError: it is no JSON, or too deep, or holds NaN or Infinity.
    """
    try:
        return json.loads(content, parse_constant=_refuse, **readers)
    except RecursionError as exc:
        raise ValueError("it is nested without end") from exc


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not a number")


# ------------------------------------------------------------------------------
# Reading rules: the sections of a tagged answer, or why there is no verdict. Generic over `AnswerFormat`; knows no
# labeler.
#
# An answer is valid if and only if every tag is in it exactly once, opened and closed, in order, with nothing but
# white space outside. A choice, stripped of white space, is exactly one of its options. Nothing is searched for,
# corrected or guessed: the last digit of a text is not a verdict. Reading takes time linear in the text's length,
# whatever the text.


# opening and closing tag and a line break: `</attribute_score>` takes 5 to 7 tokens in common vocabularies
_TAG_TOKENS = 16


def token_budget(format: AnswerFormat) -> int:
    """Most tokens that an answer in this format can take: the sections' caps, and room for tags and choices."""
    most = sum(section.max_tokens for section in format.sections if not isinstance(section, Choice))
    return most + _TAG_TOKENS * len(format.sections)


class Reader:
    """Reads answers in one format.

    Args:
        format: the sections that an answer must have.
        prefill: the text that the answer was made to begin with; put before `Answer.text` when reading.
    """

    def __init__(self, format: AnswerFormat, prefill: str = "") -> None:
        self.format = format
        self._prefill = prefill
        self._is_untagged = [section.tag for section in format.sections] == [""]
        self._steps = tuple((section, opening_of(section), closing_of(section)) for section in format.sections)

    def read(self, answer: Answer) -> dict[str, str]:
        """The content of each section by tag, stripped of white space at both ends.

        Raises:
            VerdictError: `overlong` or `engine` by the answer's finish; else, if the text is not in the format:
                `truncated` if it ran into its length limit, `refused` if the server or the text refuses, `format` for
                all else. A text in the format is read whatever its finish.
        """
        require_generated(answer)
        text = self._prefill + answer.text
        if self._is_untagged:
            _check_untagged(answer, text, self.format.sections[0])
            return {"": text.strip()}
        sections: dict[str, str] = {}
        at = 0
        for section, opening, closing in self._steps:
            start = text.find(opening)
            if start < 0:
                raise unreadable(answer, f"{opening} is missing")
            if start < at:
                raise unreadable(answer, f"{opening} is before the section that should come first")
            if start > at and not text[at:start].isspace():
                raise unreadable(answer, f"text is outside the tags, before {opening}")
            start += len(opening)
            if text.find(opening, start) >= 0:
                raise unreadable(answer, f"{opening} occurs more than once")
            end = text.find(closing)
            if end < 0:
                raise unreadable(answer, f"{closing} is missing")
            if end < start:
                raise unreadable(answer, f"{closing} comes before {opening}")
            at = end + len(closing)
            if text.find(closing, at) >= 0:
                raise unreadable(answer, f"{closing} occurs more than once")
            content = text[start:end].strip()
            fault = _fault_in(section, content, sections)
            if fault is not None:
                raise unreadable(answer, f"{section.tag} {fault}")
            sections[section.tag] = content
        if at < len(text) and not text[at:].isspace():
            raise unreadable(answer, "text is after the last section")
        return sections

    def spans(self, text: str) -> dict[str, tuple[int, int]]:
        """Where the content of each section is, by tag, in a text that `read` has read: [start, end) in characters,
        white space at both ends included.
        """
        return {
            section.tag: (text.index(opening) + len(opening), text.index(closing))
            for section, opening, closing in self._steps
        }

    def turn_parts(self, text: str) -> tuple[str, ...]:
        """A text that `read` has read, cut into template text (its tags) and data (what is in them), as
        `Message.parts` wants it.

        Sent back as an earlier turn, the tags are the format's own and keep the tokens that the model wrote them with
        (`</think>` is one token for some); what is in them stays data, since a hostile document may speak through
        it.
        """
        edges = [0, *itertools.chain.from_iterable(self.spans(text).values()), len(text)]
        return tuple(text[start:end] for start, end in itertools.pairwise(edges))


def _fault_in(section: Section, content: str, before: Mapping[str, str]) -> str | None:
    """What is off with a section's content, given the sections before it; None where nothing is."""
    if isinstance(section, Choice):
        if content in section.options:
            return None
        return f"is {_shown(content)}, expected one of {', '.join(section.options)}"
    if isinstance(section, Indices):
        is_fine = all(1 <= number <= section.most for number in indices_of(content))
        return None if is_fine else f"is {_shown(content)}, expected numbers of 1 to {section.most}"
    if isinstance(section, Lines):
        count = len(lines_of(content))
        is_fine = section.least <= count <= section.most
        return None if is_fine else f"has {count} lines, expected {section.least} to {section.most}"
    if not content and not (isinstance(section, Text) and section.may_be_empty):
        return "is empty"
    if not isinstance(section, Text) or section.only_with is None:
        return None
    other, content_there = section.only_with
    is_wanted = before[other] == content_there if content_there else bool(before[other])
    fault = f"is {'empty' if is_wanted else 'not empty'} where {other} is {_shown(before[other])}"
    return None if is_wanted is bool(content) else fault


def _check_untagged(answer: Answer, text: str, section: Section) -> None:
    if isinstance(section, OptionLines):
        if answer.finish != "stop":
            raise unreadable(answer, "lines may be missing at its end")
        return
    try:
        if isinstance(section, JsonTexts):
            texts_of(text)
        else:
            index_lists_of(text, section)
    except ValueError as exc:
        raise unreadable(answer, f"not the JSON that was wanted: {exc}") from exc


def _shown(content: str) -> str:
    if len(content) <= 40:
        return repr(content)
    return repr(content[:40]) + "…"


def is_none(content: str) -> bool:
    """Whether a section is the word for nothing: `none`, in any case."""
    return len(content) == 4 and content.lower() == "none"


# ------------------------------------------------------------------------------
# S trajectories of one pair become one label: the mean of their distributions and the vote of their grades.


def merge_samples(labels: Sequence[Label]) -> Label:
    """One label from several.

    The grade is the most frequent one; among equally frequent ones that with the larger mean probability, then the
    lower. Everything else (own columns, evidence, intent, reasoning) is that of the first trajectory that voted for it,
    so that a label's parts fit together.

    Args:
        labels: at least one, each with a grade; their distributions, where present, are over the same grades.
    Source:
        R3A (methods, section 1): with S samples, the mean of the S distributions, and the vote.
    """
    given = [label.distribution for label in labels if label.distribution is not None]
    distribution = mean_distribution(given) if given else None
    votes = Counter(label.grade for label in labels if label.grade is not None)
    probs = distribution.probs if distribution else ()
    winner = min(votes, key=lambda grade: (-votes[grade], -probs[grade] if probs else 0.0, grade))
    chosen = next(label for label in labels if label.grade == winner)
    return Label(
        grade=winner,
        distribution=distribution,
        columns=chosen.columns,
        evidence=chosen.evidence,
        intent=chosen.intent,
        reasoning=chosen.reasoning,
        flags=list(chosen.flags),
    )


def mean_distribution(distributions: Sequence[Distribution]) -> Distribution:
    """Component-wise mean of probabilities and of outside mass, of one distribution or more."""
    count = len(distributions)
    probs = tuple(sum(column) / count for column in zip(*(judge.probs for judge in distributions), strict=True))
    return Distribution(probs, sum(judge.outside_mass for judge in distributions) / count)
