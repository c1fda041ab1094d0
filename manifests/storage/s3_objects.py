"""Objects on S3 and on what speaks its protocol, through s3fs: one request a call, conditions and clocks left to the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from relabel.manifests.errors import DiskFullError, StoreError
from relabel.manifests.storage.disk_errors import out_of_files
from relabel.manifests.storage.objects import ConditionFailedError, Found
from relabel.manifests.storage.retries import TryAgainError

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
_HINTS = {
    "SignatureDoesNotMatch": "the secret key is not the one of this access key",
    "InvalidAccessKeyId": "the access key is not known there",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock is off by more than the server allows; set it",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION",
}


class S3Objects:
    """Args: filesystem: an s3fs filesystem that does not retry by itself."""

    has_atomic_conditions = True

    def __init__(self, filesystem: Any, where: str) -> None:
        self._filesystem = filesystem
        self._where = where

    def get(self, key: str, *, start: int | None = None, end: int | None = None, tag: str | None = None) -> Found:
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
        """The reply's `Date` less its `Last-Modified`."""
        reply = self._do(key, self._filesystem._call_s3, "head_object", _place(key))
        headers = reply["ResponseMetadata"]["HTTPHeaders"]
        try:
            now, written = (parsedate_to_datetime(field(headers, name)) for name in ("date", "last-modified"))
        except ValueError as exc:
            raise TryAgainError("the reply had no date that can be read") from exc
        return float((now - written).total_seconds())

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        wanted = {**_place(key), "Body": data}
        if is_new:
            wanted["IfNoneMatch"] = "*"
        if tag is not None:
            wanted["IfMatch"] = tag
        return str(field(self._do(key, self._filesystem._call_s3, "put_object", wanted), "ETag"))

    def page(self, prefix: str, *, is_deep: bool, after: str | None) -> tuple[list[tuple[str, str]], str | None]:
        bucket, _, inner = prefix.partition("/")
        wanted = {"Bucket": bucket, "Prefix": inner}
        if not is_deep:
            wanted["Delimiter"] = "/"
        if after is not None:
            wanted["ContinuationToken"] = after
        reply = self._do(prefix, self._list, wanted)
        found = [(f"{bucket}/{field(entry, 'Key')}", field(entry, "ETag")) for entry in reply.get("Contents", ())]
        return found, field(reply, "NextContinuationToken") if reply.get("IsTruncated") else None

    def delete(self, key: str) -> None:
        self._do(key, self._filesystem._call_s3, "delete_object", _place(key))

    def request(self, key: str, method: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Any other request of S3's, with its errors sorted out as those of the verbs above."""
        reply: dict[str, Any] = self._do(key, self._filesystem._call_s3, method, wanted)
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
        if code == "NoSuchBucket":
            return StoreError(f"{place}: there is no bucket {key.partition('/')[0]!r}. Create it, or fix the URL.")
        if status == 412 or code == "PreconditionFailed":
            return ConditionFailedError(key)
        if status == 404:
            return FileNotFoundError(place)
        if status == 507 or code in _FULL_CODES:
            return DiskFullError(
                f"{place}: no space left in the bucket ({said}). What was committed is safe; free some space, or "
                "raise the quota, and run "
                "the same command again."
            )
        if code in _TRY_AGAIN_CODES or (status in _TRY_AGAIN_STATUSES and code not in _HINTS):
            return TryAgainError(said)
        if status == 416:
            return EOFError(place)
        if code in _HINTS:
            return StoreError(f"{place}: refused ({said}): {_HINTS[code]}.")
        if status in (401, 403):
            return StoreError(
                f"{place}: no permission ({said}). Check the credentials, and what they allow; docs/storage.md lists "
                "what is needed."
            )
        if status == 501:
            return StoreError(
                f"{place}: the store does not know this kind of request ({said}). docs/storage.md says what it must "
                "know."
            )
        return StoreError(f"{place}: the store refuses ({said}).")

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
