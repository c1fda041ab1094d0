"""The parity gate's arithmetic on answers made up here, and what it does to a bundle that it refuses."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.examples import load_examples
from relabel.distill.students.spec import DistillSpec
from relabel.export.bundle_facts import ModelParity, Parity, read_parity, undecided_lines, verdict
from relabel.export.bundles import open_bundle
from relabel.export.exporting import export_bundle, refusal_text
from relabel.export.parity import PairSet, PairsFile, answers, draw_queries, judge, lineage_pairs
from relabel.export.parity import measure as measure_parity
from relabel.export.specs import ExportSpec, ParitySpec
from relabel.manifests.errors import ConfigError, GateError, InputError, ManifestError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.records import checked, plain
from tests.distill.conftest import label_rows, make_pairs, write_labels

QUERIES, DOCS = 100, 8


def made_pairs(judge_name: Any = "gold", *, seed: int = 0) -> tuple[PairSet, np.ndarray]:
    """Pairs whose grades a student mostly finds, and its distributions."""
    chance = np.random.default_rng(seed)
    size = QUERIES * DOCS
    probs = chance.dirichlet([0.6, 0.6, 0.6], size=size).astype(np.float32)
    grades = np.where(chance.random(size) < 0.8, probs.argmax(1), chance.integers(0, 3, size=size))
    queries = np.repeat(np.arange(QUERIES), DOCS)
    names = [("pairs.parquet", row) for row in range(size)]
    return PairSet(
        [("q", "d")] * size, names, queries, grades if judge_name else np.full(size, -1), judge_name, {}
    ), probs


def spoiled(probs: np.ndarray, share: float, *, seed: int = 1) -> np.ndarray:
    """The same distributions with some rows' grades turned round."""
    rows = np.random.default_rng(seed).random(len(probs)) < share
    return np.where(rows[:, None], np.roll(probs, 1, axis=1), probs)


def measure(*arguments: Any) -> dict[str, Any]:
    """The parity of a model as the manifest holds it."""
    return dict(plain(measure_parity(*arguments)))


def measured(precision: str, found: np.ndarray, judge_name: Any = "gold", **spec: Any) -> dict[str, Any]:
    pairs, probs = made_pairs(judge_name)
    return measure(
        precision,
        {"relevance": probs},
        {7: {"relevance": found}},
        pairs,
        ParitySpec(**{"resamples": 300, "min_pairs": 800, **spec}),
    )


def test_a_model_that_says_the_same_passes_every_gate() -> None:
    _, probs = made_pairs()
    for precision in ("fp32", "fp16", "bf16", "int8", "int8-static"):
        one = measured(precision, probs)
        assert one["has_passed"], one["checks"]
        assert not one["is_weak"]
        figures = one["by_batch_size"]["7"]
        assert (figures["flip_share"], figures["tau"], figures["f1_macro"]["loss_points"]) == (
            0,
            pytest.approx(1.0),
            0.0,
        )
        assert [str(figures["f1_macro"][end]) for end in ("loss_low", "loss_high")] == ["0.0", "0.0"], "not -0.0"


def test_fp32_is_refused_by_one_probability_of_one_head() -> None:
    pairs, probs = made_pairs()
    other = probs.copy()
    other[17, 0] += 2e-4
    one = measure(
        "fp32",
        {"relevance": probs, "subject": probs},
        {1: {"relevance": probs, "subject": other}},
        pairs,
        ParitySpec(resamples=100),
    )
    assert not one["has_passed"]
    assert one["by_batch_size"]["1"]["max_abs"] == pytest.approx(2e-4, rel=1e-2)


def test_fp16_is_refused_over_a_thousandth_of_flips_or_by_a_broken_order() -> None:
    _, probs = made_pairs()
    assert measured("fp16", spoiled(probs, 0.0005))["by_batch_size"]["7"]["flip_share"] <= 0.001
    one = measured("fp16", spoiled(probs, 0.01))
    assert not one["has_passed"]
    assert one["worst"][0]["is_flip"]
    # no flip, and ties where there was an order
    squeezed = (np.eye(3, dtype=np.float32)[probs.argmax(1)] * 0.5 + 1 / 6).astype(np.float32)
    refused = {check["check"] for check in measured("fp16", squeezed)["checks"] if not check["has_passed"]}
    assert refused == {"Kendall tau per query"}


