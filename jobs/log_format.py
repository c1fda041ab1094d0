"""What goes to stderr: lines of text for people, or one JSON object a line for a log collector (`--log-format json`).

In the JSON form `sys.stderr` itself is replaced, so that a line that some library prints becomes an object too, and
nothing on stderr is anything else. What a native library or another process writes to the descriptor goes past it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback as traceback_module
from collections.abc import Iterator
from typing import Any, TextIO

from relabel.jobs.streams import RedactedStream
from relabel.manifests.odd_text import one_line
from relabel.manifests.secrets.redaction import redacted_values

VARIABLE = "RELABEL_LOG_FORMAT"
FORMATS = ("text", "json")

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

    def finish(self) -> None:
        """Say this thread's unfinished line."""
        self.write("\n")

    def emit(self, level: str, event: str, message: str, **fields: Any) -> None:
        """Write one object."""
        now_s = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s % 1 * 1000):03d}Z"
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
    _lines = JsonLines(earlier)
    sys.stderr = _lines
    try:
        yield
    finally:
        _lines.finish()
        _lines, sys.stderr = None, earlier


def is_json() -> bool:
    """Whether stderr takes JSON objects now."""
    return _lines is not None


def bind(**fields: Any) -> None:
    """Put fields on every later line of the JSON form."""
    if _lines is not None:
        _lines.fields.update(fields)


def say(message: str, *, level: str = "info", event: str = "note", **fields: Any) -> None:
    """A line on stderr; the fields are in the JSON form alone."""
    if _lines is not None:
        _lines.emit(level, event, message, **fields)
    else:
        print(as_text(message, level), file=sys.stderr, flush=True)  # noqa: T201


def note_event(event: str, message: str, **fields: Any) -> None:
    """A line of the JSON form, for what people see otherwise (the end table)."""
    if _lines is not None:
        _lines.emit("info", event, message, **fields)


def say_crash(error: BaseException, message: str) -> None:
    """A traceback and what it means; in the JSON form both in one line."""
    if _lines is not None:
        _lines.emit(
            "error",
            "crash",
            message,
            error=type(error).__name__,
            traceback="".join(traceback_module.format_exception(error)),
        )
    else:
        traceback_module.print_exception(error)
        print(message, file=sys.stderr, flush=True)  # noqa: T201


def as_text(message: str, level: str) -> str:
    """A message as people read it."""
    return one_line(message if level == "info" else f"{level}: {message}")
