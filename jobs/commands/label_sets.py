"""The commands over sets of labels: `evaluate`, `compare`, `report`, `combine`, `merge` and `convert`."""

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from relabel.jobs import logs
from relabel.jobs.combine import combine_labels, label_maps_of
from relabel.jobs.commands.options import (
    FORCE_HELP,
    check_grade_options,
    columns_option,
    duplicates_option,
    grade_map_option,
    grade_option,
    grades_option,
    label_map_option,
    local_folder,
    names_column_options,
    output_option,
    report_refused,
    resamples_options,
    side_option,
    sigterm_ends,
)
from relabel.jobs.compare import CompareOptions, compare_runs, comparison_sections
from relabel.jobs.convert import LABELS, WRITABLE, ConvertOptions
from relabel.jobs.convert import convert as convert_file
from relabel.jobs.evaluate import JudgingOptions, compare_sets, gold_files, judge
from relabel.jobs.output import Exit, TextResult, emit, values_table
from relabel.jobs.run.progress import check_metrics_file
from relabel.jobs.tables import check_free, written
from relabel.jobs.track import Tracked, track
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage
from relabel.manifests.forms import FORMS
from relabel.manifests.gold import parse_map
from relabel.manifests.metrics.evaluation import parse_flag
from relabel.manifests.secrets import one_line


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
@click.option(
    "--label",
    default="grade",
    show_default=True,
    metavar="COL",
    help="Label column of a label file.",
)
@click.option(
    "--score",
    metavar="COL",
    help="Column of a TREC run or a table that only ranks, the highest first: its order is judged, not grades.",
)
@grade_option
@click.option(
    "--by",
    metavar="COL",
    help="Query column of label files and qrels; figures are resampled by it.  [default: query_id]",
)
@click.option(
    "--doc",
    default="doc_id",
    show_default=True,
    metavar="COL",
    help="Document column of label files and qrels.",
)
@click.option("--where", multiple=True, metavar="COL=VALUE", help="Judge only these rows of a label file. Repeatable.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="[NAME=]RANKING",
    help="Another ranker to compare one set with: a TREC run, a table with score, rank or cosine, scores. Repeatable.",
)
@grades_option
@grade_map_option
@label_map_option
@duplicates_option("grades in the qrels")
@resamples_options
@click.option(
    "--pass-at",
    metavar="K,...",
    help="The k of pass@k: any of k samples equals the gold grade.  [default: 1, 2, 4, …, all]",
)
@side_option
@click.option("--allow-partial", is_flag=True, help="Judge a run that is not finished or is over its quarantine limit.")
@click.option(
    "--track",
    "track_file",
    metavar="FILE",
    help="Add a line to this CSV, unless one is of these labels; exit 5 if agreement fell beyond what chance explains "
    "over all lines.",
)
@click.option(
    "--track-date",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help="With --track: the day of the labels.  [default: today, UTC]",
)
@click.option("--metrics", metavar="FILE", help="With --track: keep its figures in this Prometheus file.")
@output_option
def evaluate(
    labels: tuple[str, ...],
    pool: bool,
    require: tuple[str, ...],
    grade_map: str | None,
    label_map: str | None,
    where: tuple[str, ...],
    pass_at: str | None,
    track_file: str | None,
    track_date: datetime | None,
    metrics: str | None,
    output: str,
    **values: Any,
) -> int:
    """Measure labels against gold, or compare a student with its teacher and both with gold.

    LABELS are outputs of finished runs, of `relabel score`, or files with a label column. One is judged by --qrels. Of
    several the first is the teacher, unless NAME= says otherwise or it is a student's output; every other is compared
    with it over the rows that both have: KL, agreement and Kendall tau against the teacher and, with --qrels, all
    figures of both and the student's difference.

    With --score, LABELS is a ranking: AUC, nDCG@10, Kendall tau and bad-case rate are judged, and no grades.

    Figures: accuracy, F1, AUC, Cohen kappa, Krippendorff alpha, nDCG@10, Kendall tau, bad-case rate, pass@k, ECE and
    Brier, each with a 95 % interval from resampled queries. docs/evaluate.md says what each is.
    """
    import pyarrow as pa

    # Arrow's own pool keeps what is freed: 597 MiB where this took 446, of a million labels (2026-11-22)
    pa.set_memory_pool(pa.system_memory_pool())
    if metrics is not None and track_file is None:
        raise click.UsageError("--metrics: goes with --track.")
    if track_date is not None and track_file is None:
        raise click.UsageError("--track-date: goes with --track.")
    options = JudgingOptions(
        grade_map=parse_map(grade_map, "--map"),
        label_map=parse_map(label_map, "--map-labels"),
        where=_pairs(where),
        pass_at=_counts(pass_at),
        gates=[parse_flag(text) for text in require],
        **values,
    )
    if len(labels) == 1 or pool:
        if options.qrels is None:
            raise click.UsageError(
                "Missing option '--qrels'. One set is judged by gold; give a second set to compare it with."
            )
        rows, judged = judge(labels, options, Storage())
        if track_file is not None:
            if metrics is not None:
                check_metrics_file(Path(metrics))
            local_folder(track_file, "--track")
            day = None if track_date is None else track_date.date().isoformat()
            return _emit_track(track(rows, judged, track_file, day=day), metrics, output)
        emit(judged, output)
        report_refused(judged.gates)
        return judged.exit_code
    if track_file is not None:
        raise click.UsageError("--track: goes with one set.")
    if options.score is not None:
        raise click.UsageError("--score: one ranking is judged by gold. `relabel systems` compares several.")
    if options.baselines:
        raise click.UsageError("--baseline: goes with one set. `relabel systems` compares several rankers.")
    if options.pass_at and options.qrels is None:
        raise click.UsageError("--pass-at: samples are judged by gold. Name them with --qrels.")
    compared = compare_sets(labels, options, Storage())
    emit(compared, output)
    report_refused(compared.verdicts())
    return compared.exit_code


