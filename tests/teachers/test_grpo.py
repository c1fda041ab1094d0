"""`method: grpo` and `graph-grpo` as a user has them: what is refused before anything is loaded, and what would be
done. What trains is in `test_grpo_trainer.py`, so that one file alone imports TRL's trainer.
"""

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import estimate_teacher, train_teacher
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from tests.teachers.conftest import NUM_PAIRS

pytest.importorskip("trl")

from relabel.distill.teachers.spec import ROLLOUTS_NAME
from relabel.manifests.errors import ModelError
from tests.teachers.conftest import relabel

GRAPH: dict[str, Any] = {"method": "graph-grpo", "labeler": {"name": "graph-grpo", "max_text_tokens": 8}}


@pytest.fixture
def estimate(values: Callable[..., dict[str, Any]], pairs_path: Path) -> Callable[..., Any]:
    """What a small spec would do, and the remarks on it."""

    def go(**changes: Any) -> tuple[Any, list[str]]:
        held = values(**{
            "method": "grpo",
            "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 8},
            "data": {"gold": {"path": str(pairs_path)}},
            "rollouts": {"group": 4},
            "train": {"batch_size": 4, "accumulation": 2, "max_tokens": 4000},
            **changes,
        })  # fmt: skip
        said: list[str] = []
        found = estimate_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage(), report=said.append)
        return found, said

    return go


def test_steps_rollouts_and_tokens_are_counted_ahead(estimate: Callable[..., Any]) -> None:
    found, _ = estimate()
    assert (found.rows, found.steps, found.examples) == (NUM_PAIRS, NUM_PAIRS // 2, NUM_PAIRS * 4)
    assert found.tokens > found.answer_tokens == found.examples * (8 + 2 * 16 + 1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"rollouts": {"group": 3}},
            ConfigError,
            r"^teacher.yaml: train.batch_size . train.accumulation is 8 .* no multiple of rollouts.group",
        ),
        ({"rollouts": {"group": 4, "updates": 2}, "train": {"save_every": 3}}, ConfigError, "rollouts.updates"),
        ({"labeler": {"name": "direct", "grades": 3}}, ConfigError, "nothing to reward"),
        ({"labeler": {"name": "r1", "grades": 2}}, InputError, "off the scale"),
        ({"method": "graph-grpo"}, ConfigError, "want graph-grpo"),
        ({"train": {"accumulation": 64}}, InputError, r"12 prompts .*a step takes 64 .*rollouts.group"),
        ({"train": {"max_tokens": 64}, "labeler": {"name": "r1", "max_think_tokens": 64}}, ConfigError, "no room"),
        (
            {"train": {"max_tokens": 100}},
            InputError,
            r"12 whose prompt does not fit\. The prompts have up to \d+ tokens, train\.max_tokens is 100, of which \d+ "
            r"are kept for an answer\. Raise it to \d+\.$",
        ),
        (
            {"train": {"max_tokens": 250}, "labeler": {"name": "r3a", "grades": 3, "max_think_tokens": 8}},
            InputError,
            r"Raise it to \d+, and by what its first answers take, which later prompts hold\.$",
        ),
        *(
            ({"labeler": name}, ConfigError, f"labeler {name}: .*one grade for one pair")
            for name in ("evidence-set", "query", "review", "variants")
        ),
        ({**GRAPH, "data": {"gold": {"subject": "no_such"}}}, InputError, r"no column `no_such` .*data\.gold\.subject"),
        ({**GRAPH, "data": {"gold": {"subject": "seven"}}}, InputError, r"`seven`: grade 7 is off the scale 0 to 4"),
        ({"output": "{pairs}"}, ConfigError, "is a file"),
        ({"output": "{pairs}/x"}, ConfigError, "is a file"),
        ({"output": "gs://bucket/teacher"}, ConfigError, "training at a URL"),
        ({"chat_template_kwargs": {"tokenize": False}}, ConfigError, "chat_template_kwargs.*`tokenize`"),
        ({"train": {"precision": "fp16", "device": "cpu"}}, ConfigError, "fp16 is for GPUs"),
    ],
)
def test_what_can_not_train_is_refused_before_anything_is_loaded(
    changes: dict[str, Any],
    error: type[Exception],
    words: str,
    estimate: Callable[..., Any],
    pairs_path: Path,
    tmp_path: Path,
) -> None:
    small = {"batch_size": 4, "accumulation": 2, "max_tokens": 4000}
    held = {**changes, "train": {**small, **changes.get("train", {})}}
    if "data" in changes:
        table = pq.read_table(pairs_path).append_column("seven", pa.array([7] * NUM_PAIRS))
        pq.write_table(table, tmp_path / "seven.parquet")
        held["data"] = {"gold": {**changes["data"]["gold"], "path": str(tmp_path / "seven.parquet")}}
    if "output" in changes:
        held["output"] = changes["output"].replace("{pairs}", str(pairs_path))
    with pytest.raises(error, match=words) as refused:
        estimate(**held)
    assert "--grade" not in str(refused.value)


