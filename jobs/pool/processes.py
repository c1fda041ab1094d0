"""Worker processes as a supervisor sees them: GPUs, slots, pipes, and process groups that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from relabel.jobs.pool.messages import (
    Assignment,
    Begins,
    Commits,
    Counts,
    Done,
    Ends,
    EngineUp,
    Event,
    Fails,
    Rows,
    Tries,
    read_event,
)
from relabel.jobs.run.chunks import ChunkCase, Live, plain_cases
from relabel.manifests.errors import MissingExtraError, RelabelError, UsageError
from relabel.manifests.receipts import ChunkId
from relabel.manifests.records import checked
from relabel.manifests.secrets import counted

# ------------------------------------------------------------------------------
# Which GPUs this process may use, found without torch, and how they are given out to workers.


VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
SMI_TIMEOUT_S = 30.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names for `CUDA_VISIBLE_DEVICES`, in order: what that variable says already, else one number for each GPU of the
    machine.
    """
    if VISIBLE in environment:
        names: list[str] = []
        for name in environment[VISIBLE].split(","):
            if not name.strip() or name.strip() == "-1":  # CUDA takes what comes before the first that is none
                break
            names.append(name.strip())
        return names
    return [str(number) for number in range(_count())]


def choose_gpus(text: str, visible: Sequence[str]) -> list[str]:
    """What `--gpus all` or `--gpus 0,1` names. Numbers count within the visible ones, as CUDA itself does.

    Raises:
        UsageError: not of that form, or a GPU twice.
        MissingExtraError: there is no such GPU here.
    """
    numbers = _numbers(text)
    if not visible:
        raise MissingExtraError(
            f"--gpus {text}: no NVIDIA GPU is visible here (asked the driver, nvidia-smi and {DRIVER_FOLDER}; "
            f"{VISIBLE} counts where it is "
            "set). On a machine without one use --workers N, or leave both away."
        )
    if numbers is None:
        return list(visible)
    for number in numbers:
        if not 0 <= number < len(visible):
            raise MissingExtraError(
                f"--gpus {text}: there is no GPU {number}; visible here are 0 to {len(visible) - 1}."
            )
    return [visible[number] for number in numbers]


def _numbers(text: str) -> list[int] | None:
    """The numbers of `0,1`; None for `all`. Read before anything is looked for: a slip is one wherever it is made."""
    if text.strip() == "all":
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"--gpus {text}: want all, or numbers such as 0,1.") from exc
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpus {text}: names a GPU twice; each gets one engine.")
    return numbers


def gpu_groups(names: Sequence[str], map_concurrent: int) -> list[list[str]]:
    """The GPUs of each worker, as many a worker as its engine spreads over; those left over belong to none.

    Raises:
        MissingExtraError: there are not enough for one.
    """
    if len(names) < map_concurrent:
        raise MissingExtraError(
            f"engine.args.tensor_parallel_size is {map_concurrent}, and {counted(len(names), 'GPU')} given; give more, "
            "or lower it."
        )
    return [
        list(names[start : start + map_concurrent])
        for start in range(0, len(names) - map_concurrent + 1, map_concurrent)
    ]


def _count() -> int:
    for count in (_by_driver, _by_smi, _by_folder):
        if found := count():
            return found
    return 0


def _by_driver() -> int:
    """NVML, the library that comes with the driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    number = ctypes.c_uint(0)
    try:
        return number.value if library.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0 else 0
    finally:
        library.nvmlShutdown()


def _by_smi() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def _by_folder() -> int:
    return len(list(DRIVER_FOLDER.iterdir())) if DRIVER_FOLDER.is_dir() else 0


# ------------------------------------------------------------------------------
# No engine outlives the command that started it, however that command ends.
#
# A guard is a process of a few lines that knows the process groups of the workers and holds the end of a pipe. When the
# command dies, even by `kill -9`, the pipe closes, and the guard kills what is left of those groups: workers that hang
# in a driver's call, and processes that an engine started in its turn (one a GPU under tensor parallelism).


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


# ------------------------------------------------------------------------------
# One worker process as its supervisor sees it: its pipes, what it reported, and which rows its engine was at when it
# ended.


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


# ------------------------------------------------------------------------------
# The places of a worker pool's workers: which GPUs each has, and what became of it.


@dataclass(slots=True)
class Slot:
    """A worker's place: the GPUs it gets, and what became of it so far.

    Args:
        variables: what its environment has beside the supervisor's own.
        starts_s: when its next life begins, on `time.perf_counter`; None if none is due.
        error: why it was given up.
        past: what the lives before did.
    """

    name: str
    variables: dict[str, str]
    starts_s: float | None = 0.0
    process: WorkerProcess | None = None
    num_processes: int = 0
    crashes: int = 0
    error: RelabelError | RuntimeError | None = None
    past: Done = field(default_factory=Done)


def cpu_slots(count: int) -> list[Slot]:
    """Workers that get no GPU of their own."""
    return [Slot(f"w{number}", {}) for number in range(count)]


def gpu_slots(groups: list[list[str]]) -> list[Slot]:
    """A worker for each group of GPUs."""
    return [Slot(f"gpu{'+'.join(group)}", {VISIBLE: ",".join(group)}) for group in groups]


def log_name(slot: Slot) -> str:
    """Where a worker's own lines are kept, below the output."""
    return f"logs/worker-{socket.gethostname()}-{slot.name}.log"
