"""The input: its files and their order, its columns and its identity, from names and footers alone."""

import contextlib
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage, absolute_path, check_kind, filesystem_of, is_url, place_of, scheme_of
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Reads
from relabel.manifests.records import digest_of, file_stamp
from relabel.manifests.secrets import counted, oddity_of, shown
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import TAIL_BYTES, ObjectStore, UrlFile, objects_of
from relabel.manifests.table_snapshots import (
    DELTA_LOG,
    TABLE_MARKS,
    TableSnapshot,
    folders_above,
    open_table,
    refuse_tables,
)
from relabel.manifests.tables import (
    PARQUET_SUFFIXES,
    USUAL_COLUMNS,
    PlainParquet,
    check_types,
    folder_columns,
    open_parquet,
    reading,
    refuse_text,
    resolve_columns,
)

# ------------------------------------------------------------------------------
# The files of `input.path`: which, and in what order. A folder or glob is one list of keys, local paths or those of a
# bucket, from which data is picked by name. All that is no data is left out by a rule that is counted, or an error
# names it: a file that is passed over is rows that are lost silently.


HIDDEN = (".", "_")
"""Names that begin so are left out of a folder (what writers leave), and files of other suffixes than Parquet's."""


class Listing(NamedTuple):
    """The files of a path in name order, and how many names in its folders each rule left out."""

    files: list[str]
    left_out: Counter[str]


def list_input(pattern: str, storage: Storage) -> Listing:
    """The Parquet files of a file, folder or glob, and what else its folders hold.

    Raises:
        InputError: a plain path that does not exist, a folder that holds what can't be read, or one of a table.
    """
    found = _list_url(pattern, storage) if is_url(pattern) else _list_local(pattern)
    for path in found.files:
        if not is_url(path):
            with reading(path):
                check_kind(path, Path(path).stat())
        oddity = oddity_of(path)
        if oddity is not None:
            raise InputError(f"{shown(path)}: its name {oddity}, so no plan can hold it. Rename it.")
    return found


def _list_local(pattern: str) -> Listing:
    with reading(pattern):
        root, parts = _split_glob(pattern)
        if not parts and not (Path(pattern).exists() or Path(pattern).is_symlink()):
            raise InputError(f"input.path {pattern}: no such file or folder (from {Path.cwd()}).")
        if not Path(root or ".").is_dir():
            return Listing([] if parts else [pattern], Counter())
    keys = list(_keys_below(root, (), parts, frozenset()))
    listing = _picked(keys, root, parts)
    refuse_tables(listing.files, keys)
    read: set[str] = set()
    for file in listing.files:
        read.update(folders_above(file))
    like_files = tuple(f"{suffix}/" for suffix in PARQUET_SUFFIXES)
    for key in keys:
        if not key.endswith(like_files):
            continue
        folder = key.rstrip("/")
        is_hidden = any(step.startswith(HIDDEN) for step in folder[len(root) :].split("/"))
        if folder not in read and not is_hidden:
            raise InputError(
                f"{folder}: a folder that is named like a data file and holds none. Was its writer cut off? Write "
                "it again, or remove it."
            )
    return listing


def _split_glob(pattern: str) -> tuple[str, list[str]]:
    """The folder that a local glob or URL names for certain, and the steps below it, of which the first is a pattern;
    of anything else the path itself and no steps.
    """
    if is_url(pattern):
        fixed = re.split(r"[*?[]", pattern, maxsplit=1)[0]
        root = pattern.rstrip("/") if fixed == pattern else fixed.rpartition("/")[0]
        return root, [part for part in pattern[len(root) :].split("/") if part]
    path = Path(pattern)
    if path.exists() or path.is_symlink() or not glob.has_magic(pattern):
        return "" if path == Path() else str(path), []
    steps = [part for part in pattern.split("/") if part]
    fixed_steps = list(itertools.takewhile(lambda part: not glob.has_magic(part), steps))
    return "/" * pattern.startswith("/") + "/".join(fixed_steps), steps[len(fixed_steps) :]


def takes_file(pattern: str, file: str) -> bool:
    """Whether a path of input (a file, folder or glob) means a file that lies in a place, or will."""
    root, parts = _split_glob(pattern)
    above = place_of(root or ".").rstrip("/")
    place = place_of(file)
    if place == above:
        return True
    return place.startswith(f"{above}/") and bool(_picked([place], above, parts).files)


