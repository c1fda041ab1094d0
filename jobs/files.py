"""Files that a command writes atomically, on disk or at a URL, and scratch folders."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relabel.manifests.errors import DiskFullError, StoreError, UsageError
from relabel.manifests.files import Storage, is_url, out_of_files, place_of, scheme_of
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import sha256_file
from relabel.manifests.store import Held, UrlFile, open_bundle_store, open_run_store, sync_folder


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder in TMPDIR, removed when the body ends. Whatever else the body fills a disk with has to say so
    itself.

    Raises:
        DiskFullError: no space is left for it or in it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    except StoreError:  # ours already, and an OSError too
        raise
    except OSError as exc:
        if not _is_full(exc):
            raise
        raise DiskFullError(
            f"{tempfile.gettempdir()}: no space left for scratch files. Nothing was changed; free some, or point "
            "TMPDIR at a folder that has more, and give the command again."
        ) from exc


def _is_full(exc: OSError) -> bool:
    return exc.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(exc)


@contextlib.contextmanager
def full_disk_as_os_error(polars: Any) -> Iterator[None]:
    """Where polars writes: raise a full disk as OSError. Its own error differs from that of a damaged source only in
    the number of the system's error.
    """
    try:
        yield
    except polars.exceptions.PolarsError as exc:
        found = re.search(r"\(os error ([0-9]{1,4})\)", str(exc))
        if found is None or int(found[1]) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from exc


ONE_PUT_BYTES = 64 << 20
"""A file up to this size goes to storage in one put, held in memory; a larger one goes to S3 in parts."""


def check_free(to: str, inputs: Sequence[str], storage: Storage, *, force: bool) -> None:
    """Raise where a file can't be written, before any work is done.

    Raises:
        UsageError: it is a folder or something else than a file, is in an input or is one, or is there already and
            `force` is off.
    """
    place = place_of(to)
    for path in inputs:
        held = place_of(path).rstrip("/")
        if place == held or place.startswith(f"{held}/"):
            raise UsageError(f"{to}: is in the input {path}. Give a file elsewhere.")
    if is_url(to) and scheme_of(to) not in ("file", "local"):
        with contextlib.suppress(FileNotFoundError):
            UrlFile(to, storage).close()
            _refuse_taken(to, force=force)
        return
    target = _local(to)
    _refuse_odd(to, target)
    if target.exists():
        _refuse_taken(to, force=force)


def _local(to: str) -> Path:
    return Path(to.partition("://")[2] if is_url(to) else to).absolute()


def _refuse_odd(to: str, target: Path) -> None:
    """Raise for what a rename would replace by a file: folders, devices, pipes, sockets, dangling links."""
    if os.path.lexists(target) and not target.is_file():
        raise UsageError(f"{to}: is not a regular file. Give the name of a file.")


def _refuse_taken(to: str, *, force: bool) -> None:
    if not force:
        raise UsageError(f"{to}: is there already. Give another name, or --force to replace it.")


@contextlib.contextmanager
def written(to: str, storage: Storage) -> Iterator[Path]:
    """A path to write to; what is there when the body ends without an error is put under the name `to` in one step.
    Where `to` is a link to a file, the link stays, and the file that it names is replaced.

    Raises:
        UsageError: something that is not a regular file is there.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
    """
    try:
        if is_url(to) and scheme_of(to) not in ("file", "local"):
            with scratch_folder("relabel-out-") as scratch:
                file = scratch / to.rpartition("/")[2]
                yield file
                check_interrupted()
                _upload(file, to, storage)
            return
        _refuse_odd(to, _local(to))
        target = _local(to).resolve()
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            check_interrupted()
            _publish(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except StoreError:  # ours already, and an OSError too
        raise
    except OSError as exc:
        if _is_full(exc):
            raise DiskFullError(
                f"{to}: no space left. Nothing was changed; free some and give the command again."
            ) from exc
        raise StoreError(f"{to}: can't write it: {out_of_files(exc) or exc.strerror or exc}") from exc


def _publish(temporary: Path, target: Path) -> None:
    """Make a file durable under its final name."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)
    sync_folder(target.parent)


def _upload(file: Path, to: str, storage: Storage) -> None:
    """Put a local file under a URL."""
    folder, _, name = to.rpartition("/")
    size = file.stat().st_size
    if size > ONE_PUT_BYTES and scheme_of(to) == "s3":
        held = Held(size, sha256_file(file))
        open_bundle_store(folder, storage).put_file(name, file, held, lambda _: None)
        return
    # `single_writer`: one whole put needs no condition
    open_run_store(folder, storage, single_writer=True).put(name, file.read_bytes())
