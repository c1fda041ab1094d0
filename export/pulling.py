"""Pulling a published version: lookup and trust, resumable downloads, and the switch to it."""

from __future__ import annotations

import hashlib
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from relabel.export.bundles import (
    MANIFEST_NAME,
    Bundle,
    BundleFile,
    check_file,
    link_or_copy,
    open_bundle,
    read_manifest,
)
from relabel.export.destinations import PARTIAL, VERSIONS, Destination, Proof, Seen, ServedVersion, State, prove
from relabel.export.signatures import TrustedKeys
from relabel.export.store import (
    CHANNEL_KIND,
    VERSION_KIND,
    Address,
    Channel,
    Version,
    find_channel,
    find_version,
    left_by_rollback,
    load_version,
    object_name,
)
from relabel.manifests import failpoints
from relabel.manifests.bundle_store import BundleStore
from relabel.manifests.errors import DiskFullError, GateError, InputError, ManifestError, StoreError
from relabel.manifests.files import FULL, translate_errors
from relabel.manifests.store import sync_folder

# ------------------------------------------------------------------------------
# A published version comes to `.versions`: files that are here are copied, others fetched and resumed, and nothing has
# its final name before every byte is proven.


DOWNLOAD_TRIES = 2
"""Downloads of one file from its first byte on before its object is called damaged: the first may have grown from a bad
part.
"""
SPARE_BYTES = 16 << 20

Progress = Callable[[str, int], None]
"""Called with what is going on and the bytes that came in since the last call; may raise to stop the pull."""


class Unpacked(NamedTuple):
    """A version that lies in `.versions` whole.

    Args:
        folder: its name there.
        fetched_bytes: bytes that came over for it.
        proof: of all its bytes.
    """

    folder: str
    fetched_bytes: int
    proof: Proof


def fetch_version(
    bundle_store: BundleStore, destination: Destination, state: State, version: Version, progress: Progress
) -> Unpacked:
    """See to it that a version lies in `.versions`, whole and proven.

    Raises:
        ManifestError: a file of it is missing from the store or damaged there.
        DiskFullError: no space for it.
        StoreError: store or disk fail.
    """
    versions = destination.folder / VERSIONS
    for path in _folders_of(destination, version):
        proof = prove(path, version.manifest.sha256, {})
        if not proof.faults and _is_bundle_of(open_bundle(path, check_bytes=False), version):
            return Unpacked(path.name, 0, proof)
    # by the digest of its body, so that a pull that was killed is found again, and one of other contents is not
    building = versions / f".new-{version.sha256[:16]}"
    fetched = _Download(bundle_store, destination, state, version, building, progress).run()
    try:
        if not _is_bundle_of(open_bundle(building, check_bytes=False), version):
            raise ManifestError(
                f"{bundle_store.url}/{version.name}: version {version.version} lists other files than its own "
                f"{MANIFEST_NAME}. Refused."
            )
        proof = prove(building, version.manifest.sha256, {})
        if proof.faults:
            raise ManifestError(f"{building}: {proof.faults[0]}. Run the same command again, and check the disk.")
    except ManifestError:
        shutil.rmtree(building, ignore_errors=True)
        raise
    failpoints.hit("before_unpacked")
    name = destination.free_name(version.version)
    with translate_errors("unpack", building):
        for folder in (building, *(path for path in building.rglob("*") if path.is_dir())):
            sync_folder(folder)
        building.rename(versions / name)
        sync_folder(versions)
    failpoints.hit("after_unpacked")
    return Unpacked(name, fetched, proof)


def _folders_of(destination: Destination, version: Version) -> list[Path]:
    """Where a version may lie already, whole or damaged."""
    versions = destination.folder / VERSIONS
    return [versions / version.version, *sorted(versions.glob(f"{version.version}~*"))]


def _is_bundle_of(bundle: Bundle, version: Version) -> bool:
    return sorted(bundle.all_files) == sorted(version.files)


