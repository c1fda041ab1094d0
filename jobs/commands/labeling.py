"""What `plan`, `run`, `retry` and `rounds` do once their options are read: a job is opened, worked on and reported."""

import functools
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relabel.jobs import logs
from relabel.jobs.commands.options import sigterm_ends
from relabel.jobs.job import Job, cache_dir, load_job, open_run
from relabel.jobs.labeling import JobSource, RunOptions, open_session, run_job
from relabel.jobs.output import Exit, emit, emit_result, exit_for, grid
from relabel.jobs.rounds import TRAJECTORIES_NAME, run_rounds
from relabel.jobs.run.allowance import budget_so_far
from relabel.jobs.run.estimate import estimate_run, plan_text, probe_rates, table_json, template_days
from relabel.jobs.run.progress import MetricsFile
from relabel.jobs.run.report import ENDED_AT_BUDGET, RunReport, beyond_budget
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


def run_and_report(
    job: Job | JobSource,
    options: RunOptions,
    *,
    output: str,
    done_ok: bool,
    dry_run: bool = False,
    metrics: str | None = None,
) -> int:
    """Label what is open, or ask again what is in quarantine, and print what was done, or would be. Returns the exit
    code.

    Args:
        job: read already by `relabel score`.
        metrics: a Prometheus file to keep.
    """
    logs.bind(shard=options.shard or "all")
    if dry_run:
        return emit_result(_dry_run(job, options), output)
    metrics_file = None
    if metrics:
        name = Path(str(job.spec)).stem if isinstance(job, JobSource) else job.spec.name
        metrics_file = MetricsFile(metrics, job=name, shard=options.shard or "all")
    code = Exit.OUR_FAULT
    reason = ""
    try:
        report = run_job(job, options, metrics_file)
        report.is_idle_fine = done_ok
        code = report.exit_code
        reason = "stopped" if report.stopped is not None else ""
    except KeyboardInterrupt:
        code = Exit.STOPPED
        raise
    except NothingNewError as exc:
        code = Exit.DONE if done_ok else Exit.NOTHING_TO_DO
        logs.say(str(exc), event="end", only_json=True, exit_code=int(code))
        return emit_result(NothingNew(int(code), str(exc)), output, code)
    except RelabelError as exc:
        code = exit_for(exc)
        reason = type(exc).__name__
        raise
    finally:
        if metrics_file is not None:
            metrics_file.write(code, reason)
    result = report.as_json()
    end = {name: result[name] for name in END_FIELDS}
    logs.say(report.verdict, event="end", only_json=True, **end)
    emit_result(report, output)
    if isinstance(job, JobSource):
        for line in report.advice(str(job.spec), _same_job(job, report)):
            logs.say(line, event="advice")
    return code


END_FIELDS = (
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
"""Of a result, what the log says at the end."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What would be done."""

    verb: str
    output: str
    shards: list[int]
    rows_to_ask: int
    rows: int

    def as_json(self) -> dict[str, Any]:
        """Counts, and where to."""
        return {"output": self.output, "shards": self.shards, "rows_to_ask": self.rows_to_ask, "rows": self.rows}

    def lines(self) -> list[str]:
        """In a sentence."""
        where = f"{counted(len(self.shards), 'shard')} of {self.output}"
        return [f"Would {self.verb} {self.rows_to_ask:,} of {self.rows:,} rows in {where}."]


def _dry_run(job: Job | JobSource, options: RunOptions) -> DryRun:
    session = open_session(job, options, may_write=False)
    opened = session.opened
    if isinstance(job, Job):
        verb = "score"
    elif opened.job.spec.reuse and not options.is_retry:
        verb = "ask or reuse"
    else:
        verb = "ask"
    return DryRun(verb, opened.job.spec.output, session.shards, session.left.rows_to_ask(), opened.plan.rows)


@dataclass(frozen=True, slots=True)
class NothingNew:
    """The input holds no new rows."""

    exit_code: int
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Why."""
        return [self.verdict]


def _same_job(source: JobSource, report: RunReport) -> str:
    """Words of a command line that name the same job: its file, what was laid over it, the date that it took."""
    job_file = str(source.spec)
    words = list[str]()
    if report.date is not None:
        words += ["--date", report.date]
    for text in source.overrides:
        words += ["--set", text]
    if job_file.startswith("-"):
        words.append("--")
    return shlex.join([*words, job_file])


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
    options = RunOptions(gpus=gpus, workers=workers, until=until, duration=duration)
    job = load_job(job_file, overrides=overrides, day=day)
    logs.bind(job=job.spec.name)

    def label_round(round_job: Job) -> RunReport:
        return run_job(round_job, options)

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
