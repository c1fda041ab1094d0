"""Stdout and stderr that end no command: what can't be written there (a full disk, a reader that has gone, a closed
descriptor) is dropped.

Labels are worth more than the lines about them. So a command exits by its result, whoever listens; only one whose whole
result is what it says reports the loss (`SAYS_ONLY`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

SAYS_ONLY = frozenset({"status", "compare", "evaluate", "list", "show", "schema", "doctor"})
"""Commands that leave nothing but what they say on stdout."""
_HAS_LEFT = (errno.EPIPE, errno.ECONNRESET)
"""Whoever reads may have had enough (`relabel status | head -1`): nothing is lost to them."""


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
            if exc.errno not in _HAS_LEFT:
                self.lost = exc.strerror or str(exc)
        return len(view)


@contextlib.contextmanager
def unfailing_streams() -> Iterator[Sink | None]:
    """`sys.stdout` and `sys.stderr` never fail while the block runs; gives what is
    beneath stdout, None where a caller put its own there."""
    for descriptor in (0, 1, 2):
        _hold(descriptor)
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


def _hold(descriptor: int) -> None:
    """Keep a standard descriptor that was closed from going to the next file that is opened: a
    print would land in it.
    """
    try:
        os.fstat(descriptor)
    except OSError:
        found = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
        os.set_inheritable(found, True)


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
