"""The frozen generator: what it is asked, what is kept of it, and what happens when it fails."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from relabel.distill.teachers import res_rag
from relabel.distill.teachers.res_rag import Evidence, EvidenceJudge, EvidenceRow, Generated, Generator, evidence_of
from relabel.distill.teachers.rollouts import FirstPrompt, Rollout, WrittenTurn
from relabel.distill.teachers.spec import GeneratorSpec
from relabel.labelers.engines.fake import FakeArgs
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.errors import EngineCrashError
from tests.labelers.driving import labeler, replay, reply
from tests.labelers.test_evidence_set import query_of
from tests.teachers.scripted import ScriptedEngine

trl = pytest.importorskip("trl")

from relabel.distill.teachers.grpo_trainer import (
    GrammarHold,
    GrammarMasks,
)
from relabel.distill.teachers.rollout_log import RolloutLog
from relabel.distill.teachers.rollouts import AnswerTokens
from relabel.distill.teachers.spec import ROLLOUTS_NAME, read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.manifests.files import Storage
from tests.engines.conftest import make_model
from tests.killing import killed_at
from tests.teachers.conftest import plain_values
from tests.teachers.res_rag_setup import FakeJudge, evidence_dialogues, evidence_row, make_held_trainer

ROSES = Evidence("who", ("Ada wrote it.",), ('{"page": 1}',))


def generator_of(folder: Path, say: Callable[[Ask], Answer | str]) -> tuple[Generator, ScriptedEngine]:
    engine = ScriptedEngine(say)
    return Generator(GeneratorSpec(name="fake", args=FakeArgs()), folder, start=lambda: engine), engine


def test_equal_questions_are_asked_once_and_greedily(tmp_path: Path) -> None:
    generator, engine = generator_of(tmp_path, lambda _: '["Ada"]')
    other = Evidence("who", ("Bob wrote it.",))
    assert generator.answer([ROSES, other, ROSES]) == [Generated(("Ada",))] * 3
    assert len(engine.asked) == 2
    assert {ask.sampling.temperature for ask in engine.asked} == {0.0}
    data = engine.asked[0].messages[1].parts[1::2]
    assert data == ("who", "Ada wrote it.", '{"page": 1}')  # as data, never as template


def test_a_kept_answer_equals_asking_again(tmp_path: Path) -> None:
    """With the fake engine, whose answers follow from what is asked: in another order, alone, and from the disk."""
    asked = [Evidence(f"question {number}", (f"fact {number}",)) for number in range(40)]
    spec = GeneratorSpec(name="fake", args=FakeArgs(p_garbage=0.3))
    first = Generator(spec, tmp_path / "kept").answer(asked)
    kept = Generator(spec, tmp_path / "kept", start=lambda: pytest.fail("asked again"))
    assert kept.answer(asked) == first
    again = Generator(spec, tmp_path / "again")
    assert [again.answer([one])[0] for one in reversed(asked)] == first[::-1]
    assert {one.fault for one in first} == {"", "format"}


def test_another_generator_has_other_kept_answers(tmp_path: Path) -> None:
    spec = GeneratorSpec(name="fake", args=FakeArgs())
    Generator(spec, tmp_path).answer([ROSES])
    Generator(spec.model_copy(update={"args": FakeArgs(batch=3), "cache": "elsewhere"}), tmp_path).answer([ROSES])
    assert len(list(tmp_path.rglob("*.json"))) == 1  # speed and place do not count
    Generator(spec.model_copy(update={"seed": 5}), tmp_path).answer([ROSES])
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_a_damaged_kept_answer_is_asked_again(tmp_path: Path) -> None:
    generator, engine = generator_of(tmp_path, lambda _: '["Ada"]')
    generator.answer([ROSES])
    (file,) = tmp_path.rglob("*.json")
    for damage in ("", "{", "[]", '{"text": "x"}'):
        file.write_text(damage)
        assert generator.answer([ROSES]) == [Generated(("Ada",))]
    assert len(engine.asked) == 5
    assert json.loads(file.read_text())["text"] == '["Ada"]'


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("[]", Generated(())),
        ('[" ", ""]', Generated(())),
        ('["Ada", 1843]', Generated(("Ada", "1843"))),
        ("Ada", "format"),
        ('```json\n["Ada"]\n```', "format"),
        ('[["Ada"]]', "format"),
        (Answer(0, '["Ada', "length"), "truncated"),
        (Answer(0, "", "overlong"), "overlong"),
        (Answer(0, "", "refused"), "refused"),
        (Answer(0, "", "error", detail="it broke"), "engine"),
    ],
)
def test_what_is_no_array_of_texts_is_no_answer(said: Answer | str, wanted: Generated | str, tmp_path: Path) -> None:
    generator, _ = generator_of(tmp_path, lambda _: said)
    (found,) = generator.answer([ROSES])
    if isinstance(wanted, Generated):
        assert found == wanted
    else:
        assert (found.answers, found.fault) == ((), wanted)


def test_what_the_engine_failed_at_is_not_kept(tmp_path: Path) -> None:
    broken = iter([Answer(0, "", "error"), '["Ada"]'])
    generator, _ = generator_of(tmp_path, lambda _: next(broken))
    assert generator.answer([ROSES])[0].fault == "engine"
    assert generator.answer([ROSES]) == [Generated(("Ada",))]


def test_an_engine_that_goes_down_loses_what_was_open_and_is_started_again(tmp_path: Path) -> None:
    """Once is a failure; time after time ends the training with a word on what to do."""
    starts = []

    def start() -> ScriptedEngine:
        def say(ask: Ask) -> str:
            if "down" in ask.messages[1].text or len(starts) > 2:
                raise EngineCrashError("it is gone")
            return '["Ada"]'

        starts.append(ScriptedEngine(say))
        return starts[-1]

    generator = Generator(GeneratorSpec(name="fake", args=FakeArgs()), tmp_path, start=start)
    others = [Evidence("who", (name,)) for name in ("a", "b", "down", "c")]
    assert [one.fault for one in generator.answer(others)] == ["", "", "engine", "engine"]
    assert starts[0].is_closed
    assert [one.fault for one in generator.answer([others[3], others[0]])] == ["", ""]
    for number in range(2):
        assert generator.answer([Evidence("down", (str(number),))])[0].fault == "engine"
    with pytest.raises(EngineCrashError, match=r"3 times in a row without an answer.*--resume"):
        generator.answer([Evidence("down", ())])


def test_an_engine_that_hangs_has_gone_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(res_rag, "ANSWER_TIMEOUT_S", 0.0)
    generator, engine = generator_of(tmp_path, lambda _: '["Ada"]')
    monkeypatch.setattr(engine, "poll", list)
    assert generator.answer([ROSES])[0].fault == "engine"


def chosen(row: EvidenceRow, text: str) -> Rollout:
    label = replay(labeler("evidence-set"), row.pair, [reply(text)])[0]
    return Rollout(row.pair, [1], [2], [True], [WrittenTurn(row.ask, 0, [2], text)], label)


@pytest.fixture
def row() -> EvidenceRow:
    pairs = query_of([4, 9])
    asker = labeler("evidence-set").label(pairs[0])
    return EvidenceRow(
        pairs[0], {"grade": None}, "here", FirstPrompt(next(asker), [], 0), ((1,), ()), ("Ada Lovelace", "1843")
    )


CHOICE = '{"Document_1": [2, 1, 2], "Document_2": [3, 4, 5, 6]}'


def test_the_generator_is_given_the_chunks_in_the_order_chosen_each_once(row: EvidenceRow) -> None:
    found = evidence_of([[2, 1, 2], [3, 4]], row)
    assert [text.rpartition("\n")[2] for text in found.texts] == [
        f"piece {one}" for one in ("1.2", "1.1", "2.3", "2.4")
    ]
    assert found.query == "pruning roses"


@pytest.mark.parametrize(
    ("said", "reward", "parts"),
    [
        # half of the words wanted, all of those said: F1_ans .5 of three words wanted and one said
        ('["lovelace!"]', 1.3333 - 0.5 * 2 + 0.5, {"usefulness": 1.0, "f1_ans": 0.5, "no_answer_rate": 0.0}),
        ("[]", -1.1667, {"usefulness": -1.0, "f1_ans": 0.0, "no_answer_rate": 1.0}),
        ("no idea", -1.1667, {"usefulness": -1.0, "unreadable_answer_rate": 1.0, "no_answer_rate": 0.0}),
    ],
)
def test_the_golden_rewards(
    said: str, reward: float, parts: dict[str, float], row: EvidenceRow, tmp_path: Path
) -> None:
    judge = EvidenceJudge(generator_of(tmp_path, lambda _: said)[0])
    (score,) = judge.scores([chosen(row, '{"Document_1": [1, 2], "Document_2": [3, 4, 5, 6]}')], [row])
    assert score.reward == pytest.approx(reward, abs=1e-4)
    assert parts.items() <= score.parts.items()
    assert score.parts["penalty"] == 0.5
    assert score.columns["f1_ret"] == pytest.approx(1 / 3)


def test_what_the_generator_failed_at_has_no_reward_and_what_was_cut_off_the_least(
    row: EvidenceRow, tmp_path: Path
) -> None:
    generator, engine = generator_of(tmp_path, lambda _: Answer(0, "", "error"))
    cut = Rollout(row.pair, [1], [2], [True], [], None, fault="truncated")
    lost, none = EvidenceJudge(generator).scores([chosen(row, CHOICE), cut], [row, row])
    assert math.isnan(lost.reward)
    assert lost.parts["generator_failed_rate"] == 1
    assert lost.columns["generator_fault"] == "engine"
    assert none.reward == -3.0
    assert len(engine.asked) == 1


# Answers under a grammar: what is written is admitted, and probabilities are those of what is admitted alone.


# ruff: noqa: E402 — trl may be missing


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return make_model("qwen2", len(tokenizer)).eval()


def compiler_of(tokenizer: Any, model: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=model.config.vocab_size, eos_ids=[tokenizer.eos_token_id])


def reference_log_probs(model: Any, tokenizer: Any, row: EvidenceRow, prompt: list[int], ids: list[int]) -> list[float]:
    """Token by token: a matcher of its own says what may come, and numpy renormalises over that alone."""
    matcher = compiler_of(tokenizer, model).matcher(row.ask.format)
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double().numpy()
    found = []
    for token, logits in zip(ids, logits_TV, strict=True):
        words = np.zeros((1, -(-len(logits) // 32)), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        may = [one for one in range(len(logits)) if words[0, one // 32] >> (one % 32) & 1]
        assert token in may
        found.append(float(logits[token] - np.log(np.exp(logits[may]).sum())))
        if not matcher.is_stopped():
            matcher.consume_token(token)
    return found


def test_all_policies_are_taken_under_the_grammar(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    """Old, new and reference log-probabilities of rollouts of several prompts equal an independent computation."""
    model.save_pretrained(tmp_path / "model")  # the reference is loaded from where the model was
    policy = type(model).from_pretrained(tmp_path / "model")
    trainer = make_held_trainer(policy, tokenizer, tmp_path, updates=2, beta=0.1, at_once=3)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": place} for place in (0, 0, 1, 1)])
    rows = [trainer._rows[place] for place in (0, 0, 1, 1)]
    trainer._numbers_BC = batch["mask_numbers"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    new, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, batch["completion_ids"].shape[1], compute_entropy=True
    )
    assert (entropies >= -1e-6).all()
    for row, rollout, old_C, ref_C, new_C in zip(
        rows, trainer._rollouts, batch["old_per_token_logps"], batch["ref_per_token_logps"], new, strict=True
    ):
        wanted = reference_log_probs(model, tokenizer, row, rollout.prompt_ids, rollout.completion_ids)
        for found in (old_C, ref_C, new_C):
            assert found[: len(wanted)].tolist() == pytest.approx(wanted, abs=2e-5)
        forced = [value for value in wanted if value == 0.0]
        assert len(forced) > len(wanted) / 3  # keys and brackets leave no choice


def test_whatever_is_drawn_under_the_grammar_parses(tokenizer: Any, model: Any) -> None:
    masks = GrammarMasks(compiler_of(tokenizer, model))
    row = evidence_row(evidence_dialogues(tokenizer), query_of([3, 12, 0]))
    end = tokenizer.eos_token_id
    rows = 40
    hold = GrammarHold(masks, [masks.matcher(row.ask) for _ in range(rows)], 1)
    ids = torch.zeros((rows, 1), dtype=torch.long)
    torch.manual_seed(3)
    for _ in range(200):
        scores = hold(ids, torch.randn(rows, model.config.vocab_size))
        ids = torch.cat([ids, scores.softmax(-1).multinomial(1)], dim=1)
    for line in ids[:, 1:].tolist():
        body = line[: line.index(end)]
        held = json.loads(AnswerTokens(tokenizer, end_ids=[end]).text(body))
        assert list(held) == ["Document_1", "Document_2", "Document_3"]
        assert held["Document_3"] == []
        assert all(1 <= number <= 12 for number in held["Document_2"])
        assert len(masks.numbers(row.ask, [*body, end])) == len(body) + 1
    with pytest.raises(ValueError, match="not one that the grammar admits"):
        masks.numbers(row.ask, [end])


# GRPO under a grammar: rollouts that the generator failed at add nothing, and what is killed goes on.


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
    trainer._rollout_log.write(tmp_path, step=1)
    rows = pq.read_table(tmp_path / ROLLOUTS_NAME).to_pylist()
    assert [row["reward"] for row in rows] == [2.0, None, 0.0, 1.0, None, None, None, 1.0]


@pytest.mark.parametrize("is_cache_lost", [pytest.param(False, marks=pytest.mark.full), True])
def test_killed_after_a_step_it_goes_on_to_the_last_bit(
    is_cache_lost: bool, train_choices: Any, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at("after_training_step", 3):
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
            "train": {"max_steps": 4, "batch_size": 2, "accumulation": 1, "save_every": 2, "max_tokens": 3000},
        }
        train_teacher(read_teacher_spec(values, where="here"), Storage(), start=start)
        return folder / "out"

    return go


@pytest.fixture(scope="module")
def undisturbed(train_choices: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = train_choices(tmp_path_factory.mktemp("undisturbed"))
    return found