def test_int8_is_refused_only_when_the_interval_of_its_loss_lies_wholly_above_the_bound() -> None:
    _, probs = made_pairs()
    small, large = measured("int8", spoiled(probs, 0.01)), measured("int8", spoiled(probs, 0.2))
    assert small["by_batch_size"]["7"]["flip_share"] > 0
    assert small["has_passed"]
    loss = large["by_batch_size"]["7"]["f1_macro"]
    assert 1.0 < loss["loss_low"] < loss["loss_points"] < loss["loss_high"]
    assert not large["has_passed"]
    assert measured("int8", spoiled(probs, 0.2), int8_max_f1_loss=50)["has_passed"]


def parity_of(*models: dict[str, Any]) -> Parity:
    """These models' figures as a manifest's section."""
    about = {"spec": ParitySpec().model_dump(mode="json"), "provider": "cpu", "onnxruntime": "1"}
    return read_parity({**about, "models": list(models)}, "manifest.json")


def test_an_int8_whose_loss_is_not_ruled_out_passes_as_undecided_with_the_loss_that_it_could_have() -> None:
    _, probs = made_pairs()
    same, bad = measured("int8", probs), measured("int8", spoiled(probs, 0.02))
    assert (same["has_passed"], same["doubts"], verdict(checked(ModelParity, same))) == (True, [], "passed")
    loss = bad["by_batch_size"]["7"]["f1_macro"]
    assert loss["loss_low"] < 1.0 < loss["loss_high"]
    assert bad["has_passed"]
    assert verdict(checked(ModelParity, bad)) == "undecided"
    (sentence,) = undecided_lines(parity_of(same, bad))
    assert f"could lose {loss['loss_high']:.1f} points" in sentence
    assert "the bound is 1" in sentence
    assert "int8_max_flips" in sentence
    assert measured("int8", spoiled(probs, 0.02), int8_max_f1_loss=20)["doubts"] == []
    refused = measured("int8", spoiled(probs, 0.2))
    assert verdict(checked(ModelParity, refused)) == "REFUSED"
    assert undecided_lines(parity_of(refused)) == []
    assert measured("fp16", spoiled(probs, 0.0005), fp16_max_flips=1.0)["doubts"] == []  # its gate is another


def test_a_student_that_hardly_ever_gives_another_grade_proves_nothing() -> None:
    pairs, probs = made_pairs()
    constant = np.tile(np.array([[0.7, 0.2, 0.1]], dtype=np.float32), (len(probs), 1))
    constant[0] = [0.1, 0.2, 0.7]
    for precision, said in (
        ("int8", "undecided"),
        ("fp16", "undecided"),
        ("fp32", "passed"),
    ):
        answers = {"relevance": constant}
        found = measure(precision, answers, {7: answers}, pairs, ParitySpec(resamples=300))
        assert found["has_passed"]
        assert verdict(checked(ModelParity, found)) == said
        lines = undecided_lines(parity_of(found))
        assert [("to 1 of" in line, "fewer than 30" in line) for line in lines[:1]] == [(True, True)] * (
            said != "passed"
        )


def test_the_order_of_an_int8_is_bounded_by_the_interval_of_its_tau() -> None:
    _, probs = made_pairs()
    found = measured("int8", spoiled(probs, 0.1), int8_max_f1_loss=100)
    figures = found["by_batch_size"]["7"]
    assert figures["tau_low"] < figures["tau"] < figures["tau_high"] < 1
    for bound, has_passed, doubts in (
        (figures["tau_low"] - 0.01, True, 0),
        (figures["tau"], True, 1),
        (figures["tau_high"] + 0.01, False, 1),
    ):
        one = measured("int8", spoiled(probs, 0.1), int8_max_f1_loss=100, int8_min_tau=bound)
        assert (one["has_passed"], len(one["doubts"])) == (has_passed, doubts)


def test_a_single_query_rules_no_loss_out() -> None:
    pairs, probs = made_pairs()
    one = pairs.take(np.arange(DOCS))
    found = measure("int8", {"relevance": probs[:DOCS]}, {1: {"relevance": probs[:DOCS]}}, one, ParitySpec(min_pairs=1))
    assert found["has_passed"]
    assert f"could lose {100 * found['by_batch_size']['1']['f1_macro']['student']:.1f} points" in found["doubts"][0]


