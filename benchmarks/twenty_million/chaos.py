"""What dies: workers, what started them, nodes and the head of a Ray cluster, the storage server, the disk's room.

Every event is a line of `events.jsonl`, with its time, so that a stop can be laid next to what came before it.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

MARK = "TWENTY_MILLION"
"""Variable that every process of the show has, with the show's folder."""
STOPPED_S = 25.0
"""How long a worker is stopped by SIGSTOP: longer than its lease."""
STORE_DOWN_S = 4.0
DISK_FULL_S = 5.0
WEIGHTS = {"SIGKILL": 56, "SIGTERM": 16, "SIGSTOP": 8, "starter": 4, "store": 7, "node": 8, "head": 1}
"""How often each kind comes, of a hundred; what is not there at the time is a SIGKILL of a worker."""


@dataclass
class Chaos:
    """Kills something every few seconds.

    Args:
        every_s: seconds between two kills.
        kill_starter: ends whatever started the workers, which the show then starts in another way.
        others: further kinds that can be killed now, by name (`store`, `node`, `head`, `disk`).
    """

    folder: Path
    every_s: float
    kill_starter: Callable[[], None]
    others: dict[str, Callable[[], None]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed + len(self.events()))
        self._next_s = time.monotonic() + self.every_s
        self._stopped: list[tuple[float, psutil.Process]] = []

    @property
    def _path(self) -> Path:
        return self.folder / "events.jsonl"

    def events(self) -> list[dict[str, Any]]:
        """All that happened, in this call of the show and in earlier ones."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def note(self, kind: str, **facts: Any) -> None:
        """Add an event."""
        with self._path.open("a") as file:
            file.write(json.dumps({"time": time.time(), "kind": kind, **facts}) + "\n")

    def tick(self) -> None:
        """Continue whom SIGSTOP has stopped for long enough, and kill what is due."""
        now = time.monotonic()
        for until, process in list(self._stopped):
            if now >= until:
                self._stopped.remove((until, process))
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
        if now < self._next_s:
            return
        self._next_s = now + self.every_s
        kind = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "starter":
            self.note(kind)
            self.kill_starter()
        elif kind in self.others:
            self.note(kind)
            self.others[kind]()
        else:
            self._kill_worker(kind if kind.startswith("SIG") else "SIGKILL")

    def _kill_worker(self, name: str) -> None:
        stopped = [process for _, process in self._stopped]
        workers = [process for process in workers_of(self.folder) if process not in stopped]
        if not workers:
            return
        worker = self._random.choice(workers)
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(getattr(signal, name))
            self.note(name, pid=worker.pid)
            if name == "SIGSTOP":
                self._stopped.append((time.monotonic() + STOPPED_S, worker))

    def end(self) -> None:
        """Leave nobody stopped."""
        for _, process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process of the show but this one and the storage server, which is read after the last kill."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get(MARK) == str(folder)
            if is_ours and process.pid != os.getpid() and process.name() != "weed":
                found.append(process)
    return found


def workers_of(folder: Path) -> list[psutil.Process]:
    """The processes that label: `relabel run` with a part of the shards."""
    workers = []
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "relabel" in words and "run" in words and "--shard" in words:
                workers.append(process)
    return workers
