"""No engine outlives the command that started it, however that command ends.

A guard is a process of a few lines that knows the process groups of the workers and holds the end of a pipe. When the
command dies, even by `kill -9`, the pipe closes, and the guard kills what is left of those groups: workers that hang in
a driver's call, and processes that an engine started in its turn (one a GPU under tensor parallelism).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import TracebackType

_SCRIPT = """
import os, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class ProcessGuard:
    """Kills the process groups it was given when this process ends, or the `with` block does."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-u", "-c", _SCRIPT]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def __enter__(self) -> ProcessGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def watch(self, group: int) -> None:
        """Kill this group at the end."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group is gone; its number may be somebody else's soon."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # somebody killed the guard: workers still notice our end by themselves
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def kill_group(group: int) -> None:
    """End whatever is left of a process group, at once."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
