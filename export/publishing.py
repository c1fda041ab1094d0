"""From a bundle to a version that a channel points to: objects first, each proven, then the version's record, then the
pointer.

Whatever is killed or lost on the way, a version's record exists only when all its objects are whole, and a pointer
points only to a version whose record exists. The same command again does what is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from relabel.export.addresses import check_name, object_name, version_name
from relabel.export.bundle_files import BundleFile
from relabel.export.bundles import Bundle
from relabel.export.channels import Channel, before, check_may_move, find_channel, load_channel, move_channel
from relabel.export.gc_marks import spare
from relabel.export.signatures import SigningKey
from relabel.export.versions import (
    Version,
    check_same,
    check_whole,
    find_version,
    load_version,
    version_of,
    write_version,
)
from relabel.manifests import failpoints
from relabel.manifests.errors import GateError, InputError, StoreError
from relabel.manifests.records import checked
from relabel.manifests.storage.bundle_store_ports import BundleStore, Held, digest_of_blocks
from relabel.manifests.storage.disk_errors import translate_errors

UPLOAD_TRIES = 3
"""Uploads of one file before a bundle store that keeps holding other bytes is given up."""

Progress = Callable[[str, int], None]
"""Receives what is going on, and bytes that went through since the last call."""


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


class PublishOptions(NamedTuple):
    """What a publisher may ask for.

    Args:
        name: under which name; the bundle's own by default.
        version: instead of the first digits of its manifest's sha256.
        channel: to be moved there.
        key: to sign version and pointer with.
        rereads: prove every object by reading it back, those of a published version too, and repair what is damaged.
        is_anyway: point the channel at a student that beats no baseline, too.
    """

    name: str | None = None
    version: str | None = None
    channel: str | None = None
    key: SigningKey | None = None
    rereads: bool = False
    is_anyway: bool = False


def publish(bundle: Bundle, bundle_store: BundleStore, options: PublishOptions, progress: Progress) -> Published:
    """Make a bundle a version, and point a channel at it if one is given.

    Args:
        bundle: whose bytes were just held against its manifest.
    Raises:
        GateError: a channel is to be moved to a student that is no better than a baseline; nothing was uploaded.
        ManifestError: the version is there with other contents.
        ChannelMovedError: another process moved the channel since this call began; the version is published anyway.
        LockHeldError: gc is removing something that this version needs.
        StoreError: store or disk fail.
    """
    with translate_errors("publish", bundle.folder):
        return _publish(bundle, bundle_store, options, progress)


def _publish(bundle: Bundle, bundle_store: BundleStore, options: PublishOptions, progress: Progress) -> Published:
    if options.channel is not None and not options.is_anyway:
        _check_baselines(bundle)
    name = check_name(options.name or bundle.name, "name")
    version = version_of(bundle, name, check_name(options.version, "version") if options.version else None)
    # read first, so that a move made during a long upload is not overruled
    pointer = _pointer(bundle_store, name, options)
    if find_channel(bundle_store, name, version.version) is not None:
        raise InputError(f"{bundle_store.url}/{name}: {version.version} is a channel there. Give another --version.")
    files = version.distinct_files
    names = [object_name(file.sha256) for file in files]
    spare(bundle_store, [version_name(name, version.version), *names])
    held = find_version(bundle_store, name, version.version)
    if held is not None:
        check_same(bundle_store, held, version)
    ensure = functools.partial(
        _ensure_object, bundle_store, bundle, is_vouched=held is not None, rereads=options.rereads, progress=progress
    )
    sizes = bundle_store.sizes(names)
    uploaded = [file for file in files if ensure(file, sizes[object_name(file.sha256)])]
    failpoints.hit("after_objects")
    has_changed = write_version(bundle_store, version, held, options.key) or bool(uploaded)
    failpoints.hit("after_version")
    if options.channel is not None and (pointer is None or not pointer.points_to(version, options.key)):
        pointer, has_changed = (
            move_channel(bundle_store, name, options.channel, pointer, version, "publish", key=options.key),
            True,
        )
    size = sum(file.size_bytes for file in uploaded)
    return Published(version, len(uploaded), size, len(files), pointer, has_changed)


def _check_baselines(bundle: Bundle) -> None:
    """Hold the student's figures on its test split against the baselines beside them; older bundles have none."""
    from relabel.manifests.metrics.baselines import Baselines, not_beaten  # brings numpy, which a move does without

    test: Any = bundle.facts
    for name in ("lineage", "student", "metrics", "test"):
        test = test.get(name) if isinstance(test, dict) else None
    beside = test.get("baselines") if isinstance(test, dict) else None
    below = not_beaten(test["student"], checked(Baselines, beside)) if beside else []
    if below:
        raise GateError(
            f"{bundle.folder}: on its test split the student is no better than a baseline: {'; '.join(below)}. Train a "
            "better one, or publish it with --anyway. Nothing was uploaded, and the channel is where it was."
        )


