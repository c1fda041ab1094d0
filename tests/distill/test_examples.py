"""Targets, weights and splits: what is learned from which row; and the specs of the docs, each run on a tiny model."""

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.students.distillation import teacher_figures
from relabel.distill.students.examples import TEST, TRAIN, Examples, load_examples, query_sides, split_queries
from relabel.distill.students.losses import (
    Objective,
    consistency,
    cross_entropy,
    induced_log_probs,
    phi_mask,
    soft_targets,
    weighted_sum,
)
from relabel.distill.students.portable import (
    COUNT_NAMES,
    CPU_BATCH_TOKENS,
    GPU_BATCH_TOKENS,
    batch_tokens_on,
    length_batches,
    query_counts,
)
from relabel.distill.students.spec import KINDS, DistillSpec, LossSection, SplitFacts, student_schema
from relabel.jobs.api import run as api_run
from relabel.jobs.cli import main
from relabel.labelers.graph_grpo import GraphGrpo
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.phi import DEFAULT_PHI
from relabel.manifests.records import checked, plain
from relabel.manifests.specs import validate_spec
from tests.distill.conftest import label_rows, make_pairs, softened, write_labels

NODES = {column.name: column.kind for column in GraphGrpo.columns}

STUDENTS = Path(__file__).parent.parent.parent / "docs" / "students"


@pytest.fixture
def examples(spec: Callable[..., dict[str, Any]]) -> Callable[..., Examples]:
    return lambda **changes: load_examples(validate_spec(DistillSpec, spec(**changes), where="student.yaml"), Storage())


def source(path: Path, pairs: Path, **extra: Any) -> dict[str, Any]:
    return {"path": str(path), "pairs": {"path": str(pairs)}, **extra}


