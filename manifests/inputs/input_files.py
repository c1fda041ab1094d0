"""The files behind `input.path`: which, in what order, and a stamp of each that a listing tells without opening one.

Folders and globs are taken in name order. What is data in a folder, and what is left out, is said in
`input_folders.py`.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fsspec.utils import glob_translate

from relabel.manifests.digests import file_stamp
from relabel.manifests.errors import InputError
from relabel.manifests.inputs.file_stamps import stamps_below
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.inputs.input_folders import left_out_as, look_into
from relabel.manifests.inputs.input_globs import fixed_folder, is_glob, matches_of
from relabel.manifests.inputs.table_marks import folders_above, local_tables, refuse_tables, tables_among
from relabel.manifests.odd_text import oddity_of, shown
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.file_kinds import check_kind
from relabel.manifests.storage.filesystems import filesystem_of, is_url, scheme_of
from relabel.manifests.storage.object_run_store import objects_of

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
