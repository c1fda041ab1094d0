"""What a router sees and may say: the part of a document's tree that is shown just now, and one action a line on its
nodes.

The part that a router sees is all headings, and the content that is lit: first a retrieved passage with its neighbours;
then, heading by heading, content that was not lit before in its place. The subtree keeps its size, and ids stay those
of the tree. `[ANSWER] id: prefix` takes a content node, `[EXPAND] id: prefix` unfolds a collapsed heading, `[REFUSE]`
is alone. The prefix ties the id to its text; what counts as one is ours: three words at least, or all of a text that
has fewer.

Source: RDR2 (papers, sections 3.2 and 3.3, appendix A.1).
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from relabel.manifests.trees import Node, Tree


@dataclass(frozen=True)
class Subtree:
    """A value: `light` and `expand` give another.

    Args:
        lit: ids of the content that is visible now.
        seen: ids of all content that is or was.
    """

    tree: Tree = field(repr=False)
    lit: frozenset[int] = frozenset()
    seen: frozenset[int] = frozenset()

    def light(self, matched: Iterable[int]) -> Subtree:
        """With these content nodes lit, and nothing else but their siblings, ancestors and descendants: their content
        siblings, all content that those hold, and content that holds them.
        """
        found: set[int] = set()
        for parent, id in {self.tree.nodes[id].parent: id for id in matched}.items():
            found |= self._holding(id) | self.own_content(parent)
        return self._lit(found)

    def expand(self, heading: int) -> Subtree:
        """With the heading's own content lit, as far as none of it was before, in place of what is lit now; the same
        subtree where there is no such content.
        """
        new = self.own_content(heading) - self.seen
        above = {holder for id in new for holder in self._holding(id)}
        return self._lit(new | above) if new else self

    def own_content(self, heading: int) -> frozenset[int]:
        """Content below a node with no heading in between; of a heading without any, that of its subheadings."""
        found: set[int] = set()
        waiting = [heading]
        while waiting:
            children = self.tree.children[waiting.pop()]
            own = {id for child in children for id in self._content_in(child)}
            found |= own
            waiting += () if own else children
        return frozenset(found)

    @functools.cached_property
    def visible(self) -> tuple[Node, ...]:
        """All headings and what is lit, in document order."""
        return tuple(node for node in self.tree.nodes if self.is_visible(node.id))

    def is_visible(self, id: int) -> bool:
        """Whether there is such a node, and it is a heading or lit."""
        return 0 <= id < len(self.tree.nodes) and (not self.tree.nodes[id].is_content or id in self.lit)

    @functools.cached_property
    def collapsed(self) -> frozenset[int]:
        """Headings below which nothing is lit; that there is something to light is not shown, so it does not count."""
        above = {holder.id for id in self.lit for holder in self.tree.ancestors(id)}
        return frozenset(node.id for node in self.tree.nodes if not node.is_content) - above

    def _lit(self, found: Iterable[int]) -> Subtree:
        lit = frozenset(found)
        return Subtree(self.tree, lit, self.seen | lit)

    def _holding(self, id: int) -> set[int]:
        return {node.id for node in self.tree.ancestors(id) if node.is_content}

    def _content_in(self, id: int) -> Iterator[int]:
        """The node and all below it; nothing of a heading."""
        waiting = [id]
        while waiting:
            id = waiting.pop()
            if self.tree.nodes[id].is_content:
                yield id
                waiting += self.tree.children[id]


def one_line(text: str) -> str:
    """A text whose line breaks and other white space are single spaces."""
    return " ".join(text.split())


ANSWER = "[ANSWER]"
EXPAND = "[EXPAND]"
REFUSE = "[REFUSE]"
OPTION_WORDS = 5
"""Words of the prefixes that a grammar admits."""
_WORD_CHARS = 40
_WORD = re.compile(rf"[\u3040-\u30ff\u3400-\u9fff]|[^\s<\u3040-\u30ff\u3400-\u9fff]{{1,{_WORD_CHARS}}}")
"""What is between spaces or `<`, which begins the control tokens of many models, so that no prefix wants it; each
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
        faults.append(f"{REFUSE} is given together with actions")
        expelled = expelled + num_refusals
        num_refusals = 0
    if not (has_actions or num_refusals or faults):
        faults.append("there is no action")
    return Actions(
        tuple(ids[ANSWER]),
        tuple(ids[EXPAND]),
        num_refusals > 0,
        expelled,
        next(iter(faults), None),
    )


def _fault(line: str, subtree: Subtree) -> str | None:
    said = _ACTION.fullmatch(line)
    if said is None:
        return "no action"
    kind = said[1]
    id = int(said[2])
    prefix = said[3] or ""
    if not subtree.is_visible(id):
        return f"node {id} is not visible"
    node = subtree.tree.nodes[id]
    if kind == ANSWER and not node.is_content:
        return f"node {id} is a heading, which answers nothing"
    if kind == EXPAND and id not in subtree.collapsed:
        return f"node {id} is no collapsed heading"
    words = _words(prefix)
    wanted = _words(node.text)
    is_prefix = words == wanted[: len(words)] and len(words) >= min(3, len(wanted))
    return None if is_prefix else f"the text does not begin that of node {id}"


def _words(text: str) -> list[str]:
    """Case, white space and how an accented letter is written do not count."""
    return [unicodedata.normalize("NFC", word).casefold() for word in _WORD.findall(text)]
