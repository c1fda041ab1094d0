"""What goes wrong while an input file is read, in words for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from relabel.manifests.errors import InputError, RelabelError
from relabel.manifests.secrets.redaction import shortened
from relabel.manifests.storage.disk_errors import out_of_files


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
        raise InputError(
            f"{path}: not a readable Parquet file: {_first_line(exc)}. Write it again from its source."
        ) from exc
    except (pa.ArrowException, UnicodeDecodeError) as exc:
        raise InputError(f"{path}: can't be read: {_first_line(exc)}.") from exc
    except BlockingIOError:
        raise
    except OSError as exc:
        if exc.errno is None:  # what pyarrow finds wrong with the bytes
            raise InputError(
                f"{path}: not a readable Parquet file: {_first_line(exc)}. Write it again from its source."
            ) from exc
        why = out_of_files(exc)
        raise InputError(f"{path}: can't be read: {why or f'{exc.strerror or _first_line(exc)}.'}") from exc


def _first_line(exc: Any) -> str:
    return shortened(str(exc).split("\n", 1)[0].rstrip("."), 200)
