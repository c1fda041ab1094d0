"""Standard output and error: redaction of secrets, tolerance of broken streams, and text or JSON log lines."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

from relabel.manifests.secrets import one_line, redacted, redacted_values

# Stdout and stderr that end no command: what can't be written there (a full disk, a reader that has gone, a closed
# descriptor) is dropped.
#
# Labels are worth more than the lines about them. So a command exits by its result, whether or not anybody reads; only
# one whose whole result is what it prints reports the loss (`Command.only_prints`).


class Sink(io.FileIO):
    """A descriptor whose writes never fail; `lost` says why the last of them that got lost did."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.lost: str | None = None

    def write(self, data: object) -> int:
        """All of it, or as if."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        done = 0
        try:
            while done < len(view):
                count = super().write(view[done:])
                if count is None:  # a terminal that another program set to answer at once
                    select.select((), (self,), ())
                done += count or 0
        except OSError as exc:
            # a reader may have had enough (`relabel status | head -1`): nothing is lost to them
            if exc.errno not in (errno.EPIPE, errno.ECONNRESET):
                self.lost = exc.strerror or str(exc)
        return len(view)


@contextlib.contextmanager
def unfailing_streams() -> Iterator[Sink | None]:
    """`sys.stdout` and `sys.stderr` never fail while the block runs; gives what is
    beneath stdout, None where a caller put its own there."""
    for descriptor in (0, 1, 2):
        # one that was closed would go to the next file that is opened, and a print would land in it
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, which is this one
    earlier = sys.stdout, sys.stderr
    try:
        sink = None
        if sys.stdout is sys.__stdout__:
            sink, sys.stdout = _wrapped(1, sys.stdout)
        if sys.stderr is sys.__stderr__:
            _, sys.stderr = _wrapped(2, sys.stderr)
        yield sink
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        sys.stdout, sys.stderr = earlier


def _wrapped(descriptor: int, stream: TextIO | None) -> tuple[Sink, TextIO]:
    sink = Sink(descriptor)
    if stream is not None:
        stream.flush()
    encoding = stream.encoding if stream is not None else "utf-8"
    # a signal's handler may print while the main thread does, which a buffer forbids: none for stderr
    beneath = sink if descriptor == 2 else io.BufferedWriter(sink)
    is_prompt = descriptor == 2 or sink.isatty()
    # a letter that a terminal lacks ends no command either
    return sink, io.TextIOWrapper(beneath, encoding=encoding, errors="backslashreplace", line_buffering=is_prompt)


# Stdout and stderr of a command, redacted: the one way by which text leaves the process
# (`manifests/secrets.py`).
#
# What a native library or a child process writes to the descriptor itself goes past them; workers write to pipes that
# are read here.


class _Begun(threading.local):
    """Each thread's unfinished line."""

    text = ""


class RedactedStream(io.TextIOBase):
    """A text stream that is redacted before it is written, a line at least at a time: half a secret has no form to be
    known by.
    """

    encoding = "utf-8"  # click asks for both before it writes to a stream as it is
    errors = "backslashreplace"

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._begun = _Begun()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Take text; an unfinished line waits for its end, or for `flush`."""
        held = self._begun.text + text
        end = max(held.rfind("\n"), held.rfind("\r")) + 1
        self._begun.text = held[end:]
        if end:
            self._show(redacted(held[:end]))
        return len(text)

    def flush(self) -> None:
        held = self._begun.text
        self._begun.text = ""
        if held:
            self._show(redacted(held))
        self.stream.flush()

    def _show(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeEncodeError:  # a name that is not UTF-8
            self.stream.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))


@contextlib.contextmanager
def redacted_streams() -> Iterator[None]:
    """Stdout and stderr are redacted while the block runs. Again within it, where something wraps lines before they get
    here.
    """
    out = sys.stdout
    err = sys.stderr
    sys.stdout, sys.stderr = doors = RedactedStream(out), RedactedStream(err)
    try:
        yield
    finally:
        for door in doors:
            door.flush()
        sys.stdout = out
        sys.stderr = err


# What goes to stderr: lines of text for people, or one JSON object a line for a log collector (`--log-format json`).
#
# In the JSON form `sys.stderr` itself is replaced, so that a line that some library prints becomes an object too, and
# nothing on stderr is anything else. What a native library or another process writes to the descriptor goes past it.

VARIABLE = "RELABEL_LOG_FORMAT"

_lines: JsonLines | None = None


class JsonLines(RedactedStream):
    """A stream whose every line is a JSON object: `time`, `level`, `event`, `message`, and whatever fields are known.

    Args:
        stream: where the lines go.
        fields: on every line; `bind` adds to them.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.fields: dict[str, Any] = {}
        self._guard = threading.RLock()  # a signal's handler may speak while the main thread does

    def isatty(self) -> bool:
        return False

    def flush(self) -> None:
        """Nothing: an object is a whole line, and was flushed."""

    def _show(self, text: str) -> None:
        for line in text.replace("\r", "\n").split("\n"):
            if line.strip():
                self.emit("info", "output", line)

    def emit(self, level: str, event: str, message: str, **fields: Any) -> None:
        """Write one object."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": stamp, "level": level, "event": event, "message": message, **self.fields, **fields}
        # a string at a time: what is masked later might break the form
        text = json.dumps(redacted_values(line), default=str) + "\n"
        with self._guard, contextlib.suppress(ValueError, OSError):  # a stream that is closed or full ends no run
            self.stream.write(text)
            self.stream.flush()


@contextlib.contextmanager
def json_lines() -> Iterator[None]:
    """Every line on stderr is a JSON object while the block runs."""
    global _lines
    earlier = sys.stderr
    _lines = sys.stderr = JsonLines(earlier)
    try:
        yield
    finally:
        _lines.write("\n")  # which ends an unfinished line
        _lines = None
        sys.stderr = earlier


def is_json() -> bool:
    """Whether stderr takes JSON objects now."""
    return _lines is not None


def bind(**fields: Any) -> None:
    """Put fields on every later line of the JSON form."""
    if _lines is not None:
        _lines.fields.update(fields)


def write(message: str, *, level: str = "info", event: str = "note", only_json: bool = False, **fields: Any) -> None:
    """A line on stderr; the fields are in the JSON form alone.

    Args:
        only_json: people see it otherwise, as the end table.
    """
    if _lines is not None:
        _lines.emit(level, event, message, **fields)
    elif not only_json:
        print(as_text(message, level), file=sys.stderr, flush=True)  # noqa: T201


def as_text(message: str, level: str) -> str:
    """A message as people read it."""
    return one_line(message if level == "info" else f"{level}: {message}")
