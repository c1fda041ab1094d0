"""Artifacts that a report can cover (label runs, teachers, students and bundles), opened from a folder or URL: each is
recognized by its files.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from relabel.distill.students.model import NOT_THE_MODEL
from relabel.distill.students.spec import StudentManifest
from relabel.distill.teachers.spec import TeacherManifest
from relabel.distill.training.output import (
    CHECKPOINTS,
    PLOT_NAME,
    RECORD_NAME,
)
from relabel.export.bundle_facts import (
    Parity,
    StudentFacts,
    read_parity,
    read_student_facts,
)
from relabel.export.bundles import read_manifest
from relabel.jobs.tables import is_remote
from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.models import default_cache_dir, digest_of_files, directory_digest
from relabel.manifests.plan import PLAN_NAME, Plan, load_plan, refuse_rounds
from relabel.manifests.records import digest_of, sha256_bytes
from relabel.manifests.run_folder import RunFolder, Snapshot
from relabel.manifests.run_manifest import MANIFEST_NAME, RunManifest, load_manifest
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
        snapshot: what its receipts say.
    """

    storage: Storage
    plan: Plan
    folder: RunFolder
    manifest: RunManifest | None
    spec: dict[str, Any]
    snapshot: Snapshot
    is_finished: bool

    def spec_part(self, *names: str) -> dict[str, Any]:
        """An object inside the spec, by the names on the way to it; empty where there is none, or something else is
        there.
        """
        part = self.spec
        for name in names:
            inner = part.get(name)
            if not isinstance(inner, dict):
                return {}
            part = inner
        return part


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


def open_artifacts(paths: Sequence[str], storage: Storage) -> list[Artifact]:
    """Open every path; two of one name are distinguished by their paths.

    Raises:
        UsageError: one place twice, however it is spelled.
        InputError: a path holds nothing that a report knows.
        ManifestError: what it holds is damaged.
    """
    spelled: dict[str, str] = {}
    for path in paths:
        first = spelled.setdefault(place_of(path).rstrip("/"), path)
        if first is not path:
            raise UsageError(f"PATH: {first} is given twice, as {path} too.")
    artifacts = [open_artifact(path, storage) for path in paths]
    named = Counter((type(artifact), artifact.name) for artifact in artifacts)
    for artifact in artifacts:
        if named[type(artifact), artifact.name] > 1:
            artifact.name = f"{artifact.name} ({artifact.path})"
    return artifacts


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
    plan = load_plan(store)
    if plan is not None:
        return _open_run(path, store, storage, plan)
    manifest = read_if_there(store, MANIFEST_NAME) or b""
    where = f"{path}/{MANIFEST_NAME}"
    if not manifest and not is_url(path) and Path(path, CHECKPOINTS, RECORD_NAME).is_file():
        raise InputError(
            f"{path}: a training that is not finished. Its curves up to the last checkpoint are in "
            f"{path}/{CHECKPOINTS}/{PLOT_NAME}."
        )
    try:
        kind = manifest and json.loads(manifest).get("kind")
    except (ValueError, AttributeError) as exc:
        raise ManifestError(f"{where}: not a JSON object ({type(exc).__name__}). Restore it from a copy.") from exc
    match kind:
        case "student":
            student = StudentManifest.read(manifest, where)
            return StudentArtifact(
                kind="student",
                name=student.name,
                path=path,
                store=store,
                digest=digest_of(student.files or {}),
                manifest=student,
            )
        case "teacher":
            teacher = TeacherManifest.read(manifest, where)
            return TeacherArtifact(
                kind="teacher",
                name=teacher.name,
                path=path,
                store=store,
                digest=_teacher_digest(path, store, teacher),
                manifest=teacher,
            )
        case "bundle":
            facts = read_manifest(manifest, where)
            return BundleArtifact(
                kind="bundle",
                name=str(facts["name"]),
                path=path,
                store=store,
                digest=sha256_bytes(manifest),
                facts=facts,
                parity=read_parity(facts["parity"], where) if facts.get("parity") else None,
                student=read_student_facts(facts, where),
            )
    refuse_rounds(store)
    raise InputError(
        f"{path}: holds no {PLAN_NAME} (a label run), and no {MANIFEST_NAME} of a student, a teacher or a "
        "bundle. Give an output of `relabel run`, `score`, `train`, `distill` or `export`."
    )


def _open_run(path: str, store: Store, storage: Storage, plan: Plan) -> RunArtifact:
    folder = RunFolder(store, plan)
    manifest = load_manifest(store)
    snapshot = folder.snapshot()
    return RunArtifact(
        kind="scores" if plan.facts.kind == "student" else "label run",
        name=plan.name,
        path=path,
        store=store,
        digest=plan.fingerprint,
        storage=storage,
        plan=plan,
        folder=folder,
        manifest=manifest,
        spec={} if manifest is None else manifest.spec,
        snapshot=snapshot,
        is_finished=manifest is not None and manifest.receipts_sha256 == snapshot.digest,
    )


def _teacher_digest(path: str, store: Store, manifest: TeacherManifest) -> str:
    """What a run calls the model: over all files of the folder, as they are now. At a URL the weights are believed to
    be those that the manifest names, and are not read.
    """
    if not is_remote(path):
        return directory_digest(Path(place_of(path)), cache_dir=default_cache_dir())
    digests = dict(manifest.files or {})
    for name in NOT_THE_MODEL:
        data = read_if_there(store, name)
        if data is not None:
            digests[name] = sha256_bytes(data)
    return digest_of_files(digests)
