"""Which student a job means, and the student itself, started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from relabel.distill.students.student_manifest import StudentFiles
from relabel.distill.students.student_record import StudentRecord, read_student
from relabel.distill.students.students import StudentModel, load_student, student_file_names, student_files
from relabel.jobs.fetching.folders import fetch_folder
from relabel.jobs.score.student_labeler import StudentArgs
from relabel.manifests.asks import EngineFacts
from relabel.manifests.digests import digest_of, sha256_bytes
from relabel.manifests.errors import ManifestError, MissingExtraError, ModelError
from relabel.manifests.extras import require
from relabel.manifests.records import checked
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.url_files import read_url

STUDENT = "student"
"""Of a score run: its engine, its labeler and the kind of its plan."""
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class Identity:
    """Which student it is, by its record and manifest, without a look at its weights.

    Args:
        files: sha256 of each file that decides what it answers, as the manifest has it.
        manifest_sha256: of its `manifest.json`.
    """

    path: str
    record: StudentRecord
    files: dict[str, str]
    manifest_sha256: str

    @property
    def digest(self) -> str:
        """What `student_digest` gives for files that are those of the manifest."""
        return digest_of(self.files)


def identify(path: str) -> Identity:
    """Read a student's record and manifest.

    Raises:
        ManifestError: the folder holds no student, or no manifest that names its files.
    """
    record = read_student(path)
    file = Path(path) / MANIFEST_NAME
    try:
        data = file.read_bytes()
        named = checked(StudentFiles, json.loads(data)).files
        found = student_file_names(path)
        unnamed = [name for name in found if name not in named]
        missing = sorted(set(named) - set(found))
        files = {name: named[name] for name in found if name in named}
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{path}: a student without {MANIFEST_NAME}: its training has not ended. Run `relabel distill` again."
        ) from exc
    except (OSError, ValueError) as exc:
        raise ManifestError(
            f"{file}: does not name all of the student's files. Restore the folder from a copy, or train again."
        ) from exc
    if missing:
        raise ManifestError(
            f"{path}: {', '.join(missing)} of its {MANIFEST_NAME} is missing. Restore the folder from a copy, or "
            "train again."
        )
    if unnamed:
        raise ManifestError(
            f"{file}: does not name all of the student's files: {', '.join(unnamed)} did not come from its training. "
            "Move it away, restore the folder from a copy, or train again."
        )
    return Identity(path, record, files, sha256_bytes(data))


def local_student(reference: str, storage: Storage, *, cache_dir: Path) -> str:
    """The folder of a student: as it was named, or fetched from a URL into the cache, where it lies by the digest of
    its manifest, so that a student that was trained again is another one.

    Raises:
        ManifestError: no finished student lies at the URL.
        ModelError: it can't be fetched.
    """
    if not is_url(reference):
        return reference
    try:
        data = read_url(f"{reference.rstrip('/')}/{MANIFEST_NAME}", storage)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{reference}: holds no {MANIFEST_NAME}, so no finished student. Give a copy of `relabel distill`'s output."
        ) from exc
    slot = cache_dir / "students" / sha256_bytes(data)[:32]

    def check(folder: Path) -> None:
        if (folder / MANIFEST_NAME).read_bytes() != data:
            raise ModelError(f"{reference}: replaced while it was fetched. Run again, once it stays as it is.")

    if not slot.is_dir():
        fetch_folder(reference, slot, check, storage)
    return str(slot)


def start_student(identity: Identity, args: StudentArgs) -> tuple[StudentModel, EngineFacts]:
    """Load the student on its device, and say what it is.

    Raises:
        ManifestError: a file is not the one that its manifest names.
        MissingExtraError: torch or the device is absent.
    """
    held = student_files(identity.path)
    changed = sorted(name for name in identity.files if held[name] != identity.files[name])
    if changed:
        raise ManifestError(
            f"{identity.path}: {', '.join(changed)} changed since the student was trained (the sha256 is not the "
            "manifest's). Restore the folder from a copy, or train again."
        )
    torch = require("torch", extra="cpu", purpose="relabel score")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MissingExtraError(
            f"--device {device}: torch finds no GPU here. Leave --device out, or run on a machine that has one."
        )
    try:
        student = load_student(identity.path, device=device)
    except RuntimeError as exc:  # torch's word for a device it does not know
        raise MissingExtraError(
            f"--device {device}: torch can't use it ({exc}). `relabel doctor` shows what is here."
        ) from exc
    student.module.to(getattr(torch, args.dtype))
    details = {
        "kind": identity.record.kind,
        "manifest_sha256": identity.manifest_sha256,
        "temperature": identity.record.temperature,
    }
    facts = EngineFacts(
        STUDENT,
        version("torch"),
        identity.record.name,
        identity.digest,
        device=device,
        dtype=args.dtype,
        details=details,
    )
    return student, facts
