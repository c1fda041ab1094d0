"""Where a run keeps what it owns: one set of verbs for a local folder and for object storage.

Names are relative, with `/`, and can't leave the root. A write is durable when the call returns. `create` is the
commit: of many callers exactly one gets True. `local_run_store.py` does this with links and fsync,
`object_run_store.py` with conditional puts.
"""

from __future__ import annotations

from pathlib import Path

from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.run_store_ports import Lock, RunStore


def open_run_store(url: str | Path, storage: Storage, *, single_writer: bool = False) -> RunStore:
    """The store behind a path or URL. Touches nothing yet.

    Args:
        url: local path, `s3://bucket/prefix` or another URL that fsspec knows.
        single_writer: the user vouches that only one process writes, so that a store without conditional writes will
            do.
    Raises:
        MissingExtraError, StoreError: no way to that kind of storage from here.
    """
    text = str(url)
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    if not is_url(text):
        from relabel.manifests.storage.local_run_store import LocalRunStore

        return LocalRunStore(text)
    from relabel.manifests.storage.object_run_store import open_object_run_store

    return open_object_run_store(text, storage, single_writer=single_writer)


def shard_lock(store: RunStore, shard: int) -> Lock:
    """The lock of one shard."""
    return store.lock(shard_lock_name(shard), f"shard {shard}")


def shard_lock_name(shard: int) -> str:
    """What the lock of a shard is called."""
    return f"shard-{shard:05d}"
