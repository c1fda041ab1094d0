"""Files of a bundle as its manifest names them, and JSON that says each key once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from relabel.manifests.digests import canonical_json
from relabel.manifests.errors import ManifestError


class BundleFile(NamedTuple):
    """A file of a bundle: its name relative to the folder, size in bytes, sha256 of its bytes."""

    path: str
    size_bytes: int
    sha256: str


def read_files(held: Any, where: str) -> tuple[BundleFile, ...]:
    """A list of files as JSON holds it; names are not checked yet.

    Raises:
        ManifestError: an item is not a path, a size and a digest.
    """
    if not isinstance(held, list):
        raise ManifestError(f"{where}: `files` is not a list.")
    return tuple(_file(item, f"{where}: `files.{number}`") for number, item in enumerate(held))


def strict_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object with no key twice and no NaN, as a signature needs it: two readers must not see two things.

    Raises:
        ManifestError: it is none.
    """

    def refuse(value: str) -> Any:
        raise ValueError(f"{value} is not a JSON number")

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        held = json.loads(data, object_pairs_hook=once, parse_constant=refuse)
        canonical_json(held)  # what JSON can hold and a signature or a terminal can't: half a surrogate pair, 1e999
    except (ValueError, RecursionError) as exc:
        raise ManifestError(f"{where}: not readable as JSON ({type(exc).__name__}).") from exc
    if not isinstance(held, dict):
        raise ManifestError(f"{where}: not a JSON object.")
    return held


def is_sha256(value: object) -> bool:
    """Whether a value is a digest as we write it: 64 lower-case hex digits."""
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")


def _file(held: Any, where: str) -> BundleFile:
    if not isinstance(held, dict) or held.keys() != set(BundleFile._fields):
        raise ManifestError(f"{where} is not a path, size_bytes and sha256.")
    file = BundleFile(**held)
    is_size = type(file.size_bytes) is int and 0 <= file.size_bytes < 2**53
    if not isinstance(file.path, str) or not is_sha256(file.sha256) or not is_size:
        raise ManifestError(f"{where} is not a path, a size in bytes and a sha256 of 64 hex digits.")
    return file
