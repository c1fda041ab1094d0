"""Every Arrow type in every column that a job reads, lying together and scattered: each row comes out as the file holds
it, or the file and the column are named. Types come from pyarrow's own list, so that a new one is covered at birth.
"""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.plan import shard_row_ids, write_plan
from relabel.manifests.rows import make_plan, read_chunks
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import LocalStore

ROWS, QUERIES = 12, 3
COLUMNS = ("query_id", "query", "doc_id", "document")
WORDS = ["red", "green", "naïve 日本", ""]


def types() -> dict[str, pa.DataType]:
    """Everything in pyarrow that makes a type, by name: called as it is, or with what it wants."""
    wants: dict[str, list[Any]] = {
        "binary": [(), (4,)],
        "decimal32": [(9, 0), (9, 2)],
        "decimal64": [(18, 0)],
        "decimal128": [(20, 0), (20, 2)],
        "decimal256": [(40, 0)],
        "dictionary": [
            (i, v)
            for i in (pa.int8(), pa.uint32())
            for v in (pa.string(), pa.large_string(), pa.int64(), pa.uint64(), pa.binary())
        ],
        "struct": [([("id", pa.string())],)],
        "map_": [(pa.string(), pa.string())],
        "run_end_encoded": [(pa.int32(), pa.string())],
        "list_": [(pa.string(),), (pa.string(), 2)],
        "opaque": [(pa.string(), "x", "y")],
        "json_": [()],
        "fixed_shape_tensor": [(pa.int64(), (1,))],
        **{
            name: [(unit,) for unit in units]
            for name, units in {"time32": ["s"], "time64": ["us"], "timestamp": ["us"], "duration": ["ms"]}.items()
        },
    }
    found = {}
    for name in sorted(
        {name for name in dir(pa) if isinstance(getattr(pa, name), type(pa.int8)) or callable(getattr(pa, name))}
    ):
        for given in wants.get(name, [(), (pa.string(),)]):
            try:
                made = getattr(pa, name)(*given)
            except Exception:  # noqa: BLE001 (no maker of types)
                continue
            if isinstance(made, pa.DataType):
                found.setdefault(str(made), made)
    return found


TYPES = types()


def column(kind: pa.DataType, name: str, query_of: Callable[[int], int]) -> pa.Array | None:
    """Values of a type, one a row; the same for rows of one query where it names queries. None where no column of it
    can be made.
    """
    places = [query_of(row) if name in ("query_id", "query") else row for row in range(ROWS)]
    words = [f"{WORDS[place % 4]}{place}" for place in places]
    numbers = [place * 7 for place in places]
    candidates: list[list[Any]] = [
        words,
        numbers,
        [float(number) for number in numbers],
        [Decimal(number) for number in numbers],
    ]
    candidates += [
        [bool(place % 2) for place in places],
        [{"id": word} for word in words],
        [[word, word] for word in words],
    ]
    candidates += [
        [[(word, word)] for word in words],
        [word.encode() for word in words],
        [b"%04d" % place for place in places],
    ]
    candidates += [[b"%016d" % place for place in places], [None] * ROWS]
    for values in candidates:
        try:
            return pa.array(values, kind)
        except Exception:  # noqa: BLE001 (another's values fit, or none)
            try:
                return pa.array(values).cast(kind)
            except Exception:  # noqa: BLE001
                continue
    return None


def write(path: Path, kinds: dict[str, pa.DataType], *, scattered: bool, **options: Any) -> pa.Table | None:
    """A file whose columns are of these types, text where none is named; None where Parquet has no such thing."""

    def query_of(row: int) -> int:
        return row % QUERIES if scattered else row // (ROWS // QUERIES)

    arrays = {name: column(kinds.get(name, pa.string()), name, query_of) for name in COLUMNS}
    if any(array is None for array in arrays.values()):
        return None
    table = pa.table(arrays)
    try:
        pq.write_table(table, path, row_group_size=5, **options)
    except (pa.ArrowException, OSError):
        return None
    return table


def labelled(folder: Path) -> dict[int, tuple[str, str, str, str]]:
    """What a run would read of the files of a folder: query id, query, document id and document by row, through shards
    and chunks.
    """
    dataset = open_dataset(InputSpec(path=(str(folder),), columns=Columns(document=("document",))), Storage())
    store = LocalStore(folder / "_out")
    plan, plan_files = make_plan(dataset, {}, name="job", shards=2, chunk_rows=4)
    write_plan(store, plan, plan_files)
    found = {}
    for shard in plan.shards:
        row_ids = None if shard.row_ids is None else shard_row_ids(store, shard)
        for _, pairs in read_chunks(dataset, shard, row_ids, range(len(shard.chunks))):
            found |= {pair.row_id: (pair.query_id, pair.query, pair.doc_id, pair.document) for pair in pairs}
    return found


