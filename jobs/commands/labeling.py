"""What `run`, `retry` and `rounds` do once their options are read: a job is opened, worked on and reported."""

import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relabel.jobs import logs
from relabel.jobs.job import Job, JobSource, cache_dir
from relabel.jobs.labeling import RunOptions, open_session, run_job
from relabel.jobs.output import Exit, emit, exit_for
from relabel.jobs.run.progress import MetricsFile
from relabel.jobs.run.report import RunReport, beyond_budget
from relabel.manifests.errors import NothingNewError, RelabelError
from relabel.manifests.secrets import counted


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
        return emit(_dry_run(job, options), output)
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
        logs.write(str(exc), event="end", only_json=True, exit_code=int(code))
        return emit(NothingNew(int(code), str(exc)), output, code)
    except RelabelError as exc:
        code = exit_for(exc)
        reason = type(exc).__name__
        raise
    finally:
        if metrics_file is not None:
            metrics_file.write(code, reason)
    result = report.as_json()
    end = {name: result[name] for name in END_FIELDS}
    logs.write(report.verdict, event="end", only_json=True, **end)
    emit(report, output)
    if isinstance(job, JobSource):
        for line in report.advice(str(job.spec), _same_job(job, report)):
            logs.write(line, event="advice")
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


def search_and_report(source: JobSource, options: RunOptions, *, done_ok: bool, output: str) -> int:
    """Run the rounds of a search, and print what they found."""
    from relabel.jobs.rounds import run_rounds  # with what reads pages, which no other command here needs

    started_s = time.perf_counter()
    job = source.load()
    logs.bind(job=job.spec.name)
    report = run_rounds(
        job,
        lambda round_job: run_job(round_job, options),
        cache_dir=cache_dir(),
        write=lambda text: logs.write(text, event="round"),
    )
    report.is_idle_fine = done_ok
    report.seconds = time.perf_counter() - started_s
    emit(report, output)
    if report.exit is Exit.GATE:
        logs.write(beyond_budget(str(source.spec)), event="advice")
    return report.exit_code
