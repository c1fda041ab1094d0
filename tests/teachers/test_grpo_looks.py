"""Evaluations on held-out rows leave the training as it is, and choose the step that is kept."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("trl")

from relabel.distill.teachers.rollout_log import RolloutLog
from relabel.distill.teachers.spec import ROLLOUTS_NAME, read_teacher_spec
from relabel.distill.teachers.teaching import estimate_teacher, train_teacher
from relabel.distill.training.output import WEIGHTS
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from tests.killing import killed_at
from tests.teachers.conftest import plain_values
from tests.teachers.grpo_setup import GOLD_ROWS, arguments, make_trainer, score_by_tokens
from tests.teachers.grpo_setup import train as run_training

ROWS, HELD_OUT = GOLD_ROWS[:4], GOLD_ROWS[4:]


@pytest.fixture(scope="module")
def train(fresh: Any, tokenizer: Any) -> Any:
    def go(folder: Path, *, eval_every: int | None) -> Any:
        log = RolloutLog(folder)
        trainer = make_trainer(
            copy.deepcopy(fresh),
            tokenizer,
            folder,
            rows=ROWS,
            held_out=HELD_OUT if eval_every is not None else (),
            eval_every=eval_every,
            keep=8,
            log=log,
            args=arguments(folder, updates=1),
        )
        training, _ = run_training(trainer, save_every=2)
        log.write(folder, step=4)
        return training

    return go


@pytest.fixture(scope="module")
def evaluated(train: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("looked") / "whole"
    return folder, train(folder, eval_every=1)


def test_a_training_with_evaluations_samples_and_learns_as_one_without(
    train: Any, evaluated: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, training = evaluated
    blind = train(tmp_path / "blind", eval_every=None)
    assert (folder / ROLLOUTS_NAME).read_bytes() == (tmp_path / "blind" / ROLLOUTS_NAME).read_bytes()
    last = f"checkpoint-000004/{WEIGHTS}"
    assert (folder / last).read_bytes() == (tmp_path / "blind" / last).read_bytes()
    own = [point for point in training.curve.points if point[1] == "train"]
    assert own == blind.curve.points
    assert [step for step, _ in training.curve.series("dev", "reward")] == [1, 2, 3, 4]


SHORT = {"max_steps": 12, "batch_size": 4, "accumulation": 1, "save_every": 4, "max_tokens": 4000, "seed": 7}


@pytest.fixture(scope="module")
def small_spec(
    base_dir: Path, pairs_path: Path, short_templates: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Two prompts of two short answers a step, from pairs with a query of its own each."""
    table = pq.read_table(pairs_path)
    path = tmp_path_factory.mktemp("queries") / "pairs.parquet"
    ids = pa.array([f"q{number}" for number in range(len(table))])
    pq.write_table(table.set_column(table.column_names.index("query_id"), "query_id", ids), path)
    held = {
        "method": "grpo",
        "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 1, "templates": short_templates},
        "data": {"gold": {"path": str(path)}},
        "rollouts": {"group": 2},
        "train": SHORT,
        "split": {"dev": 0.5},
    }
    return lambda folder, **changes: read_teacher_spec(plain_values(base_dir, folder) | held | changes, where="here")


def test_the_best_step_on_held_out_rows_is_written_killed_or_not(
    small_spec: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewards of evaluations are made up; the second is the best, and two without a better one are enough."""

    def made_up(self: Any, step: int) -> dict[str, float]:
        return {"reward": {2: 0.1, 4: 0.9, 6: 0.3, 8: 0.9}[step]}

    monkeypatch.setattr("relabel.distill.teachers.grpo_trainer.RolloutTrainer.dev_figures", made_up)
    monkeypatch.setattr("relabel.distill.teachers.grpo.grade_score", lambda near: score_by_tokens)

    def train(folder: Path, start: Any = "new") -> Any:
        changes = {"train": {**SHORT, "eval_every": 2, "early_stopping": {"patience": 2}}}
        return train_teacher(small_spec(folder, **changes), Storage(), start=start)

    kept: dict[str, bytes] = {}

    def remember(scratch: Path, final: Path) -> None:
        kept[final.name] = (scratch / WEIGHTS).read_bytes()
        scratch.rename(final)

    with monkeypatch.context() as patch:
        patch.setattr("relabel.distill.training.checkpoints.commit", remember)
        report = train(tmp_path / "whole")
    assert (report.manifest.training.steps, report.manifest.training.best_step) == (8, 4)
    assert report.manifest.data.held_out.rows + report.manifest.data.rows == 12
    written = (tmp_path / "whole/out/model.safetensors").read_bytes()
    assert same_weights(written, kept["checkpoint-000004"])
    assert not same_weights(written, kept["checkpoint-000008"])
    assert "Kept: step 4" in (tmp_path / "whole/out/README.md").read_text()

    with killed_at("after_training_step", 6):
        train(tmp_path / "killed")
    again = train(tmp_path / "killed", "resume")
    assert again.manifest.training.best_step == 4
    for name in ("model.safetensors", "curves.parquet", ROLLOUTS_NAME):
        assert (tmp_path / "whole/out" / name).read_bytes() == (tmp_path / "killed/out" / name).read_bytes(), name


@pytest.mark.full
def test_adapters_alone_learn_by_reward_with_the_model_as_it_was_and_are_merged(
    base_dir: Path, small_spec: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file

    pytest.importorskip("peft")
    monkeypatch.setattr("relabel.distill.teachers.grpo.grade_score", lambda near: score_by_tokens)
    changes: dict[str, Any] = {"lora": {"r": 2, "targets": ["q_proj", "v_proj"]}, "split": {}}
    changes["rollouts"] = {"group": 2, "beta": 0.1}
    train_teacher(small_spec(tmp_path, **changes), Storage())
    was, now = (load_file(folder / "model.safetensors") for folder in (base_dir, tmp_path / "out"))
    changed = {name for name, value in now.items() if not torch.equal(value, was[name])}
    assert changed
    assert all("q_proj.weight" in name or "v_proj.weight" in name for name in changed)


def same_weights(one: bytes, other: bytes) -> bool:
    """Whether two files of weights agree in the tensors that both have."""
    import torch
    from safetensors.torch import load

    left, right = load(one), load(other)
    assert left.keys() & right.keys()
    return all(torch.equal(left[name], right[name]) for name in left.keys() & right.keys())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": {}, "train": {**SHORT, "eval_every": 2}}, "`split.dev` is 0"),
        ({"rollouts": {"group": 2, "updates": 4}, "train": {**SHORT, "eval_every": 2}}, "no multiple of rollouts"),
        ({"split": {"dev": 1e-9}}, "none fell there"),
    ],
)
def test_evaluations_that_can_not_be_are_refused_before_anything_is_loaded(
    changes: dict[str, Any], words: str, small_spec: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, InputError), match=words):
        estimate_teacher(small_spec(tmp_path, **changes), Storage())
