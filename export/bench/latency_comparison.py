"""What a comparison of models says of each pair, and in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class ComparedPair:
    """Two models to compare.

    Args:
        ours: a precision.
        theirs: another of the same provider, or the name of what was asked for.
        answers_differ_by: the largest |Δp|; None where they share no head.
    """

    provider: str
    ours: str
    theirs: str
    answers_differ_by: float | None


@dataclass(frozen=True, kw_only=True)
class ComparedModels(ComparedPair):
    """Two models that took turns on one batch; see `comparisons.Turns`. `ratio` is our time over theirs."""

    cell: str
    rounds: int
    ratio: float
    low: float | None
    high: float | None
    cpu_ratio: float | None
    cpu_low: float | None
    cpu_high: float | None
    ours_ms: float
    theirs_ms: float
    ratios: list[float]


class Finding(NamedTuple):
    """One thing to know.

    Args:
        kind: `cpu_fallback`, `cpu_nodes`, `slower_than_fp32`, `noisy`, `too_few_samples`, `too_few_rounds`,
            `not_run`, `over_max_tokens`, `slo_missed`, `answers_differ`, `answers_strayed`,
            `busy_machine`, `over_quota`.
        where: provider and precision, or `machine`.
        text: a sentence.
    """

    kind: str
    where: str
    text: str
