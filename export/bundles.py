"""A bundle: one folder with a student ready to deploy, and `manifest.json`, which says what every file in it must be.

`seal_bundle` writes the manifest last, `open_bundle` believes a folder only after each name, size and digest was held
against it. The manifest holds no time, so that the same files and facts make the same bytes, and so the same version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relabel.export.bundle_files import BundleFile, read_files, strict_json
from relabel.export.bundle_names import names_in
from relabel.export.file_names import check_names
from relabel.manifests.digests import readable_json, sha256_bytes, sha256_file
from relabel.manifests.errors import ManifestError
from relabel.manifests.storage.bundle_store_ports import MAX_RECORD_BYTES
from relabel.manifests.storage.disk_errors import translate_errors
from relabel.manifests.storage.local_run_store import LocalRunStore

MANIFEST_NAME = "manifest.json"
BUNDLE_FORMAT = 1
OWN_KEYS = ("kind", "format", "files")
"""Keys of the manifest that `seal_bundle` writes itself."""
VERSION_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder that was held against its manifest.

    Args:
        folder: where it lies.
        facts: the whole manifest.
        files: what it lists; the manifest itself is not among them.
        manifest: the manifest as a file.
    """

    folder: Path
    facts: Mapping[str, Any]
    files: tuple[BundleFile, ...]
    manifest: BundleFile

    @property
    def name(self) -> str:
        """What the bundle calls itself, the default of where it is published."""
        return str(self.facts["name"])

    @property
    def own_facts(self) -> dict[str, Any]:
        """The manifest but for what `seal_bundle` writes itself: to seal the bundle anew with whatever it holds."""
        return {key: value for key, value in self.facts.items() if key not in OWN_KEYS}

    @property
    def version(self) -> str:
        """Its version by default: the first digits of its manifest's sha256."""
        return self.manifest.sha256[:VERSION_DIGITS]

    @property
    def all_files(self) -> tuple[BundleFile, ...]:
        """Every file to be moved, the manifest last."""
        return (*self.files, self.manifest)


def seal_bundle(folder: Path, facts: Mapping[str, Any]) -> Bundle:
    """Write the manifest over what lies in a folder; an earlier manifest is replaced.

    Args:
        facts: `name` and `lineage`, and any further sections (heads, inputs, parity, licence …), as plain JSON
            values without times.
    Raises:
        ManifestError: a file's name, or something other than a plain file, cannot be in a bundle; a fact is missing or
            not JSON.
    """
    if taken := [key for key in OWN_KEYS if key in facts]:
        raise ManifestError(f"{folder}: the key `{taken[0]}` of a bundle's manifest is not free.")
    LocalRunStore(folder).sweep("")
    names = [name for name in names_in(folder) if name != MANIFEST_NAME]
    check_names([*names, MANIFEST_NAME], str(folder))
    files = [BundleFile(name, (folder / name).stat().st_size, sha256_file(folder / name)) for name in names]
    held = {"kind": "bundle", "format": BUNDLE_FORMAT, **facts, "files": [file._asdict() for file in files]}
    try:
        data = readable_json(held)
    except (TypeError, ValueError) as exc:
        raise ManifestError(f"{folder}: a fact of the bundle can't be written as JSON ({exc}).") from exc
    read_manifest(data, f"{folder}/{MANIFEST_NAME}")
    LocalRunStore(folder).put(MANIFEST_NAME, data)
    return open_bundle(folder, check_bytes=False)


def open_bundle(folder: Path, *, check_bytes: bool = True) -> Bundle:
    """Hold a folder against its manifest: the same files, no more and no fewer, each with its size and digest.

    Args:
        check_bytes: also read every file and compare its sha256; otherwise names and sizes alone.
    Raises:
        ManifestError: says what is missing, strange or damaged.
    """
    data = _manifest_bytes(folder)
    facts, files = read_manifest(data, f"{folder}/{MANIFEST_NAME}")
    listed = {file.path: file for file in files}
    with translate_errors("look into", folder):
        found = names_in(folder)
    if missing := sorted(listed.keys() - set(found)):
        raise ManifestError(
            f"{folder}: {missing[0]} is missing, and {len(missing) - 1} more. Export or pull the bundle again."
        )
    if strange := sorted(set(found) - listed.keys() - {MANIFEST_NAME}):
        raise ManifestError(
            f"{folder}: {strange[0]} is not in the manifest, and {len(strange) - 1} more. Move it away, or seal the "
            "bundle again."
        )
    for file in files:
        check_file(folder / file.path, file, check_bytes=check_bytes)
    manifest = BundleFile(MANIFEST_NAME, len(data), sha256_bytes(data))
    return Bundle(folder, facts, files, manifest)


def check_file(path: Path, file: BundleFile, *, check_bytes: bool) -> None:
    """Hold one file against what is written of it.

    Raises:
        ManifestError: it is another file.
    """
    with translate_errors("read", path):
        size = path.stat().st_size
        if size != file.size_bytes:
            raise ManifestError(
                f"{path}: {size:,} bytes, its manifest says {file.size_bytes:,}. Export or pull the bundle again."
            )
        if check_bytes and (found := sha256_file(path)) != file.sha256:
            raise ManifestError(
                f"{path}: sha256 {found[:16]}…, its manifest says {file.sha256[:16]}…. Export or pull the bundle again."
            )


def read_manifest(data: bytes, where: str) -> tuple[dict[str, Any], tuple[BundleFile, ...]]:
    """A manifest's facts and files, everything checked that can be without the files.

    Raises:
        ManifestError: it is damaged, hostile, or of another format.
    """
    held = strict_json(data, where)
    if held.get("kind") != "bundle":
        raise ManifestError(f"{where}: not the manifest of a bundle (kind {held.get('kind')!r}).")
    if held.get("format") != BUNDLE_FORMAT:
        raise ManifestError(f"{where}: a bundle of format {held.get('format')!r}; this relabel reads {BUNDLE_FORMAT}.")
    name = held.get("name")
    if not isinstance(name, str) or not name:
        raise ManifestError(f"{where}: `name` is missing: what the bundle is called.")
    if not isinstance(held.get("lineage"), dict):
        raise ManifestError(f"{where}: `lineage` is missing: what the bundle was made of.")
    files = read_files(held.get("files"), where)
    check_names([*(file.path for file in files), MANIFEST_NAME], where)
    return held, files


def _manifest_bytes(folder: Path) -> bytes:
    path = folder / MANIFEST_NAME
    try:
        with translate_errors("read", path, is_missing_fine=True):
            if not path.is_file() and path.exists():
                raise ManifestError(f"{path}: is not a plain file. Export or pull the bundle again.")
            if path.stat().st_size > MAX_RECORD_BYTES:
                raise ManifestError(f"{path}: too big to be a manifest.")
            return path.read_bytes()
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{folder}: no {MANIFEST_NAME} there, so no bundle. Give the folder that an export wrote."
        ) from exc
