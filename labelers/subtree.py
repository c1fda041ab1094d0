"""The part of a document's tree that a router sees: all headings, and the content that is lit just now.

Source: RDR2 (papers, section 3.2 and appendix A.1): first a retrieved passage with its neighbours; then, heading by
heading, content that was not lit before in its place. The subtree keeps its size, and ids stay those of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

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
        """With these content nodes lit, and nothing else but what stands beside, above and below them: their content
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

    @cached_property
    def visible(self) -> tuple[Node, ...]:
        """All headings and what is lit, in document order."""
        return tuple(node for node in self.tree.nodes if self.is_visible(node.id))

    def is_visible(self, id: int) -> bool:
        """Whether there is such a node, and it is a heading or lit."""
        return 0 <= id < len(self.tree.nodes) and (not self.tree.nodes[id].is_content or id in self.lit)

    @cached_property
    def collapsed(self) -> frozenset[int]:
        """Headings below which nothing is lit; that there is something to light is not shown, so it does not count."""
        above = {holder.id for id in self.lit for holder in self.tree.ancestors(id)}
        return frozenset(node.id for node in self.tree.nodes if not node.is_content) - above

    def render(self) -> str:
        """A line for each visible node, `id: text`, a tab before it for each level."""
        return "\n".join("\t" * node.level + f"{node.id}: {one_line(node.text)}" for node in self.visible)

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
