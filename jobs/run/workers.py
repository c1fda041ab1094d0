"""Several workers on one run: ordinary commands, one a GPU or as many as asked for, that talk through the run folder.

The supervisor loads no model. It starts `relabel run` once for each worker, on this machine or as an actor of Ray,
restarts those that crash within limits, shows one progress, and concludes the run. Receipts stay the truth, so that
nothing here can lose or double a row; which rows crash an engine is found by the workers themselves, from their crash
journals.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from relabel.jobs.run.crashes import narrows_down
from relabel.jobs.run.label import label
from relabel.jobs.run.notices import OutsideMass
from relabel.jobs.run.progress import ASKED, Live, WorkerState, live_name, live_states
from relabel.jobs.run.report import RunReport
from relabel.jobs.run.results import conclude
from relabel.jobs.run.session import Session, list_every_s
from relabel.jobs.run.stop import DRAIN_S
from relabel.jobs.settings import ENVIRONMENT_PREFIX, JOB_KEYS, absolute
from relabel.manifests import errors
from relabel.manifests.asks import EngineFacts
from relabel.manifests.canaries import CanaryResult
from relabel.manifests.errors import EngineLostError, MissingExtraError, RelabelError, StoreUnreachableError, UsageError
from relabel.manifests.files import HERE, absolute_path, is_url
from relabel.manifests.plan import load_receipt
from relabel.manifests.process import require, stdout_apart, usable_cores
from relabel.manifests.secrets import STORAGE_KEY, counted, redacted
from relabel.manifests.specs import gpus_of, secret_variables
from relabel.manifests.store import map_concurrent, shard_lock_name


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """What was asked for on the command line.

    Args:
        gpus: `all` or numbers; a worker for each, or for as many as the engine spreads over.
        workers: number of workers, without GPUs of their own.
        address: of the Ray cluster.
    Raises:
        UsageError: these do not go together.
    """

    gpus: str | None = None
    workers: int | None = None
    backend: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.gpus is not None and self.workers is not None:
            raise UsageError("--gpus and --workers: give one of them. --gpus starts a worker for each GPU.")
        if self.backend == "ray" and self.gpus is not None:
            raise UsageError("--gpus is for this machine alone; Ray gives out GPUs itself. Use --workers N.")
        if self.backend != "ray" and self.address is not None:
            raise UsageError("--address names a Ray cluster: add --backend ray.")


def label_with(
    pool: WorkerPool,
    session: Session,
    *,
    on_progress: Callable[[], None],
    write: Callable[[str], None],
    on_engine: Callable[[EngineFacts, list[str]], None],
) -> RunReport:
    """Have a session's work done, by this process or by a pool, and conclude the run.

    Raises:
        MissingExtraError: no such GPU, or no Ray, here.
        EngineLostError: every worker was given up.
    """
    if pool.backend != "ray" and pool.gpus is None and pool.workers is None:
        return label(session, on_progress=on_progress, on_engine=on_engine)
    spec = session.opened.job.spec
    if spec.run.single_writer and (pool.backend == "ray" or pool.gpus is not None or pool.workers != 1):
        raise UsageError("run.single_writer vouches for one process: drop it, or --gpus, --workers and --backend ray.")
    supervisor = Supervisor(session, write=write, on_progress=on_progress)
    shards = supervisor.open_shards
    if shards and not supervisor.is_any_free(shards):
        # which finds that out under the locks
        return label(session, on_progress=on_progress, on_engine=on_engine)
    each = gpus_of(spec.engine.args)
    if pool.backend == "ray":
        with ray_workers(supervisor, workers=pool.workers, address=pool.address, gpus_each=each):
            return supervisor.run()
    environment = without_spec(os.environ)
    if pool.gpus is None:
        workers = pool.workers or 1
        places = {f"w{number}": dict[str, str]() for number in range(workers)}
        if workers > 1:  # threads of one model wait for each other at every layer
            threads = max(1, usable_cores() // workers)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
    else:
        chosen = choose_gpus(pool.gpus, visible_gpus())
        groups = gpu_groups(chosen, each)
        spare = len(chosen) - sum(map(len, groups))
        if spare:
            write(f"note: {spare} of {len(chosen)} GPUs stay idle: engine.args.tensor_parallel_size is {each}")
        places = {f"gpu{'+'.join(group)}": {VISIBLE: ",".join(group)} for group in groups}
    for name, gpus in places.items():
        supervisor.add(name, functools.partial(WorkerProcess, environment=environment | gpus))
    return supervisor.run()


# ------------------------------------------------------------------------------
# Which GPUs workers get. Found without torch.

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names for `CUDA_VISIBLE_DEVICES`, in order: what that variable holds already, else one number for each GPU of the
    machine.
    """
    if VISIBLE not in environment:
        num_gpus = _count_by_driver() or len(list(DRIVER_FOLDER.glob("*")))
        return [str(number) for number in range(num_gpus)]
    names = map(str.strip, environment[VISIBLE].split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # CUDA ends at the first invalid name


def _count_by_driver() -> int:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return 0


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
    missing = [number for number in numbers if not 0 <= number < len(visible)]
    if missing:
        raise MissingExtraError(f"--gpus {text}: no GPU {missing[0]}; visible here are 0 to {len(visible) - 1}.")
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


# ------------------------------------------------------------------------------
# A worker: the ordinary command as a child that ends with its parent.

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
READ_S = 5.0
"""How long workers that were killed may take to end, seconds."""


class Ended(NamedTuple):
    """How a worker ended.

    Args:
        worker: its name in receipts, journals and live files.
        code: of its process; negative for a signal.
        result: the JSON object that it printed; empty if it printed none.
    """

    worker: str
    code: int
    result: dict[str, Any]


Heard = tuple[list[str], Ended | None]
"""Lines that a worker wrote to stderr since the last call, and how it ended, once all that it wrote is read."""


Start = Callable[[list[str], bytes], "WorkerProcess | _RayWorker"]


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
        _tell(self._process, spec)

    def heard(self) -> Heard:
        """What it wrote since the last call, and how it ended, once nothing of its group is left."""
        ended = None
        code = self._process.poll()
        if code is not None:
            self.kill()
            for reader in self._readers:
                reader.join(READ_S)
            _tell(self._guard, b"over\n")
            self._guard.wait()
            results = filter(None, map(_object, reversed(self._out)))
            ended = Ended(f"{HERE}-{self._process.pid}", code, next(results, {}))
        count = len(self._lines)
        lines, self._lines[:count] = self._lines[:count], []
        return lines, ended

    def terminate(self) -> None:
        """Ask it to end; a worker commits what is under way."""
        self._process.terminate()

    def kill(self) -> None:
        """End whatever is left of its process group, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _tell(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it may be gone already
        stdin.write(data)


def _read(pipe: IO[bytes], lines: list[str]) -> None:
    with pipe:
        for line in pipe:
            lines.append(line.decode(errors="replace").rstrip())


def _object(line: str) -> dict[str, Any]:
    """The JSON object in a line; empty if it holds none."""
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}


def without_spec(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that set keys of a job: a worker's job has them already."""
    keys = {name: name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")[0] for name in environment}
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or keys[name] not in JOB_KEYS
    }


# ------------------------------------------------------------------------------
# The supervisor: starts workers, restarts those that crash, and adds up what they say.

LISTEN_S = 0.1
SNAPSHOT_EVERY_S = 1.0
"""How often the workers' live files are read, seconds."""
MOST_WAKES = 3
"""Starts in a row of an idle worker that find nothing to do."""
GRACE_S = 8.0
"""How long after the end of a drain a worker may take to close its engine, seconds."""
MOST_CRASHES = 3
"""Of one worker in a row, with neither a commit nor suspects narrowed down in between, before it is given up."""
BACKOFF_S = 1.0
"""Before a worker is started again after its first such crash; doubled for each further one."""


@dataclass(slots=True)
class _Slot:
    """A worker's place.

    Args:
        starts_s: when it is started, on `time.perf_counter`; None if no start is due.
        seen: receipts at the last start.
        wakes: starts in a row that found nothing to do.
        error: why it was given up.
    """

    name: str
    start: Start
    seen: set[str]
    starts_s: float | None = 0.0
    worker: WorkerProcess | _RayWorker | None = None
    starts: int = 0
    crashes: int = 0
    wakes: int = 0
    last_line: str = ""
    has_spoken: bool = False
    error: RelabelError | RuntimeError | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing works there, or is about to, though it might."""
        return self.worker is None and self.starts_s is None and self.error is None


class Supervisor:
    """Has a session's work done by workers.

    Args:
        session: opened here, worked on by the workers; its `progress` is kept up to date.
        write: a line for the user.
        on_progress: called often.
    """

    def __init__(self, session: Session, *, write: Callable[[str], None], on_progress: Callable[[], None]) -> None:
        self.session = session
        self.write = write
        self._on_progress = on_progress
        self._slots: list[_Slot] = []
        self._look_for_more: Callable[[], None] = lambda: None
        self._error: RelabelError | RuntimeError | None = None
        self._is_ending = False
        self._ends_s = math.inf
        self._written = set[str]()
        self._remarks: dict[str, None] = {}
        self._results: list[dict[str, Any]] = []
        self._states: dict[str, WorkerState] = {}
        self._gone: set[str] = set()
        self._committed: int | None = None
        self._look_every_s = list_every_s(session.opened.plan) / 6
        self._next_snapshot_s = time.perf_counter() + SNAPSHOT_EVERY_S
        self._next_look_s = time.perf_counter() + self._look_every_s

    @functools.cached_property
    def open_shards(self) -> list[int]:
        """Shards with work at the start."""
        return self.session.left.open_shards()

    @functools.cached_property
    def _listed(self) -> set[str]:
        """Receipts at the start."""
        return set(self.session.opened.folder.listing())

    def add(self, name: str, start: Start) -> None:
        """Have one more worker."""
        self._slots.append(_Slot(name, start, self._listed))

    def grows_by(self, look_for_more: Callable[[], None]) -> None:
        """Have this called now and then while work is left; it may `add` workers."""
        self._look_for_more = look_for_more

    @property
    def num_workers(self) -> int:
        """Those that were added, given up or not."""
        return len(self._slots)

    def run(self) -> RunReport:
        """Work until nothing is left that can be done here, and conclude.

        Raises:
            EngineLostError: every worker was given up.
            RelabelError: the error of a worker that another start would not fix.
        """
        started = time.perf_counter()
        session = self.session
        if self.open_shards:
            if len(self.open_shards) < len(self._slots):
                self.write(
                    f"note: {len(self._slots)} workers, and {counted(len(self.open_shards), 'shard')} to do: a shard "
                    "is one worker's. For a new output, set `shards` to four a worker or more."
                )
            session.busy = self.open_shards
            try:
                self._supervise()
            finally:
                self._end_all()
                self._count()
                with contextlib.suppress(OSError, RelabelError):
                    for worker in self._states:
                        session.opened.store.remove(live_name(worker))
            seen = session.opened.folder.attempts_of_all()
            session.taken = [shard for shard in session.shards if seen.get(shard) != session.left.seen.get(shard)]
        if self._error is not None:
            raise self._error
        report = conclude(session)
        report.engine_start_s = max((result["engine_start_s"] for result in self._results), default=0.0)
        report.remarks = list(self._remarks)
        report.engine_restarts = sum(max(0, slot.starts - 1) for slot in self._slots)
        runs = [result["this_run"] for result in self._results]
        report.this_run.costs = total_costs([run["costs"] for run in runs if "costs" in run])
        for run in runs:
            if "canary" in run:
                report.this_run.canary = CanaryResult(**run["canary"])
                break
        report.seconds = time.perf_counter() - started
        return report

    def job(self) -> bytes:
        """The job as workers read it: resolved, with its storage options, which a spec never dumps."""
        spec = self.session.opened.job.spec
        values = json.loads(json.dumps(absolute(spec).model_dump(mode="json")).replace("${", "$${"))
        return json.dumps({**values, STORAGE_KEY: spec.storage_options}, ensure_ascii=False).encode()

    def words(self) -> list[str]:
        """The command of each worker."""
        session = self.session
        ledger = self.session.opened.job.ledger
        # the session's shards are every n-th of the plan's; the one after the last would be beyond them
        first, following = [*session.shards, session.shards[0] + len(session.opened.plan.shards)][:2]
        words = ["retry" if session.is_retry else "run", "/dev/stdin", "--output", "json", "--log-format", "json"]
        words += ["--part-of", session.execution, "--shard", f"{first}/{following - first}"]
        share = math.ceil(len(self.open_shards) / self.num_workers)
        words += ["--most-shards", str(share)]
        if ledger is not None:
            words += ["--ledger", absolute_path(ledger)]
        if session.stop.deadline is not None:
            end_s = time.time() + session.stop.deadline.left_s()
            words += ["--until", datetime.fromtimestamp(end_s, UTC).isoformat()]
        return words

    def _supervise(self) -> None:
        document = self.job()
        words = self.words()
        stop = self.session.stop
        while True:
            self._start_due(words, document)
            time.sleep(LISTEN_S)
            for slot in self._slots:
                self._listen(slot)
            stop.mind(0.0)
            if stop.reason is not None:
                self._drain_all()
            if stop.is_now or time.perf_counter() > self._ends_s:
                self._end_all()
            self._look()
            self._on_progress()
            alive = any(slot.worker is not None for slot in self._slots)
            is_due = not self._is_ending and any(slot.starts_s is not None for slot in self._slots)
            if not alive and not is_due and (self._is_ending or not self._wake()):
                return

    def _start_due(self, words: list[str], document: bytes) -> None:
        """Start the workers whose time has come."""
        for slot in self._slots:
            if slot.starts_s is None or self._is_ending or time.perf_counter() < slot.starts_s:
                continue
            slot.starts_s = None
            slot.has_spoken = False
            slot.last_line = ""
            slot.starts += 1
            slot.worker = slot.start(words, document)

    def _listen(self, slot: _Slot) -> None:
        if slot.worker is None:
            return
        lines, ended = slot.worker.heard()
        for line in lines:
            self._hear(slot, line)
        if ended is not None:
            slot.worker = None
            self._ended(slot, ended)

    def _hear(self, slot: _Slot, line: str) -> None:
        """A line of a worker's stderr: an object of its log, or what a native library wrote."""
        slot.has_spoken = True
        event = {"event": "output", "level": "info", "message": line, **_object(line)}
        kind = event["event"]
        text = str(event["message"])
        if kind == "engine":
            self.session.progress.engine_starts += 1
            if not self._written:
                self.session.progress.started_s = time.perf_counter()
        if kind in ("engine", "remark"):
            if text not in self._written:
                self._written.add(text)
                self.write(text)
        elif kind in ("output", "crash") or (event["level"] == "warning" and kind != "none_accepted"):
            slot.last_line = text if kind == "output" else slot.last_line
            self._log(slot, str(event.get("traceback") or text))

    def _log(self, slot: _Slot, text: str) -> None:
        """Lines about a worker, with its name."""
        for line in redacted(text).splitlines():
            self.write(f"[{slot.name}] {line}")

    def _ended(self, slot: _Slot, ended: Ended) -> None:
        """A worker is gone: decide what follows."""
        result = ended.result
        stop = self.session.stop
        did = result.get("this_run")
        if did is not None:
            self._results.append(result)
            self._remarks |= dict.fromkeys(result["remarks"])
            slot.crashes = 0
            slot.wakes = 0 if did["pairs"] or did["reused"] else slot.wakes + 1
            reason = result["stopped"]
            if reason is None or self._is_ending:
                return
            if reason == "SIGTERM" and stop.reason is None and slot.wakes < MOST_WAKES:
                # not from here: its node is taken away, or somebody ended this process alone
                self._log(slot, "was stopped by SIGTERM; it is started again.")
                slot.starts_s = time.perf_counter()
                return
            if stop.deadline is not None and reason.startswith("--until"):
                reason = stop.deadline.text  # a worker gets any deadline as --until
            stop.drain(reason)
            return
        self._gone.add(ended.worker)
        if self._is_ending or stop.reason is not None:
            return  # it was asked to end, or crashed at a time when nothing is begun any more
        kind = getattr(errors, str(result.get("error")), RuntimeError)
        message = str(result.get("message", "")).replace("/dev/stdin", self.session.opened.job.where)
        if issubclass(kind, errors.EngineCrashError) or not issubclass(kind, RelabelError):
            self._crashed(slot, ended, message, is_fault=bool(message) and kind is RuntimeError)
        elif issubclass(kind, errors.ModelError | errors.MissingExtraError):
            self._give_up(slot, kind(message))  # one device may be off where the others are not
        else:
            self._error = kind(message)
            self._drain_all()

    def _crashed(self, slot: _Slot, ended: Ended, message: str, *, is_fault: bool) -> None:
        """Start it again, unless it crashes again and again with nothing done in between."""
        last = f": {slot.last_line}" if slot.last_line else ""
        how = f"was killed by signal {-ended.code}" if ended.code < 0 else f"ended with code {ended.code}{last}"
        words = message.rstrip(".") or f"its process {how}"
        slot.starts_s = time.perf_counter()
        store = self.session.opened.store
        listed = set(self.session.opened.folder.listing())
        new = sorted(listed - slot.seen)
        slot.seen = listed
        has_committed = any(load_receipt(store, name).worker == ended.worker for name in new)
        if has_committed or narrows_down(store, ended.worker):
            slot.crashes = 0
        else:
            slot.crashes += 1
            slot.starts_s += BACKOFF_S * 2 ** (slot.crashes - 1)
        is_given_up = slot.crashes >= MOST_CRASHES
        follows = "" if is_given_up else "; it is started again"
        self._log(slot, f"the engine crashed ({words}){follows}.")
        if is_given_up:
            text = (
                f"worker {slot.name}: its engine crashed {slot.crashes} times without a commit in between. Last: "
                f"{words}. What was committed is safe."
            )
            self._give_up(slot, RuntimeError(text) if is_fault else EngineLostError(text))

    def _give_up(self, slot: _Slot, error: RelabelError | RuntimeError) -> None:
        slot.error = error
        slot.starts_s = None
        if all(other.error is not None for other in self._slots):
            self._error = error
            return
        self._remarks[f"worker {slot.name} was given up: {error}"] = None
        self.write(f"worker {slot.name} is given up: {error}")

    def _wake(self) -> bool:
        """Start an idle worker if a shard has work and no worker holds it: its worker was given up, or its node was
        lost. If no work is left, end the workers that Ray has not placed yet.
        """
        quiet = [slot.worker for slot in self._slots if slot.worker is not None and not slot.has_spoken]
        idle = [slot for slot in self._slots if slot.is_idle and slot.wakes < MOST_WAKES]
        if not quiet and not idle:
            return False
        open_shards = self.session.left.open_shards()
        if quiet and not open_shards:
            self._drain_all()
            for worker in quiet:
                worker.kill()
        if not idle or not self.is_any_free(open_shards):
            return False
        idle[0].starts_s = 0.0
        return True

    def is_any_free(self, shards: list[int]) -> bool:
        """Whether one of these shards is held by no worker."""
        store = self.session.opened.store
        return not all(map_concurrent(store, store.is_locked, map(shard_lock_name, shards)))

    def _drain_all(self) -> None:
        """Ask all workers to end, once, and start none any more."""
        stop = self.session.stop
        self._ends_s = min(self._ends_s, stop.deadline_s + GRACE_S, time.perf_counter() + DRAIN_S + GRACE_S)
        if not self._is_ending:
            self._is_ending = True
            for slot in self._slots:
                if slot.worker is not None:
                    slot.worker.terminate()

    def _end_all(self) -> None:
        self._is_ending = True
        for slot in self._slots:
            if slot.worker is not None:
                slot.worker.kill()
        until_s = time.perf_counter() + READ_S
        while any(slot.worker is not None for slot in self._slots) and time.perf_counter() < until_s:
            for slot in self._slots:
                self._listen(slot)
            time.sleep(LISTEN_S / 5)

    def _look(self) -> None:
        """Bring the session's progress up to date from what is in the run folder; now and then, wake idle workers."""
        now_s = time.perf_counter()
        session = self.session
        if now_s < self._next_snapshot_s:
            return
        self._next_snapshot_s = now_s + SNAPSHOT_EVERY_S
        self._count()
        progress = session.progress
        if self._committed is not None:  # by now the workers' own commits of then are counted
            theirs = self._committed - progress.pairs - progress.reused
            self._committed = None
            progress.rows_of_others = max(theirs, 0)  # too many once a worker was late to count its own: not for good
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + self._look_every_s
            with contextlib.suppress(StoreUnreachableError):  # a command that needs the store reports that
                seen = session.opened.folder.attempts_of_all()
                self._committed = sum(session.left.rows_since(shard, seen.get(shard, {})) for shard in session.shards)
            if not self._is_ending:
                self._look_for_more()
                self._wake()

    def _count(self) -> None:
        """Add up what the workers say in their live files; of one that crashed its answers count, and not what it had
        in hand.
        """
        with contextlib.suppress(StoreUnreachableError):
            states = live_states(self.session.opened.store)
            for state in states:
                if state.execution == self.session.execution:
                    self._states[state.worker] = state
        states = list(self._states.values())
        progress = self.session.progress
        for name in (*ASKED, "reused", "chunks_committed", "chunks_lost"):
            setattr(progress, name, sum(getattr(state, name) for state in states))
        progress.prompt_tokens += progress.cached_tokens
        progress.statuses = sum((state.statuses for state in states), Counter[str]())
        progress.live = Live()
        progress.kept = Counter()
        progress.jumps = []
        progress.outside = OutsideMass()
        for state in states:
            progress.kept.update(state.kept)
            progress.jumps += state.jumps
            progress.outside.add(state.outside)
            live = state.live
            if state.worker in self._gone:
                live = Live(accepted=live.accepted, refused=live.refused)
            progress.live.add(live)


def total_costs(costs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What several engines cost together, by name; what one of them does not know is not known of all."""
    if not costs:
        return None
    total = dict[str, Any]()
    for name in itertools.chain.from_iterable(costs):
        parts = [cost.get(name) for cost in costs]
        total[name] = None if None in parts else sum(parts)
    return total


# ------------------------------------------------------------------------------
# Workers as Ray actors.

PASSED_ON = ("AWS_", "FSSPEC_", "HF_", "NCCL_", "OMP_", "PYTHONSAFEPATH", "RELABEL_", "VLLM_")
"""Variables that workers get from the driver, with those that hold the engine's secrets."""
MAX_RESTARTS = 64
"""How often Ray places one actor again. A cluster of machines that come and go loses one now and then; more is a fault
of its own.
"""
CONNECT_S = 10.0


class WorkerActor(WorkerProcess):
    """A worker on whichever node Ray chose. If the node is lost, Ray makes the actor again on another one, and so the
    worker starts again.

    Args:
        environment: the driver's variables. An argument of the actor and no `runtime_env`, which Ray writes to its
            logs.
        folder: the driver's working directory, so that relative paths mean the same; entered if it exists.
    """

    def __init__(self, words: list[str], spec: bytes, environment: dict[str, str], folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        super().__init__(words, spec, {**os.environ, **environment})


class _RayWorker:
    """An actor as the supervisor sees it: one call of `heard` is under way at a time."""

    def __init__(self, words: list[str], spec: bytes, *, ray: Any, kind: Any, environment: dict[str, str]) -> None:
        self._ray = ray
        self._actor = kind.remote(words, spec, environment, str(Path.cwd()))
        self._call = self._actor.heard.remote()

    def heard(self) -> Heard:
        if not self._ray.wait([self._call], timeout=0)[0]:
            return [], None
        try:
            lines, ended = self._ray.get(self._call)
        except self._ray.exceptions.RayActorError:
            message = f"Ray could not keep an actor up: {MAX_RESTARTS} restarts, or no node to go to."
            return [], Ended("", -signal.SIGKILL, {"error": MissingExtraError.__name__, "message": message})
        if ended is None:
            self._call = self._actor.heard.remote()
        else:
            self.kill()  # which frees its GPUs
        return lines, ended

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def kill(self) -> None:
        self._ray.kill(self._actor)


@contextlib.contextmanager
def ray_workers(supervisor: Supervisor, *, workers: int | None, address: str | None, gpus_each: int) -> Iterator[None]:
    """Give a supervisor workers on a Ray cluster while the block runs.

    Args:
        workers: number of actors; by default as many as the cluster's GPUs allow, those of nodes that join later too.
        address: `auto`, `ray://…`, or None for `RAY_ADDRESS`, else a cluster of this machine's own.
    Raises:
        MissingExtraError: no Ray here, no cluster there, or no GPU in it.
    """
    ray = require("ray", extra="ray", purpose="--backend ray")
    if not supervisor.open_shards:
        yield
        return
    with stdout_apart(), _joined(ray, address):
        gpus = _gpus_of_cluster(ray)
        nodes = sum(node["Alive"] for node in ray.nodes())
        count = workers if workers is not None else gpus // gpus_each
        if count == 0:
            raise MissingExtraError(
                f"--backend ray: the cluster has {counted(gpus, 'GPU')}, and an engine of this job wants {gpus_each}. "
                "Add nodes, or run on CPUs with --workers N."
            )
        spec = supervisor.session.opened.job.spec
        if nodes > 1 and not is_url(spec.output):
            supervisor.write(f"note: {nodes} nodes write to {spec.output}: it must be one folder that all of them see")
        kind = ray.remote(WorkerActor).options(
            num_cpus=1,
            num_gpus=gpus_each if gpus else 0,
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
        secret_names = set(secret_variables(spec.engine.args).values())
        variables = without_spec(os.environ)
        passed_on = [name for name in variables if name.startswith(PASSED_ON) or name in secret_names]
        environment = {name: variables[name] for name in passed_on}
        start = functools.partial(_RayWorker, ray=ray, kind=kind, environment=environment)
        for number in range(count):
            supervisor.add(f"r{number}", start)
        of_each = f" with {counted(gpus_each, 'GPU')} each" if gpus else ""
        supervisor.write(f"asked Ray for {counted(count, 'actor')}{of_each} on {counted(nodes, 'node')}")

        def look_for_more() -> None:
            more = _gpus_of_cluster(ray) // gpus_each - supervisor.num_workers
            if more <= 0:
                return
            for _ in range(more):
                supervisor.add(f"r{supervisor.num_workers}", start)
            supervisor.write(f"the cluster has grown: asked Ray for {counted(more, 'more actor')}{of_each}")

        if workers is None:
            supervisor.grows_by(look_for_more)
        yield


def _gpus_of_cluster(ray: Any) -> int:
    return int(ray.cluster_resources().get("GPU", 0))


@contextlib.contextmanager
def _joined(ray: Any, address: str | None) -> Iterator[None]:
    """Be part of the cluster while the block runs. Ray's own handlers of signals do not stay: ours drain."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "this machine"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # whether something listens at an address: Ray itself would try for minutes
        host, colon, port = where.removeprefix("ray://").rpartition(":")
        if colon and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        # Ray puts the working directory of this moment first on its workers' path: they get one that they have there
        # anyhow
        with warnings.catch_warnings(), contextlib.chdir(Path(ray.__file__).parent / "_private" / "workers"):
            warnings.simplefilter("ignore", FutureWarning)  # of Ray's own next defaults
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None if address else False,
            )
    except Exception as exc:
        raise MissingExtraError(
            f"--backend ray: no Ray cluster at {where} ({exc}). Start one with `ray start --head`, or check --address."
        ) from exc
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()
