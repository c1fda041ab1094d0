"""The input that a run labelled, opened to be read again: by whoever joins texts to its labels."""

from __future__ import annotations

from typing import NamedTuple

from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.inputs.changed_files import changed_files
from relabel.manifests.inputs.dataset import Dataset, open_dataset, open_planned
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Reads
from relabel.manifests.runs.kept_readings import check_readings
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.readings import Readings, blocks_of
from relabel.manifests.runs.run_manifest import load_manifest
from relabel.manifests.specs import InputSpec
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.run_store_ports import RunStore
from relabel.manifests.storage.run_stores import open_run_store


class RunInput(NamedTuple):
    """A run's input, context and gold left out, and what of it was read first."""

    dataset: Dataset
    readings: Readings


def open_run_input(
    root: str, store: RunStore, plan: Plan, storage: Storage, *, reads: Reads = QUERY_AND_DOCUMENT
) -> RunInput:
    """Open the files that a run labelled.

    Args:
        root: the run's output, for messages.
        reads: what its labeler looks at, for whoever asks it again.
    Raises:
        InputError: they are not there any more, or can't be read.
        ManifestError: they are not those that it planned, or what was kept of their reading is not what the manifest
            says.
    """
    unread = {"gold": None} if reads.context else {"context": None, "gold": None}
    wanted = InputSpec(
        path=tuple(file.path for file in plan.files), columns=plan.facts.columns.model_copy(update=unread)
    )
    try:
        dataset = open_dataset(wanted, storage, reads=reads)
    except InputError as exc:
        raise InputError(f"{root}: the texts that it labelled can't be read: {exc}") from exc
    changed = changed_files(plan.files, dataset.files)
    if changed:
        raise ManifestError(
            f"{root}: the inputs that it labelled changed since: {'; '.join(changed[:5])}. Restore them, or label "
            "again."
        )
    return RunInput(dataset, _readings(root, store, plan))


def prove_run_input(root: str, plan: Plan, dataset: Dataset) -> None:
    """Hold files with the sizes and footers of a run's input against what the run read of them, row group by row group:
    whoever joins another column to its labels by row reads these rows again.

    Raises:
        InputError: a row group holds other texts than when the run read it first.
        ManifestError: what was kept of that reading is not what the manifest says.
    """
    readings = _readings(root, open_run_store(root, dataset.storage), plan)
    for number, (file, groups) in enumerate(zip(dataset.files, dataset.group_bytes, strict=True)):
        with reading(file.path), open_planned(file, dataset) as opened:
            found = opened.column_bytes(dataset.text_columns)
            for block in blocks_of([rows for rows, _ in groups], readings.block_rows):
                readings.compare(number, file.path, block, found)


def _readings(root: str, store: RunStore, plan: Plan) -> Readings:
    check_readings(store, plan, load_manifest(store))
    return Readings(store, where=root, block_rows=plan.chunk_rows, keeps=False)
