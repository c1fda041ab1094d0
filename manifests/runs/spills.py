"""More records than a process should hold, in unnamed temporary files: they go with the process, however it ends.

`Spilled` keeps records in order and gives them back by slices, as an array does; `Parted` keeps them by part. Both hold
up to `block_rows` in memory, so that what is small never meets the disk.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Protocol

import numpy as np

from relabel.manifests.errors import DiskFullError

BLOCK_ROWS = 1 << 19
"""Records that are held, written and sorted at a time: 20 MB of the largest kind."""


class Column(Protocol):
    """Values in order, read by slices: an array, or a `Spilled`."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> Any: ...


def blocks_of(column: Column, start: int, stop: int, block_rows: int) -> Iterator[np.ndarray]:
    """The values start..stop, some at a time."""
    for first in range(start, stop, block_rows):
        yield column[first : min(first + block_rows, stop)]


@contextlib.contextmanager
def spilling(what: str) -> Iterator[None]:
    """What fails while something is written beside: not what fails while its source is read.

    Raises:
        DiskFullError: in place of any OSError.
    """
    try:
        yield
    except OSError as exc:
        raise DiskFullError(
            f"{tempfile.gettempdir()}: can't spill {what} ({exc.strerror or exc}). Free some space or point TMPDIR "
            "elsewhere."
        ) from exc


class Spilled:
    """Records of one kind in the order in which they were added."""

    def __init__(self, dtype: np.typing.DTypeLike, *, block_rows: int = BLOCK_ROWS) -> None:
        self._dtype = np.dtype(dtype)
        self._block_rows = block_rows
        self._file: BinaryIO | None = None
        self._num_written = 0
        self._held: list[np.ndarray] = []
        self._num_held = 0

    def __len__(self) -> int:
        return self._num_written + self._num_held

    def append(self, records: np.ndarray) -> None:
        """Add records at the end.

        Raises:
            DiskFullError: there is no room for them in TMPDIR.
        """
        self._held.append(records.astype(self._dtype, copy=False))
        self._num_held += len(records)
        if self._num_held < self._block_rows:
            return
        with spilling("what a plan is made of"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="relabel-plan-", buffering=0)  # noqa: SIM115 (lives as we do)
                weakref.finalize(self, self._file.close)
            for held in self._held:
                left = np.ascontiguousarray(held).view(np.uint8).data
                while left:
                    left = left[self._file.write(left) :]
        self._num_written += self._num_held
        self._held, self._num_held = [], 0

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        pieces = [self._read(start, min(stop, self._num_written))] if start < self._num_written else []
        if stop > self._num_written:
            if len(self._held) > 1:
                self._held = [np.concatenate(self._held)]
            pieces.append(self._held[0][max(0, start - self._num_written) : stop - self._num_written])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, self._dtype), *pieces])

    def _read(self, start: int, stop: int) -> np.ndarray:
        assert self._file is not None
        size = self._dtype.itemsize
        found = np.empty(max(0, stop - start), self._dtype)
        left, place = found.view(np.uint8).data, start * size
        while left:
            count = os.preadv(self._file.fileno(), [left], place)
            left, place = left[count:], place + count
        return found


class Parted:
    """Records of one kind by part, each part in the order in which its records were added."""

    def __init__(self, dtype: np.typing.DTypeLike, parts: int, *, block_rows: int = BLOCK_ROWS) -> None:
        self._sorted = Spilled(dtype, block_rows=block_rows)
        self._block_rows = block_rows
        self._parts = parts
        self._bounds_P: list[np.ndarray] = []  # of each block that was sorted by part
        self._held: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_held = 0

    def append(self, part_R: np.ndarray, records: np.ndarray) -> None:
        """Add records, each to its part.

        Raises:
            DiskFullError: as `Spilled.append`.
        """
        self._held.append((part_R.astype(np.uint16), records))
        self._num_held += len(records)
        if self._num_held >= self._block_rows:
            self._sort()

    def parts(self) -> Iterator[np.ndarray]:
        """Each part's records."""
        if self._held:
            self._sort()
        for number in range(self._parts):
            pieces = [self._sorted[slice(*bounds_P[number : number + 2].tolist())] for bounds_P in self._bounds_P]
            yield np.concatenate([self._sorted[0:0], *pieces])

    def _sort(self) -> None:
        part_R, records = (np.concatenate(pieces) for pieces in zip(*self._held, strict=True))
        order = np.argsort(part_R, kind="stable")
        before = len(self._sorted)
        self._bounds_P.append(before + np.searchsorted(part_R[order], np.arange(self._parts + 1)))
        self._sorted.append(records[order])
        self._held, self._num_held = [], 0


class SpilledFiles(Mapping[str, bytes]):
    """Files by name, of which memory holds about one."""

    def __init__(self) -> None:
        self._bytes = Spilled(np.uint8)
        self._spans: dict[str, slice] = {}

    def add(self, files: Mapping[str, bytes]) -> None:
        """Take in more.

        Raises:
            DiskFullError: as `Spilled.append`.
        """
        for name, data in files.items():
            start = len(self._bytes)
            self._bytes.append(np.frombuffer(data, np.uint8))
            self._spans[name] = slice(start, start + len(data))

    def __getitem__(self, name: str) -> bytes:
        return self._bytes[self._spans[name]].tobytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)