def test_the_length_that_is_proposed_for_one_that_no_prompt_fits_into_fits_all(estimate: Callable[..., Any]) -> None:
    small = {"batch_size": 4, "accumulation": 2}
    with pytest.raises(InputError) as refused:
        estimate(train={**small, "max_tokens": 100})
    proposed = int(str(refused.value).rpartition("Raise it to ")[2].rstrip("."))
    assert estimate(train={**small, "max_tokens": proposed})[0].rows == NUM_PAIRS


def test_coefficients_want_a_second_update(estimate: Callable[..., Any]) -> None:
    labeler = {"name": "graph-grpo", "max_text_tokens": 8}
    with pytest.raises(ConfigError, match=r"rollouts.updates of 2 or more"):
        estimate(method="graph-grpo", labeler=labeler, rollouts={"group": 4, "updates": 1})


def test_rows_without_a_grade_are_left_out_and_no_node_gold_is_remarked(
    estimate: Callable[..., Any], pairs_path: Path, tmp_path: Path
) -> None:
    table = pq.read_table(pairs_path)
    grades = [None, *table["grade"].to_pylist()[1:]]
    table = table.set_column(table.column_names.index("grade"), "grade", pa.array(grades, pa.int64()))
    rewards = pa.array([None, *[number % 5 for number in range(1, NUM_PAIRS)]], pa.int64())
    pq.write_table(table.append_column("subject_gold", rewards), tmp_path / "pairs.parquet")
    graph = {"method": "graph-grpo", "labeler": {"name": "graph-grpo", "max_text_tokens": 8}}
    bare = {"data": {"gold": {"path": str(tmp_path / "pairs.parquet")}}}
    found, said = estimate(**graph, **bare)
    assert found.rows == NUM_PAIRS - 1
    assert any("plain GRPO" in remark for remark in said)
    bare["data"]["gold"]["subject"] = "subject_gold"
    assert not any("plain GRPO" in remark for remark in estimate(**graph, **bare)[1])


@pytest.mark.parametrize("is_first_right", [False, True])
def test_a_training_whose_rewards_never_differ_says_that_nothing_was_learned(
    values: Callable[..., dict[str, Any]],
    pairs_path: Path,
    short_templates: str,
    monkeypatch: pytest.MonkeyPatch,
    is_first_right: bool,
) -> None:
    """Made-up answers; with the first one of a step right, there is something to learn."""
    from relabel.distill.teachers import rewards

    whole = rewards.grade_score

    def scored(near: float) -> Any:
        worth, calls = whole(near), [0]

        def score(rollout: Any, row: Any) -> Any:
            calls[0] += 1
            return replace(worth(rollout, row), reward=float(is_first_right and calls[0] % 4 == 1))

        return score

    monkeypatch.setattr("relabel.distill.teachers.grpo.grade_score", scored)
    held = values(
        method="grpo",
        labeler={"name": "r1", "grades": 3, "max_think_tokens": 4, "templates": short_templates},
        data={"gold": {"path": str(pairs_path)}},
        rollouts={"group": 4},
        train={"batch_size": 4, "accumulation": 1, "max_tokens": 4000, "max_steps": 2},
    )
    notes = train_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage()).manifest.notes
    assert any("nothing was learned" in note for note in notes) != is_first_right


# GRPO learns: a tiny model that knows the format alone finds out which word of a document means which grade.
# `benchmarks/grpo_learns.py` shows the whole curve.


# Defaults of a spec: the papers' settings, and ours where they have none.


