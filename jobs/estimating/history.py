"""What alike runs asked and took, from the receipts of this output and of earlier ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relabel.jobs.planning.open_runs import OpenRun
from relabel.manifests.asks import Ask
from relabel.manifests.runs.earlier_outputs import EarlierOutput
from relabel.manifests.runs.ranges import Range, ratio_range
from relabel.manifests.runs.receipts import Receipt

RECEIPTS_LOOKED_AT = 512
"""Chunks that ratios are taken from: more would narrow an interval that other things make wide."""


@dataclass(frozen=True, slots=True)
class History:
    """Receipts to learn from, and where they lie."""

    basis: str
    receipts: list[Receipt]

    def ratio(
        self, size: Callable[[Receipt], float], amount: Callable[[Receipt], float], num_to_come: int
    ) -> Range | None:
        asked = [receipt for receipt in self.receipts if asked_in(receipt)]
        return ratio_range([size(one) for one in asked], [amount(one) for one in asked], num_to_come=num_to_come)

    def seconds_a_row(self, num_to_come: int) -> Range | None:
        """Seconds of a worker for each row asked: from commit to commit, since chunks overlap."""
        sizes, seconds = [], []
        by_worker: dict[str, list[Receipt]] = {}
        for receipt in self.receipts:
            by_worker.setdefault(receipt.worker, []).append(receipt)
        for receipts in by_worker.values():
            receipts.sort(key=lambda receipt: receipt.committed)
            before = min(receipt.started for receipt in receipts)
            for receipt in receipts:
                sizes.append(float(asked_in(receipt)))
                seconds.append(
                    (datetime.fromisoformat(receipt.committed) - datetime.fromisoformat(before)).total_seconds()
                )
                before = receipt.committed
        return ratio_range(sizes, seconds, num_to_come=num_to_come)


def history_of(opened: OpenRun, outputs: list[EarlierOutput]) -> History | None:
    """Receipts of the first output whose tokens and times say something of this job's."""
    for basis, folder in [
        ("this output's receipts", opened.folder),
        *((f"receipts of {one.path}", one.folder) for one in outputs),
    ]:
        if _is_alike(folder.plan.parts, opened.plan.parts):
            receipts = (receipts[0] for receipts in folder.receipts_by_shard() if receipts[0].stages)
            found = list(itertools.islice(receipts, RECEIPTS_LOOKED_AT))
            if found:
                return History(f"{basis} ({len(found):,} chunks)", found)
    return None


def _is_alike(was: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(was[part] == now[part] for part in ("model",)) and all(
        was[part]["name"] == now[part]["name"] for part in ("labeler", "engine")
    )


def asked_in(receipt: Receipt) -> int:
    return receipt.rows - receipt.rows_reused


def stage_ratio(history: History | None, stage: str, amount: str, size: str, num_to_come: int) -> Range | None:
    if history is None:
        return None
    nothing: dict[str, int] = {}
    return history.ratio(
        lambda receipt: receipt.stages.get(stage, nothing).get(size, 0),
        lambda receipt: receipt.stages.get(stage, nothing).get(amount, 0),
        num_to_come,
    )


def asks_a_row(ask: Ask, history: History | None, num_chunks: int) -> Range | None:
    """As earlier chunks had them, repeated attempts included."""
    if history is None:
        return None
    return history.ratio(asked_in, lambda receipt: receipt.stages.get(ask.stage, {}).get("asks", 0), num_chunks)
