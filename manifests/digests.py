"""Digests: sha256 of bytes, of files and of plain values, always as lower-case hex; and the stamp by which a file is
known to be unchanged without reading it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 22


def sha256_bytes(data: bytes) -> str:
    """sha256 of bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a local file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def file_stamp(stat: os.stat_result) -> str:
    """The stamp of a local file. With the time of change, which no program sets: a replacement of equal size and date
    differs in it; and with its device: another disk that is mounted in the same place may give the same numbers.
    """
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"


def first_changed(folder: Path, digests: Mapping[str, str | None]) -> str | None:
    """Name of the first file that is missing or has not its sha256; one whose digest is None need only be there.

    Raises:
        OSError: one can't be read.
    """
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or (digest is not None and sha256_file(path) != digest):
            return name
    return None


def canonical_json(value: Any) -> bytes:
    """One byte string per value: keys sorted, no white space, UTF-8. Raises TypeError for what JSON can't hold,
    ValueError for NaN.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def readable_json(value: Any) -> bytes:
    """JSON for files that people open: keys in the order given, indented, a newline at the end."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest_of(value: Any) -> str:
    """sha256 of a plain value's canonical JSON."""
    return sha256_bytes(canonical_json(value))
