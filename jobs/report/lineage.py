"""Lineage from data to bundle: a graph of what each manifest refers to, and the report section that draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup

from relabel.distill.students.manifest import LearnedGold, LearnedLabels
from relabel.distill.training.locations import BaseModelUsed
from relabel.jobs.report.artifacts import Artifact, BundleArtifact, RunArtifact, StudentArtifact, TeacherArtifact
from relabel.jobs.report.page import Badge, Block, Cell, Drawing, Paragraph, Section, Table, csv_download
from relabel.manifests.records import digest_of, sha256_bytes
from relabel.manifests.secrets import shortened

# ------------------------------------------------------------------------------
# What came of what, as a graph.


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


# ------------------------------------------------------------------------------
# The chain from data to bundle: what each manifest says it was made of, and whether what is given here is that very
# thing.


class _Given(NamedTuple):
    """What was opened: runs by fingerprint, models by the digest of their files, bundles by that of their manifest."""

    runs: dict[str, RunArtifact]
    teachers: dict[str, TeacherArtifact]
    students: dict[str, StudentArtifact]
    bundles: dict[str, BundleArtifact]


def trace(artifacts: Iterable[Artifact]) -> Graph:
    """The graph of what is given and what that names."""
    shown = list(artifacts)
    graph = Graph()
    given = _Given(
        {one.plan.fingerprint: one for one in shown if isinstance(one, RunArtifact)},
        {one.digest: one for one in shown if isinstance(one, TeacherArtifact)},
        {one.digest: one for one in shown if isinstance(one, StudentArtifact)},
        {one.manifest_sha256: one for one in shown if isinstance(one, BundleArtifact)},
    )
    for digest, teacher in given.teachers.items():
        line = f"{teacher.manifest.method}, {teacher.manifest.data.rows:,} rows"
        graph.add(_model_key(digest), "teacher", teacher.name, line, is_given=True)
    for run in given.runs.values():
        kind = "scores" if run.is_scored else "label run"
        graph.add(_run_key(run.plan.fingerprint), kind, run.name, f"{run.found.tally.rows:,} rows", is_given=True)
    for digest, student in given.students.items():
        graph.add(_student_key(digest), "student", student.name, student.record.kind, is_given=True)
    for one in shown:
        if isinstance(one, RunArtifact):
            _trace_run(graph, one, given)
        elif isinstance(one, TeacherArtifact):
            manifest = one.manifest
            origin = _Origin(manifest.data.runs, manifest.data.gold, manifest.model)
            _trace_trained(graph, _model_key(one.digest), origin, given)
        elif isinstance(one, StudentArtifact):
            _trace_trained(graph, _student_key(one.digest), _origin_of(one), given)
        elif isinstance(one, BundleArtifact):
            _trace_bundle(graph, one, given)
    return graph


def _run_key(fingerprint: str) -> str:
    return f"run {fingerprint}"


def _student_key(digest: str) -> str:
    return f"student {digest}"


def _bundle_key(manifest_sha256: str) -> str:
    return f"bundle {manifest_sha256}"


def _model_key(digest: str) -> str:
    return f"model {digest}"


def _trace_run(graph: Graph, run: RunArtifact, given: _Given) -> None:
    key = _run_key(run.plan.fingerprint)
    files = run.plan.files
    rows = sum(file.rows for file in files)
    name = _base(files[0].path) if len(files) == 1 else f"{len(files):,} files"
    graph.join(
        graph.add(f"data {digest_of([list(file.identity) for file in files])}", "data", name, f"{rows:,} rows"), key
    )
    for engine in run.found.engines:
        if run.is_scored:
            _join_scorer(graph, key, engine, given)
        else:
            _join_teacher(graph, key, engine, given.teachers)
    for source in run.found.reused_from:
        graph.join(
            graph.add(_run_key(source.fingerprint), "label run", _base(source.output), f"{source.rows:,} rows reused"),
            key,
        )


def _join_teacher(graph: Graph, key: str, engine: dict[str, Any], teachers: dict[str, TeacherArtifact]) -> None:
    """The model that a run asked: a teacher that is given, where all its files are those that were asked."""
    digest, reference = str(engine.get("model_digest", "")), str(engine.get("model", ""))
    at_its_place = next((given for given, one in teachers.items() if _is_at(one, reference)), None)
    if at_its_place is not None and digest not in teachers:
        graph.join(_model_key(at_its_place), key, False)
        return
    about = f"{engine.get('family')} {engine.get('version', '')}"
    source = graph.add(_model_key(digest), "teacher", _base(reference), about)
    graph.join(source, key, True if digest in teachers else None)


def _is_at(teacher: TeacherArtifact, reference: str) -> bool:
    """Whether a run's model reference names the folder that a teacher lies in."""
    if teacher.folder is None or not reference or ":" in reference:
        return teacher.path.rstrip("/") == reference.rstrip("/")
    return teacher.folder.resolve() == Path(reference).expanduser().resolve()


