"""Folders at URLs, copied into the cache: there as a whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from relabel.manifests.errors import ConfigError, InputError, ModelError, StoreError
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.object_run_store import open_object_run_store
from relabel.manifests.storage.url_files import COPY_BYTES, UrlFile


def fetch_folder(url: str, slot: Path, check: Callable[[Path], None], storage: Storage) -> None:
    """Copy every file below a URL to `slot`, which is there as a whole or not at all.

    Args:
        check: looks at the copy before it becomes `slot`; what it raises leaves nothing behind.
    Raises:
        ModelError: it can't be read, or a name would leave the folder.
    """
    root = url.rstrip("/")
    with built_beside(slot) as scratch:
        try:
            for name in open_object_run_store(root, storage).etags(""):
                target = scratch / _safe_relative(name, url)
                target.parent.mkdir(parents=True, exist_ok=True)
                with UrlFile(f"{root}/{name}", storage) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out, COPY_BYTES)
        except (StoreError, ConfigError, InputError) as exc:
            raise ModelError(f"model {url!r} can't be read: {exc}") from exc
        except OSError as exc:
            raise ModelError(
                f"model {url!r} can't be read ({type(exc).__name__}). Check the URL and the space beside {slot}."
            ) from exc
        check(scratch)


@contextmanager
def built_beside(slot: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `slot` when the body ends well.

    Of two processes the first one wins, and neither ever sees half a folder.
    """
    slot.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=slot.name + ".", suffix=".part", dir=slot.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(slot)
        except OSError:
            if not slot.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def leaves_folder(name: str) -> bool:
    """Whether a name inside an archive or bucket, as a path below a folder, would lead out of it or name nothing."""
    path = PurePosixPath(name.replace("\\", "/"))
    return not path.parts or path.is_absolute() or ".." in path.parts or ":" in path.parts[0] or "\0" in name


def _safe_relative(name: str, reference: str) -> Path:
    """A name inside a bucket as a path below the target.

    Raises:
        ModelError: it would leave the target.
    """
    if leaves_folder(name):
        raise ModelError(
            f"model {reference!r} holds the path {name!r}, which would leave its folder; nothing of it was used."
        )
    return Path(*PurePosixPath(name.replace("\\", "/")).parts)
