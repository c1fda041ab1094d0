"""Label files by the plan that they were written under: which columns they hold, and all of them read as rows of one
kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from manifests.errors import ManifestError
from manifests.older_schemas import LABELS_2, NODES, with_own_columns
from manifests.runs.plans import facts_of
from manifests.runs.receipts import FileRef
from manifests.runs.run_folder import RunFolder
from manifests.schemas import LABELS, READABLE_VERSIONS, SCHEMA_VERSION, label_schema

_WITHOUT_NODES = frozenset(("complexity", "direct", "pointwise", "r1", "r3a", "umbrela"))
"""Labelers that left `nodes` null when label files had them; of others, a plan of that time does not say."""
_SINCE_2 = ("key", "origin")


def own_columns(parts: dict[str, Any]) -> dict[str, str]:
    """The columns that the labeler behind a plan's parts gave its labels, name → kind."""
    facts = facts_of(parts)
    if facts.label_columns is not None:
        return dict(facts.label_columns)
    return {} if facts.labeler.name in _WITHOUT_NODES else NODES


def file_schema(parts: dict[str, Any]) -> pa.Schema:
    """How the label files of a plan with these parts lie."""
    facts = facts_of(parts)
    if facts.label_columns is not None:
        return label_schema(dict(facts.label_columns))
    if facts.schema == 2:
        return LABELS_2
    return pa.schema([field for field in LABELS_2 if field.name not in _SINCE_2])


def joined_form(plans: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The parts that say how label files lie, for files with a place for all labels of some plans: the columns of each
    behind one another. Empty where all are of one earlier version: that of the first will do.

    Args:
        plans: what to call each in an error, and its parts.
    Raises:
        ManifestError: a plan is of a version whose labels can't be beside others, or two have a column of one name
            and two kinds.
    """
    versions = {facts_of(parts).schema for _, parts in plans}
    if len(versions) == 1 and versions != {SCHEMA_VERSION}:
        return {}
    columns: dict[str, str] = {}
    for where, parts in plans:
        version = facts_of(parts).schema
        if version not in READABLE_VERSIONS:
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
    """A committed label file's columns, the labeler's own behind the others; of an older file its nodes are those.

    Args:
        names: those to read, all by default; what the file does not have is left out.
    Raises:
        ManifestError: as `RunFolder.table`.
    """
    parts = folder.plan.parts
    schema, own = file_schema(parts), own_columns(parts)
    wanted = [name for name in (*LABELS.names, *own) if names is None or name in names]
    needs_nodes = "nodes" in schema.names and not own.keys().isdisjoint(wanted)
    read = [name for name in schema.names if name in wanted or (name == "nodes" and needs_nodes)]
    held = with_own_columns(folder.table(file, schema, read, check_bytes=check_bytes))
    return held.select([name for name in wanted if name in held.column_names])