def _join_scorer(graph: Graph, key: str, engine: dict[str, Any], given: _Given) -> None:
    """What labelled: a student, or a bundle with the student that it was made of."""
    name, digest = str(engine.get("model", "")), str(engine.get("model_digest"))
    match engine.get("details"):
        case {"bundle": _, "manifest_sha256": str(manifest_sha256), "student": str(digest)}:
            is_given = manifest_sha256 in given.bundles
            bundle = graph.add(_bundle_key(manifest_sha256), "bundle", name, str(engine.get("dtype", "")))
            graph.join(bundle, key, True if is_given else None)
            key = bundle
            if is_given:  # its own manifest says what it was made of
                return
    graph.join(graph.add(_student_key(digest), "student", name), key, True if digest in given.students else None)


class _Origin(NamedTuple):
    """What a student was made of, as its own manifest or a bundle's says it."""

    labels: Sequence[LearnedLabels] = ()
    gold: LearnedGold | None = None
    model: BaseModelUsed | None = None


def _origin_of(student: StudentArtifact) -> _Origin:
    held = student.manifest
    return _Origin() if held is None else _Origin(held.labels, held.gold, held.model)


def _trace_trained(graph: Graph, key: str, origin: _Origin, given: _Given) -> None:
    """What a student or a teacher was made of."""
    for source in origin.labels:
        _join_labels(graph, key, source, given.runs)
    if model := origin.model:
        base = graph.add(_model_key(model.digest), "base model", _base(model.reference), "")
        graph.join(base, key, True if model.digest in given.teachers else None)
    if gold := origin.gold:
        sets = gold.sets
        kind = "trusted grades" if sets is None else "wanted chunks"
        node = graph.add(f"gold {gold.path}", kind, _base(gold.path), f"column {sets or gold.grade}")
        graph.join(node, key)


def _join_labels(graph: Graph, key: str, source: LearnedLabels, runs: dict[str, RunArtifact]) -> None:
    count = f"{source.labels:,} labels"
    if source.kind != "run":
        graph.join(graph.add(f"file {source.path}", "label file", _base(source.path), count), key)
        return
    fingerprint = str(source.fingerprint)
    run = runs.get(fingerprint)
    graph.add(_run_key(fingerprint), "label run", source.name or _base(source.path), count)
    is_same = None if run is None else sha256_bytes(run.manifest_bytes or b"") == source.manifest_sha256
    graph.join(_run_key(fingerprint), key, is_same)


def _trace_bundle(graph: Graph, bundle: BundleArtifact, given: _Given) -> None:
    precisions = ", ".join(dict.fromkeys(model.precision for model in bundle.student.models))
    key = graph.add(_bundle_key(bundle.manifest_sha256), "bundle", bundle.name, precisions, is_given=True)
    lineage = bundle.student.lineage
    student = lineage.student
    is_given = student.digest in given.students
    graph.add(_student_key(student.digest), "student", student.name)
    graph.join(_student_key(student.digest), key, True if is_given else None)
    if not is_given:
        origin = _Origin(lineage.labels or (), lineage.gold, student.model)
        _trace_trained(graph, _student_key(student.digest), origin, given)


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


# ------------------------------------------------------------------------------
# The section on lineage: the chain from data to bundle as a drawing and link by link, and which links are broken.


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
