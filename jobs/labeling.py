"""One execution of a job: open or make the plan, take shards, run the loop, finish with the manifest.

Decides in this order: is there anything to do (receipts alone), may we do it (locks), and only then starts an engine.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from jobs.exits import Exit
from jobs.job_files import Job
from jobs.loop import ChunkWork, Progress, RunLoop, Stop
from jobs.shard_log import ShardLogs
from manifests.asks import Engine, EngineFacts
from manifests.dataset import Dataset
from manifests.errors import LockHeldError, ManifestError
from manifests.leases import ShardLock
from manifests.plans import Plan, check_plan, load_plan, make_plan, shard_row_ids, write_plan
from manifests.receipts import ChunkFacts, ChunkId, commit_chunk
from manifests.rows import read_chunks
from manifests.runs import RunFolder, Tally, build_manifest, load_manifest, write_manifest
from manifests.schemas import LabelRow, QuarantineRow
from manifests.store import LocalStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A job's output with a plan that fits the job."""

    job: Job
    dataset: Dataset
    store: LocalStore
    plan: Plan
    folder: RunFolder
    was_planned_now: bool


@dataclass(slots=True)
class RunReport:
    """What an execution did, for the end table and `--output json`."""

    exit: Exit
    name: str
    output: str
    shards: list[int]
    busy_shards: list[int]
    tally: Tally
    rows: int
    over_limit: bool | None
    failed_fraction: float | None
    stopped: str | None = None
    seconds: float = 0.0
    engine_start_s: float = 0.0
    did: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def open_run(job: Job, *, may_plan: bool = True) -> OpenRun:
    """Open the output of a job, planning it if nobody has.

    Raises:
        StaleRunError: the output has a plan for another job or other inputs.
        ManifestError: there is no plan and `may_plan` is off.
    """
    store = LocalStore(job.spec.output)
    dataset = job.open_dataset()
    parts = job.parts(dataset)
    plan = load_plan(store)
    was_planned_now = False
    if plan is None:
        if not may_plan:
            raise ManifestError(f"{job.spec.output}: no plan there yet. Run the job first: relabel run {job.where}")
        made, beside = make_plan(dataset, parts, name=job.spec.name, shards=job.spec.shards, chunk_rows=job.spec.run.chunk_rows)
        was_planned_now = write_plan(store, made, beside)
        plan = load_plan(store)
        assert plan is not None
    check_plan(plan, dataset, parts, output=job.spec.output)
    return OpenRun(job, dataset, store, plan, RunFolder(store, plan), was_planned_now)


class Session:
    """One worker's pass over some shards, first attempts or retries.

    Args:
        is_retry: ask the quarantined rows of committed chunks again, instead of every row of chunks without a receipt.
    """

    def __init__(self, opened: OpenRun, shards: list[int], *, is_retry: bool, stop: Stop, progress: Progress) -> None:
        self.opened = opened
        self.is_retry = is_retry
        self.stop = stop
        self.progress = progress
        self.shards = shards
        self.busy: list[int] = []
        self.logs = ShardLogs(opened.store)
        self.facts: EngineFacts | None = None
        self.worker = f"{socket.gethostname()}-{os.getpid()}"
        self._locks: dict[int, ShardLock] = {}
        self._chunks_left: dict[int, int] = {}

    def lock(self) -> list[int]:
        """Take the locks of shards that have work; returns those taken. `busy` holds the shards that others have."""
        taken = []
        for shard in self.shards:
            if not self.todo(shard):
                continue
            lock = ShardLock(self.opened.store, shard)
            try:
                lock.acquire()
            except LockHeldError as exc:
                logger.info("%s", exc)
                self.busy.append(shard)
                continue
            if not self.todo(shard):  # its last holder finished between the look and the lock
                lock.release()
                continue
            self._locks[shard] = lock
            taken.append(shard)
        return taken

    def todo(self, shard: int) -> dict[int, int]:
        """Chunks to work on and the attempt that this would be."""
        folder = self.opened.folder
        if not self.is_retry:
            return dict.fromkeys(folder.pending(shard), 1)
        return {receipts[0].chunk: len(receipts) + 1 for receipts in folder.chunk_receipts(shard) if receipts[-1].quarantine is not None}

    def chunks(self, shards: list[int]) -> Iterator[ChunkWork]:
        """Rows to ask, chunk by chunk, shard after shard."""
        opened = self.opened
        for shard in shards:
            attempts = self.todo(shard)
            self._chunks_left[shard] = len(attempts)
            for folder in ("labels", "quarantine", "receipts"):
                opened.store.sweep(f"{folder}/shard-{shard:05d}")
            self.logs.write(shard, f"start: {len(attempts)} of {len(opened.plan.shards[shard].chunks)} chunks, worker {self.worker}")
            wanted = self._quarantined_ids(shard) if self.is_retry else None
            planned = opened.plan.shards[shard]
            row_ids = None if planned.row_ids is None else shard_row_ids(opened.store, planned)
            for chunk, pairs in read_chunks(opened.dataset, planned, row_ids, sorted(attempts), wanted=wanted):
                yield ChunkWork(ChunkId(shard, chunk, attempts[chunk]), pairs)

    def commit(self, work: ChunkWork) -> bool:
        """Make a finished chunk durable. Runs in a committer thread."""
        labels = [row for row in work.rows if isinstance(row, LabelRow)]
        quarantine = [row for row in work.rows if isinstance(row, QuarantineRow)]
        facts = ChunkFacts(
            fingerprint=self.opened.plan.fingerprint,
            id=work.id,
            stages=work.stage_counts(),
            seconds=time.perf_counter() - work.started_s,
            engine=asdict(self.facts) if self.facts else {},
            worker=self.worker,
            epoch=0,
            started=_utc(work.started_clock),
            committed=_utc(time.time()),
        )
        receipt = commit_chunk(self.opened.store, facts, labels, quarantine)
        shard = work.id.shard
        if receipt is None:
            self.logs.write(shard, f"chunk {work.id.chunk}: another worker committed it first; our rows are dropped")
        else:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(receipt.statuses.items()))
            self.logs.write(shard, f"chunk {work.id.chunk} attempt {work.id.attempt}: {counts}, {receipt.seconds:.1f} s")
        for row in quarantine:
            self.logs.write(shard, f"row {row.row_id} quarantined as {row.status}: {row.reason}")
        self._chunks_left[shard] -= 1
        if self._chunks_left[shard] == 0:
            self.logs.write(shard, "done")
            self._release(shard)
        return receipt is not None

    def close(self) -> None:
        for shard in list(self._locks):
            self._release(shard)
        self.logs.close()

    def _release(self, shard: int) -> None:
        self.logs.close(shard)
        self._locks.pop(shard).release()

    def _quarantined_ids(self, shard: int) -> dict[int, set[int]]:
        folder = self.opened.folder
        return {
            receipts[-1].chunk: {row["row_id"] for row in folder.quarantined_rows(receipts[-1])}
            for receipts in folder.chunk_receipts(shard)
            if receipts[-1].quarantine is not None
        }


