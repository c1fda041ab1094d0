"""One execution of a job: open or make the plan, run the loop over a session's shards, finish with the manifest.

Decides in this order: is there anything to do (receipts alone), may we do it (locks), and only then starts an engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple

from jobs.canary import CanaryResult, Draw, ask_canary, draw_canary, has_passed, keep_result, load_results, refuse
from jobs.chunks import ChunkWork
from jobs.commits import COMMITS_IN_FLIGHT, Commits
from jobs.estimating import estimate_run, keep_estimate, plan_against_actual
from jobs.exits import Exit
from jobs.job_files import Job
from jobs.loop import RunLoop
from jobs.sessions import OpenRun, Session
from jobs.stops import DRAIN_S, Stop, start_unless_stopped
from jobs.watchdog import hangs_end
from manifests.asks import Engine, EngineFacts
from manifests.errors import GateError, LockHeldError, ManifestError
from manifests.mixing import engines_differ
from manifests.plans import check_plan, load_plan, make_plan, write_plan
from manifests.reuse import why_nothing
from manifests.runs import RunFolder, Snapshot, Tally, build_manifest, load_manifest, write_manifest
from manifests.store import Lock, open_store

LOCK_LOOK_S = 0.5
"""Pause between two looks at a lock that is waited for, seconds."""
AFTER_SUPERVISOR_S = 5.0
"""How much longer than its supervisor a worker waits for an engine that does not come back, seconds."""


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
        engine_restarts: how often an engine that went down was started again; None where nobody watched over it.
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
    engine_restarts: int | None = None


def open_run(job: Job, *, may_plan: bool = True, may_write: bool = True) -> OpenRun:
    """Open the output of a job, planning it if nobody has.

    Args:
        may_plan: make a plan where there is none.
        may_write: write that plan down; off for a look at what would be done.
    Raises:
        StaleRunError: the output has a plan for another job or other inputs.
        ManifestError: there is no plan and `may_plan` is off.
    """
    run = job.spec.run
    store = open_store(job.spec.output, single_writer=run.single_writer, lease_s=run.lease_s)
    dataset = job.open_dataset()
    parts = job.parts(dataset)
    plan = load_plan(store)
    was_planned_now = False
    if plan is None:
        if not may_plan:
            raise ManifestError(f"{job.spec.output}: no plan there yet. Run the job first: relabel run {job.where}")
        if may_write:
            store.prove()  # a store that can't keep commits single is refused before anything is read or written
        plan, beside = make_plan(dataset, parts, name=job.spec.name, shards=job.spec.shards, chunk_rows=job.spec.run.chunk_rows)
        if may_write:
            for folder in ("", "plan"):
                store.sweep(folder)
            was_planned_now = write_plan(store, plan, beside)
            plan = load_plan(store) or plan
    check_plan(plan, dataset, parts, output=job.spec.output)
    opened = OpenRun(job, dataset, store, plan, RunFolder(store, plan), was_planned_now)
    if was_planned_now:
        keep_estimate(opened, estimate_run(opened, is_exact=False).estimate)
    return opened


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
    worked = work(session, tick=tick, on_engine=on_engine)
    report = conclude(session)
    if worked.costs is not None:
        report.did["costs"] = worked.costs
    if worked.canary is not None:
        report.did["canary"] = asdict(worked.canary)
    report.seconds = time.perf_counter() - started
    report.engine_start_s = worked.engine_start_s
    report.remarks = worked.remarks
    return report


@dataclass(slots=True)
class Worked:
    """What one engine's life came to, beside what `Session` and `Progress` hold.

    Args:
        remarks: what the engine said when it started.
        costs: what an engine that is paid for has spent.
        canary: what asking labelled rows again came to, where that was asked for.
    """

    canary: CanaryResult | None = None
    engine_start_s: float = 0.0
    remarks: list[str] = field(default_factory=list)
    costs: dict[str, Any] | None = None


def work(
    session: Session,
    *,
    tick: Callable[[], None] = lambda: None,
    on_engine: Callable[[EngineFacts, list[str]], None] = lambda *_: None,
) -> Worked:
    """Do a session's work with one engine, without finishing the run."""
    started = time.perf_counter()
    worked = Worked()
    try:
        if (
            session.reach()
            and (begun := _begin(session)) is not None
            and (opened := start_unless_stopped(session.stop, lambda: start_engine(session.opened.job))) is not None
        ):
            session.progress.engine_starts += 1
            engine, worked.remarks = opened
            worked.remarks = [*begun.remarks, *worked.remarks]
            worked.engine_start_s = time.perf_counter() - started
            try:
                session.facts = engine.facts()
                worked.remarks += _reuse_remarks(session)
                on_engine(session.facts, worked.remarks)
                _check_engine(session)
                worked.canary = _pass_canary(engine, session, begun, tick)
                _drive(engine, session, begun.chunks, tick)
            finally:
                engine.close()
            costs = getattr(engine, "costs", None)
            worked.costs = costs() if costs is not None else None
    finally:
        session.close()
    return worked


