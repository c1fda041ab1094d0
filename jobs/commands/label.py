"""`plan`, `run` and `retry`: the commands that cut the work and do it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from jobs import log_format
from jobs.canary import CanaryResult, canary_text
from jobs.chunk_time import chunk_time
from jobs.commands.options import Command, date_option, emit, job_options, log_option, output_option, table
from jobs.counts import Progress
from jobs.crews import BACKENDS, Crew, as_json, label_with
from jobs.deadlines import Deadline, choose_deadline
from jobs.estimate_text import estimate_json, estimate_text
from jobs.estimating import estimate_run, keep_estimate
from jobs.exits import Exit, exit_for
from jobs.job_files import load_job
from jobs.labeling import RunReport, open_run
from jobs.metrics import MetricsFile
from jobs.progress import Display
from jobs.sessions import OpenRun, Session
from jobs.shard_choice import choose_shards
from jobs.signals import stopping
from jobs.stops import Stop
from labelers.engines.decision_costs import DecisionCost
from manifests.asks import EngineFacts
from manifests.errors import RelabelError
from manifests.plans import Plan, load_plan
from manifests.runs import RunFolder
from manifests.store import open_store

SHARD_HELP = "INDEX/COUNT, counted from 0 (3/64 takes the plan's shards j with j mod 64 = 3), or auto under Slurm, AWS Batch or Kubernetes."
END_FIELDS = ("exit_code", "rows", "labelled", "quarantined", "rows_open", "stopped", "this_run", "engine_start_s", "seconds")
"""Of the result, what the last line of a JSON log holds."""
UNTIL_HELP = (
    "End before this time with all finished chunks committed: the next 06:00 of the local clock, '06:00 Europe/Berlin', 06:00Z, or a "
    "timestamp. Exits 20 if work is left."
)
FOR_HELP = "End within this length, likewise: 45s, 90m, 1h30m. With --until, the earlier counts."
GPUS_HELP = "One engine process for each of these GPUs (all, or numbers such as 0,1), watched over and started again when it goes down."
WORKERS_HELP = "Likewise, so many engine processes and no GPUs given out; with --backend ray, so many actors."
BACKEND_HELP = "Where the engines run: on this machine, or wherever Ray places them."
ADDRESS_HELP = "The Ray cluster: auto for the one this machine is part of, or ray://HOST:10001. Default: RAY_ADDRESS, else one of its own."
METRICS_HELP = "Keep a Prometheus text file with the run's counts, for node_exporter's textfile collector."


@dataclass(frozen=True, slots=True)
class Work:
    """What `run` or `retry` was asked for; the fields are the options of the command.

    Args:
        lasting: `--for`.
    """

    job_file: str
    overrides: tuple[str, ...]
    shard: str | None
    day: str | None
    until: str | None
    lasting: str | None
    metrics: str | None
    gpus: str | None
    workers: int | None
    backend: str
    address: str | None
    dry_run: bool
    done_ok: bool
    output: str


def _work_options(*, dry_run: str, done_ok: str) -> Callable[[Command], Command]:
    """The options of a command that asks; the two helps differ between a run and a retry."""

    def decorate(command: Command) -> Command:
        command = output_option(command)
        command = click.option("--done-ok", is_flag=True, help=done_ok)(command)
        command = click.option("--dry-run", is_flag=True, help=dry_run)(command)
        command = click.option("--metrics", metavar="FILE", help=METRICS_HELP)(command)
        command = log_option(command)
        command = click.option("--for", "lasting", metavar="LENGTH", help=FOR_HELP)(command)
        command = click.option("--until", metavar="TIME", help=UNTIL_HELP)(command)
        command = date_option(command)
        command = click.option("--address", metavar="ADDRESS", help=ADDRESS_HELP)(command)
        command = click.option("--backend", type=click.Choice(BACKENDS), default="local", show_default=True, help=BACKEND_HELP)(command)
        command = click.option("--workers", type=click.IntRange(min=1), metavar="N", help=WORKERS_HELP)(command)
        command = click.option("--gpus", metavar="all|0,1,…", help=GPUS_HELP)(command)
        command = click.option("--shard", metavar="I/N|auto", help=SHARD_HELP)(command)
        return job_options(command)

    return decorate


@click.command(epilog="Example: relabel plan job.yaml")
@click.option("--exact", is_flag=True, help="Stream the text once and count tokens, asks and reused rows, instead of estimating them.")
@job_options
@date_option
@log_option
@output_option
def plan(job_file: str, overrides: tuple[str, ...], day: str | None, exact: bool, output: str) -> int:
    """Cut the input into shards and chunks, and say what a run would do, take and cost.

    Reads footers and the query-id column, nothing else; with --exact the text too. The plan is written once and never changed; the same
    command again shows it.
    """
    started = time.perf_counter()
    opened = open_run(load_job(job_file, overrides=overrides, day=day))
    planned = estimate_run(opened, is_exact=exact)
    if exact:
        keep_estimate(opened, planned.estimate)
    found = opened.plan
    done = opened.folder.attempts_of_all()
    costs = opened.job.engine_class.decision_costs(opened.job.spec.engine, opened.job.labeler.probe())
    todo = [len(shard.chunks) - len(done.get(number, ())) for number, shard in enumerate(found.shards)]
    lasting = chunk_time(_measured_runs(opened), opened.job.spec.run.chunk_rows)
    result = {
        "output": opened.job.spec.output,
        "was_planned_now": opened.was_planned_now,
        "fingerprint": found.fingerprint,
        "rows": found.rows,
        "queries": found.queries,
        "files": len(found.files),
        "shards": len(found.shards),
        "chunks": found.num_chunks,
        "chunks_open": sum(todo),
        "is_scattered": found.is_scattered,
        "read_ratio": round(found.read_ratio, 3),
        "text_bytes": found.text_bytes,
        "estimate": estimate_json(planned),
        "estimated_prompt_tokens": sum(shard.estimated_tokens for shard in found.shards),
        "variables": dict(opened.job.variables),
        "chunk_seconds": None if lasting is None else round(lasting.seconds, 3),
        "decision_costs": [cost._asdict() for cost in costs],
        "shard_rows": [shard.rows for shard in found.shards],
        "seconds": round(time.perf_counter() - started, 3),
    }
    emit(result, _plan_text(opened, sum(todo), costs) + "\n" + estimate_text(planned), output)
    if lasting is not None and lasting.warning:
        log_format.say(lasting.warning, level="warning", event="chunk_time")
    return Exit.DONE


def _measured_runs(opened: OpenRun) -> Iterator[RunFolder]:
    """Outputs whose receipts may tell how fast this job goes: its own, then those that it reuses."""
    yield opened.folder
    for path in opened.job.spec.reuse:
        store = open_store(path)
        earlier = load_plan(store)
        if earlier is not None:
            yield RunFolder(store, earlier)


@click.command(epilog="Example: relabel run job.yaml --shard 3/64")
@_work_options(
    dry_run="Say what would be done and what is done already; ask nothing.",
    done_ok="Exit 0 instead of 10 when there is nothing to do, for schedulers that need it.",
)
def run(**options: Any) -> int:
    """Label what is not labelled yet. The same command again goes on where the last one stopped."""
    return _work(Work(**options), is_retry=False)


@click.command(epilog="Example: relabel retry job.yaml --shard 7/128")
@_work_options(
    dry_run="Say how many rows would be asked again; ask nothing.",
    done_ok="Exit 0 instead of 10 when nothing is in quarantine.",
)
def retry(**options: Any) -> int:
    """Ask the quarantined rows again, with new seeds. Rows that are labelled stay as they are."""
    return _work(Work(**options), is_retry=True)


def _work(work: Work, *, is_retry: bool) -> int:
    deadline = choose_deadline(work.until, work.lasting)
    crew = Crew(work.gpus, work.workers, work.backend, work.address)
    crew.check()
    shard = work.shard or "all"
    log_format.bind(shard=shard)
    if work.dry_run:
        return _dry_run(work, is_retry=is_retry)
    metrics = MetricsFile(work.metrics, job=Path(work.job_file).stem, shard=shard) if work.metrics else None
    code: int = Exit.OUR_FAULT
    try:
        session = open_session(work.job_file, work.overrides, work.shard, is_retry=is_retry, day=work.day, deadline=deadline)
        report = execute(session, metrics, crew)
        code = Exit.DONE if work.done_ok and report.exit is Exit.NOTHING_TO_DO else report.exit
    except KeyboardInterrupt:
        code = Exit.STOPPED
        raise
    except RelabelError as exc:
        code = exit_for(exc)
        raise
    finally:
        if metrics is not None:
            metrics.write(code)
    result = {**report_json(report), "exit_code": int(code)}
    log_format.note_event("end", verdict(report), **{key: result[key] for key in END_FIELDS})
    emit(result, report_text(report), work.output)
    _advise(report, work.job_file)
    return code


def _dry_run(work: Work, *, is_retry: bool) -> int:
    session = open_session(work.job_file, work.overrides, work.shard, is_retry=is_retry, may_write=False, day=work.day)
    total, rows = session.rows_to_ask(), session.opened.plan.rows
    result = {"output": session.opened.job.spec.output, "shards": session.shards, "rows_to_ask": total, "rows": rows}
    verb = "ask or take over" if session.opened.job.spec.reuse and not is_retry else "ask"
    emit(result, f"Would {verb} {total:,} of {rows:,} rows in {len(session.shards)} shard(s) of {result['output']}.", work.output)
    return Exit.DONE


def open_session(
    job_file: str,
    overrides: tuple[str, ...] = (),
    shard: str | None = None,
    *,
    is_retry: bool = False,
    may_write: bool = True,
    day: str | None = None,
    deadline: Deadline | None = None,
) -> Session:
    """Check the job and its shard choice, plan it if nobody has (and write the plan if allowed), and make ready to work on those shards."""
    job = load_job(job_file, overrides=overrides, day=day)
    log_format.bind(job=job.spec.name)
    choose_shards(shard, job.spec.shards)  # a wrong --shard is told before anything is planned or written
    opened = open_run(job, may_plan=not is_retry, may_write=may_write)
    shards = choose_shards(shard, len(opened.plan.shards))
    return Session(opened, shards, is_retry=is_retry, stop=Stop(deadline), progress=Progress(), helps=shard is None)


def execute(session: Session, metrics: MetricsFile | None = None, crew: Crew | None = None) -> RunReport:
    """Do a session's work with progress on stderr; signals and a deadline drain it."""
    spec, stop = session.opened.job.spec, session.stop
    with Display(session.progress, session.rows_to_ask()) as display, stopping(stop, display.say):
        if metrics is not None:
            metrics.job, metrics.progress = spec.name, session.progress
            metrics.tick()
        if stop.deadline is not None:
            display.say(f"ends by {stop.deadline.shown()}")

        def tick() -> None:
            display.tick()
            if metrics is not None:
                metrics.tick()

        def told(facts: EngineFacts, remarks: list[str]) -> None:
            device = f"{facts.device}, {facts.dtype}" if facts.dtype else facts.device
            display.say(f"{spec.labeler.name} asks {facts.model} on {facts.family} {facts.version} ({device})")
            for remark in remarks:
                display.say(f"note: {remark}")

        report = label_with(crew or Crew(), session, tick=tick, say=display.say, on_engine=told)
    if metrics is not None:
        metrics.report = report
    return report


