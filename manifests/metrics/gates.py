"""Gates: what a figure must reach before work goes on, as a spec (`macro_f1: ">=0.9*teacher"`) or a flag says it.

`parse_gate(name, text)` reads one, `judge_gate(gate, figures, teacher)` holds it against figures. A figure that falls
short raises nothing: the caller keeps what was made, shows the verdict and ends with exit code 5.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.specs import nearest

TEACHER = "teacher"
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_BOUND = re.compile(
    rf"(?P<sign>>=|<=|>|<)\s*(?:(?P<number>{_NUMBER})\s*(?:\*\s*(?P<times>{TEACHER}))?|(?P<plain>{TEACHER}))"
)
_FLAG = re.compile(r"(?P<name>[^<>=\s]+)\s*(?P<bound>[<>].*)")


@dataclass(frozen=True)
class Gate:
    """A figure and its bound.

    Args:
        name: the figure as it was written.
        figure: its own name.
        text: the bound as it was written.
        sign: `>=`, `<=`, `>` or `<`.
        number: the bound, or what the teacher's figure is multiplied by.
        is_of_teacher: the bound is `number` times the teacher's figure.
    """

    name: str
    figure: str
    text: str
    sign: str
    number: float
    is_of_teacher: bool


@dataclass(frozen=True)
class GateVerdict:
    """The outcome of a gate.

    Args:
        value, bound: the figure and what it was compared with; None where one is undefined, which never passes.
        has_passed: whether it holds.
    """

    gate: str
    figure: str
    value: float | None
    bound: float | None
    has_passed: bool

    def __str__(self) -> str:
        value, bound = ("undefined" if number is None else f"{number:.4f}" for number in (self.value, self.bound))
        return f"{self.gate}: {'passed' if self.has_passed else 'refused'}, {self.figure} is {value}, the bound {bound}"

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def parse_gate(name: str, text: str) -> Gate:
    """Read a gate.

    Args:
        name: a figure of `relabel evaluate`, or one of a metric's `aliases`.
        text: a sign and a bound: `>=0.62`, `<0.1`, `>=0.9*teacher`, `>=teacher`.
    Raises:
        ConfigError: it is not that.
    """
    found = _BOUND.fullmatch(text.strip())
    sign, written, times, plain = found.group("sign", "number", "times", "plain") if found else ("", None, None, None)
    number = 1.0 if written is None else float(written)
    if not sign or not name or not math.isfinite(number):
        raise ConfigError(
            f'require: `{name}: "{text}"` is no gate. Write a sign and a bound, for instance ">=0.62" or '
            f'">=0.9*{TEACHER}".'
        )
    return Gate(name, _own_name(name), text.strip(), sign, number, bool(times or plain))


def _own_name(name: str) -> str:
    from relabel.manifests.metrics.registry import METRICS  # brings numpy, which a spec without gates does without

    return next((metric.name for metric in METRICS if name in metric.aliases), name)


def parse_gates(require: Mapping[str, str]) -> list[Gate]:
    """The gates of a spec's `require`, in its order.

    Raises:
        ConfigError: see `parse_gate`.
    """
    return [parse_gate(name, text) for name, text in require.items()]


def parse_flag(text: str) -> Gate:
    """A gate in one piece, `macro_f1>=0.9*teacher`.

    Raises:
        UsageError: it is none.
    """
    found = _FLAG.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--require {text}: write a figure, a sign and a bound, for instance --require 'macro_f1>=0.9*{TEACHER}'"
        )
    name, bound = found.group("name", "bound")
    try:
        return parse_gate(name, bound)
    except ConfigError as exc:
        raise UsageError(
            f"--require {text}: the bound `{bound}` is neither a number nor a number times `{TEACHER}`."
        ) from exc


def judge_gate(
    gate: Gate, figures: Mapping[str, float | None], teacher: Mapping[str, float | None] | None
) -> GateVerdict:
    """Hold a gate against figures.

    Args:
        figures: by name; None where a figure is undefined.
        teacher: the same of the teacher; None where there is no teacher.
    Raises:
        ConfigError: no such figure (names the nearest), or the gate names a teacher that is not there.
    """
    if gate.figure not in figures:
        hint = nearest(gate.figure, list(figures))
        raise ConfigError(
            f"require: no figure `{gate.name}`; known are {', '.join(figures)}."
            + (f" Did you mean `{hint}`?" if hint else "")
        )
    value = figures[gate.figure]
    bound: float | None = gate.number
    if gate.is_of_teacher:
        if teacher is None:
            raise ConfigError(
                f"require: `{gate.name}{gate.text}` needs the teacher's figure, and there is no teacher here to "
                "compare with."
            )
        own = teacher.get(gate.figure)
        bound = None if own is None else gate.number * own
    has_passed = value is not None and bound is not None and _COMPARE[gate.sign](value, bound)
    return GateVerdict(f"{gate.name}{gate.text}", gate.figure, value, bound, has_passed)


def judge_gates(
    gates: Sequence[Gate], figures: Mapping[str, float | None], teacher: Mapping[str, float | None] | None
) -> list[GateVerdict]:
    """`judge_gate` for each."""
    return [judge_gate(gate, figures, teacher) for gate in gates]
