"""A session from its start to its report: what needs no engine, the engine's start, the canary, and the chunks."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from relabel.jobs.job import ModelRunner, start_runner, with_auto_resolved
from relabel.jobs.run.answer_journal import AnswerJournal
from relabel.jobs.run.batches import StoredBatches
from relabel.jobs.run.canary import CanarySample, draw_canary, has_passed, pass_canary
from relabel.jobs.run.chunks import ChunkLabeler, ChunkWork, list_refused
from relabel.jobs.run.health import Health
from relabel.jobs.run.loop import IDLE_S, RunLoop
from relabel.jobs.run.notices import Graded, GradeWatch, forget_stop, keep_notices, keep_stop
from relabel.jobs.run.progress import LiveFile
from relabel.jobs.run.rates import keep_rates
from relabel.jobs.run.report import RunReport
from relabel.jobs.run.results import conclude, refuse_mixing
from relabel.jobs.run.reuse import reuse_remark
from relabel.jobs.run.session import COMMITS_IN_FLIGHT, CommitThreads, Session
from relabel.jobs.run.stop import start_unless_stopped
from relabel.jobs.run.watchdog import ends_hanging
from relabel.manifests.asks import Engine, EngineFacts
from relabel.manifests.canaries import CanaryResult
from relabel.manifests.errors import EngineCrashError, RelabelError, ServerGoneError
from relabel.manifests.plan import FileRef
from relabel.manifests.process import seldom_collected
from relabel.manifests.records import build_checks
from relabel.manifests.reuse import why_nothing
from relabel.manifests.run_labels import read_labels
from relabel.manifests.run_manifest import engines_differ

SEED_FILES = 16
"""Files of earlier labels that are read to know how grades varied before."""

OnEngine = Callable[[EngineFacts, list[str]], None]
"""Called once, when the engine has started, with its remarks."""


@dataclass(slots=True)
class EngineWork:
    """What one engine did, for the report.

    Args:
        began_s: when the work began, on `time.perf_counter`.
        start_s: until the engine was there, seconds.
        costs: of an engine that is paid for.
    """

    began_s: float
    start_s: float = 0.0
    remarks: list[str] = field(default_factory=list)
    costs: dict[str, Any] | None = None
    canary: CanaryResult | None = None


def label(
    session: Session,
    *,
    on_progress: Callable[[], None] = lambda: None,
    on_engine: OnEngine = lambda *_: None,
) -> RunReport:
    """Do a session's work with one engine, and finish the run if it was the last of it.

    Args:
        on_progress: called often while asks are answered.
    """
    work = EngineWork(time.perf_counter())
    store = session.opened.store
    progress = session.progress
    live_file = LiveFile(
        store,
        session.worker,
        session.execution,
        progress,
        stays=session.is_part,
    )
    num_jumps = 0

    def tick() -> None:
        nonlocal num_jumps
        on_progress()
        live_file.update()
        if len(progress.jumps) > num_jumps:
            num_jumps = len(progress.jumps)
            keep_notices(store, session.worker, progress.jumps, progress.outside)

    try:
        _label(session, work, on_engine=on_engine, on_progress=tick)
    except Exception as exc:
        if isinstance(exc, ServerGoneError):
            keep_stop(store, exc)
        session.close(crash=_crash_text(exc))
        raise
    finally:
        session.close()
        live_file.close()
        keep_notices(store, session.worker, progress.jumps, progress.outside)
    report = conclude(session)
    report.this_run.costs = work.costs
    report.this_run.canary = work.canary
    report.engine_start_s = work.start_s
    report.remarks = work.remarks
    report.seconds = time.perf_counter() - work.began_s
    return report


def _crash_text(error: Exception) -> str | None:
    """How the engine crashed, where an error says so: its own, or an error from elsewhere."""
    if isinstance(error, EngineCrashError):
        return str(error)
    if isinstance(error, RelabelError):
        return None
    return f"{type(error).__name__}: {error}"


def _label(session: Session, work: EngineWork, *, on_engine: OnEngine, on_progress: Callable[[], None]) -> None:
    opened = session.opened
    spec = opened.job.spec
    prepared = prepare(session)
    if prepared is None:
        return
    build_checks()
    runner = start_unless_stopped(session.stop, lambda: _start(session, work))
    if runner is None:
        return
    session.progress.engine_starts += 1
    work.start_s = time.perf_counter() - work.began_s
    with contextlib.closing(runner):
        forget_stop(opened.store)
        facts = runner.facts()
        session.facts = facts
        work.remarks = [*prepared.remarks, *work.remarks, *_reuse_remarks(session, facts)]
        on_engine(facts, work.remarks)
        if not spec.run.allow_mixed:
            engines = [*opened.folder.engines_asked(), asdict(facts)]
            refuse_mixing(engines, output=spec.output, is_begun=True)
        if spec.canary and not session.is_retry and isinstance(runner, Engine):
            work.canary = pass_canary(runner, session, prepared.sample, facts, on_progress)
        session.progress.started_s = time.perf_counter()
        with seldom_collected():
            _label_chunks(_chunk_labeler(runner, session, facts), session, prepared.chunks, on_progress)
        if not session.is_retry:  # rows that failed before are no sample of others
            keep_rates(opened, facts, session.progress, source="run")
    work.costs = runner.costs()


# ------------------------------------------------------------------------------
# What needs no engine.


@dataclass(slots=True)
class Prepared:
    """What is there before an engine is.

    Args:
        chunks: from the first that has something to ask.
        sample: the canary's rows; None where they are drawn later, or there is no canary.
        remarks: for the user.
    """

    chunks: Iterator[ChunkWork | None]
    sample: CanarySample | None
    remarks: list[str]


def prepare(session: Session) -> Prepared | None:
    """Do what needs no engine: draw the canary's rows, and commit chunks whose rows are all known, unless a canary
    comes first.

    Returns:
        None if that was all, a stop came, or the budget has no room for an engine's start.
    """
    if not session.reach():
        return None
    sample = None
    remarks = list[str]()
    if _wants_canary(session):
        sample = draw_canary(session)
        if sample is None:
            return None
        if not sample.rows:
            remarks.append(
                "canary: no row of these shards is labelled anywhere yet, so there is nothing to compare; it was not "
                "asked"
            )
    chunks = session.chunks()
    # if nothing is asked, no new label joins the old ones, and no canary is needed
    is_canary_first = sample is not None and bool(sample.rows) and sample.num_to_ask > 0
    if _knows_labels(session) and not is_canary_first:
        first = _commit_known(session, chunks)
        if first is None:
            return None
        chunks = itertools.chain([first], chunks)
    if session.allowance is not None and not session.allowance.begin():
        return None
    return Prepared(chunks, sample, remarks)


def _wants_canary(session: Session) -> bool:
    """Whether no engine has passed a canary yet that the job asks for."""
    spec = session.opened.job.spec
    if not spec.canary or session.is_retry:
        return False
    return not has_passed(session.opened.store, None, spec.canary, spec.max_flip_rate)


def _knows_labels(session: Session) -> bool:
    """Whether some rows may need no asking."""
    return bool(session.reuse.outputs) or session.opened.cascade is not None


def _commit_known(session: Session, chunks: Iterator[ChunkWork | None]) -> ChunkWork | None:
    """Commit the chunks whose rows are all known, up to the first that has something to ask.

    Returns:
        That chunk; None if there is none, or a stop came.
    """
    build_checks()
    with CommitThreads(session.commit, session.progress, threads=COMMITS_IN_FLIGHT) as commits:
        for work in chunks:
            session.stop.mind(0.0)  # no answer is waited for: what `END_S` leaves is enough for the commits under way
            if session.stop.reason is not None:
                return None
            if work is None:  # too many shards are open
                commits.settle(wait_for_all=True)
                time.sleep(IDLE_S)
            elif work.left:
                return work
            else:
                session.journal.begins(work)
                commits.add(work)
                commits.settle()
    return None


# ------------------------------------------------------------------------------
# With an engine.


def _start(session: Session, work: EngineWork) -> ModelRunner:
    """Start an engine like the one that began this output, or the job's student, and note its remarks."""
    opened = session.opened
    run = opened.job.spec.run
    started_s = time.perf_counter()
    with ends_hanging(
        lambda: started_s,
        run.start_timeout_s,
        what="the engine has not started",
        option="run.start_timeout_s",
    ):
        runner, work.remarks = start_runner(with_auto_resolved(opened.job, opened.store))
    if isinstance(runner, Engine):
        if opened.job.spec.engine.args.sends_batches:
            runner.use_records(StoredBatches(opened.store))
        if session.allowance is not None:
            session.allowance.uses(runner)
    return runner


