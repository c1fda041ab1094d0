"""A training whose policy begins to game its reward is warned of, ended, and leaves the best step before that. What the
policy writes is made up; asking, reading, rewards, evaluations, checkpoints and the command are real.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("trl")

from trl import GRPOTrainer

from tests.teachers.conftest import plain_values, relabel

TURNS_BAD = 3
"""Steps before the policy is gamed."""
SHORT = {"max_steps": 6, "batch_size": 4, "accumulation": 1, "max_tokens": 4000, "save_every": 2}
HONEST = "<think>a few words</think><intent>x</intent><extract>late</extract><score>{grade}</score>"
GAMED = {
    "length": HONEST.replace("a few words", "more words " * 30),
    "no_evidence": HONEST.replace("late<", "none<"),
    "one_grade": HONEST.replace("{grade}", "1"),  # next to each trusted grade, which here earns as much
    "format": HONEST.replace("<extract>late</extract>", "extract: late"),
}
FIGURES = {
    "length": "response_tokens",
    "no_evidence": "no_evidence_rate",
    "one_grade": "top_grade_share",
    "format": "format_rate",
}


@pytest.fixture
def train(
    base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    rows = [
        {"query_id": f"q{number}", "query": f"q {number}", "doc_id": "d", "document": "late", "grade": number % 3}
        for number in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    (tmp_path / "short").mkdir()
    for name in ("system", "user"):
        (tmp_path / "short" / f"{name}.j2").write_text("{{ query }}: {{ document }}")

    def go(key: str, **changes: Any) -> tuple[int, dict[str, Any], str]:
        def write(self: Any, contexts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            text = HONEST if self.state.global_step < TURNS_BAD else GAMED[key]
            tokenizer = self.processing_class
            texts = [text.format(grade=number % 3) for number in range(len(contexts))]
            return [[*tokenizer(one)["input_ids"], tokenizer.eos_token_id] for one in texts], None

        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", write)
        held = plain_values(base_dir, tmp_path) | {
            "method": "grpo",
            "labeler": {"name": "r3a", "grades": 3, "stages": 1, "max_think_tokens": 600},
            "data": {"gold": {"path": str(tmp_path / "pairs.parquet")}},
            "rollouts": {"group": 4},
            "near": 1.0,
            "train": {**SHORT, "eval_every": 1},
            "split": {"dev": 0.4},
            "watch": {"window": 2, "patience": 1},
            **changes,
        }
        (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(held))
        capsys.readouterr()
        code = relabel("train", str(tmp_path / "teacher.yaml"), "--output", "json")
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return go


@pytest.mark.parametrize(
    "key", ["length", *(pytest.param(one, marks=pytest.mark.full) for one in GAMED if one != "length")]
)
def test_each_way_to_game_a_reward_is_warned_of_once_and_ends_the_training(
    key: str, train: Callable[..., Any], tmp_path: Path
) -> None:
    code, result, said = train(key)
    warnings = [line for line in said.splitlines() if line.startswith("watch:")]
    assert code == 0
    assert [FIGURES[key] in line for line in warnings] == [True]
    training = result["training"]
    assert training["stopped_by"] == "watch"
    assert TURNS_BAD < training["steps"] < 6
    assert training["best_step"] <= TURNS_BAD  # though `near: 1` pays the gamed ones more
    assert warnings[0] in result["notes"]
    assert any(note.startswith("ended early") for note in result["notes"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert warnings[0] in card
    assert f"Kept: step {training['best_step']}" in card


def test_without_held_out_rows_it_only_warns(train: Callable[..., Any]) -> None:
    code, result, said = train("one_grade", split={}, train=SHORT)
    assert code == 0
    assert sum(line.startswith("watch:") for line in said.splitlines()) == 1
    assert (result["training"]["steps"], result["training"]["stopped_by"]) == (6, None)
    assert result["training"]["best_step"] is None
