"""The end of an execution: the updated manifest, the run report as text and JSON, and the exit code."""

import contextlib
import itertools
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from relabel.jobs import logs
from relabel.jobs.job import OpenRun
from relabel.jobs.output import Exit, grid
from relabel.jobs.run.canary import CanaryResult, load_results
from relabel.jobs.run.chunks import listed as refused_files
from relabel.jobs.run.crashes import FOLDER as CRASHES
from relabel.jobs.run.notices import STOPPED, warnings_of
from relabel.jobs.run.progress import ASKED, Live
from relabel.jobs.run.progress import FOLDER as LIVE
from relabel.jobs.run.session import AT_BUDGET, Session, budget_so_far
from relabel.jobs.settings import absolute
from relabel.manifests.asks import EngineFacts
from relabel.manifests.budgets import BudgetState
from relabel.manifests.cascade import audit_of
from relabel.manifests.errors import GateError, RelabelError
from relabel.manifests.records import BatchRecord, plain, read_record, readable_json
from relabel.manifests.run_folder import Attempts, Snapshot, Tally, build_manifest
from relabel.manifests.run_manifest import (
    CascadeAudit,
    RunManifest,
    engines_differ,
    load_manifest,
    write_manifest,
)
from relabel.manifests.secrets import counted
from relabel.manifests.specs import price_of
from relabel.manifests.store import Store, map_concurrent, shard_lock_name

# ------------------------------------------------------------------------------
# Records of the batches that an engine handed over, in the output's `batches/`, for the run that goes on after a kill
# or a stop. They go when the run is finished.


FOLDER = "batches"


class StoredBatches:
    """The records of one output. Those whose provider's name is known never change, and are read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = dict[str, BatchRecord]()
        store.sweep(FOLDER)

    def load(self) -> list[BatchRecord]:
        """All that are there.

        Raises:
            ManifestError: one is damaged.
        """
        names = self._store.names(FOLDER)
        new = [name for name in names if name not in self._known]
        found = dict(zip(new, map_concurrent(self._store, self._read, new), strict=True))
        self._known |= {name: record for name, record in found.items() if record.batch}
        return [self._known.get(name) or found[name] for name in names]

    def keep(self, record: BatchRecord) -> None:
        """Write one."""
        self._store.put(f"{FOLDER}/{record.name}.json", readable_json(plain(record)))

    def _read(self, name: str) -> BatchRecord:
        advice = "Move it away; what it holds is asked and paid for again then."
        held = self._store.read(name)
        where = f"{self._store.root}/{name}"
        return read_record(
            BatchRecord,
            held,
            where,
            "not a batch's record",
            advice,
        )


# ------------------------------------------------------------------------------
# How an execution ends: the manifest brought up to date, what was done in numbers, and the exit code.


@dataclass(slots=True)
class RunReport:
    """What an execution did, for the end table and `--output json`.

    Args:
        did: counts of this execution alone, by the names of `Progress`, with `in_vain`: what it asked and discarded
            (`cost` is None where the engine names no price); `costs` of an engine that is paid for, and the result of
            the `canary`, where there is one.
        chunks: in the plan; left: what was begun here and not done, and what became of all answers.
        shards, busy_shards: the shards asked for, and those of them that other processes held.
        tally: the whole run, all workers together.
        rows: rows in the plan.
        settled: quarantined rows that no retry asks, since their queries have labels; 0 until every chunk is in, and
            where a run had nothing to do.
        over_limit, failed_fraction: None until every chunk is in.
        stopped: why the run was cut short, if it was.
        seconds, engine_start_s: wall time of all, and of starting the engine.
        remarks: what the engine said when it started.
        engine_restarts: how often an engine that went down was started again; None where nobody watched over it.
        budget: of the output, where the job has one.
        cascade: who labelled the rows of a finished cascade.
        warnings: what a reader of this execution's labels should know, a sentence each.
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
    did: dict[str, Any]
    left: Live
    settled: int = 0
    stopped: str | None = None
    seconds: float = 0.0
    engine_start_s: float = 0.0
    remarks: list[str] = field(default_factory=list)
    engine_restarts: int | None = None
    budget: BudgetState | None = None
    is_for_run: bool = False
    cascade: CascadeAudit | None = None
    warnings: list[str] = field(default_factory=list)


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
    progress = session.progress
    spec = session.opened.job.spec
    manifest = load_manifest(opened.store)
    listed = session.left.whole
    was_finished_now = False
    found = opened.folder.snapshot(manifest=manifest, etags=listed)
    is_complete = found.tally.chunks_done == opened.plan.num_chunks
    if is_complete and not session.is_part:
        found, was_finished_now = _finish(opened, found, manifest)
        if was_finished_now:
            _sweep(opened.store, keeps_batches=session.is_retry)
    failed = found.tally.num_quarantined / opened.plan.rows
    seen = session.left.seen if found.etags is listed else opened.folder.attempts_of_all(found.etags)
    # what was committed for this execution, by all its workers or by the one that this is
    progress.settle(
        receipt
        for receipt in opened.folder.new_receipts(session.left.seen, seen, found.etags)
        if receipt.execution == session.execution and (not session.is_part or receipt.worker == session.worker)
    )
    in_vain = {name: progress.lost[name] for name in ASKED}
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
        warnings=warnings_of(progress.jumps, progress.outside),
        over_limit=failed > spec.run.max_failed_fraction if is_complete else None,
        failed_fraction=failed if is_complete else None,
        settled=session.left.num_settled() if may_settle else 0,
        stopped=session.stop.reason,
        budget=budget_so_far(opened, found.tally),
        did={
            **{name: getattr(progress, name) for name in ASKED},
            "reused": progress.reused,
            "statuses": dict(progress.statuses),
            "in_vain": {
                **in_vain,
                "cost": price_of(spec.engine.args, in_vain["prompt_tokens"], in_vain["output_tokens"]),
            },
            "chunks_committed": progress.chunks_committed,
            "chunks_lost": progress.chunks_lost,
            "seconds": round(time.perf_counter() - progress.started_s, 3) if session.taken else 0.0,
        },
    )
    if is_complete and opened.cascade is not None and (manifest := load_manifest(opened.store)) is not None:
        report.cascade = manifest.cascade
    report.exit = _exit(report, session, seen, was_finished_now=was_finished_now)
    return report


