"""A cascade: cheap judges label the pairs that they are sure of. How sure is sure enough, and how often the teacher
would have disagreed.

The threshold comes from conformal risk control with a query as the unit: rows of a query resemble each other, so that
rows can't be counted as independent, and a normal approximation over few queries breaks its bound.

Source: Angelopoulos et al., "Conformal Risk Control" (arXiv:2208.02814), theorem 1. With n exchangeable queries, losses
of at most B that do not grow with λ, and the smallest λ where n/(n+1) · mean loss + B/(n+1) ≤ α, the expected loss of
another query is at most α.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.labels import KEY_BYTES, Pair, ids_of, texts_of
from relabel.manifests.plan import FileRef, ReusedRows, recipe_differences, recipe_digest
from relabel.manifests.reuse import KeyIndex, recipes_of
from relabel.manifests.run_folder import RunFolder
from relabel.manifests.run_labels import file_schema, own_columns, read_labels
from relabel.manifests.run_manifest import CascadeAudit
from relabel.manifests.specs import CascadeSpec
from relabel.manifests.store import map_concurrent

if TYPE_CHECKING:
    from relabel.manifests.label_sets import LabelSet
    from relabel.manifests.metrics.comparison import Labelled

# Shape legend: N rows looked up, P pairs that the cheap judges answered, Q queries, K grades

_PERSON_CASCADE = b"relabel cascade"
_MOST_AUDITED = 0.2
"""Of the cheap pairs of a small input; a larger `audit` is the user's wish."""
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
        ConfigError: so few queries can't certify it; names how many can.
    """
    _, query_N, rows_Q = np.unique(query_N, return_inverse=True, return_counts=True)
    num_queries = len(rows_Q)
    needed = math.ceil(highest / alpha - 1e-9) - 1
    if num_queries < needed:
        least_alpha = math.ceil(1e4 * highest / (num_queries + 1)) / 1e4
        raise ConfigError(
            f"cascade: {num_queries} calibration queries can't certify alpha = {alpha:g}: at least {needed} that the "
            f"teacher and every cheap judge have answered are needed. Label more, or raise alpha to {least_alpha:g}."
        )
    order = np.argsort(-confidence_N, kind="stable")
    share_N = loss_N / rows_Q[query_N] / num_queries
    risk_N = np.cumsum(share_N[order])
    too_risky = np.flatnonzero(num_queries * risk_N + highest > alpha * (num_queries + 1) + 1e-9)
    if not len(too_risky):
        return 0.0
    return float(confidence_N[order][too_risky[0]])


def pair_keys(query_ids: Iterable[bytes], doc_ids: Iterable[bytes]) -> np.ndarray:
    """A digest of each pair's ids, uint64 [N, 2]; the first half is also its place in the draw of the audit."""
    digests = []
    for query, doc in zip(query_ids, doc_ids, strict=True):
        ids = len(query).to_bytes(8, "little") + query + doc
        digests.append(blake2b(ids, digest_size=KEY_BYTES, person=_PERSON_CASCADE).digest())
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
            index = KeyIndex(keys_of(judge), np.arange(len(judge.grades), dtype=np.uint64))
            has_P, at_P = index.find(keys_P2)
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
    if labelled.probs is None:
        return np.asarray(sure_NK)
    return np.where(np.isnan(labelled.probs), sure_NK, labelled.probs)


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
        if not self.cheap_share:
            return (
                f"cascade: {self.queries:,} calibration queries are too few, or these judges too often wrong, for any "
                f"cheap label at alpha {self.alpha:g}: the teacher is asked about all rows"
            )
        return (
            f"cascade: {self.queries:,} calibration queries certify alpha {self.alpha:g} for cheap labels with a "
            f"confidence above {self.threshold:g}, {self.cheap_share:.0%} of their pairs; of such pairs the teacher is "
            f"asked about {self.audit:.1%} all the same, as an audit"
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
        parts: of the plan, which describe the teacher.
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
    if spec.alpha >= loss_KK.max():
        raise ConfigError(
            f"{where}: `cascade.alpha` is {spec.alpha:g}, and no label costs more than {loss_KK.max():g}, so that all "
            "cheap labels would do. Write 5 % as 0.05."
        )
    cheap_sets = []
    for path in spec.cheap:
        key = f"{where}: `cascade.cheap`"
        advice = "`relabel score` writes the labels of a student, `relabel run` those of another judge."
        cheap_sets.append(open_answers(path, storage, grades, key, advice))
    cheap = CheapAnswers([labelled for _, labelled in cheap_sets], loss_KK)
    teacher, answered = open_answers(
        spec.calibration,
        storage,
        grades,
        f"{where}: `cascade.calibration`",
        "Label a sample of the queries with the teacher: `relabel run` with this job without `cascade`.",
    )
    if teacher.plan is not None:
        _check_teacher(teacher.plan.parts, parts, f"{where}: `cascade.calibration` {spec.calibration}")
    answered_keys = keys_of(answered)
    place_N = cheap.places(answered_keys)
    both_N = np.flatnonzero(place_N >= 0)
    place_N = place_N[both_N]
    grade_N = answered.grades[both_N]
    query_N = answered.query_ids.dictionary_encode().indices.to_numpy()[both_N]
    confidence_N = cheap.confidence_P[place_N]
    try:
        threshold = certified_threshold(
            query_N,
            confidence_N,
            loss_KK[grade_N, cheap.grade_P[place_N]],
            alpha=spec.alpha,
            highest=loss_KK.max(),
        )
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    cheap_share = float((confidence_N > threshold).mean())
    audit = _audited_share(spec, rows * cheap_share)
    certificate = Certificate(
        alpha=spec.alpha,
        loss=loss_KK.tolist(),
        queries=len(np.unique(query_N)),
        pairs=len(both_N),
        threshold=threshold,
        cheap_share=round(cheap_share, _DIGITS),
        audit=round(audit, _DIGITS),
        cheap=cheap.digest,
        calibration=hashlib.sha256(answered_keys.tobytes() + answered.grades.tobytes()).hexdigest(),
    )
    judges = []
    for path, (labels, _) in zip(spec.cheap, cheap_sets, strict=True):
        fingerprint = cheap.digest if labels.plan is None else labels.plan.fingerprint
        judges.append(
            ReusedRows(
                output=path,
                fingerprint=fingerprint,
                manifest_sha256=None,
                receipts_sha256=cheap.digest,
                rows=0,
            )
        )
    return Cascade(
        certificate=certificate,
        cheap=cheap,
        judges=judges,
        origin=judges[0].fingerprint if len(judges) == 1 else cheap.digest,
        queries=frozenset(texts_of(answered.query_ids.unique())),
    )


def _audited_share(spec: CascadeSpec, cheap_rows: float) -> float:
    """Share of the cheap pairs that the teacher is asked about: `spec.audit_pairs` of them or more, and of a small
    input no more than `_MOST_AUDITED`, so that most of what the cheap judges save stays saved. The bound does not rest
    on it: a pair that is audited loses nothing, and the threshold is certified as if none were.
    """
    enough = spec.audit_pairs / max(1.0, cheap_rows)
    return max(spec.audit, min(enough, _MOST_AUDITED))


def open_answers(path: str, storage: Storage, grades: int, key: str, advice: str) -> tuple[LabelSet, Labelled]:
    """Graded pairs of a run or a label file, by their ids.

    Args:
        key: what names the path, for errors.
        advice: what writes such a file, for errors.
    Raises:
        ConfigError: they are on another scale.
        InputError, ManifestError: as `open_labels`.
    """
    from relabel.manifests.label_sets import gather, open_labels  # with the metrics, which other jobs do without

    try:
        labels = open_labels(path, storage, has_options=False)
    except InputError as exc:
        raise InputError(f"{key}: {exc} {advice}") from exc
    if labels.grades not in (None, grades):
        raise ConfigError(f"{key}: {path} has {labels.grades} grades, and the job's labeler {grades}")
    return labels, gather(labels.parts(), grades=grades, where=path)


def _check_teacher(was: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """The calibration holds the answers of the teacher that the run asks, and of no other."""
    if "answered_by" in own_columns(was):
        raise ConfigError(f"{what} is a cascade itself: its cheap labels are not the teacher's. Name a plain run.")
    if recipe_digest(now) not in recipes_of(was):
        differing = "; ".join(f"{part} ({', '.join(names)})" for part, names in recipe_differences(was, now).items())
        raise ConfigError(f"{what} was labelled otherwise than this job labels: {differing}. Label it with this job's.")


def audit_of(folder: RunFolder, labels: Sequence[FileRef]) -> CascadeAudit | None:
    """Who labelled the rows of some label files, and the mean loss a query of the cheap labels, with its 95 %
    interval over queries; None for a run without a cascade. Queries of the calibration are left out.
    """
    certificate = folder.plan.parts.get("cascade")
    if certificate is None:
        return None
    names = ["query_id", "grade", "answered_by", "cheap_grade"]
    tables = map_concurrent(folder.store, lambda file: read_labels(folder, file, names, check_bytes=False), labels)
    schema = pa.schema([field for field in file_schema(folder.plan.parts) if field.name in names])
    return audit_of_rows(pa.concat_tables([schema.empty_table(), *tables]), certificate)


def audit_of_rows(table: pa.Table, certificate: dict[str, Any]) -> CascadeAudit:
    """As `audit_of`.

    Args:
        table: columns `query_id`, `grade`, `answered_by` and `cheap_grade`.
        certificate: a `Certificate` as the plan holds it.
    """
    from relabel.manifests.metrics.metric import share_bounds  # most runs have no cascade

    loss_KK = np.array(certificate["loss"])
    highest = loss_KK.max()
    query_N = table["query_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    by_N = np.array(table["answered_by"].to_pylist(), dtype=object)
    is_audit_N = by_N == "audit"
    rows_Q = np.bincount(query_N)
    has_cheap_Q = np.bincount(query_N, (by_N == "cheap") | is_audit_N)
    is_held_out_Q = np.bincount(query_N, by_N == "calibration") == 0
    audited = pa.array(np.flatnonzero(is_audit_N))
    teacher_A = table["grade"].take(audited).to_numpy().astype(np.int64)
    cheap_A = table["cheap_grade"].take(audited).to_numpy().astype(np.int64)
    query_A = query_N[is_audit_N]
    lost_Q = np.bincount(query_A, loss_KK[teacher_A, cheap_A] / highest, len(rows_Q)) / rows_Q
    drawn_Q = np.bincount(query_A, minlength=len(rows_Q)) / rows_Q
    low, high = share_bounds(lost_Q, drawn_Q)
    mean = lost_Q.sum() / drawn_Q.sum() if len(query_A) else math.nan
    scale = math.nan
    if is_held_out_Q.any():
        scale = highest * (has_cheap_Q / rows_Q)[is_held_out_Q].mean()
    scaled = [round(float(share * scale), _DIGITS) for share in (mean, float(low), float(high))]
    loss, loss_low, loss_high = (None, None, None) if any(map(math.isnan, scaled)) else scaled
    counts = Counter(by_N.tolist())
    return CascadeAudit(
        alpha=certificate["alpha"],
        threshold=certificate["threshold"],
        queries=certificate["queries"],
        cheap=counts["cheap"],
        teacher=counts["teacher"],
        calibration=counts["calibration"],
        audited=counts["audit"],
        loss=loss,
        low=loss_low,
        high=loss_high,
    )
