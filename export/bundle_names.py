"""What lies in a bundle's folder, and that nothing else does."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from relabel.manifests.errors import ManifestError
from relabel.manifests.storage.disk_errors import translate_errors


def entries_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Name and state of all that lies below a folder: files, links, special files, and folders that are empty.

    Python's caches of modules (`__pycache__`) are passed over: whoever imports a bundle's `load.py` leaves one there.
    """
    pending = [folder]
    while pending:
        current = pending.pop()
        with os.scandir(current) as entries:
            held = [entry for entry in entries if entry.name != "__pycache__"]
        if not held and current != folder:
            yield current.relative_to(folder).as_posix(), current.stat()
        for entry in held:
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                pending.append(Path(entry.path))
            else:
                yield Path(entry.path).relative_to(folder).as_posix(), found


def names_in(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted.

    Raises:
        ManifestError: a link, a socket or an empty folder lies among them: no manifest can say what it must be.
    """
    found = []
    with translate_errors("list", folder):
        for name, held in entries_in(folder):
            if stat.S_ISDIR(held.st_mode):
                raise ManifestError(f"{folder / name}: an empty folder has no place in a bundle. Remove it.")
            if not stat.S_ISREG(held.st_mode):
                raise ManifestError(
                    f"{folder / name}: a link or a special file has no place in a bundle. Put the file itself there."
                )
            found.append(name)
    return sorted(found)
