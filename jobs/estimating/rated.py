"""What a model's last run on this device, or a probe, says of asks, answers and seconds to come.

Other rows, and other times of day, are what the intervals must hold beside chance (`OTHER_ROWS` and the others);
`benchmarks/estimates_hold.py` holds them against real models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from relabel.jobs.running.live import StageSeen
from relabel.jobs.running.rates import Rates
from relabel.manifests.asks import Ask
from relabel.manifests.runs.estimates import DEFAULT_OUTPUT_SHARE, StageEstimate
from relabel.manifests.runs.ranges import Range

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
