"""Versions of a published bundle: one record each, written once and last, that names every object the bundle is made
of.

    objects/ab/ab12…                  a file, by its sha256; shared by all versions that hold it
    NAME/versions/VERSION.json        a version: files with sizes and digests, and signatures
    NAME/channels/CHANNEL.json        a pointer (see channels.py)

A version's body never changes. Signatures are added beside it, and each is of the whole body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from export.bundles import MANIFEST_NAME, Bundle, BundleFile, read_files, strict_json
from export.file_names import check_names
from export.signatures import Signature, SigningKey, read_signatures
from manifests.digests import digest_of, readable_json
from manifests.errors import InputError, ManifestError, TransientError, UsageError
from manifests.records import plain
from manifests.storage.bundle_store_ports import BundleStore

VERSION_KIND = "version"
RECORD_FORMAT = 1
OBJECTS = "objects"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SWAPS = 5
"""Tries to add a signature while others add theirs."""


class Address(NamedTuple):
    """What `s3://bucket/models/ecom@stable` says.

    Args:
        url: of the bundle store.
        name: of the bundle in it.
        at: a channel or version, None where there is no `@`.
    """

    url: str
    name: str
    at: str | None


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


def parse_address(text: str) -> Address:
    """Read `URL/NAME`, `URL/NAME@CHANNEL` or `URL/NAME@VERSION`.

    Raises:
        UsageError: no name in it, or one that can't be a name.
    """
    url, slash, last = text.rstrip("/").rpartition("/")
    name, at, what = last.partition("@")
    if not slash:
        url = "."
    if not url or url.endswith(":/") or not name:
        raise UsageError(f"{text}: write URL/NAME or URL/NAME@CHANNEL, for instance s3://bucket/models/ecom@stable.")
    return Address(url, check_name(name, "name"), check_name(what, "channel or version") if at else None)


def check_name(text: str, what: str) -> str:
    """A bundle's, version's or channel's name.

    Raises:
        UsageError: it is none.
    """
    if not is_name(text):
        raise UsageError(
            f"{text!r} can't be a {what}: letters, digits, dots, dashes and underscores, at most 100, not {OBJECTS!r}."
        )
    return text


def is_name(text: str) -> bool:
    """Whether a text can name a bundle, version or channel."""
    return _NAME.fullmatch(text) is not None and text != OBJECTS


def object_name(sha256: str) -> str:
    """Where a file of that digest lies."""
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


def version_name(name: str, version: str) -> str:
    """Where a version's record lies."""
    return f"{name}/versions/{version}.json"


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


def record_bytes(kind: str, body: Mapping[str, Any], signatures: Sequence[Signature]) -> bytes:
    """A record as it is written; the inverse of `read_record`."""
    held = {"kind": kind, "format": RECORD_FORMAT, "body": body, "signatures": plain(signatures)}
    return readable_json(held)


def read_record(data: bytes, kind: str, where: str) -> tuple[dict[str, Any], tuple[Signature, ...]]:
    """Body and signatures of a record.

    Raises:
        ManifestError: it is none of that kind.
    """
    held = strict_json(data, where)
    if held.get("kind") != kind or held.get("format") != RECORD_FORMAT:
        raise ManifestError(
            f"{where}: no {kind} of format {RECORD_FORMAT} (kind {held.get('kind')!r}, format {held.get('format')!r})."
        )
    body = held.get("body")
    if not isinstance(body, dict):
        raise ManifestError(f"{where}: `body` is missing.")
    try:
        return body, read_signatures(held.get("signatures"))
    except ValueError as exc:
        raise ManifestError(f"{where}: {exc}.") from exc


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
