"""What a run will take, estimated before it starts: sampled tokens times the rates of the last run or a probe."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from relabel.jobs.job import Job, OpenRun, options_begun_with, start_engine
from relabel.jobs.output import grid
from relabel.jobs.run.progress import Progress, StageSeen
from relabel.jobs.run.rates import Rates, keep_rates, load_rates
from relabel.jobs.run.report import engine_text
from relabel.jobs.run.reuse import Reuse, earlier_outputs, reuse_remark
from relabel.labelers.engines.fake import Fake, FakeArgs
from relabel.labelers.registry import engine_class
from relabel.manifests.asks import Answer, Ask, Request
from relabel.manifests.budgets import Range
from relabel.manifests.errors import MissingExtraError, ModelError, UsageError
from relabel.manifests.label_keys import LabelKeys
from relabel.manifests.labels import Pair
from relabel.manifests.plan import ShardPlan, chunk_row_ids
from relabel.manifests.reuse import EarlierOutput, why_nothing
from relabel.manifests.rows import pairs_by_number
from relabel.manifests.run_manifest import saved_text
from relabel.manifests.specs import JobSpec, gpus_of, price_of

CHEAP_BYTES = 256 << 20
"""Up to so much text, reused rows are counted by their keys: a second or two of hashing."""
PLACES = 16
"""At how many places of the input rows are sampled."""
ROWS = 16
"""Neighbouring rows of each place, as a run asks them."""
PROBE_PLACES = 2
PROBE_ROWS = 8
"""Likewise of a probe: they fill a batch on a CPU, and cost it minutes at most."""
DEFAULT_OUTPUT_SHARE = Range(0.02, 0.25, 1.0)
"""Of a stage's token cap that an answer takes, where no run has measured it."""
OTHER_ROWS = Range(1 / 1.2, 1.0, 1.2)
"""How far other rows' prompts and answers may be off, beyond chance."""
OTHER_TIMES = Range(1 / 1.6, 1.0, 1.6)
"""How far rates may be off: a machine is busier at one time than at another, and batches are fuller."""
ZERO = Range.exact(0.0)


@dataclass(frozen=True, slots=True)
class EstimateBasis:
    """The source of each figure, in words."""

    rows_reused: str
    tokens: str
    output_tokens: str
    seconds: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the open rows of a run will take; each figure is low, expected and high.

    Args:
        rows: open ones.
        seconds: of one worker, without the engine's start; None where no rate is known.
        cost: of the seconds at `cost_per_gpu_hour`, and of tokens at the engine's prices; None where there is no price.
        reuse: what each reused output can give, a sentence each.
    """

    rows: int
    rows_reused: Range
    rows_asked: Range
    asks: Range
    prompt_tokens: Range
    output_tokens: Range
    seconds: Range | None
    cost: Range | None
    basis: EstimateBasis
    reuse: list[str]

    def as_json(self) -> dict[str, Any]:
        """As the result of `plan` has it; a figure is a list of three numbers."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "basis": asdict(self.basis)}

    def lines(self) -> list[str]:
        """A line for each figure, with 95 % intervals."""
        basis = self.basis
        tokens = f"{_shown(self.prompt_tokens)} in, {_shown(self.output_tokens)} out"
        seconds = "not known" if self.seconds is None else f"{_shown(self.seconds, 1)} of one worker"
        rows = [
            ("reused", f"{_shown(self.rows_reused)} of {self.rows:,} open rows ({basis.rows_reused})"),
            ("asked", f"{_shown(self.rows_asked)} rows, {_shown(self.asks)} asks"),
            ("tokens", f"{tokens} (prompts by {basis.tokens}; answers by {basis.output_tokens})"),
            ("seconds", f"{seconds} ({basis.seconds})"),
        ]
        if self.cost is not None:
            rows.append(("cost", f"{_shown(self.cost, 2)} at the price given"))
        rows += [("reuse", remark) for remark in self.reuse]
        return grid(rows).split("\n")


def _shown(figure: Range, digits: int = 0) -> str:
    value = f"{figure.value:,.{digits}f}"
    if figure.low == figure.high:
        return value
    return f"{value} ({figure.low:,.{digits}f} to {figure.high:,.{digits}f})"


