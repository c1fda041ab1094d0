"""What distributions at decisions cost: the one place that holds the measured figures, and what they say about a job.

An engine's class says which way it takes (`decision_costs` of `registry.EngineClass`), before any model is loaded;
`plan` prints it. A ratio is requests/s with distributions over requests/s without: 0.93 means that they cost 7 % of the
throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from relabel.manifests.asks import Ask

Way = Literal["second_request", "inline", "same_pass", "alone", "unknown"]
"""`second_request` and `inline` as in the vLLM engine's `decisions`; `same_pass`: read from the logits that the
answer's own pass makes;
`alone`: the stage generates nothing, its one request is the decision; `unknown`: only the running engine knows.
"""


class Measurement(NamedTuple):
    """One measured ratio, for one decision a request."""

    way: Way
    parameters: float
    low: float
    high: float


MEASURED = (
    Measurement("second_request", 1.5e9, 0.93, 0.955),
    Measurement("second_request", 7.6e9, 0.990, 0.990),
    Measurement("inline", 1.5e9, 0.82, 0.82),
    Measurement("inline", 7.6e9, 0.985, 0.985),
)
SOURCE = "measured once with vLLM 0.26 on an H200, bfloat16, 1,200 tokens in, 256 out, one decision of three labels"
"""Of all rows of `MEASURED`. The cost is work in Python for each request or token, so it shrinks as the model grows."""

NEAR = 1.5
"""A figure speaks for models up to so many times larger or smaller; between the measured sizes
nothing is interpolated.
"""


class DecisionCost(NamedTuple):
    """What the distributions of one stage cost.

    Args:
        decisions: places in one answer of the stage where a distribution is wanted, at least 1.
        ratio: requests/s of the stage with distributions over those without, as (lowest, highest); None where nobody
            measured.
        basis: where the ratio is from, or why there is none.
    """

    stage: str
    decisions: int
    way: Way
    ratio: tuple[float, float] | None
    basis: str


def plan_decision_costs(
    asks: Sequence[Ask], way: Way, *, parameters: int | None = None, unmeasured: str | None = None
) -> list[DecisionCost]:
    """The cost of every stage that has decisions.

    Args:
        asks: one ask a stage, as a labeler's `probe` gives them.
        way: how the engine takes distributions beside an answer.
        parameters: of the model; None if unknown.
        unmeasured: why the figures do not speak for this engine at all, if so.
    """
    return [_cost(ask, way, parameters, unmeasured) for ask in asks if ask.decisions]


def _cost(ask: Ask, way: Way, parameters: int | None, unmeasured: str | None) -> DecisionCost:
    count = len(ask.decisions)
    if ask.max_tokens == 0:
        return DecisionCost(
            ask.stage, count, "alone", (1.0, 1.0), "the stage asks for nothing else: one request of one token"
        )
    if unmeasured is not None:
        return DecisionCost(ask.stage, count, way, None, unmeasured)
    if parameters is None:
        return DecisionCost(ask.stage, count, way, None, "the model's number of parameters is not known")
    found = _nearest(way, parameters)
    if found is None:
        sizes = " and ".join(f"{row.parameters / 1e9:.1f}" for row in MEASURED if row.way == way)
        return DecisionCost(
            ask.stage,
            count,
            way,
            None,
            f"measured for {sizes} billion parameters alone, the model has {parameters / 1e9:.2f}",
        )
    if way == "inline" or count == 1:  # with every token, whatever the number of decisions
        return DecisionCost(ask.stage, count, way, (found.low, found.high), SOURCE)
    return DecisionCost(
        ask.stage,
        count,
        way,
        (_times(found.low, count), _times(found.high, count)),
        f"reckoned for {count} decisions; {SOURCE}",
    )


def _nearest(way: Way, parameters: int) -> Measurement | None:
    near = [row for row in MEASURED if row.way == way and row.parameters / NEAR <= parameters <= row.parameters * NEAR]
    return min(near, key=lambda row: abs(row.parameters - parameters), default=None)


def _times(ratio: float, count: int) -> float:
    """The ratio of `count` second requests where one has `ratio`: each adds the same time."""
    return 1.0 / (1.0 + count * (1.0 / ratio - 1.0))
