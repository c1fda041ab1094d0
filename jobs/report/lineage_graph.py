"""What came of what, as a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class LineageNode:
    """One thing of the chain. `is_given`: it was opened for this page; else a manifest names it."""

    key: str
    kind: str
    title: str
    line: str
    is_given: bool


class Edge(NamedTuple):
    """One thing was made of another; `is_same` says whether what is given here is what the manifest names, None where
    nobody can tell.
    """

    source: str
    target: str
    is_same: bool | None


@dataclass
class Graph:
    """All nodes by key, and the edges between them."""

    nodes: dict[str, LineageNode] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)

    def add(self, key: str, kind: str, title: str, line: str = "", *, is_given: bool = False) -> str:
        """A node; one that is given takes the place of one that is only named."""
        if is_given or key not in self.nodes:
            self.nodes[key] = LineageNode(key, kind, title, line, is_given)
        return key

    def join(self, source: str, target: str, is_same: bool | None = None) -> None:
        """Draw an arrow from one node to another, once; `is_same` says whether what is there is still what was used."""
        edge = Edge(source, target, is_same)
        if edge not in self.edges:
            self.edges.append(edge)

    @property
    def changed(self) -> list[Edge]:
        """Edges whose source is not any more what the target was made of."""
        return [edge for edge in self.edges if edge.is_same is False]
