"""Labels of earlier outputs, found by key: which rows need not be asked again.

Earlier outputs are opened read-only. Every file that a row is taken from has its sha256 compared with its receipt's.
What is kept in memory is 24 bytes for each labelled row (a key of 16, a place of 8; twice that while they are sorted)
and the last files that rows came from; shared answers (one for each query, not each row) are kept whole.

Where a key occurs more than once, the output that is named first wins, and within an output the first row in its own
order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.runs.earlier_outputs import EarlierOutput, columns_lacking, recipes_of
from relabel.manifests.runs.label_files import conformed, read_labels
from relabel.manifests.runs.receipts import FileRef
from relabel.manifests.schemas import KEY_BYTES, LABELS, LabelRow, label_rows, label_schema
from relabel.manifests.storage.concurrency import map_concurrent

# Shape legend: N keys looked up, R rows known

FILES_KEPT_BYTES = 256 << 20
"""Label files kept decoded. An input in the order of last time needs one file at a time; a shuffled one comes back to
each.
"""
_ROW_BITS = 32


class RowPlace(NamedTuple):
    """Where a known label lies: which output, which of its label files, which row of that."""

    output: int
    file: int
    row: int


class KeyIndex:
    """Sorted 16-byte keys, each with a 64-bit value.

    Args:
        keys_R2: uint64, the two halves of each key.
        values_R: uint64. Of equal keys the first is kept.
    """

    def __init__(self, keys_R2: np.ndarray, values_R: np.ndarray) -> None:
        order_R = np.argsort(keys_R2[:, 0], kind="stable")
        high_R, low_R, values_R = keys_R2[order_R, 0], keys_R2[order_R, 1], values_R[order_R]
        # Of rows with one key the first stays. Where the first halves agree and the second do not (once in 2^32 keys
        # squared), all stay.
        is_again_R = np.zeros(len(high_R), dtype=bool)
        is_again_R[1:] = (high_R[1:] == high_R[:-1]) & (low_R[1:] == low_R[:-1])
        self._high_R, self._low_R, self._values_R = high_R[~is_again_R], low_R[~is_again_R], values_R[~is_again_R]

    def __len__(self) -> int:
        return len(self._high_R)

    @property
    def size_bytes(self) -> int:
        return int(self._high_R.nbytes + self._low_R.nbytes + self._values_R.nbytes)

    def find(self, keys_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which keys are known (bool [N]), and their values (uint64 [N], 0 where unknown)."""
        values_N = np.zeros(len(keys_N2), np.uint64)
        is_known_N = np.zeros(len(keys_N2), dtype=bool)
        at_N = np.searchsorted(self._high_R, keys_N2[:, 0])
        left_N = np.flatnonzero(at_N < len(self))
        while len(left_N):  # one pass, and one more for every pair of keys whose first halves agree
            left_N = left_N[self._high_R[at_N[left_N]] == keys_N2[left_N, 0]]
            hit_N = self._low_R[at_N[left_N]] == keys_N2[left_N, 1]
            found_N = left_N[hit_N]
            is_known_N[found_N] = True
            values_N[found_N] = self._values_R[at_N[found_N]]
            left_N = left_N[~hit_N]
            at_N[left_N] += 1
            left_N = left_N[at_N[left_N] < len(self)]
        return is_known_N, values_N


class KnownLabels:
    """The labels of some earlier outputs, by key.

    Args:
        outputs: in order of precedence.
        recipe: digest of the recipe wanted; outputs without it are not read.
        columns: of the labeler's own that are wanted, name → kind; outputs without one of them are not read.
    """

    def __init__(self, outputs: Sequence[EarlierOutput], recipe: bytes, columns: Mapping[str, str]) -> None:
        self.outputs = list(outputs)
        self._schema = label_schema(columns)
        self._files: list[tuple[int, FileRef]] = []
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._tables_bytes = 0
        keys: list[np.ndarray] = [np.zeros((0, 2), np.uint64)]
        values: list[np.ndarray] = [np.zeros(0, np.uint64)]
        for number, earlier in enumerate(self.outputs):
            if (
                not earlier.is_readable
                or recipe not in recipes_of(earlier.plan.parts)
                or columns_lacking(earlier, columns)
            ):
                continue
            for file, keys_R2 in zip(earlier.found.labels, _key_columns(earlier), strict=True):
                rows_R = np.flatnonzero(keys_R2.any(axis=1)).astype(np.uint64)
                keys.append(keys_R2[rows_R])
                values.append(rows_R | np.uint64(len(self._files) << _ROW_BITS))
                self._files.append((number, file))
        all_keys, all_values = np.concatenate(keys), np.concatenate(values)
        keys.clear()
        values.clear()
        self._index = KeyIndex(all_keys, all_values)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def size_bytes(self) -> int:
        """Memory of the index, bytes."""
        return self._index.size_bytes

    def find(self, keys: Sequence[bytes]) -> list[RowPlace | None]:
        """Where the label of each key lies; None for a key that is not known."""
        if not len(self._index) or not keys:
            return [None] * len(keys)
        is_known_N, values_N = self._index.find(np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))
        places: list[RowPlace | None] = [None] * len(keys)
        for at, value in zip(np.flatnonzero(is_known_N).tolist(), values_N[is_known_N].tolist(), strict=True):
            file = value >> _ROW_BITS
            places[at] = RowPlace(self._files[file][0], file, value & ((1 << _ROW_BITS) - 1))
        return places

    def take(self, places: Sequence[RowPlace]) -> list[LabelRow]:
        """The labels at some places, as the runs before left them, with `origin` filled in: the run that asked each.

        Raises:
            ManifestError: a file is missing, or is not the one committed.
        """
        by_file: dict[int, list[int]] = {}
        for at, place in enumerate(places):
            by_file.setdefault(place.file, []).append(at)
        rows: list[LabelRow | None] = [None] * len(places)
        for file, wanted in by_file.items():
            taken = self._table(file).take(pa.array([places[at].row for at in wanted]))
            fingerprint = self.outputs[self._files[file][0]].plan.fingerprint
            for at, row in zip(wanted, label_rows(taken), strict=True):
                rows[at] = row if row.origin else row._replace(origin=fingerprint)
        return [row for row in rows if row is not None]

    def _table(self, file: int) -> pa.Table:
        held = self._tables.get(file)
        if held is None:
            output, ref = self._files[file]
            held = conformed(read_labels(self.outputs[output].folder, ref), self._schema)
            self._tables[file] = held
            self._tables_bytes += held.nbytes
            while self._tables_bytes > FILES_KEPT_BYTES and len(self._tables) > 1:
                self._tables_bytes -= self._tables.popitem(last=False)[1].nbytes
        else:
            self._tables.move_to_end(file)
        return held


def _key_columns(earlier: EarlierOutput) -> Iterable[np.ndarray]:
    """The keys of each label file, uint64 [rows, 2]; zeros for a row without."""

    def read(file: FileRef) -> np.ndarray:
        column = earlier.folder.table(file, LABELS, ["key"], check_bytes=False)["key"].combine_chunks()
        filled = column.fill_null(bytes(KEY_BYTES)) if column.null_count else column
        return np.frombuffer(b"".join(filled.to_pylist()), np.uint64).reshape(-1, 2)

    return map_concurrent(earlier.folder.store, read, earlier.found.labels)
