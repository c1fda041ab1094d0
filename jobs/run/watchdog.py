"""Engines that stall or hang: a request that waits too long, and the watchdog that ends a process that hangs."""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from relabel.jobs.output import Exit
from relabel.manifests.asks import Answer, Engine, Request
from relabel.manifests.errors import EngineCrashError

LONGEST_STEP_S = 5.0
"""Most that one step counts on the engine's clock, seconds: a process that was stopped and woke up has not kept a
request waiting.
"""
REQUESTS_TIMED = 256
"""The last requests, whose times say how long one may take that is made now."""
HASTY_S = 0.001
HASTY_POLLS = 10_000
"""How many polls in a row may take less than that and give nothing, though requests are in flight: an engine that lost
them would be polled until their time is over.
"""


class WatchedEngine:
    """An engine that counts as crashed if a request waits too long for its answer.

    Args:
        ask_timeout_s: seconds of the loop's work, no wall clock.
    """

    def __init__(self, engine: Engine, ask_timeout_s: float) -> None:
        self.polling_since_s: float | None = None
        """When the poll under way began, on `time.perf_counter`; None between polls."""
        self._engine = engine
        self._ask_timeout_s = ask_timeout_s
        self._hasty_polls = 0
        self._worked_s = 0.0
        self._last_s = time.perf_counter()
        self._took_s: deque[float] = deque(maxlen=REQUESTS_TIMED)
        self._in_flight: dict[int, tuple[float, str]] = {}  # when each was handed over, the oldest first, and its stage

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    def submit(self, request: Request) -> None:
        """Hand a request over."""
        self._in_flight[request.id] = self._worked_s, request.ask.stage
        self._engine.submit(request)

    def poll(self) -> list[Answer]:
        """Let the engine work.

        Raises:
            EngineCrashError: its memory ran out, a request has waited too long, or it lost its requests.
        """
        since_s, stage = next(iter(self._in_flight.values()), (self._worked_s, ""))
        if self._worked_s - since_s > self._ask_timeout_s:
            raise EngineCrashError(
                f"the engine has not answered a request of stage {stage!r} for {self._worked_s - since_s:.0f} s "
                f"(run.ask_timeout_s is {self._ask_timeout_s:g})."
            )
        polled_s = time.perf_counter()
        self.polling_since_s = polled_s
        try:
            answers = self._engine.poll()
        except Exception as exc:
            # by its name, since jobs never import torch
            is_out_of_memory = isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError"
            if not is_out_of_memory:
                raise
            raise EngineCrashError(
                f"the engine's memory ran out with {self.num_in_flight} requests in flight. Ask for fewer at a time."
            ) from exc
        finally:
            self.polling_since_s = None
        now_s = time.perf_counter()
        self._worked_s += min(now_s - self._last_s, LONGEST_STEP_S)
        self._last_s = now_s
        is_hasty = bool(self._in_flight) and not answers and now_s - polled_s < HASTY_S
        self._hasty_polls = self._hasty_polls + 1 if is_hasty else 0
        if self._hasty_polls > HASTY_POLLS:
            raise EngineCrashError(
                f"the engine does not answer {self.num_in_flight} requests, and does not work on them either."
            )
        for answer in answers:
            since_s, _ = self._in_flight.pop(answer.request_id, (self._worked_s, ""))
            self._took_s.append(self._worked_s - since_s)
        return answers

    @property
    def longest_s(self) -> float:
        """What the slowest of the last requests took, or has taken so far, seconds."""
        oldest_s, _ = next(iter(self._in_flight.values()), (self._worked_s, ""))
        return max([self._worked_s - oldest_s, *self._took_s])


_WATCH_EVERY_S = 1.0


@contextlib.contextmanager
def ends_hanging(
    since_s: Callable[[], float | None],
    timeout_s: float,
    *,
    what: str = "the engine has not come back from its work",
    option: str = "run.ask_timeout_s",
    on_end: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """End the process with exit code 20 if something takes longer than `timeout_s` while the block runs.

    A thread counts the time. It can end a process whose main thread waits in a driver's call, as long as that call
    lets other threads run.

    Args:
        since_s: when it began; None while there is nothing to wait for.
        on_end: called with the reason before the end.
    """
    has_ended = threading.Event()

    def watch() -> None:
        begun_s: float | None = None
        waited_s = 0.0
        checked_s = time.perf_counter()
        while not has_ended.wait(min(_WATCH_EVERY_S, timeout_s / 4)):
            now_s = time.perf_counter()
            before_s = begun_s
            begun_s = since_s()
            if begun_s is None or begun_s != before_s:
                waited_s = 0.0
            else:  # a process that was stopped and woke up has not hung meanwhile
                waited_s += min(now_s - checked_s, LONGEST_STEP_S)
            checked_s = now_s
            if waited_s > timeout_s:
                reason = f"{what} for {waited_s:.0f} s ({option} is {timeout_s:g})"
                on_end(reason)
                text = f"relabel: {reason}; ending without it. Committed work is safe; the same command continues."
                print(text, file=sys.stderr, flush=True)  # noqa: T201
                os._exit(Exit.PARTIAL)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
