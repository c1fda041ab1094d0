"""Asks and tokens of each stage, from what alike runs took or was counted."""

from __future__ import annotations

from collections.abc import Mapping

from relabel.jobs.estimating.exact_counts import ExactCounts
from relabel.jobs.estimating.history import History, asks_a_row, stage_ratio
from relabel.jobs.estimating.rated import answer_length, first_asks_a_row, prefix_hit, repeats
from relabel.jobs.estimating.sampled_counts import SampledStage
from relabel.jobs.planning.open_runs import OpenRun
from relabel.jobs.running.rates import Rates
from relabel.labelers.registry import AsksOften, MostAsks
from relabel.manifests.asks import DOCUMENT_FIELD, Ask
from relabel.manifests.runs.estimates import (
    DEFAULT_CHARS,
    DEFAULT_REPEATS,
    StageEstimate,
)
from relabel.manifests.runs.ranges import Range


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
    return labeler.most_asks(columns) if isinstance(labeler, AsksOften) else MostAsks(1, 0)


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
