"""Garbage in a bundle store: versions that no channel points to any more, and objects that no version names.

Kept are: every version among the last moves of a channel, every version and object younger than the grace time, and
every object of a kept version. The rest is marked by one `gc` and deleted by a later one (see gc_marks.py): first
versions, then their objects.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from relabel.export.addresses import OBJECTS, is_name, object_name
from relabel.export.channels import Channel, channels_of
from relabel.export.gc_marks import Claim, GcMarks, change_gc_marks, load_gc_marks
from relabel.export.versions import load_version
from relabel.manifests.errors import LockHeldError
from relabel.manifests.storage.bundle_store_ports import BundleStore, Entry

SETTLE_S = 24 * 3600.0
"""How long a name stays marked before it is deleted, at most: no publish or channel move may take longer from first
look to end.
"""
RENEW_S = 300.0
TAKE_OVER_S = 900.0
"""A `gc` that has not renewed its claim for so long is dead."""


class Garbage(NamedTuple):
    """What nothing points to.

    Args:
        kept_versions, kept_objects: how many stay.
    """

    versions: list[Entry]
    objects: list[Entry]
    kept_versions: int
    kept_objects: int

    @property
    def names(self) -> list[str]:
        """Versions first: no version may outlive its objects."""
        return [entry.name for entry in (*self.versions, *self.objects)]


class Collected(NamedTuple):
    """What a `gc` found and did.

    Args:
        marked: names on the list now, that a later gc will delete.
        deleted: names that were deleted, or would be.
        swept: leavings of killed uploads that were removed.
    """

    garbage: Garbage
    marked: list[str]
    deleted: list[str]
    deleted_bytes: int
    swept: int


def find_garbage(bundle_store: BundleStore, *, keep: int, grace_s: float) -> Garbage:
    """Look through a bundle store.

    Args:
        keep: how many of a channel's last moves keep their versions.
        grace_s: what is younger stays, seconds.
    Raises:
        ManifestError: a record can't be read; nothing is garbage while one can't.
    """
    now_s = bundle_store.now_s()
    # listed before the records: an object named by a record written later is young
    objects = list(bundle_store.entries(OBJECTS))
    live: set[str] = set()
    versions, kept = [], 0
    for name in bundle_store.folders():
        if not is_name(name):
            continue
        pointed = _pointed(channels_of(bundle_store, name), keep)
        for entry in list(bundle_store.entries(f"{name}/versions")):
            version = load_version(
                bundle_store, name, entry.name.removeprefix(f"{name}/versions/").removesuffix(".json")
            )
            if version.version in pointed or now_s - entry.written_s < grace_s:
                live |= {object_name(file.sha256) for file in version.files}
                kept += 1
            else:
                versions.append(entry)
    dead = [entry for entry in objects if entry.name not in live and now_s - entry.written_s >= grace_s]
    return Garbage(sorted(versions), sorted(dead), kept, len(objects) - len(dead))


def collect(
    bundle_store: BundleStore, *, keep: int, grace_s: float, deletes: bool, on_progress: Callable[[int], None]
) -> Collected:
    """Mark what is garbage now, delete what was marked long enough ago and still is.

    Args:
        deletes: otherwise only say what would happen.
        on_progress: called with each name that was deleted.
    Raises:
        LockHeldError: another gc is at work.
    """
    settle_s = min(grace_s, SETTLE_S)
    garbage = find_garbage(bundle_store, keep=keep, grace_s=grace_s)
    sizes = {entry.name: entry.size_bytes for entry in (*garbage.versions, *garbage.objects)}
    now_s = bundle_store.now_s()
    owner = secrets.token_hex(8)

    def mark(held: GcMarks) -> GcMarks:
        since = {name: held.since.get(name, now_s) for name in garbage.names}
        ripe = [name for name, when in since.items() if now_s - when >= settle_s]
        left = _left_by_another(held, now_s, bundle_store.url)
        claimed = tuple(dict.fromkeys((*left, *ripe)))
        since = {name: when for name, when in since.items() if name not in claimed}
        return GcMarks(since, Claim(owner, now_s, claimed) if claimed else None)

    if not deletes:
        wanted = mark(load_gc_marks(bundle_store)[0])
        names = list(wanted.claim.names) if wanted.claim else []
        return Collected(garbage, sorted(wanted.since), names, sum(sizes.get(name, 0) for name in names), 0)
    wanted = change_gc_marks(bundle_store, mark)
    names = list(wanted.claim.names) if wanted.claim else []
    _delete(bundle_store, owner, names, on_progress)
    swept = bundle_store.sweep(max(grace_s, SETTLE_S))
    return Collected(garbage, sorted(wanted.since), names, sum(sizes.get(name, 0) for name in names), swept)


def _pointed(channels: list[Channel], keep: int) -> set[str]:
    return {move.version for channel in channels for move in channel.moves[-keep:]}


def _left_by_another(held: GcMarks, now_s: float, url: str) -> tuple[str, ...]:
    """Names that a killed gc had claimed.

    Raises:
        LockHeldError: it may be alive.
    """
    if held.claim is None:
        return ()
    if now_s - held.claim.renewed_s < TAKE_OVER_S:
        raise LockHeldError(
            f"{url}: another gc is at work, or was killed less than {TAKE_OVER_S / 60:.0f} minutes ago. Try again "
            "later."
        )
    return held.claim.names


def _delete(bundle_store: BundleStore, owner: str, names: list[str], on_progress: Callable[[int], None]) -> None:
    """Delete what is claimed, versions before objects, and give the claim back."""
    renewed_s = time.monotonic()
    for name in names:
        if time.monotonic() - renewed_s > RENEW_S:
            _renew(bundle_store, owner)
            renewed_s = time.monotonic()
        bundle_store.delete(name)
        on_progress(1)
    if names:
        change_gc_marks(bundle_store, lambda held: GcMarks(held.since, None) if _is_ours(held, owner) else held)


def _renew(bundle_store: BundleStore, owner: str) -> None:
    now_s = bundle_store.now_s()

    def renewed(held: GcMarks) -> GcMarks:
        if held.claim is None or held.claim.owner != owner:
            raise LockHeldError(f"{bundle_store.url}: another gc took over while this one slept. Nothing is lost.")
        return GcMarks(held.since, Claim(owner, now_s, held.claim.names))

    change_gc_marks(bundle_store, renewed)


def _is_ours(held: GcMarks, owner: str) -> bool:
    return held.claim is not None and held.claim.owner == owner
