"""The input that a run labelled, opened to be read again: by whoever joins texts to its labels."""

from __future__ import annotations

from typing import NamedTuple

from manifests.dataset import Dataset, changed_files, open_dataset
from manifests.errors import InputError, ManifestError
from manifests.plans import Plan
from manifests.readings import Readings
from manifests.specs import Columns, InputSpec
from manifests.store import Store


class RunInput(NamedTuple):
    """A run's input, context and gold left out, and what of it was read first."""

    dataset: Dataset
    readings: Readings


def open_run_input(root: str, store: Store, plan: Plan) -> RunInput:
    """Open the files that a run labelled.

    Args:
        root: the run's output, for messages.
    Raises:
        InputError: they are not there any more, or can't be read.
        ManifestError: they are not those that it planned.
    """
    wanted = Columns(**plan.parts["columns"]).model_copy(update={"context": None, "gold": None})
    try:
        dataset = open_dataset(InputSpec(path=tuple(file.path for file in plan.files), columns=wanted), reads_context=False)
    except InputError as exc:
        raise InputError(f"{root}: the texts that it labelled can't be read: {exc}") from exc
    changed = changed_files(plan.files, dataset.files)
    if changed:
        raise ManifestError(f"{root}: the inputs that it labelled changed since: {'; '.join(changed[:5])}. Restore them, or label again.")
    return RunInput(dataset, Readings(store, where=root, block_rows=plan.parts["cut"]["chunk_rows"], keeps=False))
