"""Several workers on one run: ordinary commands, one a GPU or as many as asked for, that talk through the run folder.

The supervisor loads no model. It starts `relabel run` once for each worker, restarts those that crash within limits,
shows one progress, and concludes the run. Receipts stay the truth, so that nothing here can lose or double a row; which
rows crash an engine is found by the workers themselves, from their crash journals.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from relabel.jobs.run.chunks import Live
from relabel.jobs.run.counts import ASKED, WorkerState, live_states
from relabel.jobs.run.crashes import crashed_apart
from relabel.jobs.run.results import RunReport, conclude
from relabel.jobs.run.session import Session, list_every_s
from relabel.jobs.run.stop import DRAIN_S
from relabel.jobs.settings import ENVIRONMENT_PREFIX, JOB, absolute
from relabel.manifests import errors
from relabel.manifests.errors import EngineLostError, MissingExtraError, RelabelError, StoreUnreachableError, UsageError
from relabel.manifests.files import HERE, absolute_path
from relabel.manifests.receipts import load_receipt
from relabel.manifests.secrets import STORAGE_KEY, counted, redacted
from relabel.manifests.store import map_concurrent, shard_lock_name

# ------------------------------------------------------------------------------
# Worker processes: which GPUs they get, and the ordinary command as a child that ends with its parent.


VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
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


# ------------------------------------------------------------------------------
# Several workers on one run: ordinary commands, one a GPU or as many as asked for, that talk through the run folder.
# The supervisor loads no model. It starts `relabel run` once for each worker, restarts those that crash within
# limits, shows one progress, and concludes the run. Receipts stay the truth, so that nothing here can lose or double
# a row; which rows crash an engine is found by the workers themselves, from their crash journals.


LISTEN_S = 0.1
SNAPSHOT_EVERY_S = 1.0
"""How often the workers' live files are read, seconds."""
READ_S = 5.0
"""How long workers that were killed may take to end, seconds."""
MOST_WAKES = 3
"""Starts in a row of an idle worker that find nothing to do."""
GRACE_S = 8.0
"""How long after the end of a drain a worker may take to close its engine, seconds."""
MOST_CRASHES = 3
"""Of one worker in a row, with neither a commit nor suspects narrowed down in between, before it is given up."""
_COUNTS = (*ASKED, "reused", "chunks_committed", "chunks_lost")
BACKOFF_S = 1.0
"""Before a worker is started again after its first such crash; doubled for each further one."""


def is_any_free(session: Session, open_shards: list[int]) -> bool:
    """Whether a shard with work is held by no worker; if none is, this is an overlapping tick."""
    store = session.opened.store
    some = max(1, store.readers)  # several at once, but not all: the first that is free settles it
    return any(
        not all(map_concurrent(store, store.is_locked, map(shard_lock_name, open_shards[start : start + some])))
        for start in range(0, len(open_shards), some)
    )


def without_spec(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that set keys of a job: a worker's job has them already."""
    keys = {name: name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")[0] for name in environment}
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or keys[name] not in JOB.fields
    }


class Worker(Protocol):
    """A worker under way: a `WorkerProcess`, or one that an actor of Ray holds."""

    def lines(self) -> list[str]: ...

    def ended(self) -> Ended | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[list[str], bytes], Worker]


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
    starts_s: float | None = 0.0
    worker: Worker | None = None
    starts: int = 0
    crashes: int = 0
    wakes: int = 0
    seen: set[str] = field(default_factory=set)
    last_line: str = ""
    has_spoken: bool = False
    error: RelabelError | RuntimeError | None = None


