"""Artifacts that a report can cover: label runs, teachers, students and bundles, opened from a folder or URL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from relabel.distill.students.model import NOT_THE_MODEL
from relabel.distill.students.spec import LearnedGold, LearnedLabels, StudentManifest, read_student_manifest
from relabel.distill.teachers.spec import TeacherManifest, read_teacher_manifest
from relabel.distill.training.output import CHECKPOINTS, PLOT_NAME, RECORD_NAME, BaseModelUsed
from relabel.export.bundle_facts import Parity, StudentFacts, read_parity, read_student_facts
from relabel.export.bundles import read_manifest
from relabel.jobs.sections import Badge, Paragraph, Section, Table
from relabel.jobs.tables import is_remote
from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.models import default_cache_dir, digest_of_files, directory_digest
from relabel.manifests.plan import PLAN_NAME, Plan, load_plan, refuse_rounds
from relabel.manifests.records import digest_of, sha256_bytes
from relabel.manifests.run import MANIFEST_NAME, RunFolder, RunManifest, Snapshot, load_manifest
from relabel.manifests.store import Store, open_run_store, read_if_there

DIGITS = 16
"""Of a digest that is shown."""


def base_name(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2] or path


@dataclass
class _Opened:
    """What all artifacts have.

    Args:
        kind: what a page calls it.
        digest: what manifests call it that name it as their source.
    """

    kind: str
    name: str
    path: str
    store: Store
    digest: str


@dataclass
class RunArtifact(_Opened):
    """A label run, or a student's scores, which lie in the same way.

    Args:
        manifest: None where it is not finished; `spec` is then empty, else as it was resolved.
        found: what its receipts say.
    """

    storage: Storage
    plan: Plan
    folder: RunFolder
    manifest: RunManifest | None
    spec: dict[str, Any]
    found: Snapshot
    is_finished: bool

    def spec_part(self, *names: str) -> dict[str, Any]:
        """An object inside the spec, by the names on the way to it; empty where there is none, or something else is
        there.
        """
        found: Any = self.spec
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


@dataclass
class TeacherArtifact(_Opened):
    """A teacher's folder."""

    manifest: TeacherManifest


@dataclass
class StudentArtifact(_Opened):
    """A student's folder; scores and bundles call it by the digest over its files, as its manifest names them."""

    manifest: StudentManifest


@dataclass
class BundleArtifact(_Opened):
    """A bundle, by its manifest; its files are not checked (`relabel pull` and `load.py` do that).

    Args:
        student: which it is of, and what that was made of.
        parity: how near its models are to the student; None where its manifest does not say.
    """

    facts: dict[str, Any]
    student: StudentFacts
    parity: Parity | None


Artifact: TypeAlias = RunArtifact | TeacherArtifact | StudentArtifact | BundleArtifact


# ------------------------------------------------------------------------------
# Opening paths: each artifact is recognized by its files.


def open_artifacts(paths: Sequence[str], storage: Storage) -> list[Artifact]:
    """Open every path; two of one name are distinguished by their paths.

    Raises:
        UsageError: one place twice, however it is spelled.
        InputError: a path holds nothing that a report knows.
        ManifestError: what it holds is damaged.
    """
    spelled: dict[str, str] = {}
    for path in paths:
        if (first := spelled.setdefault(place_of(path).rstrip("/"), path)) is not path:
            raise UsageError(f"PATH: {first} is given twice, as {path} too.")
    found = [open_artifact(path, storage) for path in paths]
    named = Counter((type(one), one.name) for one in found)
    for one in found:
        if named[type(one), one.name] > 1:
            one.name = f"{one.name} ({one.path})"
    return found


def open_artifact(path: str, storage: Storage) -> Artifact:
    """What lies at a path.

    Raises:
        InputError: nothing that a report knows.
        ManifestError: it is damaged.
    """
    if not is_remote(path) and Path(place_of(path)).is_file():
        raise InputError(
            f"{path}: is a file. A report takes folders: outputs of `relabel run`, `score`, `train`, `distill` or "
            "`export`."
        )
    store = open_run_store(path, storage)
    if (plan := load_plan(store)) is not None:
        kind = "scores" if plan.facts.kind == "student" else "label run"
        folder, run = RunFolder(store, plan), load_manifest(store)
        found, spec = folder.snapshot(), {} if run is None else run.spec
        is_finished = run is not None and run.receipts_sha256 == found.digest
        common = (kind, plan.name, path, store, plan.fingerprint)
        return RunArtifact(*common, storage, plan, folder, run, spec, found, is_finished)
    manifest, where = read_if_there(store, MANIFEST_NAME) or b"", f"{path}/{MANIFEST_NAME}"
    if not manifest and not is_url(path) and Path(path, CHECKPOINTS, RECORD_NAME).is_file():
        raise InputError(
            f"{path}: a training that is not finished. Its curves up to the last checkpoint are in "
            f"{path}/{CHECKPOINTS}/{PLOT_NAME}."
        )
    try:
        of = manifest and json.loads(manifest).get("kind")
    except (ValueError, AttributeError) as exc:
        raise ManifestError(f"{where}: not a JSON object ({type(exc).__name__}). Restore it from a copy.") from exc
    match of:
        case "student":
            student = read_student_manifest(manifest, where)
            return StudentArtifact("student", student.name, path, store, digest_of(student.files or {}), student)
        case "teacher":
            teacher = read_teacher_manifest(manifest, where)
            digest = _teacher_digest(path, store, teacher)
            return TeacherArtifact("teacher", teacher.name, path, store, digest, teacher)
        case "bundle":
            facts = read_manifest(manifest, where)
            parity = read_parity(facts["parity"], where) if facts.get("parity") else None
            digest, of_student = sha256_bytes(manifest), read_student_facts(facts, where)
            return BundleArtifact("bundle", str(facts["name"]), path, store, digest, facts, of_student, parity)
    refuse_rounds(store)
    raise InputError(
        f"{path}: holds no {PLAN_NAME} (a label run), and no {MANIFEST_NAME} of a student, a teacher or a "
        "bundle. Give an output of `relabel run`, `score`, `train`, `distill` or `export`."
    )


