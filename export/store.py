"""The records of a bundle store: addresses such as `NAME@VERSION`, versions, channels that point to them, and a list of
all."""

from __future__ import annotations

import base64
import codecs
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from relabel.export import puller
from relabel.export.bundles import MANIFEST_NAME, read_manifest, translate_refusals
from relabel.export.puller import STABLE, Address, File, Trust
from relabel.manifests import failpoints
from relabel.manifests.errors import (
    ChannelMovedError,
    ConfigError,
    GateError,
    InputError,
    ManifestError,
    TransientError,
    UsageError,
)
from relabel.manifests.files import translate_errors
from relabel.manifests.process import require
from relabel.manifests.records import digest_of, plain, readable_json, sha256_bytes
from relabel.manifests.secrets import keep_secret
from relabel.manifests.store import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from relabel.manifests.objects import Entry

# ------------------------------------------------------------------------------
# Ed25519 signatures of published records: signing keys, trusted keys, and the files that hold them.


_PEM_START = "-----BEGIN "
_AROUND = "\ufeff'\"` \t\r\n"
_MAX_KEY_BYTES = 1 << 16
_PRIMITIVES = "cryptography.hazmat.primitives"
_MAKE = "openssl genpkey -algorithm ed25519"


def pem_of(source: str, what: str) -> tuple[str, bytes]:
    """Where a key comes from, for messages that must not show it, and its bytes.

    Blanks, quotes, a byte order mark around a key and a written-out `\\n` in it, which variables often bring along, do
    no harm.

    Raises:
        ConfigError: neither a PEM text nor the path of a file; what it is is not shown, since it may be a key.
    """
    text = source.strip(_AROUND)
    if _PEM_START in text:
        keep_secret(text, what)
        return what, text.replace("\\r", "").replace("\\n", "\n").encode()
    if not os.path.exists(text):  # noqa: PTH110 (a text may be no path at all)
        keep_secret(text, what)
        raise ConfigError(
            f"{what}: neither a PEM text with its {_PEM_START}line nor the path of a file that is there (is a variable "
            f"not set?). Make one: {_MAKE}."
        )
    with translate_errors(f"read {what} from", Path(text)), Path(text).open("rb") as file:
        held = file.read(_MAX_KEY_BYTES)  # a device may never end
    if held.lstrip().startswith(_PEM_START.encode()):
        keep_secret(held.decode(errors="replace"), f"{what} in {text}")
    return text, held.removeprefix(codecs.BOM_UTF8)


# ------------------------------------------------------------------------------
# Signatures by ed25519: who publishes holds the private key, who pulls is given the public one.
#
# What is signed is a line that names the kind of record and then the canonical JSON of its body, so that a signature of
# one kind is none of another. Keys are PEM as `openssl genpkey -algorithm ed25519` writes them.


Signature = dict[str, str]
"""`algorithm`, `key_id` and `signature` (64 bytes in base64), as a record holds it."""


class SigningKey:
    """A private key.

    Args:
        source: path of a PEM file, or the PEM text itself.
    Raises:
        ConfigError: no unencrypted ed25519 private key there.
        MissingExtraError: the package cryptography is not here.
    """

    def __init__(self, source: str) -> None:
        private_key = require(f"{_PRIMITIVES}.asymmetric.ed25519", extra="sign", purpose="Signing").Ed25519PrivateKey
        serialization = require(f"{_PRIMITIVES}.serialization", extra="sign", purpose="Signing")
        where, pem = pem_of(source, "the signing key")
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as exc:  # TypeError: it is encrypted
            raise ConfigError(f"{where}: no unencrypted PEM private key. Make one: {_MAKE}.") from exc
        if not isinstance(key, private_key):
            raise ConfigError(f"{where}: not an ed25519 key. Make one: {_MAKE}.")
        self._key: Ed25519PrivateKey = key
        self.public_key = key.public_key()
        self.key_id = puller.key_id(self.public_key)

    def sign(self, kind: str, body: Mapping[str, Any]) -> Signature:
        """Sign a record's body."""
        signed = self._key.sign(puller.signed_bytes(kind, body))
        return {"algorithm": "ed25519", "key_id": self.key_id, "signature": base64.b64encode(signed).decode()}


