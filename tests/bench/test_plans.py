"""What a bench decides without measuring: models, cells, time, lengths, findings, the card."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.export.bench.benching import CLOSED_NAME, OPEN_NAME, write_plots
from relabel.export.bench.cells import OfferedRate, rate_row
from relabel.export.bench.comparisons import (
    Against,
    comparison_findings,
    comparison_rows,
    machine_findings,
    model_findings,
    plan_sides,
    ratio_of,
    take_turns,
)
from relabel.export.bench.latency import OpenLoopTimes, time_calls
from relabel.export.bench.machine import MachineWatch, count_cpu_nodes, cpu_nodes, device_bytes, gpu_state
from relabel.export.bench.plans import (
    BenchModel,
    Budget,
    Cell,
    choose_models,
    draw_lengths,
    measured_figures,
    plan_cells,
    plan_time,
    planned_figures,
)
from relabel.export.bench.records import BoundedRate, ComparedPair, GpuState, LatencyRow
from relabel.export.bundle_facts import EngineFile, ModelFile, TokenLengths
from relabel.export.bundles import open_bundle
from relabel.export.loader import OPENVINO, Encoder, Machine
from relabel.export.specs import BenchSpec
from relabel.manifests.errors import MissingExtraError, UsageError
from relabel.manifests.metrics.gates import judge_gates, parse_flag
from relabel.manifests.records import plain
from tests.bench.made_up import bench_facts, compared, latency_row, machine, model_facts

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
LENGTHS = TokenLengths(rows=100, p50=20, p90=50, p99=60, max=64)
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
    assert choose_models(MODELS, spec(providers="cuda", allows_fallback=True), CPU)[0] == BenchModel(
        "cuda", "cpu", "fp32", "model.onnx"
    )
    with pytest.raises(MissingExtraError, match="no engine of this bundle fits"):
        choose_models(MODELS, spec(providers="tensorrt"), CPU)
    with pytest.raises(UsageError, match="fp64"):
        choose_models(MODELS, spec(precisions="fp64"), CPU)
    with pytest.raises(UsageError, match="no such model"):
        choose_models(MODELS, spec(providers="cpu", precisions="fp16"), CPU)
    beside_openvino = Machine(None, {}, ["CPUExecutionProvider", OPENVINO])
    with pytest.raises(UsageError, match=r"no such model for openvino\. Leave it out"):
        choose_models(MODELS, spec(providers="cpu,openvino", precisions="int8"), beside_openvino)


def test_cells_hold_one_pair_first_then_replayed_lengths_and_the_public_shapes() -> None:
    cells = plan_cells(spec(), LENGTHS)
    names = [cell.name for cell in cells]
    assert {"1x128", "32x128", "1x384", "1x20", "32x60", "8xreplay"} <= set(names)
    assert len(set(names)) == len(names)
    assert names[:4] == ["1xreplay", "8xreplay", "32xreplay", "1x20"]
    assert [cell.rows for cell in plan_cells(spec(presets="table3"), LENGTHS)] == [1, 10, 100, 1000, 10_000]
    assert plan_cells(spec(presets="serving"), LENGTHS) == []
    assert Cell("grid", "1x7", 1, 7) in plan_cells(spec(lengths="7", batches="1"), LENGTHS)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.001, []),
        (2.0, ["1xreplay 20", "1x20 20"]),  # not enough for p99 of one pair, nor for a batch
        (5.0, ["1xreplay 368"]),  # which comes before any figure of the rest
        (9.0, ["1xreplay 368", "8xreplay 20", "1x20 20"]),
        (300.0, ["1xreplay 368", "8xreplay 368", "32xreplay 368", "1x20 368"]),
    ],
)
def test_time_goes_to_one_pair_s_p99_then_to_a_figure_of_each_then_to_their_p99(
    seconds: float, told: list[str]
) -> None:
    cells = plan_cells(spec(), LENGTHS)[:4]
    planned = plan_time({cell: 0.01 * cell.rows for cell in cells}, seconds, 0.0)
    assert [f"{cell.name} {samples}" for cell, (samples, _) in planned.items()] == told
    assert sum(given_s for _, given_s in planned.values()) <= seconds + 1e-9
    beside = plan_time({cell: 0.01 * cell.rows for cell in cells}, seconds, seconds)
    assert [(cell, samples) for cell, (samples, _) in beside.items()] == [
        (cell, samples) for cell, (samples, _) in planned.items() if cell.name == "1xreplay"
    ], "one pair goes before the open loop, the others after it"


@given(st.floats(0.1, 1000), st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 2)), min_size=1, max_size=30))
def test_time_that_one_leaves_goes_to_the_others_and_all_together_get_no_more_than_there_is(
    seconds: float, tasks: list[tuple[float, float]]
) -> None:
    budget = Budget(seconds, sum(weight for weight, _ in tasks))
    spent = 0.0
    for weight, greed in tasks:
        share = budget.share(weight)
        assert 0 <= share <= seconds - spent + 1e-6
        budget.spend(share * min(greed, 1))
        spent += share * min(greed, 1)
    assert budget.left_s == pytest.approx(seconds - spent, abs=1e-6)


def test_the_last_one_gets_all_that_is_left() -> None:
    budget = Budget(10.0, 4.0)
    assert budget.share(1.0) == 2.5
    budget.spend(1.0)
    assert budget.share(3.0) == 9.0


@given(st.dictionaries(st.integers(1, 512), st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 3))
def test_lengths_are_drawn_in_the_shares_of_the_histogram(histogram: dict[int, int], seed: int) -> None:
    drawn = draw_lengths(sorted(histogram.items()), 4000, seed=seed)
    assert set(drawn.tolist()) <= set(histogram)
    total = sum(histogram.values())
    for length, rows in histogram.items():
        share = rows / total
        assert abs((drawn == length).mean() - share) < 5.5 * np.sqrt(share * (1 - share) / 4000) + 1e-9


def test_a_closed_loop_measures_one_call_however_long_it_takes_and_keeps_to_its_time() -> None:
    time = [0.0]

    def call(_: int) -> None:
        time[0] += 2.0

    slow = time_calls(call, 1.0, clock=lambda: time[0])
    assert (slow.latency_s.tolist(), slow.warm_up, slow.seconds) == ([2.0], 1, 2.0)
    time[0] = 0.0
    found = time_calls(call, 100.0, clock=lambda: time[0])
    assert time[0] == 100.0
    assert found.warm_up == 8
    assert len(found.latency_s) == 42
    assert len(time_calls(call, 100.0, max_samples=5, clock=lambda: time[0]).latency_s) == 5
    assert len(time_calls(call, 1.0, fewest=7, clock=lambda: time[0]).latency_s) == 7


def test_sides_take_turns_and_a_drifting_machine_does_not_move_the_ratio() -> None:
    """Everything takes longer and longer; ours takes 0.8 of theirs at any moment. Measured one after the other it would
    be anything.
    """
    time = [0.0]

    def side(share: float) -> Any:
        def call() -> None:
            time[0] += share * (1 + time[0] / 100)

        return call

    found = take_turns(
        side(0.8), side(1.0), rounds=20, seconds=0.0, clock=lambda: time[0], cpu_clock=lambda: time[0]
    ).wall
    assert len(found.ratios) == 20
    assert found.median == pytest.approx(0.8, rel=0.02)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.median <= found.high
    assert found.ours_ms > 800


def test_a_comparison_that_has_no_time_for_its_rounds_ends_with_fewer() -> None:
    time = [0.0]

    def call() -> None:
        time[0] += 10.0

    clocks = {"clock": lambda: time[0], "cpu_clock": lambda: time[0]}
    assert len(take_turns(call, call, rounds=20, seconds=1.0, limit_s=5.0, **clocks).wall.ratios) == 2
    assert len(take_turns(call, call, rounds=20, seconds=1.0, limit_s=200.0, **clocks).wall.ratios) == 4
    assert len(take_turns(call, call, rounds=3, seconds=240.0, **clocks).wall.ratios) == 5


@given(st.lists(st.tuples(st.floats(0.001, 10), st.floats(0.001, 10)), min_size=1, max_size=60))
def test_a_ratios_median_lies_in_its_interval_and_turns_over_with_its_sides(
    measured: list[tuple[float, float]],
) -> None:
    found = ratio_of(measured)
    assert found.median == pytest.approx(np.median([ours / theirs for ours, theirs in measured]))
    assert (found.low is None) == (found.high is None) == (len(measured) < 6)
    if len(measured) >= 6:
        assert found.low is not None
        assert found.high is not None
        assert min(found.ratios) <= found.low <= found.median * (1 + 1e-9)
        assert found.median * (1 - 1e-9) <= found.high <= max(found.ratios)


def test_a_slow_side_gets_no_more_calls_a_turn_than_its_time_allows() -> None:
    """One side is a thousand times as slow; were the fast one to set the calls of a turn, two rounds would take 64 slow
    calls each.
    """
    time = [0.0]

    def side(seconds: float) -> Any:
        def call() -> None:
            time[0] += seconds

        return call

    found = take_turns(
        side(3e-5), side(0.03), rounds=20, seconds=1.0, limit_s=3.0, clock=lambda: time[0], cpu_clock=lambda: time[0]
    )
    assert time[0] < 3.1
    assert len(found.wall.ratios) >= 6


def test_a_cpu_clock_too_coarse_to_see_a_turn_gives_no_ratio_by_it() -> None:
    time = [0.0]

    def call() -> None:
        time[0] += 1e-4

    found = take_turns(
        call, call, rounds=20, seconds=0.5, clock=lambda: time[0], cpu_clock=lambda: float(int(time[0] * 10))
    )
    assert found.cpu is None
    one = found.compared(ComparedPair(provider="cpu", ours="int8", theirs="fp32", answers_differ_by=None), "1x128")
    json.dumps(plain(one), allow_nan=False)
    assert one.cpu_ratio is one.cpu_low is one.cpu_high is None
    assert one.ratio == pytest.approx(1.0)


def test_a_ratio_without_an_interval_is_shown_and_found_without_one_and_fails_its_gate() -> None:
    unknown = dict.fromkeys(("low", "high", "cpu_ratio", "cpu_low", "cpu_high"))
    one = compared(rounds=3, **unknown)
    row = comparison_rows(bench_facts(comparisons=[one]))[1]
    assert row[5:8] == ["1.200", "–", "3"]
    assert comparison_rows(bench_facts(comparisons=[compared()]))[1][5:7] == ["1.200 (1.100 to 1.300)"] * 2
    texts = {finding.kind: finding.text for finding in comparison_findings([one], rounds=2)}
    assert "3 rounds, too few for an interval (6 needed" in texts["too_few_rounds"]
    assert texts["slower_than_fp32"].endswith("is 1.20.")
    figures = measured_figures(bench_facts(comparisons=[one]), ["cpu.int8.1x128.p99_ms"])
    gates = [
        parse_flag(f"{name}<=9")
        for name in ("cpu.int8/fp32.1x128.ratio_high", "cpu.int8.1x128.p99_ms", "cpu.int8/fp32.1x128.ratio")
    ]
    assert [verdict.has_passed for verdict in judge_gates(gates, figures, None)] == [False, False, True]


def test_every_figure_that_is_measured_was_planned_under_its_name() -> None:
    models = choose_models(MODELS, spec(), CPU)
    cells = plan_cells(spec(), LENGTHS)
    bounded = [("grid", "p99"), ("serving", "mean")]
    planned = planned_figures(models, cells, bounded, plan_sides(models, Against()), [(1, 128)], may_fall_back=False)
    assert {"cpu.fp32.1x20.p99_ms", "cpu.int8.32xreplay.pairs_per_s"} < set(planned)
    assert {"cpu.int8.grid.highest_rate", "cpu.int8.serving.highest_rate_by_mean"} < set(planned)
    assert {"cpu.int8/fp32.1x128.ratio", "cpu.int8/fp32.1x128.ratio_high", "cpu.int8/fp32.1x128.cpu_ratio"} < set(
        planned
    )
    cuda = choose_models(MODELS, spec(), GPU)
    names = [planned_figures(cuda, cells, [], [], [], may_fall_back=falls) for falls in (False, True)]
    assert all(name.startswith("cuda.") for name in names[0])
    assert set(names[1]) == {*names[0], *(name.replace("cuda.", "cpu.") for name in names[0])}


def test_smaller_precisions_are_held_against_fp32_and_all_against_what_is_named() -> None:
    models = choose_models(MODELS, spec(), CPU)
    sides = [(model.precision, other) for model, other in plan_sides(models, Against(graphs={"optimum": None}))]  # type: ignore[dict-item]
    assert sides == [("fp32", "optimum"), ("int8", "fp32"), ("int8", "optimum")]


def closed(cell: str, tokens: int | None, cv: float, samples: int = 5000) -> LatencyRow:
    return latency_row(loop="closed", cell=cell, tokens=tokens, cv=cv, samples=samples, p50_ms=1.0)


def bounded(**values: Any) -> BoundedRate:
    one = BoundedRate(preset="grid", slo_ms=5.0, highest_rate=None, p99_ms=None, is_at_least=False)
    return replace(one, **values)


def test_findings_are_reported_for_what_they_are() -> None:
    def of(**values: Any) -> dict[str, str]:
        return {finding.kind: finding.text for finding in model_findings(model_facts(**values), max_tokens=64)}

    assert of(closed=[closed("1x20", 20, 0.04)]) == {}
    noisy = of(closed=[closed("1x20", 20, 0.06), closed("1x30", 30, 0.2), closed("8xreplay", None, 0.9)])
    assert noisy == {"noisy": "calls of 2 of 2 fixed shapes vary by more than 5% of their mean (worst 1x30: 20%)."}
    few = of(closed=[closed("1x20", 20, 0.01, samples=400), closed("1x30", 30, 0.01, samples=300)])
    assert few["too_few_samples"].startswith(
        "too few samples for p99 (368) in 1 of 2, fewest 300; p99.9 (3,688) in 2 of 2, fewest 300."
    )
    assert "1x128" in of(closed=[closed("1x128", 128, 0.0)])["over_max_tokens"]
    assert "cuda was asked for" in of(asked_provider="cuda")["cpu_fallback"]
    assert "cpu_fallback" not in of(asked_provider="auto")
    assert "2 MatMulInteger" in of(cpu_nodes={"MatMulInteger": 2})["cpu_nodes"]
    left_out = [("1x384", "no time."), ("1x128", "too long."), ("open-grid at 9/s", "no time.")]
    assert of(not_run=left_out[:1])["not_run"] == "1 not measured (1x384): no time."
    said = [one.text for one in model_findings(model_facts(not_run=left_out), max_tokens=64)]
    assert said == ["2 not measured (1x384, open-grid at 9/s): no time.", "1 not measured (1x128): too long."]
    assert "slo_missed" in of(slo=[bounded()])
    missed = of(slo=[bounded(preset="serving", figure="mean")])["slo_missed"]
    assert missed == "serving: no rate that was tried keeps mean under 5 ms with enough requests to tell."
    assert "slo_missed" not in of(slo=[bounded(highest_rate=3.0)])


@pytest.mark.parametrize(("requests", "is_told"), [(1, False), (19, False), (20, True)])
def test_a_rate_at_which_few_requests_came_states_no_figure(requests: int, is_told: bool) -> None:
    """One request in a short time is `142 answered/s` where 57 were offered."""
    setting = SimpleNamespace(spec=BenchSpec(), scope="tokens", threads=1)
    served = OpenLoopTimes(np.full(requests, 0.01), batches=requests, seconds=0.007 * requests)
    model = BenchModel("cpu", "cpu", "fp32", "model.onnx")
    row = rate_row(setting, model, "grid", 57.0, OfferedRate(served, 0), rows=1, requests=32)  # type: ignore[arg-type]
    figures = (row.mean_ms, row.answered_rate, row.pairs_per_s, row.mean_batch, row.max_ms)
    assert [figure is not None for figure in figures] == [is_told] * len(figures)
    assert (row.samples, row.offered_rate) == (requests, 57.0)


def test_an_int8_that_is_slower_than_fp32_is_said() -> None:
    one = compared(answers_differ_by=0.2)
    kinds = [finding.kind for finding in comparison_findings([one, replace(one, ratio=0.5)], rounds=20)]
    assert kinds == ["slower_than_fp32"]
    other = replace(one, ours="fp32", theirs="optimum", ratio=1.0, rounds=3)
    assert [finding.kind for finding in comparison_findings([other], rounds=20)] == ["too_few_rounds", "answers_differ"]
    calm = machine(load_before=0.1, cores=2, cpu_quota=None, threads=2)
    assert [finding.kind for finding in machine_findings(replace(calm, load_before=9.0))] == ["busy_machine"]
    assert (
        machine_findings(calm)
        == machine_findings(replace(calm, load_before=None))
        == machine_findings(replace(calm, cpu_quota=2.0))
        == []
    )


@pytest.mark.parametrize(
    ("quota", "remedy"),
    [(1.5, "Take --threads 1, or raise the quota."), (0.5, "Give the container at least one core.")],
)
def test_more_threads_than_the_quota_keeps_busy_are_reported(quota: float, remedy: str) -> None:
    (finding,) = machine_findings(machine(load_before=0.1, cores=64, cpu_quota=quota, threads=4))
    assert finding.kind == "over_quota"
    assert f"4 threads and a quota of {quota:g} cores" in finding.text
    assert finding.text.endswith(remedy)


def test_heavy_nodes_on_the_cpu_are_counted_once_each_and_shapes_left_out() -> None:
    def event(name: str, operator: str, provider: str, number: str) -> dict[str, Any]:
        return {"cat": "Node", "name": name, "args": {"op_name": operator, "provider": provider, "node_index": number}}

    events: list[dict[str, Any]] = [
        {"cat": "Session", "name": "model_run"},
        event("a_kernel_time", "MatMulInteger", "CPUExecutionProvider", "1"),
        event("a_kernel_time", "MatMulInteger", "CPUExecutionProvider", "1"),
        event("b_kernel_time", "MatMulInteger", "CPUExecutionProvider", "2"),
        event("c_kernel_time", "MatMul", "CUDAExecutionProvider", "3"),
        event("d_kernel_time", "Shape", "CPUExecutionProvider", "4"),
    ]
    assert count_cpu_nodes(events) == {"MatMulInteger": 2}


def test_a_profile_of_onnxruntimes_own_is_read(made: Path) -> None:
    bundle = open_bundle(made)
    batch = Encoder(made, bundle.facts["inputs"]).collate([([2, 3], [0, 0])])
    assert cpu_nodes(made / "model.onnx", "cpu", batch, threads=1) == {}
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(made.parent / "profile")
    session = onnxruntime.InferenceSession(str(made / "model.int8.onnx"), options, providers=["CPUExecutionProvider"])
    session.run(None, batch)
    found = count_cpu_nodes(json.loads(Path(session.end_profiling()).read_text()))
    assert sum(found.values()) > 5
    assert any("MatMul" in name for name in found)


def test_the_machine_is_described_and_not_named() -> None:
    facts = MachineWatch(3).facts()
    text = json.dumps(plain(facts), allow_nan=False)
    assert facts.threads == 3
    assert facts.cores is not None
    assert facts.cores >= facts.usable_cores >= 1
    assert facts.memory_bytes is not None
    assert facts.memory_bytes > 1e8
    assert platform.node() not in text or len(platform.node()) < 4
    assert f'"{getpass.getuser()}"' not in text


def test_a_gpus_facts_are_numbers_where_the_driver_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1980, 2619, [N/A], 41'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_state() == GpuState(sm_mhz=1980.0, memory_mhz=2619.0, power_w=None, temperature_c=41.0)
    assert device_bytes() is None  # four values for one question
    tool.write_text("#!/bin/sh\necho 1500\n")
    assert device_bytes() == 1500 << 20
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_state() is device_bytes() is None


def test_plots_are_the_same_bytes_for_the_same_figures_and_left_out_where_there_are_none(tmp_path: Path) -> None:
    cell = latency_row(loop="closed", cell="1x20", p50_ms=1.0, mean_ms=1.1)
    rates = [latency_row(loop="open", offered_rate=rate, p50_ms=1.0, p99_ms=2.0 * rate) for rate in (1.0, 2.0)]
    facts = bench_facts(models=[model_facts(closed=[cell], open=rates, slo=[bounded(slo_ms=3.0)])])
    assert write_plots(tmp_path, facts) == [CLOSED_NAME, OPEN_NAME]
    first = [(tmp_path / name).read_bytes() for name in (CLOSED_NAME, OPEN_NAME)]
    assert b"1x20" in first[0]
    assert b"cpu fp32, grid: p99" in first[1]
    write_plots(tmp_path, facts)
    assert [(tmp_path / name).read_bytes() for name in (CLOSED_NAME, OPEN_NAME)] == first
    assert write_plots(tmp_path, bench_facts(models=[model_facts(closed=[cell])])) == [CLOSED_NAME]
