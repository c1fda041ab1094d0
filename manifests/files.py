"""Local files and filesystems by URL: storage options, locks, temporary files, and errors of the operating system."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relabel.manifests.errors import (
    ConfigError,
    DiskFullError,
    InputError,
    LockHeldError,
    MissingExtraError,
    RelabelError,
    StoreError,
)
from relabel.manifests.secrets import keep_secret, secret_in_url, texts_in

# ------------------------------------------------------------------------------
# What the operating system refuses, in our words.


FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSALS = (
    *FULL,
    *(errno.EIO, errno.EROFS, errno.ESTALE, errno.ENXIO, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.ENOTDIR),
)
"""What a disk, its rights or a file where a folder belongs do to any program; the other numbers may be of a call that
was wrong.
"""


@contextlib.contextmanager
def translate_errors(verb: str, path: Path | str, *, is_missing_fine: bool = False) -> Iterator[None]:
    """Turn the operating system's refusals into ours.

    Args:
        verb: what was tried, for the message.
        is_missing_fine: let FileNotFoundError through, for callers that expect it.
    """
    try:
        yield
    except OSError as exc:
        if isinstance(exc, StoreError) or (is_missing_fine and isinstance(exc, FileNotFoundError)):
            raise
        raise _translated(exc, verb, path) from exc


def refusal(error: Exception) -> RelabelError | None:
    """What the operating system refused at a place that expects no refusal, in our words; None if an error is nothing
    of that kind, but a fault of the program.
    """
    if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
        return _translated(error, "use", error.filename)
    why = out_of_files(error)
    return None if why is None else StoreError(why)


def _translated(error: OSError, verb: str, path: Path | str) -> RelabelError:
    if is_full(error):
        return DiskFullError(
            f"{path}: no space left to {verb} it. What was committed is safe; free some space and run the same "
            "command again."
        )
    why = out_of_files(error)
    if why is not None:
        return StoreError(f"{path}: can't {verb} it: {why}")
    if isinstance(error, FileExistsError | FileNotFoundError) and (link := Path(error.filename or path)).is_symlink():
        return StoreError(
            f"{link}: a link to {link.readlink()}, which is not there. Restore what it led to, or remove the link."
        )
    return StoreError(f"{path}: can't {verb} it ({error.strerror or error}). Check the path and its permissions.")


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota is full; Arrow's errors have no number."""
    return error.errno in FULL or "No space left" in str(error)


