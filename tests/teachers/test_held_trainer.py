"""GRPO under a grammar: rollouts that the generator failed at add nothing, and what is killed goes on."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("trl")

from relabel.distill.teachers.rewards import ROLLOUTS_NAME, RolloutLog
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.manifests.files import Storage
from tests.killing import killed_at
from tests.teachers.conftest import plain_values
from tests.teachers.res_rag_setup import FakeJudge, make_held_trainer


def rolled(fresh: Any, tokenizer: Any, folder: Path, rewards: list[float]) -> tuple[Any, Any]:
    """A trainer with the batch of one generation; rewards by the order of rollouts."""
    left = iter(rewards)
    trainer = make_held_trainer(
        copy.deepcopy(fresh), tokenizer, folder, group=4, batch=8, accumulation=1, updates=2,
        judge=FakeJudge(lambda _: next(left)), log=RolloutLog(folder),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    torch.manual_seed(5)
    return trainer, trainer._generate_and_score_completions([{"prompt": place} for place in (0,) * 4 + (1,) * 4])


def gradients(trainer: Any, batch: Any) -> list[torch.Tensor]:
    """Of the loss, a little off the policy that sampled."""
    trainer.model.zero_grad()
    old = batch["old_per_token_logps"] - 0.1
    trainer._compute_loss(trainer.model, {**batch, "old_per_token_logps": old}).backward()
    return [one.grad.clone() for one in trainer.model.parameters() if one.grad is not None]


def test_what_the_generator_failed_at_adds_nothing(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The gradient is that of the rollouts that are left, standardised among themselves; of a group with one left,
    nothing is.
    """
    lost = math.nan
    trainer, batch = rolled(fresh, tokenizer, tmp_path, [2.0, lost, 0.0, 1.0, lost, lost, lost, 1.0])
    assert batch["advantages"].tolist() == pytest.approx([1.2247, 0, -1.2247, 0, 0, 0, 0, 0], abs=1e-4)
    found = gradients(trainer, batch)
    left = torch.tensor([0, 2, 3])
    alone = {name: value[left] if value.dim() else value for name, value in batch.items()}
    wanted = gradients(trainer, {**alone, "share": torch.ones(3)})
    assert max(float(one.abs().max()) for one in wanted) > 1e-4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    trainer._log_of_rollouts.write(tmp_path, step=1)
    rows = pq.read_table(tmp_path / ROLLOUTS_NAME).to_pylist()
    assert [row["reward"] for row in rows] == [2.0, None, 0.0, 1.0, None, None, None, 1.0]


@pytest.mark.parametrize("is_cache_lost", [pytest.param(False, marks=pytest.mark.full), True])
def test_killed_after_a_step_it_goes_on_to_the_last_bit(
    is_cache_lost: bool, train_choices: Any, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at("after_training_step", 4):
        train_choices(tmp_path)
    kept = list((tmp_path / "out" / "checkpoints" / "generator").rglob("*.json"))
    assert kept
    for file in kept if is_cache_lost else ():
        file.unlink()
    again = train_choices(tmp_path, "resume")
    for name in ("model.safetensors", ROLLOUTS_NAME, "curves.parquet"):
        assert (again / name).read_bytes() == (undisturbed / name).read_bytes(), name


@pytest.fixture(scope="module")
def train_choices(base_dir: Path, questions_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    templates = tmp_path_factory.mktemp("short")
    (templates / "system.j2").write_text("Choose.")
    (templates / "user.j2").write_text(
        "{{ query }}{% for start, stop in documents %}{% for one in chunks[start:stop] %}{{ one }}{% endfor %}"
        "{% endfor %}"
    )

    def go(folder: Path, start: Any = "new") -> Path:
        values = plain_values(base_dir, folder) | {
            "method": "res-rag",
            "labeler": {"name": "evidence-set", "templates": str(templates)},
            "data": {"gold": {"path": str(questions_path)}},
            "generator": {"name": "fake", "args": {"p_garbage": 0.2}},
            "rollouts": {"group": 2, "max_answer_tokens": 200},
            "train": {"max_steps": 6, "batch_size": 2, "accumulation": 1, "save_every": 3, "max_tokens": 3000},
        }
        train_teacher(read_teacher_spec(values, where="here"), Storage(), start=start)
        return folder / "out"

    return go


@pytest.fixture(scope="module")
def undisturbed(train_choices: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = train_choices(tmp_path_factory.mktemp("undisturbed"))
    return found
