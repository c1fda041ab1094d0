"""A finished run as whoever trains on its labels opens it: proven row by row and byte by byte (what `relabel verify`
does), and within its quarantine limit.
"""

from __future__ import annotations

from typing import NamedTuple

from relabel.manifests.digests import sha256_bytes
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.records import plain
from relabel.manifests.runs.plans import PLAN_NAME, Plan
from relabel.manifests.runs.run_folder import RunFolder, open_planned
from relabel.manifests.runs.run_manifest import MANIFEST_NAME, RunManifest, load_manifest
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.run_store_ports import RunStore


class ProvenRun(NamedTuple):
    """A run that is finished and proves itself.

    Args:
        root: its output.
    """

    root: str
    store: RunStore
    plan: Plan
    folder: RunFolder
    manifest: RunManifest

    @property
    def manifest_sha256(self) -> str:
        """Digest of its manifest: two runs of one digest are the same labels."""
        return sha256_bytes(self.store.read(MANIFEST_NAME))


def open_proven_run(root: str, storage: Storage, *, allow_over_limit: bool, then: str) -> ProvenRun:
    """Open a run's output.

    Args:
        allow_over_limit: take it with more quarantined rows than its limit.
        then: the command that the run is opened for.
    Raises:
        InputError: there is no run.
        ManifestError: it is unfinished, over its limit or damaged.
    """
    no_run = f"{root}: a folder without {PLAN_NAME}, so no run's output. Give a finished run's output folder" + (
        ", or a Parquet file." if then == "distill" else "."
    )
    folder = open_planned(root, storage, InputError(no_run))
    store, plan = folder.store, folder.plan
    manifest = load_manifest(store)
    found = folder.snapshot()
    if manifest is None or manifest.receipts_sha256 != found.digest:
        state = (
            f"{found.tally.rows:,} of {plan.rows:,} rows are done"
            if manifest is None
            else "its manifest is older than its receipts"
        )
        raise ManifestError(f"{root}: not finished ({state}). Run the job again until it exits 0, then {then}.")
    rows, limit = manifest.rows, manifest.max_failed_fraction
    if manifest.over_limit and not allow_over_limit:
        raise ManifestError(
            f"{root}: over its limit ({rows.quarantined:,} of {rows.in_:,} rows quarantined, {limit:.0%} "
            "allowed). What is missing is seldom a fair sample: fix it with `relabel retry`, or set "
            "allow_over_limit: true to take what is there."
        )
    fates = folder.prove(found, check_bytes=True)
    if fates.by_kind() != rows:
        raise ManifestError(
            f"{root}: its manifest says {plain(rows)}, its files hold {plain(fates.by_kind())}. `relabel verify` says "
            "more."
        )
    return ProvenRun(root, store, plan, folder, manifest)
