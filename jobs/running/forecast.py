"""How long a run still takes, as an interval: first from the rates of the engine's prefills and decoding and the plan's
estimate of tokens, then from the answers that came, later from the rows that are done; the more of them, the narrower.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from relabel.manifests.asks import NO_WORK, EngineWork
from relabel.manifests.runs.estimates import Estimate
from relabel.manifests.runs.ranges import Range

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
