"""Sends a few rows to the model with the prompts and seeds that a run would use, and records each exchange. Writes no
labels."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relabel.jobs.job import Job
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.execution import start_engine, with_options_begun_with
from relabel.jobs.run.loop import ask_unwritten
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.labelers.engines.transformers import prompt_encoder
from relabel.manifests.asks import Answer, Ask, Engine, EngineFacts, Request
from relabel.manifests.errors import ConfigError, InputError, MissingExtraError, ModelError, VerdictError
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import Pair
from relabel.manifests.plan import load_plan
from relabel.manifests.rows import pairs_by_number, rows_of_queries
from relabel.manifests.schemas import LabelRow, QuarantineRow
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


class RecordingEngine(Engine):
    """Passes everything on to an engine and records what is asked and answered in `exchanges`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[int, tuple[Exchange, float]] = {}
        self.exchanges: list[Exchange] = []

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return self._engine.prepare(asks)

    def facts(self) -> EngineFacts:
        return self._engine.facts()

    def close(self) -> None:
        self._engine.close()

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
                exchange.answer, exchange.seconds = answer, time.perf_counter() - started_s
        return answers


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
        remarks: of the engine, and why a row could not be asked at all.
    """

    pairs: list[Pair]
    exchanges: list[Exchange] = field(default_factory=list)
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
                found.exchanges.append(Exchange(ask, prompt=None if encoder is None else encoder.shown(ask)))
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
    """Asks rows with a job's engine, which is started at the first ask and kept while the job's prompts change."""

    def __init__(self) -> None:
        self._engine: RecordingEngine | None = None

    def ask(self, job: Job, choice: RowChoice | Sequence[Pair]) -> Iterator[AskedRows]:
        """Ask the chosen rows, one after the other, as often as a run would.

        Raises:
            InputError: as `chosen_rows`.
            ConfigError: the engine can't ask what the labeler wants.
            ModelError, MissingExtraError, EngineCrashError: as the engine does.
            ManifestError, StoreError: what an output that is there was begun with can't be read.
        """
        groups = chosen_rows(job, choice)
        first = next(groups)  # a wrong choice is reported before a model is loaded
        engine, remarks = self._prepared(job)
        for pairs, chosen in itertools.chain([first], groups):
            engine.exchanges = []
            rows = ask_unwritten(job, engine, pairs, Progress()).rows
            kept = [(pair, row) for pair, row in zip(pairs, rows, strict=True) if pair.row_id in chosen]
            yield AskedRows([pair for pair, _ in kept], engine.exchanges, [row for _, row in kept], remarks)
            remarks = []

    def facts(self) -> EngineFacts | None:
        """Provenance of the engine; None before the first ask."""
        return None if self._engine is None else self._engine.facts()

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()

    def _prepared(self, job: Job) -> tuple[RecordingEngine, list[str]]:
        """The engine, ready for the job's prompts, and its remarks on them."""
        if self._engine is not None:
            return self._engine, self._engine.prepare(job.labeler.probe())
        store = open_run_store(job.spec.output, job.storage)
        started, remarks = start_engine(with_options_begun_with(job, store).at_day_of(load_plan(store)))
        self._engine = RecordingEngine(started)
        return self._engine, remarks