def test_an_int8_is_refused_by_its_flips_where_a_bound_is_set() -> None:
    _, probs = made_pairs()
    flipped = spoiled(probs, 0.02)
    share = measured("int8", flipped)["by_batch_size"]["7"]["flip_share"]
    assert measured("int8", flipped, int8_max_flips=share)["has_passed"]
    one = measured("int8", flipped, int8_max_flips=share - 1e-9)
    assert not one["has_passed"]
    assert "int8: share of flipped grades is" in refusal_text([checked(ModelParity, one)], "in out/bundle.refused")
    assert measured("fp16", flipped, int8_max_flips=0.0, fp16_max_flips=0.5, fp16_min_tau=-1, fp16_max_ndcg_loss=1)[
        "has_passed"
    ]


def test_without_grades_the_student_itself_is_the_reference() -> None:
    _, probs = made_pairs()
    figures = measured("int8", spoiled(probs, 0.05), None)["by_batch_size"]["7"]
    assert figures["judged_by"] == "student"
    assert figures["f1_macro"]["student"] == 1.0
    assert figures["f1_macro"]["loss_points"] > 1.0


def test_answers_that_are_no_numbers_never_pass() -> None:
    _, probs = made_pairs()
    broken = probs.copy()
    broken[5] = np.nan
    for precision in ("fp32", "fp16", "int8", "int8-static"):
        assert not measured(precision, broken)["has_passed"]


def test_the_worst_batch_size_decides() -> None:
    _, probs = made_pairs()
    good = checked(ModelParity, measured("fp32", probs)).figures[0]
    assert judge("fp32", [good], ParitySpec())[-1].has_passed
    assert not judge("fp32", [good, replace(good, max_abs=1e-3)], ParitySpec())[-1].has_passed