@pytest.mark.parametrize(
    ("targets", "hard"),
    [
        ("soft", set()),
        ("hard", {"relevance", "subject", "attribute"}),
        ({"relevance": "soft", "attribute": "hard"}, {"attribute"}),
    ],
)
def test_each_head_may_have_targets_of_its_own_kind(
    examples: Callable[..., Examples], targets: Any, hard: set[str]
) -> None:
    found = examples(loss={"targets": targets})
    for row, pair in enumerate(make_pairs()):
        for head, name, width in (("relevance", "grade", 3), ("subject", "subject", 5), ("attribute", "attribute", 5)):
            wanted = np.eye(width)[pair[name]] if head in hard else softened(pair[name], width)
            np.testing.assert_allclose(found.targets[head][row], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("sfot", r"`loss\.targets.*'sfot': input should be 'soft' or 'hard'"),
        ({"subjekt": "hard"}, "'subjekt': .*relevance|subject|attribute"),
    ],
)
def test_targets_that_are_none_are_named(examples: Callable[..., Examples], targets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        examples(loss={"targets": targets})


def test_four_grades_want_a_rule_map_of_their_own(
    examples: Callable[..., Examples], tmp_path: Path, pairs_file: Path
) -> None:
    """The built-in one stops at 2, and the consistency loss would pull the student off grade 3."""
    rows = label_rows(make_pairs())
    for row in rows:
        row["probs"] = [*row["probs"], 0.0]
    labels = [source(write_labels(tmp_path / "l.parquet", rows), pairs_file)]
    with pytest.raises(
        ConfigError, match=r"`phi` is missing: the built-in rule map gives grades 0 to 2, and there are 4"
    ):
        examples(labels=labels)
    alone = examples(labels=labels, loss={"subject": 0.0, "attribute": 0.0, "consistency": 0.0})
    assert alone.targets["relevance"].shape[1] == 4


def test_rows_without_a_node_are_masked_and_not_guessed(
    examples: Callable[..., Examples], tmp_path: Path, pairs_file: Path
) -> None:
    rows = label_rows(make_pairs())
    for row in rows[::2]:
        row |= dict.fromkeys(NODES)
    found = examples(labels=[source(write_labels(tmp_path / "l.parquet", rows), pairs_file)])
    assert (found.weights["subject"][::2] == 0).all()
    assert (found.weights["subject"][1::2] == 1).all()
    assert (found.targets["subject"][::2] == 0).all()
    assert (found.weights["relevance"] == 1).all()


def test_gold_is_mixed_into_the_target_and_rows_with_gold_alone_weigh_its_share(
    examples: Callable[..., Examples], tmp_path: Path, pairs_file: Path
) -> None:
    pairs = make_pairs()
    labelled = write_labels(tmp_path / "l.parquet", label_rows(pairs)[:100])
    found = examples(labels=[source(labelled, pairs_file)], gold={"path": str(pairs_file)}, loss={"gold_weight": 0.25})
    assert len(found.texts) == 144
    for row, pair in enumerate(pairs[:100]):
        wanted = 0.75 * np.array(softened(pair["grade"], 3)) + 0.25 * np.eye(3)[pair["grade"]]
        np.testing.assert_allclose(found.targets["relevance"][row], wanted, rtol=1e-6)
    np.testing.assert_allclose(found.weights["relevance"], [1.0] * 100 + [0.25] * 44)
    assert (found.teacher[100:] == -1).all()
    assert found.gold.tolist() == [pair["grade"] for pair in pairs]


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_gold_that_is_the_runs_own_input_has_the_columns_that_the_job_names(
    spec: Callable[..., dict[str, Any]], tmp_path: Path, pairs_file: Path, weight: float
) -> None:
    """Also by the spec in the student's manifest, from which `relabel export` reads its pairs."""
    names = {"query_id": "qid", "query": "text", "doc_id": "sku", "document": "name", "grade": "stars"}
    pairs = str(tmp_path / "own.parquet")
    pq.write_table(pq.read_table(pairs_file).select(names).rename_columns(names), pairs)
    columns = {role: name for role, name in names.items() if role != "grade"}
    job = {
        "name": "run",
        "input": {"path": pairs, "columns": {**columns, "gold": "stars"}},
        "labeler": {"name": "direct", "grades": 3},
        "engine": {"name": "fake"},
        "output": str(tmp_path / "run"),
    }
    assert api_run(job).labelled == len(make_pairs())
    values = spec(labels=[str(tmp_path / "run")], gold={"path": pairs}, loss={"gold_weight": weight})
    read = validate_spec(DistillSpec, values, where="student.yaml")
    kept = validate_spec(DistillSpec, read.model_dump(mode="json"), where="manifest")
    for one in (read, kept):
        assert load_examples(one, Storage()).gold.tolist() == [pair["grade"] for pair in make_pairs()]
    pq.write_table(pq.read_table(pairs).slice(1), tmp_path / "other.parquet")
    other = validate_spec(DistillSpec, values | {"gold": {"path": str(tmp_path / "other.parquet")}}, where="s.yaml")
    with pytest.raises(InputError, match=r"`gold.columns.|`gold.grade`"):
        load_examples(other, Storage())


def test_rows_weigh_what_source_confidence_and_outside_mass_say(
    examples: Callable[..., Examples], tmp_path: Path, pairs_file: Path
) -> None:
    one = write_labels(tmp_path / "one.parquet", label_rows(make_pairs())[:72])
    two = write_labels(tmp_path / "two.parquet", label_rows(make_pairs(), has_probs=False)[72:])
    found = examples(
        labels=[source(one, pairs_file, weight=2.0), source(two, pairs_file)],
        loss={"weight_by": ["confidence", "outside_mass"]},
    )
    np.testing.assert_allclose(found.weights["relevance"][:72], 2.0 * 0.8 * 0.9, rtol=1e-6)
    np.testing.assert_allclose(found.weights["relevance"][72:], 1.0)


def test_balanced_weights_give_every_grade_the_same_say(examples: Callable[..., Examples]) -> None:
    found = examples(train={"class_balance": "weights"})
    rows = found.rows_of(TRAIN)
    grade, weight = found.targets["relevance"][rows].argmax(1), found.weights["relevance"][rows]
    totals = [weight[grade == one].sum() for one in np.unique(grade)]
    np.testing.assert_allclose(totals, totals[0], rtol=1e-4)
    assert weight.sum() == pytest.approx(len(rows), rel=1e-4)


@given(st.lists(st.text(max_size=6), min_size=1, max_size=40), st.integers(0, 5))
def test_a_querys_side_follows_from_the_query_alone(keys: list[str], seed: int) -> None:
    side = split_queries(keys, dev=0.3, test=0.3, seed=seed)
    again = split_queries([*reversed(keys), "another"], dev=0.3, test=0.3, seed=seed)
    assert dict(zip(reversed(keys), again.tolist(), strict=False)) == dict(zip(keys, side.tolist(), strict=True))


@pytest.mark.parametrize("by", ["query_id", "query"])
def test_a_split_knows_the_queries_that_it_had_from_others(examples: Callable[..., Examples], by: str) -> None:
    """By the manifest's facts alone, through JSON."""
    found = examples(split={"by": by, "dev": 0.3, "test": 0.3})
    facts = checked(SplitFacts, json.loads(json.dumps(plain(found.about.split))))
    sides_of = query_sides(facts)
    np.testing.assert_array_equal(sides_of(found.queries), found.side)
    others = [f"{query} of another file" for query in found.queries]
    assert set(sides_of(others).tolist()) == {TEST}
    earlier = replace(facts, learned_queries=None)
    assert set(query_sides(earlier)(others).tolist()) != {TEST}


def test_distance_to_the_teacher_is_the_mean_kl_of_rows_that_have_one() -> None:
    student, teacher = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.25, 0.75], [np.nan, np.nan]])
    found = teacher_figures(student, teacher, np.array([1, 0]))
    assert found["kl"] == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))
    assert found["agreement"] == 0.5


