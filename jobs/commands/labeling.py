"""What `plan`, `run`, `retry` and `rounds` do once their options are read: a job is opened, worked on and reported."""

import functools
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from relabel.jobs import logs
from relabel.jobs.commands.options import sigterm_ends
from relabel.jobs.job import Job, cache_dir, load_job, open_run
from relabel.jobs.output import Exit, emit, emit_result, exit_for, grid
from relabel.jobs.rounds import TRAJECTORIES_NAME, run_rounds
from relabel.jobs.run.estimate import estimate_run, plan_text, probe_rates, table_json, template_days
from relabel.jobs.run.progress import Display, MetricsFile, Progress
from relabel.jobs.run.results import (
    ENDED_AT_BUDGET,
    RunReport,
    beyond_budget,
    engine_text,
)
from relabel.jobs.run.session import Session, budget_so_far, choose_shards
from relabel.jobs.run.stop import Deadline, Stop, choose_deadline, stopping
from relabel.jobs.run.workers import WorkerPool, label_with
from relabel.manifests.asks import EngineFacts
from relabel.manifests.errors import NothingNewError, RelabelError
from relabel.manifests.records import plain
from relabel.manifests.secrets import counted


def plan_job(job_file: str, overrides: tuple[str, ...], day: str | None, probe: bool, output: str) -> int:
    """Plan a job if nobody has, estimate it, and print both."""
    started = time.perf_counter()
    opened = open_run(load_job(job_file, overrides=overrides, day=day))
    ask = functools.partial(probe_rates, opened, say=logs.say) if probe else None
    with sigterm_ends():
        estimate = estimate_run(opened, ask)
    found = opened.plan
    budget = budget_so_far(opened)
    num_open = found.num_chunks - sum(map(len, opened.folder.attempts_of_all().values()))
    return emit(
        {
            "output": opened.job.spec.output,
            "was_planned_now": opened.was_planned_now,
            "fingerprint": found.fingerprint,
            "rows": found.rows,
            "queries": found.queries,
            "files": len(found.files),
            "table": table_json(opened.dataset.table),
            "left_out": dict(opened.dataset.left_out),
            "shards": len(found.shards),
            "chunks": found.num_chunks,
            "chunks_open": num_open,
            "is_scattered": found.is_scattered,
            "read_ratio": round(found.read_ratio, 3),
            "text_bytes": found.text_bytes,
            "estimate": estimate.as_json(),
            "estimated_prompt_tokens": sum(shard.estimated_tokens for shard in found.shards),
            "variables": dict(opened.job.variables),
            "template_day": next(iter(template_days(opened)), None),
            "budget": plain(budget),
            "shard_rows": [shard.rows for shard in found.shards],
            "seconds": round(time.perf_counter() - started, 3),
        },
        "\n".join([plan_text(opened, num_open, budget), *estimate.lines()]),
        output,
    )