class _Download:
    """Files of one version on their way in: taken from a version that is here, else fetched, resumed where an earlier
    pull stopped.
    """

    def __init__(
        self,
        bundle_store: BundleStore,
        destination: Destination,
        state: State,
        version: Version,
        building: Path,
        progress: Progress,
    ) -> None:
        self._bundle_store = bundle_store
        self._version = version
        self._building = building
        self._partial = destination.folder / PARTIAL
        self._progress = progress
        self._here = _files_here(destination, state, version)
        self._fetched = 0

    def run(self) -> int:
        """Bring all files in; returns the bytes that came over."""
        with translate_errors("make", self._building):
            self._building.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(parents=True, exist_ok=True)
        self._remove_strangers()
        missing = [file for file in self._version.files if not _is_file(self._building / file.path, file)]
        self._check_space(missing)
        for file in missing:
            target = self._building / file.path
            with translate_errors("make", target.parent):
                target.parent.mkdir(parents=True, exist_ok=True)
            if not (self._link(file, target) or self._take(file, target)):
                self._fetch(file, target)
        return self._fetched

    def _remove_strangers(self) -> None:
        """Nothing but files of this version may lie in the new folder, whatever was left there."""
        listed = {self._building / file.path for file in self._version.files}
        for path in list(self._building.rglob("*")):
            if path in listed and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.is_symlink() or (path.is_file() and path not in listed):
                path.unlink()

    def _check_space(self, missing: list[BundleFile]) -> None:
        sizes = {file.sha256: file.size_bytes - _size_of(self._partial / file.sha256) for file in missing}
        needed = sum(sizes.values()) + SPARE_BYTES
        free = shutil.disk_usage(self._building).free
        if needed > free:
            raise DiskFullError(
                f"{self._building.parent}: {needed:,} bytes are needed for version {self._version.version}, {free:,} "
                "are free. The served version stays; free some space or lower --keep, and run the same command again."
            )

    def _link(self, file: BundleFile, target: Path) -> bool:
        """Give a file that this version holds twice (as Triton's view does) a second name, where the disk can."""
        twins = (
            self._building / one.path
            for one in self._version.files
            if one.sha256 == file.sha256 and one.path != file.path
        )
        source = next((twin for twin in twins if _is_file(twin, file)), None)
        if source is None:
            return False
        target.unlink(missing_ok=True)
        link_or_copy(source, target)
        return True

    def _take(self, file: BundleFile, target: Path) -> bool:
        """Copy a file of a version that is here; no link, since a change to one must not change the other."""
        copy = self._partial / f"{file.sha256}.copy"
        for source in self._here.get(file.sha256, ()):
            if not _is_plain(source):
                continue
            with translate_errors("copy to", copy):
                try:
                    shutil.copyfile(source, copy)
                except OSError as exc:
                    if exc.errno in FULL:
                        raise
                    continue  # whatever is wrong with the source, the store has it
                if not _is_file(copy, file):
                    copy.unlink()
                    continue
                _sync_file(copy)
                copy.replace(target)
            self._progress(f"copying {file.path}", 0)
            return True
        return False

    def _fetch(self, file: BundleFile, target: Path) -> None:
        partial = self._partial / file.sha256
        for left in reversed(range(DOWNLOAD_TRIES)):
            if self._grow(file, partial):
                failpoints.hit("after_download")
                partial.replace(target)
                return
            partial.unlink(missing_ok=True)
            if not left:
                break
        raise ManifestError(
            f"{self._bundle_store.url}/{object_name(file.sha256)} ({file.path}): its bytes are not those published. "
            "Refused; the served version stays. To repair it, publish the bundle again with --reread."
        )

    def _grow(self, file: BundleFile, partial: Path) -> bool:
        """Fetch what is missing of a file; whether it is the right one then."""
        found, size = hashlib.sha256(), 0
        with translate_errors("write", partial), partial.open("a+b") as part:
            part.seek(0)
            while block := part.read(1 << 22):
                found.update(block)
                size += len(block)
            if size < file.size_bytes:
                for block in self._blocks(file, size):
                    found.update(block)
                    size += len(block)
                    if size > file.size_bytes:  # an object that grew must not fill the disk
                        return False
                    part.write(block)
                    self._fetched += len(block)
                    failpoints.hit("during_download")
                    self._progress(f"fetching {file.path}", len(block))
            part.flush()
            _sync_file(partial)
        return (size, found.hexdigest()) == (file.size_bytes, file.sha256)

    def _blocks(self, file: BundleFile, start: int) -> Iterator[bytes]:
        name = object_name(file.sha256)
        try:
            yield from self._bundle_store.blocks(name, start)
        except FileNotFoundError as exc:
            raise ManifestError(
                f"{self._bundle_store.url}/{name} ({file.path}): is missing from the store. The served version stays. "
                "Publish the bundle again to repair it."
            ) from exc


