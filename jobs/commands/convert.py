"""`convert`: labels, qrels, run files, JSONL and Parquet into each other."""

from __future__ import annotations

import time
from typing import Any

import click

from jobs import log_format
from jobs.commands.ending import sigterm_ends
from jobs.commands.options import output_option
from jobs.exits import Exit
from jobs.output import emit, table
from manifests.storage.context import Storage


@click.command(epilog="Example: relabel convert out/ecom ecom.qrels")
@click.argument("source", metavar="SOURCE")
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
    allow_partial: bool,
    force: bool,
    output: str,
) -> int:
    """Turn labels into TREC files and tables, and these into each other.

    SOURCE is a finished run's output, TREC qrels (qid 0 docid grade), a TREC run file (qid Q0 docid rank score tag),
    JSONL or Parquet; TARGET any of these but a run's output. Rows without a grade (or score) are left out and counted,
    never written as 0. Both may be URLs.
    """
    from jobs.convert.converting import convert as convert_file
    from jobs.convert.sources import Options

    started = time.perf_counter()
    found = convert_file(
        source,
        target,
        Storage(),
        from_format=from_format,
        to_format=to_format,
        options=Options(by, doc, grade, score, allow_partial),
        duplicates=duplicates,
        tag=tag,
        force=force,
    )
    for note in found.notes:
        _say(f"{note}.")
    kind = "score" if found.target_format == "run" or "score" in found.value else "grade"
    for count, what in (
        (found.quarantined, "rows of the run are in quarantine: they have no label"),
        (found.nulls, f"rows without a {kind} (column {found.value}) left out"),
        (
            found.duplicates,
            f"rows beyond the first of their pair left out; {found.conflicts:,} pairs had several {kind}s",
        ),
    ):
        if count:
            _say(f"{count:,} {what}.")
    if found.rows and not found.written:
        _say(f"nothing is left to write: no row has a {kind}. Another column may have it: --{kind}.")
    result = {**found.plain(), "seconds": round(time.perf_counter() - started, 3)}
    lines = [("rows", f"{found.rows:,} of {source} ({found.source_format})"), (kind, f"column {found.value}")]
    lines += [("left out", f"{found.nulls:,} without a {kind}, {found.duplicates:,} beyond the first of their pair")]
    if found.source_format == "labels":
        lines.append(("quarantined", f"{found.quarantined:,}, which have no label"))
    emit(result, f"Wrote {found.written:,} rows to {target} ({found.target_format})\n" + table(lines), output)
    return Exit.DONE


def _say(text: str) -> None:
    log_format.say(text, level="info", event="convert")
