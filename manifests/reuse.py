"""Rows that the teacher need not be asked: labels and answers of earlier outputs, found by key, and cheap labels that
are sure enough (a cascade).
"""

import functools
import hashlib
import itertools
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.asks import Answer, Ask, Distribution
from relabel.manifests.errors import ConfigError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.label_sets import LabelSet, gather, open_labels
from relabel.manifests.labels import (
    ANSWERS,
    KEY_BYTES,
    LABELS,
    SCHEMA_VERSION,
    AnswerRow,
    LabelRow,
    Pair,
    Reads,
    ids_of,
    label_rows,
    label_schema,
    texts_of,
)
from relabel.manifests.metrics.comparison import Labelled
from relabel.manifests.metrics.metric import share_bounds
from relabel.manifests.plan import (
    PERSON_LABEL,
    PLAN_NAME,
    SETTLED,
    FileRef,
    Plan,
    ReusedRows,
    recipe_differences,
    recipe_digest,
)
from relabel.manifests.records import canonical_json, sha256_bytes
from relabel.manifests.run import (
    MANIFEST_NAME,
    CascadeAudit,
    RunFolder,
    Snapshot,
    conformed,
    engine_identity,
    file_schema,
    labeler_columns,
    open_planned,
    own_columns,
    read_labels,
)
from relabel.manifests.specs import CascadeSpec
from relabel.manifests.store import map_concurrent, read_if_there

# ------------------------------------------------------------------------------
# What makes two labels the same label: the key of a row, and of an answer that the rows of a query share.
#
# A row's key is a digest of a *recipe* (all that a run settles once) and of the row's texts as far as the
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

    def keys(self, pairs: Sequence[Pair]) -> list[bytes]:
        """16 bytes a pair, in order."""
        keys = []
        _, reads_document, reads_columns, reads_siblings = self._reads
        queries = itertools.groupby(pairs, key=lambda pair: (pair.query, pair.context, id(pair.siblings)))
        for _, rows in queries:
            head: blake2b | None = None
            for row_id, _, query, _, document, context, columns, siblings, _ in rows:
                if head is None:
                    head = self._query_head(query, context, siblings)
                    places = {sibling.row_id: place for place, sibling in enumerate(siblings)}
                digest = head.copy()
                if reads_siblings:
                    _add_text(digest, str(places.get(row_id)))
                for column in reads_columns:
                    _add_text(digest, repr(columns.get(column.name) or None))
                if reads_document:
                    digest.update(document.encode("utf-8", "surrogatepass"))
                keys.append(digest.digest())
        return keys

    def _query_head(self, query: str, context: tuple[str, ...], siblings: tuple[Pair, ...]) -> blake2b:
        texts = (normalise_query(query), *(context if self._reads.context else ()))
        digest = self._base.copy()
        digest.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            _add_text(digest, text)
        if self._reads.siblings:
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
        """What a receipt says of rows that came from here."""
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
        whole = np.concatenate(keys), np.concatenate(values)
        del keys, values  # held twice while the index sorts, and not three times
        self._index = KeyIndex(*whole)

    def find(self, keys: Sequence[bytes]) -> list[RowPlace | None]:
        """Where the label of each key lies; None for a key that is not known."""
        is_known_N, values_N = self._index.find(np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))
        values = zip(is_known_N.tolist(), *(one.tolist() for one in np.divmod(values_N, 1 << _ROW_BITS)), strict=True)
        return [RowPlace(self._files[file][0], file, row) if is_known else None for is_known, file, row in values]

    def take(self, places: Sequence[RowPlace]) -> list[LabelRow]:
        """The labels at some places, as the runs before left them, with `origin` filled in: the run that asked each.

        Raises:
            ManifestError: a file is missing, or is not the one committed.
        """
        rows: dict[int, LabelRow] = {}
        for file in dict.fromkeys(place.file for place in places):
            wanted = [at for at, place in enumerate(places) if place.file == file]
            taken = self._table(file).take(pa.array([places[at].row for at in wanted]))
            fingerprint = self.outputs[self._files[file][0]].plan.fingerprint
            for at, row in zip(wanted, label_rows(taken), strict=True):
                rows[at] = row if row.origin else row._replace(origin=fingerprint)
        return [rows[at] for at in range(len(places))]

    def _table(self, file: int) -> pa.Table:
        held = self._tables.pop(file, None)
        if held is None:
            output, ref = self._files[file]
            held = conformed(read_labels(self.outputs[output].folder, ref), self._schema)
            self._tables_bytes += held.nbytes
        self._tables[file] = held  # the last one of those that are kept
        while self._tables_bytes > FILES_KEPT_BYTES and len(self._tables) > 1:
            self._tables_bytes -= self._tables.pop(next(iter(self._tables))).nbytes
        return held


