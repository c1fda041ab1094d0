"""Stores on a local disk and on object storage: durable writes, create-if-absent, compare and swap, big files in
blocks, locks and logs; and files at URLs, read in ranges.

Names are relative, with `/`, and can't leave the root. A write is durable when the call returns. `create` is the
commit: of many callers exactly one gets True. `LocalStore` does this with fsync and hard links, `ObjectStore` with
conditional puts and ETags.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import errno
import hashlib
import io
import itertools
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from relabel.manifests import failpoints
from relabel.manifests.errors import InputError, ManifestError, RelabelError, StoreError, UsageError
from relabel.manifests.files import (
    TEMP_PREFIX,
    FileLock,
    Storage,
    check_kind,
    filesystem_of,
    held_temp,
    is_url,
    remove_abandoned,
    scheme_of,
    translate_errors,
)
from relabel.manifests.objects import (
    CheckFirstObjects,
    ConditionFailedError,
    Entry,
    Found,
    FsspecObjects,
    Lease,
    Objects,
    ResultT,
    S3Objects,
    retried,
)
from relabel.manifests.records import build_checks, sha256_bytes

# ------------------------------------------------------------------------------
# What stores give and take.


LOCKS = ".locks"
PROBE_NAME = "leases/probe"
"""One object for all probes; it stays, so that no permission to delete is needed."""
BLOCK_BYTES = 1 << 22
S3_BLOCK_BYTES = 16 << 20
"""Bytes a ranged read: at 50 ms a request the waiting stays under a fifth."""
PART_BYTES = 32 << 20
"""Bytes a part of an upload, held in memory: S3's 10,000 parts make 320 GB."""

ItemT = TypeVar("ItemT")
OnProgress = Callable[[int], None]
"""Receives the number of bytes that have gone through, as they go; may raise to stop the transfer."""


class Held(NamedTuple):
    """What a store holds under a name."""

    size_bytes: int
    sha256: str


def digest_of_blocks(blocks: Iterator[bytes], on_progress: OnProgress) -> Held:
    """Size and sha256 of what comes in blocks."""
    found = hashlib.sha256()
    size = 0
    for block in blocks:
        found.update(block)
        size += len(block)
        on_progress(len(block))
    return Held(size, found.hexdigest())


def _unchanged_blocks(source: Path, size: int, held: Held, on_progress: OnProgress) -> Iterator[bytes]:
    """A local file in blocks of this size; `on_progress` hears of each once it was taken.

    Args:
        held: the size and digest that the file is known to have.
    Raises:
        InputError: after the last block, if the file has another digest by now.
    """
    found = hashlib.sha256()
    with source.open("rb") as file:
        while block := file.read(size):
            found.update(block)
            yield block
            on_progress(len(block))
    if found.hexdigest() != held.sha256:
        raise InputError(f"{source}: changed while it was uploaded. Export or seal the bundle again.")


def parts_of(name: str, root: str) -> tuple[str, ...]:
    """The steps of a name.

    Raises:
        ManifestError: it is absolute or climbs out of the root.
    """
    parts = tuple(
        [part for part in name.split("/") if part not in ("", ".")]
    )  # as pathlib does, in a fifth of its time
    if name.startswith("/") or ".." in parts or not parts:
        raise ManifestError(f"{root}: the name {name!r} leaves the folder; refusing to follow it.")
    return parts


