"""The records of a bundle store: addresses such as `NAME@VERSION`, versions, and channels that point to them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from relabel.export.bundles import MANIFEST_NAME, Bundle, BundleFile, check_names, is_sha256, read_files, strict_json
from relabel.export.signatures import Signature, SigningKey, read_signatures
from relabel.manifests import failpoints
from relabel.manifests.bundle_store import BundleStore
from relabel.manifests.errors import ChannelMovedError, GateError, InputError, ManifestError, TransientError, UsageError
from relabel.manifests.records import checked, digest_of, fault_of, plain, readable_json

# ------------------------------------------------------------------------------
# `NAME@VERSION` in a bundle store, and the names of what lies there.


OBJECTS = "objects"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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


# ------------------------------------------------------------------------------
# Records of a bundle store: one line of JSON that may be signed.


RECORD_FORMAT = 1


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


# ------------------------------------------------------------------------------
# Versions of a published bundle: one record each, written once and last, that names every object the bundle is made
# of.
#
#     objects/ab/ab12…                  a file, by its sha256; shared by all versions that hold it
#     NAME/versions/VERSION.json        a version: files with sizes and digests, and signatures
#     NAME/channels/CHANNEL.json        a pointer (see channels.py)
#
# A version's body never changes. Signatures are added beside it, and each is of the whole body.


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


# ------------------------------------------------------------------------------
# Channels: moving names such as `stable`, each a small pointer that is replaced only if it is still as it was read.
#
# A pointer holds its whole history, newest last. Its sequence rises by one with every move, a rollback's too, so that
# whoever has seen 7 can refuse 6: an old pointer that somebody put back. A write carries an id of its own, so that a
# mover whose reply was lost finds its move.


CHANNEL_KIND = "channel"
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


@dataclass(frozen=True, slots=True)
class Channel:
    """A pointer as it was read.

    Args:
        moves: oldest first, at least one; the last says where it points.
        signatures: of the body; not checked yet.
        tag: what a compare and swap holds it to; empty for one that is not written yet.
    """

    name: str
    channel: str
    moves: tuple[Move, ...]
    signatures: tuple[Signature, ...] = ()
    tag: str = ""

    @property
    def head(self) -> Move:
        """The last move."""
        return self.moves[-1]

    @property
    def body(self) -> dict[str, Any]:
        """What is signed: name, channel and all moves it remembers."""
        return {
            "kind": CHANNEL_KIND,
            "name": self.name,
            "channel": self.channel,
            "moves": [asdict(move) for move in self.moves],
        }

    def record(self) -> bytes:
        """The pointer as it is written."""
        return record_bytes(CHANNEL_KIND, self.body, self.signatures)

    def points_to(self, version: Version, key: SigningKey | None) -> bool:
        """Whether a move there would change nothing: it is there, and is signed by the key if there is one."""
        is_there = (self.head.version, self.head.version_sha256) == (version.version, version.sha256)
        return is_there and (key is None or self.is_signed_by(key))

    def is_signed_by(self, key: SigningKey) -> bool:
        """Whether this key signed all that the pointer says, its history too."""
        return key.has_signed(CHANNEL_KIND, self.body, self.signatures)


def channel_name(name: str, channel: str) -> str:
    """Where a pointer lies."""
    return f"{name}/channels/{channel}.json"


def load_channel(bundle_store: BundleStore, name: str, channel: str) -> Channel:
    """Read a pointer.

    Raises:
        InputError: there is no such channel.
        ManifestError: it is damaged, or another channel's.
    """
    found = find_channel(bundle_store, name, channel)
    if found is None:
        raise InputError(
            f"{bundle_store.url}/{name}: no channel {channel} there. See what there is: relabel show "
            f"{bundle_store.url}/{name}."
        )
    return found


def find_channel(bundle_store: BundleStore, name: str, channel: str) -> Channel | None:
    """`load_channel`, or None if there is none."""
    where = f"{bundle_store.url}/{channel_name(name, channel)}"
    try:
        data, tag = bundle_store.read(channel_name(name, channel))
    except FileNotFoundError:
        return None
    body, signatures = read_record(data, CHANNEL_KIND, where)
    try:
        moves = checked(tuple[Move, ...], body.get("moves"))
    except ValueError as exc:
        raise ManifestError(f"{where}: `moves` is off ({fault_of(exc)}).") from exc
    found = Channel(name, channel, moves, signatures, tag)
    if not moves or found.body != body:
        raise ManifestError(
            f"{where}: is the pointer of {body.get('name')!r} channel {body.get('channel')!r}, or holds more than it "
            "may."
        )
    sequences = [move.sequence for move in moves]
    if sequences != list(range(sequences[0], sequences[0] + len(moves))) or sequences[0] < 1 or sequences[-1] >= 2**53:
        raise ManifestError(f"{where}: its sequence does not rise by one with every move.")
    for move in moves:
        if not is_name(move.version) or not is_sha256(move.version_sha256):
            raise ManifestError(f"{where}: a move names no version and digest.")
        if not (move.moved + move.write).isprintable() or len(move.moved + move.write) > 100:
            raise ManifestError(f"{where}: a move names its time or author in an unknown form.")
    return found


def channels_of(bundle_store: BundleStore, name: str) -> list[Channel]:
    """All channels of a bundle, by name."""
    folder = f"{name}/channels"
    names = sorted(
        entry.name.removeprefix(f"{folder}/").removesuffix(".json") for entry in bundle_store.entries(folder)
    )
    return [load_channel(bundle_store, name, channel) for channel in names]


def check_may_move(held: Channel | None, key: SigningKey | None, where: str) -> None:
    """Refuse to move a signed pointer without a key: everybody who pulls with a key would refuse it from then on.

    Raises:
        UsageError: the pointer is signed and no key was given.
    """
    if held is not None and held.signatures and key is None:
        raise UsageError(f"{where}: this channel is signed. Give --sign-key, or pulls with a key will refuse the move.")


def move_channel(
    bundle_store: BundleStore,
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

    With a key, a history that this key did not sign is left behind and only its sequence goes on: signing it would make
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
    moved = Channel(name, channel, (*moves, move)[-HISTORY_KEPT:])
    signatures = (key.sign(CHANNEL_KIND, moved.body),) if key else ()
    moved = Channel(name, channel, moved.moves, signatures)
    path = channel_name(name, channel)
    failpoints.hit("before_channel")
    was_first = (
        bundle_store.replace(path, moved.record(), held.tag) if held else bundle_store.create(path, moved.record())
    )
    failpoints.hit("after_channel")
    if was_first:
        return moved
    now = load_channel(bundle_store, name, channel)
    if any(one.write == move.write for one in now.moves):  # our own write, whose reply was lost
        return moved
    raise ChannelMovedError(
        f"{bundle_store.url}/{name}@{channel}: another process moved it to {now.head.version} "
        f"(sequence {now.head.sequence}) in the meantime. "
        "Nothing is lost: check that this is what you want, then run the same command again."
    )


def left_by_rollback(channel: Channel, known: Collection[str], last: tuple[int, str] | None) -> set[str]:
    """Versions that a channel left by a rollback, by digest. One that it was pointed to again since is none of them.

    Args:
        known: what this said when the channel was seen last: a pointer forgets moves.
        last: sequence and version that it had then.
    """
    found = set(known)
    at = last[1] if last and last[0] == channel.moves[0].sequence - 1 else None
    for move in channel.moves:
        if at is not None and move.reason == "rollback":
            found.add(at)
        at = move.version_sha256
        found.discard(at)
    return found


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
