"""Ends a process whose engine never comes back from its work: nobody else can, where no supervisor watches.

A thread counts the time that one `poll` takes. It can end a process whose main thread waits in a driver's call, as long
as that call lets other threads run; a supervisor (`--workers 1`) needs no such luck.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from relabel.jobs.exits import Exit

LOOK_EVERY_S = 1.0
LONGEST_LOOK_S = 5.0
"""Most that one look counts, seconds: a process that was stopped and woke up has not hung meanwhile."""


@contextlib.contextmanager
def hangs_end(polling_since_s: Callable[[], float | None], timeout_s: float) -> Iterator[None]:
    """End the process with exit code 20 if a poll takes longer than `timeout_s` while the block runs.

    Args:
        polling_since_s: since when the poll under way runs; None between polls.
    """
    has_ended = threading.Event()

    def watch() -> None:
        poll, waited_s, looked_s = None, 0.0, time.perf_counter()
        while not has_ended.wait(min(LOOK_EVERY_S, timeout_s / 4)):
            now_s = time.perf_counter()
            since_s = polling_since_s()
            waited_s = (
                waited_s + min(now_s - looked_s, LONGEST_LOOK_S) if since_s is not None and since_s == poll else 0.0
            )
            poll, looked_s = since_s, now_s
            if waited_s > timeout_s:
                print(  # noqa: T201
                    f"relabel: the engine has not come back from its work for {waited_s:.0f} s (run.ask_timeout_s is "
                    f"{timeout_s:g}); ending without it. Committed work is safe; the same command continues.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(Exit.PARTIAL)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