def _emit_track(tracked: Tracked, metrics: str | None, output: str) -> int:
    """Say whether the judge has become worse."""
    emit(tracked, output)
    report_refused(tracked.judged.gates)
    if tracked.fall.is_beyond_chance:
        logs.write(f"{tracked.text}.", level="error", event="track")
    failure = tracked.write_metrics(metrics) if metrics is not None else ""
    if failure:
        logs.write(failure, level="warning", event="metrics")
    return tracked.exit_code


def _counts(text: str | None) -> tuple[int, ...]:
    """The k of `--pass-at 1,2,5`."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part[:10]) > 0 and len(part) < 10 for part in parts):
        raise click.UsageError(f"--pass-at {text}: want whole numbers from 1 on, for instance 1,2,5.")
    return tuple(sorted({int(part) for part in parts}))


def _pairs(items: tuple[str, ...]) -> dict[str, str]:
    for item in items:
        if item.find("=") < 1:
            raise click.UsageError(f"--where {item}: write COLUMN=VALUE.")
    return dict(item.split("=", 1) for item in items)


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
@click.option(
    "--doc",
    default="doc_id",
    show_default=True,
    metavar="COL",
    help="Document column of the qrels.",
)
@grade_map_option
@duplicates_option("grades in the qrels")
@click.option(
    "--examples",
    type=click.IntRange(0, 1000),
    default=10,
    show_default=True,
    help="Flips to show, the largest first.",
)
@click.option(
    "--queries",
    type=click.IntRange(0, 1000),
    default=10,
    show_default=True,
    help="Moved queries to show, the furthest first.",
)
@click.option(
    "--depth",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="Top of each query that is compared.",
)
@resamples_options
@side_option
@click.option(
    "--allow-partial", is_flag=True, help="Take runs that are not finished or are over their quarantine limit."
)
@click.option("--force", is_flag=True, help="Replace the page if it is there.")
@output_option
@sigterm_ends()
def compare(a: str, b: str, output: str, **values: Any) -> int:
    """Compare two label runs over the same pairs: two prompts, two teachers, or one teacher twice.

    A and B are outputs of finished runs. Rows are matched by row where both labelled the same input, else by query and
    document. Shown are agreement, shift of grades, distance of distributions, the largest flips with their texts, and
    the queries that moved furthest; with --qrels also who is right. Differences are B minus A, intervals are over
    queries. docs/compare.md says what each figure is.
    """
    options = CompareOptions(**values)
    check_grade_options(
        options.qrels,
        "--qrels",
        grade=options.grade,
        by=options.by,
        doc=options.doc,
        grade_map=options.grade_map,
        duplicates=options.duplicates,
    )
    storage = Storage()
    if options.html is not None:
        check_free(options.html, (a, b, *gold_files(options.qrels)), storage, force=options.force)
    compared = compare_runs(a, b, options, storage)
    if options.html is not None:
        from relabel.jobs.report.build import render_page

        title = f"{compared.a.name} and {compared.b.name}"
        about = f"A {a}, B {b}; differences are B minus A"
        page = render_page(title, about, comparison_sections(compared))
        with written(options.html, storage) as file:
            file.write_text(page, encoding="utf-8", errors="replace")
        logs.write(f"wrote {options.html}", event="page", path=options.html)
    return emit(compared, output)


@click.command(epilog="Example: relabel report out/ecom out/ecom-bert out/bundle --gold pairs.parquet --to report.html")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--to",
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="The page to write: a file, or a URL.",
)
@click.option(
    "--gold",
    "--qrels",
    "gold",
    metavar="FILE",
    help="Gold, in any form that `relabel evaluate --qrels` takes.",
)
@grade_option
@click.option("--by", metavar="COL", help="Query column of the gold grades.  [default: query_id]")
@click.option(
    "--doc",
    default="doc_id",
    show_default=True,
    metavar="COL",
    help="Document column of the gold grades.",
)
@grade_map_option
@duplicates_option("gold grades")
@side_option
@click.option(
    "--system",
    "systems",
    multiple=True,
    metavar="[NAME=]SYSTEM",
    help="Compare these rankings by the first run's labels: see `relabel systems`. Repeatable.",
)
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
    systems: tuple[str, ...],
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
    from relabel.jobs.report.build import build_report  # with matplotlib and the manifests of all that it shows

    check_grade_options(gold, "--gold", grade_map=grade_map, **columns)
    if to in ("", ".") or to.endswith("/"):
        raise UsageError(f"--to {to}: a file's name is wanted, such as report.html.")
    storage = Storage()
    check_free(to, (*paths, *gold_files(gold), *systems), storage, force=force)
    built = build_report(
        paths,
        storage,
        gold=JudgingOptions(gold, grade_map=parse_map(grade_map, "--map"), side=side, **columns),
        systems=systems,
        max_rows=max_rows,
    )
    data = built.html.encode("utf-8", "replace")
    with written(to, storage) as file:
        file.write_bytes(data)
    facts = {
        "bytes": len(data),
        "sections": built.sections,
        "rows": built.rows,
        "rows_shown": built.rows_shown,
    }
    shown = [one_line(text) for text in (f"The report is in {to}", *(f"  {verdict}" for verdict in built.verdicts))]
    values = {"report": to, "verdicts": built.verdicts, **facts, "exit_code": int(Exit.DONE)}
    return emit(TextResult("\n".join([*shown, values_table(facts)]), values), output)


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
@columns_option("Id columns of label files and gold other than query_id and doc_id, say query_id=qid,doc_id=sku.")
@click.option("--grade", metavar="COL", help="Column of gold grades.  [default: grade]")
@grade_map_option
@click.option(
    "--map-labels",
    "label_maps",
    multiple=True,
    metavar="[JUDGE=]OLD=NEW,...",
    help="Bring labels and distributions to another scale: of all judges, or of one, named as in LABELS. Repeatable.",
)
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
    columns: dict[str, Any],
    grade: str | None,
    grade_map: str | None,
    label_maps: tuple[str, ...],
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
    the labeler ensemble, whose instructions are the judges. A judge may lack pairs. Judges of 3 and of 4 grades are
    brought to one scale: --map-labels 0=0,1=1,2=2,3=2. With gold, its pairs keep their gold grade, the others' grades
    occur as often as in the gold, and judges, mean and dawid-skene are measured.
    """
    check_grade_options(
        qrels,
        "--qrels",
        grade=grade,
        by=None,
        doc="doc_id",
        grade_map=grade_map,
        duplicates=duplicates,
    )
    further = columns.keys() - {"query_id", "doc_id"}
    if further:
        raise UsageError(f"--columns {min(further)}=…: combine reads ids and grades alone: query_id=…,doc_id=….")
    storage = Storage()
    check_free(to, (*labels, *gold_files(qrels)), storage, force=force)
    judging = JudgingOptions(
        qrels=qrels,
        grade=grade,
        by=columns.get("query_id"),
        doc=columns.get("doc_id", "doc_id"),
        grade_map=parse_map(grade_map, "--map"),
        duplicates=duplicates,
        grades=grades,
        allow_partial=allow_partial,
        resamples=resamples,
        seed=seed,
    )
    maps = label_maps_of(label_maps, labels)
    with names_column_options():
        combined = combine_labels(labels, to, by, judging, storage, label_maps=maps)
    return emit(combined, output)


