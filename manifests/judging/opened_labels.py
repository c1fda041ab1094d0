"""A path becomes a set of labels: a run's output folder, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from relabel.manifests.errors import UsageError
from relabel.manifests.inputs.table_files import FILE_SUFFIXES
from relabel.manifests.judging.file_labels import open_label_file
from relabel.manifests.judging.label_sets import LabelSet, open_run
from relabel.manifests.runs.plans import PLAN_NAME
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.run_store_ports import read_if_there
from relabel.manifests.storage.run_stores import open_run_store


def is_run(path: str, storage: Storage) -> bool:
    """Whether a path names a folder, as runs are; by URL, a folder is what holds a plan."""
    if not is_url(path):
        return Path(path).is_dir()
    if PurePosixPath(path).suffix.lower() in FILE_SUFFIXES:
        return False
    return read_if_there(open_run_store(path, storage), PLAN_NAME) is not None


def open_labels(
    path: str,
    storage: Storage,
    *,
    allow_partial: bool,
    label: str,
    by: str,
    doc: str,
    where: Mapping[str, str],
    wants_ids: bool,
    is_by_named: bool,
) -> LabelSet:
    """A run's output folder, or a label file.

    Raises:
        UsageError: `--where` for a run.
        InputError, ManifestError: see `open_run` and `open_label_file`.
    """
    if is_run(path, storage):
        if where:
            raise UsageError(f"--where: {path} is a run, and runs are judged whole. It picks rows of label files.")
        return open_run(path, storage, allow_partial=allow_partial)
    return open_label_file(
        path, storage, label=label, by=by, doc=doc, where=where, wants_ids=wants_ids, is_by_named=is_by_named
    )
