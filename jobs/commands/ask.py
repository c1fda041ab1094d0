"""`ask`: a row or a few put to the model, with all that is asked and answered in full."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from relabel.jobs.ask import AskedRows, Asker, Exchange, RowChoice, render
from relabel.jobs.commands.options import date_option, job_options, output_option, sigterm_ends
from relabel.jobs.exits import Exit
from relabel.jobs.job import Job, load_job
from relabel.jobs.output import emit, note, shown
from relabel.jobs.run.results import engine_text
from relabel.manifests.asks import Answer, Ask, Message
from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.records import plain
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.secrets import counted, one_line


@click.command(epilog="Example: relabel ask job.yaml --row 3")
@job_options
@click.option("--row", type=click.IntRange(min=0), metavar="N", help="The row of this number, from 0. Default: 0.")
@click.option("--query-id", metavar="ID", help="All rows of this query.")
@click.option("--random", type=click.IntRange(min=1), metavar="N", help="N rows, drawn by --seed.")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Of --random.")
@click.option("--stage", metavar="NAME", help="Show the asks of this stage alone.")
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
    choice = RowChoice(row, query_id, random, seed)
    job = load_job(job_file, overrides=overrides, day=day)
    if stage is not None:
        stages = list(dict.fromkeys(one.stage for one in job.labeler.probe()))
        if stage not in stages:
            raise UsageError(
                f"--stage {stage}: {job.spec.labeler.name} has none of that name; it has {', '.join(stages)}."
            )
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
                    click.echo(("" if found else f"{LEGEND}\n") + asked_text(asked, stage))
                found.append(asked)
            _conclude(found, stage, output, is_dry=dry_run, seconds=round(time.perf_counter() - started, 3))

        if edited is None:
            put(job)
        else:
            overrides = (*overrides, f"labeler.templates={json.dumps(edited)}")
            again_on_change(Path(edited), lambda: put(load_job(job_file, overrides=overrides, day=day)))
    return Exit.DONE


def _conclude(found: list[AskedRows], stage: str | None, output: str, *, is_dry: bool, seconds: float) -> None:
    stages = {one.ask.stage for asked in found for one in asked.exchanges}
    if stage is not None and stages and stage not in stages:
        when = "is asked first: a dry run has no answers to go on from" if is_dry else "was asked"
        note(f"--stage {stage}: nothing of that name {when}; there was {', '.join(sorted(stages))}")
    result = {"asked": [rows_json(one, stage) for one in found], "dry_run": is_dry, "seconds": seconds}
    num_rows, num_asks = sum(len(one.rows) for one in found), sum(len(one.exchanges) for one in found)
    how = "would be asked first" if is_dry else f"in {seconds:.1f} s"
    emit(result, f"{counted(num_rows, 'row')}, {counted(num_asks, 'ask')} {how}; nothing was written.", output)


# ------------------------------------------------------------------------------
# What is shown.

LEGEND = "⟦ ⟧ holds what the data says; all else is the template."
_MARKS = {ord(mark): mark.encode("unicode_escape").decode() for mark in "⟦⟧"}
"""In the data they are spelled, so that no document ends where it does not."""
_CUT = "the end of the document above was cut off before it was asked: too long for model or max_prompt_tokens"
"""What is on the screen is the whole ask; an engine cuts its tokens."""
_LEFT_OUT = {"row_id", "query_id", "doc_id", "key", "origin", "reused", "columns", "prompt_tokens", "output_tokens"}
"""Columns of a label that say nothing of what the model wrote."""


def asked_text(asked: AskedRows, stage: str | None) -> str:
    """All that was asked and answered about some rows, and their labels.

    Args:
        stage: the only one whose asks are shown; None for all.
    """
    lines = [
        click.style(f"row {pair.row_id} · query {shown(pair.query_id)} · document {shown(pair.doc_id)}", bold=True)
        for pair in asked.pairs
    ]
    above = ""
    for exchange in asked.exchanges:
        if stage in (None, exchange.ask.stage):
            prompt = _prompt_text(exchange)
            lines += _ask_lines(exchange, prompt, above)
            lines += [] if exchange.answer is None else _answer_lines(exchange, exchange.answer)
            above = prompt
    return "\n".join([*lines, *(outcome_text(row) + "\n" for row in asked.rows if row is not None)])


def _ask_lines(exchange: Exchange, prompt: str, above: str) -> Iterator[str]:
    """The prompt as the model reads it; what it shares with the one above is left out."""
    yield ruler(f"{exchange.ask.stage}: asked")
    if above and prompt.startswith(above):
        is_same = prompt == above
        yield click.style("the prompt above, with another seed" if is_same else "the turns above, then", dim=True)
        prompt = prompt[len(above) :].removeprefix("\n")
    if prompt:
        yield prompt
    if exchange.ask.prefill and exchange.prompt is None:
        yield click.style("the answer begins with", dim=True)
        yield shown(exchange.ask.prefill)


def _prompt_text(exchange: Exchange) -> str:
    """The whole prompt with its data marked; where a server builds it, turn by turn."""
    if exchange.prompt is not None:
        return _marked(exchange.prompt)
    return "\n".join(f"{click.style(one.role, dim=True)}\n{_marked(one.parts)}" for one in exchange.ask.messages)


def _answer_lines(exchange: Exchange, answer: Answer) -> Iterator[str]:
    """The answer, how sure the model was at each decision, and the tokens and seconds it took."""
    tokens = f"{answer.prompt_tokens:,} + {answer.output_tokens:,} tokens"
    yield ruler(f"{exchange.ask.stage}: answered ({answer.finish}, {tokens}, {exchange.seconds:.1f} s)")
    if "document_truncated" in answer.flags:
        yield _CUT
    yield from (shown(text) for text in (answer.text, answer.detail) if text)
    if answer.raw:
        yield click.style("as it came", dim=True)
        yield shown(answer.raw)
    yield from _distributions(exchange.ask, answer)


def outcome_text(row: LabelRow | QuarantineRow) -> str:
    """The label, or why there is none."""
    if isinstance(row, QuarantineRow):
        lines = [ruler(f"row {row.row_id}: no label, quarantined as {row.status}"), shown(row.reason)]
        for one in row.tries:
            lines.append(f"  {one['stage']}, attempt {one['attempt']}: {shown(one['reason'] or one['finish'])}")
        return "\n".join(lines)
    held = {name: value for name, value in _label(row).items() if value not in (None, [], {})}
    width = max(map(len, held))
    values = (f"  {name.ljust(width)}  {shown(_value_text(value))}" for name, value in held.items())
    return "\n".join([ruler(f"row {row.row_id}: label"), *values])


def rows_json(asked: AskedRows, stage: str | None) -> dict[str, Any]:
    """The same as one JSON object."""
    return {
        "rows": [
            {"row_id": pair.row_id, "query_id": pair.query_id, "doc_id": pair.doc_id, **_outcome(row)}
            for pair, row in zip(asked.pairs, asked.rows, strict=True)
        ],
        "asks": [_exchange(one) for one in asked.exchanges if stage in (None, one.ask.stage)],
        "remarks": asked.remarks,
    }


def _outcome(row: LabelRow | QuarantineRow | None) -> dict[str, Any]:
    if row is None:
        return {}
    if isinstance(row, LabelRow):
        return {"label": _label(row)}
    return {"refused": {"status": row.status, "reason": row.reason, "tries": row.tries}}


def _label(row: LabelRow) -> dict[str, Any]:
    held = {name: value for name, value in row._asdict().items() if name not in _LEFT_OUT}
    found: dict[str, Any] = plain({**held, **row.columns})
    return found


def _exchange(exchange: Exchange) -> dict[str, Any]:
    ask, answer = exchange.ask, exchange.answer
    said = None
    if answer is not None:
        distributions = {name: plain(one._asdict()) for name, one in answer.distributions.items()}
        said = {
            "text": answer.text,
            "raw": answer.raw or answer.text,
            "finish": answer.finish,
            "detail": answer.detail,
            "flags": list(answer.flags),
            "distributions": distributions,
            "prompt_tokens": answer.prompt_tokens,
            "output_tokens": answer.output_tokens,
            "seconds": round(exchange.seconds, 3),
        }
    turns = [{"role": one.role, "parts": [*_parts(one)]} for one in ask.messages]
    return {
        "stage": ask.stage,
        "messages": turns,
        "prefill": ask.prefill,
        "rendered": None if exchange.prompt is None else "".join(exchange.prompt),
        "max_tokens": ask.max_tokens,
        "answer": said,
    }


def _parts(message: Message) -> Iterator[dict[str, str | None]]:
    fields = iter(message.fields)
    for place, text in enumerate(message.parts):
        field = next(fields) if place % 2 else None
        if text or field:
            yield {"field": field, "text": text}


def _marked(parts: Sequence[str]) -> str:
    return "".join(
        click.style(f"⟦{shown(text).translate(_MARKS)}⟧", fg="cyan") if place % 2 else shown(text)
        for place, text in enumerate(parts)
    )


def _distributions(ask: Ask, answer: Answer) -> Iterator[str]:
    for decision in ask.decisions:
        found = answer.distributions.get(decision.name)
        if found is None:
            yield f"  {decision.name}: no distribution"
            continue
        pairs = zip(decision.labels, found.probs, strict=True)
        probs = " · ".join(f"{shown(label)} {prob:.3f}" for label, prob in pairs)
        yield f"  {decision.name}: {probs} · outside these {found.outside_mass:.3f}"


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"[{', '.join(map(_value_text, value))}]" if isinstance(value, list) else str(value)


def ruler(title: str) -> str:
    """A line with a title."""
    return click.style(f"── {title} ".ljust(80, "─"), dim=True)


CHECK_EVERY_S = 0.25
"""Between two reads of the files, seconds; a change counts once two reads in a row find the same."""


def again_on_change(folder: Path, do: Callable[[], None], *, pause: Callable[[float], None] = time.sleep) -> NoReturn:
    """Do it, wait until a file is changed, added or removed, do it again, until Ctrl-C.

    Args:
        do: a ConfigError that it raises for a template is reported, and the next change is waited for.
    """
    seen = _contents(folder)
    while True:
        try:
            do()
        except ConfigError as exc:
            click.echo(one_line(f"relabel: {exc}"), err=True)
        note(f"{folder} is watched: a change there asks again, Ctrl-C ends.")
        found = _next_contents(folder, seen, pause)
        names = sorted(name for name in {*seen, *found} if seen.get(name) != found.get(name))
        note(f"changed: {', '.join(names)}")
        seen = found


def _next_contents(folder: Path, seen: dict[str, bytes], pause: Callable[[float], None]) -> dict[str, bytes]:
    before, found = seen, seen
    while found == seen or found != before:  # an editor may write a file in several steps
        pause(CHECK_EVERY_S)
        before, found = found, _contents(folder)
    return found


def _contents(folder: Path) -> dict[str, bytes]:
    found = {}
    with contextlib.suppress(OSError):  # a folder that is gone holds nothing, and the job says so
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.suffix == ".j2" and not path.name.startswith("."):
                    found[path.name] = path.read_bytes()
    return found
