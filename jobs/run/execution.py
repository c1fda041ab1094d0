"""One execution of a job over a session's shards: engine start, canary, run loop and conclusion."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from relabel.jobs.job import Job, OpenRun
from relabel.jobs.run.canary import CanaryResult, CanarySample, ask_canary, draw_canary, has_passed, keep_result, refuse
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.crashes import ends_hanging
from relabel.jobs.run.loop import IDLE_S, RunLoop
from relabel.jobs.run.progress import LiveFile, Progress, StageSeen
from relabel.jobs.run.results import RunReport, StoredBatches, conclude, refuse_mixing
from relabel.jobs.run.session import COMMITS_IN_FLIGHT, CommitThreads, Session
from relabel.jobs.run.stop import DRAIN_S, Stop, start_unless_stopped
from relabel.manifests.asks import Engine, EngineFacts
from relabel.manifests.errors import EngineCrashError, LockHeldError, RelabelError, ServerGoneError
from relabel.manifests.models import DAY, default_cache_dir, write_json
from relabel.manifests.process import device_names
from relabel.manifests.records import checked, digest_of, fault_of, read_record, sealed_json
from relabel.manifests.reuse import why_nothing
from relabel.manifests.run import engines_differ
from relabel.manifests.specs import EngineSpec, KeepsModels, PaidByToken
from relabel.manifests.store import Lock, RunStore

# ------------------------------------------------------------------------------
# Engine options and rates that are kept from one run to the next.


# A fleet's CPUs differ, and labels in bfloat16 and in float32 are those of two teachers. So the first worker of an
# output records how it resolved the engine's `auto` options before it starts its engine, and the others follow it.

AUTO_NAME = "engine.json"


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """How the first worker of an output resolved its engine's `auto` options, by option."""

    version: int
    resolved: dict[str, str]


def with_auto_resolved(job: Job, store: RunStore) -> Job:
    """The job with its engine's `auto` options as this output was begun, or as this machine is the first to choose.

    Raises:
        ManifestError: the first worker's record can't be read.
        ModelError: see `Engine.resolve_auto`.
    """
    chosen = job.engine_class.resolve_auto(job.spec.engine)
    if not chosen or store.create(AUTO_NAME, sealed_json(asdict(AutoOptions(1, chosen)))):
        return _with(job, chosen)
    held = read_auto(store)
    return _with(job, {name: held.resolved.get(name, value) for name, value in chosen.items()})


def options_begun_with(job: Job, store: RunStore) -> dict[str, str]:
    """The engine's `auto` options as this output's first worker resolved them; empty where it did not. Reads only."""
    try:
        held = read_auto(store)
    except FileNotFoundError:
        return {}
    return {name: value for name, value in held.resolved.items() if getattr(job.spec.engine.args, name, "") == "auto"}


def with_options_begun_with(job: Job, store: RunStore) -> Job:
    """The job with these options: to ask as the run does, without being part of it.

    Raises:
        ManifestError: as `with_auto_resolved`.
        StoreError: the output can't be read.
    """
    return _with(job, options_begun_with(job, store))


def _with(job: Job, found: dict[str, str]) -> Job:
    return job.changed("engine", args=job.spec.engine.args.model_copy(update=found))


def read_auto(store: RunStore) -> AutoOptions:
    """The record of an output's first worker.

    Raises:
        FileNotFoundError: nothing.
        ManifestError: it can't be read.
    """
    return read_record(
        AutoOptions,
        store.read(AUTO_NAME),
        f"{store.root}/{AUTO_NAME}",
        "not the options of an engine",
        "Move it away, and set the engine's `auto` options as the labels that are there were made.",
    )


# ------------------------------------------------------------------------------
# How fast a model answered a labeler's asks on this device, and how long its answers were: kept in the user's cache
# from its last run or probe. Only estimates read it, so a file that can't be used is ignored with a remark.


