"""Replies of an S3 server that can't be ones are asked for again, and end in
StoreUnreachableError; never a traceback.
"""

from __future__ import annotations

from typing import Any

import pytest

from relabel.manifests.errors import DiskFullError, StoreError, StoreUnreachableError
from relabel.manifests.files import out_of_files
from relabel.manifests.objects import Found, Retries, S3Objects, TryAgainError

DATES = {"date": "Sun, 22 Nov 2026 02:40:16 GMT", "last-modified": "Sun, 22 Nov 2026 02:40:06 GMT"}


def replying(reply: dict[str, Any], data: bytes = b"") -> S3Objects:
    """Storage that answers everything so."""
    objects = S3Objects(None, "s3://bucket/out")
    objects._do = lambda key, function, *more: (reply, data) if function == objects._read else reply  # type: ignore[method-assign]
    objects._filesystem = type("Filesystem", (), {"_call_s3": None})()
    return objects


def test_whole_replies_are_read() -> None:
    ranged = {"ContentLength": 3, "ContentRange": "bytes 2-4/9", "ETag": "t"}
    assert replying(ranged, b"cde").get("bucket/a", start=2, end=5) == Found(b"cde", "t", 9)
    assert replying({"ContentLength": 3, "ETag": "t"}, b"abc").get("bucket/a", start=-100) == Found(b"abc", "t", 3)
    assert replying({"ResponseMetadata": {"HTTPHeaders": DATES}}).age_s("bucket/a") == 10
    assert replying({"ETag": "t"}).put("bucket/a", b"") == "t"


@pytest.mark.parametrize(
    ("verb", "options", "reply", "data"),
    [
        ("put", {"data": b""}, {}, b""),
        ("get", {}, {"ContentLength": 3}, b"abc"),
        ("get", {}, {"ContentLength": 9, "ETag": "t"}, b"abc"),
        ("get", {"start": 2, "end": 5}, {"ContentLength": 2, "ContentRange": "bytes 2-3/9", "ETag": "t"}, b"cd"),
        ("get", {"start": 2, "end": 5}, {"ContentLength": 9, "ETag": "t"}, b"abcdefghi"),
        ("get", {"start": 2, "end": 5}, {"ContentLength": 3, "ContentRange": "bytes 2-4/*", "ETag": "t"}, b"cde"),
        ("get", {"start": -4}, {"ContentLength": 3, "ContentRange": "bytes 6-8/9", "ETag": "t"}, b"ghi"),
        ("age_s", {}, {"ResponseMetadata": {"HTTPHeaders": {}}}, b""),
        ("age_s", {}, {"ResponseMetadata": {"HTTPHeaders": {**DATES, "date": "soon"}}}, b""),
        ("page", {"is_deep": True, "after": None}, {"Contents": [{"Key": "a"}]}, b""),
        ("page", {"is_deep": True, "after": None}, {"IsTruncated": True}, b""),
    ],
)
def test_a_reply_that_can_not_be_one_is_asked_for_again(
    verb: str, options: dict[str, Any], reply: dict[str, Any], data: bytes
) -> None:
    def ask() -> object:
        return getattr(replying(reply, data), verb)("bucket/a", **options)

    with pytest.raises(TryAgainError):
        ask()
    with pytest.raises(StoreUnreachableError, match="no good answer in"):
        Retries(limit_s=0.0).call(ask, "bucket/a: asking")


class RefusalError(Exception):
    """As botocore has it."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("status", "code"), [(507, ""), (507, "InsufficientStorage"), (403, "QuotaExceeded"), (400, "XMinioStorageFull")]
)
def test_a_full_bucket_is_said_so(status: int, code: str) -> None:
    found = S3Objects(None, "s3://bucket/out")._meaning(RefusalError(status, code), "bucket/out/a")
    assert isinstance(found, DiskFullError)
    assert "no space left in the bucket" in str(found)


def test_too_many_open_files_are_said_so_however_deep_they_lie() -> None:
    try:
        try:
            raise OSError(24, "Too many open files")
        except OSError as exc:
            raise ConnectionError("no connection") from exc
    except ConnectionError as exc:
        wrapped = exc
    assert "ulimit -n" in str(out_of_files(wrapped))
    assert isinstance(S3Objects(None, "s3://bucket/out")._meaning(wrapped, "bucket/out/a"), StoreError)
    assert out_of_files(ConnectionError("no connection")) is None
