"""The section on lineage: the chain from data to bundle as a drawing and link by link, and which links are broken."""

from __future__ import annotations

from xml.etree import ElementTree

from markupsafe import Markup

from relabel.jobs.report.blocks import Badge, Block, Cell, Drawing, Paragraph, Section, Table
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.lineage_graph import Graph, LineageNode
from relabel.manifests.secrets.redaction import shortened

BOX = (196, 62)
GAP = (22, 46)
_SAID = {True: "the same, by digest", False: "changed since", None: "named"}
_TONES = {True: "good", False: "bad", None: "plain"}


def lineage_section(graph: Graph) -> Section:
    """What was made of what, as manifests and files prove it; nothing where there is one thing alone."""
    if not graph.edges:
        return Section("lineage", "Lineage", [])
    rows = [(_named(graph, edge.source), _named(graph, edge.target), edge.is_same) for edge in graph.edges]
    alt = "; ".join(f"{source} to {target}" for source, target, _ in rows)
    is_whole = all(node.is_given for node in graph.nodes.values())
    note = "" if is_whole else "Dashed boxes are named by a manifest and were not given here."
    save = csv_download("lineage", ("from", "to", "known"), [(a, b, _SAID[is_same]) for a, b, is_same in rows])
    cells: list[list[Cell]] = [[a, b, Badge(_SAID[is_same], _TONES[is_same])] for a, b, is_same in rows]
    blocks: list[Block] = [Paragraph(sentence, "warn") for sentence in changes(graph)]
    blocks.append(Drawing("From data to here", _draw(graph), alt, save, note, is_wide=True))
    blocks.append(Table(("from", "to", "known"), cells, "Each link, and how it is known"))
    return Section("lineage", "Lineage", blocks)


def changes(graph: Graph) -> list[str]:
    """What is not any more what something was made of, a sentence each."""
    found = []
    for edge in graph.changed:
        what = "files have" if graph.nodes[edge.source].kind == "teacher" else "manifest has"
        found.append(
            f"{_named(graph, edge.source)} is not what {_named(graph, edge.target)} was made of: its {what} changed "
            "since."
        )
    given = {(node.kind, node.title) for node in graph.nodes.values() if node.is_given}
    for edge in graph.edges:
        node = graph.nodes[edge.source]
        if not node.is_given and (node.kind, node.title) in given:
            found.append(
                f"{_named(graph, edge.target)} was made of another {node.kind} {node.title} than the one that is given "
                "here: their digests differ."
            )
    return found


def _named(graph: Graph, key: str) -> str:
    node = graph.nodes[key]
    return f"{node.kind} {node.title}"


def _components(graph: Graph) -> list[Graph]:
    """Parts that no edge joins, each a graph: they are drawn below each other, so that a drawing stays narrow."""
    part = {key: number for number, key in enumerate(graph.nodes)}
    for _ in graph.nodes:
        for edge in graph.edges:
            part[edge.source] = part[edge.target] = min(part[edge.source], part[edge.target])
    return [
        Graph(
            {key: node for key, node in graph.nodes.items() if part[key] == one},
            [edge for edge in graph.edges if part[edge.source] == one],
        )
        for one in dict.fromkeys(part.values())
    ]


def _ranks(graph: Graph) -> dict[str, int]:
    """The line of each node: below all that it was made of; what was made of nothing is just above what it went
    into.
    """
    ranks = dict.fromkeys(graph.nodes, 0)
    for _ in graph.nodes:
        for edge in graph.edges:
            ranks[edge.target] = min(len(ranks), max(ranks[edge.target], ranks[edge.source] + 1))
    targets = {edge.target for edge in graph.edges}
    for key in ranks:
        below = [ranks[edge.target] for edge in graph.edges if edge.source == key]
        if key not in targets and below:
            ranks[key] = min(below) - 1
    return ranks


def _lines(graph: Graph) -> list[list[str]]:
    """Keys line by line, each line in the order of what is above or below it, so that few edges cross."""
    ranks = _ranks(graph)
    lines: list[list[str]] = [[] for _ in range(max(ranks.values()) + 1)]
    for key, rank in ranks.items():
        lines[rank].append(key)
    lines = [line for line in lines if line]
    place = {key: number - (len(line) - 1) / 2 for line in lines for number, key in enumerate(line)}
    for _ in range(4):
        for line in lines:
            near = {key: [place[b if a == key else a] for a, b, _ in graph.edges if key in (a, b)] for key in line}
            line.sort(key=lambda key: sum(near[key]) / max(1, len(near[key])))
            place |= {key: number - (len(line) - 1) / 2 for number, key in enumerate(line)}
    return lines


def _draw(graph: Graph) -> Markup:
    lines = [line for component in _components(graph) for line in _lines(component)]
    width = max(map(len, lines)) * (BOX[0] + GAP[0]) + GAP[0]
    height = len(lines) * (BOX[1] + GAP[1]) - GAP[1] + 4
    root = ElementTree.Element(
        "svg", {"viewBox": f"0 0 {width} {height}", "class": "graph", "aria-hidden": "true", "focusable": "false"}
    )
    root.set("width", str(width))
    root.set("height", str(height))
    corner = {}
    for row, line in enumerate(lines):
        left = (width - len(line) * (BOX[0] + GAP[0]) + GAP[0]) / 2
        for column, key in enumerate(line):
            corner[key] = (left + column * (BOX[0] + GAP[0]), row * (BOX[1] + GAP[1]) + 2)
    for edge in graph.edges:
        (x1, y1), (x2, y2) = corner[edge.source], corner[edge.target]
        x1, x2, y1 = x1 + BOX[0] / 2, x2 + BOX[0] / 2, y1 + BOX[1]
        bend = f"M {x1} {y1} C {x1} {y1 + GAP[1] * 0.6}, {x2} {y2 - GAP[1] * 0.6}, {x2} {y2 - 6}"
        colour = "s-s2" if edge.is_same is False else "s-soft"
        ElementTree.SubElement(root, "path", {"d": bend, "class": f"f-none {colour}", "stroke-width": "1.4"})
        head = f"M {x2 - 4} {y2 - 8} L {x2} {y2 - 1} L {x2 + 4} {y2 - 8} z"
        ElementTree.SubElement(root, "path", {"d": head, "class": "f-s2" if edge.is_same is False else "f-soft"})
    for key, (x, y) in corner.items():
        _draw_node(root, graph.nodes[key], x, y)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _draw_node(root: ElementTree.Element, node: LineageNode, x: float, y: float) -> None:
    shape = {"x": f"{x}", "y": f"{y}", "width": f"{BOX[0]}", "height": f"{BOX[1]}", "rx": "8"}
    look = "f-card s-link" if node.is_given else "f-card s-soft is-absent"
    ElementTree.SubElement(root, "rect", {**shape, "class": look, "stroke-width": "1.6" if node.is_given else "1"})
    texts = (
        (node.kind, "f-soft", "11", 17, 28),
        (node.title, "f-ink", "13", 35, 21),
        (node.line, "f-soft", "11", 52, 28),
    )
    for text, colour, size, down, most in texts:
        line = ElementTree.SubElement(
            root, "text", {"x": f"{x + 12}", "y": f"{y + down}", "class": f"{colour} t{size}"}
        )
        clean = "".join(char if char.isprintable() else " " for char in text)
        line.text = shortened(clean, most)
