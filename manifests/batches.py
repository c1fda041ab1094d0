"""Batches of asks that an engine hands to its provider: what is written down of each, so that a run that was killed
finds its own again and pays for none twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from relabel.manifests.records import read_in_threads


@read_in_threads
@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch, written before it is handed over, and once more with the provider's name for it.

    Args:
        name: drawn for it; the provider keeps it in the batch's metadata.
        asks: what names each of its asks, from what is asked and its seed alone.
        batch: the provider's own name; empty where nobody has written that it was handed over.
        created: when, in seconds since 1970; of two that hold an ask the later one is looked at first.
    """

    name: str
    asks: list[str]
    created: float
    batch: str = ""
    version: int = field(default=1)


class BatchRecords(Protocol):
    """Where records are kept."""

    def load(self) -> list[BatchRecord]:
        """All that are there, those of other workers too."""
        ...

    def keep(self, record: BatchRecord) -> None:
        """Make one durable, in place of an earlier one of its name."""
        ...


@runtime_checkable
class SendsBatches(Protocol):
    """An engine that may hand its asks over as batches."""

    def use_records(self, records: BatchRecords) -> None:
        """Called once, when it has started; without it asks are sent one by one."""
        ...
