"""Reading a grade from free text: answers that other tools' prompts got, with no tags of ours. Strict, and a refusal is
a result.

What counts as a verdict, and nothing else does:

- the whole answer is a number (`2`, `##2`, `**2**`), or its first or last line is one and is a paragraph of its
  own;
- a line that names a verdict and gives it: `##final score: 2`, `O: 2`, `Answer: 1`, `Score: 0 (irrelevant)`, also
  several of a kind in one line of parts (`M: 2, T: 1, O: 2`; M and T are UMBRELA's partial scores and no verdict);
- a JSON object, or one in a code fence, with such a name as a key: `{"O": 2}`;
- a tag: `<score>2</score>`, `<answer>2</answer>`;
- a sentence that says so: `the final score is 2.`, `I would rate this passage as a 0, since …`.

All verdicts of an answer must be the same grade on the scale. The last digit of a text is no verdict, nor is a number
with a denominator, a range, a percentage or a fraction, nor a number that may be the marker of a list item. Reasoning
is passed over only where the answer begins with it, in `<think>`: nothing that a document put into the answer may hide
a verdict before it.

Takes time linear in the text's length, whatever the text. For our own prompts there is `labelers.verdicts`, which is
stricter still.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Why = Literal[
    "read",
    "empty",
    "no verdict",
    "verdicts differ",
    "several items judged",
    "off the scale",
    "no single number",
    "reasoning never ends",
    "think tags out of place",
]


class ForeignReading(NamedTuple):
    """What an answer says: `grade` where `why` is `read`, else None and why it was refused."""

    grade: int | None
    why: Why
    verdicts: tuple[str, ...] = ()
    """The verdicts that were found, as they are in the text, in the order found; at most a few are kept."""


_NAMES = (
    r"final[ _]?score(?:[ _]?\(?O\)?)?|overall[ _]?score|overall|O|relevance[ "
    r"_](?:score|grade|label|rating|category|level)|relevance"
    r"|final[ _](?:answer|grade|label|rating|verdict)|score|grade|rating|label|category|verdict|answer"
)
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
# What may follow a verdict's number: the end, or a word in brackets. `2/3`, `2-3`, `2.5`, `2 or 3`, `20 %` have to be
# distinguished from it.
_MORE = r"[ \t]{0,3}(?:[-–—/,.:%°~]|or|to|and|out of)[ \t]{0,3}[0-9]|[ \t]{0,3}%|/"

_BARE = re.compile(rf"[#*_`\"' \t]{{0,8}}({_NUMBER})[*_`\"' \t]{{0,8}}")
_NAMED = re.compile(
    r"(?:(?:therefore|thus|so|hence|overall)?,?[ ]?(?:my|the|a)[ ](?:final[ ])?)?"
    rf"(?:{_NAMES})[*_`\"]{{0,4}}[ \t]{{0,3}}(?:is[ ]?:?|[:=])[ \t]{{0,3}}(?P<value>.{{0,160}})",
    re.IGNORECASE,
)
_PART = re.compile(rf"(?P<name>[A-Za-z][A-Za-z _]{{0,30}})[ \t]{{0,3}}[:=][ \t]{{0,3}}(?P<value>{_NUMBER})")
_PARTS = re.compile(
    rf"{_PART.pattern.replace('?P<name>', '').replace('?P<value>', '')}(?:[,;][ \t]{{0,3}}(?:and[ "
    rf"])?{_PART.pattern})+\.?"
)
_IS_NAME = re.compile(_NAMES, re.IGNORECASE)
_VALUE = re.compile(rf"[*_`\"\[({{ \t]{{0,6}}(?P<number>{_NUMBER})(?P<rest>.*)")
_SIGNED = re.compile(r"[-−+±][ ]?[0-9]")
_REST = re.compile(r"[*_`\"'\])}. \t]{0,8}(?:[(–—,;:-][^0-9]{0,150})?")
_LEAD = "#*->•_`\"' \t"
_TAG = re.compile(r"<(score|answer|final_score|grade|label)>([^<>]{0,40})</\1>", re.IGNORECASE)
_SAYS = (
    r"(?:\bI(?:['’]d| would| will|['’]ll)?[ "
    r"](?:rate|score|grade|label|rank|categori[sz]e|give|assign|conclude)\b[^0-9\n.]{0,160}?"
    r"[ ](?:as|of|a|an|category|grade|rating)"
    r"|\b(?:final[ ]|overall[ ]|relevance[ ])?score[ ]is):?[ ]{1,3}[*_`\"(]{0,3}"
)
# After the number the sentence goes on as one about a whole verdict does: `a 0, since`, `as 2 (relevant)`, not `a 2
# page text`.
_GOES_ON = r"[*_`\"')]{0,3}(?:[.,;:(]|\s*$|[ ]{1,3}(?:[(–—-]|(?:as|because|since|due|for|based|given)\b))"
_SENTENCE = re.compile(rf"{_SAYS}(?P<number>{_NUMBER})(?![0-9]|{_MORE})(?={_GOES_ON})", re.IGNORECASE)
# The same words before something that is no single number, so that `I would rate it a 2 or 3` is not taken for none.
_SENTENCE_NOT_ONE = re.compile(rf"{_SAYS}{_NUMBER}(?:{_MORE})", re.IGNORECASE)
_HYPOTHETICAL = re.compile(r"\b(?:if|unless|otherwise|had|were|might|could|not think)\b|n['’]t think", re.IGNORECASE)
_LOOK_BACK = 200
_ECHO = re.compile(r"[#*_>\- \t]{0,8}(?:query|passage|document)\b[*_ ]{0,3}:", re.IGNORECASE)
_LIST_MARK = re.compile(r"[0-9]{1,2}[.)][ \t]{1,4}")
_LIST_ITEM = re.compile(r"[#*_>\- \t]{0,8}[0-9]{1,3}[.):][*_]{0,3}[ \t]")
_FENCE = re.compile(r"```(?:json)?[ \t]{0,3}\n(.*)\n```", re.DOTALL | re.IGNORECASE)

_NOT_ONE = "?"
_ITEM = "item"
_LONGEST_LINE = 400  # a verdict's line is short; a document's echo, all in one line, is not
_VERDICTS_KEPT = 8


def read_foreign_answer(text: str, *, grades: int) -> ForeignReading:
    """The grade that a free-text answer states, or why none can be read.

    Args:
        text: the whole answer.
        grades: K; a verdict has to be one of 0..K-1.
    """
    text = text.strip()
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened == closed == 1 and text.startswith("<think>"):
        text = text.partition("</think>")[2].strip()
    elif opened or closed > 1:  # a tag that a document put there must not hide a verdict before it
        return ForeignReading(None, "reasoning never ends" if opened > closed else "think tags out of place")
    if not text:
        return ForeignReading(None, "empty")
    found = list(_verdicts(text))
    shown = tuple(found[:_VERDICTS_KEPT])
    if not found:
        return ForeignReading(None, "no verdict")
    if _ITEM in found:
        return ForeignReading(None, "several items judged", shown)
    if _NOT_ONE in found:
        return ForeignReading(None, "no single number", shown)
    numbers = {int(one) for one in found}
    if len(numbers) > 1:
        return ForeignReading(None, "verdicts differ", shown)
    (grade,) = numbers
    if grade >= grades:
        return ForeignReading(None, "off the scale", shown)
    return ForeignReading(grade, "read", shown)


def _verdicts(text: str) -> Iterator[str]:
    """Every verdict in the text: its digits; `_NOT_ONE` where a verdict is named but its value is no single number;
    `_ITEM` where the items of a numbered list have one each, so that none is the answer's.
    """
    whole = _BARE.fullmatch(text)
    if whole:
        yield whole[1]
        return
    if text[0] in "{`":
        held = _json_object(text)
        if held is not None:
            yield from _json_verdicts(held)
            return
    for tag in _TAG.finditer(text):
        number = _BARE.fullmatch(tag[2].strip())
        yield number[1] if number else _NOT_ONE
    lines = text.split("\n")
    yield from _lone_numbers(lines)
    items_judged = 0
    for line in lines:
        if _ECHO.match(line):
            continue  # what the prompt said, said again
        if len(line) <= _LONGEST_LINE:
            shown = line.strip().lstrip(_LEAD)
            mark = _LIST_MARK.match(shown)
            in_line = list(_line_verdicts(shown[mark.end() :].lstrip(_LEAD) if mark else shown))
            yield from in_line
            items_judged += bool(mark and in_line)
            if items_judged == 2:
                yield _ITEM
        for sentence in _SENTENCE.finditer(line):
            before = re.split(r"[.!?]", line[max(0, sentence.start() - _LOOK_BACK) : sentence.start()])[-1]
            if not _HYPOTHETICAL.search(before):
                yield sentence["number"]
        for _ in _SENTENCE_NOT_ONE.finditer(line):
            yield _NOT_ONE


def _line_verdicts(line: str) -> Iterator[str]:
    if _PARTS.fullmatch(line):
        for part in _PART.finditer(line):
            if _IS_NAME.fullmatch(part["name"].strip()):
                yield part["value"]
        return
    named = _NAMED.fullmatch(line)
    if named:
        value = _VALUE.fullmatch(named["value"])
        if value:
            yield value["number"] if _REST.fullmatch(value["rest"]) else _NOT_ONE
        elif _SIGNED.match(named["value"]):
            yield _NOT_ONE


def _lone_numbers(lines: list[str]) -> Iterator[str]:
    """The numbers that have a line of their own, if one is the first or last paragraph. With a list it may be a
    cut-off marker.
    """
    ends = [lines[0]] if len(lines) > 1 and not lines[1].strip() else []
    if len(lines) > 1 and not lines[-2].strip():
        ends.append(lines[-1])
    if not any(_BARE.fullmatch(line.strip()) for line in ends) or any(map(_LIST_ITEM.match, lines)):
        return
    for line in lines:  # the others too: in a heap of numbers, the last one is no verdict
        number = _BARE.fullmatch(line.strip())
        if number:
            yield number[1]


class _Twice(list[Any]):
    """A JSON object as its pairs, so that a key that occurs twice is seen."""


def _json_object(text: str) -> _Twice | None:
    fenced = _FENCE.fullmatch(text)
    try:
        held = json.loads(fenced[1] if fenced else text, object_pairs_hook=_Twice)
    except (ValueError, RecursionError):
        return None
    return held if isinstance(held, _Twice) else None


def _json_verdicts(pairs: _Twice) -> Iterator[str]:
    for key, value in pairs:
        if not _IS_NAME.fullmatch(key):
            continue
        if isinstance(value, str) and _BARE.fullmatch(value.strip()):
            yield _BARE.fullmatch(value.strip())[1]  # type: ignore[index]
        else:
            yield str(value) if type(value) is int and 0 <= value < 10**9 else _NOT_ONE
