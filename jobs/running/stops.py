"""A run's wish to end: who asked for it, and until when begun chunks may still commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from relabel.jobs.running.deadlines import Deadline

StartedT = TypeVar("StartedT")

DRAIN_S = 20.0
"""How long begun chunks may take to finish once a stop was asked for."""
END_S = 2.0
"""Left before a deadline for what comes after the last answer: commits under way, the manifest, the engine's end."""


class StartStopped(BaseException):
    """Raised in the main thread while an engine starts, when a stop was asked for: there is nothing to drain.

    Like KeyboardInterrupt it is not an error, so that nothing that catches errors swallows it.
    """


@dataclass(slots=True, eq=False)
class Stop:
    """Whether the run was asked to end: `drain` finishes begun chunks, `now` drops them.

    Args:
        deadline: when the run must have ended; `mind` turns it into a drain early enough.
    """

    deadline: Deadline | None = None
    reason: str | None = None
    deadline_s: float = math.inf
    """When what is not finished is dropped, on `time.perf_counter`."""
    is_now: bool = False
    is_starting: bool = False
    """Whether an engine is starting right now, so that a signal ends that at once."""

    def drain(self, reason: str) -> None:
        """Begin no chunk any more; those begun get `DRAIN_S`, or what a deadline leaves. The first reason is kept."""
        self._drain(reason, DRAIN_S)

    def now(self) -> None:
        """Drop what is not committed."""
        self.is_now = True
        self.drain("stopped by hand")

    def mind(self, drain_s: float) -> None:
        """Begin to drain if the deadline is so near that the begun chunks need the time that is left.

        Args:
            drain_s: how long they are expected to need.
        """
        if self.reason is None and self.deadline is not None and self.due_in_s(drain_s) <= 0:
            self._drain(self.deadline.text, math.inf)

    def due_in_s(self, drain_s: float) -> float:
        """Seconds until chunks that need so long must begin to drain; infinite without a deadline."""
        return math.inf if self.deadline is None else self.deadline.left_s() - END_S - drain_s

    def _drain(self, reason: str, within_s: float) -> None:
        if self.deadline is not None:
            within_s = min(within_s, self.deadline.left_s() - END_S)
        self.deadline_s = min(self.deadline_s, time.perf_counter() + within_s)
        if self.reason is None:
            self.reason = reason


def start_unless_stopped(stop: Stop, start: Callable[[], StartedT]) -> StartedT | None:
    """What `start` gives, or None if a stop came before or during it, or a deadline is so near that nothing could be
    done with it.
    """
    stop.mind(DRAIN_S)
    if stop.reason is not None:
        return None
    stop.is_starting = True
    try:
        return start()
    except StartStopped:
        return None
    except Exception:
        if not stop.is_starting:  # it was raised, and a library made an error of its own of it
            return None
        raise
    finally:
        stop.is_starting = False
