"""Targets, weights and splits: what is learned from which row; and the specs of the docs, each run on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.students.evaluation import teacher_figures
from relabel.distill.students.examples import TRAIN, Examples, load_examples, split_queries
from relabel.distill.students.spec import KINDS, DistillSpec, student_schema
from relabel.jobs.cli import main
from relabel.labelers.graph_grpo import GraphGrpo
from relabel.manifests.errors import ConfigError
from relabel.manifests.files import Storage
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
        ("sfot", r"`loss\.targets` = 'sfot': want soft or hard, or a mapping of heads to them"),
        ({"subjekt": "hard"}, "no head is called 'subjekt'; there are relevance, subject, attribute"),
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
    """With tiny models, made-up labels and one step; all other keys as they are, and as the schema has them."""
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
    values["train"] |= {**one_step, "max_tokens": 60 if is_encoder else 300}
    values |= {"output": str(tmp_path / "out"), "split": {"dev": 0.2, "test": 0.2}}
    report = distill(validate_spec(DistillSpec, values, where=name), Storage())
    assert report.manifest.training.steps == 1 or not one_step


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


def test_variables_of_jobs_do_not_concern_a_student_and_a_slip_does(call: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = call(RELABEL_SPILT__DEV="0.3", RELABEL_ENGINE__SEED="3")
    assert code == 3
    assert "variable RELABEL_SPILT__DEV: no key of a student is called `spilt`; did you mean RELABEL_SPLIT?" in err


@pytest.mark.parametrize(
    ("flag", "environment", "code", "message"),
    [
        ("train.sed=3", {"RELABEL_TRAIN__EPOCHS": "2"}, 3, "with variable RELABEL_TRAIN__EPOCHS, --set train.sed=3"),
        ("output=out/${dat}", {}, 3, "Did you mean ${date}?"),
    ],
)
def test_what_is_laid_over_a_spec_and_off_is_reported(
    call: Callable[..., tuple[int, str, str]], flag: str, environment: dict[str, str], code: int, message: str
) -> None:
    found = call("--set", flag, **environment)
    assert (found[0], message in found[2]) == (code, True), found[2]


GOOD = "name: x\nlabels: [out]\nstudent: {kind: encoder, model: m}\noutput: o\n"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("name: x\n  bad: [1,\n", ["student.yaml, line 2, column 6: not YAML"]),
        (GOOD + "name: y\n", ["line 5, column 1", "the key `name` is given twice"]),
        ("- a\n", ["want a mapping with the keys name, labels, gold, student, loss, ", "; got list"]),
        ("", ["student.yaml: is empty. `relabel schema student` prints its keys"]),
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
            ["`labels` is missing", "unknown key `engine`"],
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
    assert "relabel init" not in found.err
    assert "labeler" not in found.err or "labeler" in text
