"""What a report is about: label runs, teachers, students, bundles and trainings that are not finished, opened from a
folder or URL, each known by what lies in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from relabel.distill.students.student_manifest import StudentManifest, read_student_manifest
from relabel.distill.teachers.teacher_manifest import read_teacher_manifest
from relabel.export.bundles import read_manifest
from relabel.export.parity_records import Parity, read_parity
from relabel.export.student_facts import StudentFacts, read_student_facts
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.jobs.report.teachers import TeacherArtifact
from relabel.jobs.report.trainings import TrainingArtifact, replacing_training, unfinished_training
from relabel.manifests.digests import digest_of, sha256_bytes
from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.records import read_record
from relabel.manifests.runs.plans import PLAN_NAME, load_plan, refuse_rounds
from relabel.manifests.runs.run_manifest import MANIFEST_NAME
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url, place_of, scheme_of
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there
from relabel.manifests.storage.run_stores import open_run_store

STUDENT = "student.json"


@dataclass(frozen=True)
class ShownRecord:
    """What a page shows of `student.json`."""

    kind: str
    name: str
    heads: dict[str, int]
    max_tokens: int


@dataclass
class StudentArtifact:
    """A student's folder."""

    path: str
    store: RunStore
    record: ShownRecord
    manifest: StudentManifest | None
    name: str

    @property
    def digest(self) -> str:
        """Over its files, as its manifest names them: what scores and bundles call it by
        (`distill.students.students.student_digest`).
        """
        return digest_of((self.manifest and self.manifest.files) or {})


@dataclass
class BundleArtifact:
    """A bundle, by its manifest; its files are not held against it (`relabel pull` and `load.py` do)."""

    path: str
    store: RunStore
    facts: dict[str, Any]
    manifest_sha256: str
    name: str

    @cached_property
    def student(self) -> StudentFacts:
        """Its student, and what that was made of."""
        return read_student_facts(self.facts, f"{self.path}/{MANIFEST_NAME}")

    @cached_property
    def parity(self) -> Parity | None:
        """How near its models are to the student; None where its manifest does not say."""
        held = self.facts.get("parity")
        return read_parity(held, f"{self.path}/{MANIFEST_NAME}") if held else None


Artifact: TypeAlias = RunArtifact | TeacherArtifact | StudentArtifact | BundleArtifact | TrainingArtifact


def open_artifacts(
    paths: tuple[str, ...] | list[str], storage: Storage, *, cache_dir: Path | None = None
) -> list[Artifact]:
    """Open every path; two of one name are distinguished by their paths. Beside a model stands the training that is to
    replace it, as far as that has come.

    Args:
        cache_dir: where models that go to a URL are trained; None for the default.
    Raises:
        UsageError: one place twice, however it is spelled.
        InputError: a path holds nothing that a report knows.
        TransientError: a training that has written no checkpoint yet.
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
    found: list[Artifact] = []
    for path in paths:
        found.append(open_artifact(path, storage, cache_dir=cache_dir))
        if isinstance(found[-1], TeacherArtifact | StudentArtifact):
            found += replacing_training(path, cache_dir=cache_dir)
    for kind in (RunArtifact, TeacherArtifact, StudentArtifact, BundleArtifact, TrainingArtifact):
        same = [one for one in found if isinstance(one, kind)]
        names = [one.name for one in same]
        for one in same:
            if names.count(one.name) > 1:
                one.name = f"{one.name} ({one.path})"
    return found


def open_artifact(path: str, storage: Storage, *, cache_dir: Path | None = None) -> Artifact:
    """What lies at a path.

    Args:
        cache_dir: where models that go to a URL are trained; None for the default.
    Raises:
        InputError: nothing that a report knows.
        TransientError: a training that has written no checkpoint yet.
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
        return RunArtifact(path, store, storage, plan, plan.name, read_if_there(store, MANIFEST_NAME))
    manifest = read_if_there(store, MANIFEST_NAME)
    # first: the files of a model that is being written are not whole yet
    if manifest is None and (training := unfinished_training(path, cache_dir=cache_dir)) is not None:
        return training
    record = read_if_there(store, STUDENT)
    if record is not None:
        file = f"{path}/{STUDENT}"
        shown = read_record(ShownRecord, record, file, "not a student's record", "Restore it, or train again.")
        where = f"{path}/{MANIFEST_NAME}"
        says_how = manifest is not None and "kind" in _object(
            manifest, where
        )  # else it names the student's files alone
        held = read_student_manifest(manifest, where) if manifest is not None and says_how else None
        return StudentArtifact(path, store, shown, held, shown.name)
    kind = None if manifest is None else _object(manifest, f"{path}/{MANIFEST_NAME}").get("kind")
    if manifest is not None and kind == "teacher":
        teacher = read_teacher_manifest(manifest, f"{path}/{MANIFEST_NAME}")
        return TeacherArtifact(path, store, teacher, teacher.name)
    if manifest is not None and kind == "bundle":
        facts, _ = read_manifest(manifest, f"{path}/{MANIFEST_NAME}")
        return BundleArtifact(path, store, facts, sha256_bytes(manifest), str(facts["name"]))
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
