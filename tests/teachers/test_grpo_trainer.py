"""The contract with TRL's private hooks: the trainer is plain GRPO where it should be, bit for bit."""

# ruff: noqa: E402 — trl may be missing
from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

trl = pytest.importorskip("trl")

from datasets import Dataset
from trl.trainer.utils import nanstd

from relabel.distill.teachers.credit import EDGES, Credit
from relabel.distill.teachers.grpo_trainer import (
    grpo_arguments,
    vllm_arguments,
)
from relabel.distill.teachers.rewards import GoldRow, Score
from relabel.distill.teachers.rollout_log import RolloutLog
from relabel.distill.teachers.rollouts import Rollout
from relabel.distill.teachers.spec import (
    EDGES_NAME,
    ROLLOUTS_NAME,
    CreditSection,
    RolloutSection,
    RolloutTraining,
    VllmSection,
    read_teacher_spec,
)
from relabel.distill.teachers.teaching import train_teacher
from relabel.distill.training.loop import Training
from relabel.manifests.files import Storage
from tests.killing import killed_at
from tests.labelers.driving import caps
from tests.teachers.conftest import plain_values, relabel
from tests.teachers.grpo_setup import (
    GOLD_ROWS,
    arguments,
    first_ids,
    make_trainer,
    score_by_tokens,
    settings_of,
    short_dialogues,
    train,
)

TEACHERS = Path(__file__).parent.parent.parent / "docs" / "teachers"


Written = list[tuple[list[list[int]], list[list[int]]]]
"""Prompts and the answers to them, call by call."""


class PlainGrpo(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's own trainer; all that is given to it is the prompts' token ids, and the answers that ours drew."""

    written: Written

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        prompts, answers = self.written.pop(0)
        assert prompts == prompt_ids
        return answers, None

    def _tokenize_prompts(self, prompts: list[int]) -> tuple[list[list[int]], None, dict[str, Any]]:
        dialogues = short_dialogues(self.processing_class)
        return [first_ids(dialogues, GOLD_ROWS[place]) for place in prompts], None, {}


def even_share(ids: list[int]) -> float:
    return sum(one % 2 == 0 for one in ids) / len(ids)


def even_shares(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [even_share(ids) for ids in completion_ids]


def train_plain(model: Any, tokenizer: Any, folder: Path, reward: Any, written: Written) -> Any:
    rows = Dataset.from_dict({"prompt": list(range(len(GOLD_ROWS)))})
    own_loop = {"max_steps": 4, "lr_scheduler_type": "constant", "save_strategy": "no", "logging_strategy": "no"}
    args = arguments(folder, **own_loop)
    trainer = PlainGrpo(model=model, reward_funcs=[reward], args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.written = written
    trainer.train()
    return trainer.model


def train_ours(model: Any, tokenizer: Any, folder: Path, written: Written | None = None, **options: Any) -> Any:
    trainer = make_trainer(model, tokenizer, folder, **options)
    write = trainer._generate_single_turn

    def noting(prompts: Any, *others: Any) -> Any:
        answers, logprobs = write(prompts, *others)
        if written is not None:
            written.append(([list(prompt) for prompt in prompts], answers))
        return answers, logprobs

    trainer._generate_single_turn = noting
    train(trainer)
    return trainer.model


def trls_advantages(rewards_NG: torch.Tensor) -> torch.Tensor:
    """With the sample's deviation, as TRL's trainer has them."""
    mean_N1, deviation_N1 = (of(rewards_NG, dim=1).unsqueeze(1) for of in (torch.nanmean, nanstd))
    return (rewards_NG - mean_N1) / (deviation_N1 + 1e-4)


def furthest(one: Any, other: Any) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((left - right).detach().abs().max()) for left, right in pairs)


def test_with_trls_advantages_it_is_trls_grpo_bit_for_bit(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    written: Written = []
    ours = train_ours(copy.deepcopy(fresh), tokenizer, tmp_path, written, advantages=trls_advantages)
    plain = train_plain(copy.deepcopy(fresh), tokenizer, tmp_path, even_shares, written)
    assert not written
    assert furthest(plain, ours) == 0
    assert furthest(plain, fresh) > 1e-3


def test_a_graph_cut_to_its_grade_is_grpo_bit_for_bit(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    def by_node(rollout: Rollout, row: GoldRow) -> Score:
        reward = score_by_tokens(rollout, row).reward
        return Score(reward, (reward, 0.0, 0.0))

    graph = Credit(CreditSection(learn=False, epsilon=0.0))
    plain = train_ours(copy.deepcopy(fresh), tokenizer, tmp_path)
    # a random model's answers are unreadable, so that every token of every rollout is the grade's
    cut = train_ours(copy.deepcopy(fresh), tokenizer, tmp_path, score_of=by_node, credit=graph)
    assert furthest(plain, cut) == 0


def test_a_training_reports_to_no_service(
    fresh: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's trainers send a ping to the Hub when they are made, but for CI."""
    sent: list[Any] = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *found, **_: sent.append(found))
    monkeypatch.delenv("CI", raising=False)
    make_trainer(copy.deepcopy(fresh), tokenizer, tmp_path)
    assert sent == []


