"""A bundle store on S3: conditional puts, multipart uploads with the store's own checks of sha256, ranged reads;
retried by the one policy.

Every upload carries its sha256, so that a store refuses bytes that changed on the way.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from relabel.manifests.errors import RelabelError, StoreError
from relabel.manifests.storage.bundle_store_ports import (
    LOCKS,
    MAX_RECORD_BYTES,
    Entry,
    Held,
    OnProgress,
    Tagged,
    changed,
    check_record_size,
    digest_of_blocks,
)
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import filesystem_of
from relabel.manifests.storage.object_run_store import PROBE_NAME, ObjectRunStore
from relabel.manifests.storage.objects import ConditionFailedError
from relabel.manifests.storage.retries import Retries, TryAgainError
from relabel.manifests.storage.run_store_ports import parts_of
from relabel.manifests.storage.s3_objects import S3Objects, field

BLOCK_BYTES = 16 << 20
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
            end = min(start + BLOCK_BYTES, size)
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
