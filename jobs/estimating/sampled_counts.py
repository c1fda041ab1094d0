"""Prompt tokens of an ask, counted in a few hundred rows of the text, which are read at a few places of the input."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relabel.jobs.estimating.exact_counts import ExactCounts, RowCounter
from relabel.jobs.estimating.rated import answer_length
from relabel.jobs.planning.open_runs import OpenRun
from relabel.jobs.running.rates import Rates
from relabel.jobs.running.reusing import Reuse
from relabel.manifests.errors import InputError, MissingExtraError, ModelError
from relabel.manifests.runs.estimates import PrefixHit
from relabel.manifests.runs.picked_rows import pairs_by_number
from relabel.manifests.runs.plans import chunk_row_ids
from relabel.manifests.runs.ranges import Range, ratio_range

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