def run_job(
    job_file: str | Job,
    overrides: tuple[str, ...] = (),
    *,
    shard: str | None,
    dry_run: bool,
    done_ok: bool,
    output: str,
    until: str | None = None,
    duration: str | None = None,
    deadline: Deadline | None = None,
    day: str | None = None,
    metrics: str | None = None,
    gpus: str | None = None,
    workers: int | None = None,
    backend: str = "local",
    address: str | None = None,
    verbose: bool = False,
    part_of: str | None = None,
    ledger: str | None = None,
    is_retry: bool = False,
) -> int:
    """Label what is open, or ask again what is in quarantine; the exit code. The arguments are the command's options,
    `duration` that of `--for`; a job, with its deadline, is that of `relabel score`.
    """
    pool = WorkerPool(gpus, workers, backend, address)
    deadline = deadline or choose_deadline(until, duration)
    logs.bind(shard=shard or "all")
    if dry_run:
        session = open_session(
            job_file,
            overrides,
            shard,
            is_retry=is_retry,
            may_write=False,
            day=day,
        )
        verb = "ask or reuse" if session.opened.job.spec.reuse and not is_retry else "ask"
        num_open = session.left.rows_to_ask()
        rows = session.opened.plan.rows
        shards = session.shards
        done = {"output": session.opened.job.spec.output, "shards": shards, "rows_to_ask": num_open, "rows": rows}
        said = f"{num_open:,} of {rows:,} rows in {counted(len(shards), 'shard')} of {done['output']}."
        return emit(done, f"Would {verb if isinstance(job_file, str) else 'score'} {said}", output)
    kept = MetricsFile(metrics, job=Path(str(job_file)).stem, shard=shard or "all") if metrics else None
    code: int = Exit.OUR_FAULT
    reason = ""
    try:
        session = open_session(
            job_file,
            overrides,
            shard,
            is_retry=is_retry,
            day=day,
            deadline=deadline,
            part_of=part_of,
            ledger=ledger,
        )
        report = execute(session, kept, pool, shows_refused=verbose)
        report.is_idle_fine = done_ok
        code = report.exit_code
        reason = "stopped" if report.stopped is not None else ""
    except KeyboardInterrupt:
        code = Exit.STOPPED
        raise
    except NothingNewError as exc:
        code = Exit.DONE if done_ok else Exit.NOTHING_TO_DO
        logs.say(str(exc), event="end", only_json=True, exit_code=int(code))
        return emit({"exit_code": int(code), "verdict": str(exc)}, str(exc), output, code)
    except RelabelError as exc:
        code = exit_for(exc)
        reason = type(exc).__name__
        raise
    finally:
        if kept is not None:
            kept.write(code, reason)
    result = report.as_json()
    keys = (
        "exit_code",
        "rows",
        "labelled",
        "quarantined",
        "rows_open",
        "stopped",
        "this_run",
        "engine_start_s",
        "seconds",
    )
    logs.say(report.verdict, event="end", only_json=True, **{key: result[key] for key in keys})
    emit_result(report, output)
    if isinstance(job_file, str):
        # words of a command line that name the same job: its file, what was laid over it, the date that it took
        date = session.opened.job.variables.get("date")
        words = [*(() if date is None else ("--date", date)), *(word for text in overrides for word in ("--set", text))]
        same_job = shlex.join([*words, *(["--"] if job_file.startswith("-") else []), job_file])
        for line in report.advice(job_file, same_job):
            logs.say(line, event="advice")
    return code


def open_session(
    job: Job | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    shard: str | None = None,
    *,
    is_retry: bool = False,
    may_write: bool = True,
    day: str | None = None,
    deadline: Deadline | None = None,
    part_of: str | None = None,
    ledger: str | None = None,
) -> Session:
    """Check the job and its shard choice, plan it if nobody has (and write the plan if allowed), and make ready to work
    on those shards.

    Args:
        part_of: see `Session`.
        ledger: see `Job`.
    """
    if not isinstance(job, Job):
        job = replace(load_job(job, overrides=overrides, day=day), ledger=ledger)
    logs.bind(job=job.spec.name)
    choose_shards(shard, job.spec.shards)  # a wrong --shard is reported before anything is planned or written
    opened = open_run(job, may_plan=not is_retry, may_write=may_write)
    table = opened.dataset.table
    if table is not None and table.snapshot != table.latest and job.spec.input.snapshot is None:
        logs.say(
            f"note: the table is at snapshot {table.latest} now, and this output keeps snapshot {table.snapshot}. "
            "Label the new one into another output.",
            event="table",
        )
    return Session(
        opened,
        choose_shards(shard, len(opened.plan.shards)),
        is_retry=is_retry,
        stop=Stop(deadline),
        progress=Progress(),
        part_of=part_of,
    )


