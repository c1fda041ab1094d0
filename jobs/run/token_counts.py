"""Rows, asks and prompt tokens of a plan, counted exactly, sampled, or taken from earlier runs."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from relabel.jobs.job import OpenRun
from relabel.jobs.run.rates import Rates, answer_length, first_asks_a_row, prefix_hit, repeats
from relabel.jobs.run.reuse import Reuse, label_keys
from relabel.labelers.registry import MostAsks
from relabel.manifests.asks import DOCUMENT_FIELD, Answer, Ask, Distribution
from relabel.manifests.costs import (
    DEFAULT_CHARS,
    DEFAULT_OUTPUT_SHARE,
    DEFAULT_REPEATS,
    PrefixHit,
    Range,
    StageEstimate,
    ratio_range,
)
from relabel.manifests.errors import InputError, MissingExtraError, ModelError, VerdictError
from relabel.manifests.formats import Choice, Indices, JsonIndices, Lines, OptionLines, Text, closing_of, opening_of
from relabel.manifests.labels import Pair
from relabel.manifests.plan import chunk_row_ids, shard_row_ids
from relabel.manifests.receipts import Receipt
from relabel.manifests.reuse import EarlierOutput
from relabel.manifests.rows import pairs_by_number, read_chunks

# ------------------------------------------------------------------------------
# What alike runs asked and took, from the receipts of this output and of earlier ones.


RECEIPTS_LOOKED_AT = 512
"""Chunks that ratios are taken from: more would narrow an interval that other things make wide."""


@dataclass(frozen=True, slots=True)
class History:
    """Receipts to learn from, and where they lie."""

    basis: str
    receipts: list[Receipt]

    def ratio(
        self, size: Callable[[Receipt], float], amount: Callable[[Receipt], float], num_to_come: int
    ) -> Range | None:
        asked = [receipt for receipt in self.receipts if asked_in(receipt)]
        return ratio_range([size(one) for one in asked], [amount(one) for one in asked], num_to_come=num_to_come)

    def seconds_a_row(self, num_to_come: int) -> Range | None:
        """Seconds of a worker for each row asked: from commit to commit, since chunks overlap."""
        sizes, seconds = [], []
        by_worker: dict[str, list[Receipt]] = {}
        for receipt in self.receipts:
            by_worker.setdefault(receipt.worker, []).append(receipt)
        for receipts in by_worker.values():
            receipts.sort(key=lambda receipt: receipt.committed)
            before = min(receipt.started for receipt in receipts)
            for receipt in receipts:
                sizes.append(float(asked_in(receipt)))
                seconds.append(
                    (datetime.fromisoformat(receipt.committed) - datetime.fromisoformat(before)).total_seconds()
                )
                before = receipt.committed
        return ratio_range(sizes, seconds, num_to_come=num_to_come)


def history_of(opened: OpenRun, outputs: list[EarlierOutput]) -> History | None:
    """Receipts of the first output whose tokens and times say something of this job's."""
    for basis, folder in [
        ("this output's receipts", opened.folder),
        *((f"receipts of {one.path}", one.folder) for one in outputs),
    ]:
        if _is_alike(folder.plan.parts, opened.plan.parts):
            receipts = (receipts[0] for receipts in folder.receipts_by_shard() if receipts[0].stages)
            found = list(itertools.islice(receipts, RECEIPTS_LOOKED_AT))
            if found:
                return History(f"{basis} ({len(found):,} chunks)", found)
    return None


