"""The committed labels of a run, as whoever judges or merges them opens them."""

from __future__ import annotations

from dataclasses import dataclass

from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.runs.plans import PLAN_NAME, Plan
from relabel.manifests.runs.receipts import FileRef
from relabel.manifests.runs.run_folder import RunFolder, open_planned
from relabel.manifests.runs.run_manifest import load_manifest
from relabel.manifests.storage.context import Storage

_ALL_OF_THEM = "no labels but those of the whole run are a fair sample"


@dataclass(frozen=True)
class RunLabels:
    """A run's output, ready to be read.

    Args:
        labels, quarantine: its files: of the manifest, or of the receipts where it is not finished.
        num_quarantined: rows without a label.
        notes: remarks for a reader of a report.
    """

    root: str
    plan: Plan
    folder: RunFolder
    labels: list[FileRef]
    quarantine: list[FileRef]
    num_quarantined: int
    notes: list[str]

    @property
    def grades(self) -> int:
        """K."""
        return self.plan.facts.labeler.grades


def open_run_labels(root: str, storage: Storage, *, allow_partial: bool) -> RunLabels:
    """The files of an output folder, none of them read yet.

    Raises:
        InputError: the folder holds no run.
        ManifestError: the run is not finished, or over its quarantine limit, and `allow_partial` is off; or a file is
            damaged.
    """
    no_run = f"{root}: a folder without {PLAN_NAME}, so no run's output. Give a run's output folder, or a label file."
    folder = open_planned(root, storage, InputError(no_run))
    manifest = load_manifest(folder.store)
    found = folder.snapshot()
    num_quarantined = found.tally.num_quarantined
    notes = []
    labels, quarantine = found.labels, found.quarantine
    if manifest is None or manifest.receipts_sha256 != found.digest:
        state = f"{found.tally.rows:,} of {folder.plan.rows:,} rows are done"
        if manifest is not None:
            state += ", and its manifest is older than its receipts"
        if not allow_partial:
            raise ManifestError(
                f"{root}: not finished, {state}; {_ALL_OF_THEM}. "
                "Run the job again to finish it, or judge what is there with --allow-partial."
            )
        notes.append(f"{root} is not finished: {state}")
    else:
        labels, quarantine = manifest.labels, manifest.quarantine
    if manifest is not None and manifest.over_limit:
        share = (
            f"{num_quarantined:,} of {manifest.rows.in_:,} rows are in quarantine, limit "
            f"{manifest.max_failed_fraction:.0%}"
        )
        if not allow_partial:
            raise ManifestError(
                f"{root}: over its quarantine limit ({share}); {_ALL_OF_THEM}. "
                "Complete it with `relabel retry`, or judge what is there with --allow-partial."
            )
        notes.append(f"{root} is over its quarantine limit: {share}")
    return RunLabels(root, folder.plan, folder, labels, quarantine, num_quarantined, notes)