TEACHERS = Path(__file__).parent.parent.parent / "docs" / "teachers"
GOLD: dict[str, Any] = {"data": {"gold": {"path": "pairs.parquet"}}}
LEAST: dict[str, dict[str, Any]] = {
    "sft": {"labeler": "direct", **GOLD},
    "grpo": {"labeler": "r3a", **GOLD},
    "graph-grpo": {"labeler": "graph-grpo", **GOLD},
    "res-rag": {"labeler": "evidence-set", "generator": {"name": "fake"}, **GOLD},
}


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("sft", {"train.mask": 0.5, "train.learning_rate": 1e-5, "train.max_tokens": 2048, "lora": None}),
        (
            "grpo",
            {
                "rollouts.group": 16, "rollouts.clip": 0.2, "rollouts.beta": 0, "rollouts.temperature": 1,
                "rollouts.top_p": 1, "rollouts.updates": 1, "train.learning_rate": 5e-7, "prompts_per_step": 32,
                "near": 0,
            },
        ),
        (
            "graph-grpo",
            {
                "rollouts.group": 8, "rollouts.clip": 0.2, "rollouts.beta": 0.01, "rollouts.updates": 2,
                "credit.learn": True, "credit.learning_rate": 1e-3, "credit.decay": 0.01, "credit.epsilon": 1e-6,
                "credit.average": "auto", "credit.match": 1, "credit.miss": -1, "credit.consistency": True,
            },
        ),
        (
            "res-rag",
            {
                "rollouts.group": 4, "rollouts.beta": 0.05, "rollouts.temperature": 1, "rollouts.top_p": 0.8,
                "train.learning_rate": 1e-5, "reward.eta": 2, "reward.alpha_ans": 2, "reward.alpha_ret": 1,
                "reward.gamma": -1, "reward.r_min": -5, "reward.r_max": 5,
            },
        ),
    ],
)  # fmt: skip
def test_a_spec_that_says_no_more_than_it_must_trains_as_the_papers_do(method: str, wanted: dict[str, Any]) -> None:
    spec = read_teacher_spec({"name": "t", "method": method, "init": "m", "output": "o", **LEAST[method]}, where="here")
    assert {key: operator.attrgetter(key)(spec) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("r3a-grpo", {"train.max_steps": 360, "prompts_per_step": 32, "rollouts.group": 16, "near": 0}),
        ("r1-grpo", {"train.max_steps": 360, "prompts_per_step": 32, "labeler.name": "r1"}),
        ("r3a-cold-start", {"train.mask": 0}),
        ("graph-grpo-1-label", {"data.answer": "preliminary"}),
        ("graph-grpo-2-masked-cot", {"train.mask": 0.5}),
        ("res-rag-warm-up", {"train.mask": 0, "data.gold.sets": "similar"}),
        (
            "router-sft",
            {"train.mask": 0, "lora.r": 8, "lora.alpha": 16, "train.learning_rate": 1e-5, "train.batch_size": 8},
        ),
    ],
)
def test_the_docs_specs_have_the_papers_settings(name: str, wanted: dict[str, Any]) -> None:
    spec = read_teacher_spec(yaml.safe_load((TEACHERS / f"{name}.yaml").read_text()), where=name)
    assert {key: operator.attrgetter(key)(spec) for key in wanted} == wanted


# `method: res-rag` from spec to model folder.


def test_the_spec_of_the_docs_trains_and_its_teacher_labels(
    base_dir: Path, questions_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_schema: Any
) -> None:
    """With a tiny model, a made-up generator and two steps; other keys as they are."""
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    held = yaml.safe_load((TEACHERS / "res-rag.yaml").read_text())
    check_schema(held)
    held |= {"init": str(base_dir), "output": str(tmp_path / "out"), "generator": {"name": "fake"}}
    held["data"]["gold"]["path"] = str(questions_path)
    held["train"] |= {"max_steps": 2, "max_tokens": 4000, "save_every": 1}
    held["split"] = {"dev": 0.3}
    check_schema(held)
    report = train_teacher(read_teacher_spec(held, where="res-rag"), Storage())
    out = tmp_path / "out"
    rollouts = pq.read_table(out / ROLLOUTS_NAME).to_pylist()
    assert report.manifest.training.steps == 2
    assert len(rollouts) == 8
    assert report.manifest.data.held_out.queries > 0
    curve = pq.read_table(out / "curves.parquet").to_pylist()
    assert {row["name"] for row in curve if row["split"] == "dev"} >= {"reward", "f1_ret", "penalty", "usefulness"}
    assert all(row["format_ok"] for row in rollouts)
    for row in rollouts:
        assert row["reward"] == pytest.approx(row["usefulness"] + row["f1_ret"] - row["penalty"])
        assert row["usefulness"] == (2 * row["f1_ans"] if row["answers"] else -1)
    assert report.manifest.data.gold.sets == "similar"
    job = {
        "name": "job",
        "input": {"path": str(questions_path)},
        "labeler": held["labeler"],
        "engine": {"name": "transformers", "model": str(out)},
        "output": str(tmp_path / "labels"),
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert relabel("run", str(tmp_path / "job.yaml")) == 0


@pytest.fixture
def held(base_dir: Path, questions_path: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "method": "res-rag",
        "init": str(base_dir),
        "labeler": {"name": "evidence-set"},
        "data": {"gold": {"path": str(questions_path)}},
        "generator": {"name": "fake"},
        "train": {"max_tokens": 4000},
        "output": str(tmp_path / "out"),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labeler": {"name": "r1"}}, "labeler r1 chooses no chunks; want evidence-set"),
        ({"generator": {}}, "`name` is missing; there are fake, openai, transformers, vllm"),
        ({"generator": {"name": "fakes"}}, "Did you mean fake"),
        ({"generator": {"name": "transformers"}}, "needs a model: set generator.model"),
        ({"rollouts": {"max_answer_tokens": 4000}}, "no room for a prompt"),
        ({"rollouts": {"vllm": {}}}, "no answers under a grammar yet"),
        ({"data": {"gold": {"path": "{path}", "answers": "wanted"}}}, "no column `wanted`"),
        ({"train": {"max_tokens": 1100}}, r"6 queries whose prompt does not fit\. .* Raise it to \d+\.$"),
    ],
)
def test_what_is_off_is_refused_before_anything_is_loaded(
    changes: dict[str, Any], message: str, held: dict[str, Any], questions_path: Path
) -> None:
    text = json.dumps({**held, **changes}).replace("{path}", str(questions_path))
    with pytest.raises((ConfigError, InputError, ModelError), match=message):
        estimate_teacher(read_teacher_spec(json.loads(text), where="teacher.yaml"), Storage())
