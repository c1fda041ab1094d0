"""What the receipts of a run come to, all or those of some shards, at one moment."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from relabel.manifests.digests import canonical_json
from relabel.manifests.runs.engine_identity import engines_of
from relabel.manifests.runs.receipts import FileRef, ReusedRows
from relabel.manifests.runs.run_manifest import RunManifest

NAMES_AT_A_TIME = 4096


class Tally(NamedTuple):
    """What a run's receipts add up to.

    `labelled` counts labels that were asked, `reused` those reused; `quarantined` counts rows by their latest
    status, without `ok`. `worker_seconds` is from each worker's first row to its last commit, added up. `in_budget` are
    prompt and output tokens that the ledger of a budget has counted.
    """

    rows: int
    labelled: int
    reused: int
    quarantined: dict[str, int]
    chunks_done: int
    stages: dict[str, dict[str, int]]
    worker_seconds: float = 0.0
    in_budget: tuple[int, int] = (0, 0)

    @property
    def num_quarantined(self) -> int:
        return sum(self.quarantined.values())

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all stages."""
        stages = self.stages.values()
        return sum(one["prompt_tokens"] for one in stages), sum(one["output_tokens"] for one in stages)

    @property
    def tokens_beyond_budget(self) -> tuple[int, int]:
        """Likewise, of calls that had no budget."""
        (prompt, output), counted = self.tokens, self.in_budget
        return prompt - counted[0], output - counted[1]


class Snapshot(NamedTuple):
    """A run's receipts as one pass found them.

    Args:
        labels: label files of all attempts; together they hold each labelled row once.
        quarantine: quarantine files of each chunk's highest attempt.
        answers: files with answers that rows share.
        engines: the different engines that were asked here; `all_engines` are those behind the labels, reused or
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


def seconds_between(spans: Iterable[tuple[str, str]]) -> float:
    return round(
        sum((datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds() for first, last in spans), 3
    )


def snapshot_of(manifest: RunManifest, num_chunks: int, etags: Mapping[str, str]) -> Snapshot | None:
    """What the receipts say by the word of a manifest that was made of them; None if an earlier relabel left a part
    out.
    """
    rows, engines = manifest.rows, manifest.engines if manifest.engines_asked is None else manifest.engines_asked
    if (
        manifest.receipts_listing_sha256 is None
        or manifest.quarantined_by_status is None
        or manifest.stages is None
        or manifest.worker_seconds is None
        or manifest.answers is None
        or manifest.reused_from is None
        or engines is None
    ):
        return None
    tally = Tally(
        rows.in_,
        rows.labelled,
        rows.reused,
        manifest.quarantined_by_status,
        num_chunks,
        manifest.stages,
        manifest.worker_seconds,
        manifest.tokens_in_budget or (0, 0),
    )
    return Snapshot(
        tally,
        manifest.labels,
        manifest.quarantine,
        manifest.answers,
        engines,
        manifest.reused_from,
        manifest.receipts_sha256,
        manifest.receipts_listing_sha256,
        etags,
    )
