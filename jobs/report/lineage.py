"""Lineage from data to bundle: what each manifest says it was made of, and whether the artifact given here is that."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from relabel.distill.students.spec import LearnedGold, LearnedLabels
from relabel.distill.training.output import (
    BaseModelUsed,
)
from relabel.jobs.report.artifacts import Artifact, RunArtifact, StudentArtifact, TeacherArtifact, base_name
from relabel.jobs.sections import (
    Badge,
    Paragraph,
    Section,
    Table,
)
from relabel.manifests.files import place_of
from relabel.manifests.records import digest_of, sha256_bytes
from relabel.manifests.run_manifest import MANIFEST_NAME
from relabel.manifests.store import read_if_there


class Thing(NamedTuple):
    """A thing that something was made of, or was made."""

    kind: str
    title: str

    def __str__(self) -> str:
        return f"{self.kind} {self.title}"


class Link(NamedTuple):
    """One thing was made of another; `is_same`: the source that is given is what the manifest names, None where it is
    not given.
    """

    source: Thing
    target: Thing
    is_same: bool | None


Source: TypeAlias = tuple[str, str, str, str, bool | None]
"""Keys of a thing and of what it was made of, which hold digests; kind and title of the latter; see `Link`. Without a
verdict the source is the same if its key is among those of what is given."""


def trace(artifacts: Iterable[Artifact]) -> list[Link]:
    """What was made of what, by what is given and what its manifests name."""
    words = {"label run": "run", "scores": "run", "teacher": "model"}
    given = {f"{words.get(artifact.kind, artifact.kind)} {artifact.digest}": artifact for artifact in artifacts}
    things = {key: Thing(artifact.kind, artifact.name) for key, artifact in given.items()}
    links: dict[tuple[str, str, bool | None], Link] = {}
    for key, artifact in given.items():
        for target, source, kind, title, is_same in _sources(key, artifact, given):
            things.setdefault(source, Thing(kind, title))
            verdict = True if is_same is None and source in given else is_same
            links[source, target, verdict] = Link(things[source], things[target], verdict)
    return list(links.values())


def _sources(key: str, artifact: Artifact, given: Mapping[str, Artifact]) -> Iterator[Source]:
    if isinstance(artifact, RunArtifact):
        yield from _run_sources(key, artifact, given)
    elif isinstance(artifact, TeacherArtifact):
        learned = artifact.manifest
        yield from _learned(key, learned.data.runs, learned.data.gold, learned.model, given)
    elif isinstance(artifact, StudentArtifact):
        manifest = artifact.manifest
        yield from _learned(key, manifest.labels, manifest.gold, manifest.model, given)
    else:
        lineage = artifact.student.lineage
        student = lineage.student
        student_key = f"student {student.digest}"
        yield key, student_key, "student", student.name, None
        if student_key not in given:
            yield from _learned(student_key, lineage.labels or (), lineage.gold, student.model, given)


def _run_sources(key: str, run: RunArtifact, given: Mapping[str, Artifact]) -> Iterator[Source]:
    """The data of a run, what labelled it, and the runs that it reused labels of."""
    files = run.plan.files
    name = base_name(files[0].path) if len(files) == 1 else f"{len(files):,} files"
    yield key, f"data {digest_of([list(file.identity) for file in files])}", "data", name, None
    for engine in run.snapshot.engines:
        if run.kind == "scores":
            yield from _scorer(key, engine, given)
        else:
            yield from _teacher(key, engine, given)
    for source in run.snapshot.reused_from:
        yield key, f"run {source.fingerprint}", "label run", base_name(source.output), None


def _teacher(key: str, engine: dict[str, Any], given: Mapping[str, Artifact]) -> Iterator[Source]:
    """The model that a run asked: a given teacher where all its files are those that were asked."""
    source = f"model {engine.get('model_digest', '')}"
    reference = str(engine.get("model", ""))
    if source not in given:
        path = str(Path(reference).expanduser()) if reference.startswith("~") else reference
        for teacher_key, teacher in given.items():
            if path and isinstance(teacher, TeacherArtifact) and place_of(teacher.path) == place_of(path):
                yield key, teacher_key, "teacher", teacher.name, False
                return
    yield key, source, "teacher", base_name(reference), None


def _scorer(key: str, engine: dict[str, Any], given: Mapping[str, Artifact]) -> Iterator[Source]:
    """What scored: a student, or a bundle with the student that it was made of."""
    name = str(engine.get("model", ""))
    digest = str(engine.get("model_digest"))
    match engine.get("details"):
        case {"bundle": _, "manifest_sha256": str(manifest_sha256), "student": str(digest)}:
            bundle = f"bundle {manifest_sha256}"
            yield key, bundle, "bundle", name, None
            if bundle in given:  # its own manifest says what it was made of
                return
            key = bundle
    yield key, f"student {digest}", "student", name, None


def _learned(
    key: str,
    labels: Iterable[LearnedLabels],
    gold: LearnedGold | None,
    model: BaseModelUsed | None,
    given: Mapping[str, Artifact],
) -> Iterator[Source]:
    """What a student or a teacher was made of."""
    for source in labels:
        if source.kind != "run":
            yield key, f"file {source.path}", "label file", base_name(source.path), None
            continue
        run = given.get(f"run {source.fingerprint}")
        is_same = None
        if isinstance(run, RunArtifact):
            is_same = sha256_bytes(read_if_there(run.store, MANIFEST_NAME) or b"") == source.manifest_sha256
        yield key, f"run {source.fingerprint}", "label run", source.name or base_name(source.path), is_same
    if model is not None:
        yield key, f"model {model.digest}", "base model", base_name(model.reference), None
    if gold is not None:
        kind = "wanted chunks" if gold.sets is not None else "trusted grades"
        yield key, f"gold {gold.path}", kind, base_name(gold.path), None


def lineage_section(artifacts: Sequence[Artifact]) -> Section:
    """What was made of what, each link with how it is known; changed sources first."""
    known = {
        True: Badge("the same, by digest", "good"),
        False: Badge("changed since", "bad"),
        None: Badge("named by a manifest"),
    }
    links = trace(artifacts)
    rows = [(str(link.source), str(link.target), known[link.is_same]) for link in links]
    table = Table("From data to here", ("from", "to", "known"), rows)
    texts = (Paragraph(sentence, "warn") for sentence in changes(links, artifacts))
    return Section("lineage", "Lineage", [*texts, table] if rows else [])


def changes(links: Iterable[Link], artifacts: Iterable[Artifact]) -> list[str]:
    """What is not any more what something was made of, a sentence each."""
    sentences = []
    given = {f"{artifact.kind} {artifact.name}" for artifact in artifacts}
    for source, target, is_same in links:
        if is_same is False:
            what = "files have" if source.kind == "teacher" else "manifest has"
            sentences.append(f"{source} is not what {target} was made of: its {what} changed since.")
        if is_same is None and str(source) in given:
            sentences.append(
                f"{target} was made of another {source} than the one that is given here: their digests differ."
            )
    return sentences
