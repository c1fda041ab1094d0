"""A log file per shard: `logs/shard-00003.log`, appended by whoever holds the shard."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TextIO

from manifests.store import LocalStore

logger = logging.getLogger(__name__)


class ShardLogs:
    """Open log files of the shards under way.

    Lines are flushed at once and never synced: a log is for people, receipts are the truth. So a log that can't be written (a full disk)
    ends no run; it is said once.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._files: dict[int, TextIO] = {}
        self._guard = threading.Lock()
        self._has_failed = False

    def write(self, shard: int, line: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._guard:
            if self._has_failed:
                return
            try:
                file = self._files.get(shard) or self._open(shard)
                file.write(f"{stamp} {line}\n".replace("\r", " "))
                file.flush()
            except OSError as exc:
                self._has_failed = True
                logger.warning("%s/logs: can't be written (%s); going on without logs", self._store.root, exc.strerror)

    def close(self, shard: int | None = None) -> None:
        """Close one log, or all."""
        with self._guard:
            for number in list(self._files) if shard is None else [shard]:
                file = self._files.pop(number, None)
                if file is not None:
                    with contextlib.suppress(OSError):  # what could not be flushed was told by `write`
                        file.close()

    def _open(self, shard: int) -> TextIO:
        path = self._store.path(f"logs/shard-{shard:05d}.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self._files[shard] = path.open("a", encoding="utf-8", errors="replace")
        return file
