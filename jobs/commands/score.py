"""`score`: labels of a student, or of a bundle, for any pairs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs import logs
from relabel.jobs.commands.label import FOR_HELP, SHARD_HELP, UNTIL_HELP
from relabel.jobs.commands.options import log_option, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, table
from relabel.manifests.secrets import counted

if TYPE_CHECKING:
    from relabel.jobs.run.results import RunReport
    from relabel.jobs.run.session import Session
    from relabel.jobs.run.stop import Deadline
    from relabel.manifests.asks import EngineFacts

ROLES = ("query_id", "query", "doc_id", "document")
LISTS = ("document",)


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What `score` was asked for; the fields are the options of the command.

    Args:
        duration: `--for`.
    """

    student: str
    input: tuple[str, ...]
    columns: str | None
    to: str
    name: str | None
    limit: int | None
    shards: int
    chunk_rows: int
    batch_tokens: int | None
    device: str
    dtype: str | None
    precision: str | None
    shard: str | None
    until: str | None
    duration: str | None
    dry_run: bool
    done_ok: bool
    output: str


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
def score(**options: Any) -> int:
    """Label pairs with a trained student.

    STUDENT is the output of `relabel distill`, BUNDLE that of `relabel export`, or the URL of a copy; a bundle labels
    faster, in the precision that --precision names. The scores lie in DIR like a run's labels: chunks with receipts, a
    manifest at the end, and the same exit codes; status, verify and evaluate read them. The same command again
    continues where the last one stopped.
    """
    from relabel.jobs.run.results import report_json
    from relabel.jobs.run.stop import choose_deadline

    work = ScoreOptions(**options)
    deadline = choose_deadline(work.until, work.duration)
    session = _open(work, deadline)
    if work.dry_run:
        total, rows = session.left.rows_to_ask(), session.opened.plan.rows
        result = {"output": work.to, "shards": session.shards, "rows_to_ask": total, "rows": rows}
        return emit(
            result,
            f"Would score {total:,} of {rows:,} rows in {counted(len(session.shards), 'shard')} of {work.to}.",
            work.output,
        )
    report = _execute(session)
    code = Exit.DONE if work.done_ok and report.exit is Exit.NOTHING_TO_DO else report.exit
    emit({**report_json(report), "exit_code": int(code)}, _text(report), work.output)
    if report.exit is Exit.OVER_LIMIT:
        advice = (
            f"See {report.output}/quarantine: a student whose probabilities are NaN wants another --dtype, or other "
            "weights."
        )
        logs.say(advice, event="advice")
    return code


def _open(work: ScoreOptions, deadline: Deadline | None) -> Session:
    """Plan the job if nobody has, and make ready to work on its shards."""
    from relabel.jobs.job import CACHE_VARIABLE, open_run
    from relabel.jobs.run.counts import Progress
    from relabel.jobs.run.session import Session
    from relabel.jobs.run.shards import choose_shards
    from relabel.jobs.run.stop import Stop
    from relabel.jobs.score.loop import ScoreRequest, score_job
    from relabel.jobs.score.students import local_student
    from relabel.manifests.files import Storage
    from relabel.manifests.models import default_cache_dir

    cache, storage = os.environ.get(CACHE_VARIABLE), Storage()
    request = ScoreRequest(
        student=local_student(work.student, storage, cache_dir=Path(cache) if cache else default_cache_dir()),
        input=work.input,
        columns=_columns(work.columns),
        output=work.to,
        name=work.name,
        limit=work.limit,
        shards=work.shards,
        chunk_rows=work.chunk_rows,
        batch_tokens=work.batch_tokens,
        device=work.device,
        dtype=work.dtype,
        precision=work.precision,
    )
    choose_shards(work.shard, work.shards)  # a wrong --shard is reported before anything is planned or written
    opened = open_run(
        score_job(request, storage, lambda line: logs.say(line, event="precision")), may_write=not work.dry_run
    )
    shards = choose_shards(work.shard, len(opened.plan.shards))
    return Session(opened, shards, is_retry=False, stop=Stop(deadline), progress=Progress())


def _execute(session: Session) -> RunReport:
    """Do a session's work with progress on stderr; signals and a deadline drain it."""
    from relabel.jobs.run.progress import Display
    from relabel.jobs.run.stop import stopping
    from relabel.jobs.score.loop import score as score_session

    stop = session.stop
    total, before = session.left.rows_to_ask(), session.left.rows_before()
    with Display(session.progress, total, before=before) as display, stopping(stop, display.say):

        def announce(facts: EngineFacts) -> None:
            runtime = "onnxruntime" if "bundle" in facts.details else "torch"
            runtime = "openvino" if facts.device == "openvino" else runtime
            display.say(f"student {facts.model} on {runtime} {facts.version} ({facts.device}, {facts.dtype})")

        return score_session(session, on_progress=display.update, on_engine=announce)


def _columns(text: str | None) -> dict[str, Any]:
    """`query=text,document=title+body` as columns by role."""
    from relabel.manifests.specs import nearest

    found: dict[str, Any] = {}
    for item in (text or "").split(",") if text else []:
        role, equals, column = (part.strip() for part in item.partition("="))
        if not equals or not column or role not in ROLES:
            hint = nearest(role, list(ROLES))
            raise click.UsageError(
                (
                    f"--columns {text}: `{item.strip()}` is not ROLE=COLUMN. Write for instance "
                    "query=text,document=title+body; roles are "
                )
                + ", ".join(ROLES)
                + (f". Did you mean {hint}?" if hint and hint != role else ".")
            )
        if role in found:
            raise click.UsageError(
                f"--columns {text}: names {role} twice. Write for instance query=text,document=title+body."
            )
        found[role] = column.split("+") if role in LISTS else column
    return found


def _text(report: RunReport) -> str:
    """The end table."""
    from relabel.jobs.run.results import in_vain_rows, verdict

    did, tally = report.did, report.tally
    if report.exit is Exit.NOTHING_TO_DO:
        share = "all" if report.rows == tally.rows else "these"
        counts = f"{tally.labelled:,} labelled, {tally.num_quarantined:,} quarantined"
        return f"{report.name}: nothing to do, {share} shards are done ({counts})."
    seconds = max(did.seconds, 1e-9)
    is_finished = report.rows == tally.rows
    return f"{report.name}: {verdict(report)}\n" + table(
        [
            ("rows", f"{report.rows:,}, {report.rows - tally.rows:,} open"),
            ("labelled", f"{tally.labelled:,}"),
            ("quarantined", f"{tally.num_quarantined:,}"),
            ("this run", f"{did.pairs:,} pairs in {did.seconds:.1f} s, {did.pairs / seconds:,.1f} pairs/s"),
            ("tokens", f"{did.prompt_tokens:,}, {did.prompt_tokens / seconds:,.0f} tokens/s"),
            *in_vain_rows(did.in_vain),
            (
                "scores",
                f"listed in {report.output}/manifest.json" if is_finished else f"so far in {report.output}/labels",
            ),
        ]
    )
