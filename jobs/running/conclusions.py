"""How an execution ends: the manifest brought up to date, what was done in numbers, and the exit code."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from relabel.jobs.exits import Exit
from relabel.jobs.planning.open_runs import OpenRun
from relabel.jobs.planning.spec_places import absolute
from relabel.jobs.running.allowances import AT_BUDGET, budget_so_far
from relabel.jobs.running.batch_records import FOLDER as BATCHES
from relabel.jobs.running.canary import load_results
from relabel.jobs.running.crash_journal import FOLDER as CRASHES
from relabel.jobs.running.live import Live
from relabel.jobs.running.live_files import FOLDER as LIVE
from relabel.jobs.running.refused_answers import listed as refused_files
from relabel.jobs.running.sessions import Session
from relabel.manifests.engine_options import price_of
from relabel.manifests.errors import GateError, RelabelError
from relabel.manifests.runs.budgets import BudgetState
from relabel.manifests.runs.engine_identity import engines_differ
from relabel.manifests.runs.kept_estimates import plan_against_actual
from relabel.manifests.runs.run_folder import Attempts, build_manifest
from relabel.manifests.runs.run_manifest import OwnRunManifest, RunManifest, load_manifest, write_manifest
from relabel.manifests.runs.snapshots import Snapshot, Tally
from relabel.manifests.storage.run_store_ports import RunStore
from relabel.manifests.storage.run_stores import shard_lock_name


@dataclass(frozen=True, slots=True)
class AskedInVain:
    """What was asked for chunks that were not committed here; `cost` is None where the engine names no price."""

    pairs: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None = None


@dataclass(slots=True)
class ThisExecution:
    """Counts of one execution alone: what it committed, and what it asked `in_vain` beside.

    Args:
        costs: of an engine that is paid for; canary: what asking labelled rows again came to. Left out of JSON where
            there is none.
    """

    pairs: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reused: int
    statuses: dict[str, int]
    in_vain: AskedInVain
    chunks_committed: int
    chunks_lost: int
    seconds: float
    costs: dict[str, Any] | None = None
    canary: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(slots=True)
class RunReport:
    """What an execution did, for the end table and `--output json`.

    Args:
        chunks: in the plan; left: what was begun here and not done, and what became of all answers.
        shards, busy_shards: the shards asked for, and those of them that other processes held.
        tally: the whole run as it stands, all workers together.
        rows: rows in the plan.
        settled: quarantined rows that no retry asks, since their queries have labels; 0 until every chunk is in, and
            where a run had nothing to do.
        over_limit, failed_fraction: None until every chunk is in.
        stopped: why the run was cut short, if it was.
        seconds, engine_start_s: wall time of all, and of starting the engine.
        remarks: what the engine said when it started.
        engine_restarts: how often an engine that went down was started again; None where nobody watched over it.
        budget: of the output, where the job has one.
        is_for_run: a retry has asked all that it may, and chunks are open that only `relabel run` begins.
    """

    exit: Exit
    name: str
    output: str
    shards: list[int]
    busy_shards: list[int]
    tally: Tally
    rows: int
    chunks: int
    over_limit: bool | None
    failed_fraction: float | None
    did: ThisExecution
    left: Live
    settled: int = 0
    stopped: str | None = None
    seconds: float = 0.0
    engine_start_s: float = 0.0
    remarks: list[str] = field(default_factory=list)
    engine_restarts: int | None = None
    budget: BudgetState | None = None
    is_for_run: bool = False


def refuse_mixing(engines: list[dict[str, Any]], *, output: str, is_begun: bool) -> None:
    """Refuse labels of several engines under one name.

    Args:
        is_begun: the output was begun by another engine than today's; else it was made by several.
    Raises:
        GateError: what differs.
    """
    remarks = engines_differ(engines)
    if remarks:
        what = "was begun by another engine" if is_begun else "was made by different engines"
        raise GateError(
            f"{output}: {what}: {'; '.join(remarks)}. Labels of two teachers do not belong under one name. Everything "
            "that was committed is kept: continue with the engine that began, label the rest into another output, or "
            "allow it with run.allow_mixed: true."
        )


def conclude(session: Session) -> RunReport:
    """Bring the manifest up to date if every chunk is in, and choose the exit code."""
    opened, progress, spec = session.opened, session.progress, session.opened.job.spec
    manifest, listed = load_manifest(opened.store), session.left.whole
    found = opened.folder.snapshot(manifest=manifest, etags=listed)
    was_finished_now = False
    is_complete = found.tally.chunks_done == opened.plan.num_chunks
    if is_complete:
        found, was_finished_now = _finish(opened, found, manifest)
        if was_finished_now:
            _sweep(opened.store, keeps_batches=session.is_retry)
    failed = found.tally.num_quarantined / opened.plan.rows
    seen = session.left.seen if found.etags is listed else opened.folder.attempts_in(found.etags)
    progress.settle(session.own_receipts(found, seen))
    in_vain = AskedInVain(**progress.in_vain())
    # a run that finds nothing to do reads no receipt
    may_settle = is_complete and found.tally.num_quarantined > 0 and (session.is_retry or bool(session.taken))
    report = RunReport(
        exit=Exit.DONE,
        name=spec.name,
        output=spec.output,
        shards=session.shards,
        busy_shards=session.busy,
        tally=found.tally,
        rows=opened.plan.rows,
        chunks=opened.plan.num_chunks,
        left=progress.live,
        over_limit=failed > spec.run.max_failed_fraction if is_complete else None,
        failed_fraction=failed if is_complete else None,
        settled=session.left.num_settled() if may_settle else 0,
        stopped=session.stop.reason,
        budget=budget_so_far(opened, found.tally),
        did=ThisExecution(
            pairs=progress.kept("pairs"),
            requests=progress.kept("requests"),
            prompt_tokens=progress.kept("prompt_tokens"),
            cached_tokens=progress.kept("cached_tokens"),
            output_tokens=progress.kept("output_tokens"),
            reused=progress.reused,
            statuses=dict(progress.statuses),
            in_vain=replace(in_vain, cost=price_of(spec.engine.args, in_vain.prompt_tokens, in_vain.output_tokens)),
            chunks_committed=progress.chunks_committed,
            chunks_lost=progress.chunks_lost,
            seconds=round(time.perf_counter() - progress.started_s, 3) if session.taken else 0.0,
        ),
    )
    report.exit = _exit(report, session, seen, was_finished_now=was_finished_now)
    return report


def _finish(opened: OpenRun, found: Snapshot, manifest: RunManifest | None) -> tuple[Snapshot, bool]:
    """Write the manifest unless it says already what the receipts say.

    Under a lock, and from receipts read under that lock: whoever commits last also concludes last, so the manifest ends
    up true.
    """
    limit = opened.job.spec.run.max_failed_fraction

    def is_current(held: RunManifest | None) -> bool:
        return held is not None and (held.max_failed_fraction, held.receipts_sha256) == (limit, found.digest)

    if is_current(manifest):
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
            # we slept, and another may have concluded since from later receipts: what we wrote over is put right by
            # another look
    finally:
        lock.release()


def _sweep(store: RunStore, *, keeps_batches: bool) -> None:
    """Remove what a run needs until it is finished: what killed workers said of themselves, refused answers, batches.

    Args:
        keeps_batches: others may be at theirs, though every chunk is in.
    """
    failed = contextlib.suppress(OSError, RelabelError)
    with failed:
        refused = [name for name, _ in refused_files(store)]
        folders = (LIVE, CRASHES) if keeps_batches else (LIVE, CRASHES, BATCHES)
        for name in [*refused, *itertools.chain.from_iterable(map(store.names, folders))]:
            with failed:
                store.remove(name)


def _manifest(opened: OpenRun, found: Snapshot) -> OwnRunManifest:
    spec = opened.job.spec
    if not spec.run.allow_mixed:
        refuse_mixing(found.engines, output=spec.output, is_begun=False)
    manifest = build_manifest(
        opened.folder,
        found,
        spec=absolute(spec).model_dump(mode="json"),
        max_failed_fraction=spec.run.max_failed_fraction,
        relabel_version=version("relabel-ir"),
        canaries=[asdict(result) for result in load_results(opened.store)],
        allow_mixed=spec.run.allow_mixed,
    )
    figures = plan_against_actual(opened.store, found.tally)
    return OwnRunManifest(
        **vars(manifest),
        plan_against_actual=figures,
        variables=dict(opened.job.variables),
        budget=budget_so_far(opened, found.tally),
    )


def _exit(report: RunReport, session: Session, seen: Attempts, *, was_finished_now: bool) -> Exit:
    if report.over_limit:
        return Exit.OVER_LIMIT
    planned = session.opened.plan.shards
    has_work = any(session.left.todo(shard, seen) for shard in session.shards)
    is_open = has_work or any(len(seen.get(shard, ())) < len(planned[shard].chunks) for shard in session.shards)
    report.is_for_run = is_open and not has_work
    is_locked = session.opened.store.is_locked
    busy = [one for one in session.busy if session.left.todo(one, seen) and is_locked(shard_lock_name(one))]
    report.busy_shards = busy
    if busy and not session.taken:
        return Exit.LOCKED
    if is_open and report.stopped == AT_BUDGET:
        return Exit.GATE
    if busy or is_open:
        return Exit.PARTIAL
    if session.taken or was_finished_now:
        return Exit.DONE
    return Exit.NOTHING_TO_DO
