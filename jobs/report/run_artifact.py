"""A run's output as a report reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from relabel.jobs.running.conclusions import AskedInVain
from relabel.jobs.running.counts import ASKED, asked_for
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Reads
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.receipts import Receipt
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.runs.run_inputs import RunInput, open_run_input
from relabel.manifests.runs.run_manifest import RunManifest, load_manifest
from relabel.manifests.runs.snapshots import Snapshot
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.run_store_ports import RunStore


class Commit(NamedTuple):
    """What a report needs of a receipt, for a run may have a hundred thousand."""

    started: str
    committed: str
    worker: str
    asked: int
    quarantined: int
    output_tokens: int
    attempt: int


@dataclass
class RunArtifact:
    """A label run, or a student's scores, which lie in the same way."""

    path: str
    store: RunStore
    storage: Storage
    plan: Plan
    name: str
    manifest_bytes: bytes | None

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.store, self.plan)

    @cached_property
    def manifest(self) -> RunManifest | None:
        """Its manifest; None where it is not finished."""
        return load_manifest(self.store)

    @cached_property
    def found(self) -> Snapshot:
        """What its receipts say."""
        return self.folder.snapshot()

    @cached_property
    def is_finished(self) -> bool:
        return self.manifest is not None and self.manifest.receipts_sha256 == self.found.digest

    @property
    def is_scored(self) -> bool:
        """Whether a student made the labels."""
        return self.plan.facts.kind == "student"

    @property
    def grades(self) -> int:
        return self.plan.facts.labeler.grades

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec, as far as the manifest tells it."""
        return {} if self.manifest is None else self.manifest.spec

    def spec_part(self, *names: str) -> dict[str, Any]:
        """An object inside the spec, by the names on the way to it; empty where there is none, or something else is
        there.
        """
        found: Any = self.spec
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @cached_property
    def commits(self) -> list[Commit]:
        """Every receipt, by the time of its commit."""
        return sorted((_commit(receipt) for receipt in self._receipts()), key=lambda commit: commit.committed)

    @cached_property
    def in_vain(self) -> AskedInVain:
        """What was asked for chunks that another worker had committed first."""
        asked = asked_for(self.folder.lost_receipts())
        return AskedInVain(**{name: asked[name] for name in ASKED})

    def _receipts(self) -> Iterator[Receipt]:
        for shard in range(len(self.plan.shards)):
            yield from itertools.chain.from_iterable(self.folder.chunk_receipts(shard))

    def texts(self, reads: Reads = QUERY_AND_DOCUMENT) -> RunInput:
        """The run's own input, to read texts from.

        Raises:
            InputError, ManifestError: it is not there any more, or not what was labelled.
        """
        return open_run_input(self.path, self.store, self.plan, self.storage, reads=reads)


def _commit(receipt: Receipt) -> Commit:
    quarantined = receipt.quarantine.rows if receipt.quarantine else 0
    output = sum(counts.get("output_tokens", 0) for counts in receipt.stages.values())
    return Commit(
        receipt.started,
        receipt.committed,
        receipt.worker,
        receipt.rows - receipt.rows_reused,
        quarantined,
        output,
        receipt.attempt,
    )
