"""`convert`: labels, qrels, run files, JSONL and Parquet into each other; labels of `route` into trajectories."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs import logs
from relabel.jobs.commands.options import output_option, sigterm_ends
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, table
from relabel.manifests.files import Storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from relabel.jobs.convert.conversion import Conversion
    from relabel.jobs.convert.trajectories import TrajectoryConversion


@click.command(epilog="Example: relabel convert out/ecom ecom.qrels")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
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
    type=click.Choice(["qrels", "run", "jsonl", "parquet", "trajectories"]),
    help="Form of TARGET.  [default: by its suffix; trajectories.jsonl is trajectories]",
)
@click.option("--by", default="query_id", show_default=True, metavar="COL", help="Query column of a table or of gold.")
@click.option(
    "--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of a table or of gold."
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
@click.option(
    "--gold",
    metavar="FILE",
    help="Trajectories: keep labels whose nodes are those of gold_answer_ids (and gold_expand_ids).",
)
@click.option(
    "--agree",
    type=click.IntRange(1),
    metavar="K",
    help="Trajectories: keep labels whose nodes K of the SOURCEs answer with.  [default: more than half]",
)
@click.option("--texts", is_flag=True, help="Of a run: add its query, document and gold.")
@click.option("--allow-partial", is_flag=True, help="Take a run that is not finished or is over its quarantine limit.")
@click.option("--force", is_flag=True, help="Replace TARGET if it is there.")
@output_option
@sigterm_ends()
def convert(
    sources: tuple[str, ...],
    target: str,
    from_format: str | None,
    to_format: str | None,
    by: str,
    doc: str,
    grade: str | None,
    score: str | None,
    tag: str | None,
    duplicates: Any,
    gold: str | None,
    agree: int | None,
    texts: bool,
    allow_partial: bool,
    force: bool,
    output: str,
) -> int:
    """Turn labels into TREC files and tables, and these into each other; labels of `route` into trajectories.

    SOURCE is a finished run's output, TREC qrels (qid 0 docid grade), a TREC run file (qid Q0 docid rank score tag),
    JSONL or Parquet; TARGET any of these but a run's output. Rows without a grade (or score) are left out and counted,
    never written as 0. Both may be URLs.

    Trajectories are chats to train a router on, of one run and --gold, or of several runs that --agree: a JSON object
    a line for each prompt that was asked, in TRL's form of prompt and completion.
    """
    from relabel.jobs.convert.formats import is_trajectories

    started, storage = time.perf_counter(), Storage()
    if is_trajectories(target, to_format):
        from relabel.jobs.convert.trajectories import Acceptance, convert_trajectories

        odd = {
            "--from": from_format not in (None, "labels"),
            "--grade": grade,
            "--score": score,
            "--tag": tag,
            "--texts": texts,
        }
        _refuse({**odd, "--duplicates": duplicates != "error"}, "has no part in trajectories, which are of runs")
        acceptance = Acceptance(gold, by, doc, agree)
        _say_trajectories(
            convert_trajectories(sources, target, storage, acceptance, allow_partial=allow_partial, force=force),
            started,
            output,
        )
        return Exit.DONE
    _refuse({"--gold": gold, "--agree": agree}, "chooses among trajectories. Write --to trajectories for these")
    if len(sources) > 1:
        raise click.UsageError(f"{len(sources)} sources: several become trajectories alone (--to trajectories).")
    from relabel.jobs.convert.conversion import convert as convert_file
    from relabel.jobs.convert.sources import Options

    found = convert_file(
        sources[0],
        target,
        storage,
        from_format=from_format,
        to_format=to_format,
        options=Options(by, doc, grade, score, allow_partial, texts),
        duplicates=duplicates,
        tag=tag,
        force=force,
    )
    _say_table(found, started, output)
    return Exit.DONE


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Refuse options that were given and mean nothing here."""
    for name, value in options.items():
        if value:
            raise click.UsageError(f"{name} {why}.")


def _say_table(found: Conversion, started: float, output: str) -> None:
    kind = "score" if found.target_format == "run" or "score" in found.value else "grade"
    _say_left_out(
        found.notes,
        {
            "rows of the run are in quarantine: they have no label": found.quarantined,
            f"rows without a {kind} (column {found.value}) left out": found.nulls,
            f"rows beyond the first of their pair left out; {found.conflicts:,} pairs had several {kind}s": (
                found.duplicates
            ),
        },
    )
    if found.rows and not found.written:
        _say(f"nothing is left to write: no row has a {kind}. Another column may have it: --{kind}.")
    lines = [("rows", f"{found.rows:,} of {found.source} ({found.source_format})"), (kind, f"column {found.value}")]
    lines += [("left out", f"{found.nulls:,} without a {kind}, {found.duplicates:,} beyond the first of their pair")]
    if found.source_format == "labels":
        lines.append(("quarantined", f"{found.quarantined:,}, which have no label"))
    text = f"Wrote {found.written:,} rows to {found.target} ({found.target_format})\n" + table(lines)
    emit({**asdict(found), "seconds": _seconds(started)}, text, output)


def _say_trajectories(found: TrajectoryConversion, started: float, output: str) -> None:
    from relabel.jobs.convert.trajectories import REASONS

    left_out = {f"{REASONS[reason]}, left out": count for reason, count in found.left_out.items()}
    quarantine = {"rows of the runs are in quarantine: they have no label": found.quarantined}
    _say_left_out(found.notes, quarantine | left_out)
    if not found.written:
        _say("nothing is left to write: no label was kept.")
    lines = [("labels", f"{found.labels:,} of {', '.join(found.sources)}; {found.kept:,} kept")]
    if found.gold is not None:
        lines.append(("gold", found.gold))
    if found.agree is not None:
        lines.append(("agree", f"at least {found.agree} of {len(found.sources)} runs"))
    text = f"Wrote {found.written:,} steps to {found.target} ({found.target_format})\n" + table(lines)
    emit({**asdict(found), "seconds": _seconds(started)}, text, output)


def _say_left_out(notes: Iterable[str], counts: Mapping[str, int]) -> None:
    for note in notes:
        _say(f"{note}.")
    for what, count in counts.items():
        if count:
            _say(f"{count:,} {what}.")


def _seconds(started: float) -> float:
    return round(time.perf_counter() - started, 3)


def _say(text: str) -> None:
    logs.say(text, level="info", event="convert")