def _keys_below(folder: str, steps: tuple[str, ...], parts: list[str], above: frozenset[str]) -> Iterator[str]:
    """Paths below a local folder, links followed: files, and folders with `/` at their end, that a glob's parts may
    name. `glob.glob` passes over folders that it may not list, and follows links in a circle; here either is an error.

    Args:
        steps: from the glob's fixed folder to this one.
        above: where the folders that it lies in really are.
    Raises:
        InputError: something can't be read, or a link leads to nothing or back to where it lies.
    """
    with reading(folder or "."), os.scandir(folder or ".") as entries:
        children = list(entries)
        real_path = os.path.realpath(folder)
    if real_path in above:
        raise InputError(
            f"{folder}: a link back to {real_path}, which contains it: reading it would not end. Remove it."
        )
    for entry in children:
        path = os.path.join(folder, entry.name)  # noqa: PTH118 (as the pattern spells it)
        inner = (*steps, entry.name)
        if len(inner) > len(parts) and "**" not in parts and entry.name.startswith(HIDDEN) and entry.name != DELTA_LOG:
            yield path + "/" * entry.is_dir(follow_symlinks=False)  # left out, and not looked into
        elif _may_match(inner, parts):
            with reading(path):
                if entry.is_symlink() and not Path(path).exists():
                    raise InputError(
                        f"{path}: a link to {Path(path).readlink()}, which is not there, so its rows can't be read. "
                        "Restore what it led to, or remove the link."
                    )
                is_folder = entry.is_dir()
            yield path + "/" * is_folder
            if is_folder:
                yield from _keys_below(path, inner, parts, above | {real_path})


def _may_match(steps: Sequence[str], parts: list[str]) -> bool:
    """Whether a path below a glob's fixed folder is on the way to what the glob names, in it, or marks a table."""
    if TABLE_MARKS.intersection(steps):
        return True
    fixed = parts[: parts.index("**")] if "**" in parts else parts
    if len(fixed) < min(len(parts), len(steps)) and steps[-1].startswith("."):
        return False
    named = zip(steps, fixed, strict=False)
    return all(fnmatch.fnmatchcase(step, part) and step.startswith(".") <= part.startswith(".") for step, part in named)


def _list_url(pattern: str, storage: Storage) -> Listing:
    """The Parquet files of a file, folder or glob by URL, from one listing."""
    if scheme_of(pattern) in ("http", "https"):  # a listing there is a guess at links, and may fetch the file
        return Listing([pattern], Counter())
    filesystem_of(pattern, storage)  # refuses a secret, which may follow a `?`
    folder, parts = _split_glob(pattern)
    store = ObjectStore(*objects_of(folder, storage), storage, root=folder)
    keys = [f"{folder}/{name}" for name in store.etags("")]
    if not parts and not keys:
        return Listing([folder], Counter())
    listing = _picked(keys, folder, parts)
    refuse_tables(listing.files, keys)
    return listing


def _picked(keys: Iterable[str], root: str, parts: Sequence[str]) -> Listing:
    """The data among the keys below a folder: all of it, or what a glob's parts name. A folder that they name (Spark
    writes folders named like files) means the data in it.
    """
    matches = _glob(parts).match
    names_hidden = any(part.startswith(HIDDEN) for part in parts)
    files = list[str]()
    rules = set[tuple[str, str]]()
    for key in keys:
        inside = key[len(root) :].strip("/")
        is_folder = key.endswith("/")
        steps = inside.split("/")
        named = [folder for folder in folders_above(inside) if parts and matches(folder)]
        is_meant = matches(inside) and (names_hidden or not any(step.startswith(".") for step in steps))
        if parts and not named and not is_meant:
            continue
        below = steps[named[-1].count("/") + 1 :] if named and names_hidden else steps
        rule = None if parts and is_meant else _left_out_by(below, is_folder=is_folder)
        if rule is not None:
            rules.add(rule)
        elif not is_folder:
            files.append(key)
    return Listing(sorted(files), Counter(rule for rule, _ in rules))