class _Begun(NamedTuple):
    """What was found out before an engine is started: chunks from the first that has something to ask, the canary's rows, remarks."""

    chunks: Iterator[ChunkWork | None]
    draw: Draw | None
    remarks: list[str]


def _begin(session: Session) -> _Begun | None:
    """Do what needs no engine; None if that was all. Chunks whose rows are all known are committed, unless a canary must speak first."""
    spec, remarks, draw = session.opened.job.spec, list[str](), None
    if spec.canary and not session.is_retry and not has_passed(session.opened.store, None, spec.canary, spec.max_flip_rate):
        draw = draw_canary(session)
        if not draw.rows:
            remarks.append("canary: no row of these shards is labelled anywhere yet, so there is nothing to compare; it was not asked")
    # where nothing is asked, nothing would stand beside the old labels, and no canary need speak
    is_awaited = draw is not None and bool(draw.rows) and draw.num_to_ask > 0
    chunks = session.chunks()
    if session.reuse is None or is_awaited:
        return _Begun(chunks, draw, remarks)
    first = _commit_known(session, chunks)
    return None if first is None else _Begun(itertools.chain([first], chunks), draw, remarks)


def _commit_known(session: Session, chunks: Iterator[ChunkWork | None]) -> ChunkWork | None:
    """Commit chunks up to the first that has something to ask, and return that one; None if there is none, or a stop was asked for."""
    with Commits(session.commit, session.progress, watch=session.watch, threads=COMMITS_IN_FLIGHT) as commits:
        for work in chunks:
            if session.stop.reason is not None:
                break
            if work is None:  # too many shards are open
                commits.settle(wait_for_all=True)
            elif work.left:
                commits.settle(wait_for_all=True)
                return work
            else:
                if session.watch is not None:
                    session.watch.begins(work)
                commits.add(work)
                commits.settle(wait_for_all=False)
        commits.settle(wait_for_all=True)
    return None


def _check_engine(session: Session) -> None:
    """Refuse to go on with another engine than the one that began this output.

    Raises:
        GateError: what differs.
    """
    opened = session.opened
    assert session.facts is not None
    if not opened.job.spec.run.allow_mixed:
        _refuse_mixing([*opened.folder.snapshot().engines, asdict(session.facts)], output=opened.job.spec.output, is_begun=True)


def _reuse_remarks(session: Session) -> list[str]:
    """A label's key does not know which version of an engine answered: that is known only once one has started."""
    assert session.facts is not None
    opened, found = session.opened, []
    advice = "the canary tells whether that matters" if opened.job.spec.canary else "`canary: 200` would tell whether that matters"
    for earlier in session.reuse.outputs if session.reuse is not None else ():
        differences = engines_differ([*earlier.found.engines, asdict(session.facts)])
        if differences and not why_nothing(earlier, opened.plan.parts):
            found.append(f"labels taken over from {earlier.path} were made by another engine ({'; '.join(differences)}); {advice}")
    return found


def _refuse_mixing(engines: list[dict[str, Any]], *, output: str, is_begun: bool) -> None:
    remarks = engines_differ(engines)
    if remarks:
        what = "was begun by another engine" if is_begun else "was made by different engines"
        raise GateError(
            f"{output}: {what}: {'; '.join(remarks)}. Labels of two teachers do not belong under one name. Everything that was committed "
            "is kept: go on with the engine that began, label the rest into another output, or allow it with run.allow_mixed: true."
        )


