"""What a worker reports to its supervisor: JSON lines, each an event by name. Both ends are of one version, so the
lines have none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from relabel.manifests import errors
from relabel.manifests.errors import RelabelError, TerminalError
from relabel.manifests.secrets.redaction import redacted


@dataclass(frozen=True)
class Begins:
    """A chunk is begun; later events call it by `number`. `chunk` is a `ChunkId`, a list once it was read."""

    number: int
    chunk: tuple[int, int, int] | list[int]
    rows: int


@dataclass(frozen=True)
class Rows:
    """Rows that the engine was given, each with its chunk's number, and rows that it is done with."""

    begun: list[tuple[int, int]]
    ended: list[int]


@dataclass(frozen=True)
class Tries:
    """Rows of a chunk are asked next, with nothing else in flight."""

    number: int
    rows: list[int]


@dataclass(frozen=True)
class Commits:
    """A chunk is in. `counts` are named as in `Progress`; it `was_first`, or another worker had committed the chunk."""

    number: int
    was_first: bool
    counts: dict[str, int]
    statuses: dict[str, int]


@dataclass(frozen=True)
class Counts:
    """All that was answered so far, named as in `Progress`, and what is `Live`."""

    counts: dict[str, int]
    statuses: dict[str, int]
    live: dict[str, Any]


@dataclass(frozen=True)
class EngineUp:
    """The engine has started: what `asks`, in words, and its remarks."""

    asks: str
    remarks: list[str]


@dataclass(frozen=True)
class Ends:
    """The last word of a worker that met no error: shards that it worked on, those that others held, and why it stopped
    early, if so.
    """

    taken: list[int]
    busy: list[int]
    stopped: str | None
    costs: dict[str, Any] | None
    engine_start_s: float
    remarks: list[str]
    canary: dict[str, Any] | None


@dataclass(frozen=True)
class Fails:
    """The last word of a worker that met an error: its class, and whether it is one of `manifests.errors`."""

    error: str
    message: str
    is_terminal: bool
    is_ours: bool

    @classmethod
    def of(cls, error: Exception) -> Fails:
        """Its message is redacted here: whoever reads it may not know this process's secrets."""
        return cls(
            type(error).__name__,
            redacted(str(error)),
            isinstance(error, TerminalError),
            isinstance(error, RelabelError),
        )

    def as_error(self) -> RelabelError | RuntimeError:
        """The same class here, so that it ends in the same exit code; RuntimeError for a fault of ours."""
        if not self.is_ours:
            return RuntimeError(self.message)
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, RelabelError) and kind is not errors.VerdictError:
            return kind(self.message)
        return TerminalError(self.message) if self.is_terminal else errors.TransientError(self.message)


Event = Begins | Rows | Tries | Commits | Counts | EngineUp | Ends | Fails
_KINDS: dict[str, type[Event]] = {
    "begins": Begins,
    "rows": Rows,
    "tries": Tries,
    "commits": Commits,
    "counts": Counts,
    "engine": EngineUp,
    "ends": Ends,
    "fails": Fails,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def event_line(event: Event) -> str:
    """The event as one line."""
    return json.dumps({"event": _NAMES[type(event)], **vars(event)}, separators=(",", ":")) + "\n"


def read_event(line: bytes) -> Event | None:
    """The inverse of `event_line`; None for a line that the end of its process cut short."""
    try:
        held = json.loads(line)
    except ValueError:
        return None
    return _KINDS[held.pop("event")](**held)
