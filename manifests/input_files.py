"""The files of an input: which ones a folder, a glob or a URL names, in what order, and a stamp of each."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from fsspec.utils import glob_translate

from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.files import Storage, check_kind, filesystem_of, is_url, out_of_files, scheme_of
from relabel.manifests.objects import Objects
from relabel.manifests.records import file_stamp
from relabel.manifests.secrets import oddity_of, shortened, shown
from relabel.manifests.specs import TableFormat
from relabel.manifests.store import ObjectStore, objects_of

# ------------------------------------------------------------------------------
# What goes wrong while an input file is read, in words for the user.


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a failed look at an input file into an InputError that names it."""
    try:
        yield
    except RelabelError:
        raise
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file.") from exc
    except PermissionError as exc:
        raise InputError(f"{path}: no permission to read it. Check the file's owner and mode.") from exc
    except pa.ArrowInvalid as exc:
        raise InputError(
            f"{path}: not a readable Parquet file: {_first_line(exc)}. Write it again from its source."
        ) from exc
    except (pa.ArrowException, UnicodeDecodeError) as exc:
        raise InputError(f"{path}: can't be read: {_first_line(exc)}.") from exc
    except BlockingIOError:
        raise
    except OSError as exc:
        if exc.errno is None:  # what pyarrow finds wrong with the bytes
            raise InputError(
                f"{path}: not a readable Parquet file: {_first_line(exc)}. Write it again from its source."
            ) from exc
        why = out_of_files(exc)
        raise InputError(f"{path}: can't be read: {why or f'{exc.strerror or _first_line(exc)}.'}") from exc


def _first_line(exc: Any) -> str:
    return shortened(str(exc).split("\n", 1)[0].rstrip("."), 200)


# ------------------------------------------------------------------------------
# By what a file is known to be as it was, without reading it.


def stamps_below(folder: str, where: str, objects: Objects, storage: Storage) -> dict[str, str]:
    """The keys below that of a folder, each with its tag."""
    found = ObjectStore(objects, folder, storage, root=where).etags("")
    return {f"{folder}/{name}": tag for name, tag in found.items()}


def stamp_of(path: str) -> tuple[int, int, int] | None:
    """What changes when a local file is replaced, or written over in place: a footer alone can't tell, since it is
    written last.

    None where there is no file, and for a URL, whose readers are pinned to one version by themselves.
    """
    if is_url(path):
        return None
    try:
        stat = Path(path).stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


# ------------------------------------------------------------------------------
# What lies in a local folder of input: its data files, through links too, and what is left out by rule, counted.
#
# Names that begin with `_` or `.` are left out (what writers leave behind), and files of other suffixes. All else is
# data: it is read, or it is an error that names it, since a file that is passed over is rows that are lost without a
# word.


PARQUET_SUFFIXES = (".parquet", ".pq")
HIDDEN = (".", "_")


class FolderFile(NamedTuple):
    """A data file of a folder, and what the system says about it."""

    path: str
    stat: os.stat_result


class Folder(NamedTuple):
    """What a folder holds: data files in name order, and how many names each rule left out.

    The rules are `_*` and `.*` for files, `_*/` and `.*/` for folders (which are not looked into), and `*.csv`, say, or
    `no suffix`.
    """

    files: list[FolderFile]
    left_out: Counter[str]