@click.command(epilog="Example: relabel merge out/monday out/tuesday --to out/week")
@click.argument("outputs", nargs=-1, required=True, metavar="OUTPUT...")
@click.option("--to", required=True, metavar="FOLDER", help="Where the merged output goes; a folder of its own.")
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the merged output.  [default: the runs' own if all share one, else FOLDER's]",
)
@click.option(
    "--allow-mixed",
    is_flag=True,
    help="Merge also what different engines, models or templates made; the manifest says so.",
)
@output_option
def merge(outputs: tuple[str, ...], to: str, name: str | None, allow_mixed: bool, output: str) -> int:
    """Join outputs that were made in one way into one that reads like any other.

    OUTPUTs are finished runs over different inputs, or parts of one run whose shards were done in different places. Row
    ids are counted on through the inputs in the order given. Outputs of different engines, models or templates are
    refused (exit 5) with what differs. The same command again continues where it was stopped, and follows OUTPUTs that
    were retried or redone since.
    """
    # with the run loop, which no other command here needs
    from relabel.jobs.merge import MergeResult, merge_outputs, repeated_labels

    manifest, was_written_now = merge_outputs(
        outputs,
        to,
        Storage(),
        name=name,
        allow_mixed=allow_mixed,
    )
    result = MergeResult(
        output=to,
        outputs=list(outputs),
        manifest=manifest,
        was_written_now=was_written_now,
        repeated_labels=repeated_labels(to, Storage()),
    )
    return emit(result, output, result.code)


