"""Receipts added up, one chunk after the other, into a snapshot."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from relabel.manifests.runs.receipts import FileRef, Receipt, ReusedRows
from relabel.manifests.runs.snapshots import Snapshot, Tally, seconds_between


class ReceiptCounts:
    """What the receipts so far come to."""

    def __init__(self) -> None:
        self._rows = self._chunks = self._labelled = self._reused = 0
        self._quarantined: Counter[str] = Counter()
        self._stages: dict[str, Counter[str]] = {}
        self._labels: list[FileRef] = []
        self._quarantine: list[FileRef] = []
        self._answers: list[FileRef] = []
        self._engines: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, ReusedRows] = {}
        self._spans: dict[str, tuple[str, str]] = {}
        """By worker: its first start and last commit."""
        self._in_budget = 0, 0
        """Prompt and output tokens."""
        self._digest = hashlib.sha256()

    def add_chunk(self, receipts: Sequence[Receipt], *, rows: int) -> None:
        """Count a chunk: all of its receipts, by attempt; its rows' states are those of the last.

        Args:
            rows: the chunk's, by the plan.
        """
        latest = receipts[-1]
        self._chunks += 1
        self._rows += rows
        self._quarantined.update({status: count for status, count in latest.statuses.items() if status != "ok"})
        self._quarantine += [latest.quarantine] if latest.quarantine else []
        for receipt in receipts:
            self._add_files(receipt)
            self._add_sources(receipt)
            self._add_work(receipt)

    def _add_files(self, receipt: Receipt) -> None:
        if receipt.labels:
            self._labels.append(receipt.labels)
            self._labelled += receipt.labels.rows - receipt.rows_reused
        self._answers += [receipt.answers] if receipt.answers else []
        files = [file.sha256 if file else "-" for file in (receipt.labels, receipt.quarantine)]
        files += [receipt.answers.sha256] if receipt.answers else []
        self._digest.update(f"{receipt.shard} {receipt.chunk} {receipt.attempt} {' '.join(files)}\n".encode())

    def _add_sources(self, receipt: Receipt) -> None:
        self._reused += receipt.rows_reused
        for source in receipt.reused:
            key = json.dumps(asdict(replace(source, rows=0)))
            known = self._sources[key].rows if key in self._sources else 0
            self._sources[key] = replace(source, rows=source.rows + known)

    def _add_work(self, receipt: Receipt) -> None:
        first, last = self._spans.get(receipt.worker, (receipt.started, receipt.committed))
        self._spans[receipt.worker] = min(first, receipt.started), max(last, receipt.committed)
        if receipt.engine:
            self._engines.setdefault(json.dumps(receipt.engine, sort_keys=True), receipt.engine)
        for stage, counts in receipt.stages.items():
            self._stages.setdefault(stage, Counter()).update(counts)
            if receipt.in_budget:
                prompt, output = self._in_budget
                self._in_budget = prompt + counts["prompt_tokens"], output + counts["output_tokens"]

    def snapshot(self, listing_digest: str, etags: Mapping[str, str]) -> Snapshot:
        """All that was counted, as found under these names and etags."""
        tally = Tally(
            self._rows,
            self._labelled,
            self._reused,
            dict(self._quarantined),
            self._chunks,
            {stage: dict(counts) for stage, counts in self._stages.items()},
            seconds_between(self._spans.values()),
            self._in_budget,
        )
        return Snapshot(
            tally,
            self._labels,
            self._quarantine,
            self._answers,
            list(self._engines.values()),
            list(self._sources.values()),
            self._digest.hexdigest(),
            listing_digest,
            etags,
        )
