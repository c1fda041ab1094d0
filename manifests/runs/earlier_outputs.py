"""An earlier output whose labels a run may take over, and why it may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relabel.manifests.errors import ManifestError
from relabel.manifests.runs.engine_identity import engine_identity
from relabel.manifests.runs.label_files import own_columns
from relabel.manifests.runs.plans import PLAN_NAME, Plan
from relabel.manifests.runs.receipts import ReusedRows
from relabel.manifests.runs.recipes import recipe_differences, recipe_digest
from relabel.manifests.runs.run_folder import RunFolder, open_planned
from relabel.manifests.runs.run_manifest import manifest_sha256_of
from relabel.manifests.runs.snapshots import Snapshot
from relabel.manifests.schemas import (
    SCHEMA_VERSION,
)
from relabel.manifests.storage.context import Storage


@dataclass(frozen=True, slots=True)
class EarlierOutput:
    """An output of an earlier run, as it was found.

    Args:
        path: as the spec names it.
        is_readable: its labels have keys, and what this version has columns for.
        manifest_sha256: None if the run is not finished.
    """

    path: str
    folder: RunFolder
    found: Snapshot
    manifest_sha256: str | None
    is_readable: bool

    @property
    def plan(self) -> Plan:
        return self.folder.plan

    def taken(self, rows: int) -> ReusedRows:
        """What a receipt says of rows that came from here."""
        engines = [engine_identity(facts) for facts in self.found.all_engines]
        return ReusedRows(self.path, self.plan.fingerprint, self.manifest_sha256, self.found.digest, rows, engines)


def open_earlier(path: str, storage: Storage) -> EarlierOutput:
    """Look at an earlier output: its plan, receipts and, if it is finished, manifest. Finished or not, committed labels
    count.

    Raises:
        ManifestError: there is no plan, or a receipt is damaged.
    """
    no_run = f"reuse: {path} holds no {PLAN_NAME}, so it is not the output of a run. Name an earlier run's."
    folder = open_planned(path, storage, ManifestError(no_run))
    manifest_sha256 = manifest_sha256_of(folder.store)
    return EarlierOutput(
        path, folder, folder.snapshot(), manifest_sha256, folder.plan.parts.get("schema") == SCHEMA_VERSION
    )


def why_nothing(earlier: EarlierOutput, parts: dict[str, Any]) -> dict[str, list[str]]:
    """Why no label of an output can be reused by a job with these parts: what differs, by part; empty if labels can
    be.
    """
    if not earlier.is_readable:
        return {"schema": [f"was {earlier.plan.parts.get('schema')}, is {SCHEMA_VERSION}"]}
    if lacking := columns_lacking(earlier, own_columns(parts)):
        return {"label_columns": lacking}
    if recipe_digest(parts) in recipes_of(earlier.plan.parts):
        return {}
    return recipe_differences(earlier.plan.parts, parts)


def columns_lacking(earlier: EarlierOutput, columns: Mapping[str, str]) -> list[str]:
    """Which of these columns, name → kind, an output's labels do not have: reused, they would be without a value
    there.
    """
    held = own_columns(earlier.plan.parts)
    return [name for name, kind in columns.items() if held.get(name) != kind]


def recipes_of(parts: dict[str, Any]) -> set[bytes]:
    """Digests of the recipes that labels of an output may have: one, or several where runs were merged all the same."""
    return {recipe_digest(parts), *(recipe_digest(inner) for inner in parts.get("merged_recipes", ()))}
