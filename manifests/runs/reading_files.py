"""The file of one reading: its name, its bytes, and what is in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from relabel.manifests.digests import canonical_json, digest_of
from relabel.manifests.errors import ManifestError
from relabel.manifests.records import checked, fault_of, read_in_threads, version_of
from relabel.manifests.storage.run_store_ports import RunStore

FOLDER = "inputs"
VERSION = 1


@read_in_threads
@dataclass(frozen=True, slots=True)
class Reading:
    """What a block of row groups held when it was first read.

    Args:
        first: number of its first row group.
        groups: for each row group, the sha256 of its bytes by column.
    """

    first: int
    groups: list[dict[str, str]]


@read_in_threads
@dataclass(frozen=True)
class _Kept:
    """A reading's file: `sha256` is the digest of the reading."""

    sha256: str
    reading: dict[str, Any]


def load_reading(store: RunStore, name: str) -> Reading:
    """Read one.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    where = f"{store.root}/{name}"
    try:
        values = json.loads(store.read(name))
        version = version_of(values)
        if version != VERSION:
            raise ManifestError(f"{where}: written as version {version}; this relabel reads {VERSION}.")
        kept = checked(_Kept, values)
        if kept.sha256 != digest_of(kept.reading):
            raise ManifestError(f"{where}: damaged: its sha256 is not that of what it holds. Restore it from a copy.")
        held = checked(Reading, kept.reading)
    except (FileNotFoundError, ValueError) as exc:
        raise ManifestError(f"{where}: no reading of an input ({fault_of(exc)}). Restore it from a copy.") from exc
    if parsed_name(name)[1] != held.first:
        raise ManifestError(f"{where}: holds the reading of row group {held.first}. Restore it from a copy.")
    return held


def reading_name(file: int, first: int) -> str:
    return f"{FOLDER}/{file:05d}-{first:06d}.json"


def parsed_name(name: str) -> tuple[int, int]:
    stem = name.rpartition("/")[2].removesuffix(".json")
    file, _, first = stem.partition("-")
    if not (file.isdigit() and first.isdigit()):
        raise ManifestError(f"{name}: no name of a reading. Remove the file from the output.")
    return int(file), int(first)


def reading_bytes(held: Reading) -> bytes:
    plain: dict[str, Any] = asdict(held)
    return canonical_json({"version": VERSION, "sha256": digest_of(plain), "reading": plain}) + b"\n"
