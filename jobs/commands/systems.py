"""The command `systems`: which search is better."""

from typing import Any

import click

from relabel.jobs.commands.options import (
    Number,
    duplicates_option,
    grade_map_option,
    grades_option,
    label_map_option,
    output_option,
)
from relabel.jobs.output import emit
from relabel.manifests.files import Storage

MAKERS = ("judge", "student", "other")


@click.command(epilog="Example: relabel systems old.run new.run --labels out/ecom --gold humans.qrels")
@click.argument("systems", nargs=-1, required=True, metavar="[NAME=]SYSTEM...")
@click.option(
    "--labels",
    required=True,
    metavar="LABELS",
    help="The judge's labels: a run's output, Parquet, CSV, TSV, JSONL, or TREC qrels text.",
)
@click.option("--gold", "--qrels", "gold", metavar="FILE", help="Grades of humans for some of the queries.")
@click.option(
    "--k",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="Documents of a query that are looked at.",
)
@click.option(
    "--relevant",
    type=click.IntRange(1, 9),
    metavar="GRADE",
    help="Least grade that is relevant for P and RR.  [default: the upper half of the scale]",
)
@click.option("--plan", "is_plan", is_flag=True, help="Name the queries that a human should judge next.")
@click.option(
    "--width",
    type=Number(0.0001, 1.0),
    default=0.02,
    show_default=True,
    help="Difference in nDCG that should be shown.",
)
@click.option(
    "--made-by",
    multiple=True,
    metavar="NAME=WHAT",
    help="Where a system's scores come from: judge, student (of the judge) or other. Repeatable.",
)
@click.option("--score", metavar="COL", help="Column that a table ranks by.  [default: score, else rank]")
@click.option(
    "--by",
    metavar="COL",
    help="Query column of tables of systems, labels and gold.  [default: query_id]",
)
@click.option("--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of the same.")
@click.option("--label", default="grade", show_default=True, metavar="COL", help="Label column of a label file.")
@click.option("--grade", metavar="COL", help="Column of gold grades.  [default: grade]")
@grades_option
@grade_map_option
@label_map_option
@duplicates_option("labels or gold grades")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=7,
    show_default=True,
    help="Of the order in which queries are judged next.",
)
@click.option(
    "--allow-partial", is_flag=True, help="Take runs that are not finished or are over their quarantine limit."
)
@output_option
def systems(
    systems: tuple[str, ...],
    made_by: tuple[str, ...],
    grade_map: str | None,
    label_map: str | None,
    output: str,
    **values: Any,
) -> int:
    """Say which of several searches is better, by an LLM's labels and the grades of a few humans.

    SYSTEM is a ranking: a TREC run file, answers of OpenSearch or Elasticsearch as JSON by query id, a table of query,
    document and score or rank, or an output of `relabel score`. Each pair is compared by nDCG, P, RR and bad documents
    of the top k, with 95 % intervals over queries: the judge's difference over all queries, corrected by what humans
    say of some. Five gold queries are the least, ten for a system's own figures. Without gold, the judge's opinion is
    shown. docs/which-search-is-better.md says what that is worth.
    """
    from relabel.jobs.systems import SystemsOptions, compare_systems
    from relabel.manifests.gold import parse_map

    options = SystemsOptions(
        **values,
        made_by=_makers(made_by),
        grade_map=parse_map(grade_map, "--map"),
        label_map=parse_map(label_map, "--map-labels"),
    )
    return emit(compare_systems(systems, options, Storage()), output)


def _makers(items: tuple[str, ...]) -> dict[str, Any]:
    """`NAME=WHAT` of `--made-by`, by name."""
    found = {}
    for item in items:
        name, _, what = item.partition("=")
        if not name or what not in MAKERS:
            raise click.UsageError(f"--made-by {item}: write NAME=WHAT, where WHAT is {', '.join(MAKERS)}.")
        found[name] = what
    return found