@translate_refusals()
def trusted_keys(sources: Sequence[str]) -> Trust:
    """Public keys, each of which is good enough: give the old and the new one while they change.

    Args:
        sources: paths of PEM files, or PEM text; without one nothing need be signed.
    Raises:
        ConfigError, ManifestError: one is not an ed25519 public key.
        MissingExtraError: the package cryptography is not here.
    """
    if sources:
        require(f"{_PRIMITIVES}.serialization", extra="sign", purpose="Checking a signature")
    return Trust([pem_of(source, "the public key")[1].decode(errors="replace") for source in sources])


# ------------------------------------------------------------------------------
# The records of a bundle store: addresses such as `NAME@VERSION`, versions, channels that point to them, and a list
# of all.


OBJECTS = "objects"


@translate_refusals()
def parse_address(text: str) -> Address:
    """Read `URL/NAME`, `URL/NAME@CHANNEL` or `URL/NAME@VERSION`.

    Raises:
        UsageError: no name in it, or one that can't be a name.
    """
    return puller.parse_address(text)


def check_name(text: str, what: str) -> str:
    """A bundle's, version's or channel's name.

    Raises:
        UsageError: it can't be one.
    """
    if not is_name(text):
        raise UsageError(
            f"{text!r} can't be a {what}: letters, digits, dots, dashes and underscores, at most 100, not {OBJECTS!r}."
        )
    return text


def is_name(text: str) -> bool:
    """Whether a text can name a bundle, version or channel."""
    return puller.fits(text, puller.NAME)


def object_name(sha256: str) -> str:
    """Where a file of that digest lies."""
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A version's or channel's record.

    Args:
        body: what is signed, of the shape that `puller.BODIES` gives.
        signatures: of the whole body; not checked yet.
        tag: of the record as it was read, which a compare and swap holds it to; empty for one that is not written yet.
    """

    kind: ClassVar[str]
    body: dict[str, Any]
    signatures: tuple[Signature, ...] = ()
    tag: str = ""

    @classmethod
    def path_of(cls, name: str, at: str) -> str:
        """Where a record lies."""
        return f"{name}/{cls.kind}s/{at}.json"

    @classmethod
    @translate_refusals()
    def find(cls, bundle_store: Store, name: str, at: str) -> Self | None:
        """Read a record; None if there is none.

        Raises:
            ManifestError: it is damaged, hostile, or of another version or channel than its name says.
        """
        path = cls.path_of(name, at)
        try:
            data, tag = bundle_store.read_tagged(path)
        except FileNotFoundError:
            return None
        found = puller.parse_record(data, cls.kind, name, at, f"{bundle_store.url}/{path}")
        return cls(found.body, tuple(found.signatures), tag)

    @classmethod
    def load(cls, bundle_store: Store, name: str, at: str) -> Self:
        """Read a record.

        Raises:
            InputError: there is none.
            ManifestError: as `find`.
        """
        found = cls.find(bundle_store, name, at)
        if found is None:
            raise InputError(
                f"{bundle_store.url}/{name}: no {cls.kind} {at} there. See what there is: relabel show "
                f"{bundle_store.url}/{name}."
            )
        return found

    @property
    def name(self) -> str:
        """The bundle's."""
        return str(self.body["name"])

    @property
    def path(self) -> str:
        """Where it lies."""
        return self.path_of(self.name, self.body[self.kind])

    @property
    def sha256(self) -> str:
        """Digest of the body; what a channel points to."""
        return digest_of(self.body)

    def record(self) -> bytes:
        """The record as it is written."""
        return readable_json({"kind": self.kind, "format": 1, "body": self.body, "signatures": list(self.signatures)})

    def is_signed_by(self, key: SigningKey) -> bool:
        """Whether this key signed all that the record says; a key id alone proves nothing."""
        return puller.is_signed(self.kind, self.body, self.signatures, {key.key_id: key.public_key})

    def signed(self, key: SigningKey | None) -> Self:
        """The record with a signature by the key, if one is given."""
        if key is None or self.is_signed_by(key):
            return self
        return replace(self, signatures=(*self.signatures, key.sign(self.kind, self.body)))


