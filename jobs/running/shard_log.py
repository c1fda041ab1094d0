"""A log file per shard: `logs/shard-00003.log`, appended by whoever holds the shard."""

from __future__ import annotations

import logging
import threading
import time

from relabel.manifests.errors import RelabelError
from relabel.manifests.storage.run_store_ports import RunStore

logger = logging.getLogger(__name__)


class ShardLogs:
    """Log files of the shards under way; none stays open between lines, since many shards may be.

    A line is never synced: a log is for people, receipts are the truth. So a log that can't be written (a full disk)
    ends no run; it is said once.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._guard = threading.Lock()
        self._has_failed = False

    def close(self) -> None:
        """Have the store write out what it held back."""
        try:
            self._store.close()
        except (OSError, RelabelError) as exc:
            logger.warning("%s/logs: can't be written (%s); going on without logs", self._store.root, exc)

    def write(self, shard: int, *lines: str, is_end: bool = False) -> None:
        """Append lines, each with the time before it; `is_end`: the last ones of this worker about the shard."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # a reason may hold what a server wrote
        text = "".join(f"{stamp} {' '.join(line.splitlines())}\n" for line in lines)
        with self._guard:
            if self._has_failed:
                return
            try:
                self._store.log(f"logs/shard-{shard:05d}.log", text, is_end=is_end)
            except (OSError, RelabelError) as exc:
                self._has_failed = True
                why = getattr(exc, "strerror", None) or exc
                logger.warning("%s/logs: can't be written (%s); going on without logs", self._store.root, why)
