"""Stdout and stderr of a command, redacted: the one way by which text leaves the process
(`manifests/secrets/redaction.py`).

What a native library or a child process writes to the descriptor itself goes past them; workers write to pipes that are
read here.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from relabel.manifests.secrets.redaction import redacted


class RedactedStream(io.TextIOBase):
    """A text stream that is redacted before it is written, a line at least at a time: half a secret has no form to be
    known by.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._begun = threading.local()  # each thread's unfinished line

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
        """Take text; an unfinished line waits for its end, or for `flush`."""
        if not isinstance(text, str):
            raise TypeError(f"want text, got {type(text).__name__}")
        held = self._taken() + text
        end = max(held.rfind("\n"), held.rfind("\r")) + 1
        self._begun.text = held[end:]
        if end:
            self._show(redacted(held[:end]))
        return len(text)

    def flush(self) -> None:
        held = self._taken()
        if held:
            self._show(redacted(held))
        self.stream.flush()

    def _taken(self) -> str:
        held, self._begun.text = getattr(self._begun, "text", ""), ""
        return held

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
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = doors = RedactedStream(out), RedactedStream(err)
    try:
        yield
    finally:
        for door in doors:
            door.flush()
        sys.stdout, sys.stderr = out, err
