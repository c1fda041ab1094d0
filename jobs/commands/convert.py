"""`convert`: labels, qrels, run files, JSONL and Parquet into each other."""

from __future__ import annotations

import time
from typing import Any

import click

from relabel.jobs import logs
from relabel.jobs.commands.options import output_option, sigterm_ends
from relabel.jobs.convert.conversion import convert as convert_file
from relabel.jobs.convert.sources import Options
from relabel.jobs.output import emit_record
from relabel.manifests.files import Storage
from relabel.manifests.records import plain


@click.command(epilog="Example: relabel convert out/ecom ecom.qrels")
@click.argument("source")
@click.argument("target", metavar="TARGET")
@click.option(
    "--from",
    "from_format",
    type=click.Choice(["labels", "qrels", "run", "jsonl", "parquet"]),
    help="Form of SOURCE.  [default: by its suffix; a folder with a plan is labels]",
)
@click.option(
    "--to",
    "to_format",
    type=click.Choice(["qrels", "run", "jsonl", "parquet"]),
    help="Form of TARGET.  [default: by its suffix]",
)
@click.option("--by", default="query_id", show_default=True, metavar="COL", help="Query column of a table.")
@click.option("--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of a table.")
@click.option("--grade", metavar="COL", help="Column of grades.  [default: grade]")
@click.option(
    "--score", metavar="COL", help="Column that a run file ranks by.  [default: expected_grade of labels, else score]"
)
@click.option(
    "--tag", metavar="TEXT", help="Tag of a run file.  [default: the rows' own, else the run's name, else relabel]"
)
@click.option(
    "--duplicates",
    type=click.Choice(["error", "first", "mean", "keep"]),
    default="error",
    show_default=True,
    help="A pair whose grades or scores differ; keep leaves tables as they are.",
)
@click.option("--texts", is_flag=True, help="Of a run: add its query, document and gold.")
@click.option("--allow-partial", is_flag=True, help="Take a run that is not finished or is over its quarantine limit.")
@click.option("--force", is_flag=True, help="Replace TARGET if it is there.")
@output_option
@sigterm_ends()
def convert(
    source: str,
    target: str,
    from_format: str | None,
    to_format: str | None,
    by: str,
    doc: str,
    grade: str | None,
    score: str | None,
    tag: str | None,
    duplicates: Any,
    texts: bool,
    allow_partial: bool,
    force: bool,
    output: str,
) -> int:
    """Turn labels into TREC files and tables, and these into each other.

    SOURCE is a finished run's output, TREC qrels (qid 0 docid grade), a TREC run file (qid Q0 docid rank score tag),
    JSONL or Parquet; TARGET any of these but a run's output. Rows without a grade (or score) are left out and counted,
    never written as 0. Both may be URLs.
    """
    started = time.perf_counter()
    found = convert_file(
        source,
        target,
        Storage(),
        from_format=from_format,
        to_format=to_format,
        options=Options(by, doc, grade, score, allow_partial, texts),
        duplicates=duplicates,
        tag=tag,
        force=force,
    )
    for note in found.notes:
        logs.say(f"{note}.", event="convert")
    result = {**plain(found), "seconds": round(time.perf_counter() - started, 3)}
    return emit_record(f"Wrote {found.written:,} rows to {target} ({found.target_format})", result, output)
