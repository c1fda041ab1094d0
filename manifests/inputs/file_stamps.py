"""By what a file is known to be as it was, without reading it."""

from __future__ import annotations

import functools
from pathlib import Path

from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.objects import Objects
from relabel.manifests.storage.retries import Retries


def stamps_below(folder: str, where: str, objects: Objects, storage: Storage) -> dict[str, str]:
    """The keys below that of a folder, each with its tag."""
    stamps: dict[str, str] = {}
    after: str | None = None
    while True:
        page = functools.partial(objects.page, folder + "/", is_deep=True, after=after)
        try:
            found, after = Retries(storage.retry_s).call(page, f"{where}: listing it")
        except FileNotFoundError:
            return stamps
        stamps.update((key, tag) for key, tag in found if not key.endswith("/"))
        if after is None:
            return stamps


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
