"""Channels: moving names such as `stable`, each a small pointer that is replaced only if it is still as it was read.

A pointer holds its whole history, newest last. Its sequence rises by one with every move, a rollback's too, so that
whoever has seen 7 can refuse 6: an old pointer that somebody put back. A write carries an id of its own, so that a
mover whose reply was lost finds its move.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from relabel.export.addresses import is_name
from relabel.export.bundle_files import is_sha256
from relabel.export.signatures import Signature, SigningKey
from relabel.export.signed_records import read_record, record_bytes
from relabel.export.versions import Version
from relabel.manifests import failpoints
from relabel.manifests.errors import ChannelMovedError, GateError, InputError, ManifestError, UsageError
from relabel.manifests.records import checked, fault_of
from relabel.manifests.storage.bundle_store_ports import BundleStore

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