def _glob(parts: Sequence[str]) -> re.Pattern[str]:
    """Paths that a glob names; without parts the empty one."""
    if not parts:
        return re.compile(r"\Z")
    from fsspec.utils import glob_translate  # with asyncio, which files and folders do without

    whole = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts]
    return re.compile(glob_translate("/".join(whole)))


def _left_out_by(steps: list[str], *, is_folder: bool) -> tuple[str, str] | None:
    """The rule by which a path in a folder of input is left out, and the file or whole folder that it leaves out; None
    for data, and for a folder that is read.
    """
    for depth, step in enumerate(steps, start=1):
        if step.startswith(HIDDEN):
            return f"{step[0]}*" + "/" * (is_folder or depth < len(steps)), "/".join(steps[:depth])
    if is_folder or steps[-1].endswith(PARQUET_SUFFIXES):
        return None
    suffix = Path(steps[-1]).suffix
    return f"*{suffix}" if suffix else "no suffix", "/".join(steps)


# ------------------------------------------------------------------------------
# The input: which files, which columns, and their identity. Reads footers and names, never a row of text (`rows.py`
# does that).
#
# A row's id is its position in the order of the files; folders and globs are taken in name order. A file's identity is
# its size and the sha256 of its Parquet footer: the footer holds every column chunk's place, size and statistics, and
# costs one short read.


FOOTERS_KEPT = 64
"""Most footers that are held before they are taken note of; one may be megabytes."""


class InputFile(NamedTuple):
    """One input file: where it lies and what it is.

    `stamp` changes when the file is written again: its time of change in ns on a disk, its ETag on S3. None where
    nothing like that is known, and in plans that were written without.
    """

    path: str
    size_bytes: int
    footer_sha256: str
    rows: int
    stamp: str | None = None

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
        left_out: of the folders that were listed, how many names each rule left out, the commonest first.
        reads: what the labeler reads; of its columns those that every file has.
        table: the snapshot whose data files they are; None for plain files.
        warned: file and column of texts that are not UTF-8, that were reported.
    """

    files: tuple[InputFile, ...]
    columns: Columns
    rows: int
    group_bytes: tuple[tuple[tuple[int, int], ...], ...]
    storage: Storage = field(repr=False, compare=False)
    left_out: tuple[tuple[str, int], ...] = ()
    reads: Reads = QUERY_AND_DOCUMENT
    table: TableSnapshot | None = None
    warned: set[tuple[str, str]] = field(default_factory=set, repr=False, compare=False)

    @property
    def text_columns(self) -> list[str]:
        """What a run reads, query and document ids included."""
        return _read_columns(self.columns, self.reads)

    @property
    def id_columns(self) -> tuple[str, str]:
        """Those of them that are read as text whatever they hold."""
        return self.columns.query_id, self.columns.doc_id

    def file_row(self, row_id: int) -> tuple[str, int]:
        """The file that holds a row, and the row's number in it, from 0."""
        first_row = 0
        for file in self.files:
            if row_id < first_row + file.rows:
                return file.path, row_id - first_row
            first_row += file.rows
        raise IndexError(row_id)


def open_dataset(spec: InputSpec, storage: Storage, *, reads: Reads = QUERY_AND_DOCUMENT) -> Dataset:
    """Find the files and check the columns.

    Args:
        spec: the job's `input` section.
        reads: what the labeler reads; other columns are left alone.
    Raises:
        InputError: no file, an unreadable or truncated one, a missing column or one of the wrong type, files that
            disagree.
    """
    table = spec.table and open_table(spec, storage)
    where = f"input.path {', '.join(spec.path)}"
    paths: list[str] = []
    left_out = Counter[str]()
    if table is not None:
        paths = table.paths
    else:
        for pattern in spec.path:
            listing = list_input(pattern, storage)
            paths += listing.files
            left_out += listing.left_out
    if not paths:
        without = f" (left out: {left_out_text(left_out.most_common())})" if left_out else ""
        raise InputError(
            f"{where}: no Parquet file there{without}. Give a .parquet file, a folder that holds some, or a glob."
        )
    check_single(paths, where)
    files = list[InputFile]()
    groups = list[tuple[tuple[int, int], ...]]()
    columns = spec.columns
    reads_here = reads
    first_types = dict[str, str]()
    for number, (file, metadata, schema) in enumerate(_footers(paths, storage, columns)):
        path = file.path
        folders = folder_columns(file.path, schema.names)
        with reading(path):  # a damaged footer may hold names that are not text, and more
            if number == 0:
                names = [*schema.names, *folders] if table is None else list(table.columns)
                columns = resolve_columns(spec.columns, names, path, reads=reads)
                present = tuple(column for column in reads.columns if column.is_required or column.name in names)
                reads_here = reads._replace(columns=present)
            if table is not None:
                table.check_file(
                    number,
                    path,
                    file.size_bytes,
                    _read_columns(columns, reads_here, gold=True),
                    schema,
                )
            check_types(
                columns,
                reads_here,
                schema,
                path,
                first_types,
                first_path=paths[0],
                folders=folders,
            )
            names = _read_columns(columns, reads_here)
            groups.append(_group_bytes(metadata, {*names}))
        files.append(file._replace(footer_sha256=_with_folders(file.footer_sha256, path, names)))
    rows = sum(file.rows for file in files)
    if rows == 0:
        raise InputError(f"{where}: {counted(len(files), 'file')}, no rows. There is nothing to label.")
    used = min(rows, spec.limit or rows)
    return Dataset(
        files=tuple(files),
        columns=columns,
        rows=used,
        group_bytes=tuple(groups),
        storage=storage,
        left_out=tuple(left_out.most_common()),
        reads=reads_here,
        table=table,
    )