@click.command(epilog="Example: relabel convert out/ecom ecom.qrels")
@click.argument("source")
@click.argument("target", metavar="TARGET")
@click.option(
    "--from",
    "from_format",
    type=click.Choice([LABELS, *(form.name for form in FORMS)]),
    help="Form of SOURCE.  [default: by its suffix, or what it names; a folder with a plan is labels]",
)
@click.option(
    "--to",
    "to_format",
    type=click.Choice([form.name for form in WRITABLE]),
    help="Form of TARGET.  [default: by its suffix]",
)
@click.option(
    "--by",
    default="query_id",
    show_default=True,
    metavar="COL",
    help="Query column of a table.",
)
@click.option(
    "--doc",
    default="doc_id",
    show_default=True,
    metavar="COL",
    help="Document column of a table.",
)
@click.option(
    "--query",
    default="query",
    show_default=True,
    metavar="COL",
    help="Column of a query's text, for targets that hold it.",
)
@click.option(
    "--queries",
    metavar="FILE",
    help="Table of query ids and texts, for a source with ids and a target with texts, or the other way round.",
)
@click.option("--index", metavar="NAME", help="Index of the documents, for rank_eval and rre.")
@click.option(
    "--template",
    metavar="FILE",
    help="Search request as JSON: rank_eval puts each query's text in place of {{query}}; rre names the file.",
)
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
@click.option("--card", is_flag=True, help="Of a run: also README.md next to TARGET, the card of a data set.")
@click.option("--allow-partial", is_flag=True, help="Take a run that is not finished or is over its quarantine limit.")
@click.option("--force", is_flag=True, help="Replace TARGET if it is there.")
@output_option
@sigterm_ends()
def convert(source: str, target: str, output: str, **values: Any) -> int:
    """Turn labels into TREC files, judgments of search tools and tables, and these into each other.

    SOURCE is a finished run's output, TREC qrels (qid 0 docid grade), a TREC run file (qid Q0 docid rank score tag),
    judgments of OpenSearch, _rank_eval, Quepid or RRE, or a table (JSONL, Parquet, CSV, TSV); TARGET any of these but a
    run's output. Rows without a grade (or score) are left out and counted, never written as 0. Both may be
    URLs.
    """
    converted = convert_file(source, target, ConvertOptions(**values), Storage())
    for note in converted.notes:
        logs.write(f"{note}.", event="convert")
    return emit(converted, output)