def _teacher_digest(path: str, store: Store, manifest: TeacherManifest) -> str:
    """What a run calls the model: over all files of the folder, as they are now. At a URL the weights are believed to
    be those that the manifest names, and are not read.
    """
    if not is_remote(path):
        return directory_digest(Path(place_of(path)), cache_dir=default_cache_dir())
    held = {name: data for name in NOT_THE_MODEL if (data := read_if_there(store, name)) is not None}
    return digest_of_files({**(manifest.files or {}), **{name: sha256_bytes(data) for name, data in held.items()}})


# ------------------------------------------------------------------------------
# Lineage from data to bundle: what each manifest says it was made of, and whether the artifact given here is that.


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
    given = {f"{words.get(one.kind, one.kind)} {one.digest}": one for one in artifacts}
    things = {key: Thing(one.kind, one.name) for key, one in given.items()}
    links: dict[tuple[str, str, bool | None], Link] = {}
    for key, one in given.items():
        for target, source, kind, title, is_same in _sources(key, one, given):
            things.setdefault(source, Thing(kind, title))
            verdict = True if is_same is None and source in given else is_same
            links[source, target, verdict] = Link(things[source], things[target], verdict)
    return list(links.values())


def _sources(key: str, one: Artifact, given: Mapping[str, Artifact]) -> Iterator[Source]:
    if isinstance(one, RunArtifact):
        files = one.plan.files
        name = base_name(files[0].path) if len(files) == 1 else f"{len(files):,} files"
        yield key, f"data {digest_of([list(file.identity) for file in files])}", "data", name, None
        for engine in one.found.engines:
            yield from (_scorer(key, engine, given) if one.kind == "scores" else _teacher(key, engine, given))
        for source in one.found.reused_from:
            yield key, f"run {source.fingerprint}", "label run", base_name(source.output), None
    elif isinstance(one, TeacherArtifact):
        yield from _learned(key, one.manifest.data.runs, one.manifest.data.gold, one.manifest.model, given)
    elif isinstance(one, StudentArtifact):
        yield from _learned(key, one.manifest.labels, one.manifest.gold, one.manifest.model, given)
    else:
        student, lineage = one.student.lineage.student, one.student.lineage
        student_key = f"student {student.digest}"
        yield key, student_key, "student", student.name, None
        if student_key not in given:
            yield from _learned(student_key, lineage.labels or (), lineage.gold, student.model, given)


def _teacher(key: str, engine: dict[str, Any], given: Mapping[str, Artifact]) -> Iterator[Source]:
    """The model that a run asked: a given teacher where all its files are those that were asked."""
    source, reference = f"model {engine.get('model_digest', '')}", str(engine.get("model", ""))
    place = reference and place_of(str(Path(reference).expanduser()) if reference.startswith("~") else reference)
    at = [other for other, one in given.items() if isinstance(one, TeacherArtifact) and place_of(one.path) == place]
    if at and source not in given:
        yield key, at[0], "teacher", given[at[0]].name, False
    else:
        yield key, source, "teacher", base_name(reference), None


def _scorer(key: str, engine: dict[str, Any], given: Mapping[str, Artifact]) -> Iterator[Source]:
    """What scored: a student, or a bundle with the student that it was made of."""
    name, digest = str(engine.get("model", "")), str(engine.get("model_digest"))
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
        run, is_same = given.get(f"run {source.fingerprint}"), None
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
    rows = [(str(one.source), str(one.target), known[one.is_same]) for one in links]
    table = Table("From data to here", ("from", "to", "known"), rows)
    texts = [Paragraph(sentence, "warn") for sentence in changes(links, artifacts)]
    return Section("lineage", "Lineage", [*texts, table] if rows else [])


def changes(links: Iterable[Link], artifacts: Iterable[Artifact]) -> list[str]:
    """What is not any more what something was made of, a sentence each."""
    found = []
    given = {f"{one.kind} {one.name}" for one in artifacts}
    for source, target, is_same in links:
        if is_same is False:
            what = "files have" if source.kind == "teacher" else "manifest has"
            found.append(f"{source} is not what {target} was made of: its {what} changed since.")
        if is_same is None and str(source) in given:
            found.append(
                f"{target} was made of another {source} than the one that is given here: their digests differ."
            )
    return found