# ------------------------------------------------------------------------------
# Versions of a published bundle: one record each, written once and last, that names every object of the bundle.
#
#     objects/ab/ab12…                  a file, by its sha256; shared by all versions that hold it
#     NAME/versions/VERSION.json        a version: files with sizes and digests, and signatures
#     NAME/channels/CHANNEL.json        a pointer
#
# A version's body never changes. Signatures are added to it, and each is of the whole body.


_SWAPS = 5
"""Tries to add a signature while others add theirs."""


class Version(StoredRecord):
    """A version; its body never changes."""

    kind = "version"

    @property
    def version(self) -> str:
        """Its own name."""
        return str(self.body["version"])

    @property
    def files(self) -> tuple[File, ...]:
        """All files of the bundle, its manifest among them."""
        return tuple(File(**file) for file in self.body["files"])

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def distinct_files(self) -> list[File]:
        """One file for each digest: what a bundle store holds of it."""
        return list({file.sha256: file for file in self.files}.values())

    @property
    def manifest(self) -> File:
        """The bundle's own manifest."""
        return next(file for file in self.files if file.path == MANIFEST_NAME)


def write_version(bundle_store: Store, version: Version, held: Version | None, key: SigningKey | None) -> bool:
    """Write a version's record if there is none, and add our signature if it lacks it.

    Args:
        held: the record as it was read, None where there was none.
    Returns:
        Whether anything was written.
    Raises:
        ManifestError: the version is there with other contents.
        TransientError: others keep adding signatures.
    """
    if held is None and bundle_store.create(version.path, version.signed(key).record()):
        return True
    for _ in range(_SWAPS):
        held = held or Version.load(bundle_store, version.name, version.version)
        check_same(bundle_store, held, version)
        signed = held.signed(key)
        if signed is held:
            return False
        if bundle_store.replace(version.path, signed.record(), held.tag):
            return True
        held = None
    raise TransientError(
        f"{bundle_store.url}/{version.name}: others keep signing version {version.version}. Run the same command again."
    )


def check_same(bundle_store: Store, held: Version, version: Version) -> None:
    """Refuse to give one version two contents.

    Raises:
        ManifestError: it has others already.
    """
    if held.sha256 != version.sha256:
        raise ManifestError(
            f"{bundle_store.url}/{version.name}: version {version.version} is there with other contents, and versions "
            "never change. Give another --version, or none: then the contents name it."
        )


def check_whole(bundle_store: Store, version: Version) -> None:
    """Check that every object of a version is there with its size; reads no object.

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


# ------------------------------------------------------------------------------
# Channels: moving names such as `stable`, each a small pointer that is replaced only if it is still as it was read.
#
# A pointer holds its whole history, newest last. Its sequence rises by one with every move, a rollback's too, so that
# a reader that has seen 7 can refuse 6: an old pointer that somebody put back. A write carries an id of its own, so
# that a mover whose reply was lost finds its move.


HISTORY_KEPT = 200
"""Moves that a pointer remembers; at 300 bytes each it stays a small object."""

Reason = Literal["publish", "set", "rollback"]


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a channel.

    Args:
        sequence: 1 for the first, one more each time.
        version: what it points to from then on.
        version_sha256: digest of that version's body.
        restores: a rollback's: the sequence of the move that it goes back to.
        moved: when, by the mover's clock; for people.
        write: the write's own id.
    """

    sequence: int
    version: str
    version_sha256: str
    reason: Reason
    restores: int | None
    moved: str
    write: str


