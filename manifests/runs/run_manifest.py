"""A run's `manifest.json` as a record: what ran, on what, and what became of every row. Fields are in the order of
the JSON.

Readers rely on the fields without a default. The others have one for manifests of an earlier relabel, which may do
without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relabel.manifests import failpoints
from relabel.manifests.digests import sha256_bytes
from relabel.manifests.errors import ManifestError
from relabel.manifests.records import LEFT_OUT, checked, fault_of, plain, sealed_json, unsealed, version_of
from relabel.manifests.runs.budgets import BudgetState
from relabel.manifests.runs.estimates import PlannedFigure
from relabel.manifests.runs.proofs import RunRows
from relabel.manifests.runs.receipts import FileRef, ReusedRows
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class EngineMix:
    """Whether labels of different engines were allowed, and what differs between those that are there."""

    allowed: bool = False
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MergedSource:
    """An output that was merged, as it was found; its rows begin at `first_row_id` of the merged input."""

    output: str
    fingerprint: str
    manifest_sha256: str | None = None
    receipts_sha256: str | None = None
    first_row_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """The manifest of any output.

    Args:
        receipts_sha256, receipts_listing_sha256: of the receipts' contents, and of what a listing shows of them.
        engines: all that are behind the labels; `engines_asked` are those that were asked here.
        tokens_in_budget: prompt and output tokens that the ledger of a budget has counted.
        provenance: the plan's parts.
        readings: digests of what was read of the input, by name.
        merged_from: of a merged output.
    """

    version: int
    relabel: str = ""
    name: str = ""
    fingerprint: str
    plan_sha256: str | None = None
    receipts_sha256: str
    receipts_listing_sha256: str | None = None
    rows: RunRows
    quarantined_by_status: dict[str, int] | None = None
    conservation: str = ""
    failed_fraction: float = 0.0
    max_failed_fraction: float
    over_limit: bool
    stages: dict[str, dict[str, int]] | None = None
    worker_seconds: float | None = None
    tokens_in_budget: tuple[int, int] | None = field(default=None, metadata=LEFT_OUT)
    engines: list[dict[str, Any]] | None = None
    engines_asked: list[dict[str, Any]] | None = None
    mixed: EngineMix = EngineMix()
    canary: list[dict[str, Any]] = field(default_factory=list)
    reused_from: list[ReusedRows] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)
    labels: list[FileRef]
    quarantine: list[FileRef]
    answers: list[FileRef] | None = None
    readings: dict[str, str] | None = None
    merged_from: list[MergedSource] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class OwnRunManifest(RunManifest):
    """That of an output which was labelled or scored where it lies.

    Args:
        plan_against_actual: None if nothing was estimated.
        variables: of the spec's `${...}`, by name.
        budget: where the job had one.
    """

    plan_against_actual: list[PlannedFigure] | None
    variables: dict[str, str]
    budget: BudgetState | None = field(default=None, metadata=LEFT_OUT)


def load_manifest(store: RunStore) -> RunManifest | None:
    """The manifest of an output, or None if the run has not finished.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    where = f"{store.root}/{MANIFEST_NAME}"
    data = read_if_there(store, MANIFEST_NAME)
    if data is None:
        return None
    try:
        held = unsealed(data)
        version = version_of(held)
        if version != MANIFEST_VERSION:
            raise ManifestError(f"{where}: written as version {version}; this relabel reads {MANIFEST_VERSION}.")
        if "receipts_mark" in held:  # its name until 2026-11-22
            held["receipts_listing_sha256"] = held.pop("receipts_mark")
        manifest = checked(RunManifest, held)
        _check_sums(manifest)
    except ValueError as exc:
        raise ManifestError(f"{where}: not a manifest ({fault_of(exc)}). Move it away and run the job again.") from exc
    return manifest


def manifest_sha256_of(store: RunStore) -> str | None:
    """sha256 of an output's manifest, which is not read as one; None if there is none."""
    data = read_if_there(store, MANIFEST_NAME)
    return None if data is None else sha256_bytes(data)


def _check_sums(manifest: RunManifest) -> None:
    """Raise unless its rows add up, and its files hold them."""
    rows = manifest.rows
    labels, quarantine = (sum(file.rows for file in files) for files in (manifest.labels, manifest.quarantine))
    if (labels, quarantine, labels + quarantine) != (rows.labelled + rows.reused, rows.quarantined, rows.in_):
        in_files = {"labels": labels, "quarantine": quarantine}
        raise ValueError(f"its rows {plain(rows)} do not add up, or not to those of its files, {in_files}")


def write_manifest(store: RunStore, manifest: RunManifest) -> None:
    """Make the manifest durable: the last file of a run, replaced after a retry."""
    failpoints.hit("before_manifest")
    store.put(MANIFEST_NAME, sealed_json(plain(manifest)))
    failpoints.hit("after_manifest")