def estimate_run(opened: OpenRun, probe: Callable[[], Rates | None] | None = None) -> Estimate:
    """Estimate what the open rows of a run will take.

    Args:
        probe: measures the engine's rates.
    Raises:
        InputError: a text of the sample can't be read.
    """
    outputs = earlier_outputs(opened.job)
    pending = _pending(opened)
    rows = _rows_of(opened, pending)
    known = _known(opened, outputs, pending, rows)
    reused = known.rows
    asked = Range(rows - reused.high, rows - reused.value, rows - reused.low)
    rates, rates_basis = load_rates(opened)
    if probe is not None and asked.high:
        measured = probe()
        if measured is not None:
            rates = measured
            rates_basis = measured.basis
    a_row = _tokens_a_row(opened, rates) if asked.high else RowTokens(ZERO, ZERO, ZERO)
    prompt = asked * a_row.prompt
    output = asked * a_row.output
    seconds = _seconds(rates, prompt.plus(output)) if asked.high else ZERO
    reuse = [reuse_remark(opened, earlier) for earlier in outputs]
    if opened.cascade is not None:
        if known.cheap is not None and rows:
            open_rows = "" if rows == opened.plan.rows else ", of those that are open"
            reuse.append(f"cascade: {saved_text(known.cheap, rows)}{open_rows}")
        reuse.append(opened.cascade.certificate.text)
    if known.is_all_calibration:
        reuse.append(
            "cascade: the calibration holds every query of the open rows, so no cheap label is left to save anything. "
            "Calibrate on fewer queries than the input has"
        )
    return Estimate(
        rows=rows,
        rows_reused=reused.rounded(),
        rows_asked=asked.rounded(),
        asks=(asked * a_row.asks).rounded(),
        prompt_tokens=prompt.rounded(),
        output_tokens=output.rounded(),
        seconds=seconds,
        cost=_cost(opened.job.spec, seconds, prompt, output),
        basis=EstimateBasis(
            rows_reused=known.basis,
            tokens="a sample of the rows",
            output_tokens=rates_basis if rates else "2 to 100 % of each stage's cap",
            seconds=rates_basis,
        ),
        reuse=reuse,
    )


def _pending(opened: OpenRun) -> dict[int, list[int]]:
    """Chunks without a receipt, by shard."""
    done = opened.folder.attempts_of_all()
    pending = dict[int, list[int]]()
    for number, shard in enumerate(opened.plan.shards):
        of_shard = done.get(number, {})
        pending[number] = [chunk for chunk in range(len(shard.chunks)) if chunk not in of_shard]
    return pending


def _rows_of(opened: OpenRun, pending: Mapping[int, list[int]]) -> int:
    shards = opened.plan.shards
    return sum(sum(shards[number].chunks[chunk] for chunk in chunks) for number, chunks in pending.items())


class KnownRows(NamedTuple):
    """Open rows that need no asking.

    Args:
        rows: whose labels earlier outputs or the cheap judges of a cascade know.
        basis: the source of the figure.
        cheap: those of them that take a cheap label; None where they were not counted.
        is_all_calibration: the rows were counted, and all are of the calibration's queries.
    """

    rows: Range
    basis: str
    cheap: int | None = None
    is_all_calibration: bool = False


def _known(opened: OpenRun, outputs: list[EarlierOutput], pending: Mapping[int, list[int]], rows: int) -> KnownRows:
    """Rows whose labels are known, counted by their keys if that is cheap, else as many as may be."""
    useful = [earlier for earlier in outputs if not why_nothing(earlier, opened.plan.parts)]
    cascade = opened.cascade
    if not useful and cascade is None:
        return KnownRows(ZERO, "no reused output was made in this way" if outputs else "nothing to reuse")
    if opened.plan.text_bytes > CHEAP_BYTES:
        known = sum(earlier.found.tally.labelled + earlier.found.tally.reused for earlier in useful)
        if cascade is not None:
            known += round(rows * cascade.certificate.cheap_share)
        most = min(rows, known)
        return KnownRows(Range(0.0, most, most), "not counted: the text is larger than 256 MiB")
    reuse = Reuse(opened.job, opened.plan, useful)
    keys = LabelKeys(opened.plan.parts, opened.job.reads)
    num_reused = 0
    num_cheap = 0
    is_all_calibration = cascade is not None and rows > 0
    for number, chunks in pending.items():
        for _, pairs in opened.read(number, chunks):
            is_reused_N = np.array([place is not None for place in reuse.find(pairs, keys.keys(pairs))])
            num_reused += int(is_reused_N.sum())
            if cascade is not None:
                is_cheap_N = cascade.places(pairs)[1] == "cheap"
                num_cheap += int((is_cheap_N & ~is_reused_N).sum())  # a known label of the teacher goes first
                is_all_calibration = is_all_calibration and all(pair.query_id in cascade.queries for pair in pairs)
    return KnownRows(Range.exact(num_reused + num_cheap), "counted", num_cheap, is_all_calibration)


