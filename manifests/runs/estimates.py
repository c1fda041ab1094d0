"""What a run will ask, take and cost, said before it: numbers with 95 % intervals, and where each comes from.

Pure: ratios in, ranges out. `jobs/estimating/estimating.py` gathers the ratios (from receipts of this output or of
reused ones, from the model's last run on this device or a probe, else the stated defaults) and the counts (from
footers, or from the text itself under `plan --exact`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from relabel.manifests.runs.ranges import Range

CHARS_PER_TOKEN = 4.0
CACHE_BLOCK_TOKENS = 16
"""Tokens that a prefix cache keeps or drops together: vLLM's default."""


DEFAULT_OUTPUT_SHARE = Range(0.02, 0.25, 1.0)
"""Of a stage's token cap that an answer takes, where no run has said."""
DEFAULT_REPEATS = Range(1.0, 1.02, 1.3)
"""Asks for each row and stage, repeated attempts included, where no run has said."""
DEFAULT_CHARS = Range(3.0, CHARS_PER_TOKEN, 6.0)
"""Characters a token."""


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage: requests and their tokens. `prefix_hit` is the share of prompt tokens that the engine's cache should
    hold.
    """

    asks: Range
    prompt_tokens: Range
    output_tokens: Range
    prefix_hit: Range


@dataclass(frozen=True, slots=True)
class EstimateBasis:
    """Where figures come from, in words; estimates of earlier versions name none, or not all."""

    rows_reused: str = ""
    tokens: str = ""
    output_tokens: str = ""
    prefix_hit: str = ""
    seconds: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run of some rows will come to.

    Args:
        rows: rows that were open when this was said.
        rows_reused, rows_asked: of them.
        seconds: of one worker; two take half as long and as much together. Starting the engine comes on top. None where
            no rate is known.
        cost: `seconds` at `cost_per_gpu_hour` for the GPUs of a worker, and tokens at the engine's prices; None where
            there are none, or where the seconds that cost are not known.
        is_exact: rows, asks and prompt tokens were counted in the text.
        basis: where they come from.
    """

    rows: int
    rows_reused: Range
    rows_asked: Range
    stages: dict[str, StageEstimate]
    seconds: Range | None
    cost: Range | None
    is_exact: bool
    basis: EstimateBasis = EstimateBasis()

    @property
    def prompt_tokens(self) -> Range:
        return _sum(stage.prompt_tokens for stage in self.stages.values())

    @property
    def output_tokens(self) -> Range:
        return _sum(stage.output_tokens for stage in self.stages.values())

    @property
    def prefix_hit(self) -> Range:
        """Over all stages, by their prompt tokens."""
        total = self.prompt_tokens.value
        if not total:
            return Range.exact(0.0)
        shares = [(stage.prefix_hit, stage.prompt_tokens.value / total) for stage in self.stages.values()]
        return Range(*(math.fsum(hit[i] * share for hit, share in shares) for i in range(3)))


@dataclass(frozen=True, slots=True)
class Actual:
    """What a run came to, in the estimate's terms."""

    rows: int
    rows_reused: int
    stages: dict[str, dict[str, int]]
    seconds: float


@dataclass(frozen=True, slots=True)
class PlannedFigure:
    """A figure of the plan: low, expected and high as they were said, what came, and whether it lies between them."""

    figure: str
    planned: tuple[float, float, float]
    actual: float
    is_within: bool


def against(planned: Estimate, actual: Actual) -> list[PlannedFigure]:
    """Plan against actual, each figure.

    Meant for a run that is done; in the middle of one the actual figures are smaller for that reason alone.
    """
    lines: list[tuple[str, Range, float]] = [("rows_reused", planned.rows_reused, actual.rows_reused)]
    nothing = StageEstimate(*(Range.exact(0.0),) * 4)
    for name in {**planned.stages, **actual.stages}:
        said, came = planned.stages.get(name, nothing), actual.stages.get(name, {})
        lines.append((f"{name}.asks", said.asks, came.get("asks", 0)))
        lines.append((f"{name}.prompt_tokens", said.prompt_tokens, came.get("prompt_tokens", 0)))
        lines.append((f"{name}.output_tokens", said.output_tokens, came.get("output_tokens", 0)))
    prompts = sum(came["prompt_tokens"] for came in actual.stages.values())
    cached = sum(came["cached_tokens"] for came in actual.stages.values())
    lines.append(("prefix_hit", planned.prefix_hit, cached / prompts if prompts else 0.0))
    if planned.seconds is not None:
        lines.append(("worker_seconds", planned.seconds, actual.seconds))
    return [
        PlannedFigure(name, (said.low, said.value, said.high), round(number, 6), said.holds(number))
        for name, said, number in lines
    ]


class PrefixHit:
    """The share of prompt tokens that an engine's prefix cache can serve, from the prompts in the order in which they
    are asked.

    A prompt shares what it has in common with the one before it in its own stage, or with the one just before it in any
    stage (a second turn goes on from the first), in whole blocks. What lies further back is not counted: an engine
    keeps far more than one prompt, but how much depends on its memory, so this is a floor where queries come one after
    the other.
    """

    def __init__(self, block_tokens: int = CACHE_BLOCK_TOKENS) -> None:
        self._block = block_tokens
        self._last: dict[str, str] = {}
        self._just_before = ""
        self.tokens: dict[str, int] = {}
        self.hits: dict[str, int] = {}

    def add(self, stage: str, prompt: str, num_tokens: int) -> None:
        """The next prompt: its text from the first character on, and its length in tokens."""
        shared = max(common_prefix(prompt, self._last.get(stage, "")), common_prefix(prompt, self._just_before))
        if prompt:
            # the last token is always computed, so that there is something to go on from
            tokens = min(int(num_tokens * shared / len(prompt)), num_tokens - 1)
            self.hits[stage] = self.hits.get(stage, 0) + max(0, tokens) // self._block * self._block
        self.tokens[stage] = self.tokens.get(stage, 0) + num_tokens
        self._last[stage] = self._just_before = prompt

    def share(self, stage: str) -> float:
        """Of a stage's prompt tokens; 0 where none was added."""
        return self.hits.get(stage, 0) / self.tokens[stage] if self.tokens.get(stage) else 0.0


def common_prefix(one: str, other: str) -> int:
    """Characters that two texts begin with in common. By halves, so that the comparing is done by the interpreter's own
    code.
    """
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sum(ranges: Iterable[Range]) -> Range:
    return functools.reduce(Range.plus, ranges, Range.exact(0.0))
