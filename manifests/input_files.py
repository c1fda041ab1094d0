"""The files of an input: which ones a folder, a glob or a URL names, and in what order."""

from __future__ import annotations

import contextlib
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
from relabel.manifests.secrets import oddity_of, shortened, shown
from relabel.manifests.specs import TableFormat
from relabel.manifests.store import ObjectStore, objects_of

# ------------------------------------------------------------------------------
# What goes wrong while an input file is read, in words for the user.


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a failure to read an input file into an InputError that names it."""
    try:
        yield
    except (RelabelError, BlockingIOError):
        raise
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file.") from exc
    except PermissionError as exc:
        raise InputError(f"{path}: no permission to read it. Check the file's owner and mode.") from exc
    except (pa.ArrowException, UnicodeDecodeError, OSError) as exc:
        if isinstance(exc, pa.ArrowInvalid) or (isinstance(exc, OSError) and exc.errno is None):
            raise InputError(
                f"{path}: not a readable Parquet file: {_first_line(exc)}. Write it again from its source."
            ) from exc
        why = out_of_files(exc) or f"{getattr(exc, 'strerror', None) or _first_line(exc)}."
        raise InputError(f"{path}: can't be read: {why}") from exc


def _first_line(exc: Any) -> str:
    return shortened(str(exc).split("\n", 1)[0].rstrip("."), 200)


# ------------------------------------------------------------------------------
# By what a file is known to be as it was, without reading it.


def stamp_of(path: str) -> tuple[int, int, int] | None:
    """What changes when a local file is replaced, or written over in place: a footer alone can't show it, since it is
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
# What distinguishes the folder of a table from one of plain Parquet files: the log or the metadata in it.
#
# A table keeps files of which rows were removed or rewritten. Read as plain files, those rows would come along.


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


def _table_at(folder: str) -> TableFormat | None:
    """The format of the table whose folder a local one is; None for any other."""
    if Path(folder, DELTA_LOG).is_dir():
        return "delta"
    metadata = Path(folder, "metadata")
    is_table = metadata.is_dir() and any(map(ICEBERG_METADATA.fullmatch, os.listdir(metadata)))  # noqa: PTH208
    return "iceberg" if is_table else None


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


# ------------------------------------------------------------------------------
# The files of `input.path`: which, and in what order.
#
# Folders and globs are taken in name order. What is data in a folder, and what is left out, is in
# `input_folders.py`.


PARQUET_SUFFIXES = (".parquet", ".pq")
HIDDEN = (".", "_")
"""Names that begin so are left out of a folder (what writers leave), and files of other suffixes than Parquet's. All
else is data: it is read, or an error names it, since a file that is passed over is rows that are lost silently.
"""


class Listing(NamedTuple):
    """The files of a path in name order, and how many names in its folders each rule left out
    (`input_folders.Folder`).
    """

    files: list[str]
    left_out: Counter[str]


def list_files(pattern: str, storage: Storage) -> list[str]:
    """The Parquet files of a file, folder or glob, in name order; see `list_input`."""
    return list_input(pattern, storage).files


def list_input(pattern: str, storage: Storage) -> Listing:
    """The Parquet files of a file, folder or glob, and what else its folders hold.

    Raises:
        InputError: a plain path that does not exist, a folder that holds what can't be read, or one of a table.
    """
    found = _list_url(pattern, storage) if is_url(pattern) else _list_local(pattern)
    for path in found.files:
        check_name(path)
    return found


def left_out_text(left_out: Iterable[tuple[str, int]]) -> str:
    """What rules left out, in a few words."""
    return ", ".join(f"{count:,} {rule}" for rule, count in left_out)


def check_name(path: str) -> None:
    """Refuse a path that can't be written down.

    Raises:
        InputError: its name is not UTF-8.
    """
    oddity = oddity_of(path)
    if oddity is not None:
        raise InputError(f"{shown(path)}: its name {oddity}, so no plan can hold it. Rename it.")


def left_out_as(name: str, *, is_folder: bool) -> str | None:
    """The rule by which a name in a folder of input is left out; None for data, and for a folder that is read."""
    if name.startswith(HIDDEN):
        return f"{name[0]}*/" if is_folder else f"{name[0]}*"
    if is_folder or name.endswith(PARQUET_SUFFIXES):
        return None
    suffix = Path(name).suffix
    return f"*{suffix}" if suffix else "no suffix"


def _list_local(pattern: str) -> Listing:
    with reading(pattern):
        path = Path(pattern)
        if path.is_dir():
            return _Walk([]).listing("" if path == Path() else str(path))
        if path.exists() or path.is_symlink():
            check_kind(pattern, path.stat())
            return Listing([pattern], Counter())
    if not glob.has_magic(pattern):
        raise InputError(f"input.path {pattern}: no such file or folder (from {Path.cwd()}).")
    parts = [part for part in pattern.split("/") if part]
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    root = ("/" if pattern.startswith("/") else "") + "/".join(fixed)
    return _Walk(parts[len(fixed) :]).listing(root) if Path(root or ".").is_dir() else Listing([], Counter())


