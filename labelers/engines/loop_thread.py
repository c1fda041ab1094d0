"""An event loop in a thread of its own, for callers that never await."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs coroutines beside the caller. `close` cancels what is left and ends the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._at_last: Callable[[], Awaitable[None]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run to the end and return the result, or raise what it raises."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, above all: the coroutine must not go on alone
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin, and return at once. The coroutine reports by itself, failures too."""
        self._loop.call_soon_threadsafe(self._begin, coroutine)

    def close(self, at_last: Callable[[], Awaitable[None]]) -> None:
        """Cancel what runs, await `at_last()`, and end. Safe to call twice."""
        if self._loop.is_closed():
            return
        self._at_last = at_last
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            if self._at_last is not None:
                self._loop.run_until_complete(self._at_last())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            # sockets that were closed get the turn that closes them
            self._loop.run_until_complete(asyncio.sleep(0))