def start_engine(job: Job) -> tuple[Engine, list[str]]:
    """Start the job's engine and let it look at what the labeler will ask.

    Raises:
        ModelError, MissingExtraError: what is missing, and how to get it.
    """
    engine = job.engine_class(job.spec.engine, overlong=job.spec.input.overlong)
    try:
        return engine, engine.prepare(job.labeler.probe())
    except BaseException:
        engine.close()
        raise


def label(opened: OpenRun, session: Session, *, tick: Any = None, on_engine: Any = None) -> RunReport:
    """Do a session's work and finish the run if it was the last of it."""
    started = time.perf_counter()
    engine_start_s = 0.0
    remarks: list[str] = []
    try:
        taken = session.lock()
        if taken:
            engine, remarks = start_engine(opened.job)
            engine_start_s = time.perf_counter() - started
            try:
                session.facts = engine.facts()
                if on_engine is not None:
                    on_engine(session.facts, remarks)
                _drive(engine, session, taken, tick)
            finally:
                engine.close()
    finally:
        session.close()
    report = _conclude(opened, session, taken)
    report.seconds = time.perf_counter() - started
    report.engine_start_s = engine_start_s
    report.remarks = remarks
    return report


def _drive(engine: Engine, session: Session, taken: list[int], tick: Any) -> None:
    job = session.opened.job
    session.progress.started_s = time.perf_counter()
    loop = RunLoop(
        job.labeler,
        job.spec.labeler,
        engine,
        session.commit,
        seed=job.spec.engine.seed,
        progress=session.progress,
        stop=session.stop,
        tick=tick or (lambda: None),
    )
    loop.run(session.chunks(taken))


def _conclude(opened: OpenRun, session: Session, taken: list[int]) -> RunReport:
    """Write the manifest if every chunk is in, and choose the exit code."""
    folder, spec = opened.folder, opened.job.spec
    tally = folder.tally()
    report = RunReport(
        exit=Exit.DONE,
        name=spec.name,
        output=spec.output,
        shards=session.shards,
        busy_shards=session.busy,
        tally=tally,
        rows=opened.plan.rows,
        over_limit=None,
        failed_fraction=None,
        stopped=session.stop.reason,
        did={
            "pairs": session.progress.pairs,
            "statuses": dict(session.progress.statuses),
            "requests": session.progress.requests,
            "prompt_tokens": session.progress.prompt_tokens,
            "cached_tokens": session.progress.cached_tokens,
            "output_tokens": session.progress.output_tokens,
            "chunks_committed": session.progress.chunks_committed,
            "seconds": round(time.perf_counter() - session.progress.started_s, 3) if taken else 0.0,
        },
    )
    was_finished_now = False
    if tally.chunks_done == opened.plan.num_chunks:
        held = load_manifest(opened.store)
        failed = tally.num_quarantined / opened.plan.rows
        is_current = held is not None and held["max_failed_fraction"] == spec.run.max_failed_fraction and held["receipts"] == tally.receipts
        if not is_current:
            manifest = build_manifest(
                folder,
                spec=spec.model_dump(mode="json"),
                max_failed_fraction=spec.run.max_failed_fraction,
                relabel_version=version("relabel"),
            )
            write_manifest(opened.store, manifest)
            was_finished_now = True
        report.failed_fraction = failed
        report.over_limit = failed > spec.run.max_failed_fraction
    report.exit = _exit(report, session, taken, was_finished_now=was_finished_now)
    return report


def _exit(report: RunReport, session: Session, taken: list[int], *, was_finished_now: bool) -> Exit:
    if session.stop.is_now:
        return Exit.STOPPED
    if report.over_limit:
        return Exit.OVER_LIMIT
    if not taken and session.busy:
        return Exit.LOCKED
    is_cut_short = session.stop.reason is not None and session.is_retry
    if session.busy or is_cut_short or any(session.todo(shard) for shard in session.shards if not session.is_retry):
        return Exit.PARTIAL
    if taken or was_finished_now:
        return Exit.DONE
    return Exit.NOTHING_TO_DO


def _utc(clock_s: float) -> str:
    return datetime.fromtimestamp(clock_s, UTC).isoformat(timespec="milliseconds")
