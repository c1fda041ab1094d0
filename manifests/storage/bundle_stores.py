"""Where bundles are published: big files in and out in blocks, small records by conditional writes, all in one flat
space of names.

A bundle store differs from a run's store in what it holds: files too big for memory, addressed by their digests, and
records that are replaced only if they are still as they were read (compare and swap). `LocalBundleStore` keeps to a
folder, `S3BundleStore` to a bucket.
Names are relative, with `/`, and can't leave the root. A write is durable when the call returns.
"""

from __future__ import annotations

from pathlib import Path

from relabel.manifests.errors import UsageError
from relabel.manifests.storage.bundle_store_ports import BundleStore
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url, scheme_of
from relabel.manifests.storage.local_bundle_store import LocalBundleStore


def open_bundle_store(url: str, storage: Storage) -> BundleStore:
    """The bundle store behind a local path or an `s3://` URL. Touches nothing yet.

    Raises:
        UsageError: neither.
        MissingExtraError: S3 needs a package that is not here.
    """
    if url.startswith("file://"):
        url = url.removeprefix("file://")
    if not is_url(url):
        return LocalBundleStore(Path(url))
    if scheme_of(url) == "s3":
        from relabel.manifests.storage.s3_bundle_store import S3BundleStore

        return S3BundleStore(url, storage)
    raise UsageError(
        f"{url}: bundles are published to local paths and to s3:// alone, where a pointer can be moved safely."
    )
