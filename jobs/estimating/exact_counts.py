"""Rows, asks and prompt tokens counted in the text itself, which is streamed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from jobs.estimating.history import History, stage_ratio
from jobs.planning.open_runs import OpenRun
from jobs.running.reusing import Reuse, label_keys
from labelers.engines.registry import CountsTokens
from manifests.asks import Answer, Ask, Distribution
from manifests.errors import VerdictError
from manifests.formats import Choice, Indices, JsonIndices, Lines, OptionLines, Text, closing_of, opening_of
from manifests.labels import Pair
from manifests.runs.earlier_outputs import EarlierOutput
from manifests.runs.estimates import (
    DEFAULT_CHARS,
    DEFAULT_OUTPUT_SHARE,
    PrefixHit,
)
from manifests.runs.plans import shard_row_ids
from manifests.runs.rows import read_chunks


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
    job, plan = opened.job, opened.plan
    counts = ExactCounts()
    keys = label_keys(job, plan)
    reuse = Reuse(job, plan, outputs)
    count_tokens = _token_counter(opened)
    lengths = _answer_tokens(opened, history)
    shared: set[tuple[bytes, str]] = set()
    for number, chunks in pending.items():
        planned = plan.shards[number]
        row_ids = None if planned.row_ids is None else shard_row_ids(opened.store, planned)
        for _, pairs in read_chunks(opened.dataset, planned, row_ids, chunks, readings=opened.readings):
            for pair, place in zip(pairs, reuse.find(pairs, keys.keys(pairs)), strict=True):
                if place is not None:
                    counts.reused += 1
                    continue
                counts.asked += 1
                for sample in range(job.spec.labeler.samples):
                    _walk(opened, pair, sample, reuse, shared, counts, count_tokens, lengths)
    return counts


def _walk(
    opened: OpenRun,
    pair: Pair,
    sample: int,
    reuse: Reuse,
    shared: set[tuple[bytes, str]],
    counts: ExactCounts,
    count_tokens: Callable[[Ask], int],
    lengths: dict[str, float],
) -> None:
    """Walk a labeler over one pair with made-up answers (kept ones, where they are known), counting what would be
    asked.
    """
    walk = opened.job.labeler.label(pair)
    try:
        ask = next(walk)
        while True:
            answer = None
            is_asked = True
            if ask.shared_by is not None:
                key = reuse.answer_cache.key(ask, 0, sample, 0)
                answer = reuse.answer_cache.answer(key)
                is_asked = answer is None and (key, ask.shared_by) not in shared
                shared.add((key, ask.shared_by))
            if is_asked:
                num_tokens = count_tokens(ask)
                counts.asks[ask.stage] = counts.asks.get(ask.stage, 0) + 1
                counts.prompt_tokens[ask.stage] = counts.prompt_tokens.get(ask.stage, 0) + num_tokens
                counts.prefix.add(ask.stage, "\x1e".join(message.text for message in ask.messages), num_tokens)
            ask = walk.send(answer or _made_up(ask, lengths.get(ask.stage, 1.0)))
    except (StopIteration, VerdictError):
        return


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
    engine = opened.job.engine_class
    if isinstance(engine, CountsTokens):
        return engine.token_counter(opened.job.spec.engine, overlong=opened.job.spec.input.overlong)
    return lambda ask: int(sum(len(message.text) for message in ask.messages) / DEFAULT_CHARS.value) + 1


def _answer_tokens(opened: OpenRun, history: History | None) -> dict[str, float]:
    """Expected length of each stage's answers, in tokens."""
    found = {}
    for ask in opened.job.labeler.probe():
        ratio = stage_ratio(history, ask.stage, "output_tokens", "asks", 1)
        found[ask.stage] = ratio.value if ratio is not None else DEFAULT_OUTPUT_SHARE.value * ask.max_tokens
    return found
