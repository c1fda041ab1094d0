"""Query ids numbered in the order in which they appear, and rows sorted by query, with memory for the queries alone.

A number for each row lies in a temporary file, which is on the disk (TMPDIR) only where there are many rows. So a
hundred million scattered rows of five million queries take less than a gigabyte.
"""

# Shape legend: R rows, T texts, L texts that go on, D different texts, Q queries, K queries known so far, B buckets

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from relabel.manifests.files import translate_errors
from relabel.manifests.process import WhenUsed

pc = WhenUsed("pyarrow.compute")

NUMBERED_TEXTS = 1 << 20
"""Ids that are looked up at a time, at least, those that repeat the one before them left out."""
SORTED_ROWS = 1 << 23
"""Rows sorted at a time, about; a query of more is sorted whole."""
_Spooled: TypeAlias = "tempfile.SpooledTemporaryFile[bytes]"

HELD_BYTES = 64 << 20
"""What lies in a temporary file of more is on the disk."""


class SameHashError(Exception):
    """Two ids have one hash, under this seed."""


class QueryNumbers:
    """The query of each row, numbered in order of first appearance, and what the queries amount to.

    Rows are added in order, batch by batch; a context manager, since it holds temporary files.

    Args:
        seed: of the hashes by which ids are found; every seed gives the same numbers.

    `sizes_Q` are the rows of each query, int64, `weights_Q` their weights, float64; both are there after `finish`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rows = 0
        self.sizes_Q = np.zeros(0, np.int64)
        self.weights_Q = np.zeros(0, np.float64)
        self._seed = seed
        self._known = _KnownIds()
        self._texts: list[pa.Array] = []
        self._hashes: list[np.ndarray] = []
        self._runs: list[_Runs] = []
        self._num_waiting = 0
        self._last_number = -1
        self._num_changes = 0
        self._files = contextlib.ExitStack()
        self._numbers = self._file()
        self._batch_rows: list[int] = []

    def __enter__(self) -> "QueryNumbers":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _file(self) -> _Spooled:
        file = tempfile.SpooledTemporaryFile(HELD_BYTES, prefix="relabel-plan-")  # noqa: SIM115 (closed by `_files`)
        return self._files.enter_context(file)

    @property
    def is_scattered(self) -> bool:
        """Whether the rows of a query do not all lie next to each other."""
        return self._num_changes != len(self.sizes_Q)

    def add(self, ids: pa.Array, weight: float) -> None:
        """The ids of the next rows, text, and the weight of each row.

        Raises:
            SameHashError: begin again with another seed.
            DiskFullError: no space in TMPDIR.
        """
        if not len(ids):
            return
        is_other = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
        starts_T = np.flatnonzero(np.append(True, is_other))
        texts = ids if len(starts_T) == len(ids) else ids.take(pa.array(starts_T))
        self._texts.append(texts)
        self._hashes.append(hashes_of(texts, self._seed))
        self._runs.append(_Runs(np.diff(starts_T, append=len(ids)).astype(np.int32), weight))
        self._num_waiting += len(texts)
        # what is known is copied each time, so that there are fewer times where it is much
        if self._num_waiting >= max(NUMBERED_TEXTS, len(self._known) // 2):
            self._number()

    def finish(self) -> None:
        """Called after the last row.

        Raises:
            SameHashError, DiskFullError: as `add`.
        """
        self._number()
        self._known = _KnownIds()  # its memory is for what comes now

    def _number(self) -> None:
        """Number all that wait, and count them."""
        if not self._num_waiting:
            return
        texts = pa.concat_arrays(self._texts)
        self._texts.clear()
        hash_T = np.concatenate(self._hashes)
        self._hashes.clear()
        number_T = self._known.numbers_of(texts, hash_T)
        num_new = len(self._known) - len(self.sizes_Q)
        self.sizes_Q = np.append(self.sizes_Q, np.zeros(num_new, np.int64))
        self.weights_Q = np.append(self.weights_Q, np.zeros(num_new, np.float64))
        done = 0
        for runs in self._runs:
            num_texts = len(runs.lengths)
            self._count(number_T[done : done + num_texts], runs)
            done += num_texts
        self._runs.clear()
        self._num_waiting = 0

    def _count(self, number_T: np.ndarray, runs: "_Runs") -> None:
        """Take note of a batch of rows whose numbers are known."""
        is_change = np.diff(number_T, prepend=self._last_number) != 0
        self._num_changes += int(np.count_nonzero(is_change))
        self._last_number = int(number_T[-1])
        number_R = np.repeat(number_T, runs.lengths)
        query_D, rows_D = np.unique(number_R, return_counts=True)
        self.sizes_Q[query_D] += rows_D
        self.weights_Q[query_D] += rows_D * runs.weight
        with _spilling():
            self._numbers.write(number_R.data)
        self._batch_rows.append(len(number_R))
        self.rows += len(number_R)

    def rows_by_query(self) -> Iterator[np.ndarray]:
        """The numbers of all rows, int64, those of a query next to each other in their order, queries in the order of
        their numbers; in arrays of about `SORTED_ROWS`. Once.

        Raises:
            DiskFullError: no space in TMPDIR.
        """
        starts_Q = np.cumsum(self.sizes_Q) - self.sizes_Q
        bucket_Q = starts_Q // SORTED_ROWS  # of whole queries; a large one leaves empty buckets after it
        bucket_ends_B = np.searchsorted(bucket_Q, np.arange(bucket_Q[-1] + 1), side="right")
        ends_B = np.append(starts_Q, self.rows)[bucket_ends_B]
        row_bits = self.rows.bit_length()
        keys = self._into_buckets(bucket_Q.astype(np.uint16), np.append(0, ends_B[:-1]), row_bits)
        keys.seek(0)
        for num_rows in np.diff(ends_B, prepend=0).tolist():
            key_R = _read(keys, num_rows, np.uint64)
            key_R.sort()
            yield (key_R & np.uint64((1 << row_bits) - 1)).astype(np.int64)

    def _into_buckets(self, bucket_Q: np.ndarray, next_B: np.ndarray, row_bits: int) -> _Spooled:
        """A file of all rows by bucket: of each its query's number and its own, as one number that sorts by both.

        Args:
            next_B: where each bucket begins, in rows.
        """
        keys = self._file()
        self._numbers.seek(0)
        first_row = 0
        for num_rows in self._batch_rows:
            number_R = _read(self._numbers, num_rows, np.int32)
            row_R = np.arange(first_row, first_row + num_rows, dtype=np.uint64)
            first_row += num_rows
            key_R = (number_R.astype(np.uint64) << np.uint64(row_bits)) | row_R
            bucket_R = bucket_Q[number_R]
            key_R = key_R[np.argsort(bucket_R, kind="stable")]
            ends = np.cumsum(np.bincount(bucket_R, minlength=len(next_B)))
            for bucket, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
                if start == end:
                    continue
                with _spilling():
                    keys.seek(int(next_B[bucket]) * 8)
                    keys.write(key_R[start:end].data)
                next_B[bucket] += end - start
        return keys


class _Runs(NamedTuple):
    """A batch of rows, of which some repeat the one before.

    Args:
        lengths: how often each other one is there, int32.
        weight: of each row.
    """

    lengths: np.ndarray
    weight: float


class _KnownIds:
    """Ids with their numbers, found by hashes that are held sorted."""

    def __init__(self) -> None:
        self._texts = pa.array([], pa.large_string())
        self._hash_K = np.zeros(0, np.uint64)
        self._number_K = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._number_K)

    def numbers_of(self, texts: pa.Array, hash_T: np.ndarray) -> np.ndarray:
        """The number of each text, int32; new ones are numbered in order of appearance.

        Raises:
            SameHashError: two texts have the same.
        """
        order_T = np.argsort(hash_T)
        sorted_T = hash_T[order_T]
        starts_D = np.flatnonzero(np.append(True, sorted_T[1:] != sorted_T[:-1]))
        first_D = np.minimum.reduceat(order_T, starts_D)
        number_D = self._numbers_of_hashes(sorted_T[starts_D], first_D, texts)
        number_T = np.empty(len(texts), np.int32)
        number_T[order_T] = np.repeat(number_D, np.diff(starts_D, append=len(texts)))
        for start in range(0, len(texts), COMPARED_TEXTS):
            some_T = pa.array(number_T[start : start + COMPARED_TEXTS])
            if not self._texts.take(some_T).equals(texts.slice(start, COMPARED_TEXTS)):
                raise SameHashError
        return number_T

    def _numbers_of_hashes(self, hash_D: np.ndarray, first_D: np.ndarray, texts: pa.Array) -> np.ndarray:
        """The number of each hash, int32; those that are new are remembered, with their texts.

        Args:
            hash_D: ascending, all different.
            first_D: where each appears first among the texts.
        """
        place_D = np.searchsorted(self._hash_K, hash_D)
        is_known_D = np.append(self._hash_K, np.uint64(0))[place_D] == hash_D
        is_known_D &= place_D < len(self)
        number_D = np.empty(len(hash_D), np.int32)
        number_D[is_known_D] = self._number_K[place_D[is_known_D]]
        new_D = np.flatnonzero(~is_known_D)
        is_new_T = np.zeros(len(texts), np.bool_)
        is_new_T[first_D[new_D]] = True
        number_D[new_D] = len(self) - 1 + np.cumsum(is_new_T, dtype=np.int32)[first_D[new_D]]
        self._texts = pa.concat_arrays([self._texts, texts.filter(pa.array(is_new_T))])
        self._hash_K = np.insert(self._hash_K, place_D[new_D], hash_D[new_D])
        self._number_K = np.insert(self._number_K, place_D[new_D], number_D[new_D])
        return number_D


COMPARED_TEXTS = 1 << 17

_WORD_BYTES = 8
_WORD_MASKS = np.array([(1 << 8 * num_bytes) - 1 for num_bytes in range(_WORD_BYTES + 1)], np.uint64)
"""The first bytes of a little-endian word, by how many."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


