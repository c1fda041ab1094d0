"""Objects in a bucket, one request a call, with the retry policy; over S3 and over any fsspec filesystem."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

from relabel.manifests.errors import DiskFullError, RelabelError, StoreError, StoreUnreachableError
from relabel.manifests.files import out_of_files

# ------------------------------------------------------------------------------
# How long a storage call is tried again: exponential backoff with full jitter, up to a stated limit of tries and
# seconds.
#
# This is the only retry policy there is: those of botocore and s3fs are switched off (`filesystems.py`), so that what
# is stated here is what happens.


ResultT = TypeVar("ResultT")

MAX_TRIES = 12
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0


class TryAgainError(Exception):
    """No good answer (throttled, a fault of the server, a broken connection, a time-out). Whether the call acted is not
    known.
    """


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of one kind of call.

    Args:
        limit_s: no try begins later than this after the first, seconds (`Storage.retry_s`).
    """

    limit_s: float
    tries: int = MAX_TRIES

    def call(self, function: Callable[[], ResultT], what: str) -> ResultT:
        """Call until it answers.

        The pause before try k + 1 is drawn evenly from 0 to `min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**(k - 1))`, so that
        many workers that were throttled together do not come back together.

        Args:
            function: may raise TryAgainError; it must be safe to call again then.
            what: what is tried, for the message: a name and a verb.
        Raises:
            StoreUnreachableError: the limit is reached.
        """
        started = time.monotonic()
        for number in range(1, self.tries + 1):
            try:
                return function()
            except TryAgainError as exc:
                waited = time.monotonic() - started
                pause = random.uniform(0.0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)))
                if number == self.tries or waited + pause > self.limit_s:
                    raise StoreUnreachableError(
                        f"{what}: no good answer in {number} tries over {waited:.0f} s (the last: {exc}). What was "
                        "committed is safe; run "
                        "the same command again."
                    ) from exc
            time.sleep(pause)
        raise AssertionError("unreachable: the last try returns or raises")


# ------------------------------------------------------------------------------
# Objects in a bucket, one try a call: what storage must be able to do for `ObjectRunStore`, and the same over any
# fsspec filesystem.
#
# A key is `bucket/path`, as fsspec has it. A tag is opaque text that changes with an object's bytes (S3: the ETag).
# `retries.py` repeats what ends in TryAgainError; all other errors are final.


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


class Entry(NamedTuple):
    """An object or file in a listing: when it was written is by the store's own clock; the tag changes with its
    bytes.
    """

    name: str
    size_bytes: int
    written_s: float
    tag: str


class FsspecObjects:
    """Any fsspec filesystem; the verbs are those of `S3Objects`.

    `is_new` is the filesystem's `mode="create"`. There is no conditional replace in fsspec: `tag` is a read before the
    write, so of two that replace at once both may. Only locks use it, and locks only save work.
    """

    def __init__(self, filesystem: Any, where: str) -> None:
        self._filesystem = filesystem
        self._where = where
        protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
        # their code hands the condition to the server; most others read first and write then, which is not a commit
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
        with _translate_errors(f"{self._where}: can't read the age of {key}"):
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

    def page(self, key: str, *, is_deep: bool, after: str | None) -> tuple[list[Entry], str | None]:
        with _translate_errors(f"{self._where}: can't list {key}"):
            self._filesystem.invalidate_cache(key)
            found = self._filesystem.find(key, maxdepth=None if is_deep else 1, detail=True)
        found.pop(key, None)  # of a file, `find` names the file itself
        return [Entry(name, int(info.get("size") or 0), 0.0, _tag(info)) for name, info in found.items()], None

    def delete(self, key: str) -> None:
        with _translate_errors(f"{self._where}: can't remove {key}"), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(key)

    def request(self, key: str, method: str, wanted: dict[str, Any], needs: Sequence[str]) -> dict[str, Any]:
        raise StoreError(f"{self._where}: only S3 knows {method}.")

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


# ------------------------------------------------------------------------------
# Objects on S3 and on what speaks its protocol, through s3fs: one request a call, conditions and clocks left to the
# server.


_TRY_AGAIN_CODES = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TooManyRequests",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "ConditionalRequestConflict",
        "OperationAborted",
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
    }
)
_FULL_CODES = frozenset(
    {
        "InsufficientStorage",
        "QuotaExceeded",
        "BucketQuotaExceeded",
        "XMinioStorageFull",
        "XMinioAdminBucketQuotaExceeded",
    }
)
_TRY_AGAIN_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_NO_CREDENTIALS = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "TokenRetrievalError",
    }
)
_NO_PERMISSION = "no permission; check the credentials, and what they allow: docs/storage.md lists what is needed"
_HINTS = {
    "NoSuchBucket": "there is no such bucket; create it, or fix the URL",
    "SignatureDoesNotMatch": "the secret key is not the one of this access key",
    "InvalidAccessKeyId": "the access key is not known there",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock is off by more than the server allows; set it",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION",
    "401": _NO_PERMISSION,
    "403": _NO_PERMISSION,
    "501": "the store does not know this kind of request; docs/storage.md says what it must know",
}
"""By code, else by status: why a store refuses for good, and what to do."""