def _key_columns(earlier: EarlierOutput) -> Iterable[np.ndarray]:
    """The keys of each label file, uint64 [rows, 2]; zeros for a row without."""

    def read(file: FileRef) -> np.ndarray:
        column = earlier.folder.table(file, LABELS, ["key"], check_bytes=False)["key"]
        return np.frombuffer(b"".join(one or bytes(KEY_BYTES) for one in column.to_pylist()), np.uint64).reshape(-1, 2)

    return map_concurrent(earlier.folder.store, read, earlier.found.labels)


# ------------------------------------------------------------------------------
# Answers of earlier outputs that rows of a query share, found by their key.


def shared_answers(outputs: Sequence[EarlierOutput]) -> dict[bytes, AnswerRow]:
    """Answers that rows shared in earlier outputs, by key."""
    found: dict[bytes, AnswerRow] = {}
    for earlier in (one for one in outputs if one.is_readable):
        read = functools.partial(earlier.folder.table, schema=ANSWERS)
        for table in map_concurrent(earlier.folder.store, read, earlier.found.answers):
            for row in table.to_pylist():
                found.setdefault(row["key"], {**row, "origin": row["origin"] or earlier.plan.fingerprint})
    return found


def answer_of(row: AnswerRow) -> Answer:
    """A kept answer as an engine would give it; its request is nobody's."""
    held = {one["name"]: Distribution(tuple(one["probs"]), one["outside_mass"]) for one in row["distributions"]}
    tokens = row["prompt_tokens"], row["output_tokens"]
    return Answer(
        -1,
        row["text"],
        row["finish"],
        held,
        *tokens,
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
            {"name": name, "probs": list(found.probs), "outside_mass": found.outside_mass}
            for name, found in answer.distributions.items()
        ],
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "flags": list(answer.flags),
        "origin": None,
    }


# ------------------------------------------------------------------------------
# A cascade: cheap judges label the pairs that they are sure of. How sure is sure enough, and how often the teacher
# would have disagreed.
#
# The threshold comes from conformal risk control with a query as the unit: rows of a query resemble each other, so that
# rows can't be counted as independent, and a normal approximation over few queries breaks its bound.
#
# Source: Angelopoulos et al., "Conformal Risk Control" (arXiv:2208.02814), theorem 1. With n exchangeable queries,
# losses of at most B that do not grow with λ, and the smallest λ where n/(n+1) · mean loss + B/(n+1) ≤ α, the expected
# loss of another query is at most α.


# Shape legend: N rows looked up, P pairs that the cheap judges answered, Q queries, K grades

_PERSON_CASCADE = b"relabel cascade"
_DIGITS = 6
"""Of a confidence: two machines may differ in what comes after them, and a tie must be one."""


def certified_threshold(
    query_N: np.ndarray, confidence_N: np.ndarray, loss_N: np.ndarray, *, alpha: float, highest: float
) -> float:
    """The least λ for which the cheap answers with a confidence above it lose at most `alpha` a query, in expectation.

    Args:
        query_N: int64, of which query each row is.
        loss_N: of the cheap answer; a pair that the teacher answers loses nothing.
        alpha: bound of a query's mean loss.
        highest: B.
    Raises:
        ConfigError: so few queries can't certify it; says how many can.
    """
    _, query_N, rows_Q = np.unique(query_N, return_inverse=True, return_counts=True)
    num_queries = len(rows_Q)
    needed = math.ceil(highest / alpha - 1e-9) - 1
    if num_queries < needed:
        raise ConfigError(
            f"cascade: {num_queries} calibration queries can't certify alpha = {alpha:g}: at least {needed} that the "
            f"teacher and every cheap judge have answered are needed. Label more, or raise alpha to "
            f"{math.ceil(1e4 * highest / (num_queries + 1)) / 1e4:g}."
        )
    order = np.argsort(-confidence_N, kind="stable")
    risk_N = np.cumsum((loss_N / rows_Q[query_N] / num_queries)[order])
    above = np.flatnonzero(num_queries * risk_N + highest > alpha * (num_queries + 1) + 1e-9)
    return float(confidence_N[order][above[0]]) if len(above) else 0.0


