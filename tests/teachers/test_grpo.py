"""`method: grpo` and `graph-grpo` as a user has them: what is refused before anything is loaded, and what would be
done. What trains is in `test_grpo_trainer.py`, so that one file alone imports TRL's trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import estimate_teacher, train_teacher
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from tests.teachers.conftest import NUM_PAIRS

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
        found = estimate_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage(), say=said.append)
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
        ({"train": {"max_tokens": 100}}, InputError, "12 whose prompt does not fit"),
        *(
            ({"labeler": name}, ConfigError, f"labeler {name}: .*one grade for one pair")
            for name in ("evidence-set", "review", "variants")
        ),
        ({**GRAPH, "data": {"gold": {"subject": "no_such"}}}, InputError, r"no column `no_such` .*data\.gold\.subject"),
        ({**GRAPH, "data": {"gold": {"subject": "seven"}}}, InputError, r"`seven`: score 7 is off the scale 0 to 4"),
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
    assert "plain GRPO" in said[0]
    bare["data"]["gold"]["subject"] = "subject_gold"
    assert estimate(**graph, **bare)[1] == []


@pytest.mark.parametrize("is_first_right", [False, True])
def test_a_training_whose_rewards_never_differ_says_that_nothing_was_learned(
    values: Callable[..., dict[str, Any]], pairs_path: Path, monkeypatch: pytest.MonkeyPatch, is_first_right: bool
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
        labeler={"name": "r1", "grades": 3, "max_think_tokens": 4},
        data={"gold": {"path": str(pairs_path)}},
        rollouts={"group": 4},
        train={"batch_size": 4, "accumulation": 1, "max_tokens": 4000, "max_steps": 2},
    )
    notes = train_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage()).manifest.notes
    assert any("nothing was learned" in note for note in notes) != is_first_right
