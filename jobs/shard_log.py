"""A log file per shard: `logs/shard-00003.log`, appended by whoever holds the shard."""

from __future__ import annotations

import logging
import threading
import time

from manifests.store import LocalStore

logger = logging.getLogger(__name__)


class ShardLogs:
    """Log files of the shards under way; none stays open between lines, since many shards may be.

    A line is never synced: a log is for people, receipts are the truth. So a log that can't be written (a full disk) ends no run; it is
    said once.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._guard = threading.Lock()
        self._has_failed = False

    def write(self, shard: int, *lines: str) -> None:
        """Append lines, each with the time before it."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = "".join(f"{stamp} {line}\n".replace("\r", " ") for line in lines)
        with self._guard:
            if self._has_failed:
                return
            try:
                path = self._store.path(f"logs/shard-{shard:05d}.log")
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8", errors="replace") as file:
                    file.write(text)
            except OSError as exc:
                self._has_failed = True
                logger.warning("%s/logs: can't be written (%s); going on without logs", self._store.root, exc.strerror)