def out_of_files(error: BaseException) -> str | None:
    """What to advise if an error comes of the limit of open files, wherever in its chain; None if it does not.

    Libraries wrap it in errors of their own, and some keep its words alone.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # a library may have made an error its own cause
        is_limit = isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)
        if is_limit or "Too many open files" in str(cause):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"too many files are open: this process may open {limit:,} (`ulimit -n`). What was committed is safe. "
                "Raise the limit, say `ulimit -n 4096`, and run the same command again."
            )
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


# ------------------------------------------------------------------------------
# Which kinds of file are opened: no pipe waits, no device is read without end.


_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def check_kind(path: str, found: os.stat_result, *, takes_pipes: bool = False) -> None:
    """Refuse what is not a regular file before it is opened: a pipe waits for its writer, and a device may never
    end.

    Args:
        found: what the system has there.
        takes_pipes: it is read from its beginning to its end, which a pipe can do.
    Raises:
        InputError: names what it is.
    """
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(found.st_mode)), None)
    if kind is not None and not (takes_pipes and kind == "a pipe"):
        raise InputError(f"{path}: can't be read: {kind}, and a file is wanted.")


# ------------------------------------------------------------------------------
# Locks on a local file system: `flock` on `leases/shard-00003.lock`, held by a live process and freed by the kernel
# when it dies.
#
# The lock keeps workers from doing the same work twice; it is not what keeps labels single (receipts are), so a file
# system with weak locks costs time and never rows.


class FileLock:
    """An exclusive lock on a file, held by this process until `release` or its death.

    Args:
        what: what is locked, for messages.
    """

    epoch = 0
    is_lost = False

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.what = what
        self._descriptor: int | None = None

    def acquire(self, *, waits: bool = False) -> None:
        """Take the lock.

        Args:
            waits: until its holder lets go, instead of failing at once.
        Raises:
            LockHeldError: a live process holds it.
            StoreError: the file system can't make or lock the file.
        """
        with translate_errors("lock", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as exc:
            who = os.read(descriptor, 300).decode(errors="replace") or "another process"
            os.close(descriptor)
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreError(
                    f"{self.path}: this file system can't lock ({exc.strerror}). Use a local disk for `output`."
                ) from exc
            raise LockHeldError(
                f"{self.what} is being worked on by {who} ({self.path}). Try again when it has ended."
            ) from exc
        self._descriptor = descriptor
        with contextlib.suppress(OSError):
            # on a full disk the lock holds all the same, and only its holder's name is missing
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Let go; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock, and hold it while the body runs."""
        self.acquire(waits=True)
        try:
            yield
        finally:
            self.release()

    @staticmethod
    def is_held(path: Path) -> bool:
        """Whether a live process holds the lock on that file."""
        with (
            contextlib.suppress(OSError),
            open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False


# ------------------------------------------------------------------------------
# Temporary files and folders that others may know for abandoned: their maker holds a lock on them.
#
# The kernel frees that lock when the maker dies, in whichever PID namespace it ran, whatever process has its number
# since. A lock proves nothing of makers under another kernel where a file system keeps locks to itself, so a name says
# under which boot of which machine it was made: those of others go by their age. `HERE` is of one boot and one PID
# namespace: where a process number means one process.


TEMP_PREFIX = ".tmp-"
ABANDONED_S = 3600.0
"""Age at which a temporary file of another machine is nobody's any more, seconds: no write takes that long."""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


try:
    _BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text()
    BOOT = _digest(_BOOT_ID)
    _NAMESPACE = _BOOT_ID + str(Path("/proc/self/ns/pid").readlink())
except OSError:  # nothing is known to be of this kernel then but what this process makes
    BOOT = secrets.token_hex(4)
    _NAMESPACE = ""
HERE = f"{socket.gethostname()}-{_digest(_NAMESPACE)}"


@contextlib.contextmanager
def held_temp(parent: Path, prefix: str = TEMP_PREFIX, *, is_folder: bool = False) -> Iterator[tuple[Path, int]]:
    """A new temporary file, with a descriptor to write to, or folder; held while the body lasts, and removed at its end
    if it has that name still.
    """
    while True:
        temp = parent / f"{prefix}{BOOT}-{secrets.token_hex(8)}"
        try:
            if is_folder:
                temp.mkdir()
            flags = os.O_RDONLY if is_folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(temp, flags | os.O_CLOEXEC, 0o666)
            try:
                with contextlib.suppress(OSError):  # where nothing can be locked, age alone decides
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not temp.exists():  # swept before it was locked
                    continue
                yield temp, descriptor
                return
            finally:
                os.close(descriptor)  # before it is removed: NFS renames what is open
        finally:
            _remove(temp)


def remove_abandoned(temp: Path, *, older_s: float = ABANDONED_S) -> bool:
    """Remove what `held_temp` made if its maker is gone: under this kernel by the lock, under others by age.

    Returns:
        Whether it was removed.
    """
    try:
        descriptor = os.open(temp, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        is_ours = f"-{BOOT}-" in temp.name
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            is_ours = False
        if not is_ours and time.time() - os.fstat(descriptor).st_mtime <= older_s:
            return False
        _remove(temp)
        return True
    finally:
        os.close(descriptor)


def _remove(temp: Path) -> None:
    if temp.is_dir():
        shutil.rmtree(temp, ignore_errors=True)
    else:
        temp.unlink(missing_ok=True)


def open_to_readers(folder: Path) -> None:
    """Give all files at and below a folder the mode that any new file has here (0666 without the umask); safetensors
    writes to a temporary file of 0600 and renames it.
    """
    probe = folder / ".mode"
    probe.touch()
    for top, _, names in os.walk(folder):
        for file in (Path(top, name) for name in names):
            if not file.is_symlink():
                shutil.copymode(probe, file)
    probe.unlink()


# ------------------------------------------------------------------------------
# How storage is reached: one value, built where a job or a command begins and handed to whatever opens anything.
#
# A job's `storage_options` hold for all its paths, and for no other job in the process. Their values are secrets: they
# are kept wrapped, are handed to fsspec alone, and no text shows them.


RETRY_S = 120.0
"""Default of `run.store_retry_s`."""
LEASE_S = 60.0
"""Default of `run.lease_s`."""
_OPEN = re.compile(
    r"(?:.*_)?(?:url|endpoint|override|profile|region|name|project|host|port|user|username|style|version|proxy)",
    re.IGNORECASE,
)
"""Storage options whose values may be shown: where a store is, and who asks. All others may be secrets."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How storage is reached. `Storage()` knows the environment: the usual variables and profiles of each
    scheme.

    Args:
        retry_s: after this long without a good answer a call fails, seconds.
        lease_s: a lease that was not renewed for so long is dead, seconds.
    """

    retry_s: float = RETRY_S
    lease_s: float = LEASE_S
    _schemes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, options: Mapping[str, Mapping[str, Any]], *, retry_s: float = RETRY_S, lease_s: float = LEASE_S
    ) -> Storage:
        """Storage with options of its own; from now on their values are shown nowhere.

        Args:
            options: fsspec's, by scheme.
        """
        for key, text in texts_in(options):
            name = next((part for part in reversed(key.split(".")) if not part.isdecimal()), key)
            if not _OPEN.fullmatch(name):
                keep_secret(text, f"the storage option {name}")
        return cls(retry_s, lease_s, {scheme_of(scheme): values for scheme, values in options.items()})

    def options_of(self, scheme: str) -> dict[str, Any]:
        """What fsspec is given with the URL. Not to be shown."""
        return dict(self._schemes.get(scheme, {}))


# ------------------------------------------------------------------------------
# From a URL to its filesystem: the one place that knows fsspec, and which package a scheme needs.
#
# Credentials come from the usual variables and profiles of each scheme, or from the options that `Storage` holds.


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_S3_CONFIG: dict[str, Any] = {
    "retries": {"total_max_attempts": 1},  # ours is the one retry policy (`objects.retried`)
    "connect_timeout": 10,
    "read_timeout": 60,
    "max_pool_connections": 64,
}


def is_url(path: str) -> bool:
    """Whether a path is meant for fsspec."""
    return _SCHEME.match(path) is not None


def place_of(path: str) -> str:
    """One text for one place, however it is spelled: a local path without links, steps back or `file://`, or a URL."""
    scheme, _, rest = path.partition("://")
    if is_url(path) and scheme.lower() not in ("file", "local"):
        return f"{scheme_of(path)}://{rest.strip('/')}"
    return os.path.realpath(rest if is_url(path) else path)


def path_hint(path: str) -> str:
    """` Did you mean out/ecom?` for `out/ecmo`, which is not there; empty for a URL, or if no path is similar."""
    if is_url(path):
        return ""
    with contextlib.suppress(OSError):
        near = _similar_path(Path(path))
        if near is not None and near != Path(path):
            return f" Did you mean {near}?"
    return ""


def absence_of(path: str | Path) -> str:
    """`out/ecmo: no such folder. Did you mean out/ecom?` where a local folder is not there; empty if it is, or for a
    URL.
    """
    if is_url(str(path)) or Path(path).exists():
        return ""
    return f"{path}: no such folder.{path_hint(str(path))}"


def _similar_path(path: Path) -> Path | None:
    """The path that is there and spelled most like this one, step by step from the last folder that is there."""
    if path.exists():
        return path
    folder = _similar_path(path.parent)
    if folder is None or not folder.is_dir():
        return None
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1)
    return folder / near[0] if near else None