class S3Objects:
    """A bucket. Every verb may raise TryAgainError (throttled, server fault, no answer) and StoreError (refused for
    good: permissions, no such bucket).

    Args:
        filesystem: an s3fs filesystem that does not retry by itself.
    """

    has_atomic_conditions = True
    """Whether the storage itself decides `is_new` and `tag`, as far as its kind promises; the probe finds out about
    this very one.
    """

    def __init__(self, filesystem: Any, where: str) -> None:
        self._filesystem = filesystem
        self._where = where

    def get(self, key: str, *, start: int | None = None, end: int | None = None, tag: str | None = None) -> Found:
        """Bytes start..end of an object; from a negative start, its end.

        Args:
            tag: refuse another version of the object (ConditionFailedError).
        Raises:
            FileNotFoundError: there is none.
            EOFError: it has no byte in that range.
        """
        wanted = _place(key)
        if start is not None:
            wanted["Range"] = f"bytes={start}" if start < 0 else f"bytes={start}-{'' if end is None else end - 1}"
        if tag is not None:
            wanted["IfMatch"] = tag
        reply, data = self._do(key, self._read, wanted)
        size_text = reply["ContentRange"].rpartition("/")[2] if "ContentRange" in reply else str(len(data))
        size = int(size_text) if size_text.isdecimal() else -1
        if len(data) != _length(size, start, end) or len(data) != int(reply.get("ContentLength", len(data))):
            raise TryAgainError("the reply was cut short")
        return Found(data, field(reply, "ETag"), size)

    def age_s(self, key: str) -> float:
        """How long ago the object was written, seconds, by the storage's own clock: the reply's `Date` less its
        `Last-Modified`.
        """
        reply = self._do(key, self._filesystem._call_s3, "head_object", _place(key))
        headers = reply["ResponseMetadata"]["HTTPHeaders"]
        try:
            now, written = (parsedate_to_datetime(field(headers, name)) for name in ("date", "last-modified"))
        except ValueError as exc:
            raise TryAgainError("the reply had no date that can be read") from exc
        return float((now - written).total_seconds())

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        """Write an object; returns its tag.

        Args:
            is_new: only if there is none.
            tag: only over the object of this tag.
        Raises:
            ConditionFailedError: the condition does not hold.
        """
        wanted = {**_place(key), "Body": data}
        if is_new:
            wanted["IfNoneMatch"] = "*"
        if tag is not None:
            wanted["IfMatch"] = tag
        return str(field(self._do(key, self._filesystem._call_s3, "put_object", wanted), "ETag"))

    def page(self, key: str, *, is_deep: bool, after: str | None) -> tuple[list[Entry], str | None]:
        """Some objects below a key, named by their keys, and where the next page begins.

        Args:
            is_deep: also those in folders below.
            after: what the page before returned.
        """
        bucket, _, inner = key.partition("/")
        wanted = {"Bucket": bucket, "Prefix": f"{inner}/"}
        if not is_deep:
            wanted["Delimiter"] = "/"
        if after is not None:
            wanted["ContinuationToken"] = after
        reply = self._do(key, self._list, wanted)
        found = [
            Entry(
                f"{bucket}/{field(entry, 'Key')}",
                int(field(entry, "Size")),
                field(entry, "LastModified").timestamp(),
                field(entry, "ETag"),
            )
            for entry in reply.get("Contents", ())
        ]
        return found, field(reply, "NextContinuationToken") if reply.get("IsTruncated") else None

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""
        self._do(key, self._filesystem._call_s3, "delete_object", _place(key))

    def request(self, key: str, method: str, wanted: dict[str, Any], needs: Sequence[str]) -> dict[str, Any]:
        """Any other request of S3's about a key, with its errors sorted out as those of the verbs above.

        Args:
            needs: fields without which a reply is no answer.
        """
        place = {"Bucket": key.partition("/")[0]} if method.startswith("list_") else _place(key)
        reply: dict[str, Any] = self._do(key, self._filesystem._call_s3, method, {**place, **wanted})
        for need in needs:
            field(reply, need)
        for upload in reply.get("Uploads", ()):
            for need in ("Key", "UploadId", "Initiated"):
                field(upload, need)
        return reply

    async def _list(self, wanted: dict[str, Any]) -> dict[str, Any]:
        await self._filesystem.set_session()
        parsers = self._filesystem.session.get_component("response_parser_factory")
        parsers.set_parser_defaults(timestamp_parser=_moment)
        reply: dict[str, Any] = await self._filesystem._call_s3("list_objects_v2", wanted)
        return reply

    async def _read(self, wanted: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        reply = await self._filesystem._call_s3("get_object", wanted)
        async with reply["Body"] as body:
            return reply, await body.read()

    def _do(self, key: str, function: Any, *arguments: Any) -> Any:
        from fsspec.asyn import sync

        try:
            return sync(self._filesystem.loop, function, *arguments)
        except Exception as exc:  # sorted out by kind below; nothing of it passes unseen
            raise self._meaning(exc, key) from exc

    def _meaning(self, exc: Exception, key: str) -> Exception:
        """Ours for theirs. Their texts stay in the chain: some repeat what was sent."""
        cause = exc.__cause__ if getattr(exc.__cause__, "response", None) else exc
        reply: Any = getattr(cause, "response", None)
        if not isinstance(reply, dict):
            return self._meaning_without_reply(exc, key)
        code = str(reply.get("Error", {}).get("Code", ""))
        status = int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = f"{status} {code}" if code and code != str(status) else str(status)
        place = f"{self._where.partition('://')[0]}://{key}"
        if status == 412 or code == "PreconditionFailed":
            return ConditionFailedError(key)
        if status == 404 and code not in _HINTS:
            return FileNotFoundError(place)
        if status == 507 or code in _FULL_CODES:
            return DiskFullError(
                f"{place}: no space left in the bucket ({said}). What was committed is safe; free some space, or "
                "raise the quota, and run the same command again."
            )
        if code in _TRY_AGAIN_CODES or (status in _TRY_AGAIN_STATUSES and code not in _HINTS):
            return TryAgainError(said)
        if status == 416:
            return EOFError(place)
        hint = _HINTS.get(code) or _HINTS.get(str(status))
        return StoreError(f"{place}: refused ({said})" + (f": {hint}." if hint else "."))

    def _meaning_without_reply(self, exc: Exception, key: str) -> Exception:
        name = type(exc).__name__
        place = f"{self._where.partition('://')[0]}://{key}"
        if (why := out_of_files(exc)) is not None:
            return StoreError(f"{place}: {why}")
        if name in _NO_CREDENTIALS:
            return StoreError(
                f"{place}: no credentials ({name}). Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
                "storage_options."
            )
        if isinstance(exc, FileNotFoundError):
            return exc
        if isinstance(exc, PermissionError):
            return StoreError(f"{place}: no permission. Check the credentials and what they allow.")
        import botocore.exceptions as known
        from botocore.parsers import ResponseParserError

        if name == "SSLError":
            return StoreError(
                f"{place}: the server's certificate is not trusted. Fix the endpoint's URL, or name its authority in "
                "AWS_CA_BUNDLE."
            )
        passing = (
            known.HTTPClientError | known.ConnectionError | known.IncompleteReadError | known.FlexibleChecksumError
        )
        if isinstance(exc, passing | ResponseParserError):
            return TryAgainError(name)
        if isinstance(exc, known.BotoCoreError | ValueError | TypeError):
            return StoreError(f"{place}: can't be asked for ({name}). Check the URL, the endpoint and storage_options.")
        if (
            isinstance(exc, OSError | asyncio.TimeoutError | EOFError)
            or type(exc).__module__.partition(".")[0] == "aiohttp"
        ):
            return TryAgainError(name)
        return exc


def field(reply: Mapping[str, Any], name: str) -> Any:
    """A field that every reply of its kind has: one without it, from a proxy in between, say, is no answer.

    Raises:
        TryAgainError: it is not there.
    """
    if name not in reply:
        raise TryAgainError(f"the reply had no {name}")
    return reply[name]


def _moment(text: Any) -> datetime:
    """A time of a reply. Those of a listing are ISO 8601, which botocore reads with dateutil: two thirds of a listing's
    CPU time (2026-11-23). All others are left to it.
    """
    from botocore.utils import parse_timestamp

    if isinstance(text, str) and text[10:11] == "T":
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(text)
    found: datetime = parse_timestamp(text)
    return found


def _length(size: int, start: int | None, end: int | None) -> int:
    """Bytes from start to end of an object of that size; from a negative start, its end."""
    if start is None:
        return size
    return min(-start, size) if start < 0 else min(size if end is None else end, size) - start


def _place(key: str) -> dict[str, Any]:
    bucket, _, inner = key.partition("/")
    return {"Bucket": bucket, "Key": inner}


class CheckFirstObjects:
    """Storage whose conditions are a read before the write: enough for one writer, and mostly to keep overlapping runs
    apart.
    """

    has_atomic_conditions = False

    def __init__(self, objects: Any) -> None:
        self._objects = objects
        self.get: Callable[..., Found] = objects.get
        self.age_s, self.page, self.delete, self.request = objects.age_s, objects.page, objects.delete, objects.request

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        if is_new or tag is not None:
            try:
                found: str | None = self.get(key).tag
            except FileNotFoundError:
                found = None
            if (found is not None) if is_new else found != tag:
                raise ConditionFailedError(key)
        return str(self._objects.put(key, data))


Objects = S3Objects | FsspecObjects | CheckFirstObjects
