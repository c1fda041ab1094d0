"""`rounds`: a search in several rounds, each a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from relabel.jobs import log_format
from relabel.jobs.commands.label import FOR_HELP, GPUS_HELP, UNTIL_HELP, execute, session_of
from relabel.jobs.commands.options import date_option, job_options, log_option, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, table
from relabel.jobs.planning.job_files import CACHE_VARIABLE, load_job
from relabel.jobs.planning.jobs import Job
from relabel.jobs.pool.backends import WorkerPool
from relabel.jobs.rounds.loop import TRAJECTORIES_NAME, RoundsReport, run_rounds
from relabel.jobs.running.conclusions import RunReport
from relabel.jobs.running.deadlines import choose_deadline
from relabel.jobs.running.run_text import ENDED_AT_BUDGET, beyond_budget
from relabel.manifests.records import plain


@click.command(epilog="Example: relabel rounds search.yaml")
@job_options
@click.option("--gpus", metavar="all|0,1,…", help=GPUS_HELP)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Likewise, and no GPUs given out.")
@date_option
@click.option("--until", metavar="TIME", help=UNTIL_HELP)
@click.option("--for", "duration", metavar="LENGTH", help=FOR_HELP)
@log_option
@click.option("--done-ok", is_flag=True, help="Exit 0 instead of 10 when there is nothing to do.")
@output_option
def rounds(
    job_file: str,
    overrides: tuple[str, ...],
    gpus: str | None,
    workers: int | None,
    day: str | None,
    until: str | None,
    duration: str | None,
    done_ok: bool,
    output: str,
) -> int:
    """Search a corpus for each question in several rounds: find documents, have them reviewed, ask anew (R2RAG).

    JOB.YAML is a job with the section `rounds`; its input holds the questions, its labeler is `review`. Each round is a
    run of its own below the output (round-1, round-2, …), and a row for each question is written in the end:
    trajectories.parquet. The same command again continues where the last one stopped.
    """
    started, deadline = time.perf_counter(), choose_deadline(until, duration)
    pool = WorkerPool(gpus, workers)
    pool.check()
    cache = os.environ.get(CACHE_VARIABLE)
    job = load_job(job_file, overrides=overrides, day=day)
    log_format.bind(job=job.spec.name)

    def label_round(round_job: Job) -> RunReport:
        return execute(session_of(round_job, deadline=deadline), pool=pool)

    report = run_rounds(
        job, label_round, cache_dir=Path(cache) if cache else None, say=lambda text: log_format.say(text, event="round")
    )
    code = Exit.DONE if done_ok and report.exit is Exit.NOTHING_TO_DO else report.exit
    result = {
        "exit_code": int(code),
        "output": report.output,
        "trajectories": None if report.num_open else f"{report.output}/{TRAJECTORIES_NAME}",
        "questions": len(report.searches),
        "open": report.num_open,
        "stopped": report.stopped,
        "failed_fraction": round(report.failed_fraction, 6),
        "documents": report.num_documents,
        "rounds": [_of_round(run) for run in report.runs],
        **({} if report.budget is None else {"budget": plain(report.budget)}),
        "seconds": round(time.perf_counter() - started, 3),
    }
    emit(result, _text(job.spec.name, report), output)
    if report.exit is Exit.GATE:
        log_format.say(beyond_budget(job_file), event="advice")
    return code


def _of_round(run: RunReport) -> dict[str, object]:
    tally = run.tally
    return {
        "output": run.output,
        "rows": run.rows,
        "labelled": tally.labelled,
        "reused": tally.reused,
        "quarantined": tally.num_quarantined,
        "rows_open": run.rows - tally.rows,
        "exit_code": int(run.exit),
    }


def _text(name: str, report: RoundsReport) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.stopped.items()) or "none"
    rows = [("questions", f"{len(report.searches):,}, {report.num_open:,} open"), ("over", reasons)]
    for number, run in enumerate(report.runs, start=1):
        rows.append((f"round {number}", f"{run.rows:,} rows, {run.tally.num_quarantined:,} quarantined, {run.output}"))
    if report.budget is not None:
        rows.append(("budget", report.budget.text))
    if not report.num_open:
        rows.append(("trajectories", f"{report.output}/{TRAJECTORIES_NAME}"))
    return f"{name}: {_verdict(report)}\n" + table(rows)


def _verdict(report: RoundsReport) -> str:
    match report.exit:
        case Exit.DONE:
            return "done, every question has its trajectory"
        case Exit.NOTHING_TO_DO:
            return "nothing to do, every question has its trajectory"
        case Exit.OVER_LIMIT:
            return f"done, but {report.failed_fraction:.1%} of the questions failed, over the limit; everything is kept"
        case Exit.GATE:
            return ENDED_AT_BUDGET
        case Exit.LOCKED:
            return "another process works on this round"
        case _:
            return "partial; run the same command again"
