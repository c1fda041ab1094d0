"""`NAME@VERSION` in a bundle store, and the names of what lies there."""

from __future__ import annotations

import re
from typing import NamedTuple

from relabel.manifests.errors import UsageError

OBJECTS = "objects"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Address(NamedTuple):
    """What `s3://bucket/models/ecom@stable` says.

    Args:
        url: of the bundle store.
        name: of the bundle in it.
        at: a channel or version, None where there is no `@`.
    """

    url: str
    name: str
    at: str | None


def parse_address(text: str) -> Address:
    """Read `URL/NAME`, `URL/NAME@CHANNEL` or `URL/NAME@VERSION`.

    Raises:
        UsageError: no name in it, or one that can't be a name.
    """
    url, slash, last = text.rstrip("/").rpartition("/")
    name, at, what = last.partition("@")
    if not slash:
        url = "."
    if not url or url.endswith(":/") or not name:
        raise UsageError(f"{text}: write URL/NAME or URL/NAME@CHANNEL, for instance s3://bucket/models/ecom@stable.")
    return Address(url, check_name(name, "name"), check_name(what, "channel or version") if at else None)


def check_name(text: str, what: str) -> str:
    """A bundle's, version's or channel's name.

    Raises:
        UsageError: it is none.
    """
    if not is_name(text):
        raise UsageError(
            f"{text!r} can't be a {what}: letters, digits, dots, dashes and underscores, at most 100, not {OBJECTS!r}."
        )
    return text


def is_name(text: str) -> bool:
    """Whether a text can name a bundle, version or channel."""
    return _NAME.fullmatch(text) is not None and text != OBJECTS


def object_name(sha256: str) -> str:
    """Where a file of that digest lies."""
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


def version_name(name: str, version: str) -> str:
    """Where a version's record lies."""
    return f"{name}/versions/{version}.json"