def _files_here(destination: Destination, state: State, version: Version) -> dict[str, list[Path]]:
    """Files of versions that are kept, by the digest that they had when they came; they may have changed since."""
    found: dict[str, list[Path]] = {}
    listed = [(folder, version.files) for folder in _folders_of(destination, version)]
    for folder in map(destination.path_of, state.served):
        if not _is_plain(folder / MANIFEST_NAME):  # a pipe has no end
            continue
        try:
            listed.append((folder, read_manifest((folder / MANIFEST_NAME).read_bytes(), str(folder))[1]))
        except (ManifestError, OSError):
            continue
    for folder, files in listed:
        for file in files:
            found.setdefault(file.sha256, []).append(folder / file.path)
    return found


def _is_file(path: Path, file: BundleFile) -> bool:
    """Whether a file lies there, for its owner to read, with the bytes that it must have."""
    if not _is_plain(path):
        return False
    try:
        check_file(path, file, check_bytes=True)
    except (ManifestError, StoreError):
        return False
    return True


def _is_plain(path: Path) -> bool:
    """Whether a plain file lies there that its owner may read; also below a folder that nobody may enter."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & stat.S_IRUSR)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _sync_file(path: Path) -> None:
    sync_folder(path)


# ------------------------------------------------------------------------------
# From a channel to a folder that serves: what may be trusted is decided first, then files come in, then one link is
# switched.
#
# Nothing that serves is touched until the new version lies beside it, whole and proven. The same command again resumes.


DEFAULT_CHANNEL = "stable"


class PullOptions(NamedTuple):
    """What a puller may ask for.

    Args:
        keys: public keys; then version and channel must be signed by one of them.
        keep: versions that stay in the destination, the serving one included.
        lifts_hold: switch although somebody rolled back from this very move of the channel.
        checks_bytes: read every file that serves, those too whose stamp says that nothing changed.
        checks_parity: before a switch, ask the new version's reference pairs here.
    """

    keys: TrustedKeys | None = None
    keep: int = 3
    lifts_hold: bool = False
    checks_bytes: bool = False
    checks_parity: bool = False


class Pulled(NamedTuple):
    """What a pull did.

    Args:
        has_switched: whether another version serves now.
        is_held: nothing was done because somebody rolled back from there.
        fetched_bytes: bytes that came over; the rest was here already.
        repaired: what was wrong with what served, and is put right.
    """

    served: ServedVersion
    has_switched: bool
    is_held: bool
    fetched_bytes: int
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version that may be trusted, and the pointer that named it."""

    version: Version
    channel: Channel | None

    @property
    def seen(self) -> Seen | None:
        """The channel's move that this is, to be noted; None where a version was named itself."""
        return Seen(self.channel.head.sequence, self.version.sha256) if self.channel else None


def pull(
    bundle_store: BundleStore, address: Address, destination: Destination, options: PullOptions, progress: Progress
) -> Pulled:
    """Let a destination serve what a channel points to, or a version that is named.

    Raises:
        InputError: no such bundle, channel or version; or the destination holds another bundle.
        ManifestError: a record or file is damaged or hostile.
        GateError: unsigned, signed by an untrusted key, older than what was seen already, or with answers that differ.
        MissingExtraError: its answers were to be checked, and onnxruntime is absent.
        LockHeldError: another pull to this destination is at work.
        DiskFullError: no space for it.
        StoreError: store or disk fail.
    """
    with translate_errors("pull to", destination.folder):
        return _pull(bundle_store, address, destination, options, progress)


