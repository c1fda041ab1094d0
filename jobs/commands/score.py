"""`score`: labels of a student, or of a bundle, for any pairs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from relabel.jobs import logs
from relabel.jobs.commands.label import FOR_HELP, SHARD_HELP, UNTIL_HELP
from relabel.jobs.commands.options import log_option, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit

ROLES = ("query_id", "query", "doc_id", "document")


def _columns(_context: click.Context, _option: click.Parameter, text: str | None) -> dict[str, Any]:
    """`query=text,document=title+body` as columns by role."""
    found: dict[str, Any] = {}
    for item in (text or "").split(",") if text else []:
        role, _, column = (part.strip() for part in item.partition("="))
        if not column or role not in ROLES or role in found:
            raise click.UsageError(
                f"--columns {text}: `{item.strip()}` is not ROLE=COLUMN, or names a role twice. Write for instance "
                f"query=text,document=title+body; roles are {', '.join(ROLES)}."
            )
        found[role] = column.split("+") if role == "document" else column
    return found


@click.command(epilog="Example: relabel score out/ecom-bert --input pairs.parquet --to out/scores --shard 3/64")
@click.argument("student", metavar="STUDENT|BUNDLE")
@click.option(
    "--input",
    "input",
    multiple=True,
    required=True,
    metavar="PAIRS",
    help="Parquet file, folder, glob or URL. Repeatable.",
)
@click.option(
    "--columns",
    metavar="ROLE=COLUMN,...",
    callback=_columns,
    help="Columns other than those the student was trained on, say query=text,document=title+body.",
)
@click.option("--to", required=True, metavar="DIR", help="Folder or URL that the scores go to.")
@click.option("--name", metavar="NAME", help="Name of the run.  [default: the student's]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Score the first N rows only.")
@click.option(
    "--shards", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Units that --shard hands out."
)
@click.option(
    "--chunk-rows",
    type=click.IntRange(1, 1_000_000),
    default=2048,
    show_default=True,
    help="Rows per commit, sorted by length together.",
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
@click.option(
    "--precision",
    metavar="NAME",
    help="Of a bundle: fp32, int8, …  [default: the fastest that passed its gate]",
)
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
    shard: str | None,
    until: str | None,
    duration: str | None,
    dry_run: bool,
    done_ok: bool,
    output: str,
    **options: Any,
) -> int:
    """Label pairs with a trained student.

    STUDENT is the output of `relabel distill`, BUNDLE that of `relabel export`, or the URL of a copy; a bundle labels
    faster, in the precision that --precision names. The output is like a run's: chunks with receipts, a manifest at the
    end, and the same exit codes; status, verify and evaluate read it. The same command again continues where the last
    one stopped.
    """
    from relabel.jobs.commands.labeling import dry_run_result, execute, session_of
    from relabel.jobs.job import CACHE_VARIABLE
    from relabel.jobs.run.results import report_json, report_text
    from relabel.jobs.run.stop import choose_deadline
    from relabel.jobs.score.loop import score_job
    from relabel.jobs.score.students import local_student
    from relabel.manifests.files import Storage
    from relabel.manifests.models import default_cache_dir

    deadline, storage = choose_deadline(until, duration), Storage()
    cache = os.environ.get(CACHE_VARIABLE)
    options["student"] = local_student(
        options["student"], storage, cache_dir=Path(cache) if cache else default_cache_dir()
    )
    job = score_job(**options, storage=storage, say=lambda line: logs.say(line, event="precision"))
    session = session_of(job, shard, may_write=not dry_run, deadline=deadline)
    if dry_run:
        return dry_run_result(session, "score", output)
    report = execute(session)
    code = Exit.DONE if done_ok and report.exit is Exit.NOTHING_TO_DO else report.exit
    emit({**report_json(report), "exit_code": int(code)}, report_text(report), output)
    if report.exit is Exit.OVER_LIMIT:
        advice = (
            f"See {report.output}/quarantine: a student whose probabilities are NaN wants another --dtype, or other "
            "weights."
        )
        logs.say(advice, event="advice")
    return code
