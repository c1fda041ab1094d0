"""The commands `evaluate` and `compare`: labels against gold, a student against its teacher, and two label runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from relabel.jobs import logs
from relabel.jobs.commands.options import (
    check_grade_options,
    duplicates_option,
    grade_map_option,
    grade_option,
    grades_option,
    output_option,
    resamples_options,
    side_option,
    sigterm_ends,
)
from relabel.jobs.compare.comparison import compare_runs
from relabel.jobs.compare.results import comparison_sections
from relabel.jobs.evaluate.judging import compare_sets, judged_labels
from relabel.jobs.evaluate.results import evaluation_blocks, sets_blocks
from relabel.jobs.evaluate.sides import JudgingOptions, gold_files
from relabel.jobs.exits import Exit
from relabel.jobs.files import check_free, written
from relabel.jobs.output import emit
from relabel.jobs.sections import as_text
from relabel.manifests.files import Storage
from relabel.manifests.gold import parse_map
from relabel.manifests.metrics.gates import parse_flag
from relabel.manifests.records import plain


@click.command(
    epilog="Example: relabel evaluate out/ecom out/scores --qrels pairs.parquet --require 'macro_f1>=0.9*teacher'"
)
@click.argument("labels", nargs=-1, required=True, metavar="[NAME=]LABELS...")
@click.option(
    "--qrels",
    metavar="FILE",
    help="Gold: TREC qrels text, Parquet, CSV, TSV or JSONL; a run's own input; or LABELS itself.",
)
@click.option("--pool", is_flag=True, help="Judge several LABELS as one set instead of comparing them.")
@click.option(
    "--require",
    "require",
    multiple=True,
    metavar="GATE",
    help="Exit 5 unless this holds: 'macro_f1>=0.6', 'macro_f1>=0.9*teacher', 'teacher.kl<=0.1'. Repeatable.",
)
@click.option("--label", default="grade", show_default=True, metavar="COL", help="Label column of a label file.")
@grade_option
@click.option(
    "--by",
    metavar="COL",
    help="Query column of label files and qrels; figures are resampled by it.  [default: query_id]",
)
@click.option(
    "--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of label files and qrels."
)
@click.option("--where", multiple=True, metavar="COL=VALUE", help="Judge only these rows of a label file. Repeatable.")
@grades_option
@grade_map_option
@click.option(
    "--map-labels", "label_map", metavar="OLD=NEW,...", help="Bring labels, samples and distributions to another scale."
)
@duplicates_option("grades in the qrels")
@resamples_options
@click.option(
    "--pass-at",
    metavar="K,...",
    help="The k of pass@k: any of k samples equals the gold grade.  [default: 1, 2, 4, …, all]",
)
@side_option
@click.option("--allow-partial", is_flag=True, help="Judge a run that is not finished or is over its quarantine limit.")
@output_option
def evaluate(
    labels: tuple[str, ...],
    qrels: str | None,
    pool: bool,
    require: tuple[str, ...],
    label: str,
    grade: str | None,
    by: str | None,
    doc: str,
    where: tuple[str, ...],
    grades: int | None,
    grade_map: str | None,
    label_map: str | None,
    duplicates: Any,
    resamples: int,
    seed: int,
    pass_at: str | None,
    side: Any,
    allow_partial: bool,
    output: str,
) -> int:
    """Measure labels against gold, or compare a student with its teacher and both with gold.

    LABELS are outputs of finished runs, of `relabel score`, or files with a label column. One is judged by --qrels. Of
    several the first is the teacher, unless NAME= says otherwise or it is a student's output; every other is compared
    with it over the rows that both have: KL, agreement and Kendall tau against the teacher and, with --qrels, all
    figures of both and the student's difference.

    Figures: accuracy, F1, AUC, Cohen kappa, Krippendorff alpha, nDCG@10, Kendall tau, bad-case rate, pass@k, ECE and
    Brier, each with a 95 % interval from resampled queries. docs/evaluate.md says what each is.
    """
    import pyarrow as pa

    # Arrow's own pool keeps what is freed: 597 MiB where this took 446, of a million labels (2026-11-22)
    pa.set_memory_pool(pa.system_memory_pool())
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
        pass_at=_counts(pass_at),
        side=side,
    )
    gates = [parse_flag(text) for text in require]
    draws = {"resamples": resamples, "seed": seed}
    if len(labels) == 1 or pool:
        if qrels is None:
            raise click.UsageError(
                "Missing option '--qrels'. One set is judged by gold; give a second set to compare it with."
            )
        judged = judged_labels(labels, options, gates, Storage(), **draws)
        emit(plain(judged), as_text(evaluation_blocks(judged)), output)
        _report_refused(judged.gates)
        return judged.exit_code
    if options.pass_at and qrels is None:
        raise click.UsageError("--pass-at: samples are judged by gold. Name them with --qrels.")
    compared = compare_sets(labels, options, gates, Storage(), **draws)
    emit(plain(compared), as_text(sets_blocks(compared)), output)
    _report_refused(verdict for one in compared.comparisons for verdict in one.gates)
    return compared.exit_code


def _report_refused(verdicts: Iterable[Any]) -> None:
    """Say on stderr which gates refused."""
    for verdict in verdicts:
        if not verdict.has_passed:
            logs.say(f"gate {verdict}.", level="error", event="gate", **asdict(verdict))


def _counts(text: str | None) -> tuple[int, ...]:
    """The k of `--pass-at 1,2,5`."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part[:10]) > 0 and len(part) < 10 for part in parts):
        raise click.UsageError(f"--pass-at {text}: want whole numbers from 1 on, for instance 1,2,5.")
    return tuple(sorted({int(part) for part in parts}))


def _pairs(items: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--where {item}: write COLUMN=VALUE.")
        found[name] = value
    return found


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
@resamples_options
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
    sections = comparison_sections(found)
    if html is not None:
        from relabel.jobs.report.page import render_page

        title = f"{found.a['name']} and {found.b['name']}"
        page = render_page(title, f"A {a}, B {b}; differences are B minus A", sections)
        with written(html, storage) as file:
            file.write_text(page, encoding="utf-8", errors="replace")
        logs.say(f"wrote {html}", event="page", path=html)
    result = {**plain(found), "html": html, "exit_code": int(Exit.DONE)}
    return emit(result, as_text(block for one in sections for block in one.blocks), output)
