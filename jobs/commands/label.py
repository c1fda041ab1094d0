"""`plan`, `run` and `retry`: the commands that cut the work and do it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import click

from jobs.commands.options import Command, emit, job_options, output_option, table
from jobs.exits import Exit
from jobs.job_files import load_job
from jobs.labeling import RunReport, label, open_run
from jobs.loop import Progress, Stop
from jobs.progress import Display
from jobs.sessions import OpenRun, Session
from jobs.shard_choice import choose_shards
from jobs.signals import stopping
from manifests.asks import EngineFacts
from manifests.plans import Plan

SHARD_HELP = "INDEX/COUNT, counted from 0 (3/64 takes the plan's shards j with j mod 64 = 3), or auto under Slurm, AWS Batch or Kubernetes."


def _work_options(*, dry_run: str, done_ok: str) -> Callable[[Command], Command]:
    """The options of a command that asks; the two helps differ between a run and a retry."""

    def decorate(command: Command) -> Command:
        command = output_option(command)
        command = click.option("--done-ok", is_flag=True, help=done_ok)(command)
        command = click.option("--dry-run", is_flag=True, help=dry_run)(command)
        command = click.option("--shard", metavar="I/N|auto", help=SHARD_HELP)(command)
        return job_options(command)

    return decorate


@click.command(epilog="Example: relabel plan job.yaml")
@job_options
@output_option
def plan(job_file: str, overrides: tuple[str, ...], output: str) -> int:
    """Cut the input into shards and chunks, and say what a run would do.

    Reads footers and the query-id column, nothing else. The plan is written once and never changed; the same command again shows it.
    """
    started = time.perf_counter()
    opened = open_run(load_job(job_file, overrides=overrides))
    found = opened.plan
    todo = [len(opened.folder.pending(shard)) for shard in range(len(found.shards))]
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
        "estimated_prompt_tokens": sum(shard.estimated_tokens for shard in found.shards),
        "shard_rows": [shard.rows for shard in found.shards],
        "seconds": round(time.perf_counter() - started, 3),
    }
    emit(result, _plan_text(opened, sum(todo)), output)
    return Exit.DONE


@click.command(epilog="Example: relabel run job.yaml --shard 3/64")
@_work_options(
    dry_run="Say what would be done and what is done already; ask nothing.",
    done_ok="Exit 0 instead of 10 when there is nothing to do, for schedulers that need it.",
)
def run(job_file: str, overrides: tuple[str, ...], shard: str | None, dry_run: bool, done_ok: bool, output: str) -> int:
    """Label what is not labelled yet. The same command again goes on where the last one stopped."""
    return _work(job_file, overrides, shard, output, is_retry=False, dry_run=dry_run, done_ok=done_ok)


@click.command(epilog="Example: relabel retry job.yaml --shard 7/128")
@_work_options(
    dry_run="Say how many rows would be asked again; ask nothing.",
    done_ok="Exit 0 instead of 10 when nothing is in quarantine.",
)
def retry(job_file: str, overrides: tuple[str, ...], shard: str | None, dry_run: bool, done_ok: bool, output: str) -> int:
    """Ask the quarantined rows again, with new seeds. Rows that are labelled stay as they are."""
    return _work(job_file, overrides, shard, output, is_retry=True, dry_run=dry_run, done_ok=done_ok)


def _work(
    job_file: str, overrides: tuple[str, ...], shard: str | None, output: str, *, is_retry: bool, dry_run: bool, done_ok: bool
) -> int:
    if dry_run:
        session = open_session(job_file, overrides, shard, is_retry=is_retry, may_write=False)
        total, rows = session.rows_to_ask(), session.opened.plan.rows
        result = {"output": session.opened.job.spec.output, "shards": session.shards, "rows_to_ask": total, "rows": rows}
        emit(result, f"Would ask {total:,} of {rows:,} rows in {len(session.shards)} shard(s) of {result['output']}.", output)
        return Exit.DONE
    report = execute(open_session(job_file, overrides, shard, is_retry=is_retry))
    code = Exit.DONE if done_ok and report.exit is Exit.NOTHING_TO_DO else report.exit
    emit({**_report_json(report), "exit_code": int(code)}, report_text(report), output)
    _advise(report, job_file)
    return code


def open_session(
    job_file: str, overrides: tuple[str, ...] = (), shard: str | None = None, *, is_retry: bool = False, may_write: bool = True
) -> Session:
    """Check the job and its shard choice, plan it if nobody has (and write the plan if allowed), and make ready to work on those shards."""
    job = load_job(job_file, overrides=overrides)
    choose_shards(shard, job.spec.shards)  # a wrong --shard is told before anything is planned or written
    opened = open_run(job, may_plan=not is_retry, may_write=may_write)
    shards = choose_shards(shard, len(opened.plan.shards))
    return Session(opened, shards, is_retry=is_retry, stop=Stop(), progress=Progress())


def execute(session: Session) -> RunReport:
    """Do a session's work with progress on stderr; signals drain it."""
    spec = session.opened.job.spec
    with Display(session.progress, session.rows_to_ask()) as display, stopping(session.stop, display.say):

        def told(facts: EngineFacts, remarks: list[str]) -> None:
            device = f"{facts.device}, {facts.dtype}" if facts.dtype else facts.device
            display.say(f"{spec.labeler.name} asks {facts.model} on {facts.family} {facts.version} ({device})")
            for remark in remarks:
                display.say(f"note: {remark}")

        return label(session, tick=display.tick, on_engine=told)