def execute(
    session: Session,
    metrics: MetricsFile | None = None,
    pool: WorkerPool | None = None,
    *,
    shows_refused: bool = False,
) -> RunReport:
    """Do a session's work with progress on stderr, the last refused answer too if wanted; signals and a deadline drain
    it.
    """
    spec = session.opened.job.spec
    stop = session.stop
    planned = session.opened.plan.shards
    total = session.left.rows_to_ask()
    before = 0 if session.is_retry else sum(planned[shard].rows for shard in session.shards) - total
    with (
        Display(session.progress, total, before=before, shows_refused=shows_refused) as display,
        stopping(stop, display.say),
    ):
        if metrics is not None:
            metrics.job = spec.name
            metrics.progress = session.progress
            metrics.update()
        if stop.deadline is not None:
            display.say(f"ends by {stop.deadline.shown()}")

        def on_progress() -> None:
            display.update()
            if metrics is not None:
                metrics.update()

        def announce(facts: EngineFacts, remarks: list[str]) -> None:
            display.say(engine_text(spec.labeler.name, facts), event="engine")
            for remark in remarks:
                display.say(f"note: {remark}", event="remark")

        report = label_with(
            pool or WorkerPool(),
            session,
            on_progress=on_progress,
            say=display.say,
            on_engine=announce,
        )
    if metrics is not None:
        metrics.whole = report.tally, report.rows, report.engine_start_s
    return report


# ------------------------------------------------------------------------------
# `rounds`: a search in several rounds, each a run.


def run_search(
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
    """Run the rounds of a search, and print what they found."""
    started = time.perf_counter()
    deadline = choose_deadline(until, duration)
    pool = WorkerPool(gpus, workers)
    job = load_job(job_file, overrides=overrides, day=day)
    logs.bind(job=job.spec.name)

    def label_round(round_job: Job) -> RunReport:
        return execute(open_session(round_job, deadline=deadline), pool=pool)

    report = run_rounds(job, label_round, cache_dir=cache_dir(), say=lambda text: logs.say(text, event="round"))
    code = Exit.DONE if done_ok and report.exit is Exit.NOTHING_TO_DO else report.exit
    trajectories = "" if report.num_open else f"{report.output}/{TRAJECTORIES_NAME}"
    result = {
        "exit_code": int(code),
        "output": report.output,
        "trajectories": trajectories or None,
        "questions": len(report.searches),
        "open": report.num_open,
        "stopped": report.stopped,
        "failed_fraction": round(report.failed_fraction, 6),
        "documents": report.num_documents,
        "rounds": [
            {
                "output": run.output,
                "rows": run.rows,
                "labelled": run.tally.labelled,
                "reused": run.tally.reused,
                "quarantined": run.tally.num_quarantined,
                "rows_open": run.rows - run.tally.rows,
                "exit_code": int(run.exit),
            }
            for run in report.runs
        ],
        **({} if report.budget is None else {"budget": plain(report.budget)}),
        "seconds": round(time.perf_counter() - started, 3),
    }
    verdicts = {
        Exit.DONE: "done, every question has its trajectory",
        Exit.NOTHING_TO_DO: "nothing to do, every question has its trajectory",
        Exit.GATE: ENDED_AT_BUDGET,
        Exit.LOCKED: "another process works on this round",
        Exit.OVER_LIMIT: f"done, but {report.failed_fraction:.1%} of the questions failed, over the limit; "
        "everything is kept",
    }
    rows = [
        ("questions", f"{len(report.searches):,}, {report.num_open:,} open"),
        ("over", ", ".join(f"{count:,} {reason}" for reason, count in report.stopped.items()) or "none"),
        *(
            (f"round {number}", f"{run.rows:,} rows, {run.tally.num_quarantined:,} quarantined, {run.output}")
            for number, run in enumerate(report.runs, start=1)
        ),
        ("budget", report.budget.text if report.budget else ""),
        ("trajectories", trajectories),
    ]
    head = f"{job.spec.name}: {verdicts.get(report.exit, 'partial; run the same command again')}"
    emit(result, f"{head}\n{grid([(name, text) for name, text in rows if text])}", output)
    if report.exit is Exit.GATE:
        logs.say(beyond_budget(job_file), event="advice")
    return code
