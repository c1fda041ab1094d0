"""`combine`: several judges' labels become one set."""

from __future__ import annotations

from typing import Any

import click

from relabel.jobs.combine import combine_labels, combined_blocks
from relabel.jobs.commands.options import (
    FORCE_HELP,
    check_grade_options,
    duplicates_option,
    grade_map_option,
    grades_option,
    output_option,
    resamples_options,
)
from relabel.jobs.evaluate.sides import JudgingOptions, gold_files
from relabel.jobs.files import check_free
from relabel.jobs.output import emit
from relabel.jobs.sections import as_text
from relabel.manifests.files import Storage
from relabel.manifests.gold import parse_map
from relabel.manifests.records import plain


@click.command(epilog="Example: relabel combine out/llama out/qwen gpt.parquet --to combined.parquet --by dawid-skene")
@click.argument("labels", nargs=-1, required=True, metavar="LABELS...")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option(
    "--by",
    type=click.Choice(["mean", "dawid-skene"]),
    default="mean",
    show_default=True,
    help="Mean of distributions, or a model of which judge errs how, fitted to their grades.",
)
@click.option(
    "--qrels",
    "--gold",
    "qrels",
    metavar="FILE",
    help="Gold of a few queries, which anchors grades: TREC qrels text, Parquet, CSV, TSV or JSONL.",
)
@click.option("--grade", metavar="COL", help="Column of gold grades.  [default: grade]")
@grade_map_option
@duplicates_option("grades in the gold")
@grades_option
@resamples_options
@click.option(
    "--allow-partial", is_flag=True, help="Take runs that are not finished or are over their quarantine limit."
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def combine(
    labels: tuple[str, ...],
    to: str,
    by: Any,
    qrels: str | None,
    grade: str | None,
    grade_map: str | None,
    duplicates: Any,
    grades: int | None,
    resamples: int,
    seed: int,
    allow_partial: bool,
    force: bool,
    output: str,
) -> int:
    """Make one label file out of several judges' labels, for evaluate, distill and a job's cascade.

    LABELS are outputs of finished runs, or label files with query_id, doc_id, grade and optionally probs; or one run of
    the labeler ensemble, whose instructions are the judges. A judge may lack pairs. With gold, its pairs keep their
    gold grade, the others' grades occur as often as in the gold, and judges, mean and dawid-skene are measured.
    """
    check_grade_options(
        qrels, "--qrels", grade=grade, by=None, doc="doc_id", grade_map=grade_map, duplicates=duplicates
    )
    storage = Storage()
    check_free(to, (*labels, *gold_files(qrels)), storage, force=force)
    judging = JudgingOptions(
        qrels=qrels,
        grade=grade,
        grade_map=parse_map(grade_map, "--map"),
        duplicates=duplicates,
        grades=grades,
        allow_partial=allow_partial,
    )
    found = combine_labels(labels, to, by, judging, storage, resamples=resamples, seed=seed)
    return emit(plain(found), as_text(combined_blocks(found)), output)