def _reuse_remarks(session: Session, facts: EngineFacts) -> list[str]:
    """Of which outputs no label can be reused, and why; and which were made by another engine: a label's key does not
    know its version, which is known only once one has started.
    """
    has_canary = bool(session.opened.job.spec.canary)
    advice = f"{'the canary measures' if has_canary else '`canary: 200` would measure'} whether that matters"
    remarks = list[str]()
    for earlier in session.reuse.outputs:
        if why_nothing(earlier, session.opened.plan.parts):
            if earlier.path in session.opened.job.spec.reuse:  # else it is there for a cascade
                remarks.append(reuse_remark(session.opened, earlier))
            continue
        differences = engines_differ([*earlier.found.all_engines, asdict(facts)])
        if differences:
            remarks.append(
                f"labels reused from {earlier.path} were made by another engine ({'; '.join(differences)}); {advice}"
            )
    return remarks


def _chunk_labeler(runner: ModelRunner, session: Session, facts: EngineFacts) -> ChunkLabeler:
    """Who labels the chunks: a student does so itself, an engine is asked by a run loop."""
    if not isinstance(runner, Engine):
        assert isinstance(runner, ChunkLabeler)
        return runner
    job = session.opened.job
    is_late = job.spec.engine.args.sends_batches
    watch = None
    if not session.is_retry and session.opened.plan.facts.labeler.grades:
        watch = GradeWatch()
        watch.seed(_graded_before(session))
    return RunLoop(
        job.labeler,
        job.spec.labeler,
        runner,
        seed=job.spec.engine.seed,
        ask_timeout_s=job.spec.run.ask_timeout_s,
        is_late=is_late,
        journal=session.journal,
        answer_journal=AnswerJournal(
            session.opened.store,
            session.opened.plan.fingerprint,
            facts,
            session.worker,
            attempts=session.opened.folder.attempts,
        ),
        note_health_check=session.note_health_check,
        answer_cache=session.reuse.answer_cache,
        allowance=session.allowance,
        health=Health(
            job.labeler,
            minds_unreadable=job.spec.run.stop_when_unreadable and not session.is_retry,
            is_late=is_late,
        ),
        watch=watch,
    )


