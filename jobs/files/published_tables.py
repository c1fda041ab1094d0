"""A table written where the user said, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from relabel.jobs.files.durable_files import written
from relabel.jobs.files.tables import load_polars, translate_polars_errors
from relabel.manifests.errors import UsageError
from relabel.manifests.inputs.input_folders import PARQUET_SUFFIXES
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.url_files import UrlFile

_ROWS_PER_GROUP = 16_384


def check_target(to: str, inputs: tuple[str, ...], storage: Storage, *, force: bool) -> None:
    """Raise where the output can't be written, before any work is done.

    Raises:
        UsageError: it is a folder, no Parquet name, one of the inputs, or there already.
    """
    if not to.endswith(PARQUET_SUFFIXES):
        raise UsageError(f"--to {to}: want a name that ends in .parquet, so that a job finds it.")
    if is_url(to):
        _check_target_url(to, inputs, storage, force=force)
        return
    target = Path(to).resolve()
    for path in inputs:
        held = Path(path).resolve()
        if held == target or (held.is_dir() and target.is_relative_to(held)):
            raise UsageError(f"--to {to}: is in the input {path}. Give a file elsewhere.")
    if target.is_dir() or (target.exists() and not force):
        raise UsageError(f"{to}: is there already. Give another name, or --force to replace it.")


def _check_target_url(to: str, inputs: tuple[str, ...], storage: Storage, *, force: bool) -> None:
    if any(to == path or to.startswith(path.rstrip("/") + "/") for path in inputs):
        raise UsageError(f"--to {to}: is in an input. Give a file elsewhere.")
    with contextlib.suppress(FileNotFoundError):
        UrlFile(to, storage)
        if not force:
            raise UsageError(f"{to}: is there already. Give another name, or --force to replace it.")


def publish(frame: Any, to: str, storage: Storage, *, source: str) -> int:
    """Write a lazy frame as one Parquet file, streaming: under another name first, then renamed.

    Returns:
        Number of rows written.
    Raises:
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
        InputError: the rows can't be read.
    """
    import pyarrow.parquet as pq

    with written(to, storage) as file:
        with translate_polars_errors(source):
            _sink(frame, file)
        return int(pq.read_metadata(file).num_rows)


def _sink(frame: Any, path: Path) -> None:
    """Write a lazy frame. polars says of a failed write what it says of a damaged file, but for the number of the
    system's error.
    """
    polars = load_polars()
    try:
        frame.sink_parquet(path, compression="zstd", maintain_order=True, row_group_size=_ROWS_PER_GROUP)
    except polars.exceptions.PolarsError as exc:
        found = re.search(r"\(os error ([0-9]{1,4})\)", str(exc))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from exc
