"""What a plan says about the cost of distributions is what was measured, for the model at hand, or that nobody measured
it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from relabel.labelers.engines.checkpoints import count_parameters
from relabel.labelers.engines.registry import MEASURED, engine_class, engine_names, plan_decision_costs
from relabel.labelers.registry import labeler_class
from relabel.manifests.asks import Ask, Decision, Message
from relabel.manifests.specs import EngineSpec

SCORE = Decision("score", "<score>", ("0", "1", "2"))


def ask(stage: str = "verdict", *, decisions: int = 1, max_tokens: int = 64) -> Ask:
    return Ask(stage, (Message("user", ("text",)),), None, max_tokens, (SCORE,) * decisions)


def hollow_model(folder: Path, *shapes: tuple[int, ...], **config: Any) -> Path:
    """A model of any size on paper: the headers of its weights, none of their bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    (folder / "tokenizer.json").write_text("{}")
    for number, shape in enumerate(shapes):
        header = {
            "__metadata__": {"format": "pt"},
            f"w{number}": {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]},
        }
        text = json.dumps(header).encode()
        (folder / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def vllm_costs(model: Path, labeler: str = "r1", **args: Any) -> list[Any]:
    kind = engine_class("vllm")
    spec = EngineSpec(name="vllm", model=str(model), args=kind.Args(cache_dir=str(model.parent / "cache"), **args))
    built = labeler_class(labeler)
    return kind.decision_costs(spec, built(built.Options(name=labeler)).probe())


def test_a_measured_size_gets_the_measured_ratio():
    (cost,) = plan_decision_costs([ask()], "second_request", parameters=1_777_000_000)
    assert (cost.way, cost.ratio) == ("second_request", (0.93, 0.955))
    assert "H200" in cost.basis


@pytest.mark.parametrize("parameters", [135_000_000, 3_300_000_000, 70_000_000_000])
def test_a_size_that_nobody_measured_gets_no_figure(parameters):
    (cost,) = plan_decision_costs([ask()], "second_request", parameters=parameters)
    assert cost.ratio is None
    assert "1.5 and 7.6 billion" in cost.basis


def test_no_measurement_lies_in_the_reach_of_another():
    """Else the nearest one would be a matter of rounding."""
    sizes = {row.parameters for row in MEASURED}
    for row in MEASURED:
        (cost,) = plan_decision_costs([ask()], row.way, parameters=int(row.parameters))
        assert cost.ratio == (row.low, row.high)
    for size in sizes:
        for way in ("second_request", "inline"):
            assert sum(row.parameters == size and row.way == way for row in MEASURED) == 1


def test_every_second_request_costs_the_same_and_inline_costs_once():
    for_four = plan_decision_costs([ask(decisions=4)], "second_request", parameters=1_500_000_000)[0]
    assert for_four.ratio == pytest.approx((1 / (1 + 4 * (1 / 0.93 - 1)), 1 / (1 + 4 * (1 / 0.955 - 1))))
    assert "4 decisions" in for_four.basis
    assert plan_decision_costs([ask(decisions=4)], "inline", parameters=1_500_000_000)[0].ratio == (0.82, 0.82)


def test_a_stage_without_decisions_is_not_listed_and_one_that_is_nothing_else_costs_nothing_more():
    costs = plan_decision_costs(
        [ask("intent", decisions=0), ask("score", max_tokens=0)], "second_request", parameters=None
    )
    assert [(cost.stage, cost.way, cost.ratio) for cost in costs] == [("score", "alone", (1.0, 1.0))]


def test_the_vllm_engine_knows_its_way_and_its_size_without_the_weights(tmp_path):
    small = hollow_model(tmp_path / "small", (1_000, 1_000_000), (540, 1_000_000))
    large = hollow_model(tmp_path / "large", (7_600, 1_000_000))
    assert vllm_costs(small)[0].ratio == (0.93, 0.955)
    assert vllm_costs(large)[0].ratio == (0.99, 0.99)
    assert vllm_costs(small, decisions="inline", constrain=False)[0].ratio == (0.82, 0.82)
    assert vllm_costs(large, decisions="inline", constrain=False)[0].ratio == (0.985, 0.985)
    assert [cost.stage for cost in vllm_costs(small, "r3a")] == ["verdict"]
    assert vllm_costs(small, "direct")[0].way == "alone"
    assert vllm_costs(small, "graph-grpo")[0].decisions == 4


@pytest.mark.parametrize("args", [{"quantization": "fp8"}, {"tensor_parallel_size": 2}])
def test_what_was_measured_on_one_gpu_in_bfloat16_says_nothing_of_other_ways_to_run(tmp_path, args):
    (cost,) = vllm_costs(hollow_model(tmp_path / "m", (7_600, 1_000_000)), **args)
    assert cost.ratio is None
    assert "one GPU" in cost.basis


@pytest.mark.parametrize("name", [name for name in engine_names() if name != "vllm"])
def test_no_other_engine_claims_a_ratio(name):
    for cost in engine_class(name).decision_costs(EngineSpec(name=name), [ask()]):
        assert cost.ratio is None
        assert cost.basis


def test_parameters_are_counted_over_all_files_from_their_headers(tmp_path):
    assert count_parameters(hollow_model(tmp_path / "m", (3, 5), (7,), ())) == 15 + 7 + 1


def test_packed_missing_or_broken_weights_have_no_count(tmp_path):
    assert (
        count_parameters(hollow_model(tmp_path / "packed", (3, 5), quantization_config={"quant_method": "awq"})) is None
    )
    assert count_parameters(hollow_model(tmp_path / "none")) is None
    assert count_parameters(tmp_path / "absent") is None
    for number, raw in enumerate((b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"w": {}}')):
        broken = hollow_model(tmp_path / f"broken{number}")
        (broken / "model.safetensors").write_bytes(raw)
        assert count_parameters(broken) is None