def left_out_text(left_out: Iterable[tuple[str, int]]) -> str:
    """What rules left out, in a few words."""
    return ", ".join(f"{count:,} {rule}" for rule, count in left_out)


@contextlib.contextmanager
def open_planned(file: InputFile, dataset: Dataset) -> Iterator[PlainParquet]:
    """Open a file of the dataset again.

    Raises:
        InputError: it can't be read, or is not the file any more that was read when this run began.
    """
    path = file.path
    storage = dataset.storage
    with reading(path), UrlFile(path, storage) if is_url(path) else Path(path).open("rb", buffering=0) as source:
        size, footer = _read_footer(source, path)
        plain_sha256 = hashlib.sha256(footer).hexdigest()
        identities = {(size, plain_sha256), (size, _with_folders(plain_sha256, path, dataset.text_columns))}
        if file.identity not in identities or _stamp(source) != file.stamp:
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
        f"{path}: changed while this run was under way. Restore it, or label the new one into another output. If it "
        "holds the same texts, run the same command again."
    )


def stamp_of(path: str) -> str | None:
    """What changes when a local file is replaced, or written over in place: a footer alone can't show it, since it is
    written last. None where there is no file, and for a URL, whose readers are pinned to one version by themselves.
    """
    with contextlib.suppress(FileNotFoundError):
        return None if is_url(path) else file_stamp(Path(path).stat())
    return None


def _stamp(source: BinaryIO | UrlFile) -> str | None:
    """The `InputFile.stamp` of an opened file: of a disk's file what a copy may keep (`cp -p`, `rsync -t`)."""
    if isinstance(source, UrlFile):
        return source.tag or None
    return str(os.fstat(source.fileno()).st_mtime_ns)


def check_single(paths: list[str], where: str) -> None:
    """Refuse one file under two names, links included.

    Args:
        where: what named them, for messages.
    Raises:
        InputError: which, and what they are.
    """
    seen: dict[Any, str] = {}
    for path, place in zip(paths, map(_place, paths), strict=True):
        if place in seen:
            raise InputError(
                f"{where}: {seen[place]} and {path} are one file, so its rows would be labelled twice. Name it once."
            )
        seen[place] = path


def _place(path: str) -> Any:
    """What is equal for all names of one file."""
    place = place_of(path) if is_url(path) else path
    if not is_url(place):
        with contextlib.suppress(OSError):  # opening it reports why
            state = Path(place).stat()
            if state.st_ino:  # some network disks number no file
                return state.st_dev, state.st_ino
    return place_of(place)


def _footers(
    paths: list[str], storage: Storage, columns: Columns
) -> Iterator[tuple[InputFile, pq.FileMetaData, pa.Schema]]:
    """`_open_footer` of each file, in order; by URL 16 at a time: at 25 ms a reply, a thousand wait two seconds."""
    opener = functools.partial(_open_footer, storage=storage, columns=columns)
    if not any(map(is_url, paths)):
        yield from map(opener, paths)
        return
    with ThreadPoolExecutor(16, thread_name_prefix="footer") as pool:
        for first in range(0, len(paths), FOOTERS_KEPT):
            yield from pool.map(opener, paths[first : first + FOOTERS_KEPT])


