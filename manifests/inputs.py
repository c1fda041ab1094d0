"""The input: its files, its columns and its identity, from names and footers alone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests import table_snapshots
from relabel.manifests.columns import PlainParquet, check_types, folder_columns, resolve_columns
from relabel.manifests.errors import InputError, NothingNewError
from relabel.manifests.files import Storage, absolute_path, check_kind, is_url
from relabel.manifests.input_files import left_out_text, list_input, reading
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Reads
from relabel.manifests.records import digest_of
from relabel.manifests.secrets import counted
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import TAIL_BYTES, UrlFile
from relabel.manifests.table_snapshots import TableSnapshot, reading_table

# ------------------------------------------------------------------------------
# The door to tables: `input.table` and its snapshot become a list of files, like a folder's.


OPENERS = {"iceberg": table_snapshots.open_iceberg_snapshot, "delta": table_snapshots.open_delta_snapshot}


def open_table(spec: InputSpec, storage: Storage) -> TableSnapshot | None:
    """The snapshot that a job's input names; None where it names no table.

    Raises:
        InputError: no such table or snapshot, or one that can't be read as files alone.
        NothingNewError: nothing was added since `since`.
        MissingExtraError: a package is not here.
    """
    if spec.table is None:
        return None
    (path,) = spec.path
    with reading_table(path, spec.table):
        table = OPENERS[spec.table](path, spec.snapshot, spec.since, storage)
    if not table.files and table.since is not None:
        raise NothingNewError(
            f"{path}: no rows were added since snapshot {table.since}, up to snapshot {table.snapshot}: nothing to "
            "label yet."
        )
    if not table.files:
        raise InputError(f"{path}: snapshot {table.snapshot} has no data files. There is nothing to label.")
    return table


# ------------------------------------------------------------------------------
# The input: which files, which columns, and their identity. Reads footers and names, never a row of text (`rows.py`
# does that).
#
# A row's id is its position in the order of the files; folders and globs are taken in name order. A file's identity is
# its size and the sha256 of its Parquet footer: the footer holds every column chunk's place, size and statistics, and
# costs one short read.


READ_BUFFER_BYTES = 1 << 20
SIGNATURE_BYTES = 28
"""What signs a footer that is not encrypted while columns are."""
FOOTERS_AT_A_TIME = 16
"""Footers that are fetched at once by URL: at 25 ms a reply, a thousand wait two seconds instead of twenty-five."""
FOOTERS_KEPT = 64
"""Most footers that are held before they are taken note of; one may be megabytes."""


class InputFile(NamedTuple):
    """One input file: where it lies and what it is."""

    path: str
    size_bytes: int
    footer_sha256: str
    rows: int

    @property
    def identity(self) -> tuple[int, str]:
        """What makes it the same file wherever it lies: size and sha256 of its footer."""
        return self.size_bytes, self.footer_sha256


@dataclass(frozen=True, slots=True)
class Dataset:
    """The input files in order, with the columns that the job reads.

    Args:
        files: in reading order.
        columns: resolved: every name exists in every file; `context` and `gold` are None where absent or not wanted.
        rows: number of rows in use (`limit` applied).
        group_bytes: for each file, for each of its row groups, (rows, uncompressed bytes of the columns read).
        storage: how the files are reached.
        left_out: of the folders that were listed, how many names each rule left out (`input_folders.Folder`), the
            commonest first.
        reads: what the labeler reads; of its columns those that every file has.
        table: the snapshot whose data files they are; None for plain files.
    """

    files: tuple[InputFile, ...]
    columns: Columns
    rows: int
    group_bytes: tuple[tuple[tuple[int, int], ...], ...]
    storage: Storage = field(repr=False, compare=False)
    left_out: tuple[tuple[str, int], ...] = ()
    reads: Reads = QUERY_AND_DOCUMENT
    table: TableSnapshot | None = None

    @property
    def text_columns(self) -> list[str]:
        """What a run reads, query and document ids included."""
        return _read_columns(self.columns, self.reads)

    @property
    def id_columns(self) -> tuple[str, str]:
        """Those of them that are read as text whatever they hold."""
        return self.columns.query_id, self.columns.doc_id


def open_dataset(spec: InputSpec, storage: Storage, *, reads: Reads = QUERY_AND_DOCUMENT) -> Dataset:
    """Find the files and check the columns.

    Args:
        spec: the job's `input` section.
        reads: what the labeler reads; other columns are left alone.
    Raises:
        InputError: no file, an unreadable or truncated one, a missing column or one of the wrong type, files that
            disagree.
    """
    table = open_table(spec, storage)
    paths, left_out = _listed(spec, storage) if table is None else (table.paths, ())
    if not paths:
        raise InputError(
            f"input.path {', '.join(spec.path)}: no Parquet file there"
            + (f" (left out: {left_out_text(left_out)})" if left_out else "")
            + ". "
            "Give a .parquet file, a folder that holds some, or a glob."
        )
    check_single(paths, f"input.path {', '.join(spec.path)}")
    files: list[InputFile] = []
    groups: list[tuple[tuple[int, int], ...]] = []
    columns: Columns | None = None
    found = reads
    first_types: dict[str, str] = {}
    for number, (path, footer) in enumerate(zip(paths, _footers(paths, storage), strict=True)):
        with reading(path):  # a damaged footer may hold names that are not text, and more
            if columns is None:
                names = [*footer.schema.names, *footer.folders] if table is None else list(table.columns)
                columns = resolve_columns(spec.columns, names, path, reads_context=reads.context)
                found = reads._replace(
                    columns=tuple(one for one in reads.columns if one.is_required or one.name in names)
                )
            if table is not None:
                table.check_size(number, footer.file.size_bytes)
                table.check_columns(_read_columns(columns, found, gold=True), footer.schema, path)
            check_types(columns, found, footer.schema, path, first_types, first_path=paths[0], folders=footer.folders)
            groups.append(_group_bytes(footer, columns, found))
        used = [name for name in _read_columns(columns, found) if name in footer.folders]
        files.append(footer.file._replace(footer_sha256=_with_folders(footer.file.footer_sha256, path, used)))
    if columns is None:
        raise InputError(f"input.path {', '.join(spec.path)}: no file could be opened.")
    rows = sum(file.rows for file in files)
    if rows == 0:
        raise InputError(
            f"input.path {', '.join(spec.path)}: {counted(len(files), 'file')}, no rows. There is nothing to label."
        )
    return Dataset(
        tuple(files),
        columns,
        min(rows, spec.limit or rows),
        tuple(groups),
        storage,
        left_out,
        found,
        table,
    )


def _listed(spec: InputSpec, storage: Storage) -> tuple[list[str], tuple[tuple[str, int], ...]]:
    """The files of all paths, and what was left out of their folders."""
    listings = [list_input(pattern, storage) for pattern in spec.path]
    left_out = sum((listing.left_out for listing in listings), Counter[str]())
    return [path for listing in listings for path in listing.files], tuple(left_out.most_common())


def open_parquet(path: str, storage: Storage) -> PlainParquet:
    """Open one file, local or by URL, with page checksums verified. The caller closes it (it is a context manager).

    Raises:
        InputError: it can't be read or is not a whole Parquet file.
    """
    with reading(path):
        if is_url(path):
            # pre-buffering asks for the columns of the row groups to come in as few ranges as have no gaps, and for
            # nothing else
            return PlainParquet(pa.PythonFile(UrlFile(path, storage), "r"), path, pre_buffer=True)
        # pre-buffering fetches whole row groups ahead: 149 MB where a buffered stream held 8 MB, at the same speed (row
        # groups of 40 MB)
        check_kind(path, Path(path).stat())
        local = Path(path).absolute()  # pyarrow takes a relative path with a colon for a URI
        return PlainParquet(local, path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)


@contextlib.contextmanager
def open_planned(file: InputFile, dataset: Dataset) -> Iterator[PlainParquet]:
    """Open a file of the dataset again.

    Raises:
        InputError: it can't be read, or is not the file any more that was read when this run began.
    """
    path, storage = file.path, dataset.storage
    with reading(path), UrlFile(path, storage) if is_url(path) else Path(path).open("rb", buffering=0) as source:
        size, footer = _read_footer(source, path)
        plain_sha256 = hashlib.sha256(footer).hexdigest()
        if file.identity not in {(size, plain_sha256), (size, _with_folders(plain_sha256, path, dataset.text_columns))}:
            raise changed_under_way(path)
        if isinstance(source, UrlFile):  # pinned to the version whose footer this is
            source.seek(0)
            opened = PlainParquet(pa.PythonFile(source, "r"), path, pre_buffer=True)
        else:
            opened = open_parquet(path, storage)
        with opened:
            yield opened


def changed_under_way(path: str) -> InputError:
    """The error for a file that is not any more what it was when this run began."""
    return InputError(
        f"{path}: changed while this run was under way. Restore it, or label the new one into another output."
    )


def check_single(paths: list[str], where: str) -> None:
    """Refuse one file under two names.

    Args:
        where: what named them, for messages.
    Raises:
        InputError: which, and what they are.
    """
    seen: dict[Any, str] = {}
    for path in paths:
        names = _names(path)
        before = next((seen[name] for name in names if name in seen), None)
        if before is not None:
            what = f"names {path} twice" if before == path else f"{before} and {path} are one file"
            raise InputError(f"{where}: {what}, so its rows would be labelled twice. Name it once.")
        seen.update(dict.fromkeys(names, path))


def _names(path: str) -> list[Any]:
    """What one file has in common under all its names: where symbolic links lead, and, for hard links, its device and
    inode.
    """
    if is_url(path):
        return [path]
    try:
        stat = Path(path).stat()
    except OSError:  # opening it says why
        return [os.path.realpath(path)]
    # some network disks number no file
    return [
        os.path.realpath(path),
        *([(stat.st_dev, stat.st_ino)] if stat.st_ino else []),
    ]


class _Footer(NamedTuple):
    """What a footer said."""

    file: InputFile
    metadata: pq.FileMetaData
    schema: pa.Schema

    @property
    def folders(self) -> dict[str, str | None]:
        """Columns that the names of its folders hold."""
        return folder_columns(self.file.path, self.schema.names)


def _footers(paths: list[str], storage: Storage) -> Iterator[_Footer]:
    """`_open_footer` of each file, in order; by URL several at a time, since each waits for a reply."""
    opener = functools.partial(_open_footer, storage=storage)
    if not any(map(is_url, paths)):
        yield from map(opener, paths)
        return
    with ThreadPoolExecutor(FOOTERS_AT_A_TIME, thread_name_prefix="footer") as pool:
        for first in range(0, len(paths), FOOTERS_KEPT):
            yield from pool.map(opener, paths[first : first + FOOTERS_KEPT])


def _open_footer(path: str, storage: Storage) -> _Footer:
    with reading(path), UrlFile(path, storage) if is_url(path) else Path(path).open("rb") as file:
        size, footer = _read_footer(file, path)
        # Parquet reads its footer from the end of any buffer that starts like a file
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        found = InputFile(path, size, hashlib.sha256(footer).hexdigest(), metadata.num_rows)
        if len(footer) - 8 - metadata.serialized_size == SIGNATURE_BYTES:
            # Arrow ends the process where it is asked about an encrypted column
            raise InputError(
                f"{path}: has encrypted columns, and relabel takes no keys. Write it again without encryption."
            )
        return _Footer(found, metadata, metadata.schema.to_arrow_schema())


def _with_folders(sha256: str, path: str, names: Iterable[str]) -> str:
    """The digest of a file's footer, with the columns of these names that the names of its folders hold: the same file
    elsewhere may hold other rows then.
    """
    found = folder_columns(path, ())
    used = {name: found[name] for name in sorted({*names} & found.keys())}
    return digest_of([sha256, used]) if used else sha256


def _read_footer(file: BinaryIO | UrlFile, path: str) -> tuple[int, bytes]:
    """A file's size, and its footer with length field and magic."""
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read()
    if size < 12 or tail[-4:] not in (b"PAR1", b"PARE"):  # the latter is encrypted, which Arrow reports
        raise InputError(
            f"{path}: not a whole Parquet file ({size} bytes, no PAR1 mark at its end). Was it cut off while being "
            "written, or is it something else?"
        )
    footer_bytes = min(int.from_bytes(tail[-8:-4], "little") + 8, size)
    if footer_bytes > len(tail):
        file.seek(size - footer_bytes)
        tail = file.read()
    return size, tail[-footer_bytes:]


