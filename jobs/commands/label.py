"""The commands `plan`, `run`, `retry` and `rounds`: their options. What they do is loaded when one is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from relabel.jobs.commands.options import Command, date_option, job_options, log_option, output_option, together

BACKENDS = ("local", "ray")
SHARD_HELP = (
    "INDEX/COUNT, counted from 0 (3/64 takes the plan's shards j with j mod 64 = 3), or auto under Slurm, "
    "AWS Batch or Kubernetes."
)
UNTIL_HELP = (
    "End before this time with all finished chunks committed: the next 06:00 of the local clock, '06:00 "
    "Europe/Berlin', 06:00Z, or a "
    "timestamp. Exits 20 if work is left."
)
FOR_HELP = "End within this length, likewise: 45s, 90m, 1h30m. With --until, the earlier counts."
GPUS_HELP = (
    "One engine process for each of these GPUs (all, or numbers such as 0,1), watched over and started again when it "
    "goes down."
)
WORKERS_HELP = "Likewise, so many engine processes and no GPUs given out; with --backend ray, so many actors."
BACKEND_HELP = "Where the engines run: on this machine, or wherever Ray places them."
ADDRESS_HELP = (
    "The Ray cluster: auto for the one this machine is part of, or ray://HOST:10001. Default: RAY_ADDRESS, else one "
    "of its own."
)
VERBOSE_HELP = "Show the last answer that could not be read, too: its row, stage, reason and first line."
METRICS_HELP = "Keep a Prometheus text file with the run's counts, for node_exporter's textfile collector."


def _work_options(*, dry_run: str, done_ok: str) -> Callable[[Command], Command]:
    """The options of a command that asks; the two helps differ between a run and a retry."""
    return together(
        output_option,
        click.option("--done-ok", is_flag=True, help=done_ok),
        click.option("--part-of", hidden=True),
        click.option("--ledger", hidden=True),
        click.option("-v", "--verbose", is_flag=True, help=VERBOSE_HELP),
        click.option("--dry-run", is_flag=True, help=dry_run),
        click.option("--metrics", metavar="FILE", help=METRICS_HELP),
        log_option,
        click.option("--for", "duration", metavar="LENGTH", help=FOR_HELP),
        click.option("--until", metavar="TIME", help=UNTIL_HELP),
        date_option,
        click.option("--address", metavar="ADDRESS", help=ADDRESS_HELP),
        click.option("--backend", type=click.Choice(BACKENDS), default="local", show_default=True, help=BACKEND_HELP),
        click.option("--workers", type=click.IntRange(min=1), metavar="N", help=WORKERS_HELP),
        click.option("--gpus", metavar="all|0,1,…", help=GPUS_HELP),
        click.option("--shard", metavar="I/N|auto", help=SHARD_HELP),
        job_options,
    )


@click.command(epilog="Example: relabel plan job.yaml")
@click.option("--probe", is_flag=True, help="Start the engine and ask a few rows, so that seconds are known.")
@job_options
@date_option
@log_option
@output_option
def plan(**options: Any) -> int:
    """Cut the input into shards and chunks, and say what a run would do, take and cost.

    Reads footers, the query-id column and a sample of the rows. Rates are those of this model's last run on this
    device. The plan is written once and never changed; the same command again shows it.
    """
    from relabel.jobs.commands.labeling import plan_job

    return plan_job(**options)


@click.command(epilog="Example: relabel run job.yaml --shard 3/64")
@_work_options(
    dry_run="Say what would be done and what is done already; ask nothing.",
    done_ok="Exit 0 instead of 10 when there is nothing to do, for schedulers that need it.",
)
def run(**options: Any) -> int:
    """Label what is not labelled yet. The same command again continues where the last one stopped."""
    from relabel.jobs.commands.labeling import run_job

    return run_job(**options, is_retry=False)


@click.command(epilog="Example: relabel retry job.yaml --shard 7/128")
@_work_options(
    dry_run="Say how many rows would be asked again; ask nothing.",
    done_ok="Exit 0 instead of 10 when nothing is in quarantine.",
)
def retry(**options: Any) -> int:
    """Ask the quarantined rows again, with new seeds. Rows that are labelled stay as they are."""
    from relabel.jobs.commands.labeling import run_job

    return run_job(**options, is_retry=True)


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
def rounds(**options: Any) -> int:
    """Search a corpus for each question in several rounds: find documents, have them reviewed, ask again (R2RAG).

    JOB.YAML is a job with the section `rounds`; its input holds the questions, its labeler is `review`. Each round is a
    run of its own below the output (round-1, round-2, …), and a row for each question is written in the end:
    trajectories.parquet. The same command again continues where the last one stopped.
    """
    from relabel.jobs.commands.labeling import run_search

    return run_search(**options)