class _Walk:
    """A walk through local folders, links followed, for a glob's parts below its fixed folder; without parts all data
    of the folder is wanted. A *place* is how many parts a folder's path has met.

    `glob.glob` passes over folders that it may not list, and follows links in a circle; here either is an error.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = [*parts, "*"] if parts and parts[-1] == "**" else [*parts]
        self._matches = [re.compile(fnmatch.translate(part)).match for part in self._parts]
        self._whole = len(self._parts)
        self._files: list[str] = []
        self._left_out: Counter[str] = Counter()
        self._waiting: list[tuple[str, set[int]]] = []

    def listing(self, root: str) -> Listing:
        """The files, in name order.

        Raises:
            InputError: something can't be read, a link leads to nothing or back to where it lies, data is reached in
                two ways or belongs to a table.
        """
        first_paths: dict[Any, str] = {}
        again: list[tuple[str, str]] = []
        tables: dict[str, TableFormat] = {}
        self._waiting = [(root, self._reached({0}))]
        while self._waiting:
            folder, places = self._waiting.pop()
            with reading(folder or "."):
                found = Path(folder or ".").stat()
                # some network disks number nothing
                key = (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(folder)
                first = first_paths.setdefault(key, folder)
                if first == folder:
                    if kind := _table_at(folder or "."):
                        tables[folder] = kind
                    with os.scandir(folder or ".") as entries:
                        for entry in entries:
                            self._take(os.path.join(folder, entry.name), entry, places)  # noqa: PTH118 (as written)
                elif Path(folder).is_relative_to(first):
                    raise InputError(
                        f"{folder}: a link back to {first}, which contains it: reading it would not end. Remove the "
                        "link."
                    )
                else:
                    again.append((first, folder))
        self._files.sort()
        own = {path.rpartition("/")[0] + "/" for path in self._files}
        held = {above for folder in own for above in folders_above(folder)}
        if twice := [both for both in again if both[0] in held]:
            raise InputError(
                f"{twice[0][0]} and {twice[0][1]} are one folder, so its rows would be labelled twice. Remove the link."
            )
        for folder in sorted({*first_paths.values()} - held - {root}):
            if folder.endswith(PARQUET_SUFFIXES):
                raise InputError(
                    f"{folder}: a folder that is named like a data file and holds none. Was its writer cut off? Write "
                    "it again, or remove it."
                )
        refuse_tables(self._files, tables)
        return Listing(self._files, self._left_out)

    def _reached(self, places: set[int]) -> set[int]:
        """With the places after `**`, which may match no folder."""
        return places | {place + 1 for place in places if self._parts[place : place + 1] == ["**"]}

    def _take(self, path: str, entry: os.DirEntry[str], places: set[int]) -> None:
        name, is_inside = entry.name, self._whole in places
        if is_inside and name.startswith(HIDDEN):
            self._left_out[str(left_out_as(name, is_folder=entry.is_dir(follow_symlinks=False)))] += 1
            return
        then = {self._whole} if is_inside else set()
        for place in places - {self._whole}:
            part = self._parts[place]
            if name.startswith(".") and not part.startswith("."):
                continue
            if part == "**":
                then.add(place)
            elif self._matches[place](name):
                then.add(place + 1)
        if not then:
            return
        with reading(path):
            try:
                found = entry.stat()
            except FileNotFoundError as exc:
                if not entry.is_symlink():  # gone since it was listed
                    raise
                raise InputError(
                    f"{path}: a link to {Path(path).readlink()}, which is not there, so its rows can't be read. "
                    "Restore what it led to, or remove the link."
                ) from exc
        if stat.S_ISDIR(found.st_mode):
            self._waiting.append((path, self._reached(then - ({self._whole} if "**" in self._parts else set()))))
        elif is_inside and (rule := left_out_as(name, is_folder=False)) is not None:
            self._left_out[rule] += 1
        elif self._whole in then:
            check_kind(path, found)
            self._files.append(path)


def _list_url(pattern: str, storage: Storage) -> Listing:
    """The Parquet files of a file, folder or glob by URL, from one listing."""
    scheme = scheme_of(pattern)
    if scheme in ("http", "https"):  # a listing there is a guess at links, and asking for one may fetch the file
        return Listing([pattern], Counter())
    objects, root = objects_of(pattern, storage)
    fixed = root.partition("*")[0].partition("?")[0].partition("[")[0]
    folder = root if fixed == root else fixed.rpartition("/")[0]
    found = [f"{folder}/{name}" for name in ObjectStore(objects, folder, storage, root=pattern).etags("")]
    rules: set[tuple[str, str]] = set()  # what was left out by which
    if fixed == root:
        inside = [key for key in found if key != root]
        keys = [key for key in inside if _is_data(key, root, rules)] if inside else [root]
    else:
        matches = re.compile(glob_translate(root)).match
        # a folder that matches (Spark writes folders named like files) means the files in it
        keys = [
            key
            for key in found
            if matches(key) or (any(map(matches, folders_above(key))) and _is_data(key, folder, rules))
        ]
    full = "s3://{}".format if scheme == "s3" else filesystem_of(pattern, storage)[0].unstrip_protocol
    refuse_tables(keys, tables_among(found), full)
    return Listing([str(full(key)) for key in sorted(keys)], Counter(rule for rule, _ in rules))


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
