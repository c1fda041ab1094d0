"""The chain from data to bundle: what each manifest says it was made of, and whether what is given here is that very
thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup

from distill.students.data_facts import LearnedGold, LearnedLabels
from distill.training.model_manifests import BaseModelUsed
from export.student_facts import BaseReference, GoldOrigin, TrainedLabels
from jobs.report.artifacts import Artifact, BundleArtifact, RunArtifact, StudentArtifact
from jobs.report.blocks import Block, Drawing
from jobs.report.downloads import csv_download
from manifests.digests import digest_of, sha256_bytes
from manifests.secrets.redaction import shortened

BOX = (196, 62)
GAP = (22, 46)


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


def trace(artifacts: Iterable[Artifact]) -> Graph:
    """The graph of what is given and what that names."""
    given = list(artifacts)
    graph = Graph()
    runs = {one.plan.fingerprint: one for one in given if isinstance(one, RunArtifact)}
    students = {one.digest: one for one in given if isinstance(one, StudentArtifact)}
    for run in runs.values():
        kind = "scores" if run.is_scored else "label run"
        graph.add(_run_key(run.plan.fingerprint), kind, run.name, f"{run.found.tally.rows:,} rows", is_given=True)
    for digest, student in students.items():
        graph.add(_student_key(digest), "student", student.name, student.record.kind, is_given=True)
    for one in given:
        if isinstance(one, RunArtifact):
            _trace_run(graph, one, students)
        elif isinstance(one, StudentArtifact):
            _trace_student(graph, _student_key(one.digest), _origin_of(one), runs)
        else:
            _trace_bundle(graph, one, runs, students)
    return graph


def lineage_blocks(graph: Graph) -> list[Block]:
    """The drawing; its data are the edges, with what is known of each."""
    if not graph.edges:
        return []
    said = {True: "the same, by digest", False: "changed since", None: "named"}
    rows = [(_named(graph, edge.source), _named(graph, edge.target), said[edge.is_same]) for edge in graph.edges]
    alt = "; ".join(f"{source} to {target}" for source, target, _ in rows)
    note = (
        "Dashed boxes are named by a manifest and were not given here."
        if any(not node.is_given for node in graph.nodes.values())
        else ""
    )
    return [
        Drawing(
            "From data to here",
            _draw(graph),
            alt,
            csv_download("lineage", ("from", "to", "known"), rows),
            note,
            is_wide=True,
        )
    ]


def changes(graph: Graph) -> list[str]:
    """What is not any more what something was made of, a sentence each."""
    return [
        (
            f"{_named(graph, edge.source)} is not what {_named(graph, edge.target)} was made of: its manifest has "
            "changed since."
        )
        for edge in graph.changed
    ]


def _named(graph: Graph, key: str) -> str:
    node = graph.nodes[key]
    return f"{node.kind} {node.title}"


def _run_key(fingerprint: str) -> str:
    return f"run {fingerprint}"


def _student_key(digest: str) -> str:
    return f"student {digest}"


def _trace_run(graph: Graph, run: RunArtifact, students: dict[str, StudentArtifact]) -> None:
    key = _run_key(run.plan.fingerprint)
    files = run.plan.files
    rows = sum(file.rows for file in files)
    name = _base(files[0].path) if len(files) == 1 else f"{len(files):,} files"
    graph.join(
        graph.add(f"data {digest_of([list(file.identity) for file in files])}", "data", name, f"{rows:,} rows"), key
    )
    for engine in run.found.engines:
        if run.is_scored:
            _join_scorer(graph, key, engine, students)
        else:
            model = str(engine.get("model_digest", ""))
            title = _base(str(engine.get("model", "")))
            graph.join(
                graph.add(f"model {model}", "teacher", title, f"{engine.get('family')} {engine.get('version', '')}"),
                key,
            )
    for source in run.found.reused_from:
        graph.join(
            graph.add(_run_key(source.fingerprint), "label run", _base(source.output), f"{source.rows:,} rows reused"),
            key,
        )


def _join_scorer(graph: Graph, key: str, engine: dict[str, Any], students: dict[str, StudentArtifact]) -> None:
    digest = str(engine.get("model_digest"))
    source = graph.add(_student_key(digest), "student", str(engine.get("model", "")))
    graph.join(source, key, True if digest in students else None)


class _Origin(NamedTuple):
    """What a student was made of, as its own manifest or a bundle's says it."""

    labels: Sequence[LearnedLabels | TrainedLabels] = ()
    gold: LearnedGold | GoldOrigin | None = None
    model: BaseModelUsed | BaseReference | None = None


def _origin_of(student: StudentArtifact) -> _Origin:
    held = student.manifest
    return _Origin() if held is None else _Origin(held.labels, held.gold, held.model)


def _trace_student(graph: Graph, key: str, origin: _Origin, runs: dict[str, RunArtifact]) -> None:
    for source in origin.labels:
        _join_labels(graph, key, source, runs)
    if model := origin.model:
        graph.join(graph.add(f"model {model.digest}", "base model", _base(model.reference), ""), key)
    if gold := origin.gold:
        node = graph.add(f"gold {gold.path}", "trusted grades", _base(gold.path), f"column {gold.grade}")
        graph.join(node, key)


def _join_labels(graph: Graph, key: str, source: LearnedLabels | TrainedLabels, runs: dict[str, RunArtifact]) -> None:
    count = f"{source.labels:,} labels"
    if source.kind != "run":
        graph.join(graph.add(f"file {source.path}", "label file", _base(source.path), count), key)
        return
    fingerprint = str(source.fingerprint)
    run = runs.get(fingerprint)
    graph.add(_run_key(fingerprint), "label run", source.name or _base(source.path), count)
    is_same = None if run is None else sha256_bytes(run.manifest_bytes or b"") == source.manifest_sha256
    graph.join(_run_key(fingerprint), key, is_same)


def _trace_bundle(
    graph: Graph, bundle: BundleArtifact, runs: dict[str, RunArtifact], students: dict[str, StudentArtifact]
) -> None:
    precisions = ", ".join(dict.fromkeys(model.precision for model in bundle.student.models))
    key = graph.add(f"bundle {bundle.manifest_sha256}", "bundle", bundle.name, precisions, is_given=True)
    lineage = bundle.student.lineage
    student = lineage.student
    is_given = student.digest in students
    graph.add(_student_key(student.digest), "student", student.name)
    graph.join(_student_key(student.digest), key, True if is_given else None)
    if not is_given:
        origin = _Origin(lineage.labels or (), lineage.gold, student.model)
        _trace_student(graph, _student_key(student.digest), origin, runs)


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


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