def _pull(
    bundle_store: BundleStore, address: Address, destination: Destination, options: PullOptions, progress: Progress
) -> Pulled:
    destination.refuse_foreign()
    destination.serving()
    state = destination.state()
    if state is not None and state.name != address.name:
        raise InputError(f"{destination.folder}: holds {state.name}; {address.name} needs a folder of its own.")
    wanted = find_wanted(bundle_store, address, options.keys)
    with destination.pulling():
        state = _remember(destination, address.name, wanted)
        is_held = _is_held(state, wanted) and not options.lifts_hold
        if is_held or (state.served and state.served[0].version_sha256 == wanted.version.sha256):
            return _keep(bundle_store, destination, state, wanted, options, progress, is_held=is_held)
        ready = fetch_version(bundle_store, destination, state, wanted.version, progress)
        if options.checks_parity:
            _check_parity(destination, ready, progress)
        return _switch(destination, ready, wanted, options)


def _check_parity(destination: Destination, ready: Unpacked, progress: Progress) -> None:
    """Refuse a version that answers otherwise here than where it was made; what serves stays.

    Raises:
        GateError: it does.
        ManifestError, MissingExtraError: it can't be asked.
    """
    from relabel.export.reference_answers import check_here  # a pull needs neither numpy nor onnxruntime

    progress("asking the reference pairs", 0)
    check_here(destination.folder / VERSIONS / ready.folder)


def _keep(
    bundle_store: BundleStore,
    destination: Destination,
    state: State,
    wanted: Wanted,
    options: PullOptions,
    progress: Progress,
    *,
    is_held: bool,
) -> Pulled:
    """Leave what serves, after a proof that it is what was pulled; what is damaged is fetched again and takes its place
    in one step.
    """
    served = state.served[0]
    progress("checking what serves", 0)
    proof = destination.prove(served, checks_bytes=options.checks_bytes)
    if not proof.faults:
        destination.remember(state, served, proof)
        destination.tidy(state)
        return Pulled(served, False, is_held, 0)
    repaired = tuple(map(str, proof.faults))
    try:
        version = wanted.version if not is_held else _load_served(bundle_store, state, options.keys)
        ready = fetch_version(bundle_store, destination, state, version, progress)
    except (InputError, ManifestError) as exc:
        raise ManifestError(f"{destination.path_of(served)}: {repaired[0]}, and can't be repaired. {exc}") from exc
    with destination.switching():
        state = destination.reconciled() or state
        if state.served[0].version_sha256 != served.version_sha256:  # somebody rolled back while files came in
            return Pulled(state.served[0], False, True, ready.fetched_bytes)
        served = replace(served, folder=ready.folder)
        state = destination.switch(state, served, options.keep)
    destination.remember(state, served, ready.proof)
    destination.tidy(state)
    return Pulled(served, True, is_held, ready.fetched_bytes, repaired)


def _load_served(bundle_store: BundleStore, state: State, keys: TrustedKeys | None) -> Version:
    """The record of the version that serves though the channel points elsewhere, to repair it by."""
    served = state.served[0]
    version = load_version(bundle_store, state.name, served.version)
    where = f"{bundle_store.url}/{version.name}@{served.version}"
    if version.sha256 != served.version_sha256:
        raise ManifestError(f"{where}: is not the version that was pulled.")
    _check_signed(keys, VERSION_KIND, version, where)
    return version