def _finish(opened: OpenRun, found: Snapshot, manifest: RunManifest | None) -> tuple[Snapshot, bool]:
    """Write the manifest unless it says already what the receipts say.

    Under a lock, and from receipts read under that lock: the worker that commits last also concludes last, so the
    manifest is right in the end.
    """
    limit = opened.job.spec.run.max_failed_fraction
    was_written = False

    def is_current(held: RunManifest | None) -> bool:
        return held is not None and (held.max_failed_fraction, held.receipts_sha256) == (limit, found.digest)

    if is_current(manifest):
        return found, False
    lock = opened.store.lock("manifest", "the manifest")
    lock.acquire(waits=True)
    try:
        # where the lock is lost we slept, and another may have concluded since from later receipts: what we wrote over
        # is put right by another look
        while not was_written or lock.is_lost:
            found = opened.folder.snapshot()
            if is_current(load_manifest(opened.store)):
                break
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
                cascade=audit_of(opened.folder, found.labels),
            )
            budget = budget_so_far(opened, found.tally)
            write_manifest(opened.store, replace(manifest, variables=dict(opened.job.variables), budget=budget))
            was_written = True
        return found, was_written
    finally:
        lock.release()


def _sweep(store: Store, *, keeps_batches: bool) -> None:
    """Remove what a run needs until it is finished: what killed workers said of themselves, refused answers, batches.

    Args:
        keeps_batches: others may be at theirs, though every chunk is in.
    """
    failed = contextlib.suppress(OSError, RelabelError)
    folders = [LIVE, CRASHES, *([] if keeps_batches else [FOLDER])]
    with failed:
        refused = [name for name, _ in refused_files(store)]
        for name in [*refused, STOPPED, *itertools.chain.from_iterable(map(store.names, folders))]:
            with failed:
                store.remove(name)


def _exit(report: RunReport, session: Session, seen: Attempts, *, was_finished_now: bool) -> Exit:
    if report.over_limit:
        return Exit.OVER_LIMIT
    planned = session.opened.plan.shards
    left = session.left
    is_locked = session.opened.store.is_locked
    has_work = any(left.todo(shard, seen) for shard in session.shards)
    is_open = has_work or any(len(seen.get(shard, ())) < len(planned[shard].chunks) for shard in session.shards)
    report.is_for_run = is_open and not has_work
    busy = [one for one in session.busy if left.todo(one, seen) and is_locked(shard_lock_name(one))]
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