def _is_alike(was: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(was[part] == now[part] for part in ("model",)) and all(
        was[part]["name"] == now[part]["name"] for part in ("labeler", "engine")
    )


def asked_in(receipt: Receipt) -> int:
    return receipt.rows - receipt.rows_reused


def stage_ratio(history: History | None, stage: str, amount: str, size: str, num_to_come: int) -> Range | None:
    if history is None:
        return None
    nothing: dict[str, int] = {}
    return history.ratio(
        lambda receipt: receipt.stages.get(stage, nothing).get(size, 0),
        lambda receipt: receipt.stages.get(stage, nothing).get(amount, 0),
        num_to_come,
    )


def asks_a_row(ask: Ask, history: History | None, num_chunks: int) -> Range | None:
    """As earlier chunks had them, repeated attempts included."""
    if history is None:
        return None
    return history.ratio(asked_in, lambda receipt: receipt.stages.get(ask.stage, {}).get("asks", 0), num_chunks)


# ------------------------------------------------------------------------------
# Rows, asks and prompt tokens counted in the text itself, which is streamed once.


@dataclass(slots=True)
class ExactCounts:
    """Exact counts over the open rows: those that are reused, and per stage asks and prompt tokens."""

    reused: int = 0
    asked: int = 0
    asks: dict[str, int] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    prefix: PrefixHit = field(default_factory=PrefixHit)


def count_exactly(
    opened: OpenRun, outputs: list[EarlierOutput], pending: dict[int, list[int]], history: History | None
) -> ExactCounts:
    """Stream the open chunks and count what a run would ask."""
    counts = ExactCounts()
    reuse = Reuse(opened.job, opened.plan, outputs)
    counter = RowCounter(opened, reuse, _answer_tokens(opened, history))
    for pair, is_known in _open_rows(opened, reuse, pending):
        if is_known:
            counts.reused += 1
        else:
            counter.count(pair, counts)
    return counts


def count_reused(opened: OpenRun, outputs: list[EarlierOutput], pending: dict[int, list[int]]) -> int:
    """Stream the open chunks and count the rows whose labels are known; their keys cost a hash of their text each."""
    reuse = Reuse(opened.job, opened.plan, outputs)
    return sum(is_known for _, is_known in _open_rows(opened, reuse, pending))


def _open_rows(opened: OpenRun, reuse: Reuse, pending: dict[int, list[int]]) -> Iterator[tuple[Pair, bool]]:
    """The rows of open chunks, and whether the label of each is known."""
    plan, keys = opened.plan, label_keys(opened.job, opened.plan)
    for number, chunks in pending.items():
        planned = plan.shards[number]
        row_ids = None if planned.row_ids is None else shard_row_ids(opened.store, planned)
        for _, pairs in read_chunks(opened.dataset, planned, row_ids, chunks):
            for pair, place in zip(pairs, reuse.find(pairs, keys.keys(pairs)), strict=True):
                yield pair, place is not None


class RowCounter:
    """Walks a labeler over rows with made-up answers (kept ones, where they are known), and counts what would be asked.

    Args:
        answer_tokens: how long the answers of each stage are made.
    Raises:
        MissingExtraError, ModelError: the engine can't count tokens here.
    """

    def __init__(self, opened: OpenRun, reuse: Reuse, answer_tokens: Mapping[str, float]) -> None:
        self._labeler, self._samples = opened.job.labeler, opened.job.spec.labeler.samples
        self._answers = reuse.answer_cache
        self._count_tokens = _token_counter(opened)
        self._answer_tokens = answer_tokens
        self._shared: set[tuple[bytes, str]] = set()

    def count(self, pair: Pair, counts: ExactCounts) -> None:
        """Add a row's asks, as often as it is sampled; an ask that a row before shares is not asked again."""
        counts.asked += 1
        for sample in range(self._samples):
            walk = self._labeler.label(pair)
            try:
                ask = next(walk)
                while True:
                    ask = walk.send(self._answer(ask, sample, counts))
            except (StopIteration, VerdictError):
                continue

    def _answer(self, ask: Ask, sample: int, counts: ExactCounts) -> Answer:
        answer = None
        is_asked = True
        if ask.shared_by is not None:
            key = self._answers.key(ask, 0, sample, 0)
            answer = self._answers.answer(key)
            is_asked = answer is None and (key, ask.shared_by) not in self._shared
            self._shared.add((key, ask.shared_by))
        if is_asked:
            num_tokens = self._count_tokens(ask)
            counts.asks[ask.stage] = counts.asks.get(ask.stage, 0) + 1
            counts.prompt_tokens[ask.stage] = counts.prompt_tokens.get(ask.stage, 0) + num_tokens
            counts.prefix.add(ask.stage, "\x1e".join(message.text for message in ask.messages), num_tokens)
        return answer or _made_up(ask, self._answer_tokens.get(ask.stage, 1.0))


def _made_up(ask: Ask, num_tokens: float) -> Answer:
    """An answer that reads, about as long as this stage's answers are."""
    pieces, said = [], dict[str, str]()
    left = int(num_tokens * 4)
    for section in ask.format.sections if ask.format is not None else ():
        if isinstance(section, Choice):
            content = section.options[0]
        elif isinstance(section, JsonIndices):
            content = json.dumps({key: [] for key in section.keys})
        elif isinstance(section, OptionLines):
            content = section.alone
        elif isinstance(section, Indices) or (
            isinstance(section, Text)
            and section.only_with is not None
            and said.get(section.only_with[0]) != (section.only_with[1] or None)
        ):
            content = ""
        elif isinstance(section, Text):
            content = "abc " * max(1, min(left // 4, section.max_tokens))
            left -= len(content)
        elif isinstance(section, Lines):
            content = "\n".join(f"{number} abc" for number in range(section.least))
        else:
            content = "none"
        said[section.tag] = content
        pieces.append(f"{opening_of(section)}{content.strip()}{closing_of(section)}")
    even = {name: Distribution(tuple(1 / len(labels) for _ in labels), 0.0) for name, _, labels in ask.decisions}
    return Answer(-1, "\n".join(pieces).removeprefix(ask.prefill), "stop", even)


def _token_counter(opened: OpenRun) -> Callable[[Ask], int]:
    """The engine's own count of a prompt's tokens, where it has one that needs no weights; else
    characters over four.
    """
    return opened.job.engine_class.token_counter(opened.job.spec.engine, overlong=opened.job.spec.input.overlong)


def _answer_tokens(opened: OpenRun, history: History | None) -> dict[str, float]:
    """Expected length of each stage's answers, in tokens."""
    found = {}
    for ask in opened.job.labeler.probe():
        ratio = stage_ratio(history, ask.stage, "output_tokens", "asks", 1)
        found[ask.stage] = ratio.value if ratio is not None else DEFAULT_OUTPUT_SHARE.value * ask.max_tokens
    return found


# ------------------------------------------------------------------------------
# Prompt tokens of an ask, counted in a few hundred rows of the text, which are read at a few places of the input.


PLACES, MOST_ROWS = 16, 16
"""Where rows are looked at, at worst each in a row group of its own, and how many there: neighbours, as a run asks."""

MOST_WHOLE_ROWS = 1024
"""Rows of the chunks that are looked at where the labeler sees whole queries."""

MADE_UP = 1.05
"""How far prompts with made-up answers in them may be off beside their length."""

SAMPLE_TEXT = "a sample of the rows"


class SampledStage(NamedTuple):
    """Of one stage: tokens of a prompt, and the share of them that neighbours have in common."""

    prompt_tokens: Range
    prefix_hit: float


def sampled_stages(opened: OpenRun, rates: Rates | None) -> Mapping[str, SampledStage]:
    """What a sample of the input says, drawn by the plan's fingerprint.

    Answers that later prompts show are made up: as short and as long as the stages' answers were, where that is known,
    else as they may be. Where a text can't be read or tokens can't be counted there is no sample: a run says so, and a
    plan needs neither.
    """
    try:
        return _sampled(opened, rates)
    except (InputError, MissingExtraError, ModelError):
        return {}


def _sampled(opened: OpenRun, rates: Rates | None) -> Mapping[str, SampledStage]:
    places = _places(opened)
    probe, reuse = opened.job.labeler.probe(), Reuse(opened.job, opened.plan, [])
    found: dict[str, list[SampledStage]] = {ask.stage: [] for ask in probe}
    lengths = {ask.stage: answer_length(ask, rates, opened.plan.rows) for ask in probe}
    ends = (0, 1, 2) if len(probe) > 1 else (1,)
    counters = [RowCounter(opened, reuse, {stage: length[end] for stage, length in lengths.items()}) for end in ends]
    prefixes = [PrefixHit() for _ in ends]
    of_ends: list[list[ExactCounts]] = [[] for _ in ends]
    pairs = pairs_by_number(opened.dataset, [row for rows in places for row in rows])
    for rows in places:
        for of_places, prefix in zip(of_ends, prefixes, strict=True):
            of_places.append(ExactCounts(prefix=prefix))
        for pair in itertools.islice(pairs, len(rows)):
            for counter, of_places in zip(counters, of_ends, strict=True):
                counter.count(pair, of_places[-1])
    num_places = -(-opened.plan.rows // len(places[0]))
    for ask, (of_places, prefix) in itertools.product(probe, zip(of_ends, prefixes, strict=True)):
        asks, tokens = (
            [getattr(one, what).get(ask.stage, 0) for one in of_places] for what in ("asks", "prompt_tokens")
        )
        each_ask = ratio_range(asks, tokens, num_to_come=num_places, is_sample=True)
        if each_ask is not None:
            found[ask.stage].append(SampledStage(each_ask, prefix.share(ask.stage)))
    return {stage: _joined(some) for stage, some in found.items() if some}


def _places(opened: OpenRun) -> list[list[int]]:
    """Neighbouring rows at some places; whole chunks where the labeler sees whole queries."""
    rng, plan = random.Random(opened.plan.fingerprint), opened.plan
    if not opened.dataset.reads.whole_query:
        each = min(MOST_ROWS, max(1, plan.rows // PLACES))
        firsts = sorted(rng.sample(range(plan.rows // each), min(PLACES, plan.rows // each)))
        return [list(range(first * each, (first + 1) * each)) for first in firsts]
    chunks = [(shard, number) for shard in plan.shards for number in range(len(shard.chunks))]
    most = max(1, MOST_WHOLE_ROWS // plan.chunk_rows)
    drawn = rng.sample(chunks, min(PLACES, most, len(chunks)))
    return [chunk_row_ids(opened.store, shard)[number].tolist() for shard, number in drawn]


def _joined(found: Sequence[SampledStage]) -> SampledStage:
    """What holds of short answers, of likely ones and of long ones."""
    likely = found[len(found) // 2]
    low, high = min(one.prompt_tokens.low for one in found), max(one.prompt_tokens.high for one in found)
    off = 1.0 if len(found) == 1 else MADE_UP
    return SampledStage(Range(low / off, likely.prompt_tokens.value, high * off), likely.prefix_hit)


# ------------------------------------------------------------------------------
# Asks and tokens of each stage, from what alike runs took or was counted.


def estimated_stages(
    opened: OpenRun,
    asked: Range,
    history: History | None,
    kept: set[str],
    counts: ExactCounts | None,
    num_chunks: int,
    sampled: Mapping[str, SampledStage],
    rates: Rates | None,
) -> dict[str, StageEstimate]:
    plan = opened.plan
    chars = plan.text_bytes / max(1, plan.rows)
    found = {}
    for ask in opened.job.labeler.probe():
        template, has_document = _shape(ask)
        measured = None if rates is None else rates.stages.get(ask.stage)
        output = stage_ratio(history, ask.stage, "output_tokens", "asks", num_chunks)
        if counts is not None:
            further = _further(opened, counts, history, num_chunks)
            asks = Range.exact(counts.asks.get(ask.stage, 0)).plus(further)
            prompt = Range.exact(counts.prompt_tokens.get(ask.stage, 0))
            prompt = prompt.plus(further * (prompt.value / max(1.0, asks.low))).rounded()
            share = counts.prefix.share(ask.stage)
            hit = Range(0.0, share, min(1.0, share + 0.1))
        else:
            asks = _asks(ask, opened, asked, history, kept, num_chunks, rates)
            seen = sampled.get(ask.stage)
            data = Range.exact(chars) if has_document else Range(0.0, chars / 10, chars)
            each = stage_ratio(history, ask.stage, "prompt_tokens", "asks", num_chunks)
            each = each or (None if seen is None else seen.prompt_tokens)
            each = each or data.plus(Range.exact(template)).over(DEFAULT_CHARS).cut(
                float(opened.job.spec.engine.max_prompt_tokens)
            )
            prompt = (asks * each).rounded()
            known = stage_ratio(history, ask.stage, "cached_tokens", "prompt_tokens", num_chunks)
            hit = known or (
                prefix_hit(measured, each, asks.value)
                if measured is not None
                else Range(0.0, template / max(1.0, template + data.value) if seen is None else seen.prefix_hit, 1.0)
            )
        output = output or answer_length(ask, rates, asks.value)
        found[ask.stage] = StageEstimate(asks.rounded(), prompt, (asks * output).rounded(), hit.rounded(4))
    return found


def _most_asks(opened: OpenRun) -> MostAsks:
    labeler, columns = opened.job.labeler, [column.name for column in opened.dataset.reads.columns]
    return labeler.most_asks(columns)


def _further(opened: OpenRun, counts: ExactCounts, history: History | None, num_chunks: int) -> Range:
    """Asks beside those that were counted, which only the model's answers bring: none to all, as many as before or
    half of them.
    """
    most = float(counts.asked * opened.job.spec.labeler.samples * _most_asks(opened).further)
    if not most:
        return Range.exact(0.0)
    (ask,) = opened.job.labeler.probe()
    ratio = asks_a_row(ask, history, num_chunks)
    likely = most / 2 if ratio is None else counts.asked * ratio.value - counts.asks.get(ask.stage, 0)
    return Range(0.0, min(max(0.0, likely), most), most)


def _asks(
    ask: Ask,
    opened: OpenRun,
    asked: Range,
    history: History | None,
    kept: set[str],
    num_chunks: int,
    rates: Rates | None,
) -> Range:
    plan, ratio = opened.plan, asks_a_row(ask, history, num_chunks)
    samples, attempts = float(opened.job.spec.labeler.samples), opened.job.spec.labeler.attempts
    measured = None if rates is None else rates.stages.get(ask.stage)
    if ask.shared_by is None:
        most = float(sum(_most_asks(opened)))
        if rates is None or measured is None:
            firsts, repeated = Range(1.0, (1 + most) / 2, most), DEFAULT_REPEATS
        else:
            firsts = first_asks_a_row(measured, rates, samples, most)
            repeated = repeats(measured, attempts, asked.value * samples)
        return asked * (ratio or repeated * firsts * samples)
    share = samples * plan.queries / max(1, plan.rows)
    repeated = Range(1.0, 1.0, DEFAULT_REPEATS.high)
    if measured is not None:
        repeated = repeats(measured, attempts, asked.value * share)
    each = ratio or repeated * share
    if ask.stage in kept:  # answers that are there: how many, only the text tells
        return Range(0.0, 0.0, (asked * each).high)
    queries = asked * each
    most_shared = samples * min(asked.high, plan.queries) * repeated.high
    return Range(queries.low, queries.value, max(queries.high, most_shared))


def _shape(ask: Ask) -> tuple[float, bool]:
    """Characters of a stage's templates, and whether it shows the document."""
    template = sum(len(part) for message in ask.messages for part in message.parts[::2])
    return float(template), any(DOCUMENT_FIELD in message.fields for message in ask.messages)