def read_if_there(store: Store, name: str) -> bytes | None:
    """The bytes of a file; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return store.read(name)
    return None


def map_concurrent(store: _Listed, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """`map`, with as many calls under way as the store deserves; results in the order of the items."""
    if store.readers <= 1:
        yield from map(function, items)
        return
    left = iter(items)
    build_checks()
    with ThreadPoolExecutor(store.readers, thread_name_prefix="read") as pool:
        while some := list(itertools.islice(left, 1024)):
            yield from pool.map(function, some)


class _Listed(Protocol):
    """What both kinds of store do alike.

    Args:
        readers: calls that are worth having under way at once.
    """

    readers: int

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def entries(self, folder: str) -> Iterator[Entry]:
        """All files below a folder (`""`: all there are), without locks."""

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """`size` of each name."""
        return dict(zip(names, map_concurrent(self, self.size, names), strict=True))

    def names(self, folder: str) -> list[str]:
        """Names of all files below a folder, sorted; empty if there is no such folder."""
        return list(self.etags(folder))

    def etags(self, folder: str) -> dict[str, str]:
        """Names of all files below a folder, sorted, each with its tag."""
        return dict(sorted((entry.name, entry.tag) for entry in self.entries(folder)))


# ------------------------------------------------------------------------------
# A store in a local folder. Bytes are synced under a temporary name before the final name exists; and the
# folder is synced after.


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


class LocalStore(_Listed):
    """A folder on a local or network file system, which several hosts may share.

    Args:
        root: the folder; made at the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = self.url = str(root)
        self.readers = 1  # the disk's own cache is faster than any pool of threads
        self._folder = Path(root)
        self._known_folders: set[Path] = set()

    def path(self, name: str) -> Path:
        """Where a name lies.

        Raises:
            ManifestError: the name is absolute or climbs out of the root.
        """
        return self._folder.joinpath(*parts_of(name, self.root))

    def check_conditional_writes(self) -> None:
        """Nothing: links are exclusive."""

    def read(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it can't be read.
            ManifestError: it is not an ordinary file.
        """
        path = "/".join((self.root, *parts_of(name, self.root)))  # as `path` has it, in a tenth of its time
        with (
            translate_errors("read", path, is_missing_fine=True),
            # another user of the folder may have put a pipe there, which blocks its reader
            open(path, "rb", buffering=0, opener=_open_at_once) as file,
        ):
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ManifestError(f"{path}: is not an ordinary file. Restore it from a copy, or move it away.")
            return file.read()

    def read_tagged(self, name: str) -> Found:
        """A record and its tag. Raises as `read`."""
        data = self.read(name)
        return Found(data, sha256_bytes(data), len(data))

    def size(self, name: str) -> int | None:
        """Bytes of an ordinary file, None if there is none: another user of the folder may have put a pipe there, which
        blocks its reader.
        """
        path = self.path(name)
        with translate_errors("read", path), contextlib.suppress(FileNotFoundError):
            found = path.stat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from an offset on. Raises FileNotFoundError."""
        path = self.path(name)
        if self.size(name) is None:
            raise FileNotFoundError(str(path))
        with translate_errors("read", path, is_missing_fine=True), path.open("rb") as file:
            file.seek(start)
            while block := file.read(BLOCK_BYTES):
                yield block

    def holds(self, name: str, wanted: Held, on_progress: OnProgress, *, rereads: bool = False) -> bool:
        """Whether a file is this one, every byte of it read (`rereads` or not). Raises FileNotFoundError."""
        return digest_of_blocks(self.blocks(name, 0), on_progress) == wanted

    def entries(self, folder: str) -> Iterator[Entry]:
        """All files below a folder (`""`: all there are), in no order, each with its size, inode and time of change for
        a tag; without temporary files and locks.
        """
        top = self.path(folder) if folder else self._folder
        with translate_errors("list", top):
            for path in _files_below(top):
                try:
                    state = path.stat()
                except FileNotFoundError:
                    if path.is_symlink():
                        raise
                    continue  # it was removed since
                if not path.name.startswith(TEMP_PREFIX):
                    tag = f"{state.st_size}-{state.st_ino}-{state.st_mtime_ns}"
                    yield Entry(path.relative_to(self._folder).as_posix(), state.st_size, state.st_mtime, tag)

    def put(self, name: str, data: bytes, *, is_synced: bool = True) -> None:
        """Write a file, replacing what has that name in one step.

        Args:
            is_synced: durably; else the disk has it when the kernel likes.
        """
        with self._written(name, [data], is_synced=is_synced) as (temp, path):
            temp.replace(path)

    def append(self, name: str, data: bytes, *, is_new: bool) -> None:
        """Add bytes to the end of a file, which the disk has when the kernel likes. A kill may leave a part of them.

        Args:
            is_new: there is no such file yet; else there has to be one.
        """
        path = self.path(name)
        with translate_errors("write", path):
            if is_new:
                path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb" if is_new else "r+b", buffering=0) as file:
                file.seek(0, io.SEEK_END)
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]

    def create(self, name: str, data: bytes) -> bool:
        """Write a file durably if there is none of that name; in a race exactly one caller gets True.

        Returns:
            False if the name exists already (its bytes are left as they are).
        """
        with self._written(name, [data]) as (temp, path):
            try:
                os.link(temp, path)  # a hard link fails where the name exists: all bytes or none, one winner
            except FileExistsError:
                # a network file system that lost the first reply and asked again meets its own link
                return temp.samefile(path)
            except OSError as exc:
                # of vfat, exfat, SMB and many in user space, which have no hard links
                if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                return _create_in_place(path, data)
        return True

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        """Write a record if what has that name is still what was read; False if not."""
        lock_name = base64.b32encode(name.encode()).decode().rstrip("=").lower()[:200]
        with FileLock(self._folder / LOCKS / f"{lock_name}.lock", f"{self.root}/{name}").held():
            held = read_if_there(self, name)
            if held is None or sha256_bytes(held) != tag:
                return False
            self.put(name, data)
            return True

    def put_file(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        """Copy a local file in, in blocks; readers see the old file or the whole new one. Raises as
        `_unchanged_blocks`: the name is left as it was then.
        """
        with self._written(name, _unchanged_blocks(source, BLOCK_BYTES, held, on_progress)) as (temp, path):
            temp.replace(path)

    def remove(self, name: str) -> None:
        """Remove a file that nothing depends on; none there is fine."""
        path = self.path(name)
        with translate_errors("remove", path):
            path.unlink(missing_ok=True)

    def sweep(self, folder: str) -> int:
        """Remove temporary files that killed writers left right inside a folder (`""`: the root); returns how many.

        Those of this machine's dead processes, and of others' what is an hour old: where locks are weak, another writer
        may be running.
        """
        path = self.path(folder) if folder else self._folder
        with translate_errors("clean up", path):
            return sum(map(remove_abandoned, path.glob(f"{TEMP_PREFIX}*")))

    def sweep_uploads(self, older_s: float) -> int:
        """Remove what killed `put_file`s left and that is older than so many seconds; returns how many."""
        temps = (path for path in _files_below(self._folder) if path.name.startswith(TEMP_PREFIX))
        return sum(remove_abandoned(path, older_s=older_s) for path in temps)

    def now_s(self) -> float:
        """The store's own clock, seconds since the epoch."""
        return time.time()

    def lock(self, name: str, what: str) -> FileLock:
        """An OS lock, which the kernel frees when its holder dies."""
        return FileLock(self.path(f"leases/{name}.lock"), what)

    def is_locked(self, name: str) -> bool:
        """Whether a live process holds that lock."""
        return FileLock.is_held(self.path(f"leases/{name}.lock"))

    @contextlib.contextmanager
    def _written(self, name: str, blocks: Iterable[bytes], *, is_synced: bool = True) -> Iterator[tuple[Path, Path]]:
        """A temporary file that holds these bytes, and the path where the body has to put it."""
        path = self.path(name)
        with translate_errors("write", path):
            if path.parent not in self._known_folders:  # one that vanished since is an error, and is not made again
                path.parent.mkdir(parents=True, exist_ok=True)
                self._known_folders.add(path.parent)
            with held_temp(path.parent) as (temp, descriptor):
                with open(descriptor, "wb", closefd=False) as file:
                    file.writelines(blocks)
                if is_synced:
                    failpoints.hit("before_temp_sync")
                    os.fsync(descriptor)
                    failpoints.hit("before_temp_rename")
                yield temp, path
            if is_synced:
                sync_folder(path.parent)


def _files_below(top: Path) -> Iterator[Path]:
    """Files below a folder, in links to folders too, but for locks."""
    for inside, folders, names in os.walk(top, onerror=_unless_missing, followlinks=True):
        here = Path(inside)
        links = (name for name in folders if (here / name).is_symlink())  # one that leads back is listed there
        back = {name for name in links if here.resolve().is_relative_to((here / name).resolve())}
        folders[:] = [name for name in folders if name != LOCKS and name not in back]
        yield from (Path(inside, name) for name in names)


def _create_in_place(path: Path, data: bytes) -> bool:
    """As `create`, where there are no hard links: one winner, but a kill in the middle of it leaves half a file."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            failpoints.hit("before_temp_sync")
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return True


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def sync_folder(path: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------
# A store on object storage: commits by conditional put, leases for locks, one retry policy, no temporary files.
#
# Before a process writes anything, a probe proves that the storage heeds conditions: one that accepts and ignores them
# would let two workers commit one chunk, so it is refused unless the user vouches for a single writer. Every upload to
# S3 carries its sha256, so that a store refuses bytes that changed on the way.


READERS = 16


def objects_of(url: str, storage: Storage) -> tuple[FsspecObjects, str]:
    """The storage of a URL, and the key that the URL names there.

    Raises:
        ConfigError, MissingExtraError, StoreError: see `filesystem_of`.
    """
    filesystem, path = filesystem_of(url, storage)
    if scheme_of(url) == "s3":
        return S3Objects(filesystem, url), path.strip("/")
    return FsspecObjects(filesystem, url), path.rstrip("/")


class ObjectStore(_Listed):
    """Objects below one key; the verbs are those of `LocalStore`.

    Args:
        objects: the storage.
        prefix: key of the root.
        storage: how long calls are tried and leases live.
        root: what to call it in messages.
        single_writer: believe the user that only one process writes; conditions become a read before the write.
        probe: name of the object that the probe writes.
        part_bytes: size of an upload's parts; smaller files go in one put.
    """

    def __init__(
        self,
        objects: FsspecObjects,
        prefix: str,
        storage: Storage,
        *,
        root: str,
        single_writer: bool = False,
        probe: str = PROBE_NAME,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.root = self.url = root
        self.readers = READERS
        self._objects: Objects = CheckFirstObjects(objects) if single_writer else objects
        self._prefix = prefix
        self._storage = storage
        self._probe = probe
        self._part_bytes = part_bytes
        self._guard = threading.Lock()
        self._is_proven = single_writer
        self._has_conditions = objects.has_atomic_conditions

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        return self.read_tagged(name).data

    def read_tagged(self, name: str | None, **within: Any) -> Found:
        """An object (None: the one at the root itself) and its ETag.

        Args:
            within: as `S3Objects.get` takes it.
        """
        return self._retried(self._objects.get, name, "reading it", **within)

    def size(self, name: str) -> int | None:
        """Bytes of an object, None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return int(self._request("head_object", name, "reading it", needs=("ContentLength",))["ContentLength"])
        return None

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """An object's bytes from an offset on."""
        size = start + 1
        with contextlib.suppress(EOFError):  # no byte is left
            while start < size:
                found = self.read_tagged(name, start=start, end=start + S3_BLOCK_BYTES)
                start = start + len(found.data)
                size = found.size_bytes
                yield found.data

    def holds(self, name: str, wanted: Held, on_progress: OnProgress, *, rereads: bool = False) -> bool:
        """Whether an object is this one. Raises FileNotFoundError.

        The store's own checksum can prove that it is. That it is not is proven by reading it alone: some servers give
        the checksum of a multipart object's parts, and no mark with it that shows it.

        Args:
            rereads: read it in any case.
        """
        reply = self._request(
            "head_object",
            name,
            "reading it",
            needs=("ContentLength",),
            ChecksumMode="ENABLED",
        )
        if int(reply["ContentLength"]) != wanted.size_bytes:
            return False
        if reply.get("ChecksumSHA256") == _base64(bytes.fromhex(wanted.sha256)) and not rereads:
            on_progress(wanted.size_bytes)
            return True
        return digest_of_blocks(self.blocks(name, 0), on_progress) == wanted

    def entries(self, folder: str) -> Iterator[Entry]:
        """All objects below a folder (`""`: all there are), without locks: a request for every thousand."""
        after: str | None = None
        with contextlib.suppress(FileNotFoundError):
            while True:
                page, after = self._retried(self._objects.page, folder or None, "listing it", after=after)
                for entry in page:
                    name = entry.name[len(self._prefix) + 1 :]
                    if not name.endswith("/") and not name.startswith(f"{LOCKS}/"):
                        yield entry._replace(name=name)
                if after is None:
                    return

    def put(self, name: str, data: bytes, *, is_synced: bool = True) -> None:
        """Write an object, durably in any case, replacing what has that name. A put whose reply was lost is repeated:
        it writes the same bytes.
        """
        self.check_conditional_writes()
        self._retried(self._objects.put, name, "writing it", data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if there is none of that name; of callers with different bytes exactly one gets True.

        A refusal may be our own doing: the put succeeded, its reply was lost, and a client library or a proxy asked
        again. So a refusal is settled by reading what is there: our bytes mean that we were the first.
        """
        self.check_conditional_writes()
        try:
            self._retried(
                self._objects.put,
                name,
                "writing it",
                data,
                is_new=True,
            )
        except ConditionFailedError:
            return self.read(name) == data
        return True

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        """Write a record if it still has the ETag that was read; False if not. After a lost reply, False may be our own
        doing.
        """
        self.check_conditional_writes()
        try:
            self._retried(
                self._objects.put,
                name,
                "replacing it",
                data,
                tag=tag,
            )
        except (ConditionFailedError, FileNotFoundError):
            return False
        return True

    def put_file(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        """Upload a local file, in parts if it is big; readers see the whole file or none.

        Raises:
            InputError: the local file is no longer what it was.
        """
        self.check_conditional_writes()  # before the gigabytes, not after them
        if held.size_bytes > self._part_bytes:
            self._put_parts(name, source, held, on_progress)
            return
        data = b"".join(_unchanged_blocks(source, self._part_bytes, held, on_progress))
        self._request(
            "put_object",
            name,
            "uploading it",
            Body=data,
            ChecksumSHA256=_checksum(data),
        )

    def _put_parts(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        begun = self._request(
            "create_multipart_upload",
            name,
            "uploading it",
            needs=("UploadId",),
            ChecksumAlgorithm="SHA256",
        )
        upload = begun["UploadId"]
        parts = list[dict[str, Any]]()
        try:
            for number, data in enumerate(_unchanged_blocks(source, self._part_bytes, held, on_progress), start=1):
                part = {"PartNumber": number, "ChecksumSHA256": _checksum(data)}
                sent = {"UploadId": upload, "Body": data, **part}
                reply = self._request(
                    "upload_part",
                    name,
                    f"uploading part {number}",
                    needs=("ETag",),
                    **sent,
                )
                parts.append({"ETag": reply["ETag"], **part})
            try:
                whole = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
                self._request("complete_multipart_upload", name, "completing its upload", **whole)
            except (FileNotFoundError, StoreError) as exc:
                if self.size(name) != held.size_bytes:
                    # else the reply to our own completion was lost, and the upload is no more
                    raise StoreError(
                        f"{self.root}/{name}: its upload could not be completed. Run the same command again."
                    ) from exc
        except BaseException:
            with contextlib.suppress(RelabelError, OSError):
                self._abort(name, upload)
            raise

    def _abort(self, name: str, upload: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request("abort_multipart_upload", name, "ending its upload", UploadId=upload)

    def sweep_uploads(self, older_s: float) -> int:
        """End what killed uploads left and that is older than so many seconds; returns how many."""
        now = self.now_s()
        uploads = []
        marks = {"Prefix": f"{self._prefix.partition('/')[2]}/"}
        while True:  # all of them first: an upload that is ended shifts the next pages
            page = self._request("list_multipart_uploads", None, "listing it", **marks)
            uploads += page.get("Uploads", ())
            # SeaweedFS orders by the upload's id and names that alone as the marker
            more = {mark: page[f"Next{mark}"] for mark in ("KeyMarker", "UploadIdMarker") if page.get(f"Next{mark}")}
            if not page.get("IsTruncated") or not more:
                break
            marks |= more
        old = [upload for upload in uploads if now - upload["Initiated"].timestamp() >= older_s]
        for upload in old:
            self._abort(upload["Key"].removeprefix(marks["Prefix"]), upload["UploadId"])
        return len(old)

    def now_s(self) -> float:
        """The store's own clock, seconds since the epoch."""
        inner = self._prefix.partition("/")[2]
        reply = self._request(
            "list_objects_v2",
            None,
            "listing it",
            Prefix=f"{inner}/",
            MaxKeys=1,
        )
        date = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            raise StoreError(f"{self.root}: its replies have no Date, so the age of nothing is known.")
        return parsedate_to_datetime(date).timestamp()

    def remove(self, name: str) -> None:
        """Remove an object that nothing depends on; none there is fine."""
        self._retried(self._objects.delete, name, "removing it")

    def sweep(self, folder: str) -> int:
        """Nothing: an object is there whole or not at all."""
        return 0

    def lock(self, name: str, what: str) -> Lease:
        """A lease."""
        self.check_conditional_writes()
        return self._lease(name, what)

    def is_locked(self, name: str) -> bool:
        """Whether a live process holds that lease."""
        return self._lease(name, name).is_alive()

    def _lease(self, name: str, what: str) -> Lease:
        key = self._key(f"leases/{name}.json")
        storage = self._storage
        return Lease(
            self._objects,
            key,
            what,
            storage.lease_s,
            storage.retry_s,
        )

    def _key(self, name: str) -> str:
        return "/".join((self._prefix, *parts_of(name, self.root)))

    def _retried(
        self, verb: Callable[..., ResultT], name: str | None, doing: str, *arguments: Any, **options: Any
    ) -> ResultT:
        """A verb of the storage on an object (None: on the root), tried again by the policy."""
        key, where = (self._prefix, self.root) if name is None else (self._key(name), f"{self.root}/{name}")
        return retried(lambda: verb(key, *arguments, **options), f"{where}: {doing}", self._storage.retry_s)

    def _request(
        self, method: str, name: str | None, doing: str, *, needs: Sequence[str] = (), **wanted: Any
    ) -> dict[str, Any]:
        """A request of S3's; a reply that lacks one of the fields in `needs` is no answer."""
        return self._retried(
            self._objects.request,
            name,
            doing,
            method,
            wanted,
            needs,
        )

    def check_conditional_writes(self) -> None:
        """Once a process, before its first write: see that the storage heeds conditions.

        Raises:
            StoreError: it does not, so that two workers could commit one chunk.
        """
        with self._guard:
            # the first probe may be refused, where an earlier run left its own; that proves as much as the second
            self._is_proven = self._is_proven or (
                self._has_conditions
                and (self._heeds(is_new=True) or self._heeds(is_new=True))
                and self._heeds(tag=f'"{0:032}"')
            )
            if not self._is_proven:
                raise StoreError(
                    f"{self.root}: this storage has no conditional writes, or accepts `If-None-Match` or `If-Match` "
                    "and ignores it, so that two workers could commit the same chunk. Use a store that has them "
                    "(docs/storage.md), or set run.single_writer: true if never more than one process writes to this "
                    "output."
                )

    def _heeds(self, **condition: Any) -> bool:
        """Whether a put of the probe under a condition is refused."""
        data = b"Written by relabel to see whether this store heeds conditions.\n"
        try:
            self._retried(
                self._objects.put,
                self._probe,
                "probing it",
                data,
                **condition,
            )
        except ConditionFailedError:
            return True
        return False


def _checksum(data: bytes) -> str:
    return _base64(hashlib.sha256(data).digest())


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


# ------------------------------------------------------------------------------
# Stores by path or URL.


Store = LocalStore | ObjectStore
Lock = FileLock | Lease


def open_run_store(url: str | Path, storage: Storage, *, single_writer: bool = False, probe: str = PROBE_NAME) -> Store:
    """The store at a path or URL. Touches nothing yet.

    Args:
        url: local path, `s3://bucket/prefix` or another URL that fsspec knows.
        single_writer: the user vouches that only one process writes, so that a store without conditional writes will
            do.
        probe: name of the object that is written to see whether the store heeds conditions.
    Raises:
        MissingExtraError, StoreError: no way to that kind of storage from here.
    """
    text = str(url).removeprefix("file://").removeprefix("local://")
    if not is_url(text):
        return LocalStore(text)
    reached = objects_of(text, storage)
    return ObjectStore(
        *reached,
        storage,
        root=text.rstrip("/"),
        single_writer=single_writer,
        probe=probe,
    )


def open_bundle_store(url: str, storage: Storage) -> Store:
    """The store for bundles at a local path or an `s3://` URL. Touches nothing yet.

    Raises:
        UsageError: neither.
        MissingExtraError: S3 needs a package that is not here.
    """
    if is_url(url) and scheme_of(url) not in ("s3", "file", "local"):
        raise UsageError(
            f"{url}: bundles are published to local paths and to s3:// alone, where a pointer can be moved safely."
        )
    return open_run_store(url, storage, probe=f"{LOCKS}/probe")


def shard_lock_name(shard: int) -> str:
    """What the lock of a shard is called."""
    return f"shard-{shard:05d}"


# ------------------------------------------------------------------------------
# A file at a URL, read in exactly the ranges that are asked for.
#
# fsspec's own files read ahead by megabytes, which for a few columns of a Parquet file fetches most of it. Here a read
# is one ranged request, retried like every other and pinned to the version that was opened, so that a
# file that is replaced meanwhile is an error and never a mixture of two.


COPY_BYTES = 32 << 20
"""A file that is copied is fetched in ranges of so many bytes."""
TAIL_BYTES = 1 << 16
"""Fetched on opening and kept: a Parquet footer mostly, and the file's size and version with it, in one request."""


class UrlFile(io.RawIOBase):
    """A readable, seekable file.

    `tag` is the version's that was opened (S3: its ETag).

    Args:
        url: of one object.
    Raises:
        FileNotFoundError: there is none.
        StoreError, StoreUnreachableError: it can't be read.
    """

    def __init__(self, url: str, storage: Storage) -> None:
        super().__init__()
        self._url = url
        self._place = 0
        self._store = ObjectStore(*objects_of(url, storage), storage, root=url)
        try:
            tail = self._store.read_tagged(None, start=-TAIL_BYTES)
        except EOFError:
            tail = Found(b"", "", 0)
        self._tail, self.tag, self.size_bytes = tail

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move there; reads nothing."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size_bytes}[whence]
        return self._place

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed's buffer type has no name before 3.12
        """Fill a buffer with the next bytes, in one request; returns how many."""
        start = self._place
        kept_from = self.size_bytes - len(self._tail)
        end = min(start + len(buffer), self.size_bytes)
        if start >= end:
            return 0
        data = self._tail[start - kept_from : end - kept_from]
        if start < kept_from:
            try:
                data = self._store.read_tagged(None, start=start, end=end, tag=self.tag).data
            except (ConditionFailedError, EOFError) as exc:
                why = "replaced while it was read. Run again, once it stays as it is."
                raise InputError(f"{self._url}: {why}") from exc
        buffer[: len(data)], self._place = data, end
        return len(data)


def scratch_file(name: str) -> Path:
    """Where a file of this name may be written; gone when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="relabel-fetched-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / name


def fetched(url: str, storage: Storage) -> Path:
    """A local copy of the file at a URL, under its own name; gone when this process ends.

    Raises:
        InputError: it is not there.
        StoreError, StoreUnreachableError: see `UrlFile`.
    """
    copy = scratch_file(url.rpartition("/")[2])
    try:
        with UrlFile(url, storage) as source, copy.open("wb") as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
    except FileNotFoundError as exc:
        raise InputError(f"{url}: no such file.") from exc
    return copy


def read_whole(path: str, storage: Storage) -> bytes:
    """All bytes of a file, local or by URL.

    Raises:
        InputError: a device, which may never end, or a folder.
        FileNotFoundError, StoreError, StoreUnreachableError: see `UrlFile`.
    """
    if not is_url(path):
        check_kind(path, Path(path).stat(), takes_pipes=True)
        return Path(path).read_bytes()
    with contextlib.suppress(EOFError):
        return ObjectStore(*objects_of(path, storage), storage, root=path).read_tagged(None).data
    return b""
