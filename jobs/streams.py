"""Stdout and stderr of a command, redacted: the one way by which text leaves the process (`manifests/redaction.py`).

What a native library or a child process writes to the descriptor itself goes past them; workers write to pipes that are read here.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO

from manifests.redaction import redacted


class RedactedStream(io.TextIOBase):
    """A text stream on which each text that is written is redacted as a whole."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override] # click asks for both before it writes to a stream as it is
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Take text; what is in it of secrets is not written."""
        if not isinstance(text, str):
            raise TypeError(f"want text, got {type(text).__name__}")
        shown = redacted(text)
        try:
            self.stream.write(shown)
        except UnicodeEncodeError:  # a name that is not UTF-8
            self.stream.write(shown.encode("utf-8", "backslashreplace").decode("utf-8"))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def redacted_streams() -> Iterator[None]:
    """Stdout and stderr are redacted while the block runs."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = RedactedStream(out), RedactedStream(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