def _open_footer(path: str, storage: Storage, columns: Columns) -> tuple[InputFile, pq.FileMetaData, pa.Schema]:
    with reading(path), UrlFile(path, storage) if is_url(path) else Path(path).open("rb") as file:
        size, footer = _read_footer(file, path, columns)
        # Parquet reads its footer from the end of any buffer that starts like a file
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        if len(footer) - 8 - metadata.serialized_size == 28:
            # what signs a plain footer where columns are encrypted: Arrow ends the process if it is asked about one
            raise InputError(
                f"{path}: has encrypted columns, and relabel takes no keys. Write it again without encryption."
            )
        found = InputFile(path, size, hashlib.sha256(footer).hexdigest(), metadata.num_rows, _stamp(file))
        return found, metadata, metadata.schema.to_arrow_schema()


def _with_folders(sha256: str, path: str, names: Iterable[str]) -> str:
    """The digest of a file's footer, with the columns of these names that the names of its folders hold: the same file
    elsewhere may hold other rows then.
    """
    found = folder_columns(path, ())
    used = {name: found[name] for name in sorted({*names} & found.keys())}
    return digest_of([sha256, used]) if used else sha256


def _read_footer(file: BinaryIO | UrlFile, path: str, columns: Columns = USUAL_COLUMNS) -> tuple[int, bytes]:
    """A file's size, and its footer with length field and magic.

    Args:
        columns: which of them hold what, for a message.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    if size < 12 or tail[-4:] not in (b"PAR1", b"PARE"):  # the latter is encrypted, which Arrow reports
        refuse_text(path, columns)
        raise InputError(
            f"{path}: not a whole Parquet file ({size} bytes, no PAR1 mark at its end). Was it cut off while being "
            "written, or is it something else?"
        )
    footer_bytes = min(int.from_bytes(tail[-8:-4], "little") + 8, size)
    if footer_bytes > len(tail):
        file.seek(size - footer_bytes)
        tail = file.read(footer_bytes)
    return size, tail[-footer_bytes:]


def _read_columns(columns: Columns, reads: Reads, *, gold: bool = False) -> list[str]:
    """What a run reads, each once; with gold, which is read later alone."""
    names = [columns.query_id, columns.query, columns.doc_id, *columns.document]
    if columns.context:
        names.append(columns.context)
    if gold and columns.gold:
        names.append(columns.gold)
    names += [column.name for column in reads.columns]
    return list(dict.fromkeys(names))


def _group_bytes(metadata: pq.FileMetaData, names: set[str]) -> tuple[tuple[int, int], ...]:
    """Of each row group: its rows, and the uncompressed bytes of these columns."""
    paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    leaves = [leaf for leaf, path in enumerate(paths) if path in names or path.partition(".")[0] in names]
    groups = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size_bytes = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
        groups.append((group.num_rows, size_bytes))
    return tuple(groups)


# ------------------------------------------------------------------------------
# Which of an input's files are others than they were.


def changed_files(planned: list[InputFile], current: tuple[InputFile, ...]) -> list[str]:
    """What differs between the files that were planned and those that are there, a sentence each; empty if nothing
    does.
    """
    if [file.identity for file in planned] == [file.identity for file in current]:
        return []
    before = {absolute_path(file.path): file for file in planned}
    after = {absolute_path(file.path): file for file in current}
    missing = []
    for key in before:
        if key in after:
            continue
        is_gone = not is_url(key) and not Path(key).exists()
        missing.append(f"{key}: planned, now missing" if is_gone else f"{key}: planned, not part of the input now")
    new = []
    changed = []
    for key, now in after.items():
        was = before.get(key)
        if was is None:
            new.append(f"{now.path}: new since the plan")
        elif was.identity != now.identity:
            changed.append(
                f"{now.path}: changed since the plan ({was.rows} rows in {was.size_bytes} bytes, now {now.rows} rows "
                f"in {now.size_bytes} bytes)"
            )
    remarks = missing + new + changed
    return remarks or [f"{current[0].path} and the others: read in another order than planned, or a file twice"]
