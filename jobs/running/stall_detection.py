"""How long requests have waited in an engine, by the engine's own work: one that goes silent, or comes back empty again
and again, is counted as crashed. No wall clock decides it: a process that was stopped and woke up has kept no request
waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from relabel.jobs.running.pace import LOOK_EVERY_S
from relabel.manifests.asks import POLL_S, Answer, Engine
from relabel.manifests.errors import EngineCrashError

HASTY_POLLS = 10_000
"""Polls in a row that came back at once with nothing, though requests are in flight: an engine that lost them would be
asked forever.
"""
LONGEST_STEP_S = 5.0
"""Most that one poll counts on the engine's clock, seconds: a process that was stopped and woke up has not kept a
request waiting.
"""


class StallDetection:
    """Polls one engine and keeps its clock.

    Args:
        ask_timeout_s: a request without an answer for this long, in seconds of the engine's work, is a crash of the
            engine.
    """

    def __init__(self, engine: Engine, ask_timeout_s: float) -> None:
        self.worked_s = 0.0
        """The engine's clock: seconds of its work."""
        self.polling_since_s: float | None = None
        """Since when the engine is at work, on `time.perf_counter`; None between polls."""
        self._engine = engine
        self._ask_timeout_s = ask_timeout_s
        self._handed: deque[tuple[int, float]] = deque()  # last request handed over, and when, by the engine's clock
        self._next_look_s = 0.0
        self._hasty_polls = 0

    def handed(self, request_id: int) -> None:
        """Note that requests up to this number were handed over."""
        self._handed.append((request_id, self.worked_s))

    def poll(self, num_in_flight: int) -> list[Answer]:
        """Let the engine work.

        Raises:
            EngineCrashError: its memory ran out, or it says nothing of requests and does not work on them either.
        """
        self.polling_since_s = polled_s = time.perf_counter()
        try:
            answers = self._engine.poll()
        except Exception as exc:
            if not isinstance(exc, MemoryError) and type(exc).__name__ != "OutOfMemoryError":
                # torch's, which jobs never imports
                raise
            raise EngineCrashError(
                f"the engine's memory ran out with {num_in_flight} requests in flight. Ask for fewer at a time, or "
                "shorter prompts."
            ) from exc
        finally:
            self.polling_since_s = None
        took_s = time.perf_counter() - polled_s
        self.worked_s += min(took_s, LONGEST_STEP_S)
        self._hasty_polls = 0 if answers or took_s > POLL_S / 100 else self._hasty_polls + 1
        return answers

    def idle_poll_s(self, num_in_flight: int) -> None:
        """Raise EngineCrashError for an engine that comes back at once, again and again, with nothing."""
        if self._hasty_polls > HASTY_POLLS and num_in_flight:
            raise EngineCrashError(
                f"the engine does not answer {num_in_flight} requests, and does not work on them either."
            )

    def look_for_silence(self, in_flight: Iterable[int], stage_of: Callable[[int], str]) -> None:
        """Now and then: raise EngineCrashError if a request has waited too long.

        Args:
            in_flight: numbers, ascending. Requests are handed over in this order, so the first is the one that waits
                longest.
        """
        if self.worked_s < self._next_look_s:
            return
        self._next_look_s = self.worked_s + min(LOOK_EVERY_S, self._ask_timeout_s / 4)
        oldest = next(iter(in_flight), None)
        handed = self._handed
        while handed and (oldest is None or handed[0][0] < oldest):
            handed.popleft()
        if handed and oldest is not None:
            self.check(handed[0][1], stage_of(oldest))

    def check(self, since_s: float, stage: str) -> None:
        """Raise EngineCrashError if a request that was handed over at `since_s`, by the engine's clock, has waited too
        long.
        """
        waited_s = self.worked_s - since_s
        if waited_s > self._ask_timeout_s:
            raise EngineCrashError(
                f"the engine has not answered a request of stage {stage!r} for {waited_s:.0f} s "
                f"(run.ask_timeout_s is {self._ask_timeout_s:g})."
            )
