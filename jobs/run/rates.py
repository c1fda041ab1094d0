"""Engine rates by model and device, automatic engine options, and forecasts of the time that remains."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from relabel.jobs.job import Job, OpenRun
from relabel.jobs.run.chunks import MOST, StageSeen
from relabel.jobs.run.counts import Progress
from relabel.manifests.asks import NO_WORK, Ask, EngineFacts, EngineWork
from relabel.manifests.costs import DEFAULT_OUTPUT_SHARE, Estimate, Range, StageEstimate
from relabel.manifests.manifest import engine_identity
from relabel.manifests.models import DAY, default_cache_dir, write_json
from relabel.manifests.process import device_names
from relabel.manifests.records import checked, digest_of, fault_of, read_record, sealed_json, version_of
from relabel.manifests.specs import EngineSpec, KeepsModels, PaidByToken, is_batched
from relabel.manifests.store import RunStore

# ------------------------------------------------------------------------------
# Engine options that a job leaves to the machine: what an output was begun with, it goes on with.
#
# A fleet's CPUs differ, and labels in bfloat16 and in float32 are those of two teachers. So the first worker of an
# output writes down what `auto` came to on its machine before it starts its engine, and the others do as it did.


AUTO_NAME = "engine.json"


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """What an engine's `auto` options came to on the machine of an output's first worker, by option."""

    version: int
    resolved: dict[str, str]


def with_auto_resolved(job: Job, store: RunStore, begun: Callable[[], Sequence[Mapping[str, Any]]]) -> Job:
    """The job, with its engine's `auto` options as this output was begun, or as this machine is the first to choose.

    Args:
        begun: facts of the engines that have answered, as receipts hold them; called only where something is `auto`.
    Raises:
        ManifestError: what the first worker wrote down can't be read.
        ModelError: see `Engine.resolve_auto`.
    """
    kind, engine = job.engine_class, job.spec.engine
    chosen = kind.resolve_auto(engine)
    if not chosen:
        return job
    earlier = begun()
    return _with(job, _of_engine(engine, chosen, earlier[0]) if earlier else _of_first(store, chosen))


def options_begun_with(job: Job, store: RunStore) -> dict[str, str]:
    """What the engine's `auto` options came to in this output, as far as its first worker wrote it down; nothing is
    written, and nothing asked of this machine.
    """
    try:
        held = read_auto(store)
    except FileNotFoundError:
        return {}
    return {name: value for name, value in held.resolved.items() if getattr(job.spec.engine.args, name, "") == "auto"}


def with_options_begun_with(job: Job, store: RunStore) -> Job:
    """The job with these options: to ask as the run does, beside it.

    Raises:
        ManifestError: as `with_auto_resolved`.
        StoreError: the output can't be read.
    """
    found = options_begun_with(job, store)
    return _with(job, found) if found else job


def _with(job: Job, found: dict[str, str]) -> Job:
    engine = job.spec.engine
    resolved = engine.model_copy(update={"args": engine.args.model_copy(update=found)})
    return replace(job, spec=job.spec.model_copy(update={"engine": resolved}))


def _of_engine(engine: EngineSpec, chosen: dict[str, str], facts: Mapping[str, Any]) -> dict[str, str]:
    """As an engine's facts say; its own where they say what these options can't be: then it was another engine."""
    found = {name: value for name, value in engine_identity(facts).items() if name in chosen}
    try:
        type(engine.args).model_validate(engine.args.model_dump() | found)
    except ValueError:
        return chosen
    return found


def _of_first(store: RunStore, chosen: dict[str, str]) -> dict[str, str]:
    if store.create(AUTO_NAME, sealed_json(asdict(AutoOptions(1, chosen)))):
        return chosen
    held = read_auto(store)
    return {name: held.resolved.get(name, value) for name, value in chosen.items()}


def read_auto(store: RunStore) -> AutoOptions:
    """What the first worker of an output wrote down.

    Raises:
        FileNotFoundError: nothing.
        ManifestError: it can't be read.
    """
    return read_record(
        AutoOptions,
        store.read(AUTO_NAME),
        f"{store.root}/{AUTO_NAME}",
        "not the options of an engine",
        "Move it away: it says what the engine's `auto` options came to on the first worker's machine, and nothing was "
        "labelled yet.",
    )


# ------------------------------------------------------------------------------
# How fast a model answered a labeler's asks on this device, and how long its answers were: kept in the user's cache
# from its last run or probe.
#
# Estimates alone read it. No plan, label or receipt depends on what is kept here, so a file that can't be used is left
# aside with a word.


RATES_VERSION = 1
PROBE_TELLS = "`relabel plan --probe` asks a few rows"
BATCHES = "batches are answered hours later, at no rate of their own"
NO_RUN = f"no run of this model on this device is known; {PROBE_TELLS}"


@dataclass(frozen=True, slots=True)
class Rates:
    """What one engine's life told.

    Args:
        key: what it holds of, in full; the file's name is its digest.
        source: `run` or `probe`.
        measured: when it ended.
        model, device, dtype: in the words of the engine's facts.
        rows: asked.
        prefill_tokens_per_s: prompt tokens that no cache held, of the whole time: what the loop and the commits took is
            in it.
        decode_tokens_per_s: likewise of output tokens; None where none was decoded.
        stages: asks and tokens of each.
    """

    key: dict[str, Any]
    source: str
    measured: str
    model: str
    device: str
    dtype: str
    rows: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    stages: dict[str, StageSeen] = field(default_factory=dict)
    version: int = RATES_VERSION

    @property
    def basis(self) -> str:
        """Where a figure comes from, in words."""
        what = "this model's last run on this device" if self.source == "run" else "a probe"
        return f"{what} ({self.rows:,} rows, {self.measured[:16].replace('T', ' ')} UTC)"


def rates_of(opened: OpenRun, facts: EngineFacts, progress: Progress, *, source: str) -> Rates | None:
    """What an engine's work tells; None where no row came of it.

    Args:
        progress: of that work alone, which has just ended.
    """
    work, stages, seconds = progress.live.work, progress.stages_seen, time.perf_counter() - progress.started_s
    uncached = sum(seen.prompt_tokens - seen.cached_tokens for seen in stages.values())
    output = sum(seen.output_tokens for seen in stages.values())
    if work.prefilled_tokens and work.prefill_s > 0:
        beside = max(1.0, seconds / (work.prefill_s + work.decode_s))
        prefill = work.prefilled_tokens / (work.prefill_s * beside)
        decode = work.decoded_tokens / (work.decode_s * beside) if work.decoded_tokens and work.decode_s > 0 else None
    else:  # the engine does not tell them apart: one rate for both
        prefill = (uncached + output) / max(seconds, 1e-9)
        decode = prefill if output else None
    if not stages or not progress.pairs or prefill <= 0:
        return None
    measured = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    found = facts.model, facts.device, facts.dtype
    return Rates(_key(opened), source, measured, *found, progress.pairs, prefill, decode, dict(stages))


def keep_rates(opened: OpenRun, rates: Rates | None) -> None:
    """Keep them for estimates to come, in place of earlier ones, but no probe's in place of a run's that can be used; a
    cache that can't be written is no reason to end.
    """
    folder = _folder(opened.job.spec.engine)
    if rates is None or folder is None:
        return
    held = load_rates(opened)[0] if rates.source == "probe" else None
    if held is None or held.source == "probe":
        with contextlib.suppress(OSError):
            write_json(folder / _file_name(rates.key), asdict(rates))


def load_rates(opened: OpenRun) -> tuple[Rates | None, str]:
    """What is known of this job's model, labeler and device, and where from; where nothing is, why, in words."""
    engine = opened.job.spec.engine
    folder = _folder(engine)
    if folder is None:
        is_late = is_batched(engine.args)
        return None, BATCHES if is_late else f"rates of engine {engine.name} are not kept; {PROBE_TELLS}"
    key = _key(opened)
    path = folder / _file_name(key)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if version_of(held) != RATES_VERSION:
            return None, f"{path} is of another version of relabel"
        rates = checked(Rates, held)
    except FileNotFoundError:
        return None, NO_RUN
    except (OSError, ValueError) as exc:
        return None, f"{path} can't be read ({fault_of(exc) if isinstance(exc, ValueError) else exc.strerror})"
    if rates.key != key or not _is_possible(rates):
        return None, f"{path} does not hold what its name says"
    dtype = options_begun_with(opened.job, opened.store).get("dtype", rates.dtype)
    if dtype not in rates.dtype:  # which may name a quantization, too
        return None, f"the last run here was in {rates.dtype}, and this output is in {dtype}"
    return rates, rates.basis


