"""Sends a few rows to the model with the prompts and seeds that a run would use, and records each exchange. Writes no
labels."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relabel.jobs.job import Job
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.execution import ask_unwritten, start_engine
from relabel.jobs.run.rates import with_options_begun_with
from relabel.labelers.engines.checkpoints import prompt_encoder
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests.asks import Answer, Ask, Engine, EngineFacts, Request, ShowsPrompts
from relabel.manifests.errors import ConfigError, InputError, MissingExtraError, ModelError, VerdictError
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import Pair
from relabel.manifests.plan import load_plan
from relabel.manifests.rows import pairs_by_number, rows_of_queries
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.store import open_run_store

# ------------------------------------------------------------------------------
# An engine that remembers what it was asked and what it said.


@dataclass(slots=True)
class HeardAsk:
    """An ask, and what came of it.

    Args:
        answer: None while there is none.
        seconds: from the ask to the answer, waiting included.
        prompt: as the model reads it, template text and data by turns; None where that is not known here.
    """

    ask: Ask
    answer: Answer | None = None
    seconds: float | None = None
    prompt: list[str] | None = None


class Listening:
    """Passes everything on to an engine, and tells of every ask and every answer.

    Args:
        heard: called with each exchange, when it is asked and when it is answered.
    """

    def __init__(self, engine: Engine, heard: Callable[[HeardAsk], None]) -> None:
        self._engine = engine
        self._heard = heard
        self._open: dict[int, tuple[HeardAsk, float]] = {}

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return self._engine.prepare(asks)

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    def submit(self, request: Request) -> None:
        exchange = HeardAsk(request.ask)
        if isinstance(self._engine, ShowsPrompts):
            exchange.prompt = self._engine.rendered(request.ask)
        self._open[request.id] = exchange, time.perf_counter()
        self._heard(exchange)
        self._engine.submit(request)

    def poll(self) -> list[Answer]:
        answers = self._engine.poll()
        for answer in answers:
            if (held := self._open.pop(answer.request_id, None)) is not None:
                exchange, started_s = held
                exchange.answer, exchange.seconds = answer, time.perf_counter() - started_s
                self._heard(exchange)
        return answers

    def facts(self) -> EngineFacts:
        return self._engine.facts()

    def close(self) -> None:
        self._engine.close()


# ------------------------------------------------------------------------------
# Rows put to the model as a run would put them, with the same seeds, and nothing written.


class RowChoice(NamedTuple):
    """Which rows: one by its number, those of a query, or some drawn by a seed."""

    row: int | None = None
    query_id: str | None = None
    random: int | None = None
    seed: int = 7


@dataclass(slots=True)
class AskedRows:
    """Rows that were asked together: those of one query where the labeler sees whole queries, else one.

    Args:
        pairs: the rows that were chosen.
        exchanges: in the order in which they were asked; the asks of a query's other rows too.
        rows: of each pair its label, or why it has none; None where nothing was asked.
        remarks: why a row could not be asked at all.
    """

    pairs: list[Pair]
    exchanges: list[HeardAsk] = field(default_factory=list)
    rows: list[LabelRow | QuarantineRow | None] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


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
    chosen = _numbers(dataset, choice)
    if not dataset.reads.whole_query:
        yield from (([pair], {pair.row_id}) for pair in pairs_by_number(dataset, chosen))
        return
    queries = dict.fromkeys(pair.query_id for pair in pairs_by_number(dataset, chosen))
    for rows in rows_of_queries(dataset, list(queries)).values():
        yield list(pairs_by_number(dataset, rows)), set(rows) & set(chosen)


def _numbers(dataset: Dataset, choice: RowChoice) -> Sequence[int]:
    if not dataset.rows:
        raise InputError("the input has no row.")
    if choice.query_id is not None:
        return rows_of_queries(dataset, [choice.query_id])[choice.query_id]
    if choice.random is not None:
        drawn = random.Random(choice.seed).sample(range(dataset.rows), min(choice.random, dataset.rows))
        return sorted(drawn)
    row = choice.row or 0
    if row >= dataset.rows:
        raise InputError(f"row {row:,}: the input has {dataset.rows:,} rows, numbered from 0 to {dataset.rows - 1:,}.")
    return [row]


def render(job: Job, choice: RowChoice) -> Iterator[AskedRows]:
    """The first ask of each chosen row, without an engine; later turns depend on answers."""
    encoder, remarks = _encoder_of(job)
    for pairs, chosen in chosen_rows(job, choice):
        found = AskedRows([pair for pair in pairs if pair.row_id in chosen], remarks=remarks)
        remarks = []
        for pair in found.pairs:
            conversation = job.labeler.label(pair)
            try:
                ask = next(conversation)
            except VerdictError as exc:
                found.remarks.append(f"row {pair.row_id} is not asked, it goes to quarantine as {exc}")
                continue
            finally:
                conversation.close()
            if all(ask != one.ask for one in found.exchanges):
                found.exchanges.append(HeardAsk(ask, prompt=None if encoder is None else encoder.shown(ask)))
        found.rows = [None] * len(found.pairs)
        yield found


def _encoder_of(job: Job) -> tuple[PromptEncoder | None, list[str]]:
    """What makes the prompts that the job's model reads, and remarks; None where that is not known here."""
    try:
        engine = job.at_day_of(load_plan(open_run_store(job.spec.output, job.storage))).spec.engine
        folder = job.template_folder()
        return (None if folder is None else prompt_encoder(engine, folder)), []
    except (ModelError, MissingExtraError) as exc:
        return None, [f"prompts are shown before the chat template: {exc}"]


