"""A published version comes to `.versions`: files that are here are copied, others fetched and resumed, and nothing has
its final name before every byte is proven.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from relabel.export.addresses import object_name
from relabel.export.bundle_files import BundleFile
from relabel.export.bundle_places import link_or_copy
from relabel.export.bundles import MANIFEST_NAME, Bundle, check_file, open_bundle, read_manifest
from relabel.export.destinations import PARTIAL, VERSIONS, Destination, State
from relabel.export.versions import Version
from relabel.export.wholeness import Proof, prove
from relabel.manifests import failpoints
from relabel.manifests.errors import DiskFullError, ManifestError, StoreError
from relabel.manifests.storage.bundle_store_ports import BundleStore
from relabel.manifests.storage.disk_errors import FULL, translate_errors
from relabel.manifests.storage.local_run_store import sync_folder

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