def _folder(engine: EngineSpec) -> Path | None:
    """None where there is no model whose rates would be worth keeping, or where answers come hours later."""
    if not isinstance(engine.args, KeepsModels) or is_batched(engine.args):
        return None
    return (Path(engine.args.cache_dir) if engine.args.cache_dir else default_cache_dir()) / "rates"


def _key(opened: OpenRun) -> dict[str, Any]:
    """Model, engine with all that changes its speed, device, labeler."""
    engine = opened.job.spec.engine
    neither = {"cache_dir", *PaidByToken.__annotations__}
    args: Mapping[str, Any] = engine.args.model_dump(mode="json", exclude=neither)
    return {
        "model": opened.plan.facts.model,
        "engine": {
            "name": engine.name,
            "args": args,
            "chat_template_kwargs": {key: one for key, one in engine.chat_template_kwargs.items() if key != DAY},
        },
        "device": device_names(),
        "labeler": opened.job.spec.labeler.name,
    }


def _file_name(key: Mapping[str, Any]) -> str:
    return f"{digest_of(key)[:32]}.json"


def _is_possible(rates: Rates) -> bool:
    speeds = (rates.prefill_tokens_per_s, rates.decode_tokens_per_s or 1.0)
    counts = [rates.rows, *(number for seen in rates.stages.values() for number in asdict(seen).values())]
    return (
        all(math.isfinite(one) and one > 0 for one in speeds)
        and all(0 <= one < MOST for one in counts)
        and rates.rows > 0
        and all(0 <= one.first_attempts <= one.answers > 0 for one in rates.stages.values())
    )


