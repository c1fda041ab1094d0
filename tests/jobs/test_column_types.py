"""Parquet as its writers leave it, through every command that reads an input: types that hold ids, texts and grades are
read alike, and what can hold none is refused by file and column.
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
CODED = PLAIN["grade"].combine_chunks().cast(pa.int16()).dictionary_encode()
READERS = ("plan", "evaluate", "convert")


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
    "context null in the last file": lambda: halves("context", None, pa.nulls(6)),
    "context of views": lambda: cast("context", pa.list_(pa.string_view())),
    "context of bytes": lambda: cast("context", pa.list_(pa.binary())),
    "gold null in a file": lambda: halves("grade", pa.nulls(6), None),
    "gold of integers and floats": lambda: halves("grade", None, pa.array([None, 1.0, 2.0, 0.0, 1.0, 2.0])),
    **{
        f"gold of {kind}": (lambda kind=kind: cast("grade", pa.int8(), kind))  # type: ignore[misc]
        for kind in (pa.uint8(), pa.float32(), pa.float64(), pa.decimal128(38, 0), pa.decimal128(9, 2))
    },
    "gold in a dictionary": lambda: whole("grade", CODED),
    **{
        f"ids of {kind}": (lambda kind=kind: cast("doc_id", pa.int64(), kind))  # type: ignore[misc]
        for kind in (pa.int64(), pa.uint16(), pa.float64(), pa.decimal128(38, 0), pa.decimal256(60, 3))
    },
    "ids of integers and floats": lambda: halves(
        "doc_id", pa.array(range(6)), pa.array([float(row) for row in range(6, 12)])
    ),
    **{
        f"ids of {kind}": (lambda kind=kind: cast("doc_id", kind))  # type: ignore[misc]
        for kind in (pa.large_string(), pa.string_view(), pa.large_binary(), pa.binary_view())
    },
    "ids in a dictionary": lambda: whole("doc_id", PLAIN["doc_id"].combine_chunks().dictionary_encode()),
    "UUIDs": lambda: whole("doc_id", pa.array([one.bytes for one in UUIDS], pa.uuid())),
    "UUIDs without their type": lambda: whole("doc_id", pa.array([one.bytes for one in UUIDS], pa.binary(16))),
    "text of bytes": lambda: {
        "a": PLAIN.cast(
            pa.schema([(one.name, pa.binary() if one.type == pa.string() else one.type) for one in PLAIN.schema])
        )
    },
    "query ids in folders": lambda: folders("query_id"),
    "queries in folders": lambda: folders("query_id", "query"),
    "gold in folders": lambda: folders("grade"),
}  # fmt: skip


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
    without = {"gold null in a file": range(6), "gold of integers and floats": [6]}.get(case, ())
    graded = [row for row in range(12) if row not in without]
    assert gold == {(ROWS[row]["query_id"], docs[row]): ROWS[row]["grade"] for row in graded}
    for qrels in ("data", "gold.qrels"):
        done = relabel("evaluate", "out/ecom", "--qrels", qrels, "--output", "json")
        assert done.code == 0, (qrels, done)
        assert done.json["counts"]["judged"] == len(gold), done.json


REFUSED: dict[str, tuple[str, Callable[[], dict[str, Table]], tuple[str, ...]]] = {
    "gold with a fraction": (
        "grade",
        lambda: whole("grade", pa.array([0.5, *[1.0] * 11])),
        ("doctor", "evaluate", "convert"),
    ),
    "gold of truth": ("grade", lambda: cast("grade", pa.bool_()), ("doctor", "plan", "evaluate", "convert")),
    "gold in a struct": (
        "grade",
        lambda: whole("grade", pa.array([{"grade": 1}] * 12)),
        ("doctor", "plan", "evaluate", "convert"),
    ),
    **{
        f"ids {name}": ("query_id", lambda values=values: whole("query_id", values), ("doctor", "plan", "evaluate"))  # type: ignore[misc]
        for name, values in {
            "of truth": pa.array([True, False] * 6),
            "of moments": pa.array([*range(12)], pa.timestamp("us")),
            "in lists": pa.array([["q"]] * 12),
            "in structs": pa.array([{"id": "q"}] * 12),
        }.items()
    },
    "ids with a fraction": ("query_id", lambda: whole("query_id", pa.array([7.5] * 12)), READERS),
    "ids beyond exact numbers": ("query_id", lambda: whole("query_id", pa.array([1e17] * 12)), READERS),
    "ids of other bytes": (
        "query_id",
        lambda: whole("query_id", pa.array([b"\xff\xfe"] * 12)),
        READERS,
    ),
    "documents in structs": ("body", lambda: whole("body", pa.array([{"text": "oak"}] * 12)), ("doctor", "plan")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_hold_no_id_text_or_grade_is_refused_by_file_and_column(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], write_job: Callable[..., str], case: str
) -> None:
    column, tables, commands = REFUSED[case]
    write_pairs(PLAIN, "plain/a.parquet")
    assert relabel("run", write_job({"input": {"path": "plain"}})).code == 0
    for name, table in tables().items():
        write_pairs(table, f"data/{name}.parquet")
    job = write_job({"input": {"path": "data", "columns": {"gold": "grade"}}, "output": "out/other"}, "other.yaml")
    calls = {
        "doctor": ("doctor", job),
        "plan": ("plan", job),
        "evaluate": ("evaluate", "out/ecom", "--qrels", "data/a.parquet"),
        "convert": ("convert", "data/a.parquet", "gold.qrels"),
    }
    for command in commands:
        done = relabel(*calls[command])
        assert done.code == 3, (command, done)
        said = done.out + done.err
        assert "data/a.parquet" in said, (command, done)
        assert f"`{column}`" in said or f"{column} '" in said, (command, done)