PROBE_HINT = "`relabel plan --probe` asks a few rows"
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Measurements of one run or probe.

    Args:
        key: what they hold for, in full; the file's name is its digest.
        measured: when it ended.
        dtype: in the words of the engine's facts.
        rows: asked, in so many seconds.
        stages: asks and tokens of each.
    """

    key: dict[str, Any]
    source: Literal["run", "probe"]
    measured: str
    dtype: str
    rows: Positive
    seconds: Positive
    stages: dict[str, StageSeen]
    version: Literal[2] = 2

    @property
    def seconds_per_token(self) -> float:
        """Of one worker, for a token of a prompt or an answer."""
        return self.seconds / sum(seen.prompt_tokens + seen.output_tokens for seen in self.stages.values())

    @property
    def basis(self) -> str:
        """The source of a figure, in words."""
        what = "this model's last run on this device" if self.source == "run" else "a probe"
        return f"{what} ({self.rows:,.0f} rows, {self.measured[:16].replace('T', ' ')} UTC)"


def keep_rates(
    opened: OpenRun, facts: EngineFacts, progress: Progress, *, source: Literal["run", "probe"]
) -> Rates | None:
    """The rates of work that has just ended, kept for later estimates in place of earlier ones; a probe's never replace
    a run's. None where no row was asked. A cache that can't be written ends no run.
    """
    seconds, stages = time.perf_counter() - progress.started_s, dict(progress.stages_seen)
    if not progress.pairs or not any(seen.prompt_tokens for seen in stages.values()):
        return None
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    rates = Rates(_key(opened), source, measured, facts.dtype, progress.pairs, seconds, stages)
    folder, held = _folder(opened.job.spec.engine), load_rates(opened)[0] if source == "probe" else None
    if folder is not None and (held is None or held.source == "probe"):
        with contextlib.suppress(OSError):
            write_json(folder / f"{digest_of(rates.key)[:32]}.json", asdict(rates))
    return rates


def load_rates(opened: OpenRun) -> tuple[Rates | None, str]:
    """The rates of this job's model, labeler and device, and their source; where there are none, why, in words."""
    engine, key = opened.job.spec.engine, _key(opened)
    if engine.args.sends_batches:
        return None, "batches are answered hours later, at no rate of their own"
    folder = _folder(engine)
    if folder is None:
        return None, f"rates of engine {engine.name} are not kept; {PROBE_HINT}"
    path = folder / f"{digest_of(key)[:32]}.json"
    try:
        rates = checked(Rates, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None, f"no run of this model on this device is known; {PROBE_HINT}"
    except (OSError, ValueError) as exc:
        return None, f"{path} can't be used ({fault_of(exc)})"
    dtype = options_begun_with(opened.job, opened.store).get("dtype", rates.dtype)
    if dtype not in rates.dtype:  # which may name a quantization, too
        return None, f"the last run here was in {rates.dtype}, and this output is in {dtype}"
    return rates, rates.basis


def _folder(engine: EngineSpec) -> Path | None:
    """None where there is no model whose rates would be worth keeping, or where answers come hours later."""
    if not isinstance(engine.args, KeepsModels) or engine.args.sends_batches:
        return None
    return (Path(engine.args.cache_dir) if engine.args.cache_dir else default_cache_dir()) / "rates"


def _key(opened: OpenRun) -> dict[str, Any]:
    """Model, engine with all that changes its speed, device, labeler."""
    engine = opened.job.spec.engine
    args: Mapping[str, Any] = engine.args.model_dump(mode="json", exclude={"cache_dir", *PaidByToken.__annotations__})
    return {
        "model": opened.plan.facts.model,
        "engine": {
            "name": engine.name,
            "args": args,
            "chat_template_kwargs": {key: one for key, one in engine.chat_template_kwargs.items() if key != DAY},
        },
        "device": device_names(),
        "labeler": opened.job.spec.labeler.name,
    }


# ------------------------------------------------------------------------------
# One execution of a job over a session's shards: engine start, canary, run loop and conclusion.


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
    live_file = LiveFile(
        session.opened.store, session.worker, session.execution, session.progress, stays=session.is_part
    )

    def turned() -> None:
        on_progress()
        live_file.update()

    try:
        if (
            session.reach()
            and (begun := _begin(session)) is not None
            and (session.allowance is None or session.allowance.begin())
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
                canary = _pass_canary(engine, session, sample, turned)
                _drive(engine, session, chunks, turned)
                # rows that failed before are no sample of others
                if not session.is_retry and not isinstance(engine, LabelsChunks):
                    keep_rates(session.opened, session.facts, session.progress, source="run")
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
        live_file.close()
    report = conclude(session)
    report.did |= {} if costs is None else {"costs": costs}
    report.did |= {} if canary is None else {"canary": asdict(canary)}
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
    if not (session.reuse.outputs or session.opened.cascade) or is_awaited:
        return chunks, sample, remarks
    first = _commit_known(session, chunks)
    return None if first is None else (itertools.chain([first], chunks), sample, remarks)


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
                commits.settle()
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
    for earlier in session.reuse.outputs:
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
    if isinstance(engine, LabelsChunks):
        engine.label_chunks(
            chunks, session.commit, progress=session.progress, stop=session.stop, on_progress=on_progress
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
        on_progress=on_progress,
        ask_timeout_s=job.spec.run.ask_timeout_s,
        is_late=job.spec.engine.args.sends_batches,
        journal=session.journal,
        answer_cache=session.reuse.answer_cache,
        allowance=session.allowance,
    )
    watchdog = ends_hanging(
        lambda: loop.engine.polling_since_s, job.spec.run.ask_timeout_s, on_end=session.journal.hangs
    )
    with watchdog:
        try:
            loop.run(chunks)
        except (EngineCrashError, ServerGoneError):
            session.keep_answers(loop.unfinished)
            raise
        session.keep_answers(loop.unfinished)
