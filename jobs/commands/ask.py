"""`ask`: a row or a few put to the model, with all that is asked and answered in full."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from relabel.jobs import ask_text
from relabel.jobs.ask import AskedRows, Asker, RowChoice, render
from relabel.jobs.ask_text import again_on_change
from relabel.jobs.commands.options import date_option, job_options, output_option, sigterm_ends
from relabel.jobs.exits import Exit
from relabel.jobs.job import Job, load_job
from relabel.jobs.output import emit, note
from relabel.jobs.run.results import engine_text
from relabel.jobs.run.reuse import kept_answers
from relabel.manifests.errors import UsageError
from relabel.manifests.plan import plan_to_read
from relabel.manifests.records import plain
from relabel.manifests.run import RunFolder
from relabel.manifests.secrets import counted, redacted
from relabel.manifests.store import open_run_store


@click.command(epilog="Example: relabel ask job.yaml --row 3")
@job_options
@click.option("--row", type=click.IntRange(min=0), metavar="N", help="The row of this number, from 0. Default: 0.")
@click.option("--query-id", metavar="ID", help="All rows of this query.")
@click.option("--random", type=click.IntRange(min=1), metavar="N", help="N rows, drawn by --seed.")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Of --random.")
@click.option("--stage", metavar="NAME", help="Show the asks of this stage alone.")
@click.option(
    "--refused",
    "is_refused",
    is_flag=True,
    help="Show the unreadable answers that a stopped run kept of unfinished chunks, of all rows or --row; ask nothing.",
)
@click.option("--dry-run", is_flag=True, help="Show the first prompt of each row; load no model.")
@click.option(
    "--edit-prompt",
    "edited",
    metavar="DIR",
    help="Take the templates of this folder, and ask again whenever one is changed, until Ctrl-C.",
)
@date_option
@output_option
def ask(
    job_file: str,
    overrides: tuple[str, ...],
    row: int | None,
    query_id: str | None,
    random: int | None,
    seed: int,
    stage: str | None,
    is_refused: bool,
    dry_run: bool,
    edited: str | None,
    day: str | None,
    output: str,
) -> int:
    """Ask the model about a row and show it all: prompts, raw answers, distributions, the label or why there is none.

    What is asked is what `relabel run` would ask, with the same seeds and as many attempts. Nothing is written, and no
    output needs to be there. A labeler that sees whole queries is given all rows of the query. `relabel templates
    export` writes the templates for --edit-prompt; the model stays loaded between two of their versions.
    """
    if sum(one is not None for one in (row, query_id, random)) > 1:
        raise UsageError("--row, --query-id, --random: give one of them.")
    if output == "json" and edited is not None:
        raise UsageError("--edit-prompt is for a person: leave out --output json.")
    if is_refused and (query_id is not None or random is not None):
        raise UsageError("--refused: shows all that was kept, or that of one --row.")
    choice = RowChoice(row, query_id, random, seed)
    job = load_job(job_file, overrides=overrides, day=day)
    if stage is not None:
        stages = list(dict.fromkeys(one.stage for one in job.labeler.probe()))
        if stage not in stages:
            raise UsageError(
                f"--stage {stage}: {job.spec.labeler.name} has none of that name; it has {', '.join(stages)}."
            )
    if is_refused:
        return _show_refused(job, row, stage, output)
    if edited is not None and not Path(edited).is_dir():
        raise UsageError(
            f"--edit-prompt {edited}: no such folder. `relabel templates export {job.spec.labeler.name} {edited}` "
            "makes it."
        )
    with sigterm_ends(), Asker() as asker:

        def put(job: Job) -> None:
            started = time.perf_counter()
            found: list[AskedRows] = []
            for asked in render(job, choice) if dry_run else asker.ask(job, choice):
                if not found and (facts := asker.facts()) is not None:
                    note(engine_text(job.spec.labeler.name, facts))
                for remark in asked.remarks:
                    note(remark)
                if output == "text":
                    click.echo(("" if found else f"{ask_text.LEGEND}\n") + ask_text.asked_text(asked, stage))
                found.append(asked)
            _conclude(found, stage, output, is_dry=dry_run, seconds=round(time.perf_counter() - started, 3))

        if edited is None:
            put(job)
        else:
            overrides = (*overrides, f"labeler.templates={json.dumps(edited)}")
            again_on_change(Path(edited), lambda: put(load_job(job_file, overrides=overrides, day=day)))
    return Exit.DONE


def _show_refused(job: Job, row: int | None, stage: str | None, output: str) -> int:
    store = open_run_store(job.spec.output, job.storage)
    plan = plan_to_read(store)
    found = [] if plan is None else list(kept_answers(RunFolder(store, plan)))
    found = [one for one in found if row in (None, one.row_id) and stage in (None, one.stage)]
    lines = [*map(ask_text.refused_text, found), f"{len(found):,} refused answers of unfinished chunks were kept."]
    return emit({"refused": [plain(one) for one in found]}, redacted("\n".join(lines)), output)


def _conclude(found: list[AskedRows], stage: str | None, output: str, *, is_dry: bool, seconds: float) -> None:
    stages = {one.ask.stage for asked in found for one in asked.exchanges}
    if stage is not None and stages and stage not in stages:
        when = "is asked first: a dry run has no answers to go on from" if is_dry else "was asked"
        note(f"--stage {stage}: nothing of that name {when}; there was {', '.join(sorted(stages))}")
    result = {"asked": [ask_text.rows_json(one, stage) for one in found], "dry_run": is_dry, "seconds": seconds}
    num_rows, num_asks = sum(len(one.rows) for one in found), sum(len(one.exchanges) for one in found)
    how = "would be asked first" if is_dry else f"in {seconds:.1f} s"
    emit(result, f"{counted(num_rows, 'row')}, {counted(num_asks, 'ask')} {how}; nothing was written.", output)
