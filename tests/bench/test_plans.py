"""What a bench decides without measuring: models, cells, lengths, names of figures; and what it says of figures."""

from dataclasses import replace
from typing import Any

import pytest

from relabel.export.bench import HighestRate, LatencyRow, choose_models, figures, latency_rows, warnings_of
from relabel.export.bundle_facts import EngineFile, ModelFile
from relabel.export.loader import AMX, AVX512, OPENVINO, Machine
from relabel.export.specs import BenchSpec
from relabel.manifests.errors import MissingExtraError, UsageError
from relabel.manifests.metrics.evaluation import judge_gates, parse_flag
from tests.bench.made_up import bench_facts, latency_row, machine, model_facts

MODELS = [
    ModelFile(path="model.onnx", format="onnx", precision="fp32", files=["model.onnx"]),
    ModelFile(path="model.int8.onnx", format="onnx", precision="int8", files=["model.int8.onnx"]),
    EngineFile(
        path="e/fp16.onnx",
        format="tensorrt",
        precision="fp16",
        files=["e/fp16.onnx"],
        flavour="tensorrt",
        tensorrt="10.9.0",
        capability="9.0",
        profile=[(1, 1), (8, 30), (128, 64)],
    ),
]
CPU = Machine(None, {}, ["CPUExecutionProvider"])
GPU = Machine(
    "9.0", {"tensorrt": "10.9.0"}, ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
)


def spec(**values: Any) -> BenchSpec:
    return BenchSpec(**values)


def test_models_are_chosen_by_provider_and_precision() -> None:
    def chosen(machine: Machine, **values: Any) -> list[tuple[str, str]]:
        return [(model.provider, model.precision) for model in choose_models(MODELS, spec(**values), machine)]

    assert chosen(CPU) == [("cpu", "fp32"), ("cpu", "int8")]
    assert chosen(GPU) == [("cuda", "fp32"), ("cuda", "int8")]
    assert chosen(GPU, providers="cpu,tensorrt") == [("cpu", "fp32"), ("cpu", "int8"), ("tensorrt", "fp16")]
    assert chosen(CPU, precisions="int8") == [("cpu", "int8")]
    with pytest.raises(MissingExtraError, match="cuda: not among"):
        choose_models(MODELS, spec(providers="cuda"), CPU)
    with pytest.raises(MissingExtraError, match="no engine of this bundle fits"):
        choose_models(MODELS, spec(providers="tensorrt"), CPU)
    with pytest.raises(UsageError, match="fp64"):
        choose_models(MODELS, spec(precisions="fp64"), CPU)


def test_every_figure_that_a_gate_may_require_is_known_before_anything_is_measured() -> None:
    asked = spec(shapes="1x20,32xreplay", slo_ms=40, slo_mean_ms=40)
    planned = figures(choose_models(MODELS, asked, CPU), asked)
    assert {"cpu.fp32.1x20.p99_ms", "cpu.int8.32xreplay.pairs_per_s"} < set(planned)
    assert {"cpu.int8.highest_rate_by_mean", "cpu.int8.highest_rate_by_p99"} < set(planned)
    assert all(name.startswith("cuda.") for name in figures(choose_models(MODELS, spec(), GPU), spec()))


def bounded(**values: Any) -> HighestRate:
    unkept = HighestRate(
        figure="p99",
        slo_ms=5.0,
        highest_rate=None,
        mean_ms=None,
        p99_ms=None,
        is_at_least=False,
    )
    return replace(unkept, **values)


def test_a_figure_that_is_not_known_is_shown_without_one_and_fails_its_gate() -> None:
    rows = [latency_row(p50_ms=1.5, mean_ms=1.7, pairs_per_s=588.2)]
    rows += [latency_row(cell="open", offered_rate=9.0, unanswered=3)]
    slo = [bounded(highest_rate=9.0), bounded(figure="mean", slo_ms=1.0)]
    facts = bench_facts(models=[model_facts(precision="int8", closed=rows[:1], open=rows[1:], slo=slo)])
    assert latency_rows(facts)[1:] == [
        ["cpu int8", "1x20", "100", "1.70", "–", "1.50", "–", "–", "588"],
        [
            "cpu int8",
            "open, 9.0/s offered, 3 never answered (highest with p99 ≤ 5 ms)",
            "100",
            *["–"] * 6,
        ],
    ]
    known = figures(facts.models, spec(shapes="1x20,8x20", slo_ms=5))
    names = ("cpu.int8.1x20.p99_ms", "cpu.int8.8x20.p50_ms", "cpu.int8.1x20.p50_ms", "cpu.int8.highest_rate_by_p99")
    verdicts = judge_gates([parse_flag(f"{name}<=9") for name in names], known, None)
    assert [verdict.has_passed for verdict in verdicts] == [False, False, True, True]