def _plan_text(opened: OpenRun, chunks_open: int, costs: list[DecisionCost]) -> str:
    found: Plan = opened.plan
    sizes = [shard.rows for shard in found.shards]
    lies = (
        f"scattered: shards carry row ids, and together read {found.read_ratio:.1f} times the data"
        if found.is_scattered
        else f"together: shards are row ranges (reads: {found.read_ratio:.2f} times the data)"
    )
    return f"{found.name}: {'planned' if opened.was_planned_now else 'planned earlier'}, {opened.job.spec.output}/plan.json\n" + table(
        [
            ("rows", f"{found.rows:,} in {len(found.files):,} file(s)"),
            ("queries", f"{found.queries:,}, {lies}"),
            ("shards", f"{len(sizes):,} of {min(sizes):,} to {max(sizes):,} rows"),
            ("chunks", f"{found.num_chunks:,}, {chunks_open:,} open"),
            *(("distributions", _cost_text(cost)) for cost in costs),
            ("fingerprint", found.fingerprint[:16]),
        ]
    )


def _cost_text(cost: DecisionCost) -> str:
    way = cost.way.replace("_", " ")
    if cost.way == "alone":
        return f"{cost.stage}: no further cost ({cost.basis})"
    if cost.ratio is None:
        return f"{cost.stage}: {way}, cost unknown ({cost.basis})"
    low, high = cost.ratio
    ratio = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    return f"{cost.stage}: {way}, {ratio} of the requests/s without ({cost.basis})"


