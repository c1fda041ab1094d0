"""`ask`: a row or a few put to the model, with all that is asked and answered in full."""

from __future__ import annotations

import time

import click

from jobs.asking import ask_text
from jobs.asking.asking import AskedRows, RowChoice, ask_rows, render
from jobs.asking.listening import HeardAsk
from jobs.commands.ending import sigterm_ends
from jobs.commands.options import date_option, job_options, output_option
from jobs.exits import Exit
from jobs.output import emit, note
from jobs.planning.job_files import Job, load_job
from jobs.running.run_text import engine_text
from manifests.asks import EngineFacts
from manifests.errors import UsageError
from manifests.labels import Pair


@click.command(epilog="Example: relabel ask job.yaml --row 3")
@job_options
@click.option("--row", type=click.IntRange(min=0), metavar="N", help="The row of this number, from 0. Default: 0.")
@click.option("--query-id", metavar="ID", help="All rows of this query.")
@click.option("--random", type=click.IntRange(min=1), metavar="N", help="N rows, drawn by --seed.")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Of --random.")
@click.option("--stage", metavar="NAME", help="Show the asks of this stage alone.")
@click.option("--dry-run", is_flag=True, help="Show the first prompt of each row; load no model.")
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
    dry_run: bool,
    day: str | None,
    output: str,
) -> int:
    """Ask the model about a row and show it all: prompts, raw answers, distributions, the label or why there is none.

    What is asked is what `relabel run` would ask, with the same seeds and as many attempts. Nothing is written, and no
    output needs to be there. A labeler that sees whole queries is given all rows of the query.
    """
    if sum(one is not None for one in (row, query_id, random)) > 1:
        raise UsageError("--row, --query-id, --random: give one of them.")
    started = time.perf_counter()
    choice = RowChoice(row, query_id, random, seed)
    job = load_job(job_file, overrides=overrides, day=day)
    shows = output == "text"
    with sigterm_ends():
        found = _rendered(job, choice, stage, shows) if dry_run else _asked(job, choice, stage, shows)
    stages = {one.ask.stage for asked in found for one in asked.exchanges}
    if stage is not None and stages and stage not in stages:
        note(f"--stage {stage}: nothing of that name was asked; there was {', '.join(sorted(stages))}")
    seconds = round(time.perf_counter() - started, 3)
    result = {"asked": [ask_text.rows_json(one, stage) for one in found], "dry_run": dry_run, "seconds": seconds}
    num_rows, num_asks = (
        sum(map(len, held)) for held in zip(*((one.rows, one.exchanges) for one in found), strict=True)
    )
    verb = "would be asked first" if dry_run else "asked"
    emit(result, f"{num_rows:,} rows, {num_asks:,} asks {verb} in {seconds:.1f} s; nothing was written.", output)
    return Exit.DONE


def _rendered(job: Job, choice: RowChoice, stage: str | None, shows: bool) -> list[AskedRows]:
    found = []
    for asked in render(job, choice):
        found.append(asked)
        if shows:
            _say_rows(asked.pairs, is_first=len(found) == 1)
            for one in asked.exchanges:
                _say_exchange(one, stage)
        for remark in asked.remarks:
            note(remark)
    return found


def _asked(job: Job, choice: RowChoice, stage: str | None, shows: bool) -> list[AskedRows]:
    def announce(facts: EngineFacts, remarks: list[str]) -> None:
        note(engine_text(job.spec.labeler.name, facts))
        for remark in remarks:
            note(remark)

    def begins(pairs: list[Pair]) -> None:
        if shows:
            _say_rows(pairs, is_first=not found)

    def heard(exchange: HeardAsk) -> None:
        if shows:
            _say_exchange(exchange, stage)

    found: list[AskedRows] = []
    for asked in ask_rows(job, choice, on_engine=announce, on_rows=begins, heard=heard):
        found.append(asked)
        for row in asked.rows if shows else ():
            if row is not None:
                click.echo(ask_text.outcome_text(row) + "\n")
    return found


def _say_rows(pairs: list[Pair], *, is_first: bool) -> None:
    if is_first:
        click.echo(ask_text.LEGEND)
    for pair in pairs:
        click.echo(ask_text.head_of(pair))


def _say_exchange(exchange: HeardAsk, stage: str | None) -> None:
    if stage is None or stage == exchange.ask.stage:
        text = ask_text.ask_text(exchange.ask) if exchange.answer is None else ask_text.answer_text(exchange)
        click.echo(text)