def find_wanted(bundle_store: BundleStore, address: Address, keys: TrustedKeys | None) -> Wanted:
    """Read what an address names, and check that it may be trusted. A channel goes before a version of the same name.

    Raises:
        InputError: there is nothing of that name.
        ManifestError, GateError: it is not to be trusted.
    """
    at = address.at or DEFAULT_CHANNEL
    where = f"{bundle_store.url}/{address.name}@{at}"
    channel = find_channel(bundle_store, address.name, at)
    if channel is None:
        version = find_version(bundle_store, address.name, at)
        if version is None:
            raise InputError(
                f"{where}: neither a channel nor a version. See what there is: relabel show "
                f"{bundle_store.url}/{address.name}."
            )
        _check_signed(keys, VERSION_KIND, version, where)
        return Wanted(version, None)
    _check_signed(keys, CHANNEL_KIND, channel, where)
    version = load_version(bundle_store, address.name, channel.head.version)
    if version.sha256 != channel.head.version_sha256:
        raise ManifestError(
            f"{where}: the record of version {version.version} is not the one that the channel names. Refused."
        )
    _check_signed(keys, VERSION_KIND, version, where)
    return Wanted(version, channel)


def _check_signed(keys: TrustedKeys | None, kind: str, record: Channel | Version, where: str) -> None:
    if keys is not None:
        keys.check(kind, record.body, record.signatures, f"{where}: the {kind}'s record")


def _remember(destination: Destination, name: str, wanted: Wanted) -> State:
    """Note the newest sequence of the channel and what it left by a rollback, before anything is fetched; refuse an
    older one.
    """
    with destination.switching():
        state = destination.reconciled() or State(name)
        if wanted.channel is None or wanted.seen is None:
            return state
        channel = wanted.channel
        last = state.seen.get(channel.channel)
        _check_not_older(last, wanted.seen, f"{destination.folder}: {name}@{channel.channel}")
        left = left_by_rollback(
            channel, state.left.get(channel.channel, ()), (last.sequence, last.version_sha256) if last else None
        )
        now = replace(
            state,
            seen={**state.seen, channel.channel: wanted.seen},
            left={**state.left, channel.channel: tuple(sorted(left))},
        )
        if now != state:
            failpoints.hit("before_seen")
            destination.write(now)
            failpoints.hit("after_seen")
        return now


def _check_not_older(seen: Seen | None, now: Seen, where: str) -> None:
    if seen is None or now.sequence > seen.sequence or now == seen:
        return
    if now.sequence == seen.sequence:
        raise GateError(
            f"{where}: sequence {now.sequence} pointed to another version when it was last seen. The channel was "
            "overwritten."
        )
    raise GateError(
        f"{where}: downgraded: its sequence is {now.sequence}, and {seen.sequence} was seen already. A rollback would "
        "have a higher one: an old pointer was put back, or the store was restored from a copy. Set the channel "
        "anew until its sequence is higher."
    )


def _is_held(state: State, wanted: Wanted) -> bool:
    if wanted.channel is None or not state.served:
        return False
    return wanted.channel.head.sequence <= state.held.get(wanted.channel.channel, 0)


def _switch(destination: Destination, ready: Unpacked, wanted: Wanted, options: PullOptions) -> Pulled:
    version, channel = wanted.version, wanted.channel
    served = ServedVersion(
        ready.folder,
        version.version,
        version.sha256,
        version.manifest.sha256,
        channel.channel if channel else None,
        channel.head.sequence if channel else None,
    )
    with destination.switching():
        state = destination.reconciled() or State(version.name)
        if _is_held(state, wanted) and not options.lifts_hold:  # somebody rolled back while files came in
            return Pulled(state.served[0], False, True, ready.fetched_bytes)
        if channel is not None and wanted.seen is not None:
            _check_not_older(
                state.seen.get(channel.channel), wanted.seen, f"{destination.folder}: {version.name}@{channel.channel}"
            )
            state = replace(
                state, held={name: sequence for name, sequence in state.held.items() if name != channel.channel}
            )
        was_serving = destination.serving()
        state = destination.switch(state, served, options.keep)
    destination.remember(state, served, ready.proof)
    destination.tidy(state)
    return Pulled(served, was_serving != destination.path_of(served), False, ready.fetched_bytes)
