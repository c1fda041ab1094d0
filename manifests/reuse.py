"""Rows that the teacher need not be asked: labels and answers of earlier outputs, found by key.

Earlier outputs are opened read-only. Every file that a row is taken from has its sha256 compared with its receipt's.
What is kept in memory is 24 bytes for each labelled row (a key of 16, a place of 8; twice that while they are sorted)
and the last files that rows came from; shared answers (one for each query, not each row) are kept whole.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.asks import Answer, Distribution
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import Storage, absence_of
from relabel.manifests.labels import (
    ANSWERS,
    KEY_BYTES,
    LABELS,
    SCHEMA_VERSION,
    AnswerRow,
    LabelRow,
    label_rows,
    label_schema,
)
from relabel.manifests.plan import PLAN_NAME, FileRef, Plan, ReusedRows, recipe_differences, recipe_digest
from relabel.manifests.records import sha256_bytes
from relabel.manifests.run_folder import RunFolder, Snapshot, open_planned
from relabel.manifests.run_labels import conformed, labeler_columns, own_columns, read_labels
from relabel.manifests.run_manifest import MANIFEST_NAME, engine_identity
from relabel.manifests.store import map_concurrent, read_if_there


@dataclass(frozen=True, slots=True)
class EarlierOutput:
    """An output of an earlier run, as it was found.

    Args:
        path: as the spec names it.
        manifest_sha256: None if the run is not finished.
    """

    path: str
    folder: RunFolder
    found: Snapshot
    manifest_sha256: str | None

    @property
    def plan(self) -> Plan:
        return self.folder.plan

    @property
    def is_readable(self) -> bool:
        """Whether this version has columns for all that its labels hold."""
        return bool(self.plan.parts.get("schema") == SCHEMA_VERSION)

    def taken(self, rows: int) -> ReusedRows:
        """What a receipt holds of rows that came from here."""
        engines = [engine_identity(facts) for facts in self.found.all_engines]
        return ReusedRows(
            output=self.path,
            fingerprint=self.plan.fingerprint,
            manifest_sha256=self.manifest_sha256,
            receipts_sha256=self.found.digest,
            rows=rows,
            engines=engines,
        )


def open_earlier(path: str, storage: Storage, what: str = "reuse") -> EarlierOutput:
    """Look at an earlier output: its plan, receipts and, if it is finished, manifest. Finished or not, committed labels
    count.

    Args:
        what: names the path, for errors.
    Raises:
        ManifestError: there is no plan, or a receipt is damaged.
    """
    no_run = f"{what}: {path} holds no {PLAN_NAME}, so it is not the output of a run. Name an earlier run's."
    if absent := absence_of(path):
        no_run = f"{what}: {absent}"
    folder = open_planned(path, storage, ManifestError(no_run))
    manifest = read_if_there(folder.store, MANIFEST_NAME)
    return EarlierOutput(path, folder, folder.snapshot(), None if manifest is None else sha256_bytes(manifest))


def why_nothing(earlier: EarlierOutput, parts: dict[str, Any]) -> dict[str, list[str]]:
    """Why no label of an output can be reused by a job with these parts: what differs, by part; empty if labels can
    be.
    """
    if not earlier.is_readable:
        return {"schema": [f"was {earlier.plan.parts.get('schema')}, is {SCHEMA_VERSION}"]}
    lacking = columns_lacking(earlier, labeler_columns(parts))
    if lacking:
        return {"label_columns": lacking}
    is_alike = recipe_digest(parts) in recipes_of(earlier.plan.parts)
    return {} if is_alike else recipe_differences(earlier.plan.parts, parts)


def columns_lacking(earlier: EarlierOutput, columns: Mapping[str, str]) -> list[str]:
    """Which of these columns, name → kind, an output's labels do not have: reused, they would be without a value
    there.
    """
    there = own_columns(earlier.plan.parts)
    return [name for name, kind in columns.items() if there.get(name) != kind]


def recipes_of(parts: dict[str, Any]) -> set[bytes]:
    """Digests of the recipes that labels of an output may have: one, or several where runs were merged all the same."""
    return {recipe_digest(parts), *(recipe_digest(inner) for inner in parts.get("merged_recipes", ()))}


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
        self._keys_R, first_R = np.unique(_whole_keys(keys_R2), return_index=True)
        self._values_R = values_R[first_R]

    def __len__(self) -> int:
        return len(self._keys_R)

    def find(self, keys_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which keys are known (bool [N]), and their values (uint64 [N], 0 where unknown)."""
        if not len(self):
            return np.zeros(len(keys_N2), dtype=bool), np.zeros(len(keys_N2), np.uint64)
        keys_N = _whole_keys(keys_N2)
        at_N = np.minimum(np.searchsorted(self._keys_R, keys_N), len(self) - 1)
        is_known_N = self._keys_R[at_N] == keys_N
        return is_known_N, np.where(is_known_N, self._values_R[at_N], 0)


