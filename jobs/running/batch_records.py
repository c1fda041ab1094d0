"""Records of the batches that an engine handed over, in the output's `batches/`, for the run that goes on after a kill
or a stop. They go when the run is finished.
"""

from __future__ import annotations

from relabel.manifests.batches import BatchRecord
from relabel.manifests.digests import readable_json
from relabel.manifests.records import plain, read_record
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.run_store_ports import RunStore

FOLDER = "batches"


class StoredBatches:
    """The records of one output. Those whose provider's name is known never change, and are read once."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._known: dict[str, BatchRecord] = {}
        store.sweep(FOLDER)

    def load(self) -> list[BatchRecord]:
        """All that are there.

        Raises:
            ManifestError: one is damaged.
        """
        names = self._store.names(FOLDER)
        new = [name for name in names if name not in self._known]
        found = dict(zip(new, map_concurrent(self._store, self._read, new), strict=True))
        self._known |= {name: record for name, record in found.items() if record.batch}
        return [self._known.get(name) or found[name] for name in names]

    def keep(self, record: BatchRecord) -> None:
        """Write one."""
        self._store.put(f"{FOLDER}/{record.name}.json", readable_json(plain(record)))

    def _read(self, name: str) -> BatchRecord:
        advice = "Move it away; what it holds is asked and paid for again then."
        where = f"{self._store.root}/{name}"
        return read_record(BatchRecord, self._store.read(name), where, "not a batch's record", advice)
