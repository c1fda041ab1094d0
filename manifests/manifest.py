"""A run's `manifest.json`, the sums of receipts that it records, and ranges and limits of what a run takes."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from relabel.manifests import failpoints
from relabel.manifests.asks import Charge
from relabel.manifests.receipts import Fates, FileRef, Receipt, ReusedRows, RunRows
from relabel.manifests.records import (
    LEFT_OUT,
    canonical_json,
    plain,
    read_record,
    sealed_json,
    sha256_bytes,
)
from relabel.manifests.store import RunStore, read_if_there

# ------------------------------------------------------------------------------
# Which engines made a set of labels, and whether they are one.
#
# Labels of two engines, models or precisions in one set are two teachers under one name. So a run refuses to go on with
# another engine than the one that began it, and outputs of different ones are not merged, unless the user says so; then
# the manifest says so too.


IDENTITY = ("family", "version", "model_digest", "dtype", "device")
"""What must agree. Of the device only its kind (`cuda`, `cpu`): which of a node's GPUs answered is no difference, a CPU
is one.
"""


def engine_identity(facts: Mapping[str, Any]) -> dict[str, str]:
    """What of an engine's facts (as receipts hold them) decides whether its labels may be mixed with others."""
    found = {name: str(facts.get(name, "")) for name in IDENTITY}
    return found | {"device": found["device"].partition(":")[0]}