# ------------------------------------------------------------------------------
# The result of an execution as text and as JSON.


ENDED_AT_BUDGET = "ended at its budget; everything that was committed is kept"


def report_json(report: RunReport) -> dict[str, Any]:
    """An execution's result."""
    return {
        "exit_code": int(report.exit),
        "output": report.output,
        "shards": report.shards,
        "busy_shards": report.busy_shards,
        "rows": report.rows,
        "labelled": report.tally.labelled,
        "reused": report.tally.reused,
        "quarantined": report.tally.num_quarantined,
        "quarantined_by_status": report.tally.quarantined,
        "rows_open": report.rows - report.tally.rows,
        "open": {
            "chunks": report.chunks - report.tally.chunks_done,
            "begun_chunks": report.left.begun_chunks,
            "begun_rows": report.left.begun_rows,
            "rows_in": report.left.rows_in,
        },
        "answers": {"accepted": report.left.accepted, "refused": dict(report.left.refused)},
        "failed_fraction": report.failed_fraction,
        "over_limit": report.over_limit,
        "stopped": report.stopped,
        "this_run": report.did,
        "stages": report.tally.stages,
        "remarks": report.remarks,
        "warnings": report.warnings,
        "engine_start_s": round(report.engine_start_s, 3),
        "seconds": round(report.seconds, 3),
        **({} if report.engine_restarts is None else {"engine_restarts": report.engine_restarts}),
        **({} if report.budget is None else {"budget": plain(report.budget)}),
        **({} if report.cascade is None else {"cascade": plain(report.cascade)}),
    }


def engine_text(labeler: str, facts: EngineFacts) -> str:
    """Who asks whom, in a line."""
    device = f"{facts.device}, {facts.dtype}" if facts.dtype else facts.device
    who = facts.model if labeler == facts.family else f"{labeler} asks {facts.model}"  # a student has no labeler
    return f"{who} on {facts.details.get('runtime', facts.family)} {facts.version} ({device})"


def report_text(report: RunReport) -> str:
    """The end table."""
    did = report.did
    tally = report.tally
    left = report.left
    if report.exit is Exit.NOTHING_TO_DO:
        share = "all" if report.rows == tally.rows else "these"
        counts = f"{tally.labelled:,} labelled, {tally.reused:,} reused, {tally.num_quarantined:,} quarantined"
        return "\n".join(
            [f"{report.name}: nothing to do, {share} shards are done ({counts}).", *_settled_lines(report)]
        )
    seconds = max(did["seconds"], 1e-9)
    prompt = did["prompt_tokens"]
    output = did["output_tokens"]
    by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.quarantined.items()))
    rows = [
        ("rows", f"{report.rows:,}, {report.rows - tally.rows:,} open"),
        ("labelled", f"{tally.labelled:,}"),
        ("reused", f"{tally.reused:,}"),
        ("quarantined", f"{tally.num_quarantined:,}" + (f" ({by_status})" if by_status else "")),
        ("this run", f"{did['pairs']:,} pairs in {did['seconds']:.1f} s, {did['pairs'] / seconds:,.1f} pairs/s"),
        ("tokens", f"{prompt:,} in, {output:,} out, {(prompt + output) / seconds:,.0f} tokens/s"),
        ("prefix hits", f"{did['cached_tokens'] / prompt:.0%} of prompt tokens" if prompt else "none"),
    ]
    if (lost := did["in_vain"])["requests"] or lost["pairs"]:
        cost = "" if lost["cost"] is None else f", {lost['cost']:,.4f} in money"
        num_tokens = lost["prompt_tokens"] + lost["output_tokens"]
        rows.append(("discarded", f"{lost['pairs']:,} pairs, {lost['requests']:,} asks, {num_tokens:,} tokens{cost}"))
    num_open = report.chunks - tally.chunks_done
    if num_open:
        begun = f"; {left.begun_chunks:,} begun here, {left.rows_in:,} of their {left.begun_rows:,} rows in"
        rows.append(("open", f"{num_open:,} of {report.chunks:,} chunks" + (begun if left.begun_chunks else "")))
        rows += [("answers", left.answers_text())] if left.begun_chunks else []
    scope = "" if sum(counts["asks"] for counts in tally.stages.values()) == did["requests"] else " in all"
    rows += [
        (f"  {stage}", f"{counts['asks']:,} asks, {counts['output_tokens']:,} tokens out{scope}")
        for stage, counts in tally.stages.items()
    ]
    restarts = report.engine_restarts
    canary = did.get("canary")
    more = {
        "canary": CanaryResult(**canary).text if canary else None,
        "budget": report.budget.text if report.budget is not None else None,
        "cascade": report.cascade.text if report.cascade is not None else None,
        "engine restarts": f"{restarts:,}" if restarts is not None else None,
        "labels": f"so far in {report.output}/labels"
        if report.rows > tally.rows
        else f"listed in {report.output}/manifest.json",
    }
    rows += [(name, text) for name, text in more.items() if text is not None]
    rows += [("warning", text) for text in report.warnings]
    return f"{report.name}: {verdict(report)}\n" + grid(rows)


