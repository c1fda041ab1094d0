"""`evaluate`: labels beside gold grades, and students beside their teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relabel.jobs import log_format
from relabel.jobs.commands.options import duplicates_option, grade_map_option, grade_option, output_option, side_option
from relabel.jobs.output import emit
from relabel.manifests.storage.context import Storage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from relabel.jobs.evaluate.judged_options import JudgingOptions
    from relabel.manifests.metrics.gates import Gate, GateVerdict


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
@click.option(
    "--grades",
    type=click.IntRange(2, 10),
    metavar="K",
    help="Grades on the scale, where neither a run nor distributions tell.",
)
@grade_map_option
@click.option(
    "--map-labels", "label_map", metavar="OLD=NEW,...", help="Bring labels, samples and distributions to another scale."
)
@duplicates_option("grades in the qrels")
@click.option(
    "--calibrate",
    type=click.Choice(["temperature", "isotonic"]),
    help="Fit on half the queries, show the other half before and after.",
)
@click.option(
    "--resamples",
    type=click.IntRange(0, 100_000),
    default=1000,
    show_default=True,
    help="Bootstrap resamples; 0 for no intervals.",
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Of resamples and split.")
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
    calibrate: Any,
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

    from relabel.jobs.evaluate.judged_options import JudgingOptions
    from relabel.manifests.judging.qrels import parse_map
    from relabel.manifests.metrics.gates import parse_flag

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
    if len(labels) == 1 or pool:
        if qrels is None:
            raise click.UsageError(
                "Missing option '--qrels'. One set is judged by gold; give a second set to compare it with."
            )
        return _judge(labels, options, gates, calibrate, resamples, seed, output)
    if options.pass_at and qrels is None:
        raise click.UsageError("--pass-at: samples are judged by gold. Name them with --qrels.")
    if calibrate is not None:
        raise click.UsageError(
            "--calibrate fits one set of labels. Judge them one at a time, or as one set with --pool."
        )
    return _compare(labels, options, gates, resamples, seed, output)


def _judge(
    labels: tuple[str, ...],
    options: JudgingOptions,
    gates: list[Gate],
    calibrate: Any,
    resamples: int,
    seed: int,
    output: str,
) -> int:
    """One set, or several as one, by gold grades."""
    from relabel.jobs.evaluate.judging import judged_labels
    from relabel.jobs.evaluate.text import evaluation_text
    from relabel.manifests.records import plain

    found = judged_labels(labels, options, gates, Storage(), resamples=resamples, seed=seed, calibrate=calibrate)
    emit(plain(found), evaluation_text(found), output)
    _say_refused(found.gates)
    return found.exit_code


def _compare(
    labels: tuple[str, ...], options: JudgingOptions, gates: list[Gate], resamples: int, seed: int, output: str
) -> int:
    """Every other set beside the teacher's."""
    from relabel.jobs.evaluate.comparing import compare_sets
    from relabel.jobs.evaluate.comparison_text import comparison_text
    from relabel.manifests.records import plain

    found = compare_sets(labels, options, gates, Storage(), resamples=resamples, seed=seed)
    emit(plain(found), comparison_text(found), output)
    _say_refused(verdict for comparison in found.comparisons for verdict in comparison.gates)
    return found.exit_code


def _say_refused(verdicts: Iterable[GateVerdict]) -> None:
    """Say on stderr which gates refused."""
    for verdict in verdicts:
        if not verdict.has_passed:
            log_format.say(f"gate {verdict}.", level="error", event="gate", **verdict.plain())


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