def absolute_path(path: str) -> str:
    """A local path as it reads from any working directory, or a URL."""
    return path if is_url(path) else os.path.normpath(Path.cwd() / path)


def scheme_of(url: str) -> str:
    """`s3` of `s3://bucket/key`; `s3a` and `s3` are one."""
    scheme = url.partition("://")[0].lower()
    return "s3" if scheme == "s3a" else scheme


def filesystem_of(url: str, storage: Storage) -> tuple[Any, str]:
    """The filesystem of a URL, and the path in it.

    Raises:
        ConfigError: the URL holds a secret, the scheme is unknown, or it can't be set up (an option or profile is off).
        MissingExtraError: its package is not here.
    """
    if secret_in_url(url):
        raise ConfigError(
            f"a {scheme_of(url)}:// URL holds a password, token or signature, which would be written into plans and "
            "logs. Use storage_options."
        )
    import fsspec

    scheme = scheme_of(url)
    options = storage.options_of(scheme)
    if scheme == "s3":
        config = _S3_CONFIG | options.get("config_kwargs", {})
        options = {"use_listings_cache": False, **options, "config_kwargs": config}  # others write meanwhile
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as exc:
        how = (
            "run `pip install 'relabel-ir[s3]'`" if scheme == "s3" else f"install the package of {scheme}:// for fsspec"
        )
        raise MissingExtraError(f"{url}: reading {scheme}:// needs a package that is not here: {how}.") from exc
    except Exception as exc:  # noqa: BLE001 (whatever a filesystem's constructor raises; its text may hold an option's value)
        is_unknown = isinstance(exc, ValueError) and "rotocol not known" in str(exc)
        why = (
            f"no filesystem is called {scheme}" if is_unknown else f"{type(exc).__name__} while setting up {scheme}://"
        )
        raise ConfigError(
            f"{url}: {why}. Use a local path, s3:// or another that fsspec knows, and check the URL, credentials and "
            "storage_options."
        ) from None
    if scheme == "s3":
        filesystem.retries = 1
    return filesystem, str(path)