def _graded_before(session: Session) -> Iterator[Graded]:
    """Rows that earlier executions have asked and graded: those of the last chunks that are committed. A file that
    can't be read ends them; who needs it says so.
    """
    folder = session.opened.folder
    files = list[FileRef]()
    with contextlib.suppress(OSError, RelabelError):
        for shard in sorted(session.left.seen, reverse=True):
            if len(files) >= SEED_FILES:
                break
            labels = [receipts[0].labels for receipts in folder.chunk_receipts(shard)]
            files = [*(file for file in labels if file is not None), *files]
        for file in files[-SEED_FILES:]:
            table = read_labels(folder, file, ["row_id", "query_id", "grade", "reused"], check_bytes=False)
            for row in table.to_pylist():
                if row["grade"] is not None and not row["reused"]:
                    yield Graded(row["row_id"], row["query_id"], row["grade"])


def _label_chunks(
    labeler: ChunkLabeler,
    session: Session,
    chunks: Iterator[ChunkWork | None],
    on_progress: Callable[[], None],
) -> None:
    """Have the chunks labelled, and list what could not be read of those that stay open."""
    store = session.opened.store
    try:
        labeler.label_chunks(
            chunks,
            session.commit,
            progress=session.progress,
            stop=session.stop,
            on_progress=on_progress,
        )
    except (EngineCrashError, ServerGoneError):
        list_refused(store, labeler.unfinished)
        raise
    list_refused(store, labeler.unfinished)
