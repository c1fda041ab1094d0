"""Quantiles, on numbers whose truth is known."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relabel.export.bench import QUANTILES, samples_needed, summarize

LATENCIES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=400).map(np.array)


@given(LATENCIES)
def test_figures_are_ordered_and_too_few_latencies_state_no_quantile(latency_s: np.ndarray) -> None:
    found = summarize(latency_s)
    stated = [found[f"{name}_ms"] for name in QUANTILES if found[f"{name}_ms"] is not None]
    assert stated == sorted(stated)
    for name, share in QUANTILES.items():
        assert (found[f"{name}_ms"] is None) == (len(latency_s) < samples_needed(share))
    json.dumps(found, allow_nan=False)


def test_samples_needed_are_those_of_a_distribution_free_interval() -> None:
    assert {name: samples_needed(share) for name, share in QUANTILES.items()} == {
        "p50": 6,
        "p99": 368,
        "p999": 3688,
    }


def test_a_request_that_was_never_answered_is_worse_than_any_that_was() -> None:
    latency_s = np.full(1000, 0.01)
    latency_s[-20:] = np.inf
    found = summarize(latency_s)
    assert (found["p50_ms"], found["p99_ms"], found["mean_ms"]) == (10.0, None, None)