def pair_keys(query_ids: Iterable[bytes], doc_ids: Iterable[bytes]) -> np.ndarray:
    """A digest of each pair's ids, uint64 [N, 2]; the first half is also its place in the draw of the audit."""
    pairs = zip(query_ids, doc_ids, strict=True)
    digests = (
        blake2b(len(query).to_bytes(8, "little") + query + doc, digest_size=KEY_BYTES, person=_PERSON_CASCADE).digest()
        for query, doc in pairs
    )
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def keys_of(labelled: Labelled) -> np.ndarray:
    """`pair_keys` of graded pairs."""
    return pair_keys(labelled.query_ids.to_pylist(), labelled.doc_ids.to_pylist())


class CheapAnswers:
    """What the cheap judges answer together: the grade with the least expected loss under the mean of their
    distributions. A grade without a distribution counts as a sure one. A pair that one of them lacks has no answer.

    Args:
        loss_KK: by the teacher's grade and the one that is given.
    """

    def __init__(self, judges: Sequence[Labelled], loss_KK: np.ndarray) -> None:
        grades = len(loss_KK)
        keys_P2 = keys_of(judges[0])
        is_known_P = np.ones(len(judges[0].grades), dtype=bool)
        total_PK = _distributions(judges[0], grades)
        for judge in judges[1:]:
            has_P, at_P = KeyIndex(keys_of(judge), np.arange(len(judge.grades), dtype=np.uint64)).find(keys_P2)
            is_known_P &= has_P
            total_PK[has_P] += _distributions(judge, grades)[at_P[has_P]]
        keys_P2 = keys_P2[is_known_P]
        self.probs_PK = (total_PK[is_known_P] / len(judges)).astype(np.float32)
        # added up grade by grade: a product of matrices may round otherwise on another machine
        expected_PK = sum(self.probs_PK[:, [grade]].astype(np.float64) * loss_KK[grade] for grade in range(grades))
        self.grade_P = np.argmin(expected_PK, axis=1)
        self.confidence_P = np.round(1 - expected_PK.min(axis=1) / loss_KK.max(), _DIGITS)
        self.digest = hashlib.sha256(keys_P2.tobytes() + self.probs_PK.tobytes()).hexdigest()
        self._index = KeyIndex(keys_P2, np.arange(len(keys_P2), dtype=np.uint64))

    def places(self, keys_N2: np.ndarray) -> np.ndarray:
        """Where each pair's answer is: int64, -1 for none."""
        is_known_N, at_N = self._index.find(keys_N2)
        return np.where(is_known_N, at_N.astype(np.int64), -1)


def _distributions(labelled: Labelled, grades: int) -> np.ndarray:
    sure_NK = np.eye(grades)[labelled.grades]
    return sure_NK if labelled.probs is None else np.where(np.isnan(labelled.probs), sure_NK, labelled.probs)


@dataclass(frozen=True, slots=True)
class Certificate:
    """How the threshold was found; part of the plan.

    Args:
        loss: by the teacher's grade and the one that is given.
        queries, pairs: that the teacher and the cheap judges answered.
        threshold: the cheap answer is taken where its confidence is above it.
        cheap_share: of the pairs of the calibration.
        audit: share of the pairs that the teacher is asked though the cheap answer is sure enough.
        cheap, calibration: digests of the answers.
    """

    alpha: float
    loss: list[list[float]]
    queries: int
    pairs: int
    threshold: float
    cheap_share: float
    audit: float
    cheap: str
    calibration: str

    @property
    def text(self) -> str:
        """In a sentence."""
        return (
            f"cascade: {self.queries:,} calibration queries certify alpha {self.alpha:g} for cheap labels with a "
            f"confidence above {self.threshold:g}, {self.cheap_share:.0%} of their pairs; {self.audit:.1%} of the "
            "others are audited"
        )