def _seconds(rates: Rates | None, tokens: Range) -> Range | None:
    """How long so many tokens take; None where no rate is known."""
    if rates is None:
        return None
    measured_tokens = sum(seen.prompt_tokens + seen.output_tokens for seen in rates.stages.values())
    return (tokens * (rates.seconds / measured_tokens) * OTHER_TIMES).rounded(3)


class RowTokens(NamedTuple):
    """Asks, prompt tokens and output tokens of a row."""

    asks: Range
    prompt: Range
    output: Range


class PlaceTokens(NamedTuple):
    """Likewise, of the rows at one place of the sample."""

    asks: float
    prompt: float
    output: Range


def _tokens_a_row(opened: OpenRun, rates: Rates | None) -> RowTokens:
    """What a row takes, by a sample of the rows that is asked with made-up answers.

    Repeated attempts and the length of answers are those of the last run or probe.
    """
    engine = _CountingEngine(opened.job)
    measured = {} if rates is None else rates.stages
    places = [_tokens_at(opened, engine, pairs, measured) for pairs in _sampled(opened, PLACES, ROWS)]
    output = functools.reduce(Range.plus, [place.output for place in places])
    return RowTokens(
        asks=_mean([place.asks for place in places]),
        prompt=_mean([place.prompt for place in places]) * OTHER_ROWS,
        output=output * (1 / len(places)),
    )


def _tokens_at(
    opened: OpenRun, engine: _CountingEngine, pairs: list[Pair], measured: Mapping[str, StageSeen]
) -> PlaceTokens:
    """What each of some neighbouring rows takes. What rows of a query share is asked once a query, and counts by the
    plan's queries.
    """
    plan = opened.plan
    from relabel.jobs.run.loop import ask_unwritten  # no row is asked where all are done

    progress = Progress()
    ask_unwritten(opened.job, engine, pairs, progress)
    asks = 0.0
    prompt = 0.0
    output = ZERO
    for ask in opened.job.labeler.probe():
        seen = progress.stages_seen[ask.stage]
        before = measured.get(ask.stage)
        share = 1 / len(pairs)
        if ask.shared_by is not None:
            share = plan.queries / plan.rows / len({pair.query_id for pair in pairs})
        if before is not None:
            share *= before.answers / max(1, before.first_attempts)
            length = OTHER_ROWS * (before.output_tokens / max(1, before.answers))
        elif ask.max_tokens:
            length = DEFAULT_OUTPUT_SHARE * ask.max_tokens
        else:
            length = Range(0.0, 1.0, 1.0)
        asks += seen.answers * share
        prompt += seen.prompt_tokens * share
        output = output.plus(length * (seen.answers * share))
    return PlaceTokens(asks, prompt, output)


def _mean(values: Sequence[float]) -> Range:
    """A mean, with two standard errors to both sides."""
    mean = statistics.fmean(values)
    error = 2 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Range(max(0.0, mean - error), mean, mean + error)


class _CountingEngine(Fake):
    """Answers as the fake engine does, with prompt tokens as the job's engine counts them; characters over four where
    it can't count here.
    """

    def __init__(self, job: Job) -> None:
        made_up = {"name": "fake", "model": None, "args": FakeArgs(), "max_prompt_tokens": 1 << 24}
        super().__init__(job.spec.engine.model_copy(update=made_up))
        self._tokens: dict[int, int] = {}
        counter_class = engine_class(job.spec.engine.name)
        self._count: Callable[[Ask], int] = lambda ask: sum(len(message.text) for message in ask.messages) // 4
        with contextlib.suppress(MissingExtraError, ModelError):
            self._count = counter_class.token_counter(job.spec.engine, overlong=job.spec.input.overlong)

    def submit(self, request: Request) -> None:
        self._tokens[request.id] = self._count(request.ask)
        super().submit(request)

    def poll(self) -> list[Answer]:
        answers = super().poll()
        return [replace(answer, prompt_tokens=self._tokens.pop(answer.request_id)) for answer in answers]


