"""The files behind `input.path`: which, in what order, and a mark of each that a listing tells without opening one.

Folders and globs are taken in name order; in folders, files whose name starts with `.` or `_` are passed over.
"""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fsspec.utils import glob_translate

from manifests.errors import InputError
from manifests.filesystems import filesystem_of, is_url, scheme_of
from manifests.input_faults import reading
from manifests.object_store import objects_of
from manifests.retries import Retries

PARQUET_SUFFIXES = (".parquet", ".pq")


class ListedFile(NamedTuple):
    """A file as a listing shows it.

    Args:
        mark: changes whenever the file is written: by URL its ETag, on a disk its device, inode, size and times; None where no listing
            tells.
    """

    path: str
    mark: str | None


def list_files(pattern: str) -> list[ListedFile]:
    """The Parquet files behind a file, folder or glob, in name order.

    Raises:
        InputError: a plain path that does not exist, or a folder that can't be listed.
    """
    if is_url(pattern):
        return _list_url(pattern)
    return [ListedFile(path, _mark_at(path)) for path in _list_local(pattern)]


def _list_local(pattern: str) -> list[str]:
    with reading(pattern):
        path = Path(pattern)
        if path.is_dir():
            # os.walk, since rglob passes over a folder without permission as if it were empty
            walk = os.walk(path, onerror=_raise)
            inside = [Path(folder, name) for folder, _, names in walk for name in names if name.endswith(PARQUET_SUFFIXES)]
            return sorted(str(file) for file in inside if file.is_file() and _is_data(file.as_posix(), path.as_posix()))
        if path.exists():
            return [pattern]
        matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (an absolute pattern is beyond Path.glob)
        # a folder that matches (Spark writes folders named like files) stands for the files in it
        found = [file for match in matches for file in (_list_local(match) if Path(match).is_dir() and "**" not in pattern else [match])]
        found = [file for file in found if not Path(file).is_dir()]
        if not found and not any(mark in pattern for mark in "*?["):
            raise InputError(f"input.path {pattern}: no such file or folder (looked from {Path.cwd()}).")
        return found


def _list_url(pattern: str) -> list[ListedFile]:
    """The Parquet files behind a file, folder or glob by URL, from one listing."""
    scheme = scheme_of(pattern)
    if scheme in ("http", "https"):  # a listing there is a guess at links, and asking for one may fetch the file
        return [ListedFile(pattern, None)]
    objects, root = objects_of(pattern)
    fixed = root.partition("*")[0].partition("?")[0].partition("[")[0]
    folder = root if fixed == root else fixed.rpartition("/")[0]
    marks: dict[str, str] = {}
    after: str | None = None
    while True:
        page = functools.partial(objects.page, folder + "/", is_deep=True, after=after)
        try:
            found, after = Retries().call(page, f"{pattern}: listing it")
        except FileNotFoundError:
            break
        marks.update((key, tag) for key, tag in found if not key.endswith("/"))
        if after is None:
            break
    if fixed == root:
        inside = [key for key in marks if key != root]
        keys = [key for key in inside if _is_data(key, root)] if inside else [root]
    else:
        matches = re.compile(glob_translate(root)).match
        # a folder that matches (Spark writes folders named like files) stands for the files in it
        keys = [key for key in marks if matches(key) or (_is_data(key, folder) and any(map(matches, _folders(key))))]
    full = "s3://{}".format if scheme == "s3" else filesystem_of(pattern)[0].unstrip_protocol
    # where tags decide no condition they may be made of a size alone, and a size is no proof that a file is as it was
    is_sure = objects.has_atomic_conditions
    return [ListedFile(str(full(key)), marks.get(key) if is_sure else None) for key in sorted(keys)]


def _folders(key: str) -> Iterator[str]:
    """The folders that a key lies in, the innermost first."""
    while key := key.rpartition("/")[0]:
        yield key


def stamp_of(path: str) -> tuple[int, int, int] | None:
    """What changes when a local file is replaced, or written over in place: a footer alone can't tell, since it is written last.

    None where there is no file, and for a URL, whose readers are pinned to one version by themselves.
    """
    if is_url(path):
        return None
    try:
        stat = Path(path).stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def mark_of(stat: os.stat_result) -> str:
    """The mark of a local file. With the time of change, which no program sets: a replacement of equal size and date is told from it; and
    with its device: another disk that is mounted in the same place may give the same numbers."""
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"


def _mark_at(path: str) -> str | None:
    try:
        return mark_of(Path(path).stat())
    except OSError:  # opening it will tell why
        return None


def _raise(error: OSError) -> None:
    raise error


def _is_data(path: str, root: str) -> bool:
    inside = ("/" + path if root in ("", ".") else path[len(root.rstrip("/")) :]).strip("/").split("/")
    return path.endswith(PARQUET_SUFFIXES) and not any(step.startswith((".", "_")) for step in inside)