@pytest.mark.parametrize("name", [file.stem for file in sorted(STUDENTS.glob("*.yaml"))])
def test_every_spec_of_the_docs_runs(
    name: str,
    tmp_path: Path,
    encoder_dir: Callable[..., Path],
    decoder_dir: Callable[..., Path],
    labels_file: Path,
    pairs_file: Path,
) -> None:
    """With tiny models, made-up labels and one small step; all other keys as they are, and as the schema has them."""
    if "lora" in (STUDENTS / f"{name}.yaml").read_text():
        pytest.importorskip("peft")
    from relabel.distill.students.distillation import distill

    values = yaml.safe_load((STUDENTS / f"{name}.yaml").read_text())
    jsonschema.Draft202012Validator(student_schema()).validate(values)
    kind = KINDS[values["student"]["kind"]]
    is_encoder = kind.base == "encoder"
    values["student"]["model"] = str(encoder_dir() if is_encoder else decoder_dir())
    rows = pq.read_table(labels_file).to_pylist()
    parts = len(values["labels"])  # the same labels twice are refused
    values["labels"] = [
        source(write_labels(tmp_path / f"labels{part}.parquet", rows[part::parts]), pairs_file) for part in range(parts)
    ]
    if "gold" in values:
        values["gold"] |= {"path": str(pairs_file), "grade": "grade", "map": {0: 0, 1: 1, 2: 2}}
    one_step = {} if "train.max_steps" in kind.refuses else {"max_steps": 1}
    small = {"batch_size": 8, "accumulation": 1, "tokens_per_batch": 4096}
    values["train"] |= {key: least for key, least in small.items() if key in values["train"]}
    values["train"] |= {**one_step, "max_tokens": 60 if is_encoder else 300}
    values |= {"output": str(tmp_path / "out"), "split": {"dev": 0.2, "test": 0.2}}
    report = distill(validate_spec(DistillSpec, values, where=name), Storage())
    assert report.manifest.training.steps == 1 or not one_step
    assert name != "label-only" or report.manifest.heads == {"relevance": 3}


# A student's spec file takes variables and flags as a job file does.


@pytest.fixture
def call(
    tmp_path: Path,
    spec: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, str]]:
    """`call("--set", "train.seed=3", RELABEL_NAME="x", changes={…})`: `relabel distill` on the small spec, in this
    process.
    """

    def run(*arguments: str, changes: dict[str, Any] | None = None, **environment: str) -> tuple[int, str, str]:
        file = tmp_path / "student.yaml"
        file.write_text(yaml.safe_dump(spec(train={"max_steps": 1}, **changes or {})))
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main(["distill", str(file), *arguments, "--output", "json"])
        return int(end.value.code or 0), *capsys.readouterr()

    return run


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    output = {"output": str(tmp_path / "${date:%Y}" / "${env.REGION}-$${x}")}
    variables = {"RELABEL_DATE": "2025-02-03", "REGION": "north", "RELABEL_TRAIN__SEED": "11", "RELABEL_NAME": "other"}
    code, _, err = call("--set", "train.seed=12", changes=output, **variables)
    assert code == 0, err
    manifest = json.loads((tmp_path / "2025" / "north-${x}" / "manifest.json").read_text())
    assert (manifest["name"], manifest["spec"]["train"]["seed"]) == ("other", 12)