class Supervisor:
    """Has a session's work done by workers.

    Args:
        session: opened here, worked on by the workers; its `progress` is kept up to date.
        say: a line for the user.
        on_progress: called often.

    Attributes:
        slots: a place for each worker.
    """

    def __init__(self, session: Session, *, say: Callable[[str], None], on_progress: Callable[[], None]) -> None:
        self.session = session
        self.say = say
        self._on_progress = on_progress
        self.slots: list[_Slot] = []
        self._error: RelabelError | RuntimeError | None = None
        self._is_ending = False
        self._ends_s = math.inf
        self._said: set[str] = set()
        self._remarks: dict[str, None] = {}
        self._results: list[dict[str, Any]] = []
        self._states: dict[str, WorkerState] = {}
        self._gone: set[str] = set()
        self._listed: int | None = None
        self._list_every_s = list_every_s(session.opened.plan)
        self._wake_every_s = self._list_every_s / 6
        now_s = time.perf_counter()
        self._next_snapshot_s = now_s + SNAPSHOT_EVERY_S
        self._next_wake_s = now_s + self._wake_every_s
        self._next_listing_s = now_s + self._list_every_s

    def add(self, name: str, start: Start) -> None:
        """Have one more worker."""
        self.slots.append(_Slot(name, start))

    def run(self) -> RunReport:
        """Work until nothing is left that can be done here, and conclude.

        Raises:
            EngineLostError: every worker was given up.
            RelabelError: the error of a worker that another start would not fix.
        """
        started, session = time.perf_counter(), self.session
        if open_shards := session.left.open_shards():
            if len(open_shards) < len(self.slots):
                self.say(
                    f"note: {len(self.slots)} workers, and {counted(len(open_shards), 'shard')} to do: a shard is one "
                    "worker's. For a new output, set `shards` to four a worker or more."
                )
            session.busy = open_shards
            try:
                self._supervise()
            finally:
                self._end_all()
            seen = session.opened.folder.attempts_of_all()
            session.taken = [shard for shard in session.shards if seen.get(shard) != session.left.seen.get(shard)]
        if self._error is not None:
            raise self._error
        self._count()
        report = conclude(session)
        report.engine_start_s = max((one["engine_start_s"] for one in self._results), default=0.0)
        report.remarks = list(self._remarks)
        report.engine_restarts = sum(max(0, slot.starts - 1) for slot in self.slots)
        report.did.costs = _sum([one["this_run"].get("costs") for one in self._results])
        report.did.canary = next((found for one in self._results if (found := one["this_run"].get("canary"))), None)
        report.seconds = time.perf_counter() - started
        return report

    def _supervise(self) -> None:
        document, words = self.job(), self.words()
        seen = set(self.session.opened.folder.listing())
        for slot in self.slots:
            slot.seen = seen
        while True:
            for slot in self.slots:
                self._start_if_due(slot, words, document)
            time.sleep(LISTEN_S)
            for slot in self.slots:
                self._listen(slot)
            self._heed_stop()
            self._snapshot()
            self._on_progress()
            alive = [slot for slot in self.slots if slot.worker is not None]
            is_over = not alive and not any(slot.starts_s is not None for slot in self.slots)
            if self._is_ending:
                if not alive:
                    return
            elif is_over or time.perf_counter() >= self._next_wake_s:
                self._next_wake_s = time.perf_counter() + self._wake_every_s
                if not self._wake() and is_over:
                    return

    def job(self) -> bytes:
        """The job as workers read it: resolved, with its storage options, which a spec never dumps."""
        spec = self.session.opened.job.spec
        values = json.loads(json.dumps(absolute(spec).model_dump(mode="json")).replace("${", "$${"))
        return json.dumps({**values, STORAGE_KEY: spec.storage_options}, ensure_ascii=False).encode()

    def words(self) -> list[str]:
        """The command of each worker."""
        session, ledger = self.session, self.session.opened.job.ledger
        first, second = [*session.shards, session.shards[0] + len(session.opened.plan.shards)][:2]
        words = ["retry" if session.is_retry else "run", "/dev/stdin", "--output", "json", "--log-format", "json"]
        words += ["--part-of", session.execution, "--shard", f"{first}/{second - first}"]
        if ledger is not None:
            words += ["--ledger", absolute_path(ledger)]
        if session.stop.deadline is not None:
            end = datetime.fromtimestamp(time.time() + session.stop.deadline.left_s(), UTC)
            words += ["--until", end.isoformat()]
        return words

    def _start_if_due(self, slot: _Slot, words: list[str], document: bytes) -> None:
        stop = self.session.stop
        if slot.starts_s is None or self._is_ending or time.perf_counter() < slot.starts_s:
            return
        if stop.due_in_s(DRAIN_S) <= 0:  # nothing could be done with it
            stop.mind(DRAIN_S)
            return
        slot.starts_s, slot.has_spoken, slot.last_line = None, False, ""
        slot.starts += 1
        slot.worker = slot.start(words, document)

    def _listen(self, slot: _Slot) -> None:
        if slot.worker is None:
            return
        for line in slot.worker.lines():
            self._hear(slot, line)
        ended = slot.worker.ended()
        if ended is not None:
            for line in ended.lines:
                self._hear(slot, line)
            slot.worker = None
            self._ended(slot, ended)

    def _hear(self, slot: _Slot, line: str) -> None:
        """A line of a worker's stderr: an object of its log, or what a native library wrote."""
        slot.has_spoken = True
        event = {"event": "output", "level": "info", "message": line}
        with contextlib.suppress(ValueError, TypeError):
            event |= json.loads(line)
        kind, level, text = event["event"], event["level"], str(event["message"])
        if kind in ("engine", "remark"):
            if kind == "engine":
                self.session.progress.engine_starts += 1
                if not self._said:
                    self.session.progress.started_s = time.perf_counter()
            if text not in self._said:
                self._said.add(text)
                self.say(text)
        elif kind in ("output", "crash") or (level == "warning" and kind != "none_accepted"):
            slot.last_line = text if kind == "output" else slot.last_line
            self._log(slot, event.get("traceback", text) if kind == "crash" else text)

    def _log(self, slot: _Slot, text: str) -> None:
        """Lines about a worker, with its name."""
        for line in redacted(text).splitlines():
            self.say(f"[{slot.name}] {line}")

    def _ended(self, slot: _Slot, ended: Ended) -> None:
        """A worker is gone: decide what follows."""
        result = ended.result or {}
        if ended.result is not None and "error" not in result:
            self._states.pop(ended.worker, None)  # its counts are in the result
            self._results.append(result)
            self._remarks |= dict.fromkeys(result["remarks"])
            did = result["this_run"]
            slot.crashes, slot.wakes = 0, 0 if did["pairs"] or did["reused"] else slot.wakes + 1
            if (reason := result["stopped"]) is not None and not self._is_ending:
                deadline = self.session.stop.deadline
                self.session.stop.drain(deadline.text if deadline and reason.startswith("--until") else reason)
            return
        self._gone.add(ended.worker)
        if (state := self._states.get(ended.worker)) is not None:  # what it answered counts, what it had in hand not
            answers = Live(accepted=state.live.accepted, refused=state.live.refused)
            self._states[ended.worker] = replace(state, live=answers)
        if self._is_ending or self.session.stop.reason is not None:
            return  # it was asked to end, or crashed at a time when nothing is begun any more
        kind = getattr(errors, str(result.get("error")), RuntimeError)
        message = str(result.get("message", "")).replace("/dev/stdin", self.session.opened.job.where)
        is_ours = issubclass(kind, RelabelError)
        if not is_ours or issubclass(kind, errors.EngineCrashError):
            self._crashed(slot, ended, message, is_fault=bool(message) and not is_ours)
        elif issubclass(kind, errors.ModelError | errors.MissingExtraError):
            self._give_up(slot, kind(message))  # one device may be off where the others are not
        else:
            self._error = kind(message)
            self._drain_all()

    def _crashed(self, slot: _Slot, ended: Ended, message: str, *, is_fault: bool) -> None:
        """Start it again, unless it crashes again and again with nothing done in between."""
        if message:
            words = message.rstrip(".")
        elif ended.code < 0:
            words = f"its process was killed by signal {-ended.code}"
        else:
            words = f"its process ended with code {ended.code}" + (f": {slot.last_line}" if slot.last_line else "")
        store = self.session.opened.store
        if self._has_committed(slot, ended.worker) or crashed_apart(store, ended.worker):
            slot.crashes = 0
            slot.starts_s = time.perf_counter()
        else:
            slot.crashes += 1
            slot.starts_s = time.perf_counter() + BACKOFF_S * 2 ** (slot.crashes - 1)
        self._log(slot, f"the engine crashed ({words}).")
        if slot.crashes >= MOST_CRASHES:
            text = (
                f"worker {slot.name}: its engine crashed {slot.crashes} times without a commit in between. Last: "
                f"{words}. What was committed is safe."
            )
            self._give_up(slot, RuntimeError(text) if is_fault else EngineLostError(text))

    def _has_committed(self, slot: _Slot, worker: str) -> bool:
        """Whether a worker that is gone committed a chunk."""
        listed = set(self.session.opened.folder.listing())
        new, slot.seen = listed - slot.seen, listed
        return any(load_receipt(self.session.opened.store, name).worker == worker for name in sorted(new))

    def _give_up(self, slot: _Slot, error: RelabelError | RuntimeError) -> None:
        slot.error, slot.starts_s = error, None
        if all(other.error is not None for other in self.slots):
            self._error = error
            return
        self._remarks[f"worker {slot.name} was given up: {error}"] = None
        self.say(f"worker {slot.name} is given up: {error}")

    def _wake(self) -> bool:
        """Start an idle worker if a shard has work and no worker holds it: its worker was given up, or its node was
        lost. If no work is left, end the workers that Ray has not placed yet.
        """
        is_quiet = any(slot.worker is not None and not slot.has_spoken for slot in self.slots)
        able = [slot for slot in self.slots if slot.worker is None and slot.starts_s is None and slot.error is None]
        idle = [slot for slot in able if slot.wakes < MOST_WAKES]
        open_shards = self.session.left.open_shards() if idle or is_quiet else []
        if is_quiet and not open_shards:
            self._drain_all()
            for slot in self.slots:
                if slot.worker is not None and not slot.has_spoken:
                    slot.worker.kill()
        if not idle or not open_shards or not is_any_free(self.session, open_shards):
            return False
        idle[0].starts_s = 0.0
        return True

    def _heed_stop(self) -> None:
        """Pass a wish to stop on, once; and end those that take too long."""
        stop = self.session.stop
        stop.mind(0.0)
        if stop.reason is not None:
            self._drain_all()
        if stop.is_now or time.perf_counter() > self._ends_s:
            self._end_all()

    def _drain_all(self) -> None:
        """Ask all workers to end, and start none any more."""
        stop = self.session.stop
        self._ends_s = min(self._ends_s, stop.deadline_s + GRACE_S, time.perf_counter() + DRAIN_S + GRACE_S)
        if not self._is_ending:
            self._is_ending = True
            for slot in self.slots:
                if slot.worker is not None:
                    slot.worker.terminate()

    def _end_all(self) -> None:
        self._is_ending = True
        for slot in self.slots:
            if slot.worker is not None:
                slot.worker.kill()
        until_s = time.perf_counter() + READ_S
        while any(slot.worker is not None for slot in self.slots) and time.perf_counter() < until_s:
            for slot in self.slots:
                self._listen(slot)
            time.sleep(LISTEN_S / 5)

    def _snapshot(self) -> None:
        """Bring the session's progress up to date from what is in the run folder."""
        now_s, session = time.perf_counter(), self.session
        if now_s < self._next_snapshot_s:
            return
        self._next_snapshot_s = now_s + SNAPSHOT_EVERY_S
        with contextlib.suppress(StoreUnreachableError):  # a command that needs the store reports that
            for state in live_states(session.opened.store):
                if state.execution == session.execution and state.worker not in self._gone:
                    self._states[state.worker] = state
            self._count()
            progress = session.progress
            if self._listed is not None:  # by now the workers' own commits of then are counted
                theirs = self._listed - progress.pairs - progress.reused
                progress.rows_of_others = max(progress.rows_of_others, theirs)
                self._listed = None
            if now_s >= self._next_listing_s:
                self._next_listing_s = now_s + self._list_every_s
                seen = session.opened.folder.attempts_of_all()
                self._listed = sum(session.left.rows_since(shard, seen.get(shard, {})) for shard in session.shards)

    def _count(self) -> None:
        """Add up the workers that run, by their live files, and those that have ended, by their results."""
        counts, statuses, live = Counter[str](), Counter[str](), Live()
        for state in self._states.values():
            counts.update({name: getattr(state, name, 0) for name in _COUNTS})
            statuses.update(state.statuses)
            live.add(state.live)
        for result in self._results:
            did, lost = result["this_run"], result["this_run"]["in_vain"]
            counts.update({name: did[name] + lost.get(name, 0) for name in _COUNTS})
            statuses.update(did["statuses"])
            begun = {name: result["open"][name] for name in ("begun_chunks", "begun_rows", "rows_in")}
            answers = result["answers"]
            live.add(Live(accepted=answers["accepted"], refused=Counter(answers["refused"]), **begun))
        progress = self.session.progress
        for name in _COUNTS:
            setattr(progress, name, counts[name])
        progress.statuses, progress.live = statuses, live


def _sum(costs: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Costs of several engines together; what one of them does not know is not known of all."""
    known = [one for one in costs if one is not None]
    names = dict.fromkeys(name for one in known for name in one)
    parts = {name: [one.get(name) for one in known] for name in names}
    return {name: None if None in some else sum(some) for name, some in parts.items()} if known else None