def engines_of(asked: Iterable[Mapping[str, Any]], taken: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All engines that made a set of labels: those that were asked, and the identities of those whose labels were
    reused.
    """
    found = [dict(facts) for facts in asked if facts]
    seen = [engine_identity(facts) for facts in found]
    for identity in map(engine_identity, taken):
        if identity not in seen:
            seen.append(identity)
            found.append(dict(identity))
    return found


def engines_differ(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What differs between engines, a phrase each (`version: 0.26.0 and 0.32.0`); empty for one engine or none."""
    identities = [engine_identity(facts) for facts in engines if facts]
    remarks = []
    for name in IDENTITY:
        values = sorted({identity[name] for identity in identities})
        if len(values) > 1:
            remarks.append(f"{name}: {' and '.join(value or 'none' for value in values)}")
    return remarks


# ------------------------------------------------------------------------------
# What a run is expected to take, and what it may spend.


class Range(NamedTuple):
    """A number with its 95 % interval. Exact numbers have `low == value == high`."""

    low: float
    value: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Range:
        return cls(value, value, value)

    def __mul__(self, other: object) -> Range:  # a tuple's `*` repeats it, which no range wants
        if isinstance(other, Range):
            return Range(self.low * other.low, self.value * other.value, self.high * other.high)
        assert isinstance(other, int | float)
        return Range(self.low * other, self.value * other, self.high * other)

    def plus(self, other: Range) -> Range:
        """The sum, as if both missed in the same direction: wide rather than wrong."""
        return Range(self.low + other.low, self.value + other.value, self.high + other.high)

    def rounded(self, digits: int = 0) -> Range:
        return Range(*(round(one, digits) for one in self))


class Limits(NamedTuple):
    """`run.max_tokens` and `run.max_cost`; None is no limit."""

    max_tokens: int | None = None
    max_cost: float | None = None

    @property
    def is_set(self) -> bool:
        return self != (None, None)

    def hold(self, charge: Charge) -> bool:
        """Whether that much is within the limits."""
        return (self.max_tokens is None or charge.tokens <= self.max_tokens) and (
            self.max_cost is None or charge.cost <= self.max_cost
        )


@dataclass(frozen=True, slots=True)
class BudgetState:
    """How much of a budget is spent, by receipts; None means no limit."""

    max_tokens: int | None
    max_cost: float | None
    spent_tokens: int
    spent_cost: float

    @property
    def text(self) -> str:
        """For people, in a phrase."""
        parts = []
        if self.max_tokens is not None:
            parts.append(f"{self.spent_tokens:,} of {self.max_tokens:,} tokens spent")
        if self.max_cost is not None:
            parts.append(f"{self.spent_cost:,.4f} of {self.max_cost:,.4f} in money spent")
        return "; ".join(parts)


# ------------------------------------------------------------------------------
# A run's `manifest.json` as a record: what ran, on what, and what became of every row. Fields are in the order of
# the JSON.
#
# Readers rely on the fields without a default.


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
        saved = f"{self.cheap:,} of {rows:,} rows ({self.cheap / max(1, rows):.0%}) without the teacher"
        if self.loss is None:
            return f"{saved}; too few pairs audited to say what that costs (alpha {self.alpha:g})"
        lost = f"loss {self.loss:.4f} ({self.low:.4f} to {self.high:.4f}) by {self.audited:,} audited pairs"
        return f"{saved}; {lost}, alpha {self.alpha:g}" + (": ABOVE THE BOUND" if self.is_alarm else "")


@dataclass(frozen=True, kw_only=True)
class OwnRunManifest(RunManifest):
    """That of an output which was labelled or scored where it lies.

    Args:
        variables: of the spec's `${...}`, by name.
        budget: where the job had one.
    """

    variables: dict[str, str]
    budget: BudgetState | None = field(default=None, metadata=LEFT_OUT)


def load_manifest(store: RunStore) -> RunManifest | None:
    """The manifest of an output, or None if the run has not finished.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    data = read_if_there(store, MANIFEST_NAME)
    if data is None:
        return None
    where, advice = f"{store.root}/{MANIFEST_NAME}", "Move it away and run the job again."
    return read_record(RunManifest, data, where, "not a manifest", advice, version=MANIFEST_VERSION, check=_check_rows)


def _check_rows(manifest: RunManifest) -> None:
    """Raise ValueError unless its rows add up, and its files hold them."""
    rows = manifest.rows
    labels, quarantine = (sum(file.rows for file in files) for files in (manifest.labels, manifest.quarantine))
    if (labels, quarantine, labels + quarantine) != (rows.labelled + rows.reused, rows.quarantined, rows.in_):
        in_files = {"labels": labels, "quarantine": quarantine}
        raise ValueError(f"its rows {plain(rows)} do not add up, or not to those of its files, {in_files}")


def manifest_sha256_of(store: RunStore) -> str | None:
    """sha256 of an output's manifest, which is not read as one; None if there is none."""
    data = read_if_there(store, MANIFEST_NAME)
    return None if data is None else sha256_bytes(data)


def write_manifest(store: RunStore, manifest: RunManifest) -> None:
    """Make the manifest durable: the last file of a run, replaced after a retry."""
    failpoints.hit("before_manifest")
    store.put(MANIFEST_NAME, sealed_json(plain(manifest)))
    failpoints.hit("after_manifest")


# ------------------------------------------------------------------------------
# The sums over the receipts of a run, or of some of its shards, at one moment.


NAMES_AT_A_TIME = 4096


@dataclass(frozen=True, kw_only=True)
class Tally(Fates):
    """What a run's receipts add up to; rows in quarantine are counted by their latest status. `worker_seconds` is from
    each worker's first row to its last commit, added up.
    """

    chunks_done: int
    stages: dict[str, dict[str, int]]
    worker_seconds: float

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all stages."""
        stages = self.stages.values()
        return sum(one["prompt_tokens"] for one in stages), sum(one["output_tokens"] for one in stages)


class Snapshot(NamedTuple):
    """A run's receipts as one pass found them.

    Args:
        labels: label files of all attempts; together they hold each labelled row once.
        quarantine: quarantine files of each chunk's highest attempt.
        answers: files with answers that rows share.
        engines: the different engines that were asked here; `all_engines` are those that made the labels, reused or
            not.
        reused_from: outputs that rows were reused from, with the rows of each.
        digest: over every receipt's name and its files' digests; it changes with any of them.
        listing_digest: over every receipt's name and its etag in this store, which a listing shows without reading one.
        etags: those names and etags: which receipts all this is about.
    """

    tally: Tally
    labels: list[FileRef]
    quarantine: list[FileRef]
    answers: list[FileRef]
    engines: list[dict[str, Any]]
    reused_from: list[ReusedRows]
    digest: str
    listing_digest: str
    etags: Mapping[str, str]

    @property
    def all_engines(self) -> list[dict[str, Any]]:
        return engines_of(self.engines, [engine for source in self.reused_from for engine in source.engines])


def digest_of_listing(etags: Mapping[str, str]) -> str:
    """`Snapshot.listing_digest`: sha256 of the canonical JSON of sorted names and their etags, written in parts."""
    digest, left, before = hashlib.sha256(b"{"), iter(etags.items()), b""
    while some := dict(itertools.islice(left, NAMES_AT_A_TIME)):
        digest.update(before + canonical_json(some)[1:-1])
        before = b","
    digest.update(b"}")
    return digest.hexdigest()


def snapshot_of(manifest: RunManifest, num_chunks: int, etags: Mapping[str, str]) -> Snapshot:
    """What the receipts say by the word of a manifest that was made of them."""
    tally = Tally(
        manifest.rows.labelled,
        manifest.rows.reused,
        manifest.quarantined_by_status,
        chunks_done=num_chunks,
        stages=manifest.stages,
        worker_seconds=manifest.worker_seconds,
    )
    return Snapshot(
        tally,
        manifest.labels,
        manifest.quarantine,
        manifest.answers,
        manifest.engines_asked,
        manifest.reused_from,
        manifest.receipts_sha256,
        manifest.receipts_listing_sha256,
        etags,
    )


# ------------------------------------------------------------------------------
# Receipts added up, one chunk after the other, into a snapshot.


def sum_receipts(chunks: Iterable[Sequence[Receipt]], listing_digest: str, etags: Mapping[str, str]) -> Snapshot:
    """What receipts say together, as found under these names and etags.

    Args:
        chunks: of each all of its receipts, by attempt; the rows' states are those of the last.
    """
    num_chunks = labelled = reused = 0
    quarantined, stages = Counter[str](), dict[str, Counter[str]]()
    labels, quarantine, answers = list[FileRef](), list[FileRef](), list[FileRef]()
    engines, sources = dict[str, dict[str, Any]](), dict[str, ReusedRows]()
    spans: dict[str, tuple[str, str]] = {}
    """By worker: its first start and last commit."""
    digest = hashlib.sha256()
    for receipts in chunks:
        num_chunks += 1
        quarantined.update({status: count for status, count in receipts[-1].statuses.items() if status != "ok"})
        quarantine += [receipts[-1].quarantine] if receipts[-1].quarantine else []
        for receipt in receipts:
            labels += [receipt.labels] if receipt.labels else []
            answers += [receipt.answers] if receipt.answers else []
            files = [file.sha256 if file else "-" for file in (receipt.labels, receipt.quarantine)]
            files += [receipt.answers.sha256] if receipt.answers else []
            digest.update(f"{receipt.shard} {receipt.chunk} {receipt.attempt} {' '.join(files)}\n".encode())
            labelled += receipt.statuses.get("ok", 0) - receipt.rows_reused
            reused += receipt.rows_reused
            for source in receipt.reused:
                key = json.dumps(asdict(replace(source, rows=0)))
                sources[key] = replace(source, rows=source.rows + (sources[key].rows if key in sources else 0))
            first, last = spans.get(receipt.worker, (receipt.started, receipt.committed))
            spans[receipt.worker] = min(first, receipt.started), max(last, receipt.committed)
            if receipt.engine:
                engines.setdefault(json.dumps(receipt.engine, sort_keys=True), receipt.engine)
            for stage, counts in receipt.stages.items():
                stages.setdefault(stage, Counter()).update(counts)
    moments = ((datetime.fromisoformat(first), datetime.fromisoformat(last)) for first, last in spans.values())
    tally = Tally(
        labelled,
        reused,
        dict(quarantined),
        chunks_done=num_chunks,
        stages={stage: dict(counts) for stage, counts in stages.items()},
        worker_seconds=round(sum((last - first).total_seconds() for first, last in moments), 3),
    )
    return Snapshot(
        tally,
        labels,
        quarantine,
        answers,
        list(engines.values()),
        list(sources.values()),
        digest.hexdigest(),
        listing_digest,
        etags,
    )
