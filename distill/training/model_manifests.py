"""The `manifest.json` of a trained model as far as whoever makes one has to look at another: what it is, and of which
spec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from relabel.manifests.errors import ManifestError
from relabel.manifests.records import checked, read_record

ManifestT = TypeVar("ManifestT")


class Product(NamedTuple):
    """What a command trains.

    Args:
        kind: `student`; as manifests and messages have it.
        command: the one that trains it, `distill`.
        model_key: of its spec, that names the model to start from.
        data_keys: that name what is learned from.
        undecided: keys on which its fingerprint does not hang, or only through digests of data and model; as pydantic
            excludes them.
    """

    kind: str
    command: str
    model_key: str
    data_keys: tuple[str, ...]
    undecided: Mapping[str, Any]


@dataclass(frozen=True)
class BaseModelUsed:
    """The model that a training starts from."""

    reference: str
    digest: str
    type: str | None = None


@dataclass(frozen=True)
class _Mark:
    kind: str
    fingerprint: str


class StoredManifest(NamedTuple):
    """A manifest that lies somewhere, known to be of the kind that was looked for; the rest of it may be of another
    version.
    """

    data: bytes
    where: str
    fingerprint: str


def read_manifest(data: bytes, where: str, cls: type[ManifestT], *, kind: str) -> ManifestT:
    """The whole of a manifest, as a record.

    Raises:
        ManifestError: it is damaged, or of another version.
    """
    what = f"not as this relabel writes a {kind}'s manifest"
    return read_record(cls, data, where, what, "Restore it from a copy, or train again.")


def stored_manifest(data: bytes, where: str, *, kind: str) -> StoredManifest:
    """What a `manifest.json` is, without a look at more than its kind and fingerprint.

    Raises:
        ManifestError: it is not of that kind.
    """
    try:
        held = json.loads(data)
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not readable as a {kind}'s manifest. Move it away, or name another output."
        ) from exc
    try:
        mark = checked(_Mark, held)
        if mark.kind != kind:
            raise ValueError(f"it is of a {mark.kind}")
    except ValueError as exc:
        raise ManifestError(
            f"{where}: is not a {kind}'s manifest; the folder belongs to something else. Name another output."
        ) from exc
    return StoredManifest(data, where, mark.fingerprint)