def set_channel(
    bundle_store: BundleStore, name: str, channel: str, version: str, key: SigningKey | None
) -> tuple[Channel, bool]:
    """Point a channel at a version that is published and whole.

    Returns:
        The pointer, and whether it was moved (else it was there already).
    Raises:
        InputError: no such version, or a version has the channel's name.
        ManifestError: the version is not whole.
        ChannelMovedError: another process moved it meanwhile.
    """
    check_name(channel, "channel")
    held = find_channel(bundle_store, name, channel)
    _check_no_version(bundle_store, name, channel)
    wanted = load_version(bundle_store, name, version)
    if held is not None and held.points_to(wanted, key):
        return held, False
    _rely_on(bundle_store, wanted)
    return move_channel(bundle_store, name, channel, held, wanted, "set", key=key), True


def roll_back(bundle_store: BundleStore, name: str, channel: str, key: SigningKey | None) -> Channel:
    """Point a channel at the version that it pointed to before; again: one further back.

    Raises:
        GateError: its history holds nothing earlier, or is not signed by the key given.
        ManifestError: that version is not whole any more.
        ChannelMovedError: another process moved it meanwhile.
    """
    held = load_channel(bundle_store, name, channel)
    where = f"{bundle_store.url}/{name}@{channel}"
    check_may_move(held, key, where)
    if key is not None and not held.is_signed_by(key):
        raise GateError(
            f"{where}: its history is not signed by the key given, so it may be forged. Name the version: "
            "relabel channel set."
        )
    target = before(held, where)
    version = load_version(bundle_store, name, target.version)
    if version.sha256 != target.version_sha256:
        raise GateError(
            f"{where}: version {target.version} is no longer what it was when the channel pointed to it. Set another "
            "one."
        )
    _rely_on(bundle_store, version)
    return move_channel(
        bundle_store, name, channel, held, version, "rollback", key=key, restores=target.restores or target.sequence
    )


def _pointer(bundle_store: BundleStore, name: str, options: PublishOptions) -> Channel | None:
    if options.channel is None:
        return None
    check_name(options.channel, "channel")
    _check_no_version(bundle_store, name, options.channel)
    pointer = find_channel(bundle_store, name, options.channel)
    check_may_move(pointer, options.key, f"{bundle_store.url}/{name}@{options.channel}")
    return pointer


def _check_no_version(bundle_store: BundleStore, name: str, channel: str) -> None:
    if bundle_store.size(version_name(name, channel)) is not None:
        raise InputError(f"{bundle_store.url}/{name}: {channel} is a version there, so no channel can be called that.")


def _rely_on(bundle_store: BundleStore, version: Version) -> None:
    spare(
        bundle_store,
        [version_name(version.name, version.version), *(object_name(file.sha256) for file in version.files)],
    )
    check_whole(bundle_store, version)


def _ensure_object(
    bundle_store: BundleStore,
    bundle: Bundle,
    file: BundleFile,
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
        bundle_store.upload(name, bundle.folder / file.path, wanted, lambda count: _uploading(progress, file, count))
        if _holds(bundle_store, name, wanted, progress, rereads=rereads):
            failpoints.hit("after_object")
            return True
    raise StoreError(
        f"{bundle_store.url}/{name}: after {UPLOAD_TRIES} uploads the bundle store still holds other bytes than "
        f"{file.path}. Check its disk."
    )


def _holds(bundle_store: BundleStore, name: str, wanted: Held, progress: Progress, *, rereads: bool) -> bool:
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


def _uploading(progress: Progress, file: BundleFile, count: int) -> None:
    failpoints.hit("during_upload")
    progress(f"uploading {file.path}", count)
