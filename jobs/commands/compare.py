"""`compare`: two label runs over the same pairs."""

from __future__ import annotations

from typing import Any

import click

from relabel.jobs import log_format
from relabel.jobs.commands.ending import sigterm_ends
from relabel.jobs.commands.options import (
    check_grade_options,
    duplicates_option,
    grade_map_option,
    grade_option,
    output_option,
    side_option,
)
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit
from relabel.manifests.storage.context import Storage


@click.command(epilog="Example: relabel compare out/prompt-a out/prompt-b --html compare.html")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--qrels",
    "--gold",
    "qrels",
    metavar="FILE",
    help="Gold: TREC qrels text, Parquet, CSV, TSV or JSONL; or a run's own input.",
)
@click.option("--html", metavar="FILE", help="Write the comparison as one self-contained page, too.")
@grade_option
@click.option("--by", metavar="COL", help="Query column of the qrels.  [default: query_id]")
@click.option("--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of the qrels.")
@grade_map_option
@duplicates_option("grades in the qrels")
@click.option(
    "--examples", type=click.IntRange(0, 1000), default=10, show_default=True, help="Flips to show, the largest first."
)
@click.option(
    "--queries",
    type=click.IntRange(0, 1000),
    default=10,
    show_default=True,
    help="Moved queries to show, the furthest first.",
)
@click.option(
    "--depth", type=click.IntRange(1, 1000), default=10, show_default=True, help="Top of each query that is compared."
)
@click.option(
    "--resamples",
    type=click.IntRange(0, 100_000),
    default=1000,
    show_default=True,
    help="Bootstrap resamples; 0 for no intervals.",
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Of the resamples.")
@side_option
@click.option(
    "--allow-partial", is_flag=True, help="Take runs that are not finished or are over their quarantine limit."
)
@click.option("--force", is_flag=True, help="Replace the page if it is there.")
@output_option
@sigterm_ends()
def compare(
    a: str,
    b: str,
    qrels: str | None,
    html: str | None,
    grade: str | None,
    by: str | None,
    doc: str,
    grade_map: str | None,
    duplicates: Any,
    examples: int,
    queries: int,
    depth: int,
    resamples: int,
    seed: int,
    side: Any,
    allow_partial: bool,
    force: bool,
    output: str,
) -> int:
    """Compare two label runs over the same pairs: two prompts, two teachers, or one teacher twice.

    A and B are outputs of finished runs. Rows are matched by row where both labelled the same input, else by query and
    document. Shown are agreement, shift of grades with tests, distance of distributions, the largest flips with their
    texts, and the queries whose order moved; with --qrels also who is right. Differences are B minus A, intervals are
    over queries. docs/compare.md says what each figure is.
    """
    from relabel.jobs.compare.comparing_runs import compare_runs
    from relabel.jobs.compare.text import runs_text
    from relabel.jobs.evaluate.judged_options import JudgingOptions
    from relabel.jobs.files.durable_files import check_free, written
    from relabel.jobs.report.gold import gold_files
    from relabel.manifests.judging.qrels import parse_map
    from relabel.manifests.records import plain

    check_grade_options(qrels, "--qrels", grade=grade, by=by, doc=doc, grade_map=grade_map, duplicates=duplicates)
    options = JudgingOptions(
        qrels=qrels,
        grade=grade,
        by=by,
        doc=doc,
        grade_map=parse_map(grade_map, "--map"),
        duplicates=duplicates,
        allow_partial=allow_partial,
        side=side,
    )
    storage = Storage()
    if html is not None:
        check_free(html, (a, b, *gold_files(qrels)), storage, force=force)
    found = compare_runs(
        a, b, options, storage, num_examples=examples, num_queries=queries, depth=depth, resamples=resamples, seed=seed
    )
    if html is not None:
        from relabel.jobs.report.compare_sections import comparison_page

        with written(html, storage) as file:
            file.write_text(comparison_page(found), encoding="utf-8", errors="replace")
        log_format.say(f"wrote {html}", event="page", path=html)
    result = {**plain(found), "html": html, "exit_code": int(Exit.DONE)}
    return emit(result, runs_text(found), output)