def _pass_canary(engine: Engine, session: Session, begun: _Begun, tick: Callable[[], None]) -> CanaryResult | None:
    """Ask the canary's rows, if this engine has not passed here yet.

    Raises:
        GateError: too many grades flipped.
    """
    opened, spec = session.opened, session.opened.job.spec
    if not spec.canary or session.is_retry:
        return None
    assert session.facts is not None
    lock = opened.store.lock("canary", "the canary")
    if not _has_waited_for(lock, session.stop):  # of workers that start together one asks, and the others take its word
        return None
    try:
        if has_passed(opened.store, asdict(session.facts), spec.canary, spec.max_flip_rate):
            return None
        draw = begun.draw if begun.draw is not None else draw_canary(session)
        result = ask_canary(session, engine, draw, tick) if draw.rows else None
        if result is not None:
            keep_result(opened.store, result)
    finally:
        lock.release()
    if result is not None and not result.has_passed:
        raise refuse(result, output=spec.output)
    return result


def _has_waited_for(lock: Lock, stop: Stop) -> bool:
    """Take a lock that another may hold for minutes; False if a stop came first."""
    while True:
        try:
            lock.acquire()
        except LockHeldError:
            stop.mind(DRAIN_S)
            if stop.reason is not None:
                return False
            time.sleep(LOCK_LOOK_S)
        else:
            return True


def _drive(engine: Engine, session: Session, chunks: Iterator[ChunkWork | None], tick: Callable[[], None]) -> None:
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
        ask_timeout_s=job.spec.run.ask_timeout_s,
        watch=session.watch,
        book=session.book,
    )
    # a supervisor is first where rows are in flight; of a made-up pair that proves the engine it knows nothing
    first_s = 0.0 if session.watch is None else AFTER_SUPERVISOR_S
    with hangs_end(lambda: loop.polling_since_s, job.spec.run.ask_timeout_s + first_s):
        loop.run(chunks)


def conclude(session: Session) -> RunReport:
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
            "reused": progress.reused,
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
    lock = opened.store.lock("manifest", "the manifest")
    lock.acquire(waits=True)
    was_written = False
    try:
        while True:
            found = opened.folder.snapshot()
            if is_current(load_manifest(opened.store)):
                return found, was_written
            write_manifest(opened.store, _manifest(opened, found))
            was_written = True
            if not lock.is_lost:
                return found, True
            # we slept, and another may have concluded since from later receipts: what we wrote over is put right by another look
    finally:
        lock.release()


def _manifest(opened: OpenRun, found: Snapshot) -> dict[str, Any]:
    spec = opened.job.spec
    if not spec.run.allow_mixed:
        _refuse_mixing(found.engines, output=spec.output, is_begun=False)
    manifest = build_manifest(
        opened.folder,
        found,
        spec=spec.model_dump(mode="json"),
        max_failed_fraction=spec.run.max_failed_fraction,
        relabel_version=version("relabel"),
        canaries=[asdict(result) for result in load_results(opened.store)],
        allow_mixed=spec.run.allow_mixed,
    )
    manifest["plan_against_actual"] = plan_against_actual(opened.store, found.tally)
    manifest["variables"] = dict(opened.job.variables)
    return manifest


def _exit(report: RunReport, session: Session, *, was_finished_now: bool) -> Exit:
    if report.over_limit:
        return Exit.OVER_LIMIT
    seen = session.opened.folder.attempts_of_all()
    planned = session.opened.plan.shards
    is_open = any(len(seen.get(shard, ())) < len(planned[shard].chunks) or session.todo(shard, seen) for shard in session.shards)
    report.busy_shards = busy = [shard for shard in session.busy if session.todo(shard, seen)]
    if busy and not session.taken:
        return Exit.LOCKED
    if busy or is_open:
        return Exit.PARTIAL
    if session.taken or was_finished_now:
        return Exit.DONE
    return Exit.NOTHING_TO_DO