def graph_options(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Options that let a random model's rollouts have nodes and node rewards."""
    from relabel.distill.teachers import grpo_trainer

    monkeypatch.setattr(
        grpo_trainer,
        "segments_of",
        lambda rollout, *_, **__: [one % 8 - 1 for one in range(len(rollout.completion_ids))],
    )

    def by_tokens(rollout: Rollout, row: GoldRow) -> Score:
        ids = rollout.completion_ids
        r, s, a = (1.0 if sum(ids) % prime else -1.0 for prime in (2, 3, 5))
        return Score(r, (r, s, a))

    plan = Credit(CreditSection(learning_rate=1e-2))
    return {"score_of": by_tokens, "credit": plan, "log": RolloutLog(folder)}


def test_coefficients_learn_from_the_second_update_on(
    fresh: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = graph_options(monkeypatch, tmp_path)
    training, _ = train(make_trainer(copy.deepcopy(fresh), tokenizer, tmp_path, **options))
    logits = options["credit"].logits
    assert logits.grad is None
    assert logits.detach().abs().max() > 1e-3
    options["log"].write(tmp_path, step=4)
    edges = pq.read_table(tmp_path / EDGES_NAME).to_pylist()
    assert len(edges) == 4 * len(EDGES)
    first = [row["logit"] for row in edges if row["step"] == 1]
    assert first == [0.0] * len(EDGES), "at ρ = 1 the gradient is rounding, of which Adam makes whole steps"
    assert [row["logit"] for row in edges[-len(EDGES) :]] == pytest.approx(logits.tolist())
    alpha = {row["edge"]: row["coefficient"] for row in edges if row["step"] == 4}
    assert alpha["r>s"] + alpha["r>a"] == pytest.approx(2)
    rollouts = pq.read_table(tmp_path / ROLLOUTS_NAME).to_pylist()
    assert len(rollouts) == 2 * 8  # two generations, each for two updates
    assert {len(row["node_advantages"]) for row in rollouts} == {7}
    for name in ("ratio_q_s", "alpha_r>s", "entropy", "clip_share", "loss"):
        assert dict(training.curve.series("train", name)).keys() == {1, 2, 3, 4}, name
    assert training.curve.series("train", "alpha_r>s")[-1] == (4, alpha["r>s"])
    assert dict(training.curve.series("train", "node_reward_q_s")).keys() == {1, 3}  # where answers were sampled
    assert training.curve.series("train", "reward") == training.curve.series("train", "node_reward_r")


def test_coefficients_are_pulled_back_by_a_rate_and_a_norm_of_their_own(
    fresh: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rollouts earn alike, nothing is left but λ‖w - w₀‖²: its slope at w = 1 is 2λ on each of ten edges."""
    plan = Credit(CreditSection(learning_rate=0.1, decay=0.25, max_grad_norm=1.0))
    torch.nn.init.ones_(plan.logits)
    options = graph_options(monkeypatch, tmp_path) | {
        "credit": plan,
        "score_of": lambda rollout, row: Score(1.0, (1.0, 1.0, 1.0)),
        "args": arguments(tmp_path, optim="sgd"),
    }
    train(make_trainer(copy.deepcopy(fresh), tokenizer, tmp_path, **options), steps=1)
    assert plan.logits.tolist() == pytest.approx([1 - 0.1 / math.sqrt(10)] * len(EDGES), abs=1e-6)


def test_no_rollouts_are_paid_for_at_a_rate_of_0(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A warm-up over two steps: the first one moves the weights."""
    settings = settings_of(steps=3).model_copy(update={"warmup": 0.5})
    trainer = make_trainer(copy.deepcopy(fresh), tokenizer, tmp_path, args=arguments(tmp_path, updates=1))
    training = Training(trainer, settings)
    training.run()
    rates = [value for _, value in training.curve.series("train", "learning_rate")]
    assert rates == pytest.approx([0.005, 0.01, 0.01])


def test_trl_gets_what_the_spec_says(tmp_path: Path) -> None:
    settings = RolloutTraining(batch_size=4, accumulation=3, learning_rate=0.25, device="cpu")
    rollouts = RolloutSection(group=6, updates=5, clip=0.1, beta=0.3, temperature=0.7, top_p=0.9)
    made = grpo_arguments(settings, rollouts, tmp_path, max_answer_tokens=9)
    wanted = {
        "num_generations": 6, "num_iterations": 5, "steps_per_generation": 3, "epsilon": 0.1, "epsilon_high": None,
        "beta": 0.3, "temperature": 0.7, "top_p": 0.9, "max_completion_length": 9, "learning_rate": 0.25,
        "loss_type": "grpo", "use_bias_correction_kl": False, "disable_dropout": True,
        "importance_sampling_level": "token", "mask_truncated_completions": False,
    }  # fmt: skip
    assert {name: getattr(made, name) for name in wanted} == wanted


def test_the_divergence_is_in_the_curve(fresh: Any, tokenizer: Any, tmp_path: Path) -> None:
    fresh.save_pretrained(tmp_path / "model")  # the reference is loaded from where the model was
    policy = type(fresh).from_pretrained(tmp_path / "model")
    args = arguments(tmp_path, updates=1, beta=0.1)
    training, _ = train(make_trainer(policy, tokenizer, tmp_path, args=args), steps=2)
    values = dict(training.curve.series("train", "kl"))
    assert values[1] == pytest.approx(0, abs=1e-6)
    assert values[2] > 1e-6


def test_the_templates_tokens_between_two_turns_are_not_learned(
    fresh: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialogues = short_dialogues(tokenizer, "r3a")
    trainer = make_trainer(copy.deepcopy(fresh), tokenizer, tmp_path, dialogues=dialogues)
    texts = iter(["<think></think><intent>x</intent>", "<think></think><extract>none</extract><score>2</score>"])

    def write(contexts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        ids = [*tokenizer(next(texts))["input_ids"], tokenizer.eos_token_id]
        return [list(ids) for _ in contexts], None

    monkeypatch.setattr(trainer, "_generate_single_turn", write)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": 0}] * 4)
    rollouts = trainer._rollouts
    assert [len(one.turns) for one in rollouts] == [2] * 4
    assert batch["tool_mask"].sum(1).tolist() == [one.num_own for one in rollouts]
    learned = tokenizer.decode(batch["completion_ids"][0][batch["tool_mask"][0].bool()])
    assert learned == "".join(turn.text + "<|im_end|>" for turn in rollouts[0].turns)


@pytest.mark.parametrize("name", ["r1-grpo", "r3a-grpo", "graph-grpo-3-rl"])
def test_every_spec_of_the_docs_trains_and_its_teacher_labels(
    name: str, base_dir: Path, pairs_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_schema: Any
) -> None:
    """With a tiny model, short answers and few rollouts; all other keys as they are."""
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    held = yaml.safe_load((TEACHERS / f"{name}.yaml").read_text())
    check_schema(held)
    held |= {"init": str(base_dir), "output": str(tmp_path / "out")}
    held["labeler"] |= caps(held["labeler"]["name"], think=4, text=4)
    held["data"]["gold"]["path"] = str(pairs_path)
    held["rollouts"] = {**held.get("rollouts", {}), "group": 2}
    held["train"] |= {"max_steps": 2, "batch_size": 2, "accumulation": 1, "max_tokens": 8000}
    held["train"]["save_every"] = 2
    held["split"] = {"dev": 0.5}
    report = train_teacher(read_teacher_spec(held, where=name), Storage())
    assert (report.manifest.training.steps, report.manifest.training.best_step) == (2, 2)
    out = tmp_path / "out"
    rollouts = pq.read_table(out / ROLLOUTS_NAME).to_pylist()
    assert len(rollouts) == (2 if held["method"] == "graph-grpo" else 4)  # two updates on the same rollouts, or one
    assert (out / EDGES_NAME).exists() == (held["method"] == "graph-grpo")
    assert ROLLOUTS_NAME in (report.manifest.files or {})
    data = report.manifest.data
    assert (data.examples, data.answer_tokens) == (len(rollouts), sum(row["tokens"] for row in rollouts))
    job = {
        "name": "job",
        "input": {"path": str(pairs_path), "limit": 2},
        "labeler": {key: value for key, value in held["labeler"].items() if key != "templates"},
        "engine": {"name": "transformers", "model": str(out)},
        "output": str(tmp_path / "labels"),
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert relabel("run", str(tmp_path / "job.yaml")) in (0, 30)  # a random model's quotations are not verbatim


GRAPH_TRAINING = {"max_steps": 8, "batch_size": 4, "accumulation": 1, "save_every": 4, "max_tokens": 4000, "seed": 7}
"""Six rows, two prompts a step, each two updates: three steps are an epoch's half, and the seventh is in the second."""


@pytest.fixture(scope="module")
def six_pairs(pairs_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("six") / "pairs.parquet"
    pq.write_table(pq.read_table(pairs_path).slice(0, 6), path)
    return path


@pytest.fixture(scope="module")
def train_graph(base_dir: Path, six_pairs: Path, short_templates: str) -> Any:
    def go(folder: Path, start: Any = "new") -> Path:
        values = plain_values(base_dir, folder) | {
            "method": "graph-grpo",
            "labeler": {"name": "graph-grpo", "max_text_tokens": 1, "templates": short_templates},
            "data": {"gold": {"path": str(six_pairs)}},
            "rollouts": {"group": 2, "beta": 0.0},
            "train": GRAPH_TRAINING,
        }
        train_teacher(read_teacher_spec(values, where="here"), Storage(), start=start)
        return folder / "out"

    return go


@pytest.fixture(scope="module")
def undisturbed(train_graph: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nothing stopped leaves."""
    found: Path = train_graph(tmp_path_factory.mktemp("undisturbed"))
    return found


def left_alike(one: Path, other: Path) -> bool:
    names = ("model.safetensors", ROLLOUTS_NAME, EDGES_NAME, "curves.parquet")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("after_training_step", 7),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in (("before_checkpoint", 2), ("after_checkpoint", 1), ("before_model", 1))
        ),
    ],
)
def test_killed_anywhere_it_goes_on_to_the_last_bit(
    place: str, count: int, train_graph: Any, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at(place, count):
        train_graph(tmp_path)
    assert left_alike(train_graph(tmp_path, "resume"), undisturbed)


def test_a_signal_waits_for_the_last_update_on_the_same_rollouts(
    train_graph: Any, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = []
    monkeypatch.setattr("relabel.manifests.failpoints.hit", hits.append)
    wished = "relabel.distill.training.loop.is_stop_wished"
    with monkeypatch.context() as patch:
        patch.setattr(wished, lambda: hits.count("after_training_step") >= 5)
        with pytest.raises(KeyboardInterrupt):
            train_graph(tmp_path)
    assert hits.count("after_training_step") == 6
    assert left_alike(train_graph(tmp_path, "resume"), undisturbed)


class WritingModel:
    """Replaces TRL's VLLMGeneration, which takes a GPU: the trained model writes, and gives each token's probability
    a little off, as another implementation of the same model does.
    """

    made: WritingModel

    def __init__(self, model: Any, processing_class: Any, temperature: float, max_completion_length: int, **_: Any):
        self.model, self.tokenizer, self.temperature = model, processing_class, temperature
        self.limit, self.num_syncs = max_completion_length, 0
        WritingModel.made = self

    def sync_weights(self) -> None:
        self.num_syncs += 1

    def generate(self, prompts: list[list[int]], **_: Any) -> Any:
        found = [self._one(prompt) for prompt in prompts]
        return prompts, [ids for ids, _ in found], [[[value] for value in values] for _, values in found], None

    def _one(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        logprobs = []
        with torch.no_grad():
            while len(ids) < self.limit and (not ids or ids[-1] != self.tokenizer.eos_token_id):
                logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].float()
                own = logits.log_softmax(0)
                one = int(own.argmax()) if not self.temperature else int(torch.multinomial(own.exp(), 1))
                ids.append(one)
                logprobs.append(float(own[one]) + 1e-3)
        return ids, logprobs


def test_answers_by_vllm_are_weighed_by_the_probability_they_were_sampled_with(
    fresh: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", WritingModel)
    options = vllm_arguments(VllmSection(), max_tokens=400)
    trainer = make_trainer(copy.deepcopy(fresh), tokenizer, tmp_path, args=arguments(tmp_path, updates=1, **options))
    ratios = []
    loss_of = trainer._compute_loss

    def spied(model: Any, inputs: dict[str, Any]) -> Any:
        ratios.append(inputs["importance_sampling_ratio"])
        by_token = inputs["importance_sampling_ratio"][inputs["completion_mask"].bool()]
        torch.testing.assert_close(by_token, torch.full_like(by_token, math.exp(-1e-3)), rtol=1e-4, atol=0)
        return loss_of(model, inputs)

    monkeypatch.setattr(trainer, "_compute_loss", spied)
    train(trainer, steps=2)
    assert len(ratios) == 4
    assert WritingModel.made.num_syncs == 2, "new weights for each step's rollouts"
    assert any(not torch.equal(a, b) for a, b in zip(trainer.model.parameters(), fresh.parameters(), strict=True))
