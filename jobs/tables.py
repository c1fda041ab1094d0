"""Parquet tables: lazy frames with checked columns, atomic writes, and grouping of rows by query on disk."""

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.errors import DiskFullError, InputError, StoreError, UsageError
from relabel.manifests.files import FULL, Storage, is_full, is_url, place_of, scheme_of, translate_errors
from relabel.manifests.forms import ROWS_PER_GROUP, write_grouped
from relabel.manifests.inputs import check_single, list_input, takes_file
from relabel.manifests.process import check_interrupted, require
from relabel.manifests.records import sha256_file
from relabel.manifests.secrets import shortened
from relabel.manifests.store import Held, UrlFile, fetched, open_bundle_store, open_run_store, scratch_file, sync_folder
from relabel.manifests.tables import (
    PARQUET_SUFFIXES,
    BrokenTexts,
    NeededColumn,
    PlainParquet,
    check_kind_of,
    document_columns,
    is_number_type,
    is_utf8,
    open_parquet,
    plain,
    plain_type,
    reading,
    require_columns,
)

# ------------------------------------------------------------------------------
# Files that a command writes atomically, on disk or at a URL, and scratch folders.


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder in TMPDIR, removed when the body ends. Whatever else the body fills a disk with has to say so
    itself.

    Raises:
        DiskFullError: no space is left for it or in it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    except StoreError:  # ours already, and an OSError too
        raise
    except OSError as exc:
        if not is_full(exc):
            raise
        raise DiskFullError(
            f"{tempfile.gettempdir()}: no space left for scratch files. Nothing was changed; free some, or point "
            "TMPDIR at a folder that has more, and give the command again."
        ) from exc


ONE_PUT_BYTES = 64 << 20
"""A file up to this size goes to storage in one put, held in memory; a larger one goes to S3 in parts."""


def check_free(to: str, inputs: Sequence[str], storage: Storage, *, force: bool) -> None:
    """Raise where a file can't be written, before any work is done.

    Raises:
        UsageError: it is a folder or something else than a file, is in an input or is one, or is there already and
            `force` is off.
    """
    place = place_of(to)
    for path in inputs:
        input_place = place_of(path).rstrip("/")
        if place == input_place or place.startswith(f"{input_place}/") or takes_file(path, to):
            raise UsageError(f"{to}: is in the input {path}. Give a file elsewhere.")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if is_remote(to):
            UrlFile(to, storage).close()
        else:
            _local_path(to).stat()
        if not force:
            raise UsageError(f"{to}: is there already. Give another name, or --force to replace it.")


def is_remote(to: str) -> bool:
    """Whether it is a URL of anything but this machine's files."""
    return is_url(to) and scheme_of(to) not in ("file", "local")


def _local_path(to: str) -> Path:
    """Where a local file is to be written, links followed.

    Raises:
        UsageError: a rename would replace something else than a file: a folder, a device, a pipe, a dangling link.
    """
    target = Path(to.partition("://")[2] if is_url(to) else to).absolute()
    if os.path.lexists(target) and not target.is_file():
        raise UsageError(f"{to}: is not a regular file. Give the name of a file.")
    return target.resolve()


