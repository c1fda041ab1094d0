"""One execution of a job over a session's shards: engine start, canary, run loop and conclusion."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from relabel.jobs.job import Job
from relabel.jobs.run.budget import AT_BUDGET, open_allowance
from relabel.jobs.run.canary import CanaryResult, CanarySample, ask_canary, draw_canary, has_passed, keep_result, refuse
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.counts import LiveFile, Progress
from relabel.jobs.run.crashes import ends_hanging
from relabel.jobs.run.loop import IDLE_S, RunLoop
from relabel.jobs.run.rates import keep_rates, rates_of, with_auto_resolved
from relabel.jobs.run.results import RunReport, StoredBatches, conclude, refuse_mixing
from relabel.jobs.run.session import COMMITS_IN_FLIGHT, CommitThreads, Session
from relabel.jobs.run.stop import DRAIN_S, Stop, start_unless_stopped
from relabel.manifests.asks import Engine, EngineFacts
from relabel.manifests.errors import EngineCrashError, LockHeldError, RelabelError, ServerGoneError
from relabel.manifests.manifest import engines_differ
from relabel.manifests.reuse import why_nothing
from relabel.manifests.store import Lock

LOCK_RETRY_S = 0.5
"""Pause between two tries to take a lock that is waited for, seconds."""


def start_engine(job: Job) -> tuple[Engine, list[str]]:
    """Start the job's engine and show it what the labeler will ask.

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


@runtime_checkable
class LabelsChunks(Protocol):
    """An engine that labels whole chunks itself, and is not asked."""

    def label_chunks(
        self,
        chunks: Iterator[ChunkWork | None],
        commit: Callable[[ChunkWork], bool],
        *,
        progress: Progress,
        stop: Stop,
        on_progress: Callable[[], None],
    ) -> bool:
        """Label chunks until they run out or a stop is asked for; False if a stop left some undone."""
        ...


def label(
    session: Session,
    *,
    on_progress: Callable[[], None] = lambda: None,
    on_engine: Callable[[EngineFacts, list[str]], None] = lambda *_: None,
) -> RunReport:
    """Do a session's work with one engine, and finish the run if it was the last of it.

    Args:
        on_progress: called often while asks are answered.
        on_engine: called once, when the engine has started.
    """
    started, engine_start_s = time.perf_counter(), 0.0
    remarks, costs, canary = list[str](), None, None
    try:
        if (
            session.reach()
            and (begun := _begin(session)) is not None
            and _may_spend(session)
            and (opened := start_unless_stopped(session.stop, lambda: _start(session))) is not None
        ):
            session.progress.engine_starts += 1
            chunks, sample, found = begun
            engine, remarks = opened
            engine_start_s = time.perf_counter() - started
            try:
                if session.allowance is not None:
                    session.allowance.uses(engine)
                session.facts = engine.facts()
                remarks = [*found, *remarks, *_reuse_remarks(session)]
                on_engine(session.facts, remarks)
                _check_engine(session)
                canary = _pass_canary(engine, session, sample, on_progress)
                _drive(engine, session, chunks, on_progress)
                # rows that failed before are no sample of others
                if not session.is_retry and not isinstance(engine, LabelsChunks):
                    keep_rates(session.opened, rates_of(session.opened, session.facts, session.progress, source="run"))
            finally:
                engine.close()
            costs = engine.costs()
    except Exception as exc:
        is_fault = not isinstance(exc, RelabelError)
        is_crash = is_fault or isinstance(exc, EngineCrashError)
        session.close(crash=(f"{type(exc).__name__}: {exc}" if is_fault else str(exc)) if is_crash else None)
        raise
    finally:
        session.close()
    report = conclude(session)
    report.did.costs, report.did.canary = costs, None if canary is None else asdict(canary)
    report.engine_start_s, report.remarks = engine_start_s, remarks
    report.seconds = time.perf_counter() - started
    return report


def _start(session: Session) -> tuple[Engine, list[str]]:
    """Start an engine like the one that began this output."""
    opened, started_s = session.opened, time.perf_counter()
    with ends_hanging(
        lambda: started_s,
        opened.job.spec.run.start_timeout_s,
        what="the engine has not started",
        option="run.start_timeout_s",
    ):
        engine, remarks = start_engine(with_auto_resolved(opened.job, opened.store))
    if opened.job.spec.engine.args.sends_batches:
        engine.use_records(StoredBatches(opened.store))
    return engine, remarks


