"""One worker process as its supervisor sees it: its pipes, what it reported, and which rows its engine was at when it
ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relabel.jobs.pool.assignments import Assignment
from relabel.jobs.pool.done import Done
from relabel.jobs.pool.events import Begins, Commits, Counts, Ends, EngineUp, Event, Fails, Rows, Tries, read_event
from relabel.jobs.pool.process_guard import ProcessGuard, kill_group
from relabel.jobs.running.isolation import ChunkCase, plain_cases
from relabel.jobs.running.live import Live
from relabel.manifests.records import checked
from relabel.manifests.runs.receipts import ChunkId

READ_BYTES = 1 << 16


class WorkerProcess:
    """A worker from its start to its end.

    Args:
        on_event: called with each event, before this object takes note of it: the chunk of a commit is still in
            `chunks`.
        on_log: called with each line that the worker or its engine prints.
    """

    def __init__(
        self,
        assignment: Assignment,
        environment: Mapping[str, str],
        cases: dict[ChunkId, ChunkCase],
        *,
        guard: ProcessGuard,
        on_event: Callable[[Event], None],
        on_log: Callable[[str], None],
    ) -> None:
        self.chunks: dict[int, ChunkId] = {}
        """Chunks begun and not known to be committed, by the worker's number for each."""
        self.in_flight: dict[int, int] = {}
        """Rows that the engine is at, and the number of the chunk that each is of."""
        self.apart: tuple[int, list[int]] | None = None
        """The group that is asked apart: its chunk's number and its rows."""
        self.did = Done()
        self.is_engine_up = False
        self.end: Ends | None = None
        self.failure: Fails | None = None
        self.killed_for: str | None = None
        self.heard_s = time.perf_counter()
        self._on_event = on_event
        self._on_log = on_log
        self._guard = guard
        read_end, write_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "relabel.jobs.pool.workers", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is the supervisor's alone; and the group can be ended as one
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        guard.watch(self.process.pid)
        assert self.process.stdout is not None
        self._report_fd = read_end
        self._rests = {read_end: b"", self.process.stdout.fileno(): b""}
        self._open = dict.fromkeys(self._rests)
        for descriptor in self._rests:
            os.set_blocking(descriptor, False)
        self.write(replace(assignment, cases=plain_cases(cases)).as_line())

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let a selector say when there is something to read."""
        for descriptor in self._rests:
            selector.register(
                descriptor, selectors.EVENT_READ, lambda descriptor=descriptor: self._read(selector, descriptor)
            )

    def write(self, line: str) -> None:
        """One line on the worker's stdin; one that is gone already needs no word."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()

    def tell(self, **what: Any) -> None:
        """Say something to the worker."""
        self.write(json.dumps(what) + "\n")

    def kill(self, why: str | None = None) -> None:
        """End it and all that its engine started.

        Args:
            why: what to say it died of, where that is a crash; None if it was asked to end.
        """
        self.killed_for = self.killed_for or why
        kill_group(self.process.pid)

    def has_ended(self, selector: selectors.BaseSelector) -> bool:
        """Whether the process is gone, with all that it said read and nothing of its group left.
        Closes the pipes then.
        """
        if self.process.poll() is None:
            return False
        kill_group(self.process.pid)  # what its engine started
        self._guard.forget(self.process.pid)
        for descriptor in list(self._open):
            self._read(selector, descriptor)
        self.close(selector)
        return True

    def close(self, selector: selectors.BaseSelector) -> None:
        """Let go of the pipes; safe to call twice."""
        for descriptor in list(self._open):
            self._shut(selector, descriptor)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        if self._report_fd >= 0:
            os.close(self._report_fd)
            self._report_fd = -1

    def rows_in_flight(self) -> dict[ChunkId, list[int]]:
        """The rows that the engine was at, by chunk, in the order they were asked; those of committed chunks are done
        with.
        """
        found: dict[ChunkId, list[int]] = {}
        for row, number in self.in_flight.items():
            if number in self.chunks:
                found.setdefault(self.chunks[number], []).append(row)
        return found

    def last_words(self) -> str:
        """How it ended, in words that name no process and no time, so that a quarantined row's reason is the same in
        every run.
        """
        if self.failure is not None:
            failure = self.failure
            return failure.message.rstrip(".") if failure.is_ours else f"{failure.error}: {failure.message}"
        if self.killed_for is not None:
            return self.killed_for.rstrip(".")
        code = self.process.returncode
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with code {code}"

    def _read(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        while descriptor in self._open:
            try:
                data = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                if self._rests[descriptor]:
                    self._take(descriptor, self._rests[descriptor])
                self._shut(selector, descriptor)
                return
            *lines, self._rests[descriptor] = (self._rests[descriptor] + data).split(b"\n")
            for line in lines:
                self._take(descriptor, line)
            if len(data) < READ_BYTES:
                return

    def _shut(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        if descriptor in self._open:
            del self._open[descriptor]
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(descriptor)

    def _take(self, descriptor: int, line: bytes) -> None:
        if descriptor != self._report_fd:
            self._on_log(line.decode(errors="replace").rstrip())
            return
        self.heard_s = time.perf_counter()
        event = read_event(line)
        if event is not None:
            self._on_event(event)
            self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case Begins(number, chunk):
                self.chunks[number] = ChunkId(*chunk)
            case Rows(begun, ended):
                self.in_flight.update({row: number for number, row in begun})
                for row in ended:
                    self.in_flight.pop(row, None)
            case Tries(number, rows):
                self.apart = (number, rows)
            case Commits(number, True, counts):
                self.chunks.pop(number, None)
                self.did.commits += 1
                self.did.committed.update(counts)
            case Commits(number, _, counts, statuses):
                self.chunks.pop(number, None)
                self.did.losses += 1
                self.did.lost.update(counts)
                self.did.lost_statuses.update(statuses)
            case Counts(counts, statuses, live):
                self.did.answered, self.did.statuses = Counter(counts), Counter(statuses)
                self.did.live = checked(Live, live)
            case EngineUp():
                self.is_engine_up = True
            case Ends():
                self.end = event
            case Fails():
                self.failure = event
