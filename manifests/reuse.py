"""Labels and answers of earlier outputs, found by key: which rows need not be asked again."""

from __future__ import annotations

import functools
import unicodedata
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.asks import Answer, Ask, Distribution
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.labels import Pair, Reads
from relabel.manifests.manifest import Snapshot, engine_identity, manifest_sha256_of
from relabel.manifests.plan import PERSON_LABEL, PLAN_NAME, SETTLED, Plan, recipe_differences, recipe_digest
from relabel.manifests.receipts import FileRef, ReusedRows
from relabel.manifests.records import canonical_json
from relabel.manifests.run import RunFolder, conformed, labeler_columns, open_planned, own_columns, read_labels
from relabel.manifests.schemas import (
    ANSWERS,
    KEY_BYTES,
    LABELS,
    SCHEMA_VERSION,
    AnswerRow,
    LabelRow,
    label_rows,
    label_schema,
)
from relabel.manifests.store import map_concurrent

# ------------------------------------------------------------------------------
# What makes two labels the same label: the key of a row, and of an answer that the rows of a query share.
#
# A row's key is a digest of a *recipe* (`recipes.py`: all that a run settles once) and of the row's texts as far as the
# labeler reads them. Two rows with one key would get the same label, so the one can be taken for the other.
#
# The document and the context go in as they are, code point by code point: evidence is offsets into the document, and a
# document of other code points is another document even if it looks the same. The query goes in as Unicode NFC with
# each run of white space as one space and none at its ends: nothing points into it, and such differences are those
# between two exports of one log, not between two questions.
#
# An answer's key is a digest of the ask as it is rendered (templates and data, no normalisation) and of what the run
# settles for the engine, so that an edited second stage leaves the first stage's answers as they were.


_PERSON_ANSWER = b"relabel answer 1"


def stage_digests(asks: Sequence[Ask]) -> dict[str, str]:
    """A digest of each stage's ask, by stage: made of a labeler's `probe`, it says what a labeler
    asks without any row.
    """
    found = {}
    for ask in asks:
        digest = blake2b(digest_size=KEY_BYTES, person=_PERSON_ANSWER)
        _add_ask(digest, ask, ())
        found[ask.stage] = digest.hexdigest()
    return found


