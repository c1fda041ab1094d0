"""`evaluate`: labels beside human grades."""

from __future__ import annotations

from typing import Any

import click

from jobs.commands.options import emit, output_option
from jobs.exits import Exit


@click.command(epilog="Example: relabel evaluate out/ecom --qrels pairs.parquet --grade grade")
@click.argument("labels", nargs=-1, required=True, metavar="LABELS...")
@click.option(
    "--qrels",
    required=True,
    metavar="FILE",
    help="Human grades: TREC qrels text, Parquet, CSV, TSV or JSONL; a run's own input; or LABELS itself.",
)
@click.option("--label", default="grade", show_default=True, metavar="COL", help="Label column of a label file.")
@click.option("--grade", metavar="COL", help="Column of human grades.  [default: grade, or the run's input.columns.gold]")
@click.option("--by", metavar="COL", help="Query column of label files and qrels; figures are resampled by it.  [default: query_id]")
@click.option("--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of label files and qrels.")
@click.option("--where", multiple=True, metavar="COL=VALUE", help="Judge only these rows of a label file. Repeatable.")
@click.option("--grades", type=click.IntRange(2, 10), metavar="K", help="Grades on the scale, where neither a run nor distributions tell.")
@click.option("--map", "grade_map", metavar="OLD=NEW,...", help="Bring human grades to the labels' scale, say 0=0,1=1,2=2,3=2.")
@click.option("--map-labels", "label_map", metavar="OLD=NEW,...", help="Bring labels, samples and distributions to another scale.")
@click.option(
    "--duplicates",
    type=click.Choice(["error", "mean", "first"]),
    default="error",
    show_default=True,
    help="A pair whose grades in the qrels differ.",
)
@click.option(
    "--calibrate", type=click.Choice(["temperature", "isotonic"]), help="Fit on half the queries, show the other half before and after."
)
@click.option(
    "--resamples", type=click.IntRange(0, 100_000), default=1000, show_default=True, help="Bootstrap resamples; 0 for no intervals."
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Of resamples and split.")
@click.option("--allow-partial", is_flag=True, help="Judge a run that is not finished or is over its quarantine limit.")
@output_option
def evaluate(
    labels: tuple[str, ...],
    qrels: str,
    label: str,
    grade: str | None,
    by: str | None,
    doc: str,
    where: tuple[str, ...],
    grades: int | None,
    grade_map: str | None,
    label_map: str | None,
    duplicates: Any,
    calibrate: Any,
    resamples: int,
    seed: int,
    allow_partial: bool,
    output: str,
) -> int:
    """Judge labels by human grades.

    LABELS are outputs of finished runs, or files with a label column; several are judged as one set. Figures: accuracy, F1, AUC,
    Cohen kappa, Krippendorff alpha, nDCG@10, Kendall tau, bad-case rate, pass@k, ECE and Brier, each with a 95 % interval from
    resampled queries. docs/evaluate.md says what each is.
    """
    from jobs.evaluation_text import evaluation_text
    from jobs.judging import JudgingOptions, judge
    from manifests import evaluation
    from manifests.qrels import parse_map

    options = JudgingOptions(
        qrels=qrels,
        label=label,
        grade=grade,
        by=by,
        doc=doc,
        grades=grades,
        grade_map=parse_map(grade_map, "--map"),
        label_map=parse_map(label_map, "--map-labels"),
        duplicates=duplicates,
        where=_pairs(where),
        allow_partial=allow_partial,
    )
    judging = judge(labels, options)
    found = evaluation.evaluate(judging.judged, resamples=resamples, seed=seed, calibrate=calibrate)
    result = {
        "labels": judging.sources,
        "qrels": qrels,
        "joined_by": judging.joined_by,
        "counts": judging.counts,
        "resamples": resamples,
        "seed": seed,
        **found.plain(),
        "notes": [*judging.notes, *found.notes],
    }
    emit(result, evaluation_text(result), output)
    return Exit.DONE


def _pairs(items: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--where {item}: write COLUMN=VALUE.")
        found[name] = value
    return found
