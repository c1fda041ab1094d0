"""Deadlines, signals and requests to stop, and how long begun chunks need."""

import contextlib
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import TypeVar
from zoneinfo import ZoneInfo

from relabel.manifests.errors import UsageError

LONGEST_S = 366 * 86400.0
"""A length above this is taken for a mistake."""
_TIME = re.compile(r"(\d{1,2}:[\d:]+)\s*(Z|[+-][\d:]+)?(?:\s+([A-Za-z].*))?")
_SPAN = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"))


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment by which a run has committed and ended.

    Args:
        text: what was asked for, in words: `--until 06:00`.
        at_s: in seconds since the epoch if it is a time of day, so that a clock that is set moves it along; else on
            `time.perf_counter`, so that it does not.
        set_s: when it was read, on `time.perf_counter`.
    """

    text: str
    at_s: float
    is_time_of_day: bool = False
    set_s: float = field(default_factory=time.perf_counter)

    def left_s(self) -> float:
        """Seconds until then; below zero once it has passed."""
        return self.at_s - (time.time() if self.is_time_of_day else time.perf_counter())

    def shown(self) -> str:
        """What was asked for, and when that is, with the local zone: `--until 06:00 (2026-11-21
        06:00:00 +0100 CET)`.
        """
        moment = datetime.fromtimestamp(round(time.time() + self.left_s())).astimezone()
        return f"{self.text} ({moment:%Y-%m-%d %H:%M:%S %z %Z})"


def choose_deadline(until: str | None, duration: str | None, *, now: datetime | None = None) -> Deadline | None:
    """The earlier of `--until` and `--for`, or None where neither is given.

    Args:
        now: what `--until` counts from; the clock's time by default.
    Raises:
        UsageError: a text that is not a time or length, or a time that has passed.
    """
    deadlines = []
    if until is not None:
        at_s = until_s(until, now or datetime.now(UTC))
        deadlines.append(Deadline(f"--until {until}", at_s, is_time_of_day=True))
    if duration is not None:
        deadlines.append(Deadline(f"--for {duration}", time.perf_counter() + span_s(duration)))
    return min(deadlines, key=Deadline.left_s, default=None)


def until_s(text: str, now: datetime) -> float:
    """The next moment of a time of day, or that of a timestamp, in seconds since the epoch. A zone may be named
    (`06:00 Europe/Berlin`, `06:00Z`, `06:00+02:00`); else it is the machine's.

    Raises:
        UsageError: it is neither, or has passed.
    """
    clean = text.strip()
    match = _TIME.fullmatch(clean)
    if match is not None:
        return _next_time_of_day(text, match, now)
    try:
        moment = datetime.fromisoformat(clean)
    except ValueError as exc:
        raise UsageError(
            f"--until {text}: want a time of day (06:00, or 06:00 Europe/Berlin) or a timestamp (2026-11-21T06:00, "
            "with +01:00 or Z where it is not in the machine's zone)."
        ) from exc
    if not re.search(r"[T ]\d", clean):
        raise UsageError(f"--until {text}: names a day and no time; write {clean}T06:00.")
    if moment.timestamp() <= now.timestamp():
        raise UsageError(f"--until {text}: has passed; it is now {now.astimezone(moment.tzinfo):%Y-%m-%dT%H:%M:%S%z}.")
    return moment.timestamp()


def span_s(text: str, option: str = "--for") -> float:
    """A length such as 45s, 90m, 2h, 1h30m or 7d, in seconds.

    Raises:
        UsageError: it is none, or zero, or above a year.
    """
    match = _SPAN.fullmatch(text.strip())
    parts = [float(part or 0) for part in match.groups()] if match is not None else [0.0]
    seconds = sum(part * unit_s for part, unit_s in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not 0 < seconds <= LONGEST_S:
        raise UsageError(
            f"{option} {text}: want a length above 0 with its unit, a year at most: 45s, 90m, 2h, 1h30m or 7d."
        )
    return seconds


def _next_time_of_day(text: str, match: re.Match[str], now: datetime) -> float:
    clock, offset, name = match.groups()
    try:
        at = datetime.fromisoformat(f"2000-01-01T{'0' if clock[1] == ':' else ''}{clock}{offset or ''}")
        zone = ZoneInfo(name) if name else at.tzinfo
    except (KeyError, OSError) as exc:  # ZoneInfoNotFoundError is a KeyError
        raise UsageError(
            f"--until {text}: this machine knows no zone {name}; write its offset, for instance 06:00+01:00."
        ) from exc
    except ValueError as exc:
        raise UsageError(f"--until {text}: no clock shows that ({exc}).") from exc
    today = datetime.combine(datetime.fromtimestamp(now.timestamp(), zone), at.time())
    moments = ((today + timedelta(days=day)).replace(tzinfo=zone).timestamp() for day in (0, 1))
    return next(moment for moment in moments if moment > now.timestamp())


StartedT = TypeVar("StartedT")

DRAIN_S = 20.0
"""How long begun chunks may take to finish once a stop was asked for."""
END_S = 2.0
"""Left before a deadline for what comes after the last answer: commits under way, the manifest, the engine's end."""
LENGTH_STEP_S = 5
"""To a multiple of so much a length that is proposed is rounded up."""


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

    def drain(self, reason: str, within_s: float | None = None) -> None:
        """Begin no chunk any more; those begun get so long (`DRAIN_S` by default), or what a deadline leaves. The first
        reason is kept.
        """
        within_s = min(DRAIN_S if within_s is None else within_s, self.due_in_s(0.0))
        self.deadline_s = min(self.deadline_s, time.perf_counter() + within_s)
        self.reason = self.reason or reason

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
            self.drain(self.deadline.text, math.inf)

    def due_in_s(self, drain_s: float) -> float:
        """Seconds until chunks that need so long must begin to drain; infinite without a deadline."""
        return math.inf if self.deadline is None else self.deadline.left_s() - END_S - drain_s

    def too_near_text(self, *, has_engine: bool) -> str | None:
        """Why a run that ends here has asked nothing, and the least that works; None where no deadline ended it.

        Args:
            has_engine: an engine was started, so that what it takes is known.
        """
        if self.deadline is None or self.reason != self.deadline.text:
            return None
        gone_s = time.perf_counter() - self.deadline.set_s
        least_s = gone_s + DRAIN_S + END_S + 1.0  # to ask in
        length_s = math.ceil(least_s / LENGTH_STEP_S) * LENGTH_STEP_S
        start = "" if has_engine else ", and what the engine takes to start"
        return (
            f"{self.deadline.text} is too near, nothing was asked: its last {DRAIN_S + END_S:.0f} s are kept for begun "
            f"chunks to finish. The least that works is {length_s}s from the start of the command{start}"
        )


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


