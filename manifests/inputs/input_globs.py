"""Local globs: `*`, `?`, `[…]` within a name, `**` for any folders, as `glob.glob` reads them.

That one passes over folders that it may not list and follows links in a circle until the system stops it; here either
is an error.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.inputs.input_folders import FoldersSeen


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
