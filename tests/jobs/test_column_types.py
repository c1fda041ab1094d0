"""Parquet as its writers leave it, through every command that reads an input: types that hold ids, texts and grades are
read alike. What a plan refuses is in `tests/manifests/test_input_types.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

Table = pa.Table
UUIDS = [uuid.uuid5(uuid.NAMESPACE_URL, str(row)) for row in range(12)]
ROWS = [
    {
        "query_id": f"q{row // 3}",
        "query": f"oak table {row // 3}",
        "doc_id": str(row),
        "title": f"table {row}",
        "body": f"an oak table, number {row}",
        "context": ["oak desk"],
        "grade": row % 3,
    }
    for row in range(12)
]
PLAIN = pa.Table.from_pylist(ROWS)


def put(table: Table, name: str, values: pa.Array) -> Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def whole(name: str, values: pa.Array) -> dict[str, Table]:
    return {"a": put(PLAIN, name, values)}


def halves(name: str, first: Any, second: Any) -> dict[str, Table]:
    """Two files, with other types in one column; None keeps what is there."""
    parts = {"a": (PLAIN.slice(0, 6), first), "b": (PLAIN.slice(6), second)}
    return {at: part if values is None else put(part, name, values) for at, (part, values) in parts.items()}


def cast(name: str, *kinds: pa.DataType) -> dict[str, Table]:
    values: pa.Array = PLAIN[name].combine_chunks()
    for kind in kinds:
        values = values.cast(kind)
    return whole(name, values)


def folders(*names: str) -> dict[str, Table]:
    """Rows in folders that are named after their values."""
    found: dict[str, Table] = {}
    for row in range(12):
        above = "".join(f"{name}={str(ROWS[row][name]).replace(' ', '%20')}/" for name in names)
        found[f"{above}{row:02d}"] = PLAIN.slice(row, 1).drop_columns([*names])
    return found


READ: dict[str, Callable[[], dict[str, Table]]] = {
    "context null in the first file": lambda: halves("context", pa.nulls(6), None),
    "context of views": lambda: cast("context", pa.list_(pa.string_view())),
    "gold of integers and floats": lambda: halves("grade", None, pa.array([None, 1.0, 2.0, 0.0, 1.0, 2.0])),
    "gold of decimals": lambda: cast("grade", pa.int8(), pa.decimal128(9, 2)),
    "ids of decimals": lambda: cast("doc_id", pa.int64(), pa.decimal256(60, 3)),
    "UUIDs": lambda: whole("doc_id", pa.array([one.bytes for one in UUIDS], pa.uuid())),
    "text of bytes": lambda: {
        "a": PLAIN.cast(
            pa.schema([(one.name, pa.binary() if one.type == pa.string() else one.type) for one in PLAIN.schema])
        )
    },
    "queries in folders": lambda: folders("query_id", "query"),
}


@pytest.mark.parametrize("case", READ)
def test_what_writers_leave_is_read_alike_by_every_command(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    committed: Callable[..., Any],
    case: str,
) -> None:
    tables = READ[case]()
    for name, table in tables.items():
        write_pairs(table, f"data/{name}.parquet")
    job = write_job({"input": {"path": "data", "columns": {"gold": "grade"}}, "labeler": {"name": "r3a"}, "shards": 1})
    for command in ("doctor", "plan", "run"):
        done = relabel(command, job)
        assert done.code == 0, (command, done)
    docs = [str(one) if "UUID" in case else row["doc_id"] for row, one in zip(ROWS, UUIDS, strict=True)]
    pairs = {(row["query_id"], doc) for row, doc in zip(ROWS, docs, strict=True)}
    assert relabel("convert", "out/ecom", "labels.qrels").code == 0
    labelled = {tuple(line.split()[0:3:2]) for line in Path("labels.qrels").read_text().splitlines()}
    assert labelled == pairs
    assert relabel("convert", "data", "gold.qrels", "--from", "parquet").code == 0
    gold = {tuple(line.split()[0:3:2]): int(line.split()[3]) for line in Path("gold.qrels").read_text().splitlines()}
    without = [6] if case == "gold of integers and floats" else []
    graded = [row for row in range(12) if row not in without]
    assert gold == {(ROWS[row]["query_id"], docs[row]): ROWS[row]["grade"] for row in graded}
    for qrels in ("data", "gold.qrels"):
        done = relabel("evaluate", "out/ecom", "--qrels", qrels, "--output", "json")
        assert done.code == 0, (qrels, done)
        assert done.json["counts"]["judged"] == len(gold), done.json