def _sampled(opened: OpenRun, places: int, rows: int) -> Iterator[list[Pair]]:
    """Neighbouring rows at some places that the plan's fingerprint draws; of a labeler that reads whole queries, the
    first whole queries of some chunks.
    """
    is_whole = opened.dataset.reads.whole_query
    blocks = _chunks_drawn(opened, places) if is_whole else _neighbours_drawn(opened, places, rows)
    pairs = pairs_by_number(opened.dataset, list(itertools.chain.from_iterable(blocks)))
    for block in blocks:
        sample = list(itertools.islice(pairs, len(block)))
        yield _whole_queries(sample, rows) if is_whole else sample


def _chunks_drawn(opened: OpenRun, count: int) -> list[list[int]]:
    """Row numbers of some chunks."""
    chunks = list[tuple[ShardPlan, int]]()
    for shard in opened.plan.shards:
        chunks += [(shard, number) for number in range(len(shard.chunks))]
    drawn = random.Random(opened.plan.fingerprint).sample(chunks, min(count, len(chunks)))
    return [chunk_row_ids(opened.store, shard)[number].tolist() for shard, number in drawn]


def _neighbours_drawn(opened: OpenRun, count: int, rows: int) -> list[list[int]]:
    """Row numbers of some blocks of the input."""
    plan = opened.plan
    size = min(rows, max(1, plan.rows // count))
    num_blocks = plan.rows // size
    blocks = sorted(random.Random(plan.fingerprint).sample(range(num_blocks), min(count, num_blocks)))
    return [list(range(block * size, (block + 1) * size)) for block in blocks]


def _whole_queries(pairs: list[Pair], least: int) -> list[Pair]:
    """The first pairs up to the end of a query, so many of them at least where there are as many."""
    for number in range(least, len(pairs)):
        if pairs[number].query_id != pairs[number - 1].query_id:
            return pairs[:number]
    return pairs


def _cost(spec: JobSpec, seconds: Range | None, prompt: Range, output: Range) -> Range | None:
    """Of GPUs by the hour and tokens by the million, as far as there are prices; None where there is none, or where the
    hours are not known.
    """
    parts = list[Range]()
    args = spec.engine.args
    if spec.cost_per_gpu_hour is not None:
        if seconds is None:
            return None
        parts.append(seconds * (gpus_of(args) * spec.cost_per_gpu_hour / 3600))
    prompt_price = price_of(args, 1_000_000, 0)
    if prompt_price is not None:
        parts.append(prompt * (prompt_price / 1e6))
    output_price = price_of(args, 0, 1_000_000)
    if output_price is not None:
        parts.append(output * (output_price / 1e6))
    return functools.reduce(Range.plus, parts).rounded(6) if parts else None


def probe_rates(opened: OpenRun, *, write: Callable[[str], None]) -> Rates | None:
    """Ask a few rows, keep their rates in the cache, and write nothing else.

    Raises:
        UsageError: the engine hands asks over as batches.
        InputError, ModelError, MissingExtraError, EngineCrashError: as a run does.
    """
    if opened.job.spec.engine.args.sends_batches:
        raise UsageError("--probe: batches (engine.args.batch) are answered hours later. Leave one of the two out.")
    pairs = list(itertools.chain.from_iterable(_sampled(opened, PROBE_PLACES, PROBE_ROWS)))
    job = opened.job.with_args(options_begun_with(opened.job, opened.store))
    from relabel.jobs.run.display import Display
    from relabel.jobs.run.loop import ask_unwritten

    engine, remarks = start_engine(job)
    try:
        facts = engine.facts()
        for line in (*remarks, f"probe: {len(pairs):,} rows; {engine_text(job.spec.labeler.name, facts)}"):
            write(line)
        progress = Progress()  # its clock begins when the engine is there
        with Display(progress, len(pairs)) as display:
            ask_unwritten(job, engine, pairs, progress, on_progress=display.update)
        return keep_rates(opened, facts, progress, source="probe")
    finally:
        engine.close()
