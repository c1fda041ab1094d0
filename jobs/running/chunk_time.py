"""How long an engine works on one chunk: what a killed worker loses at most, beside what was in flight.

Known from the receipts of earlier work, this output's or those it reuses; a plan made before any run has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from relabel.manifests.runs.receipts import Receipt
from relabel.manifests.runs.run_folder import RunFolder

MAX_CHUNK_S = 30.0
"""Engine time that a kill may cost a worker."""
RECEIPTS_READ = 500
"""Enough for a rate, few enough that looking stays cheap on a run of a million chunks."""


class ChunkTime(NamedTuple):
    """Engine time of a chunk.

    Args:
        pairs_per_s: what one worker has done so far.
        seconds: for a full chunk at that rate.
        fitting_rows: `run.chunk_rows` that keeps a chunk within `MAX_CHUNK_S`, if this one does not.
    """

    pairs_per_s: float
    seconds: float
    fitting_rows: int | None

    @property
    def warning(self) -> str | None:
        """What to say of chunks that are too large."""
        if self.fitting_rows is None:
            return None
        return (
            f"a chunk takes about {self.seconds:,.0f} s of engine time ({self.pairs_per_s:,.3g} pairs/s a worker so "
            f"far), and that is what a kill costs; run.chunk_rows: {self.fitting_rows} would keep it under "
            f"{MAX_CHUNK_S:.0f} s. Chunks are cut once: plan into another output"
        )


def chunk_time(folders: Iterable[RunFolder], chunk_rows: int) -> ChunkTime | None:
    """Engine time of a chunk by the first of some outputs that tells a rate; None if none does."""
    for folder in folders:
        receipts = itertools.chain.from_iterable(folder.receipts_by_shard())
        rate = pairs_per_s(itertools.islice(receipts, RECEIPTS_READ))
        if rate is not None:
            seconds = chunk_rows / rate
            return ChunkTime(rate, seconds, max(1, int(MAX_CHUNK_S * rate)) if seconds > MAX_CHUNK_S else None)
    return None


def pairs_per_s(receipts: Iterable[Receipt]) -> float | None:
    """Pairs asked a second by a worker, over the time from its first row to its last commit; chunks of a worker
    overlap.
    """
    spans: dict[str, tuple[float, float, int]] = {}
    for receipt in receipts:
        asked = receipt.rows - receipt.rows_reused
        if asked:
            started, committed = (
                datetime.fromisoformat(text).timestamp() for text in (receipt.started, receipt.committed)
            )
            first, last, rows = spans.get(receipt.worker, (started, committed, 0))
            spans[receipt.worker] = min(first, started), max(last, committed), rows + asked
    seconds = sum(last - first for first, last, _ in spans.values())
    return sum(rows for _, _, rows in spans.values()) / seconds if seconds > 0 else None
