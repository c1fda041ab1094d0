"""What tells the folder of a table from a folder of plain Parquet files: the log or the metadata that lies in it.

A table keeps files of which rows were removed or written anew. Read as plain files, those rows would come along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.specs import TableFormat

DELTA_LOG = "_delta_log"
ICEBERG_METADATA = re.compile(r"v?(\d+)(?:-.*)?(?:\.gz)?\.metadata\.json(?:\.gz)?")
"""The name of a metadata file in `metadata/`, with its number."""
_MARKS: Mapping[TableFormat, str] = {"delta": f"{DELTA_LOG}/", "iceberg": "metadata/….metadata.json"}


def tables_among(keys: Iterable[str]) -> dict[str, TableFormat]:
    """The folders of tables in a deep listing, by its keys."""
    found: dict[str, TableFormat] = {}
    for key in keys:
        above, is_below_log, _ = key.partition(f"/{DELTA_LOG}/")
        if is_below_log:
            found[above] = "delta"
        folder, _, name = key.rpartition("/")
        root, _, inside = folder.rpartition("/")
        if inside == "metadata" and ICEBERG_METADATA.fullmatch(name):
            found[root] = "iceberg"
    return found


def folders_above(path: str) -> Iterator[str]:
    """The folders that a path lies in, as it is written, the innermost first."""
    while path := path.rpartition("/")[0]:
        yield path


def local_tables(paths: Iterable[str], root: str) -> dict[str, TableFormat]:
    """The folders of tables that local files lie in, from the folder `root` on.

    Raises:
        InputError: a folder can't be looked into.
    """
    inner = "" if root == "." else root
    folders = {inner}
    for path in {path.rpartition("/")[0] + "/" for path in paths}:
        folders.update(folder for folder in folders_above(path) if folder.startswith(inner))
    return {folder: found for folder in folders if (found := _table_at(folder or ".")) is not None}


def refuse_tables(paths: Iterable[str], tables: Mapping[str, TableFormat], shown: Callable[[str], str] = str) -> None:
    """Refuse files of tables that are read as plain ones.

    Args:
        tables: by folder.
        shown: from a folder to what it is called in the message.
    Raises:
        InputError: names the folder of the table.
    """
    for path in paths if tables else ():
        table = next((folder for folder in (*folders_above(path), "") if folder in tables), None)
        if table is not None:
            where, kind = shown(table) or ".", tables[table]
            raise InputError(
                f"{where}: the folder of a table ({_MARKS[kind]} lies in it); read as plain files it gives rows that "
                f"the table has no more. In a job write `input: {{path: {where}, table: {kind}}}`; other commands "
                "want the table's rows as plain Parquet files."
            )


def _table_at(folder: str) -> TableFormat | None:
    """The format of the table whose folder a local one is; None for any other."""
    metadata = str(Path(folder, "metadata"))
    with reading(metadata):
        if Path(folder, DELTA_LOG).is_dir():
            return "delta"
        if not Path(metadata).is_dir():
            return None
        names = os.listdir(metadata)  # noqa: PTH208 (names alone)
    return "iceberg" if any(map(ICEBERG_METADATA.fullmatch, names)) else None