# ------------------------------------------------------------------------------
# How long a run still takes, as an interval: first from the rates of the engine's prefills and decoding and the plan's
# estimate of tokens, then from the answers that came, later from the rows that are done; the more of them, the
# narrower.


LEAST_S = 0.5
"""Shorter work tells no rate."""
DECODED_SHARE = Range(0.02, 0.1, 1.0)
"""Of the rate of prefills, the rate of decoding, before a token was decoded: from one long sequence on a GPU to a full
batch on a CPU."""
SPREAD = 2.0
"""Standard errors that an interval is wide to both sides, where one row or answer deviates by as much as the mean."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Expected(NamedTuple):
    """What one row is expected to take: asks, prompt tokens that no cache holds, output tokens."""

    asks: Range
    prompt: Range
    output: Range


class DoneSoFar(NamedTuple):
    """What a run has done after some seconds of its engine's work.

    Args:
        rows: labelled or quarantined.
        in_flight: asks that are under way.
        answers, refused: of the asks so far, and those of them that could not be read.
        answered_tokens: prompt tokens that no cache held, and output tokens, of all answers.
        work: of the engine, answered or not.
    """

    seconds: float
    rows: int = 0
    in_flight: int = 0
    answers: int = 0
    refused: int = 0
    answered_tokens: int = 0
    work: EngineWork = NO_WORK


def expected_of(estimate: Estimate) -> Expected | None:
    """What the plan's estimate says of a row; None where it has no rows to ask."""
    rows, hit = estimate.rows_asked, estimate.prefix_hit
    if rows.low <= 0:
        return None
    asks = functools.reduce(Range.plus, (stage.asks for stage in estimate.stages.values()), Range.exact(0.0))
    prompt = estimate.prompt_tokens * Range(1 - hit.high, 1 - hit.value, 1 - hit.low)
    return Expected(*(Range(*(each / rows.value for each in one)) for one in (asks, prompt, estimate.output_tokens)))


def left_s(total: int, done: DoneSoFar, expected: Expected | None) -> Range | None:
    """Seconds until all rows are done, by whatever tells them more narrowly; None while nothing was measured.

    Args:
        total: rows of the whole execution.
        expected: of a row, where an estimate says.
    """
    found = [_by_rows(total, done)] if done.rows else []
    if expected is not None and done.work.prefill_s >= LEAST_S:
        found.append(_by_work(total, done, expected))
    return min(found, key=lambda one: (one.high + 1) / (one.low + 1), default=None)


