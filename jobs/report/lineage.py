"""The chain from data to bundle: what each manifest says it was made of, and whether what is given here is that very
thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relabel.distill.students.data_facts import LearnedGold, LearnedLabels
from relabel.distill.training.model_manifests import BaseModelUsed
from relabel.export.student_facts import BaseReference, GoldOrigin, TrainedLabels
from relabel.jobs.report.artifacts import Artifact, BundleArtifact, StudentArtifact
from relabel.jobs.report.lineage_graph import Graph
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.jobs.report.teachers import TeacherArtifact
from relabel.manifests.digests import digest_of, sha256_bytes


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

    labels: Sequence[LearnedLabels | TrainedLabels] = ()
    gold: LearnedGold | GoldOrigin | None = None
    model: BaseModelUsed | BaseReference | None = None


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
        sets = gold.sets if isinstance(gold, LearnedGold) else None
        kind = "trusted grades" if sets is None else "wanted chunks"
        node = graph.add(f"gold {gold.path}", kind, _base(gold.path), f"column {sets or gold.grade}")
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