def verdict(report: RunReport) -> str:
    """How an execution ended, in a phrase."""
    if report.exit is Exit.DONE and report.rows > report.tally.rows:
        return "these shards are done; other shards are open"
    if report.exit is Exit.GATE and report.stopped == AT_BUDGET:
        return ENDED_AT_BUDGET
    if report.exit is Exit.PARTIAL and report.is_for_run:
        return "partial; a retry leaves chunks alone that were never labelled"
    failed = report.failed_fraction or 0.0
    return {
        Exit.DONE: "done, every row accounted for",
        Exit.OVER_LIMIT: f"done, but {failed:.1%} of rows are quarantined, over the limit; everything is kept",
        Exit.LOCKED: "another process works on these shards",
        Exit.NOTHING_TO_DO: "nothing to do",
        Exit.GATE: "done, but the cheap labels lose more than cascade.alpha allows; everything is kept",
    }.get(report.exit, "partial; run the same command again")


def _settled_lines(report: RunReport) -> list[str]:
    """Why a retry leaves rows in quarantine, and what to do; nothing where it leaves none."""
    text = (
        f"{report.settled:,} quarantined rows are not asked again: their queries have labels, and the rows of a query "
        "take theirs from one answer. To label them, change what their status and reason name (too little room: "
        "labeler.window_tokens) and run the job into a new output."
    )
    return [text] if report.settled else []


def beyond_budget(job_file: str) -> str:
    """How to go on where a budget is used up."""
    return (
        f"To go on, raise run.max_tokens or run.max_cost in {job_file}, and run the same command again. Until then "
        "it ends here, before an engine is started."
    )


def advise(report: RunReport, job_file: str, same_job: str) -> None:
    """What to do next, on stderr.

    Args:
        same_job: words of a command line that name this very job, with its overrides and its date.
    """
    lines = list[str]()
    askable = report.tally.num_quarantined - report.settled
    if report.exit is Exit.OVER_LIMIT:
        retry = f"; after fixing the cause: relabel retry {same_job}" if askable else ""
        lines.append(f"See {report.output}/quarantine{retry}. Or raise run.max_failed_fraction.")
    elif askable and report.exit is Exit.DONE:
        lines.append(f"{askable:,} rows in {report.output}/quarantine; ask them again with: relabel retry {same_job}")
    if report.exit in (Exit.DONE, Exit.OVER_LIMIT):
        lines += _settled_lines(report)
    if report.is_for_run:
        lines.append(f"Label them with: relabel run {same_job}")
    if report.exit is Exit.GATE:
        lines.append(
            beyond_budget(job_file)
            if report.stopped == AT_BUDGET
            else "The calibration queries are no fair sample of the input, or ids mean other texts there. Label a new "
            "sample of the input's queries with the teacher, and run the job into a new output."
        )
    if report.busy_shards:
        lines.append(f"locked by other workers: {counted(len(report.busy_shards), 'shard')}: {report.busy_shards[:10]}")
    if report.left.begun_chunks:
        see = f"; those that were refused are listed in {report.output}/refused" if report.left.refused else ""
        lines.append(f"Answers of unfinished chunks are kept and not asked again{see}")
    for line in lines:
        logs.say(line, event="advice")
