"""Objects in a bucket, one request a call, with the retry policy; over S3 and over any fsspec filesystem; and leases:
which worker holds a shard there, by the clock of the store.
"""

import contextlib
import functools
import itertools
import json
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from relabel.manifests.errors import DiskFullError, LockHeldError, RelabelError, StoreError, StoreUnreachableError
from relabel.manifests.files import HERE, out_of_files, scheme_of
from relabel.manifests.records import build_checks, checked, read_in_threads, readable_json, sha256_bytes

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# How long a storage call is tried again: exponential backoff with full jitter, up to a stated limit of seconds.
#
# This is the only retry policy there is: those of botocore and s3fs are switched off (`filesystem_of`), so that what
# is stated here is what happens.


ResultT = TypeVar("ResultT")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0
WARN_EVERY_S = 60.0
SILENT_S = 10.0
"""How long a call is tried again before somebody who watches reads of it."""


class TryAgainError(Exception):
    """No good answer (throttled, a fault of the server, a broken connection, a time-out). Whether the call acted is not
    known.
    """


def retried(function: Callable[[], ResultT], what: str, limit_s: float, tries: int | None = None) -> ResultT:
    """Call until it answers.

    The pause before try k + 1 is drawn evenly from 0 to `min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**(k - 1))`, so that
    many workers that were throttled together do not come back together.

    Args:
        function: may raise TryAgainError; it must be safe to call again then.
        what: what is tried, for the message: a name and a verb.
        limit_s: no try begins later than this after the first, seconds (`Storage.retry_s`).
        tries: at most so many, where a limit of time is not enough.
    Raises:
        StoreUnreachableError: the limit is reached.
    """
    started = time.monotonic()
    for number in itertools.count(1):
        try:
            return function()
        except TryAgainError as exc:
            waited = time.monotonic() - started
            pause = random.uniform(0.0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(number - 1, 10)))
            if number == tries or waited + pause > limit_s:
                raise StoreUnreachableError(
                    f"{what}: no good answer in {number} tries over {waited:.0f} s (the last: {exc}). What was "
                    "committed is safe; run the same command again."
                ) from exc
            if waited > SILENT_S:
                _warn_of_waiting(str(exc), limit_s, int(time.monotonic() // WARN_EVERY_S))
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


@functools.lru_cache(maxsize=8)
def _warn_of_waiting(why: str, limit_s: float, window: int) -> None:
    """Warn, once in each window of time, however many calls wait.

    Args:
        window: its number.
    """
    del window
    logger.warning("the store gives no good answer (%s); each call is tried again for up to %g s", why, limit_s)


# ------------------------------------------------------------------------------
# Objects in a bucket, one try a call: what storage must be able to do for `ObjectStore`, and the same over any
# fsspec filesystem.
#
# A key is `bucket/path`, as fsspec has it. A tag is opaque text that changes with an object's bytes (S3: the ETag).
# `retried` repeats what ends in TryAgainError; all other errors are final.


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
        # their code hands the condition to the server; most others read first and write then, which is not a commit
        self.has_atomic_conditions = scheme_of(where) in ("s3", "gs", "gcs", "abfs", "abfss", "az")

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
            written = self._filesystem.modified(key)
            self._filesystem.pipe_file(clock, b"now")
            try:
                return float((self._filesystem.modified(clock) - written).total_seconds())
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

    def page(self, key: str, *, after: str | None) -> tuple[list[Entry], str | None]:
        with _translate_errors(f"{self._where}: can't list {key}"):
            self._filesystem.invalidate_cache(key)
            found = self._filesystem.find(key, detail=True)
        found.pop(key, None)  # of a file, `find` names the file itself
        return [Entry(name, int(info.get("size") or 0), 0.0, _tag(info)) for name, info in found.items()], None

    def delete(self, key: str) -> None:
        with _translate_errors(f"{self._where}: can't remove {key}"), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(key)

    def request(self, key: str, method: str, wanted: dict[str, Any], needs: Sequence[str] = ()) -> dict[str, Any]:
        raise StoreError(f"{self._where}: only S3 knows {method}.")


def _tag(info: dict[str, Any]) -> str:
    tag = next((info[key] for key in ("etag", "ETag", "md5Hash", "generation", "content_md5") if info.get(key)), None)
    known = ("LastModified", "created", "last_modified", "mtime", "size")
    return str(tag or sha256_bytes(repr([(key, str(info[key])) for key in known if key in info]).encode()))


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
        "ResponseParserError",  # botocore's own
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
_HINTS = {
    **dict.fromkeys(
        ("401", "403", "PermissionError"),
        "no permission; check the credentials, and what they allow: docs/storage.md lists what is needed",
    ),
    **dict.fromkeys(
        (
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "ProfileNotFound",
            "TokenRetrievalError",
        ),
        "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or storage_options",
    ),
    "NoSuchBucket": "there is no such bucket; create it, or fix the URL",
    "SignatureDoesNotMatch": "the secret key is not the one of this access key",
    "InvalidAccessKeyId": "the access key is not known there",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock is off by more than the server allows; set it",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION",
    "501": "the store does not know this kind of request; docs/storage.md says what it must know",
    "SSLError": "the server's certificate is not trusted; fix the endpoint's URL, or set AWS_CA_BUNDLE",
}
"""By code, else by status, else by botocore's exception: why a store refuses for good, and what to do."""


class S3Objects(FsspecObjects):
    """A bucket. Every verb may raise TryAgainError (throttled, server fault, no answer) and StoreError (refused for
    good: permissions, no such bucket).

    Args:
        filesystem: an s3fs filesystem that does not retry by itself.
    """

    def get(self, key: str, *, start: int | None = None, end: int | None = None, tag: str | None = None) -> Found:
        """Bytes start..end of an object; from a negative start, its end.

        Args:
            tag: refuse another version of the object (ConditionFailedError).
        Raises:
            FileNotFoundError: there is none.
            EOFError: it has no byte in that range.
        """
        reply, data = self._do(key, self._read, _given(_place(key), Range=_range_header(start, end), IfMatch=tag))
        size_text = reply["ContentRange"].rpartition("/")[2] if "ContentRange" in reply else str(len(data))
        size = int(size_text) if size_text.isdecimal() else -1
        if start is None:
            due = size
        elif start < 0:
            due = min(-start, size)
        else:
            due = (size if end is None else min(end, size)) - start
        if len(data) != due or len(data) != int(reply.get("ContentLength", due)):
            raise TryAgainError("the reply was cut short")
        return Found(data, field(reply, "ETag"), size)

    def age_s(self, key: str) -> float:
        """How long ago the object was written, seconds, by the storage's own clock: the reply's `Date` less its
        `Last-Modified`.
        """
        headers = self.request(key, "head_object", {})["ResponseMetadata"]["HTTPHeaders"]
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
        wanted = _given({"Body": data}, IfNoneMatch="*" if is_new else None, IfMatch=tag)
        return str(self.request(key, "put_object", wanted, ("ETag",))["ETag"])

    def page(self, key: str, *, after: str | None) -> tuple[list[Entry], str | None]:
        """Some objects below a key, at any depth, named by their keys, and where the next page begins.

        Args:
            after: what the page before returned.
        """
        bucket, _, inner = key.partition("/")
        wanted = {"Bucket": bucket, "Prefix": inner and f"{inner}/"}
        reply = self._do(key, self._list, _given(wanted, ContinuationToken=after))
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
        self.request(key, "delete_object", {})

    def request(self, key: str, method: str, wanted: dict[str, Any], needs: Sequence[str] = ()) -> dict[str, Any]:
        """Any request of S3's about a key, or of `list_…` about its bucket, with its errors sorted out.

        Args:
            needs: fields without which a reply is no answer.
        """
        place = {"Bucket": key.partition("/")[0]} if method.startswith("list_") else _place(key)
        reply: dict[str, Any] = self._do(key, self._filesystem._call_s3, method, {**place, **wanted})
        uploads = [(one, ("Key", "UploadId", "Initiated")) for one in reply.get("Uploads", ())]
        for held, names in ((reply, needs), *uploads):
            for name in names:
                field(held, name)
        return reply

    async def _list(self, wanted: dict[str, Any]) -> Any:
        await self._filesystem.set_session()
        parsers = self._filesystem.session.get_component("response_parser_factory")
        parsers.set_parser_defaults(timestamp_parser=_moment)
        return await self._filesystem._call_s3("list_objects_v2", wanted)

    async def _read(self, wanted: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        reply = await self._filesystem._call_s3("get_object", wanted)
        async with reply["Body"] as body:
            return reply, await body.read()

    def _do(self, key: str, function: Any, *arguments: Any) -> Any:
        from fsspec.asyn import sync

        try:
            return sync(self._filesystem.loop, function, *arguments)
        except Exception as exc:  # sorted out by kind below; nothing of it passes unseen
            translated = self._translated(exc, key)
            if translated is exc:
                raise
            raise translated from exc

    def _translated(self, exc: Exception, key: str) -> Exception:
        """Our error for one of s3fs or botocore. Its text is not copied into our message, since some repeat the
        request; it stays in `__cause__`.
        """
        where = f"{self._where.partition('://')[0]}://{key}"
        reply: Any = getattr(exc.__cause__, "response", None) or getattr(exc, "response", None)
        status = 0
        code = type(exc).__name__  # where there is no reply, which has a code of its own
        if isinstance(reply, dict):
            status = int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            code = str(reply.get("Error", {}).get("Code", ""))
        answer = code
        if status:
            answer = f"{status} {code if code != str(status) else ''}".strip()
        hint = _HINTS.get(code) or _HINTS.get(str(status))
        if status == 412 or code == "PreconditionFailed":
            return ConditionFailedError(key)
        if code == "FileNotFoundError" or (status == 404 and code not in _HINTS):
            return FileNotFoundError(where)
        if status == 507 or code in _FULL_CODES:
            return DiskFullError(
                f"{where}: no space left in the bucket ({answer}). What was committed is safe; free some space, or "
                "raise the quota, and run the same command again."
            )
        if code in _TRY_AGAIN_CODES or (status in _TRY_AGAIN_STATUSES and code not in _HINTS):
            return TryAgainError(answer)
        if status == 416:
            return EOFError(where)
        if hint:
            return StoreError(f"{where}: refused ({answer}): {hint}.")
        if status:
            return StoreError(f"{where}: refused ({answer}).")
        return self._translated_without_reply(exc, where, answer)

    def _translated_without_reply(self, exc: Exception, where: str, answer: str) -> Exception:
        """Of an error that no server answered with: the error itself where it is none of storage."""
        import botocore.exceptions as known
        from botocore.parsers import ResponseParserError

        why = out_of_files(exc)
        if why is not None:
            return StoreError(f"{where}: {why}")
        is_garbled = isinstance(exc, known.IncompleteReadError | known.FlexibleChecksumError | ResponseParserError)
        if is_garbled or isinstance(exc, known.HTTPClientError | known.ConnectionError):
            return TryAgainError(f"{answer}{_address_text(exc)}")
        if isinstance(exc, known.BotoCoreError | ValueError | TypeError):
            return StoreError(
                f"{where}: can't be asked for ({answer}). Check the URL, the endpoint and storage_options."
            )
        if isinstance(exc, OSError | EOFError) or type(exc).__module__.startswith("aiohttp"):
            return TryAgainError(answer)
        return exc


def _address_text(exc: Exception) -> str:
    """Which server was asked, where botocore's error knows it; not the rest of the URL, which may hold a signature."""
    url = str(getattr(exc, "kwargs", {}).get("endpoint_url", ""))
    return f" at {urlsplit(url).netloc.rpartition('@')[2]}" if url else ""


def _range_header(start: int | None, end: int | None) -> str | None:
    if start is None:
        return None
    if start < 0:
        return f"bytes={start}"
    return f"bytes={start}-{'' if end is None else end - 1}"


def field(reply: Mapping[str, Any], name: str) -> Any:
    """A field that every reply of its kind has: one without it, from a proxy in between, is no answer.

    Raises:
        TryAgainError: it is not there.
    """
    if name not in reply:
        raise TryAgainError(f"the reply had no {name}")
    return reply[name]


def _moment(text: Any) -> Any:
    """A time of a reply. Those of a listing are ISO 8601, which botocore reads with dateutil: two thirds of a listing's
    CPU time (2026-11-23). All others are left to it.
    """
    from botocore.utils import parse_timestamp

    with contextlib.suppress(TypeError, ValueError):
        return datetime.fromisoformat(text)
    return parse_timestamp(text)


def _given(wanted: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A request's arguments, with those of the others that are not None."""
    return wanted | {name: value for name, value in more.items() if value is not None}


def _place(key: str) -> dict[str, Any]:
    bucket, _, inner = key.partition("/")
    return {"Bucket": bucket, "Key": inner}


class CheckFirstObjects:
    """Storage whose conditions are a read before the write: enough for one writer, and mostly to keep overlapping runs
    apart.
    """

    def __init__(self, objects: FsspecObjects) -> None:
        self._objects = objects
        self.get = objects.get
        self.age_s = objects.age_s
        self.page = objects.page
        self.delete = objects.delete
        self.request = objects.request

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        found: str | None = None
        with contextlib.suppress(FileNotFoundError):
            found = self.get(key).tag if is_new or tag is not None else None
        if (is_new and found is not None) or (tag is not None and found != tag):
            raise ConditionFailedError(key)
        return self._objects.put(key, data)


Objects = FsspecObjects | CheckFirstObjects


# ------------------------------------------------------------------------------
# Leases: locks kept as objects, alive as long as they are renewed, by the storage's own clock.


WAIT_S = (0.2, 1.0)
"""Bounds of the pause between two reads of a lease that is waited for."""


@read_in_threads
@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease as it is written.

    Args:
        nonce: drawn by the holder, so that its own success after a lost reply is distinguished from another's.
        ttl_s: it is dead when it was not written for longer than this.
        renewals: times that it was renewed; makes every write differ from the one before.
    """

    epoch: int
    worker: str
    nonce: str
    ttl_s: float
    renewals: int = 0
    is_released: bool = False


class Lease:
    """A lock kept as an object.

    A thread of its own renews it while it is held, so that a store that is slow, or hangs for one lease, costs no other
    its renewal. The thread is a daemon and no pool's, since a pool is waited for: by its owner, and by the interpreter
    at its exit.

    `epoch` is how many holders there were, this one included.

    Args:
        key: where the lease lies.
        what: what is locked, for messages.
        ttl_s: time to live of the lease, if this process gets it.
        retry_s: how long is tried what is done before and after it is held.
    """

    def __init__(self, objects: Objects, key: str, what: str, ttl_s: float, retry_s: float) -> None:
        self.key = key
        self.what = what
        self._objects = objects
        self._retry_s = retry_s
        self._mine = LeaseRecord(0, f"{HERE}-{os.getpid()}", secrets.token_hex(8), ttl_s)
        self._tag: str | None = None
        self._renewed_s = 0.0
        self.is_lost = False
        self.epoch = 0
        self._guard = threading.Lock()
        self._let_go = threading.Event()

    def acquire(self, *, waits: bool = False) -> None:
        """Take the lease: create it, or replace one that is released or dead.

        Args:
            waits: until its holder lets go or is dead, instead of failing at once.
        Raises:
            LockHeldError: it is alive in other hands.
            StoreUnreachableError, StoreError: as the storage answers.
        """
        while True:
            try:
                self._take()
                break
            except LockHeldError:
                if not waits:
                    raise
                time.sleep(random.uniform(*WAIT_S))
        self._let_go = threading.Event()
        build_checks()
        threading.Thread(target=self._keep, args=(self._let_go,), name="lease", daemon=True).start()

    def renew(self) -> None:
        """Say that the holder lives. Sets `is_lost` if another has the lease by now, or no renewal came through for too
        long.
        """
        with self._guard:
            if self._tag is None or self.is_lost:
                return
            before = self._mine
            try:
                self._write(replace(before, renewals=before.renewals + 1), self._tag, before.ttl_s / 3)
            except LockHeldError:
                self.is_lost = True
                logger.warning(
                    "%s: another worker took it over, since it was not renewed for %g s", self.what, before.ttl_s
                )
            except RelabelError as exc:
                logger.warning("%s: its lease could not be renewed (%s)", self.what, exc)
            finally:  # whatever a renewal failed of, another may have taken the lease over by now
                self.is_lost = self.is_lost or time.monotonic() - self._renewed_s > self._mine.ttl_s

    def release(self) -> None:
        """Mark the lease as free, so that nobody waits for its death; safe to call twice. The epoch stays: it only
        rises.
        """
        self._let_go.set()
        with self._guard:
            tag = self._tag
            self._tag = None
            if tag is None or self.is_lost:
                return
            try:  # not for long: an end that is held up costs more than a lease that dies by itself
                self._write(replace(self._mine, is_released=True), tag, 3.0, tries=3)
            except RelabelError as exc:  # it dies by itself
                logger.info("%s: its lease could not be given back (%s)", self.what, exc)
            self._tag = None

    def is_alive(self) -> bool:
        """Whether anybody holds it now."""
        found = self._read()
        return found is not None and not self._is_free(found[0])

    def _keep(self, let_go: threading.Event) -> None:
        while not let_go.wait(self._mine.ttl_s / 3):
            try:
                self.renew()
            except Exception:  # nobody waits for this thread: it logs it itself, and `renew` counted the time
                logger.exception("%s: its lease could not be renewed", self.what)

    def _take(self) -> None:
        found = self._read()
        if found is None:
            self._write(replace(self._mine, epoch=1), None, self._retry_s)
            return
        record, tag = found
        if not self._is_free(record):
            raise self._held_by(record.worker)
        if not record.is_released:
            logger.warning(
                "%s: %s did not renew its lease for over %g s; taking over", self.what, record.worker, record.ttl_s
            )
        self._write(replace(self._mine, epoch=record.epoch + 1, renewals=0, is_released=False), tag, self._retry_s)

    def _held_by(self, worker: str) -> LockHeldError:
        return LockHeldError(f"{self.what} is being worked on by {worker} ({self.key}). Try again when it has ended.")

    def _write(self, record: LeaseRecord, tag: str | None, limit_s: float, tries: int | None = None) -> None:
        """Put a record over the version `tag` (None: where there is none).

        Raises:
            LockHeldError: another was faster. A refusal that our own write caused (its reply was lost) is no refusal.
        """
        data = readable_json(asdict(record))

        def put() -> str:
            try:
                return self._objects.put(self.key, data, is_new=tag is None, tag=tag)
            except FileNotFoundError:  # somebody removed the lease that was to be replaced
                return self._objects.put(self.key, data, is_new=True)

        try:
            new_tag = retried(put, f"{self.what}: writing its lease", limit_s, tries)
        except ConditionFailedError as exc:
            current = self._read()
            if current is None:
                raise self._held_by("another worker") from exc
            written, new_tag = current
            if written != record:
                raise self._held_by(written.worker) from exc
        self._mine = record
        self._tag = new_tag
        self._renewed_s = time.monotonic()
        self.epoch = record.epoch

    def _read(self) -> tuple[LeaseRecord, str] | None:
        try:
            found = retried(lambda: self._objects.get(self.key), f"{self.what}: reading its lease", self._retry_s)
        except FileNotFoundError:
            return None
        try:
            return checked(LeaseRecord, json.loads(found.data)), found.tag
        except ValueError as exc:
            raise StoreError(f"{self.key}: not a lease. Remove it; work that is committed is safe.") from exc

    def _is_free(self, record: LeaseRecord) -> bool:
        if record.is_released:
            return True
        with contextlib.suppress(FileNotFoundError):
            age_s = retried(lambda: self._objects.age_s(self.key), f"{self.what}: reading its lease", self._retry_s)
            return age_s > record.ttl_s
        return True
