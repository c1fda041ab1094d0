"""The commands `plan`, `run`, `retry`, `rounds` and `score`: their options. What they do is loaded when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs import logs
from relabel.jobs.commands.options import (
    Command,
    columns_option,
    date_option,
    given_parameters,
    job_options,
    log_option,
    names_column_options,
    output_option,
    refuse_given,
    scored_model_options,
    together,
)
from relabel.jobs.output import Exit
from relabel.manifests.process import uncollected

if TYPE_CHECKING:
    from relabel.jobs.job import Job
    from relabel.jobs.score import ScoreOptions
    from relabel.manifests.files import Storage

SHARD_HELP = (
    "INDEX/COUNT, counted from 0 (3/64 takes the plan's shards j with j mod 64 = 3), or auto under Slurm, "
    "AWS Batch or Kubernetes."
)
UNTIL_HELP = (
    "End before this time with all finished chunks committed: the next 06:00 of the local clock, '06:00 "
    "Europe/Berlin', 06:00Z, or a "
    "timestamp. Exits 20 if work is left."
)
FOR_HELP = (
    "End within this length, likewise: 45s, 90m, 1h30m. Its last 22 s are kept for begun chunks to finish. With "
    "--until, the earlier counts."
)
GPUS_HELP = (
    "One engine process for each of these GPUs (all, or numbers such as 0,1), watched over and started again when it "
    "goes down."
)


def _work_options(*, dry_run: str, done_ok: str) -> Callable[[Command], Command]:
    """The options of a command that asks; the two helps differ between a run and a retry."""
    return together(
        output_option,
        click.option("--done-ok", is_flag=True, help=done_ok),
        click.option("--part-of", hidden=True),
        click.option("--most-shards", type=int, hidden=True),
        click.option("--ledger", hidden=True),
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Show the last answer that could not be read, too: its row, stage, reason and first line.",
        ),
        click.option("--dry-run", is_flag=True, help=dry_run),
        click.option(
            "--metrics",
            metavar="FILE",
            help="Keep a Prometheus text file with the run's counts, for node_exporter's textfile collector.",
        ),
        log_option,
        click.option("--for", "duration", metavar="LENGTH", help=FOR_HELP),
        click.option("--until", metavar="TIME", help=UNTIL_HELP),
        date_option,
        click.option(
            "--address",
            metavar="ADDRESS",
            help="The Ray cluster: auto for the one this machine is part of, or ray://HOST:10001. Default: "
            "RAY_ADDRESS, else one of its own.",
        ),
        click.option(
            "--backend",
            type=click.Choice(["local", "ray"]),
            default="local",
            show_default=True,
            help="Where the engines run: on this machine, or wherever Ray places them.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            metavar="N",
            help="Likewise, so many engine processes and no GPUs given out; with --backend ray, so many actors.",
        ),
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
def plan(job_file: str, overrides: tuple[str, ...], day: str | None, probe: bool, output: str) -> int:
    """Cut the input into shards and chunks, and say what a run would do, take and cost.

    Reads footers, the query-id column and a sample of the rows. Rates are those of this model's last run on this
    device. The plan is written once and never changed; the same command again shows it. With --set it is a trial of
    these settings, and nothing is written.
    """
    with uncollected():
        from relabel.jobs.commands.planning import plan_and_report
        from relabel.jobs.job import JobSource

    return plan_and_report(JobSource(job_file, overrides, day), probe=probe, output=output)


@click.command(epilog="Example: relabel run job.yaml --shard 3/64")
@_work_options(
    dry_run="Say what would be done and what is done already; ask nothing.",
    done_ok="Exit 0 instead of 10 when there is nothing to do, for schedulers that need it.",
)
def run(**options: Any) -> int:
    """Label what is not labelled yet. The same command again continues where the last one stopped."""
    return _label(**options)


@click.command(epilog="Example: relabel retry job.yaml --shard 7/128")
@_work_options(
    dry_run="Say how many rows would be asked again; ask nothing.",
    done_ok="Exit 0 instead of 10 when nothing is in quarantine.",
)
def retry(**options: Any) -> int:
    """Ask the quarantined rows again, with new seeds. Rows that are labelled stay as they are."""
    return _label(**options, is_retry=True)


def _label(
    job_file: str,
    overrides: tuple[str, ...],
    day: str | None,
    ledger: str | None,
    metrics: str | None,
    dry_run: bool,
    done_ok: bool,
    output: str,
    **options: Any,
) -> int:
    with uncollected():
        from relabel.jobs.commands.labeling import run_and_report
        from relabel.jobs.job import JobSource
        from relabel.jobs.labeling import RunOptions

    return run_and_report(
        JobSource(job_file, overrides, day, ledger),
        RunOptions(**options),
        metrics=metrics,
        dry_run=dry_run,
        done_ok=done_ok,
        output=output,
    )


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
    day: str | None,
    done_ok: bool,
    output: str,
    **options: Any,
) -> int:
    """Search a corpus for each question in several rounds: find documents, have them reviewed, ask again (R2RAG).

    JOB.YAML is a job with the section `rounds`; its input holds the questions, its labeler is `review`. Each round is a
    run of its own below the output (round-1, round-2, …), and a row for each question is written in the end:
    trajectories.parquet. The same command again continues where the last one stopped.
    """
    from relabel.jobs.commands.labeling import search_and_report
    from relabel.jobs.job import JobSource
    from relabel.jobs.labeling import RunOptions

    return search_and_report(
        JobSource(job_file, overrides, day),
        RunOptions(**options),
        done_ok=done_ok,
        output=output,
    )


@click.command(epilog="Example: relabel score out/ecom-bert --input pairs.parquet --to out/scores --shard 3/64")
@click.argument("student", metavar="STUDENT|BUNDLE|RERANKER")
@click.option(
    "--input",
    "input",
    multiple=True,
    required=True,
    metavar="PAIRS",
    help="Parquet file, folder, glob or URL. Repeatable.",
)
@columns_option("Columns other than those the student was trained on, say query=text,document=title+body.")
@click.option("--to", required=True, metavar="DIR", help="Folder or URL that the scores go to.")
@click.option("--name", metavar="NAME", help="Name of the run.  [default: the student's]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Score the first N rows only.")
@click.option(
    "--shards",
    type=click.IntRange(1, 1_000_000),
    show_default="by the rows, at most 16",
    help="Units that --shard hands out.",
)
@click.option(
    "--chunk-rows",
    type=click.IntRange(1, 1_000_000),
    default=512,
    show_default=True,
    help="Rows per commit, sorted by length together. A stop loses those of the chunk under way.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(1),
    show_default="1024 on a CPU, 8192 on a GPU",
    metavar="N",
    help="Tokens of a batch, padding included.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="What torch calls it: cpu, cuda, cuda:1; of a bundle cpu, cuda or openvino.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="In what a student computes.  [default: float32]",
)
@scored_model_options
@click.option("--shard", metavar="I/N|auto", help=SHARD_HELP)
@click.option("--until", metavar="TIME", help=UNTIL_HELP)
@click.option("--for", "duration", metavar="LENGTH", help=FOR_HELP)
@click.option("--dry-run", is_flag=True, help="Say what would be scored and what is done already; score nothing.")
@click.option(
    "--done-ok", is_flag=True, help="Exit 0 instead of 10 when there is nothing to do, for schedulers that need it."
)
@log_option
@output_option
def score(
    student: str,
    shard: str | None,
    until: str | None,
    duration: str | None,
    dry_run: bool,
    done_ok: bool,
    output: str,
    **options: Any,
) -> int:
    """Label pairs with a trained student, or score them with any reranker.

    STUDENT is the output of `relabel distill`, BUNDLE that of `relabel export`, or the URL of a copy; a bundle labels
    faster, in the precision that --precision names. RERANKER is a folder that sentence-transformers loads as a
    cross-encoder, or the address of a server's /rerank or /score; its labels have a score and no grade.

    The output is like a run's: chunks with receipts, a manifest at the end, and the same exit codes; status, verify and
    evaluate read it. The same command again continues where the last one stopped.
    """
    from relabel.jobs.commands.labeling import run_and_report
    from relabel.jobs.labeling import RunOptions
    from relabel.jobs.score import ScoreOptions
    from relabel.manifests.files import Storage

    storage = Storage()
    # whose time begins before a student is fetched
    run_options = RunOptions(shard=shard, until=until, duration=duration)
    job = score_job_of(student, ScoreOptions(**options), storage)
    with names_column_options():
        code = run_and_report(
            job,
            run_options,
            dry_run=dry_run,
            done_ok=done_ok,
            output=output,
        )
    if code == Exit.OVER_LIMIT:
        logs.write(
            f"See {job.spec.output}/quarantine: a student whose probabilities are NaN wants another --dtype, or other "
            "weights.",
            event="advice",
        )
    return code


def score_job_of(model: str, options: ScoreOptions, storage: Storage) -> Job:
    """The job of a student, a bundle or a reranker.

    Raises:
        UsageError: an option of another of the three.
    """
    from relabel.jobs.rerankers import is_cross_encoder, is_server, reranker_job
    from relabel.jobs.score import local_student, score_job

    given = given_parameters()
    if is_server(model):
        refuse_given(given, ("batch_tokens", "dtype", "precision"), f"{model} is a server, which computes as it likes.")
        return reranker_job(model, options, storage)
    refuse_given(given, ("api", "served_model", "api_key_env"), f"{model} is no server's address.")
    folder = local_student(model, storage)
    if is_cross_encoder(folder):
        computes = f"{model} is a reranker, which computes as it was saved."
        refuse_given(given, ("batch_tokens", "dtype", "precision"), computes)
        return reranker_job(folder, options, storage)
    return score_job(
        folder,
        options,
        storage,
        on_choice=lambda line: logs.write(line, event="precision"),
    )
