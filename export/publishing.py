"""Publishing to a bundle store: uploads of versions, moves and rollbacks of channels, and garbage collection in two
phases, which spares what a publisher claims."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from relabel.export.bundles import Bundle, translate_refusals
from relabel.export.puller import File, Progress, strict_json
from relabel.export.store import (
    OBJECTS,
    Channel,
    SigningKey,
    Version,
    before,
    channels_of,
    check_may_move,
    check_name,
    check_same,
    check_whole,
    facts_of,
    is_name,
    move_channel,
    object_name,
    stem,
    write_version,
)
from relabel.manifests import failpoints
from relabel.manifests.errors import GateError, InputError, LockHeldError, ManifestError, StoreError, TransientError
from relabel.manifests.files import translate_errors
from relabel.manifests.objects import Entry
from relabel.manifests.records import checked, fault_of, readable_json
from relabel.manifests.store import Held, Store, digest_of_blocks

# ------------------------------------------------------------------------------
# What `gc` has marked: names of objects and versions that nothing points to, on their way out in two steps.
#
# A name is first marked, in one small record that is replaced by compare and swap; a later `gc` claims it, and only
# then deletes. Who is about to rely on a name (a publisher that finds an object already there, a channel set to an
# old version) first takes it off the list. So a name is either spared or claimed, never both; and no clock but the
# bundle store's decides.


RECORD_NAME = "gc.json"
KIND = "gc"
_SWAPS = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """What one `gc` is deleting, or was when it was killed.

    Args:
        owner: made up by that `gc`.
        renewed_s: when it last said that it is alive, by the bundle store's clock.
    """

    owner: str
    renewed_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GcMarks:
    """The list.

    Args:
        since: name → when it was marked, seconds since the epoch by the bundle store's clock.
    """

    since: dict[str, float] = field(default_factory=dict)
    claim: Claim | None = None

    def record(self) -> bytes:
        """The list as it is written."""
        return readable_json(
            {"kind": KIND, "format": 1, "since": self.since, "claim": asdict(self.claim) if self.claim else None}
        )


def load_gc_marks(bundle_store: Store) -> tuple[GcMarks, str]:
    """The list and its tag; an empty one without a tag where no `gc` ran yet.

    Raises:
        ManifestError: it is damaged.
    """
    try:
        data, tag = bundle_store.read_tagged(RECORD_NAME)
    except FileNotFoundError:
        return GcMarks(), ""
    where = f"{bundle_store.url}/{RECORD_NAME}"
    with translate_refusals():
        held = strict_json(data, where)
    try:
        since, claim = checked(dict[str, float], held.get("since")), held.get("claim")
        return GcMarks(since, None if claim is None else checked(Claim, claim)), tag
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not what gc writes ({fault_of(exc)}). Move it away; the next gc starts over."
        ) from exc


def change_gc_marks(bundle_store: Store, change: Callable[[GcMarks], GcMarks]) -> GcMarks:
    """Replace the list by what `change` makes of it, again if others change it meanwhile.

    Args:
        change: pure; may raise, and then nothing is written.
    Raises:
        TransientError: others keep changing it.
    """
    for _ in range(_SWAPS):
        held, tag = load_gc_marks(bundle_store)
        wanted = change(held)
        if wanted == held:
            return held
        was_first = (
            bundle_store.replace(RECORD_NAME, wanted.record(), tag)
            if tag
            else bundle_store.create(RECORD_NAME, wanted.record())
        )
        if was_first or load_gc_marks(bundle_store)[0] == wanted:
            return wanted
    raise TransientError(f"{bundle_store.url}/{RECORD_NAME}: others keep changing it. Run the same command again.")


def spare(bundle_store: Store, names: Iterable[str]) -> None:
    """Take names off the list, before anything relies on them.

    Raises:
        LockHeldError: `gc` is deleting one of them right now.
    """
    wanted = set(names)

    def without(held: GcMarks) -> GcMarks:
        if held.claim is not None and (taken := wanted & set(held.claim.names)):
            raise LockHeldError(
                f"{bundle_store.url}: gc is removing {min(taken)}. Try again when it has ended; if it was killed, "
                f"`relabel gc {bundle_store.url} --delete` ends its work."
            )
        return GcMarks({name: since for name, since in held.since.items() if name not in wanted}, held.claim)

    change_gc_marks(bundle_store, without)


# ------------------------------------------------------------------------------
# Garbage in a bundle store: versions that no channel points to any more, and objects that no version names.
#
# Kept are: every version among the last moves of a channel, every version and object younger than the grace time, and
# every object of a kept version. The rest is marked by one `gc` and deleted by a later one (see gc_marks.py): first
# versions, then their objects.


SETTLE_S = 24 * 3600.0
"""How long a name stays marked before it is deleted, at most: no publish or channel move may take longer from its
begin to its end.
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