GOOD = "name: x\nlabels: [out]\nstudent: {kind: encoder, model: m}\noutput: o\n"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("name: x\n  bad: [1,\n", ["student.yaml, line 2, column 6: not YAML"]),
        (GOOD + "name: y\n", ["line 5, column 1", "the key `name` is given twice"]),
        ("- a\n", ["holds a list; want a mapping with the keys name, labels, gold, student, loss, "]),
        ("", ["`relabel init --kind student` writes one to start from"]),
        (GOOD + "trian: {epochs: 1}\n", ["unknown key `trian`: did you mean `train`?"]),
        (
            GOOD.replace("model: m", "modle: m"),
            ["`student.model` is missing", "unknown key `student.modle`: did you mean `model`?"],
        ),
        (
            GOOD.replace("{kind: encoder, model: m}", "encoder"),
            ["`student` = 'encoder': want a mapping with the keys kind, model"],
        ),
        (GOOD.replace("output: o", "output: 3"), ["`output` = 3", "in YAML, put it in quotes"]),
        (
            "name: job\ninput: {path: x}\nlabeler: {name: r3a}\nengine: {name: fake}\noutput: o\n",
            ["this is a job's spec, not a student's: relabel run"],
        ),
    ],
)
def test_a_file_that_is_no_spec_of_a_student_is_refused_with_its_place_and_what_belongs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("student.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["distill", "student.yaml"])
    found = capsys.readouterr()
    assert (end.value.code, found.out) == (3, "")
    for part in messages:
        assert part in found.err
    assert "--kind job" not in found.err
    assert "labeler" not in found.err or "labeler" in text


# Every loss against an independent computation: numpy loops, cases made by hand, torch's own functions, gradcheck in
# float64.


MASK = phi_mask(DEFAULT_PHI, 3)


def softmax(row: np.ndarray) -> np.ndarray:
    raised = np.exp(row - row.max())
    return raised / raised.sum()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape) * 2


def induced_by_loop(subject: np.ndarray, attribute: np.ndarray, grades: int = 3) -> np.ndarray:
    found = np.zeros((len(subject), grades))
    for row in range(len(subject)):
        p_s, p_a = softmax(subject[row]), softmax(attribute[row])
        for s, a in itertools.product(range(5), range(5)):
            found[row, DEFAULT_PHI[s][a]] += p_s[s] * p_a[a]
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.5, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_soft_cross_entropy_is_the_sum_over_grades(temperature: float, smoothing: float) -> None:
    logits, teacher = draw(6, 3), np.apply_along_axis(softmax, 1, draw(6, 3, seed=1))
    wanted = []
    for z, p in zip(logits, teacher, strict=True):
        target = p ** (1 / temperature)
        target = (1 - smoothing) * target / target.sum() + smoothing / 3
        q = softmax(z / temperature)
        wanted.append(-(temperature**2) * sum(target[k] * math.log(q[k]) for k in range(3)))
    target = soft_targets(torch.tensor(teacher), temperature=temperature, smoothing=smoothing)
    found = cross_entropy(torch.tensor(logits), target, temperature=temperature)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)


