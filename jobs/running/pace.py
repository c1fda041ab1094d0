"""How fast a run goes: what begun chunks will need until they are done, and which of them a given time suffices for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from relabel.jobs.running.stops import DRAIN_S

LOOK_EVERY_S = 0.25
WINDOW_S = 60.0
"""How far back the rate looks: long enough for an engine that answers in bursts."""
SPANS_KEPT = 32
MARGIN = 1.25
"""A drain's expected time over the longest chunk seen: the last answers come from an engine that is no longer full."""


class Pace:
    """Times of a run, looked at a few times a second."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=SPANS_KEPT)
        self._looks: deque[tuple[float, int]] = deque()

    def chunk_done(self, seconds: float) -> None:
        """Note how long a chunk took from its first ask to its last row."""
        self._spans.append(seconds)

    def look(self, now_s: float, pairs: int) -> None:
        """Note how many pairs were done by now."""
        self._looks.append((now_s, pairs))
        while now_s - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()

    def drain_s(self, oldest_begun_s: float | None) -> float:
        """How long all begun chunks together are expected to need: as long as recent ones took, each being begun while
        others ran.

        Args:
            oldest_begun_s: since when the oldest open chunk is under way, on `time.perf_counter`; None if none is.
        """
        age = 0.0 if oldest_begun_s is None else time.perf_counter() - oldest_begun_s
        return max(DRAIN_S, MARGIN * max([age, *self._spans]))

    def pairs_per_s(self) -> float | None:
        """Pairs done a second of late, or None while there is nothing to tell it by."""
        if len(self._looks) < 2:
            return None
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None


def num_fitting(lefts: Iterable[int], pairs_per_s: float | None, seconds: float) -> int:
    """Of chunks with so many pairs left each, ascending, how many can be finished in a time. All of them where the rate
    is not known.
    """
    room = float("inf") if pairs_per_s is None else pairs_per_s * seconds
    count = 0
    for left in lefts:
        room -= left
        if room < 0:
            break
        count += 1
    return count