def _plan_text(opened: OpenRun, chunks_open: int) -> str:
    found: Plan = opened.plan
    sizes = [shard.rows for shard in found.shards]
    lies = (
        f"scattered: shards carry row ids, and together read {found.read_ratio:.1f} times the data"
        if found.is_scattered
        else f"together: shards are row ranges (reads: {found.read_ratio:.2f} times the data)"
    )
    tokens = sum(shard.estimated_tokens for shard in found.shards)
    return f"{found.name}: {'planned' if opened.was_planned_now else 'planned earlier'}, {opened.job.spec.output}/plan.json\n" + table(
        [
            ("rows", f"{found.rows:,} in {len(found.files):,} file(s)"),
            ("queries", f"{found.queries:,}, {lies}"),
            ("shards", f"{len(sizes):,} of {min(sizes):,} to {max(sizes):,} rows"),
            ("chunks", f"{found.num_chunks:,}, {chunks_open:,} open"),
            ("prompt tokens", f"about {tokens:,} a stage (estimated from footers)"),
            ("fingerprint", found.fingerprint[:16]),
        ]
    )


def _report_json(report: RunReport) -> dict[str, Any]:
    return {
        "exit_code": int(report.exit),
        "output": report.output,
        "shards": report.shards,
        "busy_shards": report.busy_shards,
        "rows": report.rows,
        "labelled": report.tally.labelled,
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
    }


def report_text(report: RunReport) -> str:
    """The end table."""
    did, tally = report.did, report.tally
    by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.quarantined.items()))
    if report.exit is Exit.NOTHING_TO_DO:
        share = "all" if report.rows == tally.rows else "these"
        counts = f"{tally.labelled:,} labelled, {tally.num_quarantined:,} quarantined"
        return f"{report.name}: nothing to do, {share} shards are done ({counts})."
    seconds = max(did["seconds"], 1e-9)
    prompt = did["prompt_tokens"]
    rows = [
        ("rows", f"{report.rows:,}, {report.rows - tally.rows:,} open"),
        ("labelled", f"{tally.labelled:,}"),
        ("reused", "0"),
        ("quarantined", f"{tally.num_quarantined:,}" + (f" ({by_status})" if by_status else "")),
        ("this run", f"{did['pairs']:,} pairs in {did['seconds']:.1f} s, {did['pairs'] / seconds:,.1f} pairs/s"),
        ("tokens", f"{prompt:,} in, {did['output_tokens']:,} out, {(prompt + did['output_tokens']) / seconds:,.0f} tokens/s"),
        ("prefix hits", f"{did['cached_tokens'] / prompt:.0%} of prompt tokens" if prompt else "none"),
    ]
    rows += [(f"  {stage}", f"{counts['asks']:,} asks, {counts['output_tokens']:,} tokens out") for stage, counts in tally.stages.items()]
    is_finished = report.rows == tally.rows
    rows.append(("labels", f"listed in {report.output}/manifest.json" if is_finished else f"so far in {report.output}/labels"))
    return f"{report.name}: {_verdict(report)}\n" + table(rows)


def _verdict(report: RunReport) -> str:
    match report.exit:
        case Exit.DONE if report.rows == report.tally.rows:
            return "done, every row accounted for"
        case Exit.DONE:
            return "these shards are done; other shards are open"
        case Exit.OVER_LIMIT:
            return f"done, but {report.failed_fraction:.1%} of rows are quarantined, over the limit; everything is kept"
        case Exit.LOCKED:
            return "another process works on these shards"
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
        print(line, file=sys.stderr)  # noqa: T201
