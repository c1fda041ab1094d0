"""One execution of a job: open or make the plan, run the loop over a session's shards, finish with the manifest.

Decides in this order: is there anything to do (receipts alone), may we do it (locks), and only then starts an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from jobs.exits import Exit
from jobs.job_files import Job
from jobs.loop import RunLoop
from jobs.sessions import OpenRun, Session
from manifests.asks import Engine, EngineFacts
from manifests.errors import ManifestError
from manifests.leases import Lock
from manifests.plans import check_plan, load_plan, make_plan, write_plan
from manifests.runs import RunFolder, Snapshot, Tally, build_manifest, load_manifest, write_manifest
from manifests.store import LocalStore


@dataclass(slots=True)
class RunReport:
    """What an execution did, for the end table and `--output json`.

    Args:
        shards, busy_shards: the shards asked for, and those of them that other processes held.
        tally: the whole run as it stands, all workers together.
        rows: rows in the plan.
        over_limit, failed_fraction: None until every chunk is in.
        stopped: why the run was cut short, if it was.
        seconds, engine_start_s: wall time of all, and of starting the engine.
        did: counts of this execution alone.
        remarks: what the engine said when it started.
    """

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


def open_run(job: Job, *, may_plan: bool = True, may_write: bool = True) -> OpenRun:
    """Open the output of a job, planning it if nobody has.

    Args:
        may_plan: make a plan where there is none.
        may_write: write that plan down; off for a look at what would be done.
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
        plan, beside = make_plan(dataset, parts, name=job.spec.name, shards=job.spec.shards, chunk_rows=job.spec.run.chunk_rows)
        if may_write:
            for folder in ("", "plan"):
                store.sweep(folder)
            was_planned_now = write_plan(store, plan, beside)
            plan = load_plan(store) or plan
    check_plan(plan, dataset, parts, output=job.spec.output)
    return OpenRun(job, dataset, store, plan, RunFolder(store, plan), was_planned_now)


def start_engine(job: Job) -> tuple[Engine, list[str]]:
    """Start the job's engine and let it look at what the labeler will ask.

    Raises:
        ModelError, MissingExtraError: what is missing, and how to get it.
    """
    secrets: dict[str, Any] = {"secrets": job.secrets} if job.secrets else {}  # only engines that name some take them
    engine = job.engine_class(job.spec.engine, overlong=job.spec.input.overlong, **secrets)
    try:
        return engine, engine.prepare(job.labeler.probe())
    except BaseException:
        engine.close()
        raise


def label(
    session: Session,
    *,
    tick: Callable[[], None] = lambda: None,
    on_engine: Callable[[EngineFacts, list[str]], None] = lambda *_: None,
) -> RunReport:
    """Do a session's work and finish the run if it was the last of it.

    Args:
        tick: called often while asks are answered.
        on_engine: called once, when the engine has started.
    """
    started = time.perf_counter()
    engine_start_s = 0.0
    remarks: list[str] = []
    costs: Callable[[], Any] | None = None
    try:
        if session.reach():
            engine, remarks = start_engine(session.opened.job)
            engine_start_s = time.perf_counter() - started
            try:
                session.facts = engine.facts()
                on_engine(session.facts, remarks)
                _drive(engine, session, tick)
                costs = getattr(engine, "costs", None)  # what an engine that is paid for has spent
            finally:
                engine.close()
    finally:
        session.close()
    report = _conclude(session)
    if costs is not None:
        report.did["costs"] = costs()
    report.seconds = time.perf_counter() - started
    report.engine_start_s = engine_start_s
    report.remarks = remarks
    return report


def _drive(engine: Engine, session: Session, tick: Callable[[], None]) -> None:
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
        tick=tick,
    )
    loop.run(session.chunks())


def _conclude(session: Session) -> RunReport:
    """Bring the manifest up to date if every chunk is in, and choose the exit code."""
    opened, progress, spec = session.opened, session.progress, session.opened.job.spec
    found = opened.folder.snapshot()
    was_finished_now = False
    is_complete = found.tally.chunks_done == opened.plan.num_chunks
    if is_complete:
        found, was_finished_now = _finish(opened, found)
    failed = found.tally.num_quarantined / opened.plan.rows
    report = RunReport(
        exit=Exit.DONE,
        name=spec.name,
        output=spec.output,
        shards=session.shards,
        busy_shards=session.busy,
        tally=found.tally,
        rows=opened.plan.rows,
        over_limit=failed > spec.run.max_failed_fraction if is_complete else None,
        failed_fraction=failed if is_complete else None,
        stopped=session.stop.reason,
        did={
            "pairs": progress.pairs,
            "statuses": dict(progress.statuses),
            "requests": progress.requests,
            "prompt_tokens": progress.prompt_tokens,
            "cached_tokens": progress.cached_tokens,
            "output_tokens": progress.output_tokens,
            "chunks_committed": progress.chunks_committed,
            "chunks_lost": progress.chunks_lost,
            "seconds": round(time.perf_counter() - progress.started_s, 3) if session.taken else 0.0,
        },
    )
    report.exit = _exit(report, session, was_finished_now=was_finished_now)
    return report


def _finish(opened: OpenRun, found: Snapshot) -> tuple[Snapshot, bool]:
    """Write the manifest unless it says already what the receipts say.

    Under a lock, and from receipts read under that lock: whoever commits last also concludes last, so the manifest ends up true.
    """
    limit = opened.job.spec.run.max_failed_fraction

    def is_current(held: dict[str, Any] | None) -> bool:
        return held is not None and (held["max_failed_fraction"], held["receipts_sha256"]) == (limit, found.digest)

    if is_current(load_manifest(opened.store)):
        return found, False
    lock = Lock(opened.store, "manifest", "the manifest")
    lock.acquire(waits=True)
    try:
        found = opened.folder.snapshot()
        if is_current(load_manifest(opened.store)):
            return found, False
        manifest = build_manifest(
            opened.folder,
            found,
            spec=opened.job.spec.model_dump(mode="json"),
            max_failed_fraction=limit,
            relabel_version=version("relabel"),
        )
        write_manifest(opened.store, manifest)
        return found, True
    finally:
        lock.release()


def _exit(report: RunReport, session: Session, *, was_finished_now: bool) -> Exit:
    if report.over_limit:
        return Exit.OVER_LIMIT
    if session.busy and not session.taken:
        return Exit.LOCKED
    is_open = any(session.opened.folder.pending(shard) for shard in session.shards)
    if session.busy or is_open or (session.is_retry and session.stop.reason is not None):
        return Exit.PARTIAL
    if session.taken or was_finished_now:
        return Exit.DONE
    return Exit.NOTHING_TO_DO