def _begin(session: Session) -> tuple[Iterator[ChunkWork | None], CanarySample | None, list[str]] | None:
    """Do what needs no engine; None if that was all, or a stop came. Chunks whose rows are all known are committed,
    unless a canary comes first.

    Returns:
        Chunks from the first that has something to ask; the canary's rows; remarks.
    """
    spec, remarks, sample = session.opened.job.spec, list[str](), None
    if (
        spec.canary
        and not session.is_retry
        and not has_passed(session.opened.store, None, spec.canary, spec.max_flip_rate)
    ):
        sample = draw_canary(session)
        if sample is None:
            return None
        if not sample.rows:
            remarks.append(
                "canary: no row of these shards is labelled anywhere yet, so there is nothing to compare; it was not "
                "asked"
            )
    # if nothing is asked, no new label joins the old ones, and no canary is needed
    is_awaited = sample is not None and bool(sample.rows) and sample.num_to_ask > 0
    chunks = session.chunks()
    if (session.reuse is None and session.opened.cascade is None) or is_awaited:
        return chunks, sample, remarks
    first = _commit_known(session, chunks)
    return None if first is None else (itertools.chain([first], chunks), sample, remarks)


def _may_spend(session: Session) -> bool:
    """Take a share of the budget, if there is one; a run that finds it used up is drained before an engine starts."""
    session.allowance = open_allowance(session.opened, session.worker)
    if session.allowance is None or session.allowance.begin():
        return True
    session.stop.drain(AT_BUDGET)
    return False


def _commit_known(session: Session, chunks: Iterator[ChunkWork | None]) -> ChunkWork | None:
    """Commit chunks up to the first that has something to ask, and return that one; None if there is none, or a stop
    was asked for.
    """
    with CommitThreads(session.commit, session.progress, threads=COMMITS_IN_FLIGHT) as commits:
        for work in chunks:
            session.stop.mind(0.0)  # no answer is waited for: what `END_S` leaves is enough for the commits under way
            if session.stop.reason is not None:
                break
            if work is None:  # too many shards are open
                commits.settle(wait_for_all=True)
                time.sleep(IDLE_S)
            elif work.left:
                commits.settle(wait_for_all=True)
                return work
            else:
                session.journal.begins(work)
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
        refuse_mixing(
            [*opened.folder.snapshot().engines, asdict(session.facts)], output=opened.job.spec.output, is_begun=True
        )


def _reuse_remarks(session: Session) -> list[str]:
    """A label's key does not know which version of an engine answered: that is known only once one has started."""
    assert session.facts is not None
    opened, found = session.opened, []
    advice = (
        "the canary measures whether that matters"
        if opened.job.spec.canary
        else "`canary: 200` would measure whether that matters"
    )
    for earlier in session.reuse.outputs if session.reuse is not None else ():
        differences = engines_differ([*earlier.found.all_engines, asdict(session.facts)])
        if differences and not why_nothing(earlier, opened.plan.parts):
            found.append(
                f"labels reused from {earlier.path} were made by another engine ({'; '.join(differences)}); {advice}"
            )
    return found


def _pass_canary(
    engine: Engine, session: Session, sample: CanarySample | None, on_progress: Callable[[], None]
) -> CanaryResult | None:
    """Ask the canary's rows, if this engine has not passed here yet.

    Raises:
        GateError: too many grades flipped.
    """
    opened, spec = session.opened, session.opened.job.spec
    if not spec.canary or session.is_retry:
        return None
    assert session.facts is not None
    lock = opened.store.lock("canary", "the canary")
    if not _has_waited_for(lock, session.stop):  # of workers that start together one asks, the others use its result
        return None
    try:
        if has_passed(opened.store, asdict(session.facts), spec.canary, spec.max_flip_rate):
            return None
        sample = draw_canary(session) if sample is None else sample
        result = ask_canary(session, engine, sample, on_progress) if sample is not None and sample.rows else None
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
            time.sleep(LOCK_RETRY_S)
        else:
            return True


def _drive(
    engine: Engine, session: Session, chunks: Iterator[ChunkWork | None], on_progress: Callable[[], None]
) -> None:
    job = session.opened.job
    session.progress.started_s = time.perf_counter()
    live_file = LiveFile(session.opened.store, session.worker, session.execution, session.progress)

    def turned() -> None:
        on_progress()
        live_file.update()

    if isinstance(engine, LabelsChunks):
        with closing(live_file):
            engine.label_chunks(
                chunks, session.commit, progress=session.progress, stop=session.stop, on_progress=turned
            )
        return
    loop = RunLoop(
        job.labeler,
        job.spec.labeler,
        engine,
        session.commit,
        seed=job.spec.engine.seed,
        progress=session.progress,
        stop=session.stop,
        on_progress=turned,
        ask_timeout_s=job.spec.run.ask_timeout_s,
        is_late=job.spec.engine.args.sends_batches,
        journal=session.journal,
        answer_cache=session.answer_cache,
        allowance=session.allowance,
    )
    watchdog = ends_hanging(lambda: loop.polling_since_s, job.spec.run.ask_timeout_s, on_end=session.journal.hangs)
    with watchdog, closing(live_file):
        try:
            loop.run(chunks)
        except (EngineCrashError, ServerGoneError):
            session.keep_answers(loop.unfinished)
            raise
        session.keep_answers(loop.unfinished)