def find_garbage(bundle_store: Store, *, keep: int, grace_s: float) -> Garbage:
    """Find what nothing points to.

    Args:
        keep: how many of a channel's last moves keep their versions.
        grace_s: what is younger stays, seconds.
    Raises:
        ManifestError: a record can't be read; nothing is garbage while one can't.
    """
    now_s = bundle_store.now_s()
    objects: list[Entry] = []
    records: dict[str, list[Entry]] = {}
    for entry in bundle_store.entries(""):  # all are listed before a record is read: what that one adds is young
        name, _, rest = entry.name.partition("/")
        if name == OBJECTS:
            objects.append(entry)
        elif is_name(name) and rest.startswith(("versions/", "channels/")):
            records.setdefault(name, []).append(entry)
    live: set[str] = set()
    versions, kept = [], 0
    for name, entries in records.items():
        pointed = {move.version for channel in channels_of(bundle_store, name) for move in channel.moves[-keep:]}
        for entry in (one for one in entries if one.name.startswith(f"{name}/versions/")):
            version = Version.load(bundle_store, name, stem(entry))
            if version.version in pointed or now_s - entry.written_s < grace_s:
                live |= {object_name(file.sha256) for file in version.files}
                kept += 1
            else:
                versions.append(entry)
    dead = [entry for entry in objects if entry.name not in live and now_s - entry.written_s >= grace_s]
    return Garbage(sorted(versions), sorted(dead), kept, len(objects) - len(dead))


