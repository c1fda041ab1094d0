"""Where bundles are published: large files in blocks, small records by compare and swap, in a local folder or on S3."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from relabel.manifests.errors import InputError, RelabelError, StoreError, UsageError
from relabel.manifests.files import (
    TEMP_PREFIX,
    FileLock,
    Storage,
    filesystem_of,
    held_temp,
    is_url,
    scheme_of,
    translate_errors,
)
from relabel.manifests.objects import ConditionFailedError, Retries, S3Objects, TryAgainError, field
from relabel.manifests.records import sha256_bytes
from relabel.manifests.store import PROBE_NAME, LocalRunStore, ObjectRunStore, parts_of, sync_folder

# ------------------------------------------------------------------------------
# What a bundle store is: objects by name, records that change by compare and swap.


BLOCK_BYTES = 1 << 22


LOCKS = ".locks"


MAX_RECORD_BYTES = 64 << 20
"""No record is bigger; a bigger one is not read into memory."""


OnProgress = Callable[[int], None]
"""Receives the number of bytes that have gone through, as they go; may raise to stop the transfer."""


class Tagged(NamedTuple):
    """A record as it was read, with the tag that `replace` holds it to."""

    data: bytes
    tag: str


class Entry(NamedTuple):
    """A file in a listing: when it was written is by the bundle store's own clock."""

    name: str
    size_bytes: int
    written_s: float


class Held(NamedTuple):
    """What a bundle store holds under a name."""

    size_bytes: int
    sha256: str


class BundleStore(Protocol):
    """The verbs of a place to publish to. Reads raise FileNotFoundError where there is nothing of that name.

    Attributes:
        url: what to call the place in a message.
    """

    @property
    def url(self) -> str: ...

    def read(self, name: str) -> Tagged:
        """A record, which fits into memory.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it can't be read, or is too big to be a record.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Write a record if there is none of that name; False if there is one (it is left as it
        is), whoever wrote it.
        """

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        """Write a record if what has that name is still what was read; False if not. After a lost reply, False may be
        our own doing.
        """

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """`size` of each name, asked at once where asking takes a journey."""

    def upload(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        """Copy a local file in, in blocks; the name comes to exist whole or not at all, and what had it is replaced.

        Args:
            held: the size and digest that the file is known to have.
        Raises:
            InputError: it has another by now; the name is left as it was.
        """

    def digest(self, name: str, on_progress: OnProgress) -> Held:
        """Size and sha256 of what is held now: by the store's own checksum of the whole file, else
        by reading it back.
        """

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from an offset on."""

    def entries(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, in no order (`""`: all there are)."""

    def folders(self) -> list[str]:
        """Names of the folders right inside the root, sorted."""

    def now_s(self) -> float:
        """The bundle store's own clock, seconds since the epoch."""

    def sweep(self, older_s: float) -> int:
        """Remove what killed uploads left and that is older than so many seconds; returns how many."""


def digest_of_blocks(blocks: Iterator[bytes], on_progress: OnProgress) -> Held:
    """Size and sha256 of what comes in blocks."""
    found, size = hashlib.sha256(), 0
    for block in blocks:
        found.update(block)
        size += len(block)
        on_progress(len(block))
    return Held(size, found.hexdigest())


def changed(source: Path) -> InputError:
    """What to say of a local file that is no longer what it was when its digest was taken."""
    return InputError(f"{source}: changed while it was uploaded. Export or seal the bundle again.")


def check_record_size(where: str, size: int) -> None:
    """Refuse to read into memory what can't be a record.

    Raises:
        StoreError: it is bigger than any record.
    """
    if size > MAX_RECORD_BYTES:
        raise StoreError(
            f"{where}: holds {size:,} bytes; a record has at most {MAX_RECORD_BYTES:,}. Something else was put there."
        )


# ------------------------------------------------------------------------------
# A bundle store in a local folder.


class LocalBundleStore:
    """A bundle store in a folder on a file system that several hosts may share.

    Args:
        root: the folder; made at the first write.
    """

    def __init__(self, root: Path) -> None:
        self._store = LocalRunStore(root)
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def read(self, name: str) -> Tagged:
        path = self._store.path(name)
        check_record_size(str(path), _size_of_file(path))
        data = self._store.read(name)
        return Tagged(data, sha256_bytes(data))

    def create(self, name: str, data: bytes) -> bool:
        return self._store.create(name, data)

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        with self._locked(name):
            try:
                if self.read(name).tag != tag:
                    return False
            except FileNotFoundError:
                return False
            self._store.put(name, data)
            return True

    def delete(self, name: str) -> None:
        path = self._store.path(name)
        with translate_errors("delete", path):
            path.unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        try:
            return _size_of_file(self._store.path(name))
        except FileNotFoundError:
            return None

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        return {name: self.size(name) for name in names}

    def upload(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        path = self._store.path(name)
        with translate_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            found = hashlib.sha256()
            with held_temp(path.parent) as (temp, descriptor):
                with source.open("rb") as reader, open(descriptor, "wb", closefd=False) as writer:
                    while block := reader.read(BLOCK_BYTES):
                        found.update(block)
                        writer.write(block)
                        on_progress(len(block))
                os.fsync(descriptor)
                if found.hexdigest() != held.sha256:
                    raise changed(source)
                temp.replace(path)
            sync_folder(path.parent)

    def digest(self, name: str, on_progress: OnProgress) -> Held:
        return digest_of_blocks(self.blocks(name, 0), on_progress)

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        path = self._store.path(name)
        _size_of_file(path)
        with translate_errors("read", path, is_missing_fine=True), path.open("rb") as file:
            file.seek(start)
            while block := file.read(BLOCK_BYTES):
                yield block

    def entries(self, folder: str) -> Iterator[Entry]:
        top = self._store.path(folder) if folder else self._root
        for path, is_temp in _files_below(top):
            if not is_temp:
                with contextlib.suppress(FileNotFoundError):  # deleted by another while we look
                    held = path.stat()
                    yield Entry(path.relative_to(self._root).as_posix(), held.st_size, held.st_mtime)

    def folders(self) -> list[str]:
        if not self._root.is_dir():
            return []
        with translate_errors("list", self._root):
            return sorted(path.name for path in self._root.iterdir() if path.is_dir() and path.name != LOCKS)

    def now_s(self) -> float:
        return time.time()

    def sweep(self, older_s: float) -> int:
        now, swept = time.time(), 0
        for path, is_temp in _files_below(self._root):
            if is_temp:
                with contextlib.suppress(FileNotFoundError):
                    if now - path.stat().st_mtime >= older_s:
                        path.unlink()
                        swept += 1
        return swept

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = self._root / LOCKS / (base64.b32encode(name.encode()).decode().rstrip("=").lower()[:200] + ".lock")
        lock = FileLock(path, f"{self._root}/{name}")
        lock.acquire(waits=True)
        try:
            yield
        finally:
            lock.release()


def _size_of_file(path: Path) -> int:
    """Bytes of an ordinary file; whoever shares the folder may have put a pipe there, which no reader would come back
    from.

    Raises:
        FileNotFoundError: there is nothing, or a folder.
        StoreError: it is not an ordinary file.
    """
    with translate_errors("look at", path, is_missing_fine=True):
        found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(str(path))
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path}: is not an ordinary file. Remove it.")
    return found.st_size


def _files_below(top: Path) -> Iterator[tuple[Path, bool]]:
    """Files below a folder, and whether each is a temporary one; links are not followed."""
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name != LOCKS]
        for name in files:
            yield Path(folder) / name, name.startswith(TEMP_PREFIX)