def hashes_of(texts: pa.Array, seed: int) -> np.ndarray:
    """64 bits of each text of a `large_string` array, uint64; a word of eight bytes of all texts at a time.

    Texts of eight bytes and less and of one length never have the same.
    """
    _, offsets, data = texts.buffers()
    offsets_T = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(offsets_T[0]), int(offsets_T[-1])
    padded = np.zeros(last - first + _WORD_BYTES, np.uint8)
    if last > first:
        padded[: last - first] = np.frombuffer(data, np.uint8)[first:last]
    word_at = np.ndarray(last - first + 1, "<u8", padded.data, strides=(1,))
    length_T = np.diff(offsets_T)
    hash_T = (length_T.astype(np.uint64) + np.uint64(seed)) * _FACTOR
    longer = np.flatnonzero(length_T)
    start_L = (offsets_T[:-1] - first)[longer]
    left_L = length_T[longer]
    while len(longer):
        word_L = word_at[start_L] & _WORD_MASKS[np.minimum(left_L, _WORD_BYTES)]
        mixed_L = (hash_T[longer] ^ word_L) * _FACTOR
        hash_T[longer] = mixed_L ^ (mixed_L >> _SHIFT)
        is_longer = left_L > _WORD_BYTES
        longer = longer[is_longer]
        start_L = start_L[is_longer] + _WORD_BYTES
        left_L = left_L[is_longer] - _WORD_BYTES
    return hash_T


def _spilling() -> contextlib.AbstractContextManager[None]:
    return translate_errors("spill rows to", tempfile.gettempdir())


def _read(file: _Spooled, count: int, kind: type) -> np.ndarray:
    values: np.ndarray = np.empty(count, kind)
    if file.readinto(values.view(np.uint8).data) != values.nbytes:
        raise AssertionError("a temporary file ended before what was written to it")
    return values


class Joined:
    """Arrays one after the other, from which any number of values is taken."""

    def __init__(self, arrays: Iterator[np.ndarray]) -> None:
        self._arrays = arrays
        self._left = np.zeros(0, np.int64)

    def take(self, count: int) -> np.ndarray:
        """The next values; `count` of them must be left."""
        parts = []
        missing = count
        while missing > len(self._left):
            parts.append(self._left)
            missing -= len(self._left)
            self._left = next(self._arrays)
        parts.append(self._left[:missing])
        self._left = self._left[missing:]
        return np.concatenate(parts)
