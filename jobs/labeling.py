"""A job is opened, worked on and reported: what `relabel run`, `retry`, `rounds`, `score` and `relabel.run` have in
common.
"""

from dataclasses import dataclass, field

from relabel.jobs import logs
from relabel.jobs.job import Job, JobSource, open_run
from relabel.jobs.run.display import Display
from relabel.jobs.run.progress import MetricsFile, Progress
from relabel.jobs.run.report import RunReport, engine_text
from relabel.jobs.run.session import MAX_OPEN_SHARDS, Session
from relabel.jobs.run.shards import choose_shards
from relabel.jobs.run.stop import Deadline, Stop, choose_deadline, stopping
from relabel.jobs.run.workers import WorkerPool, label_with
from relabel.jobs.written_again import refuse_other_texts
from relabel.manifests.asks import EngineFacts


@dataclass(slots=True, kw_only=True)
class RunOptions:
    """How a job is worked on: the options of `relabel run`, whose help explains them.

    Args:
        is_retry: ask the quarantined rows again.
        duration: that of `--for`.
        verbose: show the last refused answer.
        part_of, most_shards: see `Session`.
    Raises:
        UsageError: a value is off, or two do not go together.
    """

    is_retry: bool = False
    shard: str | None = None
    until: str | None = None
    duration: str | None = None
    gpus: str | None = None
    workers: int | None = None
    backend: str = "local"
    address: str | None = None
    verbose: bool = False
    part_of: str | None = None
    most_shards: int | None = None
    pool: WorkerPool = field(init=False)
    deadline: Deadline | None = field(init=False)
    """The earlier of `until` and `duration`, counted from the making of this record."""

    def __post_init__(self) -> None:
        self.pool = WorkerPool(self.gpus, self.workers, self.backend, self.address)
        self.deadline = choose_deadline(self.until, self.duration)


def run_job(job: Job | JobSource, options: RunOptions, metrics: MetricsFile | None = None) -> RunReport:
    """Label what is open of a job, or ask again what is in quarantine, with progress on stderr.

    Args:
        metrics: kept up to date while the run goes on.
    Raises:
        RelabelError: what is wrong with the job, its input, the engine or the store.
    """
    session = open_session(job, options)
    spec = session.opened.job.spec
    planned = session.opened.plan.shards
    total = session.left.rows_to_ask()
    done_before = 0
    if not options.is_retry:
        done_before = sum(planned[shard].rows for shard in session.shards) - total
    with (
        Display(session.progress, total, before=done_before, shows_refused=options.verbose) as display,
        stopping(session.stop, display.write),
    ):
        if metrics is not None:
            metrics.job = spec.name
            metrics.progress = session.progress
            metrics.update()
        if session.stop.deadline is not None:
            display.write(f"ends by {session.stop.deadline.shown()}")

        def on_progress() -> None:
            display.update()
            if metrics is not None:
                metrics.update()

        def on_engine(facts: EngineFacts, remarks: list[str]) -> None:
            display.write(engine_text(spec.labeler.name, facts), event="engine")
            for remark in remarks:
                display.write(f"note: {remark}", event="remark")

        report = label_with(
            options.pool,
            session,
            on_progress=on_progress,
            write=display.write,
            on_engine=on_engine,
        )
    if metrics is not None:
        metrics.whole = report.tally, report.rows, report.engine_start_s
    return report


def open_session(job: Job | JobSource, options: RunOptions, *, may_write: bool = True) -> Session:
    """Check the job and its shard choice, plan it if nobody has (and write the plan if allowed), and make ready to work
    on those shards.
    """
    if isinstance(job, JobSource):
        job = job.load()
    logs.bind(job=job.spec.name)
    # a wrong --shard is reported before anything is planned or written
    choose_shards(options.shard, job.spec.shards or 1)
    opened = open_run(job, may_plan=not options.is_retry, may_write=may_write)
    refuse_other_texts(opened, may_write=may_write)
    table = opened.dataset.table
    if table is not None and table.snapshot != table.latest and job.spec.input.snapshot is None:
        logs.write(
            f"note: the table is at snapshot {table.latest} now, and this output keeps snapshot {table.snapshot}. "
            "Label the new one into another output.",
            event="table",
        )
    shards = choose_shards(options.shard, len(opened.plan.shards))
    if not shards:
        logs.write(
            f"note: --shard {options.shard} has no shard: the plan has {len(opened.plan.shards)} of them. For a new "
            "output, set `shards` to four a task or more.",
            event="remark",
        )
    return Session(
        opened,
        shards,
        is_retry=options.is_retry,
        stop=Stop(options.deadline),
        progress=Progress(),
        part_of=options.part_of,
        most_shards=options.most_shards or MAX_OPEN_SHARDS,
    )