# ------------------------------------------------------------------------------
# A bundle store on S3: conditional puts, multipart uploads with the store's own checks of sha256, ranged reads;
# retried by the one policy.
#
# Every upload carries its sha256, so that a store refuses bytes that changed on the way.


S3_BLOCK_BYTES = 16 << 20
"""Bytes a ranged read: at 50 ms a request the waiting stays under a fifth."""
PART_BYTES = 32 << 20
"""Bytes a part of an upload, held in memory: S3's 10,000 parts make 320 GB."""
_LISTED = {"Contents": ("Key", "Size", "LastModified"), "CommonPrefixes": ("Prefix",), "Uploads": ("Key", "UploadId")}
ASKED_AT_ONCE = 16
"""Objects looked at side by side."""


class S3BundleStore:
    """A bundle store in a bucket.

    Args:
        url: `s3://bucket/prefix`.
        part_bytes: size of an upload's parts; smaller files go in one put.
    """

    def __init__(self, url: str, storage: Storage, *, part_bytes: int = PART_BYTES) -> None:
        self.url = url.rstrip("/")
        self._filesystem, path = filesystem_of(self.url, storage)
        self._objects = S3Objects(self._filesystem, self.url)
        self._prefix = f"{path.strip('/')}/"
        self._part_bytes = part_bytes
        self._retries = Retries(storage.retry_s)
        self._records = ObjectRunStore(
            self._objects, self._prefix.rstrip("/"), storage, root=self.url, probe=f"{LOCKS}/{PROBE_NAME}"
        )

    def read(self, name: str) -> Tagged:
        found = self._retried(
            functools.partial(self._objects.get, self._key(name), start=0, end=MAX_RECORD_BYTES), name, "reading it"
        )
        check_record_size(f"{self.url}/{name}", found.size_bytes)
        return Tagged(found.data, found.tag)

    def create(self, name: str, data: bytes) -> bool:
        return self._records.create(name, data)

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        self._records.check_conditional_writes()
        try:
            self._retried(functools.partial(self._objects.put, self._key(name), data, tag=tag), name, "replacing it")
        except (ConditionFailedError, FileNotFoundError):
            return False
        return True

    def delete(self, name: str) -> None:
        self._retried(functools.partial(self._objects.delete, self._key(name)), name, "removing it")

    def size(self, name: str) -> int | None:
        try:
            return int(self._ask("head_object", name, "looking at it", needs=("ContentLength",))["ContentLength"])
        except FileNotFoundError:
            return None

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(names, pool.map(self.size, names), strict=True))

    def upload(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        """See `BundleStore.upload`.

        Raises:
            InputError: the local file is no longer what it was.
        """
        self._records.check_conditional_writes()  # before the gigabytes, not after them
        if held.size_bytes > self._part_bytes:
            self._upload_parts(name, source, held, on_progress)
            return
        data = source.read_bytes()
        if hashlib.sha256(data).hexdigest() != held.sha256:
            raise changed(source)
        self._ask("put_object", name, "uploading it", Body=data, ChecksumSHA256=_checksum(data))
        on_progress(len(data))

    def digest(self, name: str, on_progress: OnProgress) -> Held:
        reply = self._ask("head_object", name, "looking at it", needs=("ContentLength",), ChecksumMode="ENABLED")
        size, checksum = int(reply["ContentLength"]), reply.get("ChecksumSHA256", "")
        if checksum and "-" not in checksum and reply.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
            with contextlib.suppress(ValueError):
                found = base64.b64decode(checksum, validate=True)
                on_progress(size)
                return Held(size, found.hex())
        return digest_of_blocks(self.blocks(name, 0), on_progress)

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.url}/{name}")
        while start < size:
            end = min(start + S3_BLOCK_BYTES, size)
            yield self._retried(functools.partial(self._range, self._key(name), start, end), name, "reading it")
            start = end

    def entries(self, folder: str) -> Iterator[Entry]:
        for page in self._pages(Prefix=self._inner(f"{folder}/" if folder else "")):
            for found in page.get("Contents", ()):
                name = found["Key"].removeprefix(self._inner(""))
                if not name.endswith("/") and not name.startswith(f"{LOCKS}/"):
                    yield Entry(name, int(found["Size"]), found["LastModified"].timestamp())

    def folders(self) -> list[str]:
        pages = self._pages(Prefix=self._inner(""), Delimiter="/")
        found = [
            part["Prefix"].removeprefix(self._inner("")).rstrip("/")
            for page in pages
            for part in page.get("CommonPrefixes", ())
        ]
        return sorted(name for name in found if name != LOCKS)

    def now_s(self) -> float:
        reply = self._ask_bucket("list_objects_v2", Prefix=self._inner(""), MaxKeys=1)
        date = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            raise StoreError(
                f"{self.url}: the store tells no time (no Date in its replies), so nothing's age is known."
            )
        return parsedate_to_datetime(date).timestamp()

    def sweep(self, older_s: float) -> int:
        now, swept = self.now_s(), 0
        for upload in list(self._uploads()):  # all of them first: an upload that is ended shifts the pages behind it
            begun = upload.get("Initiated")
            if isinstance(begun, datetime) and now - begun.timestamp() >= older_s:
                self._abort(upload["Key"].removeprefix(self._inner("")), upload["UploadId"])
                swept += 1
        return swept

    def _upload_parts(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        begun = self._ask(
            "create_multipart_upload", name, "uploading it", needs=("UploadId",), ChecksumAlgorithm="SHA256"
        )
        upload = begun["UploadId"]
        found = hashlib.sha256()
        parts: list[dict[str, Any]] = []
        try:
            with source.open("rb") as file:
                while data := file.read(self._part_bytes):
                    found.update(data)
                    parts.append(self._upload_part(name, upload, len(parts) + 1, data))
                    on_progress(len(data))
            if found.hexdigest() != held.sha256:
                raise changed(source)
            self._complete(name, upload, parts, held)
        except BaseException:
            with contextlib.suppress(RelabelError, OSError):
                self._abort(name, upload)
            raise

    def _upload_part(self, name: str, upload: str, number: int, data: bytes) -> dict[str, Any]:
        checksum, verb = _checksum(data), f"uploading part {number}"
        sent = {"UploadId": upload, "PartNumber": number, "Body": data, "ChecksumSHA256": checksum}
        reply = self._ask("upload_part", name, verb, needs=("ETag",), **sent)
        return {"PartNumber": number, "ETag": reply["ETag"], "ChecksumSHA256": checksum}

    def _complete(self, name: str, upload: str, parts: list[dict[str, Any]], held: Held) -> None:
        try:
            self._ask(
                "complete_multipart_upload",
                name,
                "completing its upload",
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except (FileNotFoundError, StoreError) as exc:
            if self.size(name) != held.size_bytes:
                # else the reply to our own completion was lost, and the upload is no more
                raise StoreError(
                    f"{self.url}/{name}: its upload could not be completed. Run the same command again."
                ) from exc

    def _abort(self, name: str, upload: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask("abort_multipart_upload", name, "ending its upload", UploadId=upload)

    def _range(self, key: str, start: int, end: int) -> bytes:
        data = self._objects.get(key, start=start, end=end).data
        if len(data) != end - start:
            raise TryAgainError(f"{len(data)} bytes came of {end - start}")
        return data

    def _pages(self, **wanted: Any) -> Iterator[dict[str, Any]]:
        while True:
            page = self._ask_bucket("list_objects_v2", **wanted)
            yield page
            if not page.get("IsTruncated"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def _uploads(self) -> Iterator[dict[str, Any]]:
        """Uploads that were begun and not ended."""
        wanted: dict[str, Any] = {"Prefix": self._inner("")}
        while True:
            page = self._ask_bucket("list_multipart_uploads", **wanted)
            yield from page.get("Uploads", ())
            # SeaweedFS orders by the upload's id and names that alone as the marker
            marks = {mark: page[f"Next{mark}"] for mark in ("KeyMarker", "UploadIdMarker") if page.get(f"Next{mark}")}
            if not page.get("IsTruncated") or not marks:
                return
            wanted |= marks

    def _ask(self, method: str, name: str, verb: str, *, needs: Sequence[str] = (), **wanted: Any) -> dict[str, Any]:
        """A request about an object; a reply that lacks one of the fields in `needs` is none."""
        key = self._key(name)
        bucket, _, inner = key.partition("/")

        def call() -> dict[str, Any]:
            reply = self._objects.request(key, method, {"Bucket": bucket, "Key": inner, **wanted})
            for need in needs:
                field(reply, need)
            return reply

        found: dict[str, Any] = self._retried(call, name, verb)
        return found

    def _ask_bucket(self, method: str, **wanted: Any) -> dict[str, Any]:
        """A listing; one that lacks what each of its entries has is none."""

        def call() -> dict[str, Any]:
            reply = self._objects.request(self._prefix, method, {"Bucket": self._prefix.partition("/")[0], **wanted})
            for kind, needs in _LISTED.items():
                for entry in reply.get(kind, ()):
                    for need in needs:
                        field(entry, need)
            if method == "list_objects_v2" and reply.get("IsTruncated"):
                field(reply, "NextContinuationToken")
            return reply

        found: dict[str, Any] = self._retried(call, "", "listing it")
        return found

    def _retried(self, call: Callable[[], Any], name: str, verb: str) -> Any:
        return self._retries.call(call, f"{self.url}/{name}: {verb}".replace("/:", ":"))

    def _key(self, name: str) -> str:
        return self._prefix + "/".join(parts_of(name, self.url))

    def _inner(self, name: str) -> str:
        """A key inside the bucket."""
        return self._prefix.partition("/")[2] + name


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


# ------------------------------------------------------------------------------
# Where bundles are published: big files in and out in blocks, small records by conditional writes, all in one flat
# space of names.
#
# A bundle store differs from a run's store in what it holds: files too big for memory, addressed by their digests, and
# records that are replaced only if they are still as they were read (compare and swap). `LocalBundleStore` keeps to a
# folder, `S3BundleStore` to a bucket.
# Names are relative, with `/`, and can't leave the root. A write is durable when the call returns.


def open_bundle_store(url: str, storage: Storage) -> BundleStore:
    """The bundle store behind a local path or an `s3://` URL. Touches nothing yet.

    Raises:
        UsageError: neither.
        MissingExtraError: S3 needs a package that is not here.
    """
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    if not is_url(url):
        return LocalBundleStore(Path(url))
    if scheme_of(url) == "s3":
        return S3BundleStore(url, storage)
    raise UsageError(
        f"{url}: bundles are published to local paths and to s3:// alone, where a pointer can be moved safely."
    )
