"""`report`: one page about label runs, trainings, teachers, students and bundles."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import click

from relabel.jobs.commands.options import (
    check_grade_options,
    duplicates_option,
    grade_map_option,
    grade_option,
    output_option,
    side_option,
    sigterm_ends,
)
from relabel.jobs.evaluate import JudgingOptions, gold_files
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, grid
from relabel.jobs.report.build import build_report
from relabel.jobs.tables import check_free, written
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import parse_map


@click.command(epilog="Example: relabel report out/ecom out/ecom-bert out/bundle --gold pairs.parquet --to report.html")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--to", default="report.html", show_default=True, metavar="FILE", help="The page to write: a file, or a URL."
)
@click.option(
    "--gold", "--qrels", "gold", metavar="FILE", help="Gold, in any form that `relabel evaluate --qrels` takes."
)
@grade_option
@click.option("--by", metavar="COL", help="Query column of the gold grades.  [default: query_id]")
@click.option("--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of the gold grades.")
@grade_map_option
@duplicates_option("gold grades")
@side_option
@click.option(
    "--max-rows",
    type=click.IntRange(0),
    default=5000,
    show_default=True,
    help="Most rows of the label browser; of more, a seeded sample. 0: none, and no text of a document.",
)
@click.option("--force", is_flag=True, help="Replace the page if it is there.")
@output_option
@sigterm_ends()
def report(
    paths: tuple[str, ...],
    to: str,
    gold: str | None,
    grade_map: str | None,
    side: Any,
    max_rows: int,
    force: bool,
    output: str,
    **columns: Any,
) -> int:
    """Write one self-contained HTML page: what ran, its figures, and the labels to browse.

    PATH is the output of a run, of `score`, `train`, `distill` or `export`, or several of them: then the page shows how
    they are related, and runs side by side. The page needs no network, and shows documents as text. docs/report.md
    lists its sections.
    """
    check_grade_options(gold, "--gold", grade_map=grade_map, **columns)
    name = PurePosixPath(to).name
    if not name or to.endswith("/"):
        raise UsageError(f"--to {to}: a file's name is wanted, such as report.html.")
    storage = Storage()
    check_free(to, (*paths, *gold_files(gold)), storage, force=force)
    built = build_report(
        paths,
        storage,
        gold=JudgingOptions(gold, grade_map=parse_map(grade_map, "--map"), side=side, **columns),
        max_rows=max_rows,
    )
    data = built.html.encode("utf-8", "replace")
    with written(to, storage) as file:
        file.write_bytes(data)
    result = {
        "report": to,
        "bytes": len(data),
        "sections": built.sections,
        "rows": built.rows,
        "rows_shown": built.rows_shown,
        "exit_code": int(Exit.DONE),
    }
    rows = [
        ("size", f"{len(data) / 1e6:,.2f} MB, {built.rows_shown:,} of {built.rows:,} rows to browse"),
        ("sections", ", ".join(built.sections)),
    ]
    return emit(result, f"The report is in {to}\n{grid(rows)}", output)
