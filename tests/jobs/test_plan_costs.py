"""`plan` says what distributions cost, as text and as JSON, or that nobody measured it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relabel.labelers.engines.fake import Fake
from relabel.labelers.engines.registry import plan_decision_costs


def test_plan_says_for_every_stage_with_distributions_what_they_cost(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Any],
    write_job: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake engine stands in for vLLM with a model of 1.5 billion parameters: only the call is replaced, not the
    figures.
    """
    write_pairs()
    job = write_job({"labeler": {"name": "r3a"}})

    def as_vllm_would(spec: Any, asks: Any) -> Any:
        return plan_decision_costs(asks, "second_request", parameters=1_500_000_000)

    monkeypatch.setattr(Fake, "decision_costs", staticmethod(as_vllm_would))
    text = relabel("plan", job).out
    assert "distributions  verdict: second request, 0.93 to 0.955 of the requests/s without" in text
    (cost,) = relabel("plan", job, "--output", "json").json["decision_costs"]
    assert (cost["stage"], cost["way"], cost["decisions"], cost["ratio"]) == (
        "verdict",
        "second_request",
        1,
        [0.93, 0.955],
    )


def test_plan_says_that_a_cost_is_unknown_rather_than_nothing(
    relabel: Callable[..., Any], write_pairs: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    write_pairs()
    job = write_job()
    assert "distributions  verdict: same pass, cost unknown (made up with the answer)" in relabel("plan", job).out
    assert relabel("plan", job, "--output", "json").json["decision_costs"][0]["ratio"] is None


def test_a_stage_that_is_nothing_but_its_decision_has_no_further_cost(
    relabel: Callable[..., Any], write_pairs: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    write_pairs()
    assert "distributions  score: no further cost" in relabel("plan", write_job({"labeler": {"name": "direct"}})).out
