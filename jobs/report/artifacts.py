"""Artifacts that a report can cover: label runs, teachers, students and bundles, opened from a folder or URL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from relabel.distill.students.manifest import StudentManifest, read_student_manifest
from relabel.distill.students.model import NOT_THE_MODEL
from relabel.distill.teachers.manifest import (
    TeacherManifest,
    read_teacher_manifest,
)
from relabel.distill.training.curves import PLOT_NAME
from relabel.distill.training.output import CHECKPOINTS, RECORD_NAME
from relabel.export.bundle_facts import Parity, StudentFacts, read_parity, read_student_facts
from relabel.export.bundles import read_manifest
from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url, place_of, scheme_of
from relabel.manifests.manifest import MANIFEST_NAME, RunManifest, Snapshot, load_manifest
from relabel.manifests.models import default_cache_dir, digest_of_files, directory_digest
from relabel.manifests.plan import PLAN_NAME, Plan, load_plan, refuse_rounds
from relabel.manifests.records import digest_of, read_record, sha256_bytes
from relabel.manifests.run import RunFolder
from relabel.manifests.store import RunStore, open_run_store, read_if_there

DIGITS = 16
"""Of a digest that is shown."""


def base_name(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2] or path


@dataclass
class _Opened:
    """What all artifacts have; `kind` is what a page calls it."""

    kind: str
    name: str
    path: str
    store: RunStore


@dataclass
class RunArtifact(_Opened):
    """A label run, or a student's scores, which lie in the same way."""

    storage: Storage
    plan: Plan
    manifest_bytes: bytes | None

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.store, self.plan)

    @cached_property
    def manifest(self) -> RunManifest | None:
        """Its manifest; None where it is not finished."""
        return load_manifest(self.store)

    @cached_property
    def found(self) -> Snapshot:
        """What its receipts say."""
        return self.folder.snapshot()

    @cached_property
    def is_finished(self) -> bool:
        return self.manifest is not None and self.manifest.receipts_sha256 == self.found.digest

    @property
    def is_scored(self) -> bool:
        """Whether a student made the labels."""
        return self.kind == "scores"

    @property
    def grades(self) -> int:
        return self.plan.facts.labeler.grades

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec; empty without a manifest."""
        return {} if self.manifest is None else self.manifest.spec

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

    @property
    def folder(self) -> Path | None:
        """Where it lies on this machine; None at a URL."""
        is_here = not is_url(self.path) or scheme_of(self.path) in ("file", "local")
        return Path(place_of(self.path)) if is_here else None

    @cached_property
    def digest(self) -> str:
        """What a run calls the model: over all files of the folder, as they are now. At a URL the weights are believed
        to be those that the manifest names, and are not read.
        """
        if self.folder is not None:
            return directory_digest(self.folder, cache_dir=default_cache_dir())
        files = dict(self.manifest.files or {})
        for name in NOT_THE_MODEL:
            if (data := read_if_there(self.store, name)) is not None:
                files[name] = sha256_bytes(data)
        return digest_of_files(files)


# ------------------------------------------------------------------------------
# Opening paths: each artifact is recognized by its files.


STUDENT = "student.json"


@dataclass(frozen=True)
class ShownRecord:
    """What a page shows of `student.json`."""

    kind: str
    name: str
    heads: dict[str, int]
    max_tokens: int


@dataclass
class StudentArtifact(_Opened):
    """A student's folder."""

    record: ShownRecord
    manifest: StudentManifest | None

    @property
    def digest(self) -> str:
        """Over its files, as its manifest names them: what scores and bundles call it by
        (`distill.students.students.student_digest`).
        """
        return digest_of((self.manifest and self.manifest.files) or {})


