"""Objects in a bucket, one try a call: what storage must be able to do for `ObjectRunStore`, and the same over any
fsspec filesystem.

A key is `bucket/path`, as fsspec has it. A tag is opaque text that changes with an object's bytes (S3: the ETag).
`retries.py` repeats what ends in TryAgainError; all other errors are final.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from relabel.manifests.errors import RelabelError, StoreError
from relabel.manifests.storage.retries import TryAgainError


class ConditionFailedError(Exception):
    """A conditional put was refused, because the object is there, or is not the one that was named. Nothing was
    written, by this try.
    """


class Found(NamedTuple):
    """An object, or a range of it.

    Args:
        tag: of the whole object.
        size_bytes: of the whole object.
    """

    data: bytes
    tag: str
    size_bytes: int


class Objects(Protocol):
    """Storage, one try a call.

    Every verb may raise TryAgainError (throttled, server fault, no answer) and StoreError (refused for good:
    permissions, no such bucket).
    """

    has_atomic_conditions: bool
    """Whether the storage itself decides `is_new` and `tag`, as far as its kind promises; the probe finds out about
    this very one.
    """

    def get(self, key: str, *, start: int | None = None, end: int | None = None, tag: str | None = None) -> Found:
        """Bytes start..end of an object; from a negative start, its end.

        Args:
            tag: refuse another version of the object (ConditionFailedError).
        Raises:
            FileNotFoundError: there is none.
            EOFError: it has no byte in that range.
        """

    def age_s(self, key: str) -> float:
        """How long ago the object was written, seconds, by the storage's own clock; ours plays no part.

        Raises:
            FileNotFoundError: there is none.
        """

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        """Write an object; returns its tag.

        Args:
            is_new: only if there is none.
            tag: only over the object of this tag.
        Raises:
            ConditionFailedError: the condition does not hold.
        """

    def page(self, prefix: str, *, is_deep: bool, after: str | None) -> tuple[list[tuple[str, str]], str | None]:
        """Some keys below `prefix` (which ends in `/`) with their tags, and where the next page begins.

        Args:
            is_deep: also those in folders below.
            after: what the page before returned.
        """

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""


class FsspecObjects:
    """Any fsspec filesystem.

    `is_new` is the filesystem's `mode="create"`. There is no conditional replace in fsspec: `tag` is a look before the
    write, so of two that replace at once both may. Only locks use it, and locks only save work.
    """

    def __init__(self, filesystem: Any, where: str) -> None:
        self._filesystem = filesystem
        self._where = where
        protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
        # their code hands the condition to the server; most others look first and write then, which is not a commit
        self.has_atomic_conditions = bool(protocols & {"gs", "gcs", "abfs", "abfss", "az"})

    def get(self, key: str, *, start: int | None = None, end: int | None = None, tag: str | None = None) -> Found:
        with _translate_errors(f"{self._where}: can't read {key}"):
            info = self._filesystem.info(key)
            if info["type"] == "directory":
                raise FileNotFoundError(key)
            size = int(info["size"])
            data = self._filesystem.cat_file(
                key, start=max(0, size + start) if start is not None and start < 0 else start, end=end
            )
        found = Found(data, _tag(info), size)
        if tag is not None and found.tag != tag:
            raise ConditionFailedError(key)
        return found

    def age_s(self, key: str) -> float:
        """Against an object written just now, so that both times are the storage's own."""
        clock = f"{key}.clock-{secrets.token_hex(4)}"
        with _translate_errors(f"{self._where}: can't tell the age of {key}"):
            written = self._modified(key)
            self._filesystem.pipe_file(clock, b"now")
            try:
                return (self._modified(clock) - written).total_seconds()
            finally:
                self._filesystem.rm_file(clock)

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        with _translate_errors(f"{self._where}: can't write {key}"):
            if tag is not None and _tag(self._filesystem.info(key)) != tag:
                raise ConditionFailedError(key)
            try:
                self._filesystem.makedirs(key.rpartition("/")[0], exist_ok=True)
                self._filesystem.pipe_file(key, data, mode="create" if is_new else "overwrite")
            except FileExistsError as exc:
                raise ConditionFailedError(key) from exc
            self._filesystem.invalidate_cache(key.rpartition("/")[0])
            return _tag(self._filesystem.info(key))

    def page(self, prefix: str, *, is_deep: bool, after: str | None) -> tuple[list[tuple[str, str]], str | None]:
        folder = prefix.rstrip("/")
        with _translate_errors(f"{self._where}: can't list {folder}"):
            self._filesystem.invalidate_cache(folder)
            found = self._filesystem.find(folder, maxdepth=None if is_deep else 1, detail=True)
        return [(name, _tag(info)) for name, info in found.items()], None

    def delete(self, key: str) -> None:
        with _translate_errors(f"{self._where}: can't remove {key}"), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(key)

    def _modified(self, key: str) -> datetime:
        when: datetime = self._filesystem.modified(key)
        return when


def _tag(info: dict[str, Any]) -> str:
    for key in ("etag", "ETag", "md5Hash", "generation", "content_md5"):
        if info.get(key):
            return str(info[key])
    named = {
        key: str(value)
        for key, value in info.items()
        if key in ("size", "mtime", "created", "last_modified", "LastModified")
    }
    return hashlib.sha256(repr(sorted(named.items())).encode()).hexdigest()


@contextlib.contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (RelabelError, ConditionFailedError, FileNotFoundError):
        raise
    except PermissionError as exc:
        raise StoreError(f"{what}: no permission. Check the credentials and what they allow.") from exc
    except (NotImplementedError, IsADirectoryError, NotADirectoryError) as exc:
        raise StoreError(f"{what}: this kind of storage can't do it ({type(exc).__name__}).") from exc
    except Exception as exc:  # each filesystem has errors of its own, and no two agree on which of them pass
        raise TryAgainError(type(exc).__name__) from exc