def test_induced_distribution_is_the_sum_over_phis_cells() -> None:
    subject, attribute = draw(7, 5), draw(7, 5, seed=1)
    found = induced_log_probs(torch.tensor(subject), torch.tensor(attribute), MASK).exp()
    np.testing.assert_allclose(found.numpy(), induced_by_loop(subject, attribute), rtol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("direction", ["induced_to_direct", "direct_to_induced"])
def test_consistency_is_the_kl_that_its_name_says(direction: str) -> None:
    relevance, subject, attribute = draw(6, 3, seed=4), draw(6, 5), draw(6, 5, seed=1)
    induced, direct = induced_by_loop(subject, attribute), np.apply_along_axis(softmax, 1, relevance)
    p, q = (induced, direct) if direction == "induced_to_direct" else (direct, induced)
    wanted = [sum(p[row, k] * math.log(p[row, k] / q[row, k]) for k in range(3)) for row in range(6)]
    tensors = (torch.tensor(values) for values in (relevance, subject, attribute))
    np.testing.assert_allclose(consistency(*tensors, MASK, direction=direction).numpy(), wanted, rtol=1e-10)
    kl = torch.nn.functional.kl_div(torch.tensor(np.log(q)), torch.tensor(p), reduction="none").sum(-1)
    np.testing.assert_allclose(kl.numpy(), wanted, rtol=1e-10)


def test_a_grade_that_no_cell_gives_costs_nothing_and_has_a_finite_gradient() -> None:
    never_one = tuple(tuple(2 if grade else 0 for grade in row) for row in DEFAULT_PHI)
    logits = [torch.tensor(draw(3, width, seed=width), requires_grad=True) for width in (3, 5, 5)]
    losses = consistency(*logits, phi_mask(never_one, 3))
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert all(torch.isfinite(one.grad).all() for one in logits)


@pytest.mark.parametrize("direction", ["induced_to_direct", "direct_to_induced"])
def test_gradients_are_those_of_finite_differences(direction: str) -> None:
    relevance, subject, attribute = (
        torch.tensor(draw(3, width, seed=width), requires_grad=True) for width in (3, 5, 5)
    )
    target = torch.softmax(torch.tensor(draw(3, 3, seed=9)), -1)
    assert torch.autograd.gradcheck(
        lambda *heads: consistency(*heads, MASK, direction=direction), (relevance, subject, attribute)
    )
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, target, temperature=1.7), (relevance,))


def test_a_masked_row_can_be_anything() -> None:
    losses = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    total = weighted_sum(losses, torch.tensor([0.5, 0.0, 2.0]))
    total.backward()
    assert total.item() == 6.5
    assert losses.grad.tolist() == [0.5, 0.0, 2.0]