class Channel(StoredRecord):
    """A pointer."""

    kind = "channel"

    @property
    def channel(self) -> str:
        """Its own name."""
        return str(self.body["channel"])

    @property
    def moves(self) -> tuple[Move, ...]:
        """All that it remembers, oldest first, at least one; the last says where it points."""
        return tuple(Move(**move) for move in self.body["moves"])

    @property
    def head(self) -> Move:
        """The last move."""
        return self.moves[-1]

    def points_to(self, version: Version, key: SigningKey | None) -> bool:
        """Whether a move there would change nothing: it is there, and is signed by the key if there is one."""
        is_there = (self.head.version, self.head.version_sha256) == (version.version, version.sha256)
        return is_there and (key is None or self.is_signed_by(key))


def channels_of(bundle_store: Store, name: str) -> list[Channel]:
    """All channels of a bundle, by name."""
    return [Channel.load(bundle_store, name, at) for at in sorted(map(stem, bundle_store.entries(f"{name}/channels")))]


def stem(entry: Entry) -> str:
    """What a record's file is named after."""
    return PurePath(entry.name).stem


def check_may_move(held: Channel | None, key: SigningKey | None, where: str) -> None:
    """Refuse to move a signed pointer without a key: everybody who pulls with a key would refuse it from then on.

    Raises:
        UsageError: the pointer is signed and no key was given.
    """
    if held is not None and held.signatures and key is None:
        raise UsageError(f"{where}: this channel is signed. Give --sign-key, or pulls with a key will refuse the move.")


def move_channel(
    bundle_store: Store,
    name: str,
    channel: str,
    held: Channel | None,
    version: Version,
    reason: Reason,
    *,
    key: SigningKey | None,
    restores: int | None = None,
) -> Channel:
    """Point a channel at a version that is whole, if it is still as it was read.

    With a key, a history that this key did not sign is dropped and only its sequence goes on: signing it would make
    true what anybody may have written.

    Args:
        held: the pointer as it was read, None where there was none.
        restores: a rollback's: the sequence of the move that it goes back to.
    Raises:
        ChannelMovedError: another mover was first.
        UsageError: the pointer is signed and no key was given.
    """
    check_may_move(held, key, f"{bundle_store.url}/{name}@{channel}")
    moves = held.moves if held and (key is None or held.is_signed_by(key)) else ()
    move = Move(
        sequence=held.head.sequence + 1 if held else 1,
        version=version.version,
        version_sha256=version.sha256,
        reason=reason,
        restores=restores,
        moved=datetime.now(UTC).isoformat(timespec="seconds"),
        write=secrets.token_hex(8),
    )
    kept = [asdict(one) for one in (*moves, move)[-HISTORY_KEPT:]]
    moved = Channel({"kind": Channel.kind, "name": name, "channel": channel, "moves": kept}).signed(key)
    failpoints.hit("before_channel")
    was_first = (
        bundle_store.replace(moved.path, moved.record(), held.tag)
        if held
        else bundle_store.create(moved.path, moved.record())
    )
    failpoints.hit("after_channel")
    if was_first:
        return moved
    now = Channel.load(bundle_store, name, channel)
    if any(one.write == move.write for one in now.moves):  # our own write, whose reply was lost
        return moved
    raise ChannelMovedError(
        f"{bundle_store.url}/{name}@{channel}: another process moved it to {now.head.version} "
        f"(sequence {now.head.sequence}) in the meantime. "
        "Nothing is lost: check that this is what you want, then run the same command again."
    )


def before(held: Channel, where: str) -> Move:
    """The move that a rollback goes back to: the last one before where the channel points, to another version.

    A rollback of a rollback goes further back, never forth again: a move that restored an earlier one counts as that
    earlier one.

    Raises:
        GateError: there is none.
    """
    position, version = held.head.restores or held.head.sequence, held.head.version_sha256
    for move in reversed(held.moves):
        if move.sequence < position and move.version_sha256 != version:
            return move
    raise GateError(
        f"{where}: points to {held.head.version}, and its history holds nothing earlier. Set it: relabel channel set."
    )


