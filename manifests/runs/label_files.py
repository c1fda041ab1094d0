"""Label files by the plan that they were written under: which columns they hold, and all of them read as rows of one
kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from relabel.manifests.errors import ManifestError
from relabel.manifests.runs.plans import facts_of
from relabel.manifests.runs.receipts import FileRef
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.schemas import SCHEMA_VERSION, label_schema


def own_columns(parts: dict[str, Any]) -> dict[str, str]:
    """The columns that the labeler behind a plan's parts gave its labels, name → kind."""
    return dict(facts_of(parts).label_columns)


def file_schema(parts: dict[str, Any]) -> pa.Schema:
    """How the label files of a plan with these parts lie."""
    return label_schema(own_columns(parts))


def joined_form(plans: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The parts that say how label files lie, for files with a place for all labels of some plans: the columns of each
    behind one another.

    Args:
        plans: what to call each in an error, and its parts.
    Raises:
        ManifestError: a plan is of a version whose labels can't be beside others, or two have a column of one name
            and two kinds.
    """
    columns: dict[str, str] = {}
    for where, parts in plans:
        version = facts_of(parts).schema
        if version != SCHEMA_VERSION:
            raise ManifestError(
                f"{where}: has label files of version {version}, which don't merge with others. Label it again."
            )
        for name, kind in own_columns(parts).items():
            if columns.setdefault(name, kind) != kind:
                raise ManifestError(
                    f"{where}: its column `{name}` holds {kind}, that of an output named before it {columns[name]}."
                )
    return {"schema": SCHEMA_VERSION, "label_columns": [list(column) for column in columns.items()]}


def read_labels(
    folder: RunFolder, file: FileRef, names: list[str] | None = None, *, check_bytes: bool = True
) -> pa.Table:
    """A committed label file's columns, the labeler's own behind the others.

    Args:
        names: those to read, all by default; what the file does not have is left out.
    Raises:
        ManifestError: as `RunFolder.table`.
    """
    schema = file_schema(folder.plan.parts)
    return folder.table(
        file, schema, [name for name in schema.names if names is None or name in names], check_bytes=check_bytes
    )


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table's columns in the order of a schema, null where the table has none; columns that the schema does not name
    are left out.
    """
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