def batch(rows: int = 4, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    widths = {"relevance": 3, "subject": 5, "attribute": 5}
    logits = {
        name: torch.tensor(draw(rows, width, seed=seed + place)) for place, (name, width) in enumerate(widths.items())
    }
    targets = {
        name: torch.softmax(torch.tensor(draw(rows, width, seed=seed + 10 + width)), -1)
        for name, width in widths.items()
    }
    weights = {
        "relevance": torch.tensor([1.0, 2.0, 0.5, 1.0]),
        "subject": torch.tensor([1.0, 0.0, 0.0, 3.0]),
        "attribute": torch.ones(4),
    }
    held = {"targets": targets, "weights": {name: values.double() for name, values in weights.items()}}
    return logits, {**held, "row_weight": torch.tensor([1.0, 2.0, 0.5, 1.0]).double()}


def test_objective_is_equations_16_to_19_with_masks_and_weights() -> None:
    spec = LossSection(relevance=1.0, subject=0.5, attribute=0.25, consistency=0.2)
    logits, held = batch()
    objective = Objective(spec, {"relevance": 3, "subject": 5, "attribute": 5}, DEFAULT_PHI)
    totals = {name: weight.sum() for name, weight in objective.row_weights(held).items()}
    found = objective.loss(objective.sums(logits, held), totals).item()

    wanted = 0.0
    for name, weight in (("relevance", 1.0), ("subject", 0.5), ("attribute", 0.25)):
        target, weights = held["targets"][name].numpy(), held["weights"][name].numpy()  # type: ignore[index]
        rows = [-(target[row] * np.log(softmax(logits[name][row].numpy()))).sum() for row in range(4)]
        wanted += weight * float(np.average(rows, weights=weights))
    induced = induced_by_loop(logits["subject"].numpy(), logits["attribute"].numpy())
    direct = np.apply_along_axis(softmax, 1, logits["relevance"].numpy())
    kl = (induced * np.log(induced / direct)).sum(1)
    wanted += 0.2 * float(np.average(kl, weights=held["row_weight"].numpy()))  # type: ignore[union-attr]
    assert found == pytest.approx(wanted, rel=1e-10)


def test_a_low_temperature_sharpens_the_teacher_and_never_wipes_it_out() -> None:
    """0.34^(1/0.005) is below what float32 holds; the distribution that it is part of is not."""
    teacher = torch.tensor([[0.34, 0.33, 0.33], [0.2, 0.5, 0.3], [0.0, 0.0, 0.0]])
    found = soft_targets(teacher, temperature=0.005)
    raised = (teacher[:2].double() / teacher[:2].double().amax(-1, keepdim=True)) ** 200
    torch.testing.assert_close(found[:2].double(), raised / raised.sum(-1, keepdim=True), rtol=1e-4, atol=1e-7)
    assert found[2].tolist() == [0.0, 0.0, 0.0]


# Rows of like length share a batch, and how large one is follows from where it is computed.


@given(st.lists(st.integers(0, 300)), st.integers(1, 2000))
def test_every_row_is_in_one_batch_that_holds_no_more_than_it_may(lengths: list[int], batch_tokens: int) -> None:
    batches = list(length_batches(lengths, batch_tokens))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    widths = [max(lengths[place] for place in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert all(len(batch) == 1 or len(batch) * width <= batch_tokens
               for batch, width in zip(batches, widths, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("device", "tokens"),
    [("cpu", CPU_BATCH_TOKENS), ("cpu:0", CPU_BATCH_TOKENS), ("openvino", CPU_BATCH_TOKENS), ("cuda", GPU_BATCH_TOKENS),
     ("cuda:1", GPU_BATCH_TOKENS), ("tensorrt", GPU_BATCH_TOKENS), ("mps", GPU_BATCH_TOKENS)],
)  # fmt: skip
def test_a_device_has_its_size(device: str, tokens: int) -> None:
    assert batch_tokens_on(device) == tokens


# The nineteen counts of a query, by hand.


EXAMPLES = {
    "": {},
    "   \n": {"characters": 4},
    "How tall is Mount Everest?": {
        "characters": 26,
        "words": 5,
        "sentences": 1,
        "capitalized": 2,
        "question_marks": 1,
        "question_words": 1,
        "auxiliaries": 1,
    },
    "Compare the impact of EU and U.S. laws, and explain why they don't agree in 2024!": {
        "characters": 81,
        "words": 17,
        "sentences": 2,  # the one after U.S., too: no list of abbreviations is kept
        "capitalized": 3,
        "numbers": 1,
        "separators": 1,
        "question_words": 1,
        "open_words": 2,
        "relation_words": 1,
        "comparisons": 1,
        "pronouns": 1,
        "determiners": 1,
        "prepositions": 2,
        "coordinators": 2,
        "negations": 1,
    },
    "If it’s a state-of-the-art réseau…  is the ΩMEGA ³ better?": {
        "characters": 58,
        "words": 10,
        "sentences": 2,
        "long_words": 1,
        "capitalized": 1,
        "numbers": 1,
        "question_marks": 1,
        "comparisons": 1,
        "auxiliaries": 1,
        "determiners": 2,
        "subordinators": 1,
    },
    "日本の首都はどこですか？ 教えて、": {
        "characters": 17,
        "words": 2,
        "sentences": 1,
        "long_words": 1,
        "question_marks": 1,
        "separators": 1,
    },
    "a_b \udcff👟 [SEP]": {"characters": 12, "words": 3, "capitalized": 1, "determiners": 1},
}


@pytest.mark.parametrize("text", list(EXAMPLES))
def test_counts_are_those_counted_by_hand(text: str) -> None:
    found = dict(zip(COUNT_NAMES, query_counts(text), strict=True))
    assert {name: count for name, count in found.items() if count} == EXAMPLES[text]


@pytest.mark.parametrize("piece", ["why not? ", "a-"])
def test_a_very_long_text_takes_time_in_proportion(piece: str) -> None:
    text = piece * (400_000 // len(piece)) + "x"
    began = time.process_time()
    assert query_counts(text)[0] == len(text)
    assert time.process_time() - began < 10.0
