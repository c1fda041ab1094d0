"""Records of the batches that an engine handed over, in the output's `batches/`, for the run that goes on after a kill
or a stop. They go when the run is finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from relabel.manifests.records import BatchRecord, plain, read_record, readable_json
from relabel.manifests.secrets import counted
from relabel.manifests.store import Store, map_concurrent

FOLDER = "batches"


class StoredBatches:
    """The records of one output. Of those whose provider's name is known nothing changes that an engine needs: they are
    read once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = dict[str, BatchRecord]()
        store.sweep(FOLDER)

    def load(self) -> list[BatchRecord]:
        """All that are there.

        Raises:
            ManifestError: one is damaged.
        """
        names = self._store.names(FOLDER)
        new = [name for name in names if name not in self._known]
        records = dict(zip(new, _read(self._store, new), strict=True))
        records |= self._known
        self._known |= {name: record for name, record in records.items() if record.batch}
        return [records[name] for name in names]

    def keep(self, record: BatchRecord) -> None:
        """Write one."""
        self._store.put(f"{FOLDER}/{record.name}.json", readable_json(plain(record)))


def _read(store: Store, names: Sequence[str]) -> list[BatchRecord]:
    """
    Raises:
        ManifestError: one is damaged.
    """

    def read(name: str) -> BatchRecord:
        return read_record(
            BatchRecord,
            store.read(name),
            f"{store.root}/{name}",
            "not a batch's record",
            "Move it away; what it holds is asked and paid for again then.",
        )

    return list(map_concurrent(store, read, names))


@dataclass(frozen=True, slots=True)
class BatchesOut:
    """Batches whose results have not been read, and their asks."""

    batches: int
    asks: int

    @property
    def text(self) -> str:
        """What becomes of them."""
        which = "is with the provider; the next run looks for it"
        if self.batches > 1:
            which = "are with the provider; the next run looks for them"
        batches = "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        return f"{batches} of {counted(self.asks, 'ask')} {which}"


def batches_out(store: Store) -> BatchesOut | None:
    """What a provider still has in hand; None if it is nothing.

    Raises:
        ManifestError: a record is damaged.
    """
    records = [record for record in _read(store, store.names(FOLDER)) if record.is_out]
    if not records:
        return None
    return BatchesOut(len(records), sum(len(record.asks) for record in records))