@contextlib.contextmanager
def written(to: str, storage: Storage) -> Iterator[Path]:
    """A path to write to; what is there when the body ends without an error is put under the name `to` in one step.
    Where `to` is a link to a file, the link stays, and the file that it names is replaced.

    Raises:
        UsageError: something that is not a regular file is there.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
    """
    with translate_errors("write", to):
        if is_remote(to):
            with scratch_folder("relabel-out-") as scratch:
                file = scratch / to.rpartition("/")[2]
                yield file
                check_interrupted()
                _upload(file, to, storage)
            return
        target = _local_path(to)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            yield temporary
            check_interrupted()
            with temporary.open("rb") as written_file:
                os.fsync(written_file.fileno())
            temporary.replace(target)
            sync_folder(target.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _upload(file: Path, to: str, storage: Storage) -> None:
    """Put a local file under a URL."""
    folder, _, name = to.rpartition("/")
    size = file.stat().st_size
    if size > ONE_PUT_BYTES and scheme_of(to) == "s3":
        held = Held(size, sha256_file(file))
        open_bundle_store(folder, storage).put_file(name, file, held, lambda _: None)
        return
    # `single_writer`: one whole put needs no condition
    open_run_store(folder, storage, single_writer=True).put(name, file.read_bytes())


# ------------------------------------------------------------------------------
# Parquet tables: lazy frames with checked columns, atomic writes, and grouping of rows by query on disk.


_IDS = ("query_id", "doc_id")
_TEXTS = (*_IDS, "query", "document", "title", "body", "html", "context")
"""Columns that are read as plain ones, whatever else a command reads."""
COPY_ROWS = 2048
ID_ROWS = 1 << 16
"""Rows of texts, and of ids alone, that are held at a time."""


def load_polars() -> Any:
    """The polars module.

    Raises:
        MissingExtraError: it is not installed.
    """
    return require("polars", extra="pairs", purpose="relabel pairs")


def scan(
    path: str, wanted: Mapping[str, str], storage: Storage, *, has_text: bool = False, role: str
) -> tuple[Any, tuple[str, ...]]:
    """A lazy frame over a file, folder or glob.

    Args:
        wanted: see `open_tables`.
        has_text: whether the rows hold documents: a column `document`, else `title` and `body` as present.
        role: what the user calls this input, for messages.
    Returns:
        The frame with all its columns, and the names of the document's columns.
    Raises:
        InputError: no file, a damaged one, a missing column or one of the wrong type, files that disagree.
    """
    texts = BrokenTexts()
    tables = open_tables(
        path,
        wanted,
        storage,
        role=role,
        texts=texts,
    )
    texts.report()
    text = document_columns(tables.schema.names, f"{tables.named} ({role})") if has_text else ()
    tables.check_columns(dict.fromkeys(text, "string"))
    return load_polars().scan_parquet(tables.files, glob=False), text


def first_columns(path: str, storage: Storage, *, role: str) -> list[str]:
    """What the columns of a path's first file are called."""
    file = _files(path, role, storage)[0]
    with open_parquet(file, storage) as parquet, reading(file):
        return list(parquet.plain_schema.names)


class OpenTables(NamedTuple):
    """Parquet files with the same columns.

    Args:
        path, role: how the user named them, and what for; `named` is the first file, for messages.
        files: on this machine.
        schema: their columns.
    """

    path: str
    role: str
    named: str
    files: list[str]
    schema: pa.Schema

    def check_columns(self, wanted: Mapping[str, str]) -> None:
        """Raise unless columns are there and hold what they should, see `open_tables`.

        Raises:
            InputError: one is missing, or of the wrong type.
        """
        needed = [NeededColumn(name, self.role) for name in wanted]
        require_columns(needed, self.schema.names, path=self.named)
        for name, kind in wanted.items():
            check_kind_of(
                name,
                self.schema.field(name).type,
                kind,
                self.named,
                self.role,
            )

    def refuse_taken(self, added: Iterable[str]) -> None:
        """Raise where a column that will be added is there already.

        Raises:
            InputError: names the first.
        """
        for name in added:
            if name in self.schema.names:
                raise InputError(f"{self.named} ({self.role}): has a column `{name}` already. Drop or rename it first.")


def open_tables(
    path: str,
    wanted: Mapping[str, str],
    storage: Storage,
    *,
    role: str,
    ids: Collection[str] = (),
    texts: BrokenTexts | None = None,
) -> OpenTables:
    """The Parquet files of a path, folder or glob; of their rows only ids and texts are looked at, unless they are
    copied.

    polars knows fewer types than Parquet has, and wants the same of all files: a file whose columns of ids or texts it
    can't read as they are, and one of other types than the others, is copied with plain columns. It also has its own
    ways to object storage, with other credentials and retries, so that files at URLs are fetched.

    Args:
        wanted: columns that have to be there, and what they hold: a kind of `COLUMN_KINDS`.
        ids: further columns of ids, if they are there.
        texts: counts the texts that are not UTF-8, of files that polars is to read: it takes none with such a text,
            so that they are copied. None: what reads the rows sees to it.
    Raises:
        InputError: no file, a damaged one, a missing column or one of the wrong type, files that disagree, or an id
            that is not UTF-8.
    """
    files = _files(path, role, storage)
    ids = {*ids, *(name for name, kind in wanted.items() if kind == "id")}
    read = {*ids, *wanted, *_TEXTS}
    types = _common_types(files, read, ids, storage)
    here = [
        _local_copy(
            file=file,
            read=read,
            ids=ids,
            types=types,
            texts=texts,
            storage=storage,
        )
        for file in files
    ]
    with open_parquet(here[0], storage) as first:
        found = OpenTables(
            path,
            role,
            files[0],
            here,
            first.schema_arrow.remove_metadata(),
        )
    found.check_columns(wanted)
    return found


def _common_types(files: Sequence[str], read: Collection[str], ids: Collection[str], storage: Storage) -> pa.Schema:
    """The columns of all files with the types that each is read as, those of ids or texts plain.

    A column without values has the type that others have, numbers of several types are float64, and ids that are not
    integers everywhere are text.

    Raises:
        InputError: a file is not a whole Parquet file, or has other columns than the first.
    """
    types: dict[str, pa.DataType] = {}
    for file in files:
        with open_parquet(file, storage) as parquet:
            stored = dict(zip(parquet.schema_arrow.names, parquet.schema_arrow.types, strict=True))
            kinds = {one.name: one.type for one in parquet.plain_schema}
        kinds |= {name: kind for name, kind in stored.items() if name not in read}
        if types and types.keys() != kinds.keys():
            raise InputError(
                f"{file}: has the columns {', '.join(kinds)}; {files[0]} has {', '.join(types)}. Make the files agree."
            )
        for name, kind in kinds.items():
            before = types.get(name, kind)
            if pa.types.is_null(before) or before == kind:
                types[name] = kind
            elif not pa.types.is_null(kind) and is_number_type(before) and is_number_type(kind):
                types[name] = pa.float64()
    for name in ids & types.keys():
        if is_number_type(types[name]) and not (pa.types.is_integer(types[name]) or pa.types.is_null(types[name])):
            types[name] = pa.large_string()
    return pa.schema(types.items())


def _local_copy(
    file: str,
    read: Collection[str],
    ids: Collection[str],
    types: pa.Schema,
    texts: BrokenTexts | None,
    storage: Storage,
) -> str:
    """A file on this machine whose columns polars reads as these types: a copy, where the file itself is not such."""
    with reading(file), open_parquet(file, storage) as parquet:
        stored = dict(zip(parquet.schema_arrow.names, parquet.schema_arrow.types, strict=True))
        names = [name for name in types.names if name in stored or name in parquet.folder_columns]
        text_ids = [name for name in names if name in ids and pa.types.is_large_string(types.field(name).type)]
        is_plain = all(name in stored and _fits(stored[name], types.field(name).type) for name in names)
        if is_plain:
            for _ in parquet.plain_batches(text_ids, ids=text_ids, batch_rows=ID_ROWS):
                pass  # an id that is not UTF-8 raises
        if is_plain and (texts is None or _is_utf8(parquet, [name for name in names if name in read])):
            return str(fetched(file, storage)) if is_url(file) else file
        schema = pa.schema([types.field(name) for name in names])
        copy = scratch_file("plain.parquet")
        first_row = 0
        with pq.ParquetWriter(copy, schema, compression="zstd") as writer:
            for batch in parquet.iter_batches(COPY_ROWS, columns=[name for name in names if name in stored]):
                columns = [
                    parquet.plain_column(batch, name, is_id=name in text_ids)
                    if name in read or name not in stored
                    else batch.column(name)
                    for name in names
                ]
                table = _cast(pa.RecordBatch.from_arrays(columns, names=names), schema, file, "the others")
                if texts is not None:
                    table = texts.mend(table, file, first_row, {*ids, *_IDS}).cast(schema)
                writer.write_table(table)
                first_row += batch.num_rows
        return str(copy)


def _is_utf8(parquet: PlainParquet, names: Sequence[str]) -> bool:
    """Whether all texts in columns of a file are UTF-8."""
    batches = parquet.iter_batches(COPY_ROWS, columns=[*names])
    return all(is_utf8(plain(column)) for batch in batches for column in batch.columns)


def _fits(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Whether polars reads a stored type as a plain one. It takes bytes for bytes and knows no extension."""
    is_known = not any(word in str(stored) for word in ("binary", "extension"))
    return stored == kind or (is_known and plain_type(stored) == kind)


def _cast(batch: pa.RecordBatch, schema: pa.Schema, name: str, first_file: str) -> pa.Table:
    try:
        return pa.Table.from_batches([batch]).select(schema.names).cast(schema)
    except (pa.ArrowException, TypeError) as exc:
        raise InputError(
            f"{name}: a column has another type than in {first_file}: {shortened(str(exc), 200)}. Make the files agree."
        ) from exc


def refuse_null(frame: Any, name: str, *, path: str) -> None:
    """Raise if a column of ids or texts that every row needs holds a null.

    Raises:
        InputError: names the first such row.
    """
    polars = load_polars()
    with translate_polars_errors(path):
        found = frame.select(name).with_row_index("row").filter(polars.col(name).is_null()).head(1).collect()
    if found.height:
        raise InputError(f"{path}: row {found['row'][0]} has no `{name}`. Give every row one, or leave the row out.")


def refuse_two_texts(ids: Any, *, path: str, what: str) -> None:
    """Raise if an id occurs twice.

    Args:
        ids: a series: of each different text that id.
        what: has such an id, `query`.
    Raises:
        InputError: names the first such id.
    """
    twice = ids.filter(ids.is_duplicated())
    if twice.len():
        raise InputError(f"{path}: {what} `{twice.min()}` has two texts. Give each text an id of its own.")


def document_of(columns: tuple[str, ...]) -> Any:
    """The document as a job reads it: the columns that are not empty, joined by a blank line."""
    polars = load_polars()
    texts = [polars.col(name).cast(polars.String) for name in columns]
    parts = [polars.when(text != "").then(text) for text in texts]
    return polars.concat_str(parts, separator="\n\n", ignore_nulls=True).fill_null("")


@contextlib.contextmanager
def translate_polars_errors(path: str) -> Iterator[None]:
    """Turn what polars says about unreadable rows into an InputError that names the input."""
    polars = load_polars()
    try:
        yield
    except polars.exceptions.PolarsError as exc:
        text = str(exc) or type(exc).__name__
        found = re.search(r"\(os error ([0-9]{1,4})\)", text)
        if found is not None and int(found[1]) in (*FULL, errno.EFBIG):  # of a file that is written, not of the input
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from exc
        raise InputError(f"{path}: can't be read: {shortened(text.splitlines()[0], 200)}.") from exc


def _files(path: str, role: str, storage: Storage) -> list[str]:
    if not is_url(path) and not any(mark in path for mark in "*?[") and not Path(path).exists():
        raise InputError(f"{path} ({role}): no such file or folder (working directory: {Path.cwd()}).")
    files = list_input(path, storage).files
    if not files:
        raise InputError(
            f"{path} ({role}): no Parquet file there. Give a .parquet file, a folder that holds some, or a glob."
        )
    check_single(files, f"{path} ({role})")
    return files


def add_columns(
    pairs: OpenTables,
    to: str,
    added: Mapping[str, pa.DataType],
    values: Callable[[pa.Table], Mapping[str, Sequence[Any]]],
    storage: Storage,
    *,
    batch_rows: int,
) -> None:
    """Write the pairs with further columns, rows in their order; the file is there whole or not at all. Texts that are
    not UTF-8 are counted, and become such.

    Args:
        added: name and type of each; one that the pairs have is replaced.
        values: of some rows, for each added column.
    Raises:
        InputError: the rows can't be read, or an id is not UTF-8.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
    """
    texts = BrokenTexts()
    fields_kept = [field for field in pairs.schema if field.name not in added]
    new = [pa.field(name, kind) for name, kind in added.items()]

    def tables() -> Iterator[pa.Table]:
        for file in pairs.files:
            name = pairs.path if is_url(pairs.path) else file
            first_row = 0
            with reading(name), open_parquet(file, storage) as parquet:
                for batch in parquet.iter_batches(batch_rows):
                    stored = _cast(batch, pairs.schema, name, pairs.named)
                    table = texts.mend(stored, name, first_row, _IDS)
                    first_row += batch.num_rows
                    columns_read = table.select([field.name for field in fields_kept])
                    columns = values(table)
                    for field in new:
                        columns_read = columns_read.append_column(field, pa.array(columns[field.name], type=field.type))
                    yield columns_read

    with written(to, storage) as file:
        write_grouped(file, pa.schema([*fields_kept, *new]), tables())
    texts.report()


def check_target(to: str, inputs: Sequence[str], storage: Storage, *, force: bool) -> None:
    """Raise where the output can't be written, before any work is done.

    Raises:
        UsageError: it is no Parquet name, or see `check_free`.
    """
    if not to.endswith(PARQUET_SUFFIXES):
        raise UsageError(
            f"--to {to}: want a name that ends in .parquet, so that a job finds it. `relabel convert` "
            "writes other forms of it."
        )
    check_free(to, inputs, storage, force=force)


def publish(frame: Any, to: str, storage: Storage, *, source: str) -> int:
    """Write a lazy frame as one Parquet file, streaming: under another name first, then renamed.

    Returns:
        Number of rows written.
    Raises:
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
        InputError: the rows can't be read.
    """
    with written(to, storage) as file:
        with translate_polars_errors(source):
            frame.sink_parquet(file, compression="zstd", maintain_order=True, row_group_size=ROWS_PER_GROUP)
        return int(pq.read_metadata(file).num_rows)