def expected(tables: list[pa.Table]) -> dict[int, tuple[str, str, str, str]]:
    """The same by pyarrow alone."""
    rows = [row for table in tables for row in table.select(COLUMNS).to_pylist()]
    return {number: tuple(as_text(row[name]) for name in COLUMNS) for number, row in enumerate(rows)}  # type: ignore[misc]


def as_text(value: Any) -> str:
    """Bytes are the UTF-8 that they hold, and numbers their digits alone."""
    if isinstance(value, bytes):
        return value.decode()
    return "" if value is None else str(int(value) if isinstance(value, float | Decimal) else value)


def differs(folder: Path, tables: list[pa.Table], names: set[str]) -> str | None:
    """What is wrong with how a folder of files is read; None if its rows come out right, or are refused by file and
    column.
    """
    try:
        found = labelled(folder)
    except InputError as exc:
        return (
            None
            if ".parquet: " in str(exc) and any(f"`{name}`" in str(exc) for name in names)
            else f"refused without its place: {exc}"
        )
    except Exception as exc:  # noqa: BLE001 (what the test searches for)
        return f"{type(exc).__name__}: {exc}"
    return None if found == expected(tables) else f"other rows: {found}"


@pytest.mark.parametrize(("name", "scattered"), [*((name, False) for name in COLUMNS), ("query_id", True)])
def test_every_type_in_every_column_is_read_right_or_refused_by_name(
    tmp_path: Path, name: str, scattered: bool
) -> None:
    wrong, tried = [], 0
    for number, (shown, kind) in enumerate(TYPES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        table = write(folder / "a.parquet", {name: kind}, scattered=scattered)
        if table is not None:
            tried += 1
            fault = differs(folder, [table], {name})
            wrong += [f"{shown}: {fault}"] if fault else []
    assert not wrong, "\n".join(wrong)
    assert tried > 35


def test_a_column_with_dots_in_its_name_next_to_a_struct_is_itself(tmp_path: Path) -> None:
    table = write(tmp_path / "a.parquet", {}, scattered=False)
    other = pa.array([{"id": f"wrong{row}"} for row in range(ROWS)])
    held = {"q": other, **{("q.id" if at == "query_id" else at): table[at] for at in COLUMNS}}
    pq.write_table(pa.table(held), tmp_path / "a.parquet", row_group_size=5)
    spec = InputSpec(path=(str(tmp_path / "a.parquet"),), columns=Columns(query_id="q.id", document=("document",)))
    dataset = open_dataset(spec, Storage())
    plan, _ = make_plan(dataset, {}, name="job", shards=1, chunk_rows=ROWS)
    (chunk,) = read_chunks(dataset, plan.shards[0], None, [0])
    assert [pair.query_id for pair in chunk.pairs] == table["query_id"].to_pylist()
    assert plan.queries == QUERIES


SHAPES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "no rows": lambda table: table.slice(0, 0),
    "no columns": lambda table: table.select([]),
    "a column twice": lambda table: table.append_column("doc_id", table["doc_id"]),
    "null document ids": lambda table: table.set_column(
        2, "doc_id", pa.array([None, *table["doc_id"].to_pylist()[1:]])
    ),
    "null query ids": lambda table: table.set_column(
        0, "query_id", pa.array([None, *table["query_id"].to_pylist()[1:]])
    ),
    "other columns": lambda table: table.append_column("more", pa.array([[{"x": [1]}]] * table.num_rows)),
    "a column that is not asked for twice": lambda table: table.append_column("m", table["query"]).append_column(
        "m", table["query"]
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_file_next_to_an_ordinary_one_is_read_right_or_refused_by_name(
    tmp_path: Path, shape: str
) -> None:
    first = write(tmp_path / "a.parquet", {}, scattered=True)
    second = SHAPES[shape](first)
    pq.write_table(second, tmp_path / "b.parquet", row_group_size=5)
    tables = (
        [first] if second.num_columns == 0 else [first, second] if "doc_id" not in second.schema.names[3:] else [first]
    )
    assert differs(tmp_path, tables, set(COLUMNS)) is None


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_a_file_with_an_encrypted_column_is_refused(tmp_path: Path, plaintext_footer: bool) -> None:
    """Asked about such a column, Arrow ends the process."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Plain(encryption.KmsClient):  # type: ignore[name-defined,misc]
        def __init__(self, _: Any) -> None:
            encryption.KmsClient.__init__(self)

        def wrap_key(self, key_bytes: bytes, _: str) -> str:
            return key_bytes.hex()

    settings = encryption.EncryptionConfiguration(
        footer_key="f" * 16, column_keys={"c" * 16: ["document"]}, plaintext_footer=plaintext_footer
    )
    factory = encryption.CryptoFactory(Plain)
    props = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    table = write(tmp_path / "plain.parquet", {}, scattered=False)
    (tmp_path / "plain.parquet").unlink()
    pq.write_table(table, tmp_path / "a.parquet", encryption_properties=props)
    said = "has encrypted columns" if plaintext_footer else "not a readable Parquet file: .*encrypted"
    with pytest.raises(InputError, match=f"a.parquet: {said}"):
        labelled(tmp_path)
