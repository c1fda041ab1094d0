"""Which of a bundle's models labels fastest: by its own measurements, else by what is fastest as a rule.

Only models that passed their gate count. The cell with the most pairs that was measured of all of them decides, since
labels are made in full batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from relabel.export.bench.latency_facts import BenchFacts
from relabel.export.parity_records import Parity
from relabel.manifests.errors import UsageError

UNMEASURED = {"cpu": ("int8", "int8-static", "fp32", "fp16"), "cuda": ("fp16", "fp32", "int8-static", "int8")}
"""Precisions by provider, fastest first, where a bundle holds no measurement: int8 takes 0.4 of fp32's time on a CPU,
and up to nine times as long on a GPU, where onnxruntime has few kernels for it.
"""


class ChosenPrecision(NamedTuple):
    """A precision, and why it is taken, in words."""

    precision: str
    reason: str


def choose_precision(parity: Parity, latency: BenchFacts | None, provider: str, wish: str | None) -> ChosenPrecision:
    """The precision to label with.

    Args:
        latency: what a bench of this bundle found; None where there was none.
        provider: `cpu` or `cuda`.
        wish: the precision that is named; None for the fastest.
    Raises:
        UsageError: no model of that precision passed a gate.
    """
    passed = [model.precision for model in parity.models if model.has_passed]
    if wish is not None and wish not in passed:
        raise UsageError(f"--precision {wish}: those of this bundle that passed their gate are {', '.join(passed)}.")
    choice = (
        ChosenPrecision(wish, "named")
        if wish is not None
        else _measured(passed, latency, provider) or _likely(passed, provider)
    )
    model = next(model for model in parity.models if model.precision == choice.precision)
    doubts = list(model.doubts)
    if model.could_lose is not None:
        doubts.insert(0, f"it could lose {model.could_lose:.1f} points of macro F1")
    if not doubts:
        return choice
    doubt = f"its gate is undecided: {'; '.join(doubts)}"
    return ChosenPrecision(choice.precision, f"{choice.reason}; {doubt}")


def _measured(passed: Sequence[str], latency: BenchFacts | None, provider: str) -> ChosenPrecision | None:
    rates: dict[str, dict[tuple[int, str], float]] = {}
    for model in latency.models if latency else ():
        if model.provider == provider and model.precision in passed:
            found = {(row.rows, row.cell): row.pairs_per_s for row in model.closed if row.pairs_per_s is not None}
            rates.setdefault(model.precision, {}).update(found)
    cells = set.intersection(*map(set, rates.values())) if rates else set()
    if not cells:
        return None
    cell = max(cells)
    best = max(rates, key=lambda precision: rates[precision][cell])
    return ChosenPrecision(best, f"the fastest of {', '.join(rates)} at {cell[1]} in the bundle's bench")


def _likely(passed: Sequence[str], provider: str) -> ChosenPrecision:
    best = next(name for name in UNMEASURED[provider] if name in passed)
    return ChosenPrecision(
        best, f"no bench of this bundle on {provider}, where it is as a rule the fastest of {', '.join(passed)}"
    )