def report_json(report: RunReport) -> dict[str, Any]:
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
        "failed_fraction": report.failed_fraction,
        "over_limit": report.over_limit,
        "stopped": report.stopped,
        "this_run": report.did,
        "stages": report.tally.stages,
        "remarks": report.remarks,
        "engine_start_s": round(report.engine_start_s, 3),
        "seconds": round(report.seconds, 3),
        **as_json(report),
    }


def report_text(report: RunReport) -> str:
    """The end table."""
    did, tally = report.did, report.tally
    by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.quarantined.items()))
    if report.exit is Exit.NOTHING_TO_DO:
        share = "all" if report.rows == tally.rows else "these"
        counts = f"{tally.labelled:,} labelled, {tally.reused:,} reused, {tally.num_quarantined:,} quarantined"
        return f"{report.name}: nothing to do, {share} shards are done ({counts})."
    seconds = max(did["seconds"], 1e-9)
    prompt = did["prompt_tokens"]
    rows = [
        ("rows", f"{report.rows:,}, {report.rows - tally.rows:,} open"),
        ("labelled", f"{tally.labelled:,}"),
        ("reused", f"{tally.reused:,}"),
        ("quarantined", f"{tally.num_quarantined:,}" + (f" ({by_status})" if by_status else "")),
        ("this run", f"{did['pairs']:,} pairs in {did['seconds']:.1f} s, {did['pairs'] / seconds:,.1f} pairs/s"),
        ("tokens", f"{prompt:,} in, {did['output_tokens']:,} out, {(prompt + did['output_tokens']) / seconds:,.0f} tokens/s"),
        ("prefix hits", f"{did['cached_tokens'] / prompt:.0%} of prompt tokens" if prompt else "none"),
    ]
    rows += [(f"  {stage}", f"{counts['asks']:,} asks, {counts['output_tokens']:,} tokens out") for stage, counts in tally.stages.items()]
    if "canary" in did:
        rows.append(("canary", canary_text(CanaryResult(**did["canary"]))))
    if report.engine_restarts is not None:
        rows.append(("engine restarts", f"{report.engine_restarts:,}"))
    is_finished = report.rows == tally.rows
    rows.append(("labels", f"listed in {report.output}/manifest.json" if is_finished else f"so far in {report.output}/labels"))
    return f"{report.name}: {verdict(report)}\n" + table(rows)


def verdict(report: RunReport) -> str:
    match report.exit:
        case Exit.DONE if report.rows == report.tally.rows:
            return "done, every row accounted for"
        case Exit.DONE:
            return "these shards are done; other shards are open"
        case Exit.OVER_LIMIT:
            return f"done, but {report.failed_fraction:.1%} of rows are quarantined, over the limit; everything is kept"
        case Exit.LOCKED:
            return "another process works on these shards"
        case Exit.NOTHING_TO_DO:
            return "nothing to do"
        case _:
            return "partial; run the same command again"


def _advise(report: RunReport, job_file: str) -> None:
    """What to do next, on stderr."""
    lines = []
    if report.exit is Exit.OVER_LIMIT:
        lines.append(
            f"See {report.output}/quarantine; after mending the cause: relabel retry {job_file}. Or raise run.max_failed_fraction."
        )
    elif report.tally.num_quarantined and report.exit is Exit.DONE:
        lines.append(f"{report.tally.num_quarantined:,} rows in {report.output}/quarantine; ask them again with: relabel retry {job_file}")
    if report.busy_shards:
        lines.append(f"{len(report.busy_shards)} shard(s) are locked by live processes: {report.busy_shards[:10]}")
    for line in lines:
        log_format.say(line, event="advice")
