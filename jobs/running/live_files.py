"""What each worker says of itself while it runs, for `relabel status --live`: a small file in `live/`, written every
few seconds and gone with its worker.

Nothing depends on it: no label, no commit and no proof. One that can't be written is warned of once; one that a killed
worker left says by its age that nobody writes it any more, and goes when the run is finished.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from relabel.jobs.running.counts import Progress
from relabel.jobs.running.live import MOST, Live
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import RelabelError
from relabel.manifests.records import checked, plain, version_of
from relabel.manifests.secrets.redaction import redacted_values
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there

logger = logging.getLogger(__name__)

FOLDER = "live"
VERSION = 1
WRITE_EVERY_S = 5.0
STALE_S = 60.0
"""A file that was not written for so long is nobody's any more, or its engine has been at one step since."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What one worker has done since its engine was up.

    Args:
        written: UTC, by the worker's clock.
        seconds: since then; pairs: that it asked, committed or not; tokens: prompt tokens that no cache held, and
            output tokens, of all answers.
    """

    version: int
    worker: str
    written: str
    seconds: float
    pairs: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    statuses: dict[str, int]
    live: Live

    @property
    def age_s(self) -> float:
        """Seconds since it was written, as far as the clocks of two machines agree."""
        return max(0.0, self._since_s)

    @property
    def _since_s(self) -> float:
        return time.time() - datetime.fromisoformat(self.written).timestamp()

    @property
    def is_possible(self) -> bool:
        """Whether a worker can have written it: no time that is none, no number that is none or below nothing."""
        counts = self.seconds, self.pairs, self.requests, self.prompt_tokens, self.output_tokens
        return self.age_s >= 0 and all(
            0 <= one < MOST for one in (*counts, *self.live.work, *self.live.counts, *self.statuses.values())
        )

    @property
    def is_stale(self) -> bool:
        return self.age_s > STALE_S

    @property
    def tells_nothing(self) -> bool:
        """Whether it proves nobody at work: stale, or so far ahead that its worker may be long gone."""
        return abs(self._since_s) > STALE_S


class LiveFile:
    """One worker's file, written by a thread of its own, so that no store keeps the engine waiting."""

    def __init__(self, store: RunStore, worker: str, progress: Progress) -> None:
        self._store = store
        self._worker = worker
        self._progress = progress
        self._next_s = time.perf_counter() + WRITE_EVERY_S
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @property
    def _name(self) -> str:
        return f"{FOLDER}/{self._worker}.json"

    def update(self) -> None:
        """Write if it is time to; may be called as often as one likes."""
        now_s = time.perf_counter()
        if now_s < self._next_s or (self._writing is not None and not self._writing.done()):
            return
        self._next_s = now_s + WRITE_EVERY_S
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="live")
        data = readable_json(redacted_values(plain(state_of(self._worker, self._progress))))
        self._writing = self._thread.submit(self._write, data)

    def _write(self, data: bytes) -> None:
        try:
            self._store.put(self._name, data)
        except (OSError, RelabelError) as exc:
            logger.warning("%s/%s: can't be written (%s); going on without", self._store.root, self._name, exc)
            self._next_s = float("inf")

    def close(self) -> None:
        """Take the file away, if there is one."""
        if self._thread is not None:
            self._thread.shutdown()
            with contextlib.suppress(OSError, RelabelError):
                self._store.remove(self._name)


def state_of(worker: str, progress: Progress) -> WorkerState:
    """A worker's counts as they stand."""
    return WorkerState(
        VERSION,
        worker,
        datetime.now(UTC).isoformat(timespec="seconds"),
        round(time.perf_counter() - progress.started_s, 1),
        progress.pairs,
        progress.requests,
        progress.prompt_tokens - progress.cached_tokens,
        progress.output_tokens,
        dict(progress.statuses),
        progress.live.in_short(),
    )


def live_states(store: RunStore) -> list[WorkerState]:
    """What workers have written, by name; files of other versions, damaged, or gone by now, are left out."""
    found = []
    for name in store.names(FOLDER):
        data = read_if_there(store, name)
        with contextlib.suppress(ValueError, OverflowError):
            held = json.loads(data or b"{}")
            if version_of(held) == VERSION and (state := checked(WorkerState, held)).is_possible:
                found.append(state)
    return found
