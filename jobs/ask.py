"""`ask`: rows put to the model as a run would, with all that is asked and answered in full. Writes no labels."""

import contextlib
import itertools
import json
import random
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import click

from relabel.jobs.commands.options import date_option, job_options, output_option, sigterm_ends
from relabel.jobs.job import Job, load_job, options_begun_with, start_engine
from relabel.jobs.output import Exit, Printed, TextResult, emit, note, shown, value_text
from relabel.jobs.run.loop import ask_unwritten
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.report import engine_text
from relabel.manifests.asks import Answer, Ask, Engine, Message, Request
from relabel.manifests.errors import (
    ConfigError,
    FailureStatus,
    InputError,
    MissingExtraError,
    ModelError,
    UsageError,
    VerdictError,
)
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import load_plan
from relabel.manifests.records import plain
from relabel.manifests.rows import pairs_by_number, rows_of_queries
from relabel.manifests.secrets import counted, one_line
from relabel.manifests.store import open_run_store


@dataclass(slots=True)
class Exchange:
    """An ask and its answer.

    Args:
        answer: None in a dry run.
        seconds: from the ask to the answer, waiting included.
        prompt: as the model reads it, template text and data in turn; None where that is not known here.
    """

    ask: Ask
    answer: Answer | None = None
    seconds: float = 0.0
    prompt: list[str] | None = None