def _read_columns(columns: Columns, reads: Reads, *, gold: bool = False) -> list[str]:
    """What a run reads, each once; with gold, which is read later alone."""
    names = [columns.query_id, columns.query, columns.doc_id, *columns.document]
    more = [name for name in (columns.context, columns.gold if gold else None) if name]
    return list(dict.fromkeys([*names, *more, *(one.name for one in reads.columns)]))


def _group_bytes(footer: _Footer, columns: Columns, reads: Reads) -> tuple[tuple[int, int], ...]:
    metadata, names = footer.metadata, {*_read_columns(columns, reads)}
    paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    leaves = [leaf for leaf, path in enumerate(paths) if path in names or path.partition(".")[0] in names]
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        found.append((group.num_rows, sum(group.column(leaf).total_uncompressed_size for leaf in leaves)))
    return tuple(found)


# ------------------------------------------------------------------------------
# Which of an input's files are others than they were.


def changed_files(planned: list[InputFile], found: tuple[InputFile, ...]) -> list[str]:
    """What differs between the files that were planned and those that are there, a sentence each; empty if nothing
    does.
    """
    if [file.identity for file in planned] == [file.identity for file in found]:
        return []
    before, after = ({absolute_path(file.path): file for file in files} for files in (planned, found))
    remarks = []
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        if now is None and was is not None:
            remarks.append(f"{was.path}: planned, now missing")
        elif was is None and now is not None:
            remarks.append(f"{now.path}: new since the plan")
        elif was is not None and now is not None and was.identity != now.identity:
            what = f"{was.rows} rows in {was.size_bytes} bytes, now {now.rows} rows in {now.size_bytes} bytes"
            remarks.append(f"{now.path}: changed since the plan ({what})")
    return remarks or [f"{found[0].path} and the others: read in another order than planned, or a file twice"]
