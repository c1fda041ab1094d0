"""What lies in a local folder of input: its data files, through links too, and what is left out by rule, counted.

Names that begin with `_` or `.` are left out (what writers leave behind), and files of other suffixes. All else is
data: it is read, or it is an error that names it, since a file that is passed over is rows that are lost without a
word.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.storage.file_kinds import check_kind

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
