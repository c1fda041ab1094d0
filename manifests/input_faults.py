"""What goes wrong while an input file is read, in words for the user."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from manifests.errors import InputError, RelabelError
from manifests.redaction import shortened

_KINDS = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}


def check_kind(path: str, found: os.stat_result, *, takes_pipes: bool = False) -> None:
    """Refuse what is no regular file before it is opened: a pipe waits for whoever writes into it, and a device may never end.

    Args:
        found: what the system says about it.
        takes_pipes: it is read from its beginning to its end, which a pipe can do.
    Raises:
        InputError: says what it is.
    """
    if stat.S_ISDIR(found.st_mode):
        raise InputError(f"{path}: can't be read: a folder, and a file is wanted.")
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(found.st_mode)), None)
    if kind is not None and not (takes_pipes and kind == "a pipe"):
        raise InputError(f"{path}: can't be read: {kind}, and a file is wanted. Write its content to one.")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a failed look at an input file into an InputError that names it."""
    try:
        yield
    except RelabelError:
        raise
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file.") from exc
    except PermissionError as exc:
        raise InputError(f"{path}: no permission to read it. Check the file's owner and mode.") from exc
    except pa.ArrowInvalid as exc:
        raise InputError(f"{path}: not a readable Parquet file: {_first_line(exc)}. Write it again from its source.") from exc
    except (pa.ArrowException, UnicodeDecodeError) as exc:
        raise InputError(f"{path}: can't be read: {_first_line(exc)}.") from exc
    except BlockingIOError:
        raise
    except OSError as exc:
        if exc.errno is None:  # what pyarrow finds wrong with the bytes
            raise InputError(f"{path}: not a readable Parquet file: {_first_line(exc)}. Write it again from its source.") from exc
        raise InputError(f"{path}: can't be read: {exc.strerror or _first_line(exc)}.") from exc


def _first_line(exc: Any) -> str:
    return shortened(str(exc).split("\n", 1)[0].rstrip("."), 200)
