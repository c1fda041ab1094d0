"""A log file per shard: `logs/shard-00003.log`, appended by whoever holds the shard."""

from __future__ import annotations

import threading
import time
from typing import TextIO

from manifests.store import LocalStore


class ShardLogs:
    """Open log files of the shards under way. Lines are flushed at once and never synced: a log is for people, receipts are the truth."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._files: dict[int, TextIO] = {}
        self._guard = threading.Lock()

    def write(self, shard: int, line: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._guard:
            file = self._files.get(shard)
            if file is None:
                path = self._store.path(f"logs/shard-{shard:05d}.log")
                path.parent.mkdir(parents=True, exist_ok=True)
                file = self._files[shard] = path.open("a", encoding="utf-8", errors="replace")
            file.write(f"{stamp} {line!s}\n".replace("\r", " "))
            file.flush()

    def close(self, shard: int | None = None) -> None:
        """Close one log, or all."""
        with self._guard:
            for number in list(self._files) if shard is None else [shard]:
                file = self._files.pop(number, None)
                if file is not None:
                    file.close()