def at_pace(rows: int, pairs_per_s: float, *, seen: int) -> Range:
    """Seconds that rows take at a pace that so many rows tell."""
    return Range.exact(rows / pairs_per_s) * _error(seen)


def together(one: Range | None, other: Range | None) -> Range | None:
    """Seconds for work that two share, of what it takes each of them alone; None is one who does none of it."""
    if one is None or other is None:
        return one or other
    return Range(*(a * b / (a + b) if a and b else 0.0 for a, b in zip(one, other, strict=True)))


def _by_rows(total: int, done: DoneSoFar) -> Range:
    """What is under way counts by its share of the work, where the engine tells; else it may be as good as done, or as
    good as not begun.
    """
    work = done.work.prefilled_tokens + done.work.decoded_tokens
    if work and done.answered_tokens:
        share = max(1.0, work / done.answered_tokens)
        rows = Range.exact(done.rows * min(share, 1 + done.in_flight / done.rows))
    else:
        rows = Range(done.rows, done.rows + done.in_flight / 2, done.rows + done.in_flight)
    return Range.exact(done.seconds).over(rows) * _error(done.rows) * max(0.0, total - done.rows)


def _by_work(total: int, done: DoneSoFar, expected: Expected) -> Range:
    """Tokens that are still to run, at the rates so far. The tokens of an answer, once there is one, are all that were
    decoded over all answers: those of the unfinished ones count, or short answers, which come first, would mislead.
    """
    work, again = done.work, done.refused / max(1, done.answers)
    asks = expected.asks * Range(1, 1 + again, 1 + 2 * again)
    prompt, output = expected.prompt, expected.output
    if work.begun:
        prompt = _within(prompt, asks * (work.prefilled_tokens / work.begun) * _error(work.begun))
        output = _within(output, Range(asks.low * work.decoded_tokens / work.begun, output.value, output.high))
    if done.answers:
        output = _within(output, asks * (work.decoded_tokens / done.answers) * _error(done.answers))
    prefill = work.prefilled_tokens / work.prefill_s
    decode = Range.exact(work.decoded_tokens / work.decode_s) if work.decode_s >= LEAST_S else DECODED_SHARE * prefill
    prompt_s = _less(prompt * total, work.prefilled_tokens).over(Range.exact(prefill))
    return prompt_s.plus(_less(output * total, work.decoded_tokens).over(decode))


def _error(count: int) -> Range:
    """Of a mean over so many, as a factor."""
    most = 1 + SPREAD / math.sqrt(count)
    return Range(1 / most, 1.0, most)


def _within(expected: Range, measured: Range) -> Range:
    """What was measured, no wider than what was expected, unless the two are apart."""
    low, high = max(expected.low, measured.low), min(expected.high, measured.high)
    return Range(low, min(max(measured.value, low), high), high) if low <= high else measured


def _less(tokens: Range, run: int) -> Range:
    return Range(*(max(0.0, one - run) for one in tokens))


def left_text(left: Range | None) -> str:
    """An interval in words: `4 to 9 min`."""
    if left is None:
        return "unknown"
    (low, unit), (high, last) = _in_unit(left.low), _in_unit(left.high)
    if unit != last:
        return f"{low} {unit} to {high} {last}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _in_unit(seconds: float) -> tuple[str, str]:
    size, name = next((one for one in UNITS if seconds >= one[0]), UNITS[-1])
    value = seconds / size
    return f"{value:,.1f}" if value < 3 and size > 1 else f"{value:,.0f}", name


# ------------------------------------------------------------------------------
# What a model's last run on this device, or a probe, says of asks, answers and seconds to come.
#
# Other rows, and other times of day, are what the intervals must hold beside chance (`OTHER_ROWS` and the others);
# `benchmarks/estimates_hold.py` holds them against real models.


OTHER_ROWS = 1.2
"""How far the mean of other rows' answers may be off, as a factor to both sides."""
OTHER_BATCHES = 1.1
"""How far the tokens that a prompt shares with others may be off: more rows share more."""
OTHER_TIMES = 1.6
"""How far an engine's rates may be off: a machine is busier at one time than at another, and batches are fuller."""
ERRORS = 2.0
"""Standard errors that an interval is wide to both sides."""