@dataclass
class BundleArtifact(_Opened):
    """A bundle, by its manifest; its files are not checked (`relabel pull` and `load.py` do that)."""

    facts: dict[str, Any]
    manifest_sha256: str

    @cached_property
    def student(self) -> StudentFacts:
        """Its student, and what that was made of."""
        return read_student_facts(self.facts, f"{self.path}/{MANIFEST_NAME}")

    @cached_property
    def parity(self) -> Parity | None:
        """How near its models are to the student; None where its manifest does not say."""
        held = self.facts.get("parity")
        return read_parity(held, f"{self.path}/{MANIFEST_NAME}") if held else None


Artifact: TypeAlias = RunArtifact | TeacherArtifact | StudentArtifact | BundleArtifact


def open_artifacts(paths: tuple[str, ...] | list[str], storage: Storage) -> list[Artifact]:
    """Open every path; two of one name are distinguished by their paths.

    Raises:
        UsageError: one place twice, however it is spelled.
        InputError: a path holds nothing that a report knows.
        ManifestError: what it holds is damaged.
    """
    seen: dict[str, str] = {}
    for path in paths:
        place = place_of(path).rstrip("/")
        if place in seen:
            raise UsageError(
                f"PATH: {path} is given twice" + (f", as {seen[place]} too." if seen[place] != path else ".")
            )
        seen[place] = path
    found = [open_artifact(path, storage) for path in paths]
    named = [(type(one), one.name) for one in found]
    for one, name in zip(found, named, strict=True):
        if named.count(name) > 1:
            one.name = f"{one.name} ({one.path})"
    return found


def open_artifact(path: str, storage: Storage) -> Artifact:
    """What lies at a path.

    Raises:
        InputError: nothing that a report knows.
        ManifestError: it is damaged.
    """
    if (not is_url(path) or scheme_of(path) in ("file", "local")) and Path(place_of(path)).is_file():
        raise InputError(
            f"{path}: is a file. A report takes folders: outputs of `relabel run`, `score`, `train`, `distill` or "
            "`export`."
        )
    store = open_run_store(path, storage)
    if read_if_there(store, PLAN_NAME) is not None:
        plan = load_plan(store)
        assert plan is not None
        kind = "scores" if plan.facts.kind == "student" else "label run"
        return RunArtifact(kind, plan.name, path, store, storage, plan, read_if_there(store, MANIFEST_NAME))
    manifest, where = read_if_there(store, MANIFEST_NAME), f"{path}/{MANIFEST_NAME}"
    if manifest is None and not is_url(path) and Path(path, CHECKPOINTS, RECORD_NAME).is_file():
        raise InputError(
            f"{path}: a training that is not finished. Its curves up to the last checkpoint are in "
            f"{path}/{CHECKPOINTS}/{PLOT_NAME}."
        )
    of = None if manifest is None else _object(manifest, where).get("kind")
    record = read_if_there(store, STUDENT)
    if record is not None:
        file = f"{path}/{STUDENT}"
        shown = read_record(ShownRecord, record, file, "not a student's record", "Restore it, or train again.")
        # a manifest without a kind names the student's files alone
        held = None if manifest is None or of is None else read_student_manifest(manifest, where)
        return StudentArtifact("student", shown.name, path, store, shown, held)
    if manifest is not None and of == "teacher":
        teacher = read_teacher_manifest(manifest, where)
        return TeacherArtifact("teacher", teacher.name, path, store, teacher)
    if manifest is not None and of == "bundle":
        facts, _ = read_manifest(manifest, where)
        return BundleArtifact("bundle", str(facts["name"]), path, store, facts, sha256_bytes(manifest))
    refuse_rounds(store)
    raise InputError(
        f"{path}: holds no {PLAN_NAME} (a label run), no {STUDENT} (a student) and no teacher's or bundle's "
        f"{MANIFEST_NAME}. Give an output of `relabel run`, `score`, `train`, `distill` or `export`."
    )


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        held = json.loads(data)
    except ValueError as exc:
        raise ManifestError(f"{where}: not readable as JSON ({type(exc).__name__}). Restore it from a copy.") from exc
    if not isinstance(held, dict):
        raise ManifestError(f"{where}: not a JSON object. Restore it from a copy.")
    return held