class RecordingEngine:
    """Passes everything on to an engine and records what is asked and answered in `exchanges`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[int, tuple[Exchange, float]] = {}
        self.exchanges: list[Exchange] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        exchange = Exchange(request.ask, prompt=self._engine.rendered(request.ask))
        self._open[request.id] = exchange, time.perf_counter()
        self.exchanges.append(exchange)
        self._engine.submit(request)

    def poll(self) -> list[Answer]:
        answers = self._engine.poll()
        for answer in answers:
            if answer.request_id in self._open:
                exchange, started_s = self._open.pop(answer.request_id)
                exchange.answer = answer
                exchange.seconds = time.perf_counter() - started_s
        return answers


class RowChoice(NamedTuple):
    """Which rows: some by their numbers, those of some queries, or some drawn by a seed; without any the first."""

    rows: tuple[int, ...] = ()
    query_ids: tuple[str, ...] = ()
    random: int | None = None
    seed: int = 7


@dataclass(slots=True)
class AskedRows:
    """Rows that were asked together: those of one query where the labeler sees whole queries, else one.

    Args:
        pairs: the rows that were chosen.
        exchanges: in the order in which they were asked; the asks of a query's other rows too.
        rows: of each pair its label, or why it has none; None where nothing was asked.
        remarks: of the engine, and why a row could not be asked at all.
    """

    pairs: list[Pair]
    exchanges: list[Exchange] = field(default_factory=list)
    rows: list[LabelRow | QuarantineRow | None] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Asked(Printed, list[AskedRows]):
    """What `relabel.ask` returns: a record for each row, or for each query. It is shown as by the command."""

    @property
    def rows(self) -> list[LabelRow | QuarantineRow | None]:
        """The rows of all records, in turn: the label, or why there is none."""
        return [row for asked in self for row in asked.rows]

    @property
    def label(self) -> LabelRow:
        """The label of the one row that was asked.

        Raises:
            InputError: there are several rows, or none.
            VerdictError: the row has no label; says why.
        """
        rows = self.rows
        if len(rows) != 1:
            raise InputError(f"{counted(len(rows), 'row')} were asked: `label` and `grade` are of one. See `rows`.")
        row = rows[0]
        if isinstance(row, QuarantineRow):
            raise VerdictError(cast(FailureStatus, row.status), row.reason)
        if row is None:
            raise InputError("the row could not be asked: " + " ".join(self[0].remarks))
        return row

    @property
    def grade(self) -> int | None:
        """The grade of the one row that was asked; None where its labeler gives none. Raises as `label`."""
        return self.label.grade

    def lines(self) -> list[str]:
        """The result for people."""
        return [asked_text(asked, None) for asked in self]


def chosen_rows(job: Job, choice: RowChoice | Sequence[Pair]) -> Iterator[tuple[list[Pair], set[int]]]:
    """Pairs to ask together, with the numbers of those that were chosen; pairs of the caller's own are asked together.

    Raises:
        ConfigError: the job is a search in rounds.
        InputError: there is no such row, or a file can't be read.
    """
    if not isinstance(choice, RowChoice):
        yield list(choice), {pair.row_id for pair in choice}
        return
    if job.spec.rounds is not None:
        raise ConfigError(
            f"{job.where}: has `rounds`, so that its input holds questions without documents. After `relabel rounds`, "
            f"ask about a round's rows: --set rounds=null --set input.path={job.spec.output}/inputs/round-1"
        )
    dataset = job.open_dataset()
    if not dataset.rows:
        raise InputError("the input has no row.")
    numbers = _numbers(dataset, choice)
    if not dataset.reads.whole_query:
        yield from (([pair], {pair.row_id}) for pair in pairs_by_number(dataset, numbers))
        return
    queries = dict.fromkeys(pair.query_id for pair in pairs_by_number(dataset, numbers))
    for rows in rows_of_queries(dataset, list(queries)).values():
        yield list(pairs_by_number(dataset, rows)), set(rows) & set(numbers)


def _numbers(dataset: Dataset, choice: RowChoice) -> list[int]:
    """Numbers of the chosen rows, ascending.

    Raises:
        InputError: there is no such row.
    """
    known = range(dataset.rows)
    if choice.query_ids:
        by_query = rows_of_queries(dataset, list(dict.fromkeys(choice.query_ids)))
        return sorted(itertools.chain.from_iterable(by_query.values()))
    if choice.random is not None:
        return sorted(random.Random(choice.seed).sample(known, min(choice.random, len(known))))
    rows = sorted(set(choice.rows)) or [0]
    for row in rows:
        if row not in known:
            raise InputError(f"row {row:,}: the input has {len(known):,} rows, numbered from 0 to {known[-1]:,}.")
    return rows


def render(job: Job, choice: RowChoice) -> Iterator[AskedRows]:
    """The first ask of each chosen row, without an engine; later turns depend on answers."""
    encoder = None
    remarks = list[str]()
    try:
        engine = job.at_day_of(load_plan(open_run_store(job.spec.output, job.storage))).spec.engine
        folder = job.template_folder()
        if folder is not None:
            from relabel.labelers.engines.transformers import prompt_encoder

            encoder = prompt_encoder(engine, folder)
    except (ModelError, MissingExtraError) as exc:
        remarks = [f"prompts are shown before the chat template: {exc}"]
    for pairs, chosen in chosen_rows(job, choice):
        asked = AskedRows([pair for pair in pairs if pair.row_id in chosen], remarks=remarks)
        remarks = []
        for pair in asked.pairs:
            conversation = job.labeler.label(pair)
            try:
                ask = next(conversation)
            except VerdictError as exc:
                asked.remarks.append(f"row {pair.row_id} is not asked, it goes to quarantine as {exc}")
                continue
            finally:
                conversation.close()
            if all(ask != exchange.ask for exchange in asked.exchanges):
                prompt = None if encoder is None else encoder.shown(ask)
                asked.exchanges.append(Exchange(ask, prompt=prompt))
        asked.rows = [None] * len(asked.pairs)
        yield asked


class Asker:
    """Asks rows with a job's engine, which is started at the first ask and kept while the job's prompts change."""

    def __init__(self) -> None:
        self.engine: Any = None

    def ask(self, job: Job, choice: RowChoice | Sequence[Pair]) -> Iterator[AskedRows]:
        """Ask the chosen rows, one after the other, as often as a run would.

        Raises:
            InputError: as `chosen_rows`.
            ConfigError: the engine can't ask what the labeler wants.
            ModelError, MissingExtraError, EngineCrashError: as the engine does, or the model can't be fetched.
            ManifestError, StoreError: what an output that is there was begun with can't be read.
        """
        groups = chosen_rows(job, choice)
        first = next(groups)  # a wrong choice is reported before a model is loaded
        if self.engine is None:
            job.fetch_model()
            store = open_run_store(job.spec.output, job.storage)
            started, remarks = start_engine(job.with_args(options_begun_with(job, store)).at_day_of(load_plan(store)))
            self.engine = RecordingEngine(started)
        else:
            remarks = self.engine.prepare(job.labeler.probe())
        for pairs, chosen in itertools.chain([first], groups):
            self.engine.exchanges = []
            rows = ask_unwritten(job, self.engine, pairs, Progress()).rows
            numbers = [number for number, pair in enumerate(pairs) if pair.row_id in chosen]
            yield AskedRows(
                pairs=[pairs[number] for number in numbers],
                exchanges=self.engine.exchanges,
                rows=[rows[number] for number in numbers],
                remarks=remarks,
            )
            remarks = []

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.close()


# ------------------------------------------------------------------------------
# The command.


@click.command(epilog="Example: relabel ask job.yaml --row 3")
@job_options
@click.option(
    "--row",
    "rows",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="The row of this number, from 0. Repeatable. Default: 0.",
)
@click.option(
    "--query-id",
    "query_ids",
    multiple=True,
    metavar="ID",
    help="All rows of this query. Repeatable.",
)
@click.option("--random", type=click.IntRange(min=1), metavar="N", help="N rows, drawn by --seed.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=7,
    show_default=True,
    help="Of --random.",
)
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
    rows: tuple[int, ...],
    query_ids: tuple[str, ...],
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
    if sum([bool(rows), bool(query_ids), random is not None]) > 1:
        raise UsageError("--row, --query-id, --random: give one of them.")
    if output == "json" and edited is not None:
        raise UsageError("--edit-prompt is for a person: leave out --output json.")
    choice = RowChoice(rows, query_ids, random, seed)
    job = load_job(job_file, overrides=overrides, day=day)
    if stage is not None:
        stages = list(dict.fromkeys(ask.stage for ask in job.labeler.probe()))
        if stage not in stages:
            raise UsageError(
                f"--stage {stage}: {job.spec.labeler.name} has none of that name; it has {', '.join(stages)}."
            )
    if edited is not None and not Path(edited).is_dir():
        raise UsageError(
            f"--edit-prompt {edited}: no such folder. `relabel templates export {job.spec.labeler.name} "
            f"{shlex.quote(edited)}` makes it."
        )
    with sigterm_ends(), contextlib.closing(Asker()) as asker:

        def put(job: Job) -> None:
            started = time.perf_counter()
            answered: list[AskedRows] = []
            for asked in render(job, choice) if dry_run else asker.ask(job, choice):
                if not answered and asker.engine is not None:
                    note(engine_text(job.spec.labeler.name, asker.engine.facts()))
                for remark in asked.remarks:
                    note(remark)
                if output == "text":
                    legend = "" if answered else "⟦ ⟧ holds what the data says; all else is the template.\n"
                    click.echo(legend + asked_text(asked, stage))
                answered.append(asked)
            seconds = round(time.perf_counter() - started, 3)
            exchanges = list(itertools.chain.from_iterable(asked.exchanges for asked in answered))
            stages = {exchange.ask.stage for exchange in exchanges}
            if stage is not None and stages and stage not in stages:
                when = "is asked first: a dry run has no answers to go on from" if dry_run else "was asked"
                note(f"--stage {stage}: nothing of that name {when}; there was {', '.join(sorted(stages))}")
            result = {"asked": [rows_json(asked, stage) for asked in answered], "dry_run": dry_run, "seconds": seconds}
            num_rows = sum(len(asked.rows) for asked in answered)
            how = "would be asked first" if dry_run else f"in {seconds:.1f} s"
            text = f"{counted(num_rows, 'row')}, {counted(len(exchanges), 'ask')} {how}; nothing was written."
            emit(TextResult(text, result), output)

        if edited is None:
            put(job)
        else:
            overrides = (*overrides, f"labeler.templates={json.dumps(edited)}")
            again_on_change(Path(edited), lambda: put(load_job(job_file, overrides=overrides, day=day)))
    return Exit.DONE


# ------------------------------------------------------------------------------
# What is shown.

_MARKS = {ord(mark): mark.encode("unicode_escape").decode() for mark in "⟦⟧"}
"""In the data they are spelled, so that no document ends where it does not."""
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
        if stage not in (None, exchange.ask.stage):
            continue
        prompt = _prompt_text(exchange)
        lines += [ruler(f"{exchange.ask.stage}: asked"), *_ask_lines(exchange, prompt, above)]
        if exchange.answer is not None:
            lines += _answer_lines(exchange, exchange.answer)
        above = prompt
    lines += [outcome_text(row) + "\n" for row in asked.rows if row is not None]
    return "\n".join(lines)


def _prompt_text(exchange: Exchange) -> str:
    """As the model reads it; where a server builds it, turn by turn."""
    if exchange.prompt is not None:
        return _marked(exchange.prompt)
    return "\n".join(f"{_dim(message.role)}\n{_marked(message.parts)}" for message in exchange.ask.messages)


def _ask_lines(exchange: Exchange, prompt: str, above: str) -> Iterator[str]:
    """The prompt as the model reads it; what it shares with the one above is left out."""
    if above and prompt.startswith(above):
        yield _dim("the prompt above, with another seed" if prompt == above else "the turns above, then")
        prompt = prompt[len(above) :].removeprefix("\n")
    if prompt:
        yield prompt
    if exchange.ask.prefill and exchange.prompt is None:
        yield f"{_dim('the answer begins with')}\n{shown(exchange.ask.prefill)}"


def _answer_lines(exchange: Exchange, answer: Answer) -> Iterator[str]:
    """The answer, how sure the model was at each decision, and the tokens and seconds it took."""
    tokens = f"{answer.prompt_tokens:,} + {answer.output_tokens:,} tokens"
    yield ruler(f"{exchange.ask.stage}: answered ({answer.finish}, {tokens}, {exchange.seconds:.1f} s)")
    if "document_truncated" in answer.flags:  # on the screen is the whole ask; an engine cuts its tokens
        yield "the end of the document above was cut off before it was asked: too long for model or max_prompt_tokens"
    yield from (shown(text) for text in (answer.text, answer.detail) if text)
    if answer.raw:
        yield f"{_dim('as it came')}\n{shown(answer.raw)}"
    for decision in exchange.ask.decisions:
        distribution = answer.distributions.get(decision.name)
        if distribution is None:
            yield f"  {decision.name}: no distribution"
            continue
        pairs = zip(decision.labels, distribution.probs, strict=True)
        probs = " · ".join(f"{shown(label)} {prob:.3f}" for label, prob in pairs)
        yield f"  {decision.name}: {probs} · outside these {distribution.outside_mass:.3f}"


def outcome_text(row: LabelRow | QuarantineRow) -> str:
    """The label, or why there is none."""
    if isinstance(row, QuarantineRow):
        lines = [ruler(f"row {row.row_id}: no label, quarantined as {row.status}"), shown(row.reason)]
        for attempt in row.tries:
            why = shown(attempt["reason"] or attempt["finish"])
            lines.append(f"  {attempt['stage']}, attempt {attempt['attempt']}: {why}")
        return "\n".join(lines)
    values = {name: value for name, value in _label(row).items() if value not in (None, [], {})}
    width = max(map(len, values))
    lines = [f"  {name.ljust(width)}  {shown(value_text(value))}" for name, value in values.items()]
    return "\n".join([ruler(f"row {row.row_id}: label"), *lines])


def rows_json(asked: AskedRows, stage: str | None) -> dict[str, Any]:
    """The same as one JSON object."""
    return {
        "rows": [
            {"row_id": pair.row_id, "query_id": pair.query_id, "doc_id": pair.doc_id, **_outcome(row)}
            for pair, row in zip(asked.pairs, asked.rows, strict=True)
        ],
        "asks": [_exchange(exchange) for exchange in asked.exchanges if stage in (None, exchange.ask.stage)],
        "remarks": asked.remarks,
    }


def _outcome(row: LabelRow | QuarantineRow | None) -> dict[str, Any]:
    if isinstance(row, QuarantineRow):
        return {"refused": {"status": row.status, "reason": row.reason, "tries": row.tries}}
    return {} if row is None else {"label": _label(row)}


def _label(row: LabelRow) -> dict[str, Any]:
    values = {name: value for name, value in row._asdict().items() if name not in _LEFT_OUT}
    return dict(plain({**values, **row.columns}))


def _exchange(exchange: Exchange) -> dict[str, Any]:
    ask = exchange.ask
    return {
        "stage": ask.stage,
        "messages": [{"role": message.role, "parts": _parts(message)} for message in ask.messages],
        "prefill": ask.prefill,
        "rendered": None if exchange.prompt is None else "".join(exchange.prompt),
        "max_tokens": ask.max_tokens,
        "answer": None if exchange.answer is None else _answer(exchange.answer, exchange.seconds),
    }


def _parts(message: Message) -> list[dict[str, Any]]:
    """The template's texts, and between them what the data says, with the field that says it."""
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(message.parts):
        is_data = number % 2 == 1
        if text or is_data:
            parts.append({"field": message.fields[number // 2] if is_data else None, "text": text})
    return parts


def _answer(answer: Answer, seconds: float) -> dict[str, Any]:
    return {
        "text": answer.text,
        "raw": answer.raw or answer.text,
        "finish": answer.finish,
        "detail": answer.detail,
        "flags": list(answer.flags),
        "distributions": {name: plain(dist._asdict()) for name, dist in answer.distributions.items()},
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "seconds": round(seconds, 3),
    }


def _marked(parts: Sequence[str]) -> str:
    marked = []
    for number, text in enumerate(parts):
        is_data = number % 2 == 1
        marked.append(click.style(f"⟦{shown(text).translate(_MARKS)}⟧", fg="cyan") if is_data else shown(text))
    return "".join(marked)


def _dim(text: str) -> str:
    return click.style(text, dim=True)


def ruler(title: str) -> str:
    """A line with a title."""
    return _dim(f"── {title} ".ljust(80, "─"))


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
        before = seen
        now = seen
        while now == seen or now != before:  # an editor may write in several steps: once two reads find the same
            pause(0.25)
            before = now
            now = _contents(folder)
        note(f"changed: {', '.join(sorted({name for name, _ in seen.items() ^ now.items()}))}")
        seen = now


def _contents(folder: Path) -> dict[str, bytes]:
    with contextlib.suppress(OSError):  # a folder that is gone holds nothing, and the job says so
        return {path.name: path.read_bytes() for path in folder.glob("[!.]*.j2") if path.is_file()}
    return {}
