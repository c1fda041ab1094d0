"""Records of a bench that measured nothing, to fill in what a test is about."""

from dataclasses import replace
from typing import Any

from relabel.export.bench import BenchFacts, LatencyRow, ModelLatency


def latency_row(**values: Any) -> LatencyRow:
    """A row of a closed loop."""
    return replace(LatencyRow(cell="1x20", rows=1, samples=100, seconds=1.0), **values)


def machine(**values: Any) -> dict[str, Any]:
    """A machine of which little is known."""
    known = {"cpu": "Some CPU", "gpu": None, "usable_cores": 2, "threads": 2, "python": "3.12", "versions": {}}
    return known | values


def model_facts(**values: Any) -> ModelLatency:
    """A model of which nothing was measured."""
    return replace(ModelLatency("cpu", "fp32", "model.onnx"), **values)


def bench_facts(**values: Any) -> BenchFacts:
    """A bench without a model."""
    blank = BenchFacts(
        format=2,
        name="tiny",
        bundle={"version": "0123", "manifest_sha256": "00" * 32},
        measured_at="2026-11-20",
        spec={},
        machine=machine(),
        workload={"rows": 1, "p50": 1, "p90": 1, "p99": 1, "max": 1, "histogram": [[1, 1]], "from": "lengths"},
        models=[],
    )
    return replace(blank, **values)
