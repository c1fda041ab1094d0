"""The end of an execution: the updated manifest, the run report as text and JSON, and the exit code."""

import contextlib
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from relabel.jobs.job import OpenRun
from relabel.jobs.output import Exit, grid
from relabel.jobs.run.allowance import AT_BUDGET, budget_so_far
from relabel.jobs.run.canary import CanaryResult, load_results
from relabel.jobs.run.chunks import listed as refused_files
from relabel.jobs.run.crashes import FOLDER as CRASHES
from relabel.jobs.run.notices import STOPPED, warnings_of
from relabel.jobs.run.progress import FOLDER as LIVE
from relabel.jobs.run.progress import Live
from relabel.jobs.run.session import Session
from relabel.jobs.settings import absolute
from relabel.manifests.asks import EngineFacts
from relabel.manifests.budgets import BudgetState
from relabel.manifests.cascade import audit_of
from relabel.manifests.errors import GateError, RelabelError
from relabel.manifests.records import LEFT_OUT, BatchRecord, plain, read_record, readable_json
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
        records = dict(zip(new, map_concurrent(self._store, self._read, new), strict=True))
        records |= self._known
        self._known |= {name: record for name, record in records.items() if record.batch}
        return [records[name] for name in names]

    def keep(self, record: BatchRecord) -> None:
        """Write one."""
        self._store.put(f"{FOLDER}/{record.name}.json", readable_json(plain(record)))

    def _read(self, name: str) -> BatchRecord:
        return read_record(
            BatchRecord,
            self._store.read(name),
            f"{self._store.root}/{name}",
            "not a batch's record",
            "Move it away; what it holds is asked and paid for again then.",
        )


# ------------------------------------------------------------------------------
# What an execution did, as a record.


ENDED_AT_BUDGET = "ended at its budget; everything that was committed is kept"


@dataclass(slots=True)
class InVain:
    """What an execution asked and discarded; `cost` is None where the engine names no price."""

    pairs: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None


@dataclass(slots=True)
class ThisRun:
    """What an execution has committed, by the names of `Progress`.

    Args:
        in_vain: what else it asked.
        costs: of an engine that is paid for.
    """

    pairs: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reused: int
    statuses: dict[str, int]
    in_vain: InVain
    chunks_committed: int
    chunks_lost: int
    seconds: float
    costs: dict[str, Any] | None = field(default=None, metadata=LEFT_OUT)
    canary: CanaryResult | None = field(default=None, metadata=LEFT_OUT)

    def rows(self) -> list[tuple[str, str]]:
        """For the end table."""
        seconds = max(self.seconds, 1e-9)
        prompt = self.prompt_tokens
        output = self.output_tokens
        hits = f"{self.cached_tokens / prompt:.0%} of prompt tokens" if prompt else "none"
        return [
            ("this run", f"{self.pairs:,} pairs in {self.seconds:.1f} s, {self.pairs / seconds:,.1f} pairs/s"),
            ("tokens", f"{prompt:,} in, {output:,} out, {(prompt + output) / seconds:,.0f} tokens/s"),
            ("prefix hits", hits),
            *self._discarded_rows(),
        ]

    def _discarded_rows(self) -> list[tuple[str, str]]:
        lost = self.in_vain
        if not lost.requests and not lost.pairs:
            return []
        tokens = lost.prompt_tokens + lost.output_tokens
        text = f"{lost.pairs:,} pairs, {lost.requests:,} asks, {tokens:,} tokens"
        if lost.cost is not None:
            text += f", {lost.cost:,.4f} in money"
        return [("discarded", text)]


