"""Versions of a published bundle: one record each, written once and last, that names every object the bundle is made
of.

    objects/ab/ab12…                  a file, by its sha256; shared by all versions that hold it
    NAME/versions/VERSION.json        a version: files with sizes and digests, and signatures
    NAME/channels/CHANNEL.json        a pointer (see channels.py)

A version's body never changes. Signatures are added beside it, and each is of the whole body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relabel.export.addresses import object_name, version_name
from relabel.export.bundle_files import BundleFile, read_files
from relabel.export.bundles import MANIFEST_NAME, Bundle
from relabel.export.file_names import check_names
from relabel.export.signatures import Signature, SigningKey
from relabel.export.signed_records import read_record, record_bytes
from relabel.manifests.digests import digest_of
from relabel.manifests.errors import InputError, ManifestError, TransientError
from relabel.manifests.storage.bundle_store_ports import BundleStore

VERSION_KIND = "version"
_SWAPS = 5
"""Tries to add a signature while others add theirs."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version as its record tells it.

    Args:
        files: all files of the bundle, its manifest among them.
        signatures: of the body; not checked yet.
        tag: of the record as it was read; empty for one that is not written yet.
    """

    name: str
    version: str
    files: tuple[BundleFile, ...]
    signatures: tuple[Signature, ...] = ()
    tag: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """What is signed, and never changes."""
        files = [file._asdict() for file in self.files]
        return {"kind": VERSION_KIND, "name": self.name, "version": self.version, "files": files}

    @property
    def sha256(self) -> str:
        """Digest of the body; what a channel points to."""
        return digest_of(self.body)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def distinct_files(self) -> list[BundleFile]:
        """One file for each digest: what a bundle store holds of it."""
        return list({file.sha256: file for file in self.files}.values())

    @property
    def manifest(self) -> BundleFile:
        """The bundle's own manifest."""
        return next(file for file in self.files if file.path == MANIFEST_NAME)

    def record(self) -> bytes:
        """The version as it is written."""
        return record_bytes(VERSION_KIND, self.body, self.signatures)


def version_of(bundle: Bundle, name: str, version: str | None) -> Version:
    """The version that a bundle becomes when it is published."""
    return Version(name, version or bundle.version, bundle.all_files)


def load_version(bundle_store: BundleStore, name: str, version: str) -> Version:
    """Read a version's record.

    Raises:
        InputError: there is no such version.
        ManifestError: the record is damaged, hostile, or of another version than its name says.
    """
    found = find_version(bundle_store, name, version)
    if found is None:
        raise InputError(
            f"{bundle_store.url}/{name}: no version {version} there. See what there is: relabel show "
            f"{bundle_store.url}/{name}."
        )
    return found


def find_version(bundle_store: BundleStore, name: str, version: str) -> Version | None:
    """`load_version`, or None if there is none."""
    where = f"{bundle_store.url}/{version_name(name, version)}"
    try:
        data, tag = bundle_store.read(version_name(name, version))
    except FileNotFoundError:
        return None
    body, signatures = read_record(data, VERSION_KIND, where)
    files = read_files(body.get("files"), where)
    paths = [file.path for file in files]
    check_names(paths, where)
    if MANIFEST_NAME not in paths:
        raise ManifestError(f"{where}: lists no {MANIFEST_NAME}.")
    found = Version(name, version, files, signatures, tag)
    if found.body != body:
        raise ManifestError(
            f"{where}: is the record of {body.get('name')!r} version {body.get('version')!r}, or holds more than it "
            "may."
        )
    return found


def write_version(bundle_store: BundleStore, version: Version, held: Version | None, key: SigningKey | None) -> bool:
    """Write a version's record if there is none, and add our signature if it lacks it.

    Args:
        held: the record as it was read, None where there was none.
    Returns:
        Whether anything was written.
    Raises:
        ManifestError: the version is there with other contents.
        TransientError: others keep adding signatures.
    """
    name = version_name(version.name, version.version)
    if held is None and bundle_store.create(name, _signed(version, key).record()):
        return True
    for _ in range(_SWAPS):
        held = held or load_version(bundle_store, version.name, version.version)
        check_same(bundle_store, held, version)
        signed = _signed(held, key)
        if signed.signatures == held.signatures:
            return False
        if bundle_store.replace(name, signed.record(), held.tag):
            return True
        held = None
    raise TransientError(
        f"{bundle_store.url}/{version.name}: others keep signing version {version.version}. Run the same command again."
    )


def check_same(bundle_store: BundleStore, held: Version, version: Version) -> None:
    """Refuse to give one version two contents.

    Raises:
        ManifestError: it has others already.
    """
    if held.sha256 != version.sha256:
        raise ManifestError(
            f"{bundle_store.url}/{version.name}: version {version.version} is there with other contents, and versions "
            "never change. Give another --version, or none: then the contents name it."
        )


def check_whole(bundle_store: BundleStore, version: Version) -> None:
    """Look whether every object of a version is there with its size; reads no object.

    Raises:
        ManifestError: one is missing or cut off.
    """
    sizes = bundle_store.sizes([object_name(file.sha256) for file in version.distinct_files])
    for file in version.files:
        found = sizes[object_name(file.sha256)]
        if found != file.size_bytes:
            what = "is missing" if found is None else f"holds {found:,} bytes of {file.size_bytes:,}"
            raise ManifestError(
                f"{bundle_store.url}/{version.name}: version {version.version} is not whole: "
                f"{file.path} ({object_name(file.sha256)}) {what}. Publish the bundle again."
            )


def _signed(version: Version, key: SigningKey | None) -> Version:
    if key is None or key.has_signed(VERSION_KIND, version.body, version.signatures):
        return version
    signatures = (*version.signatures, key.sign(VERSION_KIND, version.body))
    return Version(version.name, version.version, version.files, signatures, version.tag)
