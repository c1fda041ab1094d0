"""Worker processes: which GPUs they get, and the ordinary command as a child that ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from relabel.manifests.errors import MissingExtraError, UsageError
from relabel.manifests.files import HERE
from relabel.manifests.secrets import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
READ_S = 5.0
"""How long the rest of what an ended process wrote may take to read, seconds."""
GUARD = """
import os, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
if not sys.stdin.read():
    try:
        os.killpg(int(sys.argv[1]), signal.SIGKILL)
    except OSError:
        pass
"""


class Ended(NamedTuple):
    """How a worker ended.

    Args:
        worker: its name in receipts, journals and live files.
        code: of its process; negative for a signal.
        result: the JSON object that it printed; None if it printed none.
        lines: what it wrote to stderr since the last call of `lines`.
    """

    worker: str
    code: int
    result: dict[str, Any] | None
    lines: list[str]


class WorkerProcess:
    """A command of relabel as a child process, in a process group of its own: Ctrl-C is its parent's alone, and the
    group can be ended as one.

    No engine outlives the process that started it, however that ends: a guard, a process of a few lines, holds the end
    of a pipe. If this process dies, even by `kill -9`, the pipe closes, and the guard kills what is left of the group:
    a worker that hangs in a driver's call, and processes that an engine started in its turn.

    Args:
        words: of the command; `/dev/stdin` among them is where `spec` is.
        spec: the job. It may hold storage secrets, which no command line and no variable may.
    """

    def __init__(self, words: Sequence[str], spec: bytes, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "relabel", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._out: list[str] = []
        self._lines: list[str] = []
        pipes = [(self._process.stdout, self._out), (self._process.stderr, self._lines)]
        self._readers = [threading.Thread(target=_read, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # it may be gone already
            stdin.write(spec)

    def lines(self) -> list[str]:
        """What it wrote to stderr since the last call."""
        count = len(self._lines)
        found, self._lines[:count] = self._lines[:count], []
        return found

    def ended(self) -> Ended | None:
        """How it ended, once all that it wrote is read and nothing of its group is left; None before."""
        code = self._process.poll()
        if code is None:
            return None
        self.kill()
        for reader in self._readers:
            reader.join(READ_S)
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._guard.stdin as stdin:
            stdin.write(b"over\n")
        self._guard.wait()
        results = [found for line in self._out if (found := _object(line)) is not None]
        return Ended(f"{HERE}-{self._process.pid}", code, results[-1] if results else None, self.lines())

    def terminate(self) -> None:
        """Ask it to end; a worker commits what is under way."""
        self._process.terminate()

    def kill(self) -> None:
        """End whatever is left of its process group, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _read(pipe: IO[bytes], lines: list[str]) -> None:
    with pipe:
        for line in pipe:
            lines.append(line.decode(errors="replace").rstrip())


def _object(line: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names for `CUDA_VISIBLE_DEVICES`, in order: what that variable holds already, else one number for each GPU of the
    machine. Found without torch.
    """
    if VISIBLE in environment:
        names: list[str] = []
        for name in environment[VISIBLE].split(","):
            if not name.strip() or name.strip() == "-1":  # CUDA takes what comes before the first invalid name
                break
            names.append(name.strip())
        return names
    folders = list(DRIVER_FOLDER.iterdir()) if DRIVER_FOLDER.is_dir() else []
    return [str(number) for number in range(_count_by_driver() or len(folders))]


def choose_gpus(text: str, visible: Sequence[str]) -> list[str]:
    """What `--gpus all` or `--gpus 0,1` names. Numbers count within the visible ones, as CUDA itself does.

    Raises:
        UsageError: not of that form, or a GPU twice.
        MissingExtraError: there is no such GPU here.
    """
    try:
        numbers = range(len(visible)) if text.strip() == "all" else [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"--gpus {text}: want all, or numbers such as 0,1.") from exc
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpus {text}: names a GPU twice; each gets one engine.")
    if not visible:
        raise MissingExtraError(
            f"--gpus {text}: no NVIDIA GPU is visible here (asked the driver and {DRIVER_FOLDER}; {VISIBLE} counts "
            "where it is set). On a machine without one use --workers N, or leave both away."
        )
    for number in numbers:
        if not 0 <= number < len(visible):
            raise MissingExtraError(
                f"--gpus {text}: there is no GPU {number}; visible here are 0 to {len(visible) - 1}."
            )
    return [visible[number] for number in numbers]


def gpu_groups(names: Sequence[str], each: int) -> list[list[str]]:
    """The GPUs of each worker, as many a worker as its engine spreads over; the rest belong to none.

    Raises:
        MissingExtraError: there are not enough for one.
    """
    if len(names) < each:
        raise MissingExtraError(
            f"engine.args.tensor_parallel_size is {each}, and {counted(len(names), 'GPU')} given; give more, or lower "
            "it."
        )
    return [list(names[start : start + each]) for start in range(0, len(names) - each + 1, each)]


def _count_by_driver() -> int:
    """By NVML, the library that comes with the driver."""
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