def repeats(seen: StageSeen, attempts: int, num_to_come: float) -> Range:
    """Asks for each first attempt, repeated ones included; its spread is the largest that a number of repeats between
    none and `attempts - 1` can have.
    """
    most = attempts - 1.0
    first = max(1, seen.first_attempts)
    each = min(most, max(0.0, seen.answers / first - 1))
    likely = (each * first + 0.5) / (first + 1)
    error = ERRORS * math.sqrt(max(0.0, likely * (most - likely)) * (1 / first + 1 / max(1.0, num_to_come)))
    return Range(1 + max(0.0, each - error), 1 + each, 1 + min(most, each + error))


def first_asks_a_row(seen: StageSeen, rates: Rates, samples: float, most: float) -> Range:
    """Of a stage that a row asks several times, between once and `most` times: how often, for each of its samples."""
    each = min(most, max(1.0, seen.first_attempts / (rates.rows * samples)))
    return Range(max(1.0, each / OTHER_ROWS**2), each, min(most, each * OTHER_ROWS**2))


def answer_length(ask: Ask, rates: Rates | None, num_to_come: float) -> Range:
    """Tokens of an answer: as measured, else a share of what the stage may write."""
    seen = None if rates is None else rates.stages.get(ask.stage)
    if seen is not None:
        return output_tokens(seen, max(1.0, ask.max_tokens), num_to_come)
    return DEFAULT_OUTPUT_SHARE * float(ask.max_tokens) if ask.max_tokens else Range(0.0, 1.0, 1.0)


def output_tokens(seen: StageSeen, most: float, num_to_come: float) -> Range:
    """Of an answer: the mean so far, with chance and other rows; no more than the stage may write."""
    mean = seen.output_tokens / max(1, seen.answers)
    variance = max(0.0, seen.output_squares / max(1, seen.answers) - mean**2)
    error = ERRORS * math.sqrt(variance * (1 / max(1, seen.answers) + 1 / max(1.0, num_to_come)))
    high = (mean + error) * OTHER_ROWS
    return Range(max(0.0, mean - error) / OTHER_ROWS, mean, max(mean, min(most, high)))


def prefix_hit(seen: StageSeen, prompt_tokens: Range, num_to_come: float) -> Range:
    """The share of prompt tokens that the engine's cache will hold: of each prompt as many tokens as before, whatever
    its document adds; of the first prompt none, which counts where there are few.

    Args:
        prompt_tokens: of a prompt to come.
    """
    before = seen.cached_tokens / max(1, seen.answers)
    held = before * (1 - 1 / max(2.0, num_to_come)) / (1 - 1 / max(2, seen.answers))
    tokens = min(before, held) / OTHER_BATCHES, held, max(before, held) * OTHER_BATCHES
    ends = zip(tokens, reversed(prompt_tokens), strict=True)
    return Range(*(min(1.0, of_prompt / max(1.0, prompt)) for of_prompt, prompt in ends))


def seconds_of(stages: Iterable[StageEstimate], rates: Rates) -> Range:
    """Seconds of one worker. How much is asked, how much of it a cache holds, how much is written and how fast all that
    goes are off independently of each other.
    """
    parts = list[Range]()
    for stage in stages:
        hit = stage.prefix_hit
        read = _times(stage.prompt_tokens, Range(1 - hit.high, 1 - hit.value, 1 - hit.low))
        parts.append(read * (1 / rates.prefill_tokens_per_s))
        parts.append(stage.output_tokens * (1 / (rates.decode_tokens_per_s or rates.prefill_tokens_per_s)))
    value = math.fsum(part.value for part in parts)
    less = math.hypot(*(part.value - part.low for part in parts))
    more = math.hypot(*(part.high - part.value for part in parts))
    return _times(Range(max(0.0, value - less), value, value + more), Range(1 / OTHER_TIMES, 1.0, OTHER_TIMES))


def _times(one: Range, other: Range) -> Range:
    """The product of two numbers that are off independently of each other; their errors are factors."""
    value = one.value * other.value
    if value <= 0:
        return one * other
    more = math.hypot(*(math.log(each.high / each.value) for each in (one, other)))
    if min(one.low, other.low) <= 0:
        return Range(0.0, value, value * math.exp(more))
    less = math.hypot(*(math.log(each.value / each.low) for each in (one, other)))
    return Range(value * math.exp(-less), value, value * math.exp(more))
