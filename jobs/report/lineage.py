"""Lineage from data to bundle: what each manifest says it was made of, and whether the artifact given here is that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from relabel.distill.students.manifest import LearnedGold, LearnedLabels
from relabel.distill.training.output import BaseModelUsed
from relabel.jobs.report.artifacts import (
    Artifact,
    BundleArtifact,
    RunArtifact,
    StudentArtifact,
    TeacherArtifact,
    base_name,
)
from relabel.jobs.sections import Badge, Paragraph, Section, Table
from relabel.manifests.records import digest_of, sha256_bytes


class LineageNode(NamedTuple):
    """A thing that something was made of, or was made."""

    kind: str
    title: str

    def __str__(self) -> str:
        return f"{self.kind} {self.title}"


class Edge(NamedTuple):
    """One thing was made of another; `is_same`: the source that is given is what the manifest names, None where
    nobody knows.
    """

    source: str
    target: str
    is_same: bool | None


@dataclass
class Graph:
    """Nodes by key, which holds a digest of the thing, and the edges between them; `given` are the page's artifacts,
    the others are only named by a manifest.
    """

    nodes: dict[str, LineageNode] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    given: dict[str, Artifact] = field(default_factory=dict)

    def join(self, target: str, key: str, kind: str, title: str, *, is_same: bool | None = None) -> None:
        """Add what `target` was made of, once; what is given is known by its digest, unless `is_same` says more."""
        self.nodes.setdefault(key, LineageNode(kind, title))
        if is_same is None and key in self.given:
            is_same = True
        edge = Edge(key, target, is_same)
        if edge not in self.edges:
            self.edges.append(edge)


def trace(artifacts: Iterable[Artifact]) -> Graph:
    """The graph of what is given and what its manifests name."""
    graph = Graph()
    for one in artifacts:
        graph.given[_key(one)] = one
        graph.nodes[_key(one)] = LineageNode(one.kind, one.name)
    for key, one in graph.given.items():
        if isinstance(one, RunArtifact):
            _trace_run(graph, key, one)
        elif isinstance(one, TeacherArtifact):
            _trace_trained(graph, key, one.manifest.data.runs, one.manifest.data.gold, one.manifest.model)
        elif isinstance(one, StudentArtifact):
            if one.manifest is not None:
                _trace_trained(graph, key, one.manifest.labels, one.manifest.gold, one.manifest.model)
        else:
            student, lineage = one.student.lineage.student, one.student.lineage
            student_key = f"student {student.digest}"
            graph.join(key, student_key, "student", student.name)
            if student_key not in graph.given:
                _trace_trained(graph, student_key, lineage.labels or (), lineage.gold, student.model)
    return graph


def _key(one: Artifact) -> str:
    match one:
        case RunArtifact():
            return f"run {one.plan.fingerprint}"
        case TeacherArtifact():
            return f"model {one.digest}"
        case BundleArtifact():
            return f"bundle {one.manifest_sha256}"
    return f"student {one.digest}"


def _trace_run(graph: Graph, key: str, run: RunArtifact) -> None:
    files = run.plan.files
    name = base_name(files[0].path) if len(files) == 1 else f"{len(files):,} files"
    graph.join(key, f"data {digest_of([list(file.identity) for file in files])}", "data", name)
    for engine in run.found.engines:
        if run.is_scored:
            _join_scorer(graph, key, engine)
        else:
            _join_teacher(graph, key, engine)
    for source in run.found.reused_from:
        graph.join(key, f"run {source.fingerprint}", "label run", base_name(source.output))


def _join_teacher(graph: Graph, key: str, engine: dict[str, Any]) -> None:
    """The model that a run asked: a given teacher where all its files are those that were asked."""
    source, reference = f"model {engine.get('model_digest', '')}", str(engine.get("model", ""))
    if source not in graph.given:
        for given, one in graph.given.items():
            if isinstance(one, TeacherArtifact) and _is_at(one, reference):
                graph.join(key, given, "teacher", one.name, is_same=False)
                return
    graph.join(key, source, "teacher", base_name(reference))


def _is_at(teacher: TeacherArtifact, reference: str) -> bool:
    """Whether a run's model reference names the teacher's folder."""
    if teacher.folder is None or not reference or ":" in reference:
        return teacher.path.rstrip("/") == reference.rstrip("/")
    return teacher.folder.resolve() == Path(reference).expanduser().resolve()


def _join_scorer(graph: Graph, key: str, engine: dict[str, Any]) -> None:
    """What scored: a student, or a bundle with the student that it was made of."""
    name, digest = str(engine.get("model", "")), str(engine.get("model_digest"))
    match engine.get("details"):
        case {"bundle": _, "manifest_sha256": str(manifest_sha256), "student": str(digest)}:
            bundle = f"bundle {manifest_sha256}"
            graph.join(key, bundle, "bundle", name)
            if bundle in graph.given:  # its own manifest says what it was made of
                return
            key = bundle
    graph.join(key, f"student {digest}", "student", name)


def _trace_trained(
    graph: Graph,
    key: str,
    labels: Iterable[LearnedLabels],
    gold: LearnedGold | None,
    model: BaseModelUsed | None,
) -> None:
    """What a student or a teacher was made of."""
    for source in labels:
        if source.kind != "run":
            graph.join(key, f"file {source.path}", "label file", base_name(source.path))
            continue
        run_key = f"run {source.fingerprint}"
        run, is_same = graph.given.get(run_key), None
        if isinstance(run, RunArtifact):
            is_same = sha256_bytes(run.manifest_bytes or b"") == source.manifest_sha256
        graph.join(key, run_key, "label run", source.name or base_name(source.path), is_same=is_same)
    if model is not None:
        graph.join(key, f"model {model.digest}", "base model", base_name(model.reference))
    if gold is not None:
        kind = "wanted chunks" if isinstance(gold, LearnedGold) and gold.sets is not None else "trusted grades"
        graph.join(key, f"gold {gold.path}", kind, base_name(gold.path))


def lineage_section(graph: Graph) -> Section:
    """What was made of what, each link with how it is known; changed sources first."""
    known = {
        True: Badge("the same, by digest", "good"),
        False: Badge("changed since", "bad"),
        None: Badge("named by a manifest"),
    }
    rows = [(str(graph.nodes[one.source]), str(graph.nodes[one.target]), known[one.is_same]) for one in graph.edges]
    table = Table("From data to here", ("from", "to", "known"), rows)
    texts = [Paragraph(sentence, "warn") for sentence in changes(graph)]
    return Section("lineage", "Lineage", [*texts, table] if rows else [])


def changes(graph: Graph) -> list[str]:
    """What is not any more what something was made of, a sentence each."""
    found = []
    given = {str(graph.nodes[key]) for key in graph.given}
    for edge in graph.edges:
        source, target = graph.nodes[edge.source], graph.nodes[edge.target]
        if edge.is_same is False:
            what = "files have" if source.kind == "teacher" else "manifest has"
            found.append(f"{source} is not what {target} was made of: its {what} changed since.")
        if edge.source not in graph.given and str(source) in given:
            found.append(
                f"{target} was made of another {source} than the one that is given here: their digests differ."
            )
    return found