class Asker:
    """A job's engine, started when it is first asked, and kept while the job's prompts change.

    Args:
        on_engine: called when the engine has started, and when it remarks on other prompts.
        on_rows: called before rows are asked, with those that were chosen.
        heard: called with each exchange, when it is asked and when it is answered.
    """

    def __init__(
        self,
        *,
        on_engine: Callable[[EngineFacts, list[str]], None],
        on_rows: Callable[[list[Pair]], None],
        heard: Callable[[HeardAsk], None],
    ) -> None:
        self._on_engine, self._on_rows, self._heard = on_engine, on_rows, heard
        self._engine: Listening | None = None
        self._exchanges: list[HeardAsk] = []

    def ask(self, job: Job, choice: RowChoice | Sequence[Pair]) -> Iterator[AskedRows]:
        """Ask the chosen rows, one after the other, as often as a run would.

        Raises:
            InputError: as `chosen_rows`.
            ConfigError: the engine can't ask what the labeler wants.
            ModelError, MissingExtraError, EngineCrashError: as the engine does.
            ManifestError, StoreError: what an output that is there was begun with can't be read.
        """
        together = chosen_rows(job, choice)
        first = next(together)  # a wrong choice is said before a model is loaded
        engine = self._engine_of(job)
        for pairs, chosen in itertools.chain([first], together):
            self._exchanges = []
            self._on_rows([pair for pair in pairs if pair.row_id in chosen])
            rows = ask_unwritten(job, engine, pairs, Progress()).rows
            kept = [(pair, row) for pair, row in zip(pairs, rows, strict=True) if pair.row_id in chosen]
            yield AskedRows([pair for pair, _ in kept], self._exchanges, [row for _, row in kept])

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()

    def _engine_of(self, job: Job) -> Listening:
        if self._engine is None:
            store = open_run_store(job.spec.output, job.storage)
            begun = with_options_begun_with(job, store).at_day_of(load_plan(store))
            started, remarks = start_engine(begun)
            self._engine = Listening(started, self._listen)
        else:
            remarks = self._engine.prepare(job.labeler.probe())
        self._on_engine(self._engine.facts(), remarks)
        return self._engine

    def _listen(self, exchange: HeardAsk) -> None:
        if exchange.answer is None:
            self._exchanges.append(exchange)
        self._heard(exchange)
