"""When a run must have ended: `--until 06:00` and `--for 90m` become one deadline.

A time of day is the next moment at which the clock of its zone shows it. Where the clock skips it (spring), that is the
moment of the skip; where the clock shows it twice (autumn), the next of the two. A zone may be named (`06:00
Europe/Berlin`, `06:00Z`, `06:00+02:00`); else it is the machine's.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from relabel.manifests.errors import UsageError

LONGEST_S = 366 * 86400.0
"""A deadline further away than this is taken for a slip of the pen."""
_TIME = re.compile(
    r"(\d{1,2}):(\d{2})(?::(\d{2}))?(?:\s*(Z|[+-]\d{2}:?\d{2})|\s+([A-Za-z]+(?:[/_+-][A-Za-z0-9_+-]+)*))?"
)
_SPAN = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment by which a run has committed and ended.

    Args:
        text: what was asked for, in words: `--until 06:00`.
        wall_s: of a time of day: seconds since the epoch, so that a clock that is set moves it along.
        steady_s: of a length: on `time.perf_counter`, so that a clock that is set does not.
    """

    text: str
    wall_s: float | None = None
    steady_s: float | None = None

    def left_s(self) -> float:
        """Seconds until then; below zero once it has passed."""
        if self.wall_s is not None:
            return self.wall_s - time.time()
        assert self.steady_s is not None
        return self.steady_s - time.perf_counter()

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
    found = []
    if until is not None:
        found.append(Deadline(f"--until {until}", wall_s=until_s(until, now or datetime.now(UTC))))
    if duration is not None:
        found.append(Deadline(f"--for {duration}", steady_s=time.perf_counter() + span_s(duration)))
    return min(found, key=Deadline.left_s, default=None)


def until_s(text: str, now: datetime) -> float:
    """The moment that a time of day or a timestamp names, in seconds since the epoch.

    Raises:
        UsageError: it is neither, or has passed, or is more than a year ahead.
    """
    clean = text.strip()
    match = _TIME.fullmatch(clean)
    if match is not None:
        return _next_time_of_day(text, match, now)
    try:
        moment = datetime.fromisoformat(clean)
        is_day_alone = not re.search(r"[T ]\d", clean)
    except ValueError as exc:
        raise UsageError(
            f"--until {text}: want a time of day (06:00, or 06:00 Europe/Berlin) or a timestamp (2026-11-21T06:00, "
            "with +01:00 or Z where it is not in the machine's zone)."
        ) from exc
    if is_day_alone:
        raise UsageError(f"--until {text}: names a day and no time; write {clean}T06:00.")
    found = _instant(moment.replace(tzinfo=None), moment.tzinfo)
    left_s = found - now.timestamp()
    if left_s <= 0:
        raise UsageError(f"--until {text}: has passed; it is now {now.astimezone(moment.tzinfo):%Y-%m-%dT%H:%M:%S%z}.")
    if left_s > LONGEST_S:
        raise UsageError(f"--until {text}: is more than a year ahead.")
    return found


def span_s(text: str) -> float:
    """A length such as 45s, 90m, 2h or 1h30m, in seconds.

    Raises:
        UsageError: it is none, or zero, or above a year.
    """
    match = _SPAN.fullmatch(text.strip())
    if match is None or not text.strip():
        raise UsageError(f"--for {text}: want a length with its unit: 45s, 90m, 2h or 1h30m.")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    found = hours * 3600 + minutes * 60 + seconds
    if not 0 < found <= LONGEST_S:
        raise UsageError(f"--for {text}: want more than nothing and a year at most.")
    return found


def _next_time_of_day(text: str, match: re.Match[str], now: datetime) -> float:
    hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
    if hour > 23 or minute > 59 or second > 59:
        raise UsageError(f"--until {text}: no clock shows that; hours go from 00:00 to 23:59.")
    zone = _zone(text, match[4], match[5])
    today = datetime.fromtimestamp(now.timestamp(), zone).replace(
        tzinfo=None, hour=hour, minute=minute, second=second, microsecond=0
    )
    moments = (
        _instant(today.replace(fold=fold) + timedelta(days=day), zone, fold) for day in (0, 1) for fold in (0, 1)
    )
    return min(moment for moment in moments if moment > now.timestamp())


def _instant(naive: datetime, zone: tzinfo | None, fold: int = 0) -> float:
    """Seconds since the epoch at which the zone's clock shows `naive`, or skips it. A zone of None is the machine's."""
    found = naive.replace(tzinfo=zone, fold=fold).timestamp()
    if datetime.fromtimestamp(found, zone).replace(tzinfo=None, fold=0) == naive.replace(fold=0):
        return found
    low, high = sorted(naive.replace(tzinfo=zone, fold=one).timestamp() for one in (0, 1))
    while high - low > 0.5:  # the clock skips `naive` between these two: find the skip
        middle = (low + high) / 2
        is_past = datetime.fromtimestamp(middle, zone).replace(tzinfo=None) >= naive
        low, high = (low, middle) if is_past else (middle, high)
    return float(round(high))


def _zone(text: str, offset: str | None, name: str | None) -> tzinfo | None:
    if offset == "Z":
        return UTC
    if offset is not None:
        hours, minutes = int(offset[1:3]), int(offset[-2:])
        if hours > 23 or minutes > 59:
            raise UsageError(f"--until {text}: no zone is {offset} from UTC.")
        return timezone((-1 if offset[0] == "-" else 1) * timedelta(hours=hours, minutes=minutes))
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as exc:  # ZoneInfoNotFoundError is a KeyError
        raise UsageError(
            f"--until {text}: this machine knows no zone {name}; write its offset, for instance 06:00+01:00."
        ) from exc
