"""Records of a bench that measured nothing, to fill in what a test is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relabel.export.bench.records import (
    BenchedBundle,
    BenchFacts,
    ComparedModels,
    LatencyRow,
    MeasuredMachine,
    ModelLatency,
    ReplayedLengths,
)


def latency_row(**values: Any) -> LatencyRow:
    """A row of an int8 on the CPU."""
    return LatencyRow(
        **{
            "provider": "cpu",
            "precision": "int8",
            "model": "model.int8.onnx",
            "preset": "grid",
            "loop": "closed",
            "cell": "1x20",
            "scope": "batch",
            "rows": 1,
            "samples": 100,
            "warm_up": 1,
            "threads": 2,
            "seconds": 1.0,
            **values,
        }
    )


def machine(**values: Any) -> MeasuredMachine:
    """A machine of which little is known."""
    known = MeasuredMachine(
        cpu="Some CPU",
        cores=2,
        usable_cores=2,
        threads=2,
        mhz_before=None,
        mhz_after=None,
        governor=None,
        power_w=None,
        load_before=0.1,
        load_after=None,
        memory_bytes=None,
        gpu=None,
        system="Linux x86_64",
        python="3.12",
        versions={},
    )
    return replace(known, **values)


def compared(**values: Any) -> ComparedModels:
    """An int8 that takes longer than fp32."""
    one = ComparedModels(
        provider="cpu",
        ours="int8",
        theirs="fp32",
        answers_differ_by=None,
        cell="1x128",
        rounds=20,
        ratio=1.2,
        low=1.1,
        high=1.3,
        cpu_ratio=1.2,
        cpu_low=1.1,
        cpu_high=1.3,
        ours_ms=1.0,
        theirs_ms=1.0,
        ratios=[],
    )
    return replace(one, **values)


def model_facts(**values: Any) -> ModelLatency:
    """A model of which nothing was measured."""
    facts = ModelLatency(
        asked_provider="cpu",
        provider="cpu",
        precision="fp32",
        path="model.onnx",
        rss_before_bytes=None,
        cpu_nodes={},
        closed=[],
        open=[],
        capacity_per_s={},
        slo=[],
        not_run=[],
    )
    return replace(facts, **values)


def bench_facts(**values: Any) -> BenchFacts:
    """A bench without a model."""
    blank = BenchFacts(
        format=1,
        name="tiny",
        bundle=BenchedBundle("0123", "00" * 32),
        measured_at="2026-11-20",
        spec={},
        machine=machine(),
        workload=ReplayedLengths("lengths", 1, 1, 1, 1, 1, [[1, 1]]),
        models=[],
        comparisons=[],
        findings=[],
    )
    return replace(blank, **values)
