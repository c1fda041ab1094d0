"""RES-RAG learns the smallest sufficient set: a generator answers if and only if one chunk is chosen, and the policy
learns to choose it alone; where chunks cost nothing, it goes on choosing more.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from relabel.distill.teachers.evidence import EvidenceJudge, Generator
from relabel.distill.teachers.spec import GeneratorSpec
from relabel.labelers.engines.fake import FakeArgs
from relabel.manifests.asks import Ask
from relabel.manifests.labels import RewardWeights
from tests.engines.conftest import make_model, make_tokenizer
from tests.labelers.test_evidence_set import query_of
from tests.teachers.grpo_setup import first_ids
from tests.teachers.res_rag_setup import evidence_dialogues, evidence_row, make_held_trainer
from tests.teachers.scripted import ScriptedEngine

WANTED = 2


def short_templates(folder: Path) -> Path:
    """The labeler's prompt in a few words: what is learned here is in the answer."""
    folder.mkdir()
    (folder / "system.j2").write_text("Choose.")
    (folder / "user.j2").write_text(
        "{{ query }}{% for start, stop in documents %}{% for text in chunks[start:stop] %}[{{ loop.index }}]{{ text }}"
        "{% endfor %}{% endfor %}"
    )
    return folder


def say(ask: Ask) -> str:
    return '["yes"]' if f"piece 1.{WANTED}" in ask.messages[1].text else "[]"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that mostly chooses too much, as heuristic sets teach it; and a prompt in a few words."""
    folder = tmp_path_factory.mktemp("warm")
    short_templates(folder / "templates")
    tokenizer = make_tokenizer()
    trainer = trainer_of(make_model("qwen2", len(tokenizer)), folder, folder, eta=0.0, steps=1)
    show_choices(trainer, trainer._rows[0])
    trainer.model.save_pretrained(folder / "model")
    return folder


def trainer_of(
    model: Any, warm: Path, folder: Path, *, eta: float, steps: int, num_rows: int = 1, **options: Any
) -> Any:
    tokenizer = make_tokenizer()
    dialogues = evidence_dialogues(tokenizer, templates=str(warm / "templates"))
    rows = [evidence_row(dialogues, query_of([3]), ["yes"]) for _ in range(num_rows)]
    generator = Generator(
        GeneratorSpec(name="fake", args=FakeArgs()), folder / "kept", start=lambda: ScriptedEngine(say)
    )
    judge = EvidenceJudge(generator, RewardWeights(cost=eta, retrieval=0.0))
    return make_held_trainer(
        model, tokenizer, folder, rows=rows, dialogues=dialogues, judge=judge, group=16, batch=16, accumulation=1,
        steps=steps, rate=3e-3, **options,
    )  # fmt: skip


def trained(warm: Path, folder: Path, **options: Any) -> Any:
    """A trainer at its end, held to where it began by a little of the divergence."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(warm / "model")
    trainer = trainer_of(model, warm, folder, beta=0.05, **options)
    trainer.train()
    return trainer


def answer_ids(trainer: Any, text: str) -> list[int]:
    return [*trainer.processing_class(text)["input_ids"], trainer.processing_class.eos_token_id]


def log_probability(trainer: Any, row: Any, text: str) -> Any:
    """Of an answer, as the tokenizer spells it, under the grammar."""
    import torch

    answer = answer_ids(trainer, text)
    ids = torch.tensor([first_ids(trainer._dialogues, row) + answer])
    trainer._numbers_BC = torch.tensor([trainer._masks.numbers(row.ask, answer)])
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), len(answer))[0]
    return found.sum()


def show_choices(trainer: Any, row: Any) -> None:
    """A warm-up as heuristic sets give it: one to three chunks, mostly too many."""
    import torch

    optimizer = torch.optim.Adam(trainer.model.parameters(), 3e-3)
    choices = ("[2]", "[2, 1]", "[2, 3]", "[2, 1, 3]", "[2, 3, 1]", "[1, 2]", "[1, 3]", "[3, 1]")
    for _ in range(25):
        loss = -sum(log_probability(trainer, row, f'{{"Document_1": {one}}}') for one in choices) / len(choices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def probability(trainer: Any, row: Any, text: str) -> float:
    import torch

    with torch.no_grad():
        return math.exp(float(log_probability(trainer, row, text)))


@pytest.mark.parametrize("num_rows", [1, pytest.param(4, marks=pytest.mark.full)])
def test_the_one_chunk_that_answers_is_chosen_alone(num_rows: int, warm: Path, tmp_path: Path) -> None:
    trainer = trained(warm, tmp_path, eta=2.0, steps=16 * num_rows, num_rows=num_rows)
    assert probability(trainer, trainer._rows[0], f'{{"Document_1": [{WANTED}]}}') > 0.9
    chunks = last_three(trainer, "chunks")
    assert 0.9 < chunks < 1.1
    assert trainer.curve.series("train", "chunks")[0][1] > 1.5


def test_what_costs_nothing_goes_on_being_chosen(warm: Path, tmp_path: Path) -> None:
    trainer = trained(warm, tmp_path, eta=0.0, steps=12)
    assert probability(trainer, trainer._rows[0], f'{{"Document_1": [{WANTED}]}}') < 0.9
    assert last_three(trainer, "usefulness") > 1.8
    assert last_three(trainer, "chunks") > 1.3


def last_three(trainer: Any, name: str) -> float:
    return sum(value for _, value in trainer.curve.series("train", name)[-3:]) / 3
