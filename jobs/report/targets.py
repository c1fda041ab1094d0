"""Where a report may be written: a free place, or over an earlier report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relabel.jobs.files.durable_files import check_free
from relabel.jobs.report.page import opening
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url, place_of, scheme_of
from relabel.manifests.storage.url_files import UrlFile


def check_target(to: str, inputs: Sequence[str], storage: Storage, *, force: bool) -> None:
    """Raise where a report can't be written, before any work is done.

    Args:
        inputs: what is reported on and gold grades; nothing in them is written to, whatever `force` says.
        force: replace a file that is not a report, too.
    Raises:
        UsageError: it is a folder, lies in an input, or is there already and no report.
    """
    check_free(to, inputs, storage, force=True)
    if not force and not _is_report(to, storage):
        check_free(to, inputs, storage, force=False)


def _is_report(to: str, storage: Storage) -> bool:
    """Whether `relabel report` wrote what is there; a file that can't be read is none."""
    mark = opening("report").encode()
    try:
        if is_url(to) and scheme_of(to) not in ("file", "local"):
            with UrlFile(to, storage) as page:
                return page.read(len(mark)) == mark
        path = Path(place_of(to))
        if not path.is_file():  # a device or a pipe may wait for ever
            return False
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False
