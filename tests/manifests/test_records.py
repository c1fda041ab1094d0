"""A record becomes JSON with its fields in order, and the same record again."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from pydantic import Field

from relabel.manifests.errors import InputError
from relabel.manifests.labels import QUARANTINE, QuarantineRow, parquet_bytes, table_bytes, table_of
from relabel.manifests.records import LEFT_OUT, checked, plain
from relabel.manifests.trees import NODES, Tree, read_tree
from tests.trees import Sketch, sketches, tree_of


class Span(NamedTuple):
    start: int
    end: int | None


@dataclass(frozen=True)
class Inner:
    spans: list[Span]
    by_name: dict[str, Span]


@dataclass(frozen=True)
class Outer:
    z: str
    a: tuple[Inner, ...]


RECORD = Outer("é", (Inner([Span(1, None)], {"b": Span(2, 3)}), Inner([], {})))


def test_records_within_records_become_objects_with_their_fields_in_order_and_come_back() -> None:
    inner = '{"spans": [{"start": 1, "end": null}], "by_name": {"b": {"start": 2, "end": 3}}}'
    text = json.dumps(plain(RECORD), ensure_ascii=False)
    assert text == '{"z": "é", "a": [' + inner + ', {"spans": [], "by_name": {}}]}'
    assert checked(Outer, json.loads(text)) == RECORD


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="spans"):
        checked(Outer, {"z": "", "a": [{"spans": 3, "by_name": {}}]})


@dataclass(frozen=True, kw_only=True)
class Sparse:
    note: str | None = field(default=None, metadata=LEFT_OUT)
    in_: Annotated[int, Field(alias="in")]
    at_ten: Annotated[float, Field(alias="ndcg@10")] = 0.5
    null: int | None


def test_json_does_without_a_left_out_field_and_has_the_aliases_of_names_that_python_does_not_take() -> None:
    for record, text in (
        (Sparse(in_=3, null=None), '{"in": 3, "ndcg@10": 0.5, "null": null}'),
        (Sparse(note="x", in_=0, null=1), '{"note": "x", "in": 0, "ndcg@10": 0.5, "null": 1}'),
    ):
        assert json.dumps(plain(record)) == text
        assert checked(Sparse, json.loads(text)) == record


# A structure tree comes back from Arrow and JSON as it went in, and one that is not of its document is refused with
# the node and the reason.


ROUGH = Sketch("1990s", [Sketch("Rough.", [])])
PARK = Sketch("Six Flags", [Sketch("History", [Sketch("Opened in 1961.", []), ROUGH])])


def park() -> tuple[str, list[dict[str, Any]]]:
    document, tree = tree_of(PARK)
    return document, tree.values()


@given(sketch=sketches())
def test_a_tree_comes_back_from_arrow_and_from_json(sketch: Sketch) -> None:
    document, tree = tree_of(sketch)
    column = pa.array([tree.values(), None], NODES)
    assert read_tree(column[0].as_py(), document) == tree
    assert read_tree(json.loads(json.dumps(tree.values())), document) == tree
    for node in tree.nodes:
        assert all(tree.nodes[child].parent == node.id for child in tree.children[node.id])
        assert len(list(tree.ancestors(node.id))) == node.level
    assert sum(map(len, tree.children)) == len(tree.nodes) - 1


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (2, {"id": 3}),
        (0, {"parent": 0}),
        (1, {"type": "heading"}),
        (1, {"parent": 1}),
        (1, {"parent": -1}),
        (2, {"parent": 4}),
        (2, {"level": 3}),
        (3, {"parent": 2, "level": 3}),
        (2, {"end": 10_000}),
        (2, {"start": -1}),
        (2, {"text": "Opened in 1962."}),
        (2, {"text": None}),
        (2, {"start": True}),
        (4, {"start": 0, "end": 7, "text": "History"}),
    ],
)
def test_a_tree_that_is_not_of_its_document_is_refused(place: int, change: dict[str, Any]) -> None:
    document, values = park()
    assert document.startswith("History")
    assert read_tree(values, document)
    values[place] |= change
    with pytest.raises(InputError, match=f"node {place} of the tree"):
        read_tree(values, document)


def test_a_page_without_text_is_its_root() -> None:
    document, tree = tree_of(Sketch("Empty page", []))
    assert (document, tree.children) == ("", ((),))
    assert isinstance(read_tree(tree.values(), ""), Tree)


# Files of label rows are read without anything that outlives the reading.


COUNT_THREADS = """
import os
import pyarrow as pa
from relabel.manifests.labels import table_bytes, table_of
data = table_bytes(pa.table({"row_id": list(range(256)), "text": ["red shoes"] * 256}))
before = len(os.listdir("/proc/self/task"))
assert table_of(data).num_rows == table_of(data, ["row_id"]).num_rows == 256
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_file_is_read_as_it_was_written_whole_or_by_column() -> None:
    tries = [{"stage": "verdict", "attempt": 1, "finish": "stop", "text": "?", "reason": "no tags"}]
    rows = [QuarantineRow(row, "q", f"d{row}", "format", "no tags", tries, 10, 1) for row in range(3)]
    table = table_of(parquet_bytes(rows, QUARANTINE))
    assert table.schema.equals(QUARANTINE)
    assert [QuarantineRow(**row) for row in table.to_pylist()] == rows
    assert table_of(table_bytes(table), ["row_id"]).column_names == ["row_id"]


def test_reading_a_file_starts_no_native_thread_that_could_abort_the_process_at_its_end() -> None:
    """A thread of Arrow's that lets go of Python's bytes while the interpreter ends turns exit code 0 into 134."""
    found = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"