def collect(
    bundle_store: Store, *, keep: int, grace_s: float, deletes: bool, on_progress: Callable[[int], None]
) -> Collected:
    """Mark what is garbage now, delete what was marked long enough ago and still is.

    Args:
        deletes: otherwise only say what would happen.
        on_progress: called with each name that was deleted.
    Raises:
        LockHeldError: another gc is running.
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
    swept = bundle_store.sweep_uploads(max(grace_s, SETTLE_S))
    return Collected(garbage, sorted(wanted.since), names, sum(sizes.get(name, 0) for name in names), swept)


def _left_by_another(held: GcMarks, now_s: float, url: str) -> tuple[str, ...]:
    """Names that a killed gc had claimed.

    Raises:
        LockHeldError: it may be alive.
    """
    if held.claim is None:
        return ()
    if now_s - held.claim.renewed_s < TAKE_OVER_S:
        raise LockHeldError(
            f"{url}: another gc is running, or was killed less than {TAKE_OVER_S / 60:.0f} minutes ago. Try again "
            "later."
        )
    return held.claim.names


def _delete(bundle_store: Store, owner: str, names: list[str], on_progress: Callable[[int], None]) -> None:
    """Delete what is claimed, versions before objects, and give the claim back."""
    renewed_s = time.monotonic()
    for name in names:
        if time.monotonic() - renewed_s > RENEW_S:
            _renew(bundle_store, owner)
            renewed_s = time.monotonic()
        bundle_store.remove(name)
        on_progress(1)
    if names:
        change_gc_marks(
            bundle_store,
            lambda held: GcMarks(held.since, None) if held.claim is not None and held.claim.owner == owner else held,
        )


def _renew(bundle_store: Store, owner: str) -> None:
    now_s = bundle_store.now_s()

    def renewed(held: GcMarks) -> GcMarks:
        if held.claim is None or held.claim.owner != owner:
            raise LockHeldError(f"{bundle_store.url}: another gc took over while this one slept. Nothing is lost.")
        return GcMarks(held.since, Claim(owner, now_s, held.claim.names))

    change_gc_marks(bundle_store, renewed)


# ------------------------------------------------------------------------------
# From a bundle to a version that a channel points to: objects first, each proven, then the version's record, then the
# pointer.
#
# Whatever is killed or lost on the way, a version's record exists only when all its objects are whole, and a pointer
# points only to a version whose record exists. The same command again does what is left.


UPLOAD_TRIES = 3
"""Uploads of one file before a bundle store that keeps holding other bytes is given up."""


class Published(NamedTuple):
    """What a publish did.

    Args:
        uploaded: objects that were uploaded, and their bytes; the rest was there.
        channel: the pointer afterwards, None if none was asked for.
        has_changed: whether anything was written at all.
    """

    version: Version
    uploaded: int
    uploaded_bytes: int
    objects: int
    channel: Channel | None
    has_changed: bool


def publish(
    bundle: Bundle,
    bundle_store: Store,
    progress: Progress,
    *,
    name: str | None = None,
    version: str | None = None,
    channel: str | None = None,
    key: SigningKey | None = None,
    rereads: bool = False,
    is_anyway: bool = False,
) -> Published:
    """Make a bundle a version, and point a channel at it if one is given.

    Args:
        bundle: whose bytes were just checked against its manifest.
        name: under which name; the bundle's own by default.
        version: instead of the first digits of its manifest's sha256.
        channel: to be moved there.
        key: to sign version and pointer with.
        rereads: prove every object by reading it back, those of a published version too, and repair what is damaged.
        is_anyway: point the channel at a student that beats no baseline, too.
    Raises:
        GateError: a channel is to be moved to a student that is no better than a baseline; nothing was uploaded.
        ManifestError: the version is there with other contents.
        ChannelMovedError: another process moved the channel since this call began; the version is published anyway.
        LockHeldError: gc is removing something that this version needs.
        StoreError: store or disk fail.
    """
    if channel is not None and not is_anyway:
        _check_baselines(bundle.facts, str(bundle.folder))
    name = check_name(name or bundle.name, "name")
    at = check_name(version, "version") if version else bundle.version
    files = [file._asdict() for file in bundle.all_files]
    wanted = Version({"kind": Version.kind, "name": name, "version": at, "files": files})
    pointer = None
    if channel is not None:  # read first, so that a move made during a long upload is not overruled
        check_name(channel, "channel")
        _check_no_version(bundle_store, name, channel)
        pointer = Channel.find(bundle_store, name, channel)
        check_may_move(pointer, key, f"{bundle_store.url}/{name}@{channel}")
    if Channel.find(bundle_store, name, wanted.version) is not None:
        raise InputError(f"{bundle_store.url}/{name}: {wanted.version} is a channel there. Give another --version.")
    distinct = wanted.distinct_files
    names = [object_name(file.sha256) for file in distinct]
    spare(bundle_store, [wanted.path, *names])
    held = Version.find(bundle_store, name, wanted.version)
    if held is not None:
        check_same(bundle_store, held, wanted)
    sizes = bundle_store.sizes(names)
    with translate_errors("publish", bundle.folder):
        uploaded = [
            file
            for file in distinct
            if _ensure_object(
                bundle_store,
                bundle,
                file,
                sizes[object_name(file.sha256)],
                is_vouched=held is not None,
                rereads=rereads,
                progress=progress,
            )
        ]
    failpoints.hit("after_objects")
    has_changed = write_version(bundle_store, wanted, held, key) or bool(uploaded)
    failpoints.hit("after_version")
    if channel is not None and (pointer is None or not pointer.points_to(wanted, key)):
        pointer = move_channel(bundle_store, name, channel, pointer, wanted, "publish", key=key)
        has_changed = True
    size = sum(file.size_bytes for file in uploaded)
    return Published(wanted, len(uploaded), size, len(distinct), pointer, has_changed)


def _check_baselines(facts: Mapping[str, Any], where: str) -> None:
    """Compare the student's figures on its test split, as a bundle carries them, with its baselines; older bundles have
    none.
    """
    from relabel.manifests.metrics.evaluation import (
        Baselines,
        not_beaten,  # brings numpy, which a move does without
    )

    test: Any = facts
    for name in ("lineage", "student", "metrics", "test"):
        test = test.get(name) if isinstance(test, dict) else None
    baselines = test.get("baselines") if isinstance(test, dict) else None
    below = not_beaten(test["student"], checked(Baselines, baselines)) if baselines else []
    if below:
        raise GateError(
            f"{where}: on its test split the student is no better than a baseline: {'; '.join(below)}. Train a better "
            "one, or point the channel at it with --anyway. Nothing was uploaded, and the channel is where it was."
        )


def set_channel(
    bundle_store: Store, name: str, channel: str, version: str, key: SigningKey | None, *, is_anyway: bool = False
) -> tuple[Channel, bool]:
    """Point a channel at a version that is published and whole.

    Args:
        is_anyway: point it at a student that beats no baseline, too.
    Returns:
        The pointer, and whether it was moved (else it was there already).
    Raises:
        GateError: the student is no better than a baseline; the channel is where it was.
        InputError: no such version, or a version has the channel's name.
        ManifestError: the version is not whole.
        ChannelMovedError: another process moved it meanwhile.
    """
    check_name(channel, "channel")
    held = Channel.find(bundle_store, name, channel)
    _check_no_version(bundle_store, name, channel)
    wanted = Version.load(bundle_store, name, version)
    if held is not None and held.points_to(wanted, key):
        return held, False
    _rely_on(bundle_store, wanted)
    if not is_anyway:
        _check_baselines(facts_of(bundle_store, wanted), f"{bundle_store.url}/{name}: version {version}")
    return move_channel(bundle_store, name, channel, held, wanted, "set", key=key), True


def roll_back(bundle_store: Store, name: str, channel: str, key: SigningKey | None) -> Channel:
    """Point a channel at the version that it pointed to before; again: one further back.

    Raises:
        GateError: its history holds nothing earlier, or is not signed by the key given.
        ManifestError: that version is not whole any more.
        ChannelMovedError: another process moved it meanwhile.
    """
    held = Channel.load(bundle_store, name, channel)
    where = f"{bundle_store.url}/{name}@{channel}"
    check_may_move(held, key, where)
    if key is not None and not held.is_signed_by(key):
        raise GateError(
            f"{where}: its history is not signed by the key given, so it may be forged. Name the version: "
            "relabel channel set."
        )
    target = before(held, where)
    version = Version.load(bundle_store, name, target.version)
    if version.sha256 != target.version_sha256:
        raise GateError(
            f"{where}: version {target.version} is no longer what it was when the channel pointed to it. Set another "
            "one."
        )
    _rely_on(bundle_store, version)
    return move_channel(
        bundle_store, name, channel, held, version, "rollback", key=key, restores=target.restores or target.sequence
    )


def _check_no_version(bundle_store: Store, name: str, channel: str) -> None:
    if bundle_store.size(Version.path_of(name, channel)) is not None:
        raise InputError(f"{bundle_store.url}/{name}: {channel} is a version there, so no channel can be called that.")


def _rely_on(bundle_store: Store, version: Version) -> None:
    spare(bundle_store, [version.path, *(object_name(file.sha256) for file in version.files)])
    check_whole(bundle_store, version)


def _ensure_object(
    bundle_store: Store,
    bundle: Bundle,
    file: File,
    size: int | None,
    *,
    is_vouched: bool,
    rereads: bool,
    progress: Progress,
) -> bool:
    """See to it that the bundle store holds a file, whole; whether it had to be uploaded.

    An object that is there but not vouched for by a version's record may be what a killed or broken publisher left: it
    is proven too.

    Args:
        size: bytes that the bundle store held under its name just now; None if there was none.
    Raises:
        StoreError: the bundle store keeps holding other bytes than it was given.
    """
    failpoints.hit("before_object")
    name, wanted = object_name(file.sha256), Held(file.size_bytes, file.sha256)
    if size == file.size_bytes and (
        (is_vouched and not rereads) or _holds(bundle_store, name, wanted, progress, rereads=rereads)
    ):
        return False
    for _ in range(UPLOAD_TRIES):
        bundle_store.put_file(name, bundle.folder / file.path, wanted, lambda count: _uploading(progress, file, count))
        if _holds(bundle_store, name, wanted, progress, rereads=rereads):
            failpoints.hit("after_object")
            return True
    raise StoreError(
        f"{bundle_store.url}/{name}: after {UPLOAD_TRIES} uploads the bundle store still holds other bytes than "
        f"{file.path}. Check its disk."
    )


def _holds(bundle_store: Store, name: str, wanted: Held, progress: Progress, *, rereads: bool) -> bool:
    def on_progress(_count: int) -> None:
        progress("checking", 0)

    try:
        found = (
            digest_of_blocks(bundle_store.blocks(name, 0), on_progress)
            if rereads
            else bundle_store.digest(name, on_progress)
        )
        return found == wanted
    except FileNotFoundError:
        return False


def _uploading(progress: Progress, file: File, count: int) -> None:
    failpoints.hit("during_upload")
    progress(f"uploading {file.path}", count)