def normalise_query(text: str) -> str:
    """NFC, each run of white space one space, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


class LabelKeys:
    """Keys of rows under one recipe.

    Rows of a query follow each other, so what they share is digested once.

    Args:
        parts: a plan's parts.
        reads: what the labeler looks at; what it does not look at is no part of the key.
    """

    def __init__(self, parts: dict[str, Any], reads: Reads) -> None:
        self._base = blake2b(recipe_digest(parts), digest_size=KEY_BYTES, person=PERSON_LABEL)
        self._reads = reads
        self._last: tuple[str, tuple[str, ...], tuple[Pair, ...]] | None = None
        self._places: dict[int, int] = {}
        self._head = self._base

    def keys(self, pairs: Sequence[Pair]) -> list[bytes]:
        """16 bytes a pair, in order."""
        keys = []
        last, head, (_, reads_document, reads_columns, reads_siblings) = self._last, self._head, self._reads
        for row_id, _, query, _, document, context, columns, siblings in pairs:
            if last is None or query != last[0] or context != last[1] or siblings is not last[2]:
                last = query, context, siblings
                head = self._query_head(query, context, siblings)
            digest = head.copy()
            if reads_siblings:
                _add_text(digest, str(self._places.get(row_id)))
            for column in reads_columns:
                _add_text(digest, repr(columns.get(column.name) or None))
            if reads_document:
                digest.update(document.encode("utf-8", "surrogatepass"))
            keys.append(digest.digest())
        self._last, self._head = last, head
        return keys

    def _query_head(self, query: str, context: tuple[str, ...], siblings: tuple[Pair, ...]) -> blake2b:
        texts = (normalise_query(query), *(context if self._reads.context else ()))
        digest = self._base.copy()
        digest.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            _add_text(digest, text)
        if self._reads.siblings:
            self._places = {sibling.row_id: place for place, sibling in enumerate(siblings)}
            digest.update(len(siblings).to_bytes(8, "little"))
            for sibling in siblings:
                _add_text(digest, sibling.doc_id)
                _add_text(digest, sibling.document)
                for column in self._reads.columns:
                    _add_text(digest, repr(sibling.columns.get(column.name) or None))
        return digest


class AnswerKeys:
    """Keys of shared answers under one engine and model."""

    def __init__(self, parts: dict[str, Any]) -> None:
        settled = {**{key: parts[key] for key in SETTLED}, "engine": parts["engine"]}
        self._base = blake2b(canonical_json(settled), digest_size=KEY_BYTES, person=_PERSON_ANSWER)

    def key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """16 bytes for an ask as rendered, in which round of retries, for which sample and attempt. Whose rows share it
        is left out.
        """
        digest = self._base.copy()
        _add_ask(digest, ask, (round_number, sample, attempt))
        return digest.digest()


def _add_ask(digest: blake2b, ask: Ask, which: tuple[int, ...]) -> None:
    settled = (ask.stage, ask.max_tokens, ask.prefill, ask.sampling, ask.decisions, ask.format, *which)
    _add_text(digest, repr(settled))
    for message in ask.messages:
        _add_text(digest, repr((message.role, message.fields, len(message.parts))))
        for part in message.parts:
            _add_text(digest, part)
    _add_text(digest, "" if ask.fragment_source is None else "=" + ask.fragment_source)


def _add_text(digest: blake2b, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


# ------------------------------------------------------------------------------
# An earlier output whose labels a run may take over, and why it may not.


@dataclass(frozen=True, slots=True)
class EarlierOutput:
    """An output of an earlier run, as it was found.

    Args:
        path: as the spec names it.
        is_readable: its labels have keys, and what this version has columns for.
        manifest_sha256: None if the run is not finished.
    """

    path: str
    folder: RunFolder
    found: Snapshot
    manifest_sha256: str | None
    is_readable: bool

    @property
    def plan(self) -> Plan:
        return self.folder.plan

    def taken(self, rows: int) -> ReusedRows:
        """What a receipt says of rows that came from here."""
        engines = [engine_identity(facts) for facts in self.found.all_engines]
        return ReusedRows(self.path, self.plan.fingerprint, self.manifest_sha256, self.found.digest, rows, engines)


def open_earlier(path: str, storage: Storage) -> EarlierOutput:
    """Look at an earlier output: its plan, receipts and, if it is finished, manifest. Finished or not, committed labels
    count.

    Raises:
        ManifestError: there is no plan, or a receipt is damaged.
    """
    no_run = f"reuse: {path} holds no {PLAN_NAME}, so it is not the output of a run. Name an earlier run's."
    folder = open_planned(path, storage, ManifestError(no_run))
    manifest_sha256 = manifest_sha256_of(folder.store)
    return EarlierOutput(
        path, folder, folder.snapshot(), manifest_sha256, folder.plan.parts.get("schema") == SCHEMA_VERSION
    )


def why_nothing(earlier: EarlierOutput, parts: dict[str, Any]) -> dict[str, list[str]]:
    """Why no label of an output can be reused by a job with these parts: what differs, by part; empty if labels can
    be.
    """
    if not earlier.is_readable:
        return {"schema": [f"was {earlier.plan.parts.get('schema')}, is {SCHEMA_VERSION}"]}
    if lacking := columns_lacking(earlier, labeler_columns(parts)):
        return {"label_columns": lacking}
    if recipe_digest(parts) in recipes_of(earlier.plan.parts):
        return {}
    return recipe_differences(earlier.plan.parts, parts)


def columns_lacking(earlier: EarlierOutput, columns: Mapping[str, str]) -> list[str]:
    """Which of these columns, name → kind, an output's labels do not have: reused, they would be without a value
    there.
    """
    held = own_columns(earlier.plan.parts)
    return [name for name, kind in columns.items() if held.get(name) != kind]


def recipes_of(parts: dict[str, Any]) -> set[bytes]:
    """Digests of the recipes that labels of an output may have: one, or several where runs were merged all the same."""
    return {recipe_digest(parts), *(recipe_digest(inner) for inner in parts.get("merged_recipes", ()))}


# ------------------------------------------------------------------------------
# Labels of earlier outputs, found by key: which rows need not be asked again.
#
# Earlier outputs are opened read-only. Every file that a row is taken from has its sha256 compared with its receipt's.
# What is kept in memory is 24 bytes for each labelled row (a key of 16, a place of 8; twice that while they are sorted)
# and the last files that rows came from; shared answers (one for each query, not each row) are kept whole.
#
# Where a key occurs more than once, the output that is named first wins, and within an output the first row in its own
# order.


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

    @property
    def size_bytes(self) -> int:
        return int(self._keys_R.nbytes + self._values_R.nbytes)

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


# ------------------------------------------------------------------------------
# Answers of earlier outputs that rows of a query share, found by their key.


def shared_answers(outputs: Sequence[EarlierOutput]) -> dict[bytes, AnswerRow]:
    """Answers that rows shared in earlier outputs, by key."""
    found: dict[bytes, AnswerRow] = {}
    for earlier in outputs:
        if not earlier.is_readable:
            continue
        read = functools.partial(earlier.folder.table, schema=ANSWERS)
        for table in map_concurrent(earlier.folder.store, read, earlier.found.answers):
            for values in zip(*(column.to_pylist() for column in table.columns), strict=True):
                row = AnswerRow(*values)
                found.setdefault(row.key, row if row.origin else row._replace(origin=earlier.plan.fingerprint))
    return found


def answer_of(row: AnswerRow) -> Answer:
    """A kept answer as an engine would give it; its request is nobody's."""
    distributions = {one["name"]: Distribution(tuple(one["probs"]), one["outside_mass"]) for one in row.distributions}
    finish: Any = row.finish
    return Answer(-1, row.text, finish, distributions, row.prompt_tokens, row.output_tokens, 0, "", tuple(row.flags))


def answer_row(key: bytes, stage: str, answer: Answer) -> AnswerRow:
    """An answer as it is kept."""
    distributions = [
        {"name": name, "probs": list(found.probs), "outside_mass": found.outside_mass}
        for name, found in answer.distributions.items()
    ]
    return AnswerRow(
        key,
        stage,
        answer.text,
        answer.finish,
        distributions,
        answer.prompt_tokens,
        answer.output_tokens,
        list(answer.flags),
        None,
    )
