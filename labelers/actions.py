"""A router's answer: one action a line, on nodes of the subtree that it was shown.

Source: RDR2 (papers, section 3.3): `[ANSWER] id: prefix` takes a content node, `[EXPAND] id: prefix` unfolds a
collapsed heading, `[REFUSE]` stands alone. The prefix ties the id to its text; what counts as one is ours.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from relabel.labelers.subtree import Subtree, one_line

ANSWER, EXPAND, REFUSE = "[ANSWER]", "[EXPAND]", "[REFUSE]"
LEAST_WORDS = 3
"""Words of a prefix, at least; all of a text that has fewer."""
OPTION_WORDS = 5
"""Words of the prefixes that a grammar admits."""
_WORD_CHARS = 40
_WORD = re.compile(rf"[\u3040-\u30ff\u3400-\u9fff]|[^\s<\u3040-\u30ff\u3400-\u9fff]{{1,{_WORD_CHARS}}}")
"""What stands between spaces or `<`, which begins the control tokens of many models, so that no prefix wants it; each
character of Chinese and Japanese, which have no spaces; 40 characters at most.
"""
OPTION_CHARS = OPTION_WORDS * (_WORD_CHARS + 1)
"""Longest prefix that a grammar admits."""
_ACTION = re.compile(r"(\[ANSWER\]|\[EXPAND\]) (0|[1-9][0-9]{0,8}):(?:\s+(.*))?", re.DOTALL)


class Actions(NamedTuple):
    """What an answer says.

    Args:
        answers, expands: ids of the nodes of legal actions, each once, in the order written.
        refused: it says `[REFUSE]` and no action that is legal.
        expelled: lines that are meant as an action and are not legal.
        fault: why the first line that is no legal action is none, whether meant as one or not; None without such lines.
    """

    answers: tuple[int, ...]
    expands: tuple[int, ...]
    refused: bool
    expelled: int
    fault: str | None

    @property
    def is_collapsed(self) -> bool:
        """Whether no line is an action, legal or not."""
        return not (self.answers or self.expands or self.refused or self.expelled)


def options_of(subtree: Subtree) -> tuple[str, ...]:
    """The legal actions, each with a prefix of `OPTION_WORDS` words."""
    found = []
    for node in subtree.visible:
        if node.is_content or node.id in subtree.collapsed:
            text = one_line(node.text)
            words = list(itertools.islice(_WORD.finditer(text), OPTION_WORDS))
            prefix = one_line(text[: words[-1].end()].replace("<", " ")) if words else ""
            found.append(f"{ANSWER if node.is_content else EXPAND} {node.id}: {prefix}".rstrip())
    return tuple(found)


def write_actions(ids: Iterable[int], options: Sequence[str]) -> str:
    """The legal actions on these nodes as `options_of` writes them, a line each; `[REFUSE]` where there are none.

    Raises:
        KeyError: no option is about a node.
    """
    option_of = {int(option.split(" ")[1].rstrip(":")): option for option in options}
    return "\n".join(option_of[id] for id in ids) or REFUSE


def read_actions(text: str, subtree: Subtree) -> Actions:
    """Read an answer line by line; blank lines say nothing."""
    ids: dict[str, dict[int, None]] = {ANSWER: {}, EXPAND: {}}
    faults: list[str] = []
    expelled = num_refusals = 0
    for line in filter(None, map(str.strip, text.split("\n"))):
        if line == REFUSE:
            num_refusals += 1
        elif fault := _fault(line, subtree):
            faults.append(f"{fault}: {line[:60]!r}")
            expelled += line.startswith((ANSWER, EXPAND, REFUSE))
        else:
            kind, _, rest = line.partition(" ")
            ids[kind][int(rest.partition(":")[0])] = None
    has_actions = any(ids.values())
    if num_refusals and has_actions:
        faults.append(f"{REFUSE} stands beside actions")
        expelled, num_refusals = expelled + num_refusals, 0
    if not (has_actions or num_refusals or faults):
        faults.append("there is no action")
    fault = faults[0] if faults else None
    return Actions(tuple(ids[ANSWER]), tuple(ids[EXPAND]), num_refusals > 0, expelled, fault)


def _fault(line: str, subtree: Subtree) -> str | None:
    said = _ACTION.fullmatch(line)
    if said is None:
        return "no action"
    kind, id, prefix = said[1], int(said[2]), said[3] or ""
    if not subtree.is_visible(id):
        return f"node {id} is not visible"
    node = subtree.tree.nodes[id]
    if kind == ANSWER and not node.is_content:
        return f"node {id} is a heading, which answers nothing"
    if kind == EXPAND and id not in subtree.collapsed:
        return f"node {id} is no collapsed heading"
    words, wanted = _words(prefix), _words(node.text)
    if words != wanted[: len(words)] or len(words) < min(LEAST_WORDS, len(wanted)):
        return f"the text does not begin that of node {id}"
    return None


def _words(text: str) -> list[str]:
    """Case, white space and how an accented letter is written do not count."""
    return [unicodedata.normalize("NFC", word).casefold() for word in _WORD.findall(text)]