def _whole_keys(keys_N2: np.ndarray) -> np.ndarray:
    """Both halves of each key as 16 bytes, which numpy sorts and compares."""
    return np.ascontiguousarray(keys_N2).view("S16").reshape(-1)


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
        self._tables: dict[int, pa.Table] = {}
        self._tables_bytes = 0
        keys: list[np.ndarray] = [np.zeros((0, 2), np.uint64)]
        values: list[np.ndarray] = [np.zeros(0, np.uint64)]
        for number, earlier in enumerate(self.outputs):
            is_alike = earlier.is_readable and recipe in recipes_of(earlier.plan.parts)
            if not is_alike or columns_lacking(earlier, columns):
                continue
            for file, keys_R2 in zip(earlier.found.labels, _key_columns(earlier), strict=True):
                rows_R = np.flatnonzero(keys_R2.any(axis=1)).astype(np.uint64)
                keys.append(keys_R2[rows_R])
                values.append(rows_R | np.uint64(len(self._files) << _ROW_BITS))
                self._files.append((number, file))
        all_keys = np.concatenate(keys)
        all_values = np.concatenate(values)
        del keys, values  # held twice while the index sorts, and not three times
        self._index = KeyIndex(all_keys, all_values)

    def find(self, keys: Sequence[bytes]) -> list[RowPlace | None]:
        """Where the label of each key lies; None for a key that is not known."""
        is_known_N, values_N = self._index.find(np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))
        file_N, row_N = np.divmod(values_N, 1 << _ROW_BITS)
        places: list[RowPlace | None] = []
        for is_known, file, row in zip(is_known_N.tolist(), file_N.tolist(), row_N.tolist(), strict=True):
            places.append(RowPlace(self._files[file][0], file, row) if is_known else None)
        return places

    def take(self, places: Sequence[RowPlace]) -> list[LabelRow]:
        """The labels at some places, as the runs before left them, with `origin` filled in: the run that asked each.

        Raises:
            ManifestError: a file is missing, or is not the one committed.
        """
        rows: dict[int, LabelRow] = {}
        for file in dict.fromkeys(place.file for place in places):
            wanted = [at for at, place in enumerate(places) if place.file == file]
            table = self._table(file).take(pa.array([places[at].row for at in wanted]))
            fingerprint = self.outputs[self._files[file][0]].plan.fingerprint
            for at, row in zip(wanted, label_rows(table), strict=True):
                rows[at] = row if row.origin else row._replace(origin=fingerprint)
        return [rows[at] for at in range(len(places))]

    def _table(self, file: int) -> pa.Table:
        table = self._tables.pop(file, None)
        if table is None:
            output, ref = self._files[file]
            table = conformed(read_labels(self.outputs[output].folder, ref), self._schema)
            self._tables_bytes += table.nbytes
        self._tables[file] = table  # the last one of those that are kept
        while self._tables_bytes > FILES_KEPT_BYTES and len(self._tables) > 1:
            oldest = next(iter(self._tables))
            self._tables_bytes -= self._tables.pop(oldest).nbytes
        return table


def _key_columns(earlier: EarlierOutput) -> Iterable[np.ndarray]:
    """The keys of each label file, uint64 [rows, 2]; zeros for a row without."""

    def read(file: FileRef) -> np.ndarray:
        column = earlier.folder.table(file, LABELS, ["key"], check_bytes=False)["key"]
        keys = [key or bytes(KEY_BYTES) for key in column.to_pylist()]
        return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)

    return map_concurrent(earlier.folder.store, read, earlier.found.labels)


def shared_answers(outputs: Sequence[EarlierOutput]) -> dict[bytes, AnswerRow]:
    """Answers that rows shared in earlier outputs, by key."""
    answers: dict[bytes, AnswerRow] = {}
    for earlier in outputs:
        if not earlier.is_readable:
            continue
        read = functools.partial(earlier.folder.table, schema=ANSWERS)
        for table in map_concurrent(earlier.folder.store, read, earlier.found.answers):
            for row in table.to_pylist():
                answers.setdefault(row["key"], {**row, "origin": row["origin"] or earlier.plan.fingerprint})
    return answers


def answer_of(row: AnswerRow) -> Answer:
    """A kept answer as an engine would give it; its request is nobody's."""
    distributions = {}
    for stored in row["distributions"]:
        distributions[stored["name"]] = Distribution(tuple(stored["probs"]), stored["outside_mass"])
    return Answer(
        -1,
        row["text"],
        row["finish"],
        distributions,
        prompt_tokens=row["prompt_tokens"],
        output_tokens=row["output_tokens"],
        flags=tuple(row["flags"]),
    )


def answer_row(key: bytes, stage: str, answer: Answer) -> AnswerRow:
    """An answer as it is kept."""
    return {
        "key": key,
        "stage": stage,
        "text": answer.text,
        "finish": answer.finish,
        "distributions": [
            {"name": name, "probs": list(distribution.probs), "outside_mass": distribution.outside_mass}
            for name, distribution in answer.distributions.items()
        ],
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "flags": list(answer.flags),
        "origin": None,
    }
