"""Which columns of a label file are read, and whether they are of the types that they should be."""

from __future__ import annotations

import pyarrow as pa

from distill.students.heads import NODE_HEADS
from manifests.errors import InputError
from manifests.older_schemas import LABELS_2, NODES
from manifests.schemas import KINDS, LABELS

COLUMNS = ["row_id", "query_id", "doc_id", "status", "grade", "probs", "outside_mass"]
"""What is read of a label file, beside `NODE_COLUMNS`."""
NODE_COLUMNS = [f"{name}{suffix}" for name in NODE_HEADS for suffix in ("", "_probs")]


def check_schema(schema: pa.Schema, path: str) -> None:
    """A label file has the columns of the label schema, or those of them that matter, in their types.

    Raises:
        InputError: it is another schema, or another version.
    """
    ours = (LABELS.metadata or {}).get(b"relabel.schema", b"").decode()
    theirs = (schema.metadata or {}).get(b"relabel.schema", b"").decode()
    if theirs and theirs.partition("-")[0] != ours.partition("-")[0]:
        raise InputError(f"{path}: holds {theirs}, labels are wanted ({ours}).")
    missing = [name for name in ("row_id", "query_id", "doc_id", "grade") if name not in schema.names]
    if missing:
        raise InputError(
            f"{path}: no label file: no column {', '.join(missing)}; it has {', '.join(schema.names)}. `relabel "
            "schema labels` shows them."
        )
    wanted = {"grade": pa.types.is_integer, "row_id": pa.types.is_integer, "probs": _is_float_list, "nodes": _is_nodes}
    for name, test in wanted.items():
        if name in schema.names and not test(schema.field(name).type):
            raise InputError(
                f"{path}: column `{name}` holds {schema.field(name).type}, label files hold "
                f"{LABELS_2.field(name).type}."
            )


def file_columns(schema: pa.Schema) -> list[str]:
    """What to read of a label file: `nodes` where it has them, as files up to version 2 do; else node columns, if they
    are of our types. A column that only has such a name, as a product's subject, is none.
    """
    wanted = [name for name in COLUMNS if name in schema.names]
    if "nodes" in schema.names:
        return [*wanted, "nodes"]
    return wanted + [
        name for name in NODE_COLUMNS if name in schema.names and schema.field(name).type.equals(KINDS[NODES[name]])
    ]


def _is_float_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(pa.types.is_null(kind) or (is_list and pa.types.is_floating(kind.value_type)))


def _is_nodes(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    names = {kind.field(place).name for place in range(kind.num_fields)} if pa.types.is_struct(kind) else set()
    return bool(names & set(NODE_HEADS)) and names <= NODES.keys()
