"""Prompt templates at a URL, copied here while a labeler reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from relabel.jobs.files.scratch import scratch_folder
from relabel.manifests.errors import ConfigError
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.object_run_store import open_object_run_store

MOST_FILES = 64
"""More than that right inside a folder is something else."""


@contextlib.contextmanager
def local_templates(options: LabelerOptions, storage: Storage) -> Iterator[LabelerOptions]:
    """The options with `templates` as a folder of this machine; a labeler that is made in the body reads them there.

    Raises:
        ConfigError: the URL names no folder of templates.
        StoreError, StoreUnreachableError: it can't be read.
    """
    url = options.templates
    if url is None or not is_url(url):
        yield options
        return
    store = open_object_run_store(url, storage)
    names = [name for name in store.names("") if not name.startswith(".")]  # .git, .DS_Store and their like
    if not 0 < len(names) <= MOST_FILES:
        raise ConfigError(f"labeler.templates: {url!r} is not a folder of templates; it holds {len(names):,} files.")
    with scratch_folder("relabel-templates-") as folder:
        for name in names:
            (folder / name).write_bytes(store.read(name))
        try:
            yield options.model_copy(update={"templates": str(folder)})
        except ConfigError as exc:
            raise ConfigError(str(exc).replace(str(folder), url.rstrip("/"))) from exc