# ------------------------------------------------------------------------------
# What a bundle store holds, as JSON, without changing it: bundles, versions, and where channels point.


def bundles_in(bundle_store: Store) -> list[dict[str, Any]]:
    """Every bundle with its channels and the number of its versions; records are read of channels alone."""
    versions = Counter[str]()
    for entry in bundle_store.entries(""):
        name, _, rest = entry.name.partition("/")
        if is_name(name) and rest.startswith(("versions/", "channels/")):
            versions[name] += rest.startswith("versions/")
    return [
        {
            "name": name,
            "versions": versions[name],
            "channels": [_about_channel(one) for one in channels_of(bundle_store, name)],
        }
        for name in sorted(versions)
    ]


def bundle_in(bundle_store: Store, name: str) -> dict[str, Any]:
    """One bundle: its versions, newest first, and its channels with their history.

    Raises:
        InputError: there is none of that name.
    """
    entries = sorted(bundle_store.entries(f"{name}/versions"), key=lambda entry: (-entry.written_s, entry.name))
    channels = channels_of(bundle_store, name)
    if not entries and not channels:
        raise InputError(
            f"{bundle_store.url}: no bundle {name} there. See what there is: relabel list {bundle_store.url}; or, if "
            f"{name} is a bundle store itself: relabel list {bundle_store.url}/{name}"
        )
    versions = [Version.load(bundle_store, name, stem(entry)) for entry in entries]
    pointed = [(channel.channel, channel.head.version) for channel in channels]
    return {
        "name": name,
        "versions": [
            {**_about(version), "channels": [name for name, at in pointed if at == version.version]}
            for version in versions
        ],
        "channels": [{**_about_channel(channel), "moves": plain(channel.moves)} for channel in channels],
    }


def facts_of(bundle_store: Store, version: Version) -> dict[str, Any]:
    """What a published version's own manifest says of it, without its files.

    Raises:
        ManifestError: its manifest is not the one published.
    """
    manifest = version.manifest
    name = object_name(manifest.sha256)
    try:
        data = bundle_store.read_tagged(name).data
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{bundle_store.url}/{name}: the manifest of version {version.version} is missing. Publish the bundle "
            "again."
        ) from exc
    if sha256_bytes(data) != manifest.sha256:
        raise ManifestError(
            f"{bundle_store.url}/{name}: is not the manifest that was published. Publish the bundle again."
        )
    facts, _ = read_manifest(data, f"{bundle_store.url}/{name}")
    return {key: value for key, value in facts.items() if key != "files"}


def version_in(bundle_store: Store, address: Address) -> dict[str, Any]:
    """One version: its files, and what its own manifest says of it.

    Raises:
        InputError: neither a channel nor a version of that name.
        ManifestError: its manifest is not the one published.
    """
    at = address.at or STABLE
    channel = Channel.find(bundle_store, address.name, at)
    version = Version.load(bundle_store, address.name, channel.head.version if channel else at)
    return {
        **_about(version),
        "channel": _about_channel(channel) if channel else None,
        "list": plain(version.files),
        "facts": facts_of(bundle_store, version),
    }


def _about(version: Version) -> dict[str, Any]:
    return {
        "version": version.version,
        "sha256": version.sha256,
        "files": len(version.files),
        "size_bytes": version.size_bytes,
        "signed_by": [signature["key_id"] for signature in version.signatures],
    }


def _about_channel(channel: Channel) -> dict[str, Any]:
    head = channel.head
    return {
        "channel": channel.channel,
        "version": head.version,
        "sequence": head.sequence,
        "moved": head.moved,
        "reason": head.reason,
        "signed_by": [signature["key_id"] for signature in channel.signatures],
    }