def test_openvino_measures_the_fp32_file_in_what_the_cpu_computes_and_that_of_static_int8() -> None:
    here, models = ["CPUExecutionProvider", OPENVINO], list(MODELS)

    def chosen(flags: set[str], **values: Any) -> list[tuple[str, str, str]]:
        found = choose_models(models, spec(providers="openvino", **values), Machine(None, {}, here, flags))
        return [(model.provider, model.precision, model.path) for model in found]

    full, narrow = ("openvino", "fp32", "model.onnx"), ("openvino", "bf16", "model.onnx")
    assert chosen(set()) == [full]
    assert chosen({AVX512}) == chosen({AMX}) == [full, narrow]
    assert chosen(set(), precisions="bf16") == [narrow], "opening it says that this CPU does not compute it"
    models.append(ModelFile(path="s.onnx", format="onnx", precision="int8-static", files=["s.onnx"]))
    assert chosen(set()) == [full, ("openvino", "int8-static", "s.onnx")]
    with pytest.raises(MissingExtraError, match=r"pip install 'relabel-ir\[openvino\]'"):
        choose_models(MODELS, spec(providers="openvino"), CPU)


def rate(offered: float, p99_ms: float | None, **values: Any) -> LatencyRow:
    return latency_row(cell="open", offered_rate=offered, p99_ms=p99_ms, unanswered=0, **values)


RATES: dict[str, tuple[list[LatencyRow], str]] = {
    "too few samples at any rate": (
        [rate(1.0, None, samples=30), rate(2.0, None, samples=34)],
        "p99 could not be measured, with 34 samples at a rate where 368 are needed. Give more --seconds, about 110.",
    ),
    "too few samples below a rate that breaks it": (
        [rate(1.0, None, samples=34), rate(9.0, 60.0, samples=400)],
        "p99 could not be measured below 9.0/s, with 34 samples at a rate where 368 are needed",
    ),
    "a queue that only grew, too few samples below": (
        [rate(1.0, None, samples=34), replace(rate(9.0, None, samples=400), unanswered=3)],
        "p99 could not be measured below 9.0/s",
    ),
    "every rate breaks it": ([rate(1.0, 60.0), rate(9.0, 90.0)], "no rate that was tried keeps p99 ≤ 5 ms."),
    "too few samples above a rate that breaks it": (
        [rate(1.0, 60.0), rate(9.0, None, samples=34)],
        "no rate that was tried keeps p99 ≤ 5 ms.",
    ),
}


@pytest.mark.parametrize("what", RATES)
def test_a_bound_that_no_rate_keeps_is_distinguished_from_one_that_could_not_be_measured(what: str) -> None:
    rows, said = RATES[what]
    (warning,) = warnings_of(bench_facts(spec={"seconds": 10.0}, models=[model_facts(open=rows, slo=[bounded()])]))
    assert said in warning
    assert ("no rate that was tried" in warning) == said.startswith("no rate")


BUSY: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an idle machine": ({"before": 0.3, "after": 2.2}, {"mean_ms": 12.0, "cpu_ms": 23.0}, ""),
    "one thread": ({"before": 0.3, "after": 1.2}, {"mean_ms": 12.0, "cpu_ms": 11.9}, ""),
    "load before": ({"before": 4.0, "after": 2.0}, {"mean_ms": 12.0, "cpu_ms": 23.0}, "load was 4.0 on 2 cores before"),
    "load that came": ({"before": 0.0, "after": 6.0}, {"mean_ms": 12.0, "cpu_ms": 23.0}, "load was 6.0 on 2 cores at"),
    "waiting": (
        {"before": 0.0, "after": 2.0},
        {"mean_ms": 43.0, "cpu_ms": 12.0},
        "took 43.0 ms and had 12.0 ms of CPU",
    ),
    "an older file": ({}, {"mean_ms": 12.0}, ""),
    "a system without load": ({"before": None, "after": None}, {"mean_ms": 43.0, "cpu_ms": 12.0}, "took 43.0 ms"),
}


@pytest.mark.parametrize("what", BUSY)
def test_a_machine_on_which_other_work_ran_is_warned_of(what: str) -> None:
    load, row, said = BUSY[what]
    facts = bench_facts(
        machine=machine(**({"load": {**load, "cores": 2}} if load else {})),
        models=[model_facts(closed=[latency_row(**row)])],
    )
    found = warnings_of(facts)
    assert len(found) == bool(said)
    assert all(one.startswith("the machine was busy: ") and said in one for one in found)


def test_a_request_that_waits_for_another_device_is_no_sign_of_other_work() -> None:
    row = latency_row(mean_ms=43.0, cpu_ms=2.0)
    assert not warnings_of(bench_facts(models=[model_facts(provider="cuda", closed=[row])]))