@dataclass(slots=True)
class RunReport:
    """What an execution did, for the end table and `--output json`.

    Args:
        this_run: what this execution did.
        chunks: in the plan; live: what was begun here and not done, and what became of all answers.
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
        is_idle_fine: nothing to do exits with 0 (`--done-ok`).
        date: what `${date}` meant, if the job has it.
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
    this_run: ThisRun
    live: Live
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
    is_idle_fine: bool = False
    date: str | None = None

    @property
    def exit_code(self) -> Exit:
        """What the command exits with."""
        if self.is_idle_fine and self.exit is Exit.NOTHING_TO_DO:
            return Exit.DONE
        return self.exit

    @property
    def rows_open(self) -> int:
        return self.rows - self.tally.rows

    @property
    def verdict(self) -> str:
        """How it ended, in a phrase."""
        if self.exit is Exit.DONE and self.rows_open > 0:
            return "these shards are done; other shards are open"
        if self.exit is Exit.GATE and self.stopped == AT_BUDGET:
            return ENDED_AT_BUDGET
        if self.exit is Exit.PARTIAL and self.is_for_run:
            return "partial; a retry leaves chunks alone that were never labelled"
        failed = self.failed_fraction or 0.0
        verdicts = {
            Exit.DONE: "done, every row accounted for",
            Exit.OVER_LIMIT: f"done, but {failed:.1%} of rows are quarantined, over the limit; everything is kept",
            Exit.LOCKED: "another process works on these shards",
            Exit.NOTHING_TO_DO: "nothing to do",
            Exit.GATE: "done, but the cheap labels lose more than cascade.alpha allows; everything is kept",
        }
        return verdicts.get(self.exit, "partial; run the same command again")

    def as_json(self) -> dict[str, Any]:
        """An execution's result."""
        result = {
            "exit_code": int(self.exit_code),
            "output": self.output,
            "shards": self.shards,
            "busy_shards": self.busy_shards,
            "rows": self.rows,
            "labelled": self.tally.labelled,
            "reused": self.tally.reused,
            "quarantined": self.tally.num_quarantined,
            "quarantined_by_status": self.tally.quarantined,
            "rows_open": self.rows_open,
            "open": {
                "chunks": self.chunks - self.tally.chunks_done,
                "begun_chunks": self.live.begun_chunks,
                "begun_rows": self.live.begun_rows,
                "rows_in": self.live.rows_in,
            },
            "answers": {"accepted": self.live.accepted, "refused": dict(self.live.refused)},
            "failed_fraction": self.failed_fraction,
            "over_limit": self.over_limit,
            "stopped": self.stopped,
            "this_run": plain(self.this_run),
            "stages": self.tally.stages,
            "remarks": self.remarks,
            "warnings": self.warnings,
            "engine_start_s": round(self.engine_start_s, 3),
            "seconds": round(self.seconds, 3),
        }
        if self.engine_restarts is not None:
            result["engine_restarts"] = self.engine_restarts
        if self.budget is not None:
            result["budget"] = plain(self.budget)
        if self.cascade is not None:
            result["cascade"] = plain(self.cascade)
        return result

    def lines(self) -> list[str]:
        """The end table."""
        tally = self.tally
        if self.exit is Exit.NOTHING_TO_DO:
            share = "all" if self.rows == tally.rows else "these"
            counts = f"{tally.labelled:,} labelled, {tally.reused:,} reused, {tally.num_quarantined:,} quarantined"
            return [f"{self.name}: nothing to do, {share} shards are done ({counts}).", *self.settled_lines()]
        rows = [
            *self._state_rows(),
            *self.this_run.rows(),
            *self._open_rows(),
            *self._stage_rows(),
        ]
        if self.this_run.canary is not None:
            rows.append(("canary", self.this_run.canary.text))
        if self.budget is not None:
            rows.append(("budget", self.budget.text))
        if self.cascade is not None:
            rows.append(("cascade", self.cascade.text))
        if self.engine_restarts is not None:
            rows.append(("engine restarts", f"{self.engine_restarts:,}"))
        is_partial = self.rows_open > 0
        labels = f"so far in {self.output}/labels" if is_partial else f"listed in {self.output}/manifest.json"
        rows.append(("labels", labels))
        rows += [("warning", text) for text in self.warnings]
        return [f"{self.name}: {self.verdict}", *grid(rows).split("\n")]

    def _state_rows(self) -> list[tuple[str, str]]:
        tally = self.tally
        quarantined = f"{tally.num_quarantined:,}"
        if tally.quarantined:
            by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.quarantined.items()))
            quarantined += f" ({by_status})"
        return [
            ("rows", f"{self.rows:,}, {self.rows_open:,} open"),
            ("labelled", f"{tally.labelled:,}"),
            ("reused", f"{tally.reused:,}"),
            ("quarantined", quarantined),
        ]

    def _open_rows(self) -> list[tuple[str, str]]:
        num_open = self.chunks - self.tally.chunks_done
        if not num_open:
            return []
        live = self.live
        text = f"{num_open:,} of {self.chunks:,} chunks"
        if not live.begun_chunks:
            return [("open", text)]
        text += f"; {live.begun_chunks:,} begun here, {live.rows_in:,} of their {live.begun_rows:,} rows in"
        return [("open", text), ("answers", live.answers_text())]

    def _stage_rows(self) -> list[tuple[str, str]]:
        stages = self.tally.stages
        is_of_this_run = sum(counts["asks"] for counts in stages.values()) == self.this_run.requests
        scope = "" if is_of_this_run else " in all"
        return [
            (f"  {stage}", f"{counts['asks']:,} asks, {counts['output_tokens']:,} tokens out{scope}")
            for stage, counts in stages.items()
        ]

    def settled_lines(self) -> list[str]:
        """Why a retry leaves rows in quarantine, and what to do; nothing where it leaves none."""
        if not self.settled:
            return []
        return [
            f"{self.settled:,} quarantined rows are not asked again: their queries have labels, and the rows of a "
            "query take theirs from one answer. To label them, change what their status and reason name (too little "
            "room: labeler.window_tokens) and run the job into a new output."
        ]

    def advice(self, job_file: str, same_job: str) -> list[str]:
        """What to do next.

        Args:
            same_job: words of a command line that name this very job, with its overrides and its date.
        """
        lines = list[str]()
        askable = self.tally.num_quarantined - self.settled
        if self.exit is Exit.OVER_LIMIT:
            retry = f"; after fixing the cause: relabel retry {same_job}" if askable else ""
            lines.append(f"See {self.output}/quarantine{retry}. Or raise run.max_failed_fraction.")
        elif self.exit is Exit.DONE and askable:
            lines.append(f"{askable:,} rows in {self.output}/quarantine; ask them again with: relabel retry {same_job}")
        if self.exit in (Exit.DONE, Exit.OVER_LIMIT):
            lines += self.settled_lines()
        if self.is_for_run:
            lines.append(f"Label them with: relabel run {same_job}")
        if self.exit is Exit.GATE and self.stopped == AT_BUDGET:
            lines.append(beyond_budget(job_file))
        elif self.exit is Exit.GATE:
            lines.append(
                "The calibration queries are no fair sample of the input, or ids mean other texts there. Label a new "
                "sample of the input's queries with the teacher, and run the job into a new output."
            )
        if self.busy_shards:
            busy = self.busy_shards
            lines.append(f"locked by other workers: {counted(len(busy), 'shard')}: {busy[:10]}")
        if self.live.begun_chunks:
            see = f"; those that were refused are listed in {self.output}/refused" if self.live.refused else ""
            lines.append(f"Answers of unfinished chunks are kept and not asked again{see}")
        return lines


