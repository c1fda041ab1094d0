"""A source of any form as local Parquet: text and JSONL are parsed once into a scratch file, a run's labels are checked
and put together there, a Parquet file is read where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.convert.formats import TREC, Format
from relabel.jobs.convert.json_blocks import json_frame, json_names, merged_schema, refuse_rounded
from relabel.jobs.convert.text_blocks import Block, blocks, trec_frame
from relabel.jobs.files.tables import open_tables
from relabel.manifests.errors import InputError
from relabel.manifests.inputs.table_files import require_column
from relabel.manifests.judging.label_texts import join_texts
from relabel.manifests.judging.run_labels import open_run_labels
from relabel.manifests.judging.trec import QRELS_COLUMNS, RUN_COLUMNS
from relabel.manifests.runs.label_files import file_schema
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.context import Storage

Kind = Literal["grade", "score"]
SCORES = ("score", "expected_grade")
"""Columns that rank without being named, the first that is there."""
GROUP_BYTES = 16 << 20
"""Rows are gathered to about this size before they are written to the scratch file."""


@dataclass(frozen=True)
class Options:
    """What `relabel convert` was given about a source; None where the user named no column."""

    by: str = "query_id"
    doc: str = "doc_id"
    grade: str | None = None
    score: str | None = None
    allow_partial: bool = False
    texts: bool = False


@dataclass(frozen=True)
class Source:
    """Rows to convert.

    Args:
        files: Parquet on this machine, with all columns that the target wants.
        names: their columns.
        by, doc, value: columns of query, document, and grade or score.
        kind: what `value` is.
        row_column: column that says where a row comes from, and what to call it in a message; None: its position.
        num_quarantined: rows of a run that have no label.
        run_name: of a run.
        notes: remarks for the user.
    """

    path: str
    form: Format
    files: list[str]
    names: list[str]
    by: str
    doc: str
    value: str
    kind: Kind
    row_column: str | None = None
    num_quarantined: int = 0
    run_name: str | None = None
    notes: list[str] = field(default_factory=list)

    def scan(self, polars: Any) -> Any:
        """All rows as a lazy frame, in order."""
        return polars.scan_parquet(self.files, glob=False)


def open_source(
    polars: Any, path: str, form: Format, target: Format, options: Options, scratch: Path, storage: Storage
) -> Source:
    """Read a source as far as a target wants it.

    Raises:
        InputError: it can't be read, is not what it is said to be, or lacks a column.
        ManifestError: a run is unfinished, over its limit or damaged.
    """
    if form == "labels":
        return _from_run(path, target, options, scratch, storage)
    if form == "qrels":
        return _from_trec(polars, path, form, QRELS_COLUMNS, target, options, scratch, storage)
    if form == "run":
        return _from_trec(polars, path, form, RUN_COLUMNS, target, options, scratch, storage)
    if form == "jsonl":
        return _from_jsonl(polars, path, target, options, scratch, storage)
    return _from_parquet(path, target, options, storage)


def _from_run(path: str, target: Format, options: Options, scratch: Path, storage: Storage) -> Source:
    run = open_run_labels(path, storage, allow_partial=options.allow_partial)
    whole, joined = join_texts(run, storage) if options.texts else (file_schema(run.plan.parts), None)
    names = whole.names
    value, kind = _value(names, path, "labels", target, options)
    by, doc = _ids(names, path, options)
    wanted = list(dict.fromkeys(["row_id", by, doc, value])) if target in TREC else names
    schema = pa.schema([whole.field(name) for name in wanted], metadata=whole.metadata)
    tables = map_concurrent(
        run.folder.store, lambda file: run.folder.table(file, whole, None if wanted == names else wanted), run.labels
    )
    file = _gathered(tables if joined is None else joined, schema, scratch / "labels.parquet")
    return Source(
        path, "labels", [file], wanted, by, doc, value, kind, "row_id", run.num_quarantined, run.plan.name, run.notes
    )


def _from_trec(
    polars: Any,
    path: str,
    form: Format,
    columns: tuple[str, ...],
    target: Format,
    options: Options,
    scratch: Path,
    storage: Storage,
) -> Source:
    names = list(columns)
    value, kind = _value(names, path, form, target, options)
    by, doc = _ids(names, path, options)
    keys = [name for name in names if name not in ("iteration", "q0")]
    schema = pa.schema([("line", pa.int64()), *((name, pa.string()) for name in keys)])
    frames = (trec_frame(polars, block, columns, path=path).select("line", *keys) for block in blocks(path, storage))
    tables = (frame.to_arrow(compat_level=polars.CompatLevel.oldest()).cast(schema) for frame in frames)
    file = _gathered(tables, schema, scratch / "lines.parquet")
    return Source(path, form, [file], keys, by, doc, value, kind, "line")


def _from_jsonl(polars: Any, path: str, target: Format, options: Options, scratch: Path, storage: Storage) -> Source:
    texts = dict.fromkeys((options.by, options.doc), polars.String)
    if target in TREC:
        names = _json_names(polars, path, _wanted(target, options), storage)
        value, kind = _value(names, path, "jsonl", target, options)
        by, doc = _ids(names, path, options)
        schema = {**texts, value: polars.String, **({"tag": polars.String} if "tag" in names else {})}
    else:
        found: dict[str, Any] = {}
        for block in blocks(path, storage):
            found = merged_schema(polars, found, json_frame(polars, block, None, path=path).schema)
        names = list(found)
        value, kind = _value(names, path, "jsonl", target, options)
        by, doc = _ids(names, path, options)
        schema = {**found, **texts}
        schema.setdefault(value, polars.Int64 if kind == "grade" else polars.Float64)  # of an empty file
    arrow = _arrow_schema(polars, schema, path)
    frames = (_exact(polars, block, schema, path) for block in blocks(path, storage))
    tables = (frame.to_arrow(compat_level=polars.CompatLevel.oldest()).cast(arrow) for frame in frames)
    file = _gathered(tables, arrow, scratch / "objects.parquet")
    return Source(path, "jsonl", [file], list(schema), by, doc, value, kind)


def _exact(polars: Any, block: Block, schema: dict[str, Any], path: str) -> Any:
    frame = json_frame(polars, block, schema, path=path)
    refuse_rounded(polars, frame, block, path=path)
    return frame


def _json_names(polars: Any, path: str, wanted: set[str], storage: Storage) -> list[str]:
    """The keys of a JSONL file, as far as it takes to find those wanted."""
    names: dict[str, None] = {}
    for block in blocks(path, storage):
        names.update(dict.fromkeys(json_names(polars, block, path=path)))
        if wanted <= names.keys():
            break
    return list(names)


def _wanted(target: Format, options: Options) -> set[str]:
    value = (options.grade or "grade") if target == "qrels" else (options.score or SCORES[0])
    return {options.by, options.doc, value}


def _from_parquet(path: str, target: Format, options: Options, storage: Storage) -> Source:
    files, schema, _ = open_tables(path, {}, storage, role="SOURCE", ids=(options.by, options.doc))
    names = list(schema)
    by, doc = _ids(names, path, options)
    value, kind = _value(names, path, "parquet", target, options)
    return Source(path, "parquet", files, names, by, doc, value, kind)


def _ids(names: list[str], path: str, options: Options) -> tuple[str, str]:
    if not names:
        return options.by, options.doc
    by = require_column(options.by, names, path=path, role="the query id", option="--by")
    return by, require_column(options.doc, names, path=path, role="the document id", option="--doc")


def _value(names: list[str], path: str, form: Format, target: Format, options: Options) -> tuple[str, Kind]:
    """The column that a row stands or falls with, and what it is."""
    kind: Kind = "score"
    if target == "qrels" or (
        target != "run" and options.score is None and (options.grade or "grade" in names or not names)
    ):
        name, kind = options.grade or "grade", "grade"
    else:
        usual = "expected_grade" if form == "labels" else next((name for name in SCORES if name in names), SCORES[0])
        name = options.score or usual
    return (require_column(name, names, path=path, role=f"the {kind}", option=f"--{kind}") if names else name), kind


def _arrow_schema(polars: Any, schema: dict[str, Any], path: str) -> pa.Schema:
    """The Arrow types of a frame's columns, text and lists as every reader of Parquet knows them.

    Raises:
        InputError: a column can't be in Parquet.
    """
    for name, kind in schema.items():
        if "Int128" in str(kind):  # also of an item or a field
            raise InputError(
                f"{path}: column `{name}` holds whole numbers beyond 64 bits, which no column can hold. Write them as "
                "text."
            )
    empty = polars.DataFrame(schema=schema).to_arrow(compat_level=polars.CompatLevel.oldest())
    return pa.schema([(column.name, _plain(column.type, column.name, path)) for column in empty.schema])


def _plain(kind: pa.DataType, name: str, path: str) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type, name, path))
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            raise InputError(
                f"{path}: column `{name}` holds only empty objects ({{}}), which no column can hold. Leave it out, or "
                "write null."
            )
        return pa.struct([(part.name, _plain(part.type, f"{name}.{part.name}", path)) for part in kind])
    return kind


def _gathered(tables: Iterable[pa.Table], schema: pa.Schema, file: Path) -> str:
    """Tables behind each other in one scratch file; its path."""
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in _grouped(tables):
            writer.write_table(table.select(schema.names).cast(schema))
    return str(file)


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables put together to row groups of a decent size."""
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        held.append(table)
        size += table.nbytes
        if size >= GROUP_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
    if held:
        yield pa.concat_tables(held)
