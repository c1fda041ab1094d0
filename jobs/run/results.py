"""The end of an execution: the manifest brought up to date, what was done in numbers, and the exit code."""

import contextlib
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from relabel.jobs.job import OpenRun
from relabel.jobs.output import Exit
from relabel.jobs.run.allowance import AT_BUDGET, budget_so_far
from relabel.jobs.run.answer_journal import journal_files
from relabel.jobs.run.batches import FOLDER as BATCHES
from relabel.jobs.run.batches import batches_out
from relabel.jobs.run.chunks import refused_files
from relabel.jobs.run.crashes import FOLDER as CRASHES
from relabel.jobs.run.notices import STOPPED, warnings_of
from relabel.jobs.run.progress import FOLDER as LIVE
from relabel.jobs.run.report import InVain, Kept, RunReport, ThisRun
from relabel.jobs.run.session import Session
from relabel.jobs.settings import absolute
from relabel.manifests.canaries import load_results
from relabel.manifests.cascade import audit_of
from relabel.manifests.errors import GateError, RelabelError
from relabel.manifests.run_folder import Attempts, Snapshot, build_manifest
from relabel.manifests.run_manifest import (
    RunManifest,
    engines_differ,
    load_manifest,
    write_manifest,
)
from relabel.manifests.specs import price_of
from relabel.manifests.store import Store, shard_lock_name


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
    opened = session.opened
    manifest = load_manifest(opened.store)
    listing = session.left.whole
    snapshot = opened.folder.snapshot(manifest=manifest, etags=listing)
    is_complete = snapshot.tally.chunks_done == opened.plan.num_chunks
    was_finished_now = False
    if is_complete and not session.is_part:
        snapshot, was_finished_now = _finish(opened, snapshot, manifest)
        if was_finished_now:
            _sweep(opened.store, is_retry=session.is_retry)
    attempts = session.left.seen
    if snapshot.etags is not listing:
        attempts = opened.folder.attempts_of_all(snapshot.etags)
    _settle_progress(session, attempts, snapshot)
    report = _report(session, snapshot, is_complete=is_complete)
    if is_complete and opened.cascade is not None:
        manifest = load_manifest(opened.store)
        report.cascade = None if manifest is None else manifest.cascade
    report.exit = _exit(report, session, attempts, was_finished_now=was_finished_now)
    if report.exit is not Exit.DONE and opened.job.spec.engine.args.sends_batches:
        report.batches = batches_out(opened.store)
    if report.exit is Exit.PARTIAL and report.has_done_nothing:
        report.too_near = session.stop.too_near_text(has_engine=session.progress.engine_starts > 0)
    return report


def _settle_progress(session: Session, attempts: Attempts, snapshot: Snapshot) -> None:
    """End the counts by what was committed for this execution, by all its workers or by the one that this is."""
    receipts = session.opened.folder.new_receipts(session.left.seen, attempts, snapshot.etags)
    session.progress.settle(
        receipt
        for receipt in receipts
        if receipt.execution == session.execution and (not session.is_part or receipt.worker == session.worker)
    )


def _report(session: Session, snapshot: Snapshot, *, is_complete: bool) -> RunReport:
    opened = session.opened
    spec = opened.job.spec
    progress = session.progress
    tally = snapshot.tally
    report = RunReport(
        exit=Exit.DONE,
        name=spec.name,
        output=spec.output,
        shards=session.shards,
        busy_shards=session.busy,
        tally=tally,
        rows=opened.plan.rows,
        input_rows=opened.plan.input_rows,
        chunks=opened.plan.num_chunks,
        over_limit=None,
        failed_fraction=None,
        this_run=_this_run(session),
        live=progress.live,
        stopped=session.stop.reason,
        budget=budget_so_far(opened, tally),
        warnings=warnings_of(progress.jumps, progress.outside),
        date=opened.job.variables.get("date"),
    )
    if is_complete:
        report.failed_fraction = tally.num_quarantined / opened.plan.rows
        report.over_limit = report.failed_fraction > spec.run.max_failed_fraction
        # a run that finds nothing to do reads no receipt
        if tally.num_quarantined > 0 and (session.is_retry or session.taken):
            report.settled = session.left.num_settled()
    return report


