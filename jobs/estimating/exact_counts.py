"""Rows, asks and prompt tokens counted in the text itself, which is streamed once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from relabel.jobs.estimating.history import History, stage_ratio
from relabel.jobs.planning.open_runs import OpenRun
from relabel.jobs.running.reusing import Reuse, label_keys
from relabel.labelers.engines.registry import CountsTokens
from relabel.manifests.asks import Answer, Ask, Distribution
from relabel.manifests.errors import VerdictError
from relabel.manifests.formats import Choice, Indices, JsonIndices, Lines, OptionLines, Text, closing_of, opening_of
from relabel.manifests.labels import Pair
from relabel.manifests.runs.earlier_outputs import EarlierOutput
from relabel.manifests.runs.estimates import (
    DEFAULT_CHARS,
    DEFAULT_OUTPUT_SHARE,
    PrefixHit,
)
from relabel.manifests.runs.plans import shard_row_ids
from relabel.manifests.runs.rows import read_chunks


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
        for _, pairs in read_chunks(opened.dataset, planned, row_ids, chunks, readings=opened.readings):
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
