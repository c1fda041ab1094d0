"""Whether a folder that serves is still what was pulled: each file held against the manifest, by its stamp or by its
bytes.

A stamp is what the file system says of a file: size, inode, time of the last write, and of the last change of any kind.
The last one (ctime) can't be set by hand, so a write that puts size and mtime back shows all the same. Bytes that were
proven are believed for as long as their stamp stays; a disk that rots without a write is found by reading all bytes
alone (`pull --check`, `relabel verify`).
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from relabel.export.bundle_files import BundleFile
from relabel.export.bundle_names import entries_in
from relabel.export.bundles import MANIFEST_NAME, read_manifest
from relabel.manifests.digests import BLOCK_BYTES
from relabel.manifests.errors import ManifestError

YOUNG_NS = 100_000_000
"""A file that changed less than this ago gets no stamp, ns: within a tick of the file system's clock it could change
again unseen.
"""

Stamps = Mapping[str, Sequence[int]]
"""By name: size, inode, mtime and ctime in ns, as they were when the bytes were proven."""


class Fault(NamedTuple):
    """What is wrong with one file; the name is relative to the folder that was looked at."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found.

    Args:
        faults: none where the folder is whole.
        stamps: of every file whose bytes are proven, now or earlier.
    """

    faults: list[Fault] = field(default_factory=list)
    stamps: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, what: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(name, what))


def prove(folder: Path, manifest_sha256: str, stamps: Stamps) -> Proof:
    """Hold a folder against the manifest that it was pulled with; writes nothing.

    Args:
        stamps: of an earlier proof; empty to read all bytes.
    """
    proof = Proof()
    if folder.is_symlink() or not folder.is_dir():
        proof.add(folder.name, "is not a folder" if os.path.lexists(folder) else "is missing")
        return proof
    try:
        found = dict(entries_in(folder))
    except OSError as exc:
        proof.add(folder.name, f"can't be listed ({exc.strerror})")
        return proof
    _prove_file(proof, folder, BundleFile(MANIFEST_NAME, -1, manifest_sha256), found, stamps)
    if proof.faults:
        return proof
    try:
        _, files = read_manifest((folder / MANIFEST_NAME).read_bytes(), f"{folder}/{MANIFEST_NAME}")
    except (ManifestError, OSError) as exc:
        proof.add(MANIFEST_NAME, f"is not a manifest ({exc})")
        return proof
    for file in files:
        _prove_file(proof, folder, file, found, stamps)
    listed = {MANIFEST_NAME, *(file.path for file in files)}
    for name in sorted(found.keys() - listed):
        proof.add(name, "is not in the manifest")
    for above in sorted({parent for name in listed for parent in Path(name).parents}):
        if (folder / above).is_dir() and (folder / above).stat().st_mode & 0o500 != 0o500:
            proof.add(above.as_posix(), "can't be entered (its mode)")
    return proof


def stamp_of(found: os.stat_result) -> list[int]:
    """What is kept of a file that was proven."""
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _prove_file(
    proof: Proof, folder: Path, file: BundleFile, found: Mapping[str, os.stat_result], stamps: Stamps
) -> None:
    """Note a file's fault, or its stamp. A size below 0 is not known."""
    name, held = file.path, found.get(file.path)
    if held is None:
        proof.add(name, "is missing")
    elif not stat.S_ISREG(held.st_mode):
        proof.add(name, "is not a plain file")
    elif not held.st_mode & stat.S_IRUSR:
        proof.add(name, "can't be read (its mode)")
    elif 0 <= file.size_bytes != held.st_size:
        proof.add(name, f"has {held.st_size:,} bytes, its manifest says {file.size_bytes:,}")
    elif list(stamps.get(name, ())) == stamp_of(held):
        proof.stamps[name] = stamp_of(held)
    else:
        try:
            sha256, stamp = _digest(folder / name)
        except OSError as exc:
            proof.add(name, f"can't be read ({exc.strerror})")
            return
        if sha256 != file.sha256:
            proof.add(name, f"has sha256 {sha256[:16]}…, it was pulled with {file.sha256[:16]}…")
        elif stamp is not None:
            proof.stamps[name] = stamp


def _digest(path: Path) -> tuple[str, list[int] | None]:
    """sha256 of a file, and the stamp that these bytes have; None where they may have changed under the reader."""
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 (of a descriptor)
        before, now_ns = os.fstat(file.fileno()), time.time_ns()
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
        is_settled = stamp_of(os.fstat(file.fileno())) == stamp_of(before) and now_ns - before.st_ctime_ns > YOUNG_NS
    return digest.hexdigest(), stamp_of(before) if is_settled else None