def beyond_budget(job_file: str) -> str:
    """How to go on where a budget is used up."""
    return (
        f"To go on, raise run.max_tokens or run.max_cost in {job_file}, and run the same command again. Until then "
        "it ends here, before an engine is started."
    )


# ------------------------------------------------------------------------------
# The end: the manifest brought up to date, and the exit code.


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
            _sweep(opened.store, keeps_batches=session.is_retry)
    attempts = session.left.seen
    if snapshot.etags is not listing:
        attempts = opened.folder.attempts_of_all(snapshot.etags)
    _settle_progress(session, attempts, snapshot)
    report = _report(session, snapshot, is_complete=is_complete)
    if is_complete and opened.cascade is not None:
        manifest = load_manifest(opened.store)
        report.cascade = None if manifest is None else manifest.cascade
    report.exit = _exit(report, session, attempts, was_finished_now=was_finished_now)
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
    )


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


def _sweep(store: Store, *, keeps_batches: bool) -> None:
    """Remove what a run needs until it is finished: what killed workers said of themselves, refused answers, batches.

    Args:
        keeps_batches: others may be at theirs, though every chunk is in.
    """
    folders = [LIVE, CRASHES]
    if not keeps_batches:
        folders.append(FOLDER)
    with contextlib.suppress(OSError, RelabelError):
        names = [name for name, _ in refused_files(store)]
        names.append(STOPPED)
        for folder in folders:
            names += store.names(folder)
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


def engine_text(labeler: str, facts: EngineFacts) -> str:
    """Who asks whom, in a line."""
    device = f"{facts.device}, {facts.dtype}" if facts.dtype else facts.device
    who = facts.model if labeler == facts.family else f"{labeler} asks {facts.model}"  # a student has no labeler
    return f"{who} on {facts.details.get('runtime', facts.family)} {facts.version} ({device})"