@contextlib.contextmanager
def stopping(stop: Stop, write: Callable[[str], None]) -> Iterator[None]:
    """Route signals to `stop` while the block runs, and watch its deadline; restores the earlier handlers after. For
    the main thread.

    The first SIGTERM or Ctrl-C drains, a second Ctrl-C stops now. While an engine starts there is nothing to drain:
    then each of them ends the start at once.

    Args:
        write: called with what was asked for and what will happen.
    """
    has_interrupt = False
    main = threading.get_ident()

    def on_near() -> None:
        """Wake the main thread by a signal if it starts an engine; the loop minds the deadline by itself."""
        if stop.is_starting:
            stop.mind(DRAIN_S)
            if stop.reason is not None:
                signal.pthread_kill(main, signal.SIGTERM)

    def on_term(_number: int, _frame: FrameType | None) -> None:
        stop.drain("SIGTERM")
        if not stop.is_starting or stop.reason == "SIGTERM":  # else the deadline, of which the report says so
            write(f"SIGTERM: no new chunks; those under way get {DRAIN_S:.0f} s to finish, then exit 20.")
        _end_start(stop)

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal has_interrupt
        if has_interrupt or stop.reason == "SIGTERM":
            stop.now()
            raise KeyboardInterrupt
        has_interrupt = True
        stop.drain("Ctrl-C")
        write(f"Ctrl-C: no new chunks; those under way get {DRAIN_S:.0f} s to finish. Ctrl-C again stops now.")
        _end_start(stop)

    timer = threading.Timer(max(0.0, min(stop.due_in_s(DRAIN_S), LONGEST_S)), on_near)
    timer.daemon = True
    earlier = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        if stop.deadline is not None:
            timer.start()
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # its signal must not meet the earlier handler
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end_start(stop: Stop) -> None:
    if stop.is_starting:
        stop.is_starting = False
        raise StartStopped
