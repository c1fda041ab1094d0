"""One snapshot of a table, whatever its format: which data files it has, and what its columns are called in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.secrets.redaction import shortened
from relabel.manifests.spec_faults import nearest
from relabel.manifests.specs import TableFormat
from relabel.manifests.storage.filesystems import place_of

FIELD_ID = b"PARQUET:field_id"


class DataFile(NamedTuple):
    """A data file: its path from the table's folder, and its size by the table's metadata."""

    name: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """A snapshot, or what was added to a table since an earlier one.

    Args:
        folder: of the table, as it was given.
        table_id: the table's own, which a copy keeps.
        snapshot: its id; Delta: the version.
        since: rows of this snapshot are left out.
        latest: the table's current snapshot.
        committed: when this one was; None where the table does not tell any more.
        files: in name order.
        columns: the table's columns in order, each with what tells it in a file: its field id, or its name there.
        mapped: field ids by name, for files that hold no field ids.
    """

    format: TableFormat
    folder: str
    table_id: str
    snapshot: int
    since: int | None
    latest: int
    committed: datetime | None
    files: tuple[DataFile, ...]
    columns: Mapping[str, int | str]
    mapped: Mapping[str, int] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, str | None]:
        """What ties a plan to it. Ids are text: those of Iceberg are larger than what all readers of JSON keep."""
        since = None if self.since is None else str(self.since)
        return {"format": self.format, "id": self.table_id, "snapshot": str(self.snapshot), "since": since}

    @property
    def is_latest(self) -> bool:
        """Whether nothing was committed to the table since."""
        return self.snapshot == self.latest

    @property
    def paths(self) -> list[str]:
        """Where the data files lie."""
        return [f"{self.folder}/{file.name}" for file in self.files]

    def check_size(self, number: int, size_bytes: int) -> None:
        """Refuse a data file that is not the one which was committed.

        Args:
            number: of the file.
        Raises:
            InputError: its size is another.
        """
        wanted = self.files[number].size_bytes
        if wanted is not None and wanted != size_bytes:
            raise InputError(
                f"{self.paths[number]}: has {size_bytes:,} bytes, and snapshot {self.snapshot} of {self.folder} names "
                f"a file of {wanted:,}. It was written over: restore it."
            )

    def check_columns(self, names: Iterable[str], schema: pa.Schema, path: str) -> None:
        """Refuse a file that holds a column of the table under another name, or not at all.

        Args:
            names: the table's columns that are read.
            schema: the file's.
        Raises:
            InputError: which column, and what it is called there.
        """
        for name in names:
            if name not in self.columns:
                hint = nearest(name, list(self.columns))
                raise InputError(
                    f"{self.folder}: no column `{name}` in snapshot {self.snapshot} of this table; it has "
                    f"{', '.join(self.columns)}." + (f" Did you mean `{hint}`?" if hint else "")
                )
            found = self._name_in(schema, name)
            if found is None:
                raise InputError(
                    f"{path}: does not hold column `{name}` of the table {self.folder}: the column was added after "
                    "the file was written, or is a partition column of which the table alone knows. Write the table's "
                    "files again with it, or leave the column out."
                )
            if found != name:
                raise InputError(
                    f"{path}: column `{name}` of the table {self.folder} is called `{found}` there, since it was "
                    "renamed. relabel reads columns by the names in the files: write the table's files again first."
                )

    def _name_in(self, schema: pa.Schema, name: str) -> str | None:
        key = self.columns[name]
        if isinstance(key, str):
            return key if key in schema.names else None
        ids = field_ids(schema) or {one: self.mapped[one] for one in schema.names if one in self.mapped}
        return next((one for one, number in ids.items() if number == key), None)


def field_ids(schema: pa.Schema) -> dict[str, int]:
    """Iceberg's numbers of a file's columns by name; of none where the file has none."""
    return {one.name: int(one.metadata[FIELD_ID]) for one in schema if one.metadata and FIELD_ID in one.metadata}


def name_below(folder: str, path: str) -> str:
    """The path of a file from the table's folder.

    Raises:
        InputError: it lies elsewhere.
    """
    outer, inner = place_of(folder), place_of(path)
    name = inner.removeprefix(f"{outer}/")
    if name == inner or ".." in name.split("/"):
        raise InputError(
            f"{folder}: its metadata names {shortened(path, 200)}, which lies outside the table's folder. relabel "
            "reads what lies in the folder alone. Was the table copied? Then write its paths again, or name the "
            "original."
        )
    return name


def missing_snapshot(folder: str, wanted: int, known: Sequence[int]) -> InputError:
    """The error for a snapshot that a table does not have."""
    shown = ", ".join(map(str, known[-5:]))
    return InputError(
        f"{folder}: no snapshot {wanted} in this table; it has {'… ' if len(known) > 5 else ''}{shown or 'none'}. "
        "Was it expired? Name one that is there."
    )


@contextlib.contextmanager
def reading_table(folder: str, format_name: TableFormat) -> Iterator[None]:
    """Turn whatever is wrong with a table's metadata into an InputError that names the table."""
    try:
        yield
    except RelabelError:
        raise
    except FileNotFoundError as exc:
        raise InputError(
            f"{folder}: its metadata names {shortened(str(exc.filename or exc), 300)}, and there is no such file. Was "
            "the snapshot expired, or the table only partly copied?"
        ) from exc
    except Exception as exc:  # readers of damaged JSON, Avro and Parquet have no error in common
        first = shortened((str(exc).strip() or "no reason given").split("\n", 1)[0].rstrip("."), 200)
        raise InputError(
            f"{folder}: not a readable {format_name} table: {first} ({type(exc).__name__}). Restore its metadata, or "
            "check `input.table`."
        ) from exc


def counted(rows: Mapping[str, Any]) -> str:
    """How many, and the first, for messages about files."""
    names = sorted(rows)
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