@dataclass(frozen=True)
class Cascade:
    """The cheap answers of a run, and which of them are taken.

    Args:
        origin: of a label that is taken: the fingerprint of the judge's run, or a digest of the answers of several.
        queries: ids of the calibration's.
    """

    certificate: Certificate
    cheap: CheapAnswers
    judges: list[ReusedRows]
    origin: str
    queries: frozenset[str]

    def places(self, pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
        """Where the cheap answer of each pair is, -1 for none; and who labels it, by name."""
        query_ids = ids_of(pair.query_id for pair in pairs)
        doc_ids = ids_of(pair.doc_id for pair in pairs)
        keys_N2 = pair_keys(query_ids.to_pylist(), doc_ids.to_pylist())
        place_N = self.cheap.places(keys_N2)
        is_sure_N = (place_N >= 0) & (self.cheap.confidence_P[place_N] > self.certificate.threshold)
        is_held_out_N = np.array([pair.query_id not in self.queries for pair in pairs])
        is_drawn_N = is_held_out_N & (keys_N2[:, 0] / 2.0**64 < self.certificate.audit)
        teacher_N = np.where(is_held_out_N, np.where(is_sure_N, "audit", "teacher"), "calibration")
        return place_N, np.where(is_sure_N & ~is_drawn_N, "cheap", teacher_N)


def open_cascade(spec: CascadeSpec, storage: Storage, parts: dict[str, Any], *, rows: int, where: str) -> Cascade:
    """Read the cheap judges' answers and the calibration, and certify a threshold.

    Args:
        parts: of the plan, which say what the teacher is.
        rows: of the input.
        where: to look for the job, for errors.
    Raises:
        ConfigError: the calibration is another teacher's or too small, or the grades are on another scale.
        InputError, ManifestError: as `open_labels`.
    """
    grades = parts["labeler"]["grades"]
    loss_KK = np.array(spec.loss or 1 - np.eye(grades), dtype=np.float64)
    if loss_KK.shape != (grades, grades):
        raise ConfigError(f"{where}: `cascade.loss` has {len(loss_KK)} rows; {grades} grades want {grades} of {grades}")
    sets = [open_answers(path, storage, grades, f"{where}: `cascade.cheap`") for path in spec.cheap]
    cheap = CheapAnswers([labels for _, labels in sets], loss_KK)
    teacher, answered = open_answers(spec.calibration, storage, grades, f"{where}: `cascade.calibration`")
    if teacher.plan is not None:
        _check_teacher(teacher.plan.parts, parts, f"{where}: `cascade.calibration` {spec.calibration}")
    place_N = cheap.places(keys_of(answered))
    both_N = np.flatnonzero(place_N >= 0)
    place_N = place_N[both_N]
    grade_N = answered.grades[both_N]
    query_N = answered.query_ids.dictionary_encode().indices.to_numpy()
    confidence_N = cheap.confidence_P[place_N]
    try:
        threshold = certified_threshold(
            query_N[both_N],
            confidence_N,
            loss_KK[grade_N, cheap.grade_P[place_N]],
            alpha=spec.alpha,
            highest=loss_KK.max(),
        )
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    share = float((confidence_N > threshold).mean())
    certificate = Certificate(
        alpha=spec.alpha,
        loss=loss_KK.tolist(),
        queries=len(np.unique(query_N[both_N])),
        pairs=len(both_N),
        threshold=threshold,
        cheap_share=round(share, _DIGITS),
        audit=round(min(1.0, max(spec.audit, spec.audit_pairs / max(1.0, rows * share))), _DIGITS),
        cheap=cheap.digest,
        calibration=hashlib.sha256(keys_of(answered).tobytes() + answered.grades.tobytes()).hexdigest(),
    )
    prints = [cheap.digest if found.plan is None else found.plan.fingerprint for found, _ in sets]
    judges = [
        ReusedRows(
            path,
            mark,
            None,
            cheap.digest,
            0,
        )
        for path, mark in zip(spec.cheap, prints, strict=True)
    ]
    origin = prints[0] if len(prints) == 1 else cheap.digest
    return Cascade(
        certificate,
        cheap,
        judges,
        origin,
        frozenset(texts_of(answered.query_ids.unique())),
    )


def open_answers(path: str, storage: Storage, grades: int, key: str) -> tuple[LabelSet, Labelled]:
    """Graded pairs of a run or a label file, by their ids.

    Args:
        key: what names the path, for errors.
    Raises:
        ConfigError: they are on another scale.
        InputError, ManifestError: as `open_labels`.
    """
    found = open_labels(path, storage)
    if found.grades not in (None, grades):
        raise ConfigError(f"{key}: {path} has {found.grades} grades, and the job's labeler {grades}")
    return found, gather(found.parts(), grades=grades, where=path)


def _check_teacher(was: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """The calibration holds the answers of the teacher that the run asks, and of no other."""
    if "answered_by" in own_columns(was):
        raise ConfigError(f"{what} is a cascade itself: its cheap labels are not the teacher's. Name a plain run.")
    if recipe_digest(now) not in recipes_of(was):
        differing = "; ".join(f"{part} ({', '.join(names)})" for part, names in recipe_differences(was, now).items())
        raise ConfigError(f"{what} was labelled otherwise than this job labels: {differing}. Label it with this job's.")


# ------------------------------------------------------------------------------
# The audit: pairs that a cheap answer was sure of, and that the teacher was asked all the same.


def audit_of(folder: RunFolder, labels: Sequence[FileRef]) -> CascadeAudit | None:
    """Who labelled the rows of some label files, and the mean loss a query of the cheap labels, with its 95 %
    interval over queries; None for a run without a cascade. Queries of the calibration are left out.
    """
    held = folder.plan.parts.get("cascade")
    if held is None:
        return None
    names = ["query_id", "grade", "answered_by", "cheap_grade"]
    tables = map_concurrent(folder.store, lambda file: read_labels(folder, file, names, check_bytes=False), labels)
    schema = pa.schema([field for field in file_schema(folder.plan.parts) if field.name in names])
    return audit_of_rows(pa.concat_tables([schema.empty_table(), *tables]), held)


def audit_of_rows(table: pa.Table, held: dict[str, Any]) -> CascadeAudit:
    """As `audit_of`.

    Args:
        table: columns `query_id`, `grade`, `answered_by` and `cheap_grade`.
        held: a `Certificate` as the plan holds it.
    """
    loss_KK = np.array(held["loss"])
    highest = loss_KK.max()
    query_N = table["query_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    by_N = np.array(table["answered_by"].to_pylist(), dtype=object)
    is_audit_N = by_N == "audit"
    rows_Q = np.bincount(query_N)
    has_cheap_Q = np.bincount(query_N, (by_N == "cheap") | is_audit_N)
    is_held_out_Q = np.bincount(query_N, by_N == "calibration") == 0
    audited = pa.array(np.flatnonzero(is_audit_N))
    teacher_A, cheap_A = (table[name].take(audited).to_numpy().astype(np.int64) for name in ("grade", "cheap_grade"))
    query_A = query_N[is_audit_N]
    lost_Q = np.bincount(query_A, loss_KK[teacher_A, cheap_A] / highest, len(rows_Q)) / rows_Q
    drawn_Q = np.bincount(query_A, minlength=len(rows_Q)) / rows_Q
    low, high = share_bounds(lost_Q, drawn_Q)
    scale = highest * (has_cheap_Q / rows_Q)[is_held_out_Q].mean() if is_held_out_Q.any() else math.nan
    counts = {one["values"]: one["counts"] for one in pc.value_counts(table["answered_by"]).to_pylist()}
    found = [lost_Q.sum() / drawn_Q.sum() if len(query_A) else math.nan, float(low), float(high)]
    is_known = not any(math.isnan(one * scale) for one in found)
    figures = [round(float(one * scale), _DIGITS) if is_known else None for one in found]
    return CascadeAudit(
        held["alpha"],
        held["threshold"],
        held["queries"],
        *(counts.get(name, 0) for name in ("cheap", "teacher", "calibration", "audit")),
        *figures,
    )
