"""What a run will ask, take and cost, said before it: numbers with 95 % intervals, and where each comes from.

Pure: ratios in, ranges out. `jobs/estimating/estimating.py` gathers the ratios (from receipts of this output or of
reused ones, else the stated defaults) and the counts (from footers, or from the text itself under `plan --exact`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CHARS_PER_TOKEN = 4.0
CACHE_BLOCK_TOKENS = 16
"""Tokens that a prefix cache keeps or drops together: vLLM's default."""
_Z95 = 1.959964


class Range(NamedTuple):
    """A number with its 95 % interval. Exact numbers have `low == value == high`."""

    low: float
    value: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Range:
        return cls(value, value, value)

    def __mul__(self, other: object) -> Range:  # a tuple's `*` repeats it, which no range wants
        if isinstance(other, Range):
            return Range(self.low * other.low, self.value * other.value, self.high * other.high)
        assert isinstance(other, int | float)
        return Range(self.low * other, self.value * other, self.high * other)

    def plus(self, other: Range) -> Range:
        """The sum, as if both missed in the same direction: wide rather than wrong."""
        return Range(self.low + other.low, self.value + other.value, self.high + other.high)

    def over(self, other: Range) -> Range:
        """The quotient of non-negative ranges; `other` is above 0."""
        return Range(self.low / other.high, self.value / other.value, self.high / other.low)

    def cut(self, most: float) -> Range:
        """The mean of numbers of which each is cut to `most`, from their mean before. What lies below a mean over
        `most` nobody knows, so that the low end may be half of `most`.
        """
        return self if self.high <= most else Range(min(self.low, most / 2), min(self.value, most), most)

    def holds(self, number: float) -> bool:
        return self.low <= number <= self.high

    def rounded(self, digits: int = 0) -> Range:
        return Range(*(round(one, digits) for one in self))


DEFAULT_OUTPUT_SHARE = Range(0.02, 0.25, 1.0)
"""Of a stage's token cap that an answer takes, where no run has said."""
DEFAULT_REPEATS = Range(1.0, 1.02, 1.3)
"""Asks for each row and stage, repeated attempts included, where no run has said."""
DEFAULT_TOKENS_PER_S = Range(500.0, 5_000.0, 50_000.0)
"""Tokens (prompt and output) that one worker handles in a second, where no run has said: a CPU to an H200."""
DEFAULT_CHARS = Range(3.0, CHARS_PER_TOKEN, 6.0)
"""Characters a token."""


def ratio_range(sizes: Sequence[float], amounts: Sequence[float], *, num_to_come: int) -> Range | None:
    """What comes of a unit of size, from chunks that were seen, for the mean of chunks to come.

    The ratio estimator of survey sampling: sum of amounts over sum of sizes, its interval from the chunks' own
    deviations from it, with the variance of the mean of `num_to_come` further chunks added. One chunk tells nothing of
    a spread: half to double.

    Args:
        sizes: rows (or asks) of each chunk; some above 0.
        amounts: tokens, asks or seconds of each.
    Returns:
        None if no chunk has a size.
    """
    pairs = [(size, amount) for size, amount in zip(sizes, amounts, strict=True) if size > 0]
    total = math.fsum(size for size, _ in pairs)
    if not pairs:
        return None
    ratio = math.fsum(amount for _, amount in pairs) / total
    if len(pairs) == 1:
        return Range(ratio / 2, ratio, ratio * 2)
    spread = math.sqrt(math.fsum((amount - ratio * size) ** 2 for size, amount in pairs) / (len(pairs) - 1))
    error = spread / (total / len(pairs)) * math.sqrt(1 / len(pairs) + 1 / max(1, num_to_come))
    return Range(max(0.0, ratio - _t95(len(pairs) - 1) * error), ratio, ratio + _t95(len(pairs) - 1) * error)


def _t95(freedom: int) -> float:
    """Student's t at 97.5 %: the Cornish-Fisher expansion, within 0.1 from 3 degrees of freedom on; below, the table's
    values.
    """
    if freedom <= 2:
        return (12.706, 4.303)[freedom - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


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
        seconds: of one worker; two take half as long and as much together. Starting the engine comes on top.
        cost: `seconds` at `cost_per_gpu_hour` for the GPUs of a worker; None where no price is given.
        is_exact: rows, asks and prompt tokens were counted in the text.
        basis: where they come from.
    """

    rows: int
    rows_reused: Range
    rows_asked: Range
    stages: dict[str, StageEstimate]
    seconds: Range
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
    total = Range.exact(0.0)
    for one in ranges:
        total = total.plus(one)
    return total
