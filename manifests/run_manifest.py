"""A run's `manifest.json` as a record: what ran, on what, and what became of every row; and which engines made a set of
labels, and whether they are one.

Labels of two engines, models or precisions in one set are two teachers under one name. So a run refuses to go on with
another engine than the one that began it, and outputs of different ones are not merged, unless the user allows it; then
the manifest states it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relabel.manifests import failpoints
from relabel.manifests.budgets import BudgetState
from relabel.manifests.plan import FileRef, ReusedRows, RunRows
from relabel.manifests.records import LEFT_OUT, plain, read_record, sealed_json
from relabel.manifests.store import Store, read_if_there

IDENTITY = ("family", "version", "model_digest", "dtype", "device")
"""What must agree. Of the device only its kind (`cuda`, `cpu`): which of a node's GPUs answered is no difference, a CPU
is one.
"""


def engine_identity(facts: Mapping[str, Any]) -> dict[str, str]:
    """What of an engine's facts (as receipts hold them) decides whether its labels may be mixed with others."""
    found = {name: str(facts.get(name, "")) for name in IDENTITY}
    return found | {"device": found["device"].partition(":")[0]}


def engines_of(asked: Iterable[Mapping[str, Any]], reused: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All engines that made a set of labels: those that were asked, and the identities of those whose labels were
    reused.
    """
    engines = [dict(facts) for facts in asked if facts]
    for identity in map(engine_identity, reused):
        if identity not in map(engine_identity, engines):
            engines.append(dict(identity))
    return engines


def engines_differ(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What differs between engines, a phrase each (`version: 0.26.0 and 0.32.0`); empty for one engine or none."""
    identities = [engine_identity(facts) for facts in engines if facts]
    differences = []
    for name in IDENTITY:
        values = sorted({identity[name] for identity in identities})
        if len(values) > 1:
            differences.append(f"{name}: {' and '.join(value or 'none' for value in values)}")
    return differences


MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class EngineMix:
    """Whether labels of different engines were allowed, and what differs between those that are there."""

    allowed: bool = False
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MergedSource:
    """An output that was merged, as it was found; its rows begin at `first_row_id` of the merged input."""

    output: str
    fingerprint: str
    manifest_sha256: str | None = None
    receipts_sha256: str | None = None
    first_row_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """The manifest of any output.

    Args:
        receipts_sha256, receipts_listing_sha256: of the receipts' contents, and of what a listing shows of them.
        engines: all that made the labels; `engines_asked` are those that were asked here.
        provenance: the plan's parts.
        merged_from: of a merged output.
        variables: of the spec's `${...}`, by name; of an output which was labelled or scored where it lies.
        budget: where the job had one.
    """

    version: int
    relabel: str = ""
    name: str = ""
    fingerprint: str
    plan_sha256: str | None = None
    receipts_sha256: str
    receipts_listing_sha256: str
    rows: RunRows
    quarantined_by_status: dict[str, int]
    conservation: str = ""
    failed_fraction: float = 0.0
    max_failed_fraction: float
    over_limit: bool
    stages: dict[str, dict[str, int]]
    worker_seconds: float
    engines: list[dict[str, Any]]
    engines_asked: list[dict[str, Any]]
    mixed: EngineMix = EngineMix()
    canary: list[dict[str, Any]] = field(default_factory=list)
    reused_from: list[ReusedRows]
    provenance: dict[str, Any] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)
    labels: list[FileRef]
    quarantine: list[FileRef]
    answers: list[FileRef]
    merged_from: list[MergedSource] | None = field(default=None, metadata=LEFT_OUT)
    cascade: CascadeAudit | None = field(default=None, metadata=LEFT_OUT)
    variables: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)
    budget: BudgetState | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class CascadeAudit:
    """Who labelled a cascade's rows, and how often the teacher disagreed with the cheap labels.

    Args:
        alpha: bound of the mean loss a query.
        threshold: of the cheap answer's confidence.
        queries: of the calibration.
        cheap, teacher, calibration, audited: rows; all but the first were asked of the teacher.
        loss: mean loss a query, by the audited pairs, with 95 % bounds; None where too few were audited.
    """

    alpha: float
    threshold: float
    queries: int
    cheap: int
    teacher: int
    calibration: int
    audited: int
    loss: float | None
    low: float | None
    high: float | None

    @property
    def is_alarm(self) -> bool:
        """Whether the loss has left its bound, and not by the chance of the draw alone."""
        return self.low is not None and self.low > self.alpha

    @property
    def text(self) -> str:
        """In a line."""
        rows = self.cheap + self.teacher + self.calibration + self.audited
        saved = saved_text(self.cheap, rows)
        if self.loss is None:
            return f"{saved}; too few pairs audited to say what that costs (alpha {self.alpha:g})"
        lost = f"loss {self.loss:.4f} ({self.low:.4f} to {self.high:.4f}) by {self.audited:,} audited pairs"
        verdict = "within it"
        if self.is_alarm:
            verdict = "ABOVE THE BOUND"
        elif self.loss > self.alpha:
            verdict = "above it by no more than the draw of these pairs explains; it bounds the mean of new queries"
        return f"{saved}; {lost}, alpha {self.alpha:g}: {verdict}"


def saved_text(cheap: int, rows: int) -> str:
    """How many rows of a cascade take a cheap label."""
    return f"{cheap:,} of {rows:,} rows ({cheap / max(1, rows):.0%}) without the teacher"


def load_manifest(store: Store) -> RunManifest | None:
    """The manifest of an output, or None if the run has not finished.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    data = read_if_there(store, MANIFEST_NAME)
    if data is None:
        return None
    where = f"{store.root}/{MANIFEST_NAME}"
    advice = "Move it away and run the job again."
    return read_record(
        RunManifest,
        data,
        where,
        "not a manifest",
        advice,
        version=MANIFEST_VERSION,
        check=_check_rows,
    )


def _check_rows(manifest: RunManifest) -> None:
    """Raise ValueError unless its rows add up, and its files hold them."""
    rows = manifest.rows
    labels = sum(file.rows for file in manifest.labels)
    quarantine = sum(file.rows for file in manifest.quarantine)
    if (labels, quarantine, labels + quarantine) != (rows.labelled + rows.reused, rows.quarantined, rows.in_):
        in_files = {"labels": labels, "quarantine": quarantine}
        raise ValueError(f"its rows {plain(rows)} do not add up, or not to those of its files, {in_files}")


def write_manifest(store: Store, manifest: RunManifest) -> None:
    """Make the manifest durable: the last file of a run, replaced after a retry."""
    failpoints.hit("before_manifest")
    store.put(MANIFEST_NAME, sealed_json(plain(manifest)))
    failpoints.hit("after_manifest")