def test_every_pair_is_answered_in_batches_of_the_size_with_its_padding() -> None:
    seen: list[tuple[int, int]] = []

    class Lengths:
        def collate(self, rows: Any) -> dict[str, np.ndarray]:
            return {"lengths": np.array([[len(ids)] for ids, _ in rows])}

    def run(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append((len(batch["lengths"]), int(batch["lengths"].max())))
        return {"relevance": batch["lengths"].astype(np.float32)}

    rows: list[Any] = [([1] * length, []) for length in (3, 1, 9, 2, 4, 4, 8, 5)]
    found = answers(run, Lengths(), rows, 7)  # type: ignore[arg-type]
    assert seen == [(7, 9), (1, 5)]
    assert found["relevance"][:, 0].tolist() == [3, 1, 9, 2, 4, 4, 8, 5]


def test_queries_are_drawn_whole_until_there_are_enough_pairs() -> None:
    pairs, _ = made_pairs()
    drawn = draw_queries(pairs, 50, seed=3)
    assert len(drawn.pairs) == 56
    assert np.bincount(drawn.queries).tolist() == [DOCS] * 7
    assert len(draw_queries(pairs, 10_000, seed=3).pairs) == QUERIES * DOCS
    with pytest.raises(ConfigError, match="no pair to compare on"):
        draw_queries(pairs.take(np.array([], dtype=np.int64)), 5, seed=0)


@pytest.mark.parametrize("by", ["query_id", "query"])
def test_queries_of_the_test_split_are_those_that_it_was_split_by(tmp_path: Path, by: str) -> None:
    """Two ids that share a text are two queries, each with its own documents, unless the split is by text."""
    rows = [{**row, "query_id": f"{row['query_id']}-{int(row['doc_id'][1:]) % 2}"} for row in make_pairs()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    labels = write_labels(tmp_path / "labels.parquet", label_rows(rows))
    spec = {
        "name": "tiny",
        "labels": [{"path": str(labels), "pairs": {"path": str(tmp_path / "pairs.parquet")}}],
        "student": {"kind": "encoder", "model": "tiny"},
        "split": {"by": by, "dev": 0.2, "test": 0.5},
        "output": str(tmp_path / "out"),
    }
    split = load_examples(DistillSpec(**spec), Storage()).about.split  # type: ignore[arg-type]
    test, _ = lineage_pairs({"spec": spec, "split": {"sha256": split.sha256}}, Storage(), grades=3)
    assert len(np.unique(test.queries)) == split.test.queries


def test_the_worst_rows_are_named_by_row_and_their_texts_are_not_reported() -> None:
    _, probs = made_pairs()
    one = measured("fp16", spoiled(probs, 0.01), worst=3)
    text = refusal_text([checked(ModelParity, one)], "in out/bundle.refused")
    assert len(one["worst"]) == 3
    assert f"row {one['worst'][0]['row']} of pairs.parquet, batch of 7, flipped" in text
    assert "share of flipped grades is" in text


def shifted(bundle: Path, path: Path, number: float = 0.01) -> dict[str, Any]:
    """The bundle's fp32 graph, its first probability a hundredth higher and its second as much lower."""
    graph = onnx.load(bundle / "model.onnx")
    for node in graph.graph.node:
        node.output[:] = ["before" if name == "relevance" else name for name in node.output]
        node.input[:] = ["before" if name == "relevance" else name for name in node.input]
    (head,) = (one for one in graph.graph.output if one.name == "relevance")
    by = np.zeros(head.type.tensor_type.shape.dim[1].dim_value, dtype=np.float32)
    by[:2] = number, -number
    graph.graph.initializer.append(onnx.numpy_helper.from_array(by, "by"))
    graph.graph.node.append(onnx.helper.make_node("Add", ["before", "by"], ["relevance"]))
    onnx.save(graph, path)
    return {"shifted": number}


def test_a_graph_that_says_something_else_makes_no_bundle_and_leaves_the_old_one(
    student: Path, bundle: Path, graded_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relabel.export import exporting

    target = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    before = (target / "manifest.json").read_bytes()
    with pytest.raises(StaleRunError, match=r'holds another bundle \(licence: was "Apache-2.0", is null'):
        export_bundle(student, target, ExportSpec(), Storage(), pairs=PairsFile(str(graded_file)), provider="cpu")

    monkeypatch.setattr(exporting, "export_onnx", lambda _student, path, _options: shifted(bundle, path))
    with pytest.raises(GateError, match=r"fp32: max \|Δp\| is .*, the bound 0.0001") as refused:
        export_bundle(
            student,
            target,
            ExportSpec(),
            Storage(),
            pairs=PairsFile(str(graded_file)),
            provider="cpu",
            is_replacing=True,
        )
    assert f"of {graded_file}, batch of" in str(refused.value)
    assert "--gold COLUMN names trusted ones" in str(refused.value)
    assert (target / "manifest.json").read_bytes() == before
    aside = tmp_path / "bundle.refused"
    assert (aside / "parity.json").is_file()
    assert not (aside / "manifest.json").exists()
    assert not (tmp_path / "bundle.part").exists()


def test_a_student_that_was_changed_since_it_was_trained_is_not_exported(student: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(student, tmp_path / "copy"))
    (copy / "backbone.json").write_text((copy / "backbone.json").read_text() + " ")
    with pytest.raises(ManifestError, match=r"backbone\.json changed since"):
        export_bundle(copy, tmp_path / "bundle", ExportSpec(), Storage(), provider="cpu")


def test_a_student_without_a_past_asks_for_pairs(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--pairs"):
        export_bundle(decoder, tmp_path / "bundle", ExportSpec(), Storage(), provider="cpu")


def test_the_same_command_again_finds_the_bundle(relabel: Callable[..., Any], student: Path, tmp_path: Path) -> None:
    line = [
        "export",
        str(student),
        "--to",
        str(tmp_path / "bundle"),
        "--provider",
        "cpu",
        "--set",
        "parity.min_pairs=10",
    ]
    first = relabel(*line, "--output", "json")
    assert first.code == 0, first
    assert first.json["parity"]["models"][0]["has_passed"]
    again = relabel(*line, "--output", "json")
    assert (again.code, again.json["was_done"]) == (10, True)
    assert again.json["version"] == first.json["version"]
    assert relabel(*line, "--done-ok").code == 0
    relabel(*line, "--precisions", "fp23").refused(3, "precisions", "fp23")
    relabel(*line, "--precisions", "bf16").refused(3, "bf16 is of --formats tensorrt alone")
    relabel(*line, "--gold", "grade").refused(2, "--pairs")
    relabel(*line, "--columns", "query=text").refused(2, "--columns, --gold and --gold-map belong to --pairs")
    relabel(*line, "--provider", "cuda", "--replace").refused(4, "CUDAExecutionProvider")
    assert open_bundle(tmp_path / "bundle").version == first.json["version"]