class FoldersSeen:
    """The folders of one walk: what links lead back to, and what is reached in two ways."""

    def __init__(self) -> None:
        self._first: dict[Any, str] = {}

    def first(self, folder: str) -> str:
        """Where this folder was reached first: here, if it is new.

        Raises:
            InputError: it is one of those that it lies in.
        """
        with reading(folder):
            found = Path(folder).stat()
        # some network disks number nothing
        key = (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(folder)
        first = self._first.setdefault(key, folder)
        if first != folder and Path(folder).is_relative_to(first):
            raise InputError(
                f"{folder}: a link back to {first}, which contains it: reading it would not end. Remove the link."
            )
        return first

    def add(self, folder: str) -> None:
        """Take note of a folder.

        Raises:
            InputError: it was reached before.
        """
        first = self.first(folder)
        if first != folder:
            raise reached_twice(first, folder)


def reached_twice(first: str, second: str) -> InputError:
    """The error for a folder under two names."""
    return InputError(f"{first} and {second} are one folder, so its rows would be labelled twice. Remove the link.")


def look_into(root: str) -> Folder:
    """All of a folder, and of the folders in it.

    Raises:
        InputError: something in it can't be read, a link leads to nothing or back to where it lies, or data is reached
            in two ways.
    """
    files: list[FolderFile] = []
    left_out: Counter[str] = Counter()
    empty: set[str] = set()  # folders named like data files
    again: list[tuple[str, str]] = []
    seen = FoldersSeen()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        first = seen.first(folder)
        if first != folder:
            again.append((first, folder))
            continue
        if folder != root and folder.endswith(PARQUET_SUFFIXES):
            empty.add(folder)
        for path, found in _entries(folder, left_out):
            if stat.S_ISDIR(found.st_mode):
                waiting.append(path)
            else:
                files.append(FolderFile(path, found))
    files.sort()
    inside = {os.path.dirname(file.path) for file in files}  # noqa: PTH120 (as text, and fast)
    held = {str(above) for folder in inside for above in (Path(folder), *Path(folder).parents)}
    for folder in sorted(empty - held):
        raise InputError(
            f"{folder}: a folder that is named like a data file and holds none. Was its writer cut off? Write it "
            "again, or remove it."
        )
    for first, second in again:
        if first in held:
            raise reached_twice(first, second)
    return Folder(files, left_out)


def left_out_as(name: str, *, is_folder: bool) -> str | None:
    """The rule by which a name is left out; None for data, and for a folder that is looked into."""
    if name.startswith(HIDDEN):
        return f"{name[0]}*/" if is_folder else f"{name[0]}*"
    if is_folder or name.endswith(PARQUET_SUFFIXES):
        return None
    suffix = Path(name).suffix
    return f"*{suffix}" if suffix else "no suffix"


def _entries(folder: str, left_out: Counter[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Data files of a folder and the folders in it, links followed."""
    with reading(folder), os.scandir(folder) as entries:
        for entry in entries:
            path = str(Path(folder, entry.name))
            if entry.name.startswith(HIDDEN):
                left_out[str(left_out_as(entry.name, is_folder=entry.is_dir(follow_symlinks=False)))] += 1
                continue
            with reading(path):
                try:
                    found = entry.stat()
                except FileNotFoundError as exc:
                    if not entry.is_symlink():  # gone since it was listed
                        raise
                    raise InputError(
                        f"{path}: a link to {Path(path).readlink()}, which is not there, so the rows behind it can't "
                        "be read. Restore what it led to, or remove the link."
                    ) from exc
            rule = left_out_as(entry.name, is_folder=stat.S_ISDIR(found.st_mode))
            if rule is not None:
                left_out[rule] += 1
                continue
            if not stat.S_ISDIR(found.st_mode):
                check_kind(path, found)
            yield path, found


# ------------------------------------------------------------------------------
# Local globs: `*`, `?`, `[…]` within a name, `**` for any folders, as `glob.glob` reads them.
#
# That one passes over folders that it may not list and follows links in a circle until the system stops it; here either
# is an error.


def is_glob(pattern: str) -> bool:
    """Whether a path that does not exist as it is written may stand for others."""
    return glob.has_magic(pattern)


def fixed_folder(pattern: str) -> str:
    """The folder that all matches of a local glob lie in, as far as the glob names it; `` for the working directory."""
    parts = [part for part in pattern.split("/") if part]
    fixed = list(itertools.takewhile(lambda part: not is_glob(part), parts[:-1]))
    return ("/" if pattern.startswith("/") else "") + "/".join(fixed)


def matches_of(pattern: str) -> list[str]:
    """Files and folders that a glob stands for, sorted, each once; with `**` files alone.

    Raises:
        InputError: a folder can't be listed, or links lead in a circle.
    """
    parts = [part for part in pattern.split("/") if part]
    found = sorted(set(_expanded("/" if pattern.startswith("/") else "", parts)))
    return [path for path in found if not Path(path).is_dir()] if "**" in parts else found


def _expanded(folder: str, parts: list[str]) -> Iterator[str]:
    if not parts:
        yield folder
        return
    part, *rest = parts
    if part == "**":
        for inside in _below(folder):
            yield from _expanded(inside, rest or ["*"])
    elif is_glob(part):
        matches = re.compile(fnmatch.translate(part)).match
        for name in _names(folder, hidden=part.startswith(".")):
            path = os.path.join(folder, name)  # noqa: PTH118 (as it is written: `./a` stays `./a`)
            if matches(name) and (not rest or Path(path).is_dir()):
                yield from _expanded(path, rest)
    else:
        path = os.path.join(folder, part)  # noqa: PTH118
        with reading(path):
            is_there = _is_there(path)
        if is_there:
            yield from _expanded(path, rest)


def _is_there(path: str) -> bool:
    try:
        Path(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _below(folder: str) -> list[str]:
    """A folder and all in it but hidden ones."""
    seen = FoldersSeen()
    found, waiting = [], [folder]
    while waiting:
        above = waiting.pop()
        seen.add(above or ".")
        found.append(above)
        inside = (os.path.join(above, name) for name in _names(above, hidden=False))  # noqa: PTH118
        waiting += [path for path in inside if Path(path).is_dir()]
    return found


def _names(folder: str, *, hidden: bool) -> list[str]:
    with reading(folder or "."):
        return sorted(name for name in os.listdir(folder or ".") if hidden or not name.startswith("."))  # noqa: PTH208 (names alone)


# ------------------------------------------------------------------------------
# What tells the folder of a table from a folder of plain Parquet files: the log or the metadata that lies in it.
#
# A table keeps files of which rows were removed or written anew. Read as plain files, those rows would come along.


DELTA_LOG = "_delta_log"
ICEBERG_METADATA = re.compile(r"v?(\d+)(?:-.*)?(?:\.gz)?\.metadata\.json(?:\.gz)?")
"""The name of a metadata file in `metadata/`, with its number."""
_MARKS: Mapping[TableFormat, str] = {"delta": f"{DELTA_LOG}/", "iceberg": "metadata/….metadata.json"}


def tables_among(keys: Iterable[str]) -> dict[str, TableFormat]:
    """The folders of tables in a deep listing, by its keys."""
    found: dict[str, TableFormat] = {}
    for key in keys:
        above, is_below_log, _ = key.partition(f"/{DELTA_LOG}/")
        if is_below_log:
            found[above] = "delta"
        folder, _, name = key.rpartition("/")
        root, _, inside = folder.rpartition("/")
        if inside == "metadata" and ICEBERG_METADATA.fullmatch(name):
            found[root] = "iceberg"
    return found


def folders_above(path: str) -> Iterator[str]:
    """The folders that a path lies in, as it is written, the innermost first."""
    while path := path.rpartition("/")[0]:
        yield path


def local_tables(paths: Iterable[str], root: str) -> dict[str, TableFormat]:
    """The folders of tables that local files lie in, from the folder `root` on.

    Raises:
        InputError: a folder can't be looked into.
    """
    inner = "" if root == "." else root
    folders = {inner}
    for path in {path.rpartition("/")[0] + "/" for path in paths}:
        folders.update(folder for folder in folders_above(path) if folder.startswith(inner))
    return {folder: found for folder in folders if (found := _table_at(folder or ".")) is not None}


def refuse_tables(paths: Iterable[str], tables: Mapping[str, TableFormat], shown: Callable[[str], str] = str) -> None:
    """Refuse files of tables that are read as plain ones.

    Args:
        tables: by folder.
        shown: from a folder to what it is called in the message.
    Raises:
        InputError: names the folder of the table.
    """
    for path in paths if tables else ():
        table = next((folder for folder in (*folders_above(path), "") if folder in tables), None)
        if table is not None:
            where, kind = shown(table) or ".", tables[table]
            raise InputError(
                f"{where}: the folder of a table ({_MARKS[kind]} lies in it); read as plain files it gives rows that "
                f"the table has no more. In a job write `input: {{path: {where}, table: {kind}}}`; other commands "
                "want the table's rows as plain Parquet files."
            )


def _table_at(folder: str) -> TableFormat | None:
    """The format of the table whose folder a local one is; None for any other."""
    metadata = str(Path(folder, "metadata"))
    with reading(metadata):
        if Path(folder, DELTA_LOG).is_dir():
            return "delta"
        if not Path(metadata).is_dir():
            return None
        names = os.listdir(metadata)  # noqa: PTH208 (names alone)
    return "iceberg" if any(map(ICEBERG_METADATA.fullmatch, names)) else None


# ------------------------------------------------------------------------------
# The files behind `input.path`: which, in what order, and a stamp of each that a listing tells without opening one.
#
# Folders and globs are taken in name order. What is data in a folder, and what is left out, is said in
# `input_folders.py`.


RULES_SHOWN = 6


class ListedFile(NamedTuple):
    """A file as a listing shows it.

    Args:
        stamp: changes whenever the file is written: by URL its ETag, on a disk its device, inode, size and times; None
            where no listing tells.
    """

    path: str
    stamp: str | None


class Listing(NamedTuple):
    """The files behind a path in name order, and how many names in its folders each rule left out
    (`input_folders.Folder`).
    """

    files: list[ListedFile]
    left_out: Counter[str]


def list_files(pattern: str, storage: Storage) -> list[ListedFile]:
    """The Parquet files behind a file, folder or glob, in name order; see `list_input`."""
    return list_input(pattern, storage).files


def list_input(pattern: str, storage: Storage) -> Listing:
    """The Parquet files behind a file, folder or glob, and what its folders hold besides.

    Raises:
        InputError: a plain path that does not exist, a folder that holds what can't be read, or one of a table.
    """
    found = _list_url(pattern, storage) if is_url(pattern) else _list_local(pattern)
    for file in found.files:
        check_name(file.path)
    return found


def list_named(paths: Sequence[str], folder: str, storage: Storage) -> list[ListedFile]:
    """Files whose names are known, all below one folder, in their order; by URL from one listing of it.

    Raises:
        FileNotFoundError: the first that is not there.
    """
    for path in paths:
        check_name(path)
    if not is_url(folder):
        found = {path: Path(path).stat() for path in paths}
        for path, stat in found.items():
            check_kind(path, stat)
        return [ListedFile(path, file_stamp(found[path])) for path in paths]
    objects, root = objects_of(folder, storage)
    stamps = stamps_below(root, folder, objects, storage)
    keys = [root + path.removeprefix(folder) for path in paths]
    if (missing := next((path for path, key in zip(paths, keys, strict=True) if key not in stamps), None)) is not None:
        raise FileNotFoundError(errno.ENOENT, "no such object", missing)
    is_sure = objects.has_atomic_conditions  # see `_list_url`
    return [ListedFile(path, stamps[key] if is_sure else None) for path, key in zip(paths, keys, strict=True)]


def left_out_text(left_out: Iterable[tuple[str, int]]) -> str:
    """What rules left out, in a few words."""
    counts = [f"{count:,} {rule}" for rule, count in left_out]
    return ", ".join(counts[:RULES_SHOWN]) + (
        f" and {len(counts) - RULES_SHOWN} more kinds" if len(counts) > RULES_SHOWN else ""
    )


def check_name(path: str) -> None:
    """Refuse a path that can't be written down.

    Raises:
        InputError: its name is not UTF-8.
    """
    oddity = oddity_of(path)
    if oddity is not None:
        raise InputError(f"{shown(path)}: its name {oddity}, so no plan can hold it. Rename it.")


def _list_local(pattern: str) -> Listing:
    with reading(pattern):
        path = Path(pattern)
        if path.is_dir():
            listing = _list_folder(str(path))
            _refuse_local_tables(listing.files, str(path))
            return listing
        if path.exists():
            return Listing([_file_at(pattern)], Counter())
        found: list[ListedFile] = []
        left_out: Counter[str] = Counter()
        for match in matches_of(pattern):
            if Path(
                match
            ).is_dir():  # a folder that matches (Spark writes folders named like files) stands for the files in it
                inside = _list_folder(match)
                found += inside.files
                left_out += inside.left_out
            else:
                found.append(_file_at(match))
        if not found and not is_glob(pattern):
            raise InputError(f"input.path {pattern}: no such file or folder (looked from {Path.cwd()}).")
        _refuse_local_tables(found, fixed_folder(pattern))
        return Listing(found, left_out)


def _list_folder(folder: str) -> Listing:
    found = look_into(folder)
    return Listing([ListedFile(path, file_stamp(stat)) for path, stat in found.files], found.left_out)


def _refuse_local_tables(files: list[ListedFile], root: str) -> None:
    paths = [file.path for file in files]
    refuse_tables(paths, local_tables(paths, root))


def _file_at(path: str) -> ListedFile:
    with reading(path):
        stat = Path(path).stat()
        check_kind(path, stat)
    return ListedFile(path, file_stamp(stat))


def _list_url(pattern: str, storage: Storage) -> Listing:
    """The Parquet files behind a file, folder or glob by URL, from one listing."""
    scheme = scheme_of(pattern)
    if scheme in ("http", "https"):  # a listing there is a guess at links, and asking for one may fetch the file
        return Listing([ListedFile(pattern, None)], Counter())
    objects, root = objects_of(pattern, storage)
    fixed = root.partition("*")[0].partition("?")[0].partition("[")[0]
    folder = root if fixed == root else fixed.rpartition("/")[0]
    stamps = stamps_below(folder, pattern, objects, storage)
    rules: set[tuple[str, str]] = set()  # what was left out by which
    if fixed == root:
        inside = [key for key in stamps if key != root]
        keys = [key for key in inside if _is_data(key, root, rules)] if inside else [root]
    else:
        matches = re.compile(glob_translate(root)).match
        # a folder that matches (Spark writes folders named like files) stands for the files in it
        keys = [
            key
            for key in stamps
            if matches(key) or (any(map(matches, folders_above(key))) and _is_data(key, folder, rules))
        ]
    full = "s3://{}".format if scheme == "s3" else filesystem_of(pattern, storage)[0].unstrip_protocol
    refuse_tables(keys, tables_among(stamps), full)
    # where tags decide no condition they may be made of a size alone, and a size is no proof that a file is as it was
    is_sure = objects.has_atomic_conditions
    files = [ListedFile(str(full(key)), stamps.get(key) if is_sure else None) for key in sorted(keys)]
    return Listing(files, Counter(rule for rule, _ in rules))


def _is_data(key: str, root: str, rules: set[tuple[str, str]]) -> bool:
    """Whether a key is data of the folder `root`; if not, the rule and what it left out, a file or a whole folder, join
    `rules`.
    """
    inside = key[len(root.rstrip("/")) :].strip("/").split("/")
    for depth, step in enumerate(inside, start=1):
        rule = left_out_as(step, is_folder=depth < len(inside))
        if rule is not None:
            rules.add((rule, "/".join(inside[:depth])))
            return False
    return True
