"""Which columns of a label file are read, and whether they are of the types that they should be."""

from __future__ import annotations

import pyarrow as pa

from relabel.distill.students.heads import NODE_HEADS
from relabel.manifests.errors import InputError
from relabel.manifests.schemas import KINDS, LABELS

COLUMNS = ["row_id", "query_id", "doc_id", "status", "grade", "probs", "outside_mass"]
"""What is read of a label file, beside `NODE_COLUMNS`."""
NODE_COLUMNS = dict.fromkeys(NODE_HEADS, KINDS["int8"]) | {
    f"{name}_probs": KINDS["list<float32>"] for name in NODE_HEADS
}


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
    wanted = {"grade": pa.types.is_integer, "row_id": pa.types.is_integer, "probs": _is_float_list}
    for name, test in wanted.items():
        if name in schema.names and not test(schema.field(name).type):
            raise InputError(
                f"{path}: column `{name}` holds {schema.field(name).type}, label files hold {LABELS.field(name).type}."
            )


def file_columns(schema: pa.Schema) -> list[str]:
    """What to read of a label file: node columns only if they are of our types. A column that only has such a name, as
    a product's subject, is none.
    """
    wanted = [name for name in COLUMNS if name in schema.names]
    return wanted + [
        name for name, kind in NODE_COLUMNS.items() if name in schema.names and schema.field(name).type.equals(kind)
    ]


def _is_float_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(pa.types.is_null(kind) or (is_list and pa.types.is_floating(kind.value_type)))
