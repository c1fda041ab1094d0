"""Records of a bundle store: one line of JSON that may be signed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relabel.export.bundle_files import strict_json
from relabel.export.signatures import Signature, read_signatures
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import ManifestError
from relabel.manifests.records import plain

RECORD_FORMAT = 1


def record_bytes(kind: str, body: Mapping[str, Any], signatures: Sequence[Signature]) -> bytes:
    """A record as it is written; the inverse of `read_record`."""
    held = {"kind": kind, "format": RECORD_FORMAT, "body": body, "signatures": plain(signatures)}
    return readable_json(held)


def read_record(data: bytes, kind: str, where: str) -> tuple[dict[str, Any], tuple[Signature, ...]]:
    """Body and signatures of a record.

    Raises:
        ManifestError: it is none of that kind.
    """
    held = strict_json(data, where)
    if held.get("kind") != kind or held.get("format") != RECORD_FORMAT:
        raise ManifestError(
            f"{where}: no {kind} of format {RECORD_FORMAT} (kind {held.get('kind')!r}, format {held.get('format')!r})."
        )
    body = held.get("body")
    if not isinstance(body, dict):
        raise ManifestError(f"{where}: `body` is missing.")
    try:
        return body, read_signatures(held.get("signatures"))
    except ValueError as exc:
        raise ManifestError(f"{where}: {exc}.") from exc