def _this_run(session: Session) -> ThisRun:
    progress = session.progress
    lost = progress.lost
    args = session.opened.job.spec.engine.args
    return ThisRun(
        pairs=progress.pairs,
        requests=progress.requests,
        prompt_tokens=progress.prompt_tokens,
        cached_tokens=progress.cached_tokens,
        output_tokens=progress.output_tokens,
        reused=progress.reused,
        statuses=dict(progress.statuses),
        in_vain=InVain(
            pairs=lost["pairs"],
            requests=lost["requests"],
            prompt_tokens=lost["prompt_tokens"],
            cached_tokens=lost["cached_tokens"],
            output_tokens=lost["output_tokens"],
            cost=price_of(args, lost["prompt_tokens"], lost["output_tokens"]),
        ),
        chunks_committed=progress.chunks_committed,
        chunks_lost=progress.chunks_lost,
        seconds=round(time.perf_counter() - progress.started_s, 3) if session.taken else 0.0,
        kept=_kept(session),
    )


def _kept(session: Session) -> Kept | None:
    """What this execution leaves to the next, less what the one before had left to it."""
    left = session.progress.kept
    if left["requests"] >= 0:
        return None
    return Kept(answers=-left["requests"], tokens=-left["prompt_tokens"] - left["output_tokens"])


def _finish(opened: OpenRun, snapshot: Snapshot, manifest: RunManifest | None) -> tuple[Snapshot, bool]:
    """Write the manifest unless it says already what the receipts say.

    Under a lock, and from receipts read under that lock: the worker that commits last also concludes last, so the
    manifest is right in the end.

    Returns:
        The receipts that it says, and whether it was written now.
    """
    if _is_current(manifest, opened, snapshot):
        return snapshot, False
    was_written = False
    lock = opened.store.lock("manifest", "the manifest")
    lock.acquire(waits=True)
    try:
        # where the lock is lost we slept, and another may have concluded since from later receipts: what we wrote over
        # is put right by another look
        while not was_written or lock.is_lost:
            snapshot = opened.folder.snapshot()
            if _is_current(load_manifest(opened.store), opened, snapshot):
                break
            _write_manifest(opened, snapshot)
            was_written = True
        return snapshot, was_written
    finally:
        lock.release()


def _is_current(manifest: RunManifest | None, opened: OpenRun, snapshot: Snapshot) -> bool:
    if manifest is None:
        return False
    limit = opened.job.spec.run.max_failed_fraction
    return manifest.max_failed_fraction == limit and manifest.receipts_sha256 == snapshot.digest


def _write_manifest(opened: OpenRun, snapshot: Snapshot) -> None:
    spec = opened.job.spec
    if not spec.run.allow_mixed:
        refuse_mixing(snapshot.engines, output=spec.output, is_begun=False)
    manifest = build_manifest(
        opened.folder,
        snapshot,
        spec=absolute(spec).model_dump(mode="json"),
        max_failed_fraction=spec.run.max_failed_fraction,
        relabel_version=version("relabel-ir"),
        canaries=[asdict(result) for result in load_results(opened.store)],
        allow_mixed=spec.run.allow_mixed,
        cascade=audit_of(opened.folder, snapshot.labels),
    )
    budget = budget_so_far(opened, snapshot.tally)
    write_manifest(opened.store, replace(manifest, variables=dict(opened.job.variables), budget=budget))


def _sweep(store: Store, *, is_retry: bool) -> None:
    """Remove what a run needs until it is finished: what killed workers said of themselves, refused answers, the
    journal, batches.

    Args:
        is_retry: others may be at their journals and batches, though every chunk is in.
    """
    with contextlib.suppress(OSError, RelabelError):
        names = [STOPPED, *refused_files(store), *store.names(LIVE), *store.names(CRASHES)]
        if not is_retry:
            names += [*journal_files(store), *store.names(BATCHES)]
        for name in names:
            with contextlib.suppress(OSError, RelabelError):
                store.remove(name)


def _exit(report: RunReport, session: Session, attempts: Attempts, *, was_finished_now: bool) -> Exit:
    """The exit code; notes in the report which shards are busy, and what only a run may begin."""
    if report.over_limit:
        return Exit.OVER_LIMIT
    left = session.left
    is_locked = session.opened.store.is_locked
    has_work = any(left.todo(shard, attempts) for shard in session.shards)
    is_open = has_work or any(_has_open_chunks(session, attempts, shard) for shard in session.shards)
    busy = [shard for shard in session.busy if left.todo(shard, attempts) and is_locked(shard_lock_name(shard))]
    report.is_for_run = is_open and not has_work
    report.busy_shards = busy
    if busy and not session.taken:
        return Exit.LOCKED
    if is_open and report.stopped == AT_BUDGET:
        return Exit.GATE
    if busy or is_open:
        return Exit.PARTIAL
    if report.cascade is not None and report.cascade.is_alarm:
        return Exit.GATE
    return Exit.DONE if session.taken or was_finished_now else Exit.NOTHING_TO_DO


def _has_open_chunks(session: Session, attempts: Attempts, shard: int) -> bool:
    return len(attempts.get(shard, ())) < len(session.opened.plan.shards[shard].chunks)
