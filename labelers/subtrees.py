"""What a router sees and may do: the part of a document's tree that is shown just now, and one action a line on its
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
        content: set[int] = set()
        for parent, id in {self.tree.nodes[id].parent: id for id in matched}.items():
            content |= self._holding(id) | self.own_content(parent)
        return self._lit(content)

    def expand(self, heading: int) -> Subtree:
        """With the heading's own content lit, as far as none of it was before, in place of what is lit now; the same
        subtree where there is no such content.
        """
        new = self.own_content(heading) - self.seen
        if not new:
            return self
        return self._lit(new.union(*map(self._holding, new)))

    def own_content(self, heading: int) -> frozenset[int]:
        """Content below a node with no heading in between; of a heading without any, that of its subheadings."""
        content: set[int] = set()
        waiting = [heading]
        while waiting:
            children = self.tree.children[waiting.pop()]
            own: set[int] = set()
            for child in children:
                own.update(self._content_in(child))
            if own:
                content |= own
            else:
                waiting += children
        return frozenset(content)

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
        collapsed = {node.id for node in self.tree.nodes if not node.is_content}
        for id in self.lit:
            collapsed.difference_update(holder.id for holder in self.tree.ancestors(id))
        return frozenset(collapsed)

    def _lit(self, content: Iterable[int]) -> Subtree:
        lit = frozenset(content)
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
    """The actions of an answer.

    Args:
        answers, expands: ids of the nodes of legal actions, each once, in the order written.
        refused: it holds `[REFUSE]` and no action that is legal.
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
    options: list[str] = []
    for node in subtree.visible:
        if node.is_content or node.id in subtree.collapsed:
            action = ANSWER if node.is_content else EXPAND
            text = one_line(node.text)
            words = list(itertools.islice(_WORD.finditer(text), OPTION_WORDS))
            prefix = one_line(text[: words[-1].end()].replace("<", " ")) if words else ""
            options.append(f"{action} {node.id}: {prefix}".rstrip())
    return tuple(options)


def read_actions(text: str, subtree: Subtree) -> Actions:
    """Read an answer line by line; blank lines count for nothing."""
    ids: dict[str, dict[int, None]] = {ANSWER: {}, EXPAND: {}}
    faults: list[str] = []
    expelled = 0
    num_refusals = 0
    for line in filter(None, map(str.strip, text.split("\n"))):
        if line == REFUSE:
            num_refusals += 1
            continue
        fault = _fault(line, subtree)
        if fault is not None:
            faults.append(f"{fault}: {line[:60]!r}")
            expelled += line.startswith((ANSWER, EXPAND, REFUSE))
        else:
            kind, _, rest = line.partition(" ")
            ids[kind][int(rest.partition(":")[0])] = None
    has_actions = any(ids.values())
    if num_refusals and has_actions:
        faults.append(f"{REFUSE} is given together with actions")
        expelled += num_refusals
        num_refusals = 0
    if not (has_actions or num_refusals or faults):
        faults.append("there is no action")
    return Actions(
        answers=tuple(ids[ANSWER]),
        expands=tuple(ids[EXPAND]),
        refused=num_refusals > 0,
        expelled=expelled,
        fault=faults[0] if faults else None,
    )


def _fault(line: str, subtree: Subtree) -> str | None:
    """Why a line is no legal action; None where it is one."""
    action = _ACTION.fullmatch(line)
    if action is None:
        return "no action"
    kind = action[1]
    id = int(action[2])
    prefix = action[3] or ""
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
