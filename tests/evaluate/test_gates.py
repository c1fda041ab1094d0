"""Gates: what passes, what never passes, what is no gate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.manifests.errors import ConfigError, UsageError
from relabel.manifests.metrics.gates import Gate, judge_gate, judge_gates, parse_flag, parse_gate, parse_gates

FIGURES = {"f1_macro": 0.6, "ece": 0.05, "kendall_tau": None}
TEACHER = {"f1_macro": 0.65, "ece": 0.04, "kendall_tau": 0.3}


@pytest.mark.parametrize(
    ("name", "text", "has_passed"),
    [
        ("macro_f1", ">=0.6", True),
        ("f1_macro", ">0.6", False),
        ("f1_macro", "<=0.6", True),
        ("f1_macro", "<0.6", False),
        ("macro_f1", ">=0.9*teacher", True),
        ("macro_f1", " >= .93 * teacher ", False),
        ("macro_f1", ">=teacher", False),
        ("ece", "<=1.5*teacher", True),
        ("ece", "<5e-2", False),
        ("kendall_tau", ">=-1", False),
    ],
)
def test_a_gate_says_what_it_reads(name: str, text: str, has_passed: bool) -> None:
    assert judge_gate(parse_gate(name, text), FIGURES, TEACHER).has_passed is has_passed


def test_an_undefined_figure_never_passes_on_either_side() -> None:
    gates = parse_gates({"tau": "<1", "f1_macro": ">=0.1*teacher"})
    verdicts = judge_gates(gates, FIGURES, {"f1_macro": None})
    assert [verdict.has_passed for verdict in verdicts] == [False, False]
    assert "undefined" in str(verdicts[0])
    assert verdicts[0].plain() == {
        "gate": "tau<1",
        "figure": "kendall_tau",
        "value": None,
        "bound": 1.0,
        "has_passed": False,
    }


def test_the_bound_of_a_teachers_gate_is_the_teachers_figure_times_the_number() -> None:
    verdict = judge_gate(parse_gate("macro_f1", ">=0.9*teacher"), FIGURES, TEACHER)
    assert verdict.bound == pytest.approx(0.9 * 0.65)
    assert str(verdict) == "macro_f1>=0.9*teacher: passed, f1_macro is 0.6000, the bound 0.5850"


@pytest.mark.parametrize(
    "text", ["", "0.6", "=>0.6", "==0.6", ">=", ">=student", ">=0.9*", ">=0.9*teacher+1", ">=nan", ">=1e999", ">=0,6"]
)
def test_what_is_no_gate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no gate\. Write a sign and a bound"):
        parse_gate("macro_f1", text)


@pytest.mark.parametrize("text", ["macro_f1", ">=0.6", "macro_f1=0.6", "macro_f1 >= much"])
def test_a_flag_that_is_no_gate_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--require"):
        parse_flag(text)


def test_a_teachers_gate_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no teacher"):
        judge_gate(parse_flag("macro_f1>=0.9*teacher"), FIGURES, None)


@given(
    st.sampled_from([">=", "<=", ">", "<"]), st.floats(allow_nan=False, allow_infinity=False, width=32), st.booleans()
)
def test_a_flag_and_a_spec_read_alike_and_keep_the_number(sign: str, number: float, is_of_teacher: bool) -> None:
    bound = f"{sign}{number!r}{'*teacher' if is_of_teacher else ''}"
    gate = parse_gate("auc_0/12", bound)
    assert parse_flag(f"auc_0/12{bound}") == gate == Gate("auc_0/12", "auc_0/12", bound, sign, number, is_of_teacher)
    assert math.isfinite(gate.number)
