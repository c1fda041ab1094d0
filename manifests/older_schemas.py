"""Label files of version 2, read as those of now."""

from __future__ import annotations

import pyarrow as pa

from manifests.schemas import KINDS, LABELS

NODES = {
    "preliminary": "int8",
    "preliminary_probs": "list<float32>",
    "preliminary_outside_mass": "float32",
    "subject": "int8",
    "subject_probs": "list<float32>",
    "subject_outside_mass": "float32",
    "attribute": "int8",
    "attribute_probs": "list<float32>",
    "attribute_outside_mass": "float32",
    "query_subject": "string",
    "query_attribute": "string",
    "product_subject": "string",
    "product_attribute": "string",
    "phi_grade": "int8",
    "phi_agrees": "bool",
}
"""What the struct `nodes` of label files up to version 2 held, by kind: Graph-GRPO's columns."""
_NODES_PLACE = LABELS.get_field_index("evidence")
LABELS_2 = pa.schema(
    [
        *list(LABELS)[:_NODES_PLACE],
        ("nodes", pa.struct([(name, KINDS[kind]) for name, kind in NODES.items()])),
        *list(LABELS)[_NODES_PLACE:],
    ],
    metadata={"relabel.schema": "labels-2"},
)
"""Label files of version 2, of whatever labeler."""


def with_own_columns(table: pa.Table) -> pa.Table:
    """A label table of version 2 with the fields of its nodes as columns behind the others, null where a row has no
    nodes; any other table as it is.
    """
    if "nodes" not in table.column_names:
        return table
    nodes = table["nodes"].combine_chunks()
    held = table.drop_columns(["nodes"])
    if pa.types.is_null(nodes.type):
        return held
    for name, values in zip(nodes.type.names, nodes.flatten(), strict=True):
        held = held.append_column(name, values)
    return held


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table's columns in the order of a schema, null where the table has none; columns that the schema does not name
    are left out.
    """
    held = with_own_columns(table)
    columns = [
        held[field.name] if field.name in held.column_names else pa.nulls(held.num_rows, field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
