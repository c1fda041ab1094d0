"""The scorer alone: every student, any batch size, too little memory, a stop amid a block."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.distill.students.manifest import StudentRecord
from relabel.distill.students.model import Scorer, StudentModel, load_student, write_student
from relabel.manifests.errors import ModelError
from tests.engines.conftest import make_tokenizer

PAIRS = [(f"red shoe {row % 5}", " ".join(["running", "blue", str(row)] * (row % 6))) for row in range(40)]


@pytest.fixture
def student(tiny: Path) -> StudentModel:
    return load_student(tiny)


def decoder(folder: Path, *, packs: bool) -> StudentModel:
    """A tiny random Qwen2 that reads `query / document =>` and says a grade."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from relabel.distill.students.model import grade_token_ids
    from relabel.distill.students.networks import DecoderStudent

    tokenizer = make_tokenizer()
    torch.manual_seed(2)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    lm = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), **shape, max_position_embeddings=128, initializer_range=0.3)
    ).eval()
    grade_ids = grade_token_ids(tokenizer, 3, after=" =>")
    record = StudentRecord(
        1,
        "decoder",
        "tiny",
        {"relevance": 3},
        64,
        {},
        {"relevance": 1.0},
        prompt=("", " / ", " =>"),
        grade_ids=grade_ids,
        packs=packs,
    )
    write_student(folder, record, DecoderStudent(lm, grade_ids), tokenizer)
    return load_student(folder)


def scored(student: StudentModel, batch_tokens: int, pairs: list[tuple[str, str]] = PAIRS) -> dict[str, np.ndarray]:
    scorer = Scorer(student, batch_tokens=batch_tokens)
    found = scorer.score(scorer.encode(pairs))
    assert found is not None
    return found


@pytest.mark.parametrize("batch_tokens", [1, 60, 8192])
def test_a_rows_score_depends_on_no_other_row(student: StudentModel, batch_tokens: int) -> None:
    found = scored(student, batch_tokens)
    alone = [student.probabilities([pair]) for pair in PAIRS]
    for name, values in found.items():
        assert values == pytest.approx(np.concatenate([one[name] for one in alone]), abs=1e-5), name
        assert values.dtype == np.float32


def test_a_cpu_is_asked_small_batches_unless_others_are_named(
    student: StudentModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def forward(**batch: Any) -> Any:
        sizes.append(batch["input_ids"].numel())
        return inner(**batch)

    inner = student.module.forward
    monkeypatch.setattr(student.module, "forward", forward)
    many = PAIRS * (6000 // len(PAIRS))
    ways = {
        1024: [lambda: Scorer(student).score(Scorer(student).encode(many)), lambda: student.probabilities(many)],
        3000: [lambda: scored(student, 3000, many), lambda: student.probabilities(many, batch_tokens=3000)],
    }
    for limit, calls in ways.items():
        for call in calls:
            sizes.clear()
            call()
            assert 0.9 * limit < max(sizes) <= limit


def test_the_same_block_gives_the_same_bits(student: StudentModel) -> None:
    first, second = scored(student, 60), scored(student, 60)
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("packs", [False, True])
def test_a_decoder_is_scored_like_an_encoder_and_reports_cut_documents(tmp_path: Path, packs: bool) -> None:
    student = decoder(tmp_path / "decoder", packs=packs)
    pairs = [("red shoe", "a"), ("red shoe", "long " * 90), ("blue", "fits")]
    scorer = Scorer(student, batch_tokens=200)
    rows = scorer.encode(pairs)
    assert [row.is_cut for row in rows] == [False, True, False]
    found = scorer.score(rows)
    assert found is not None
    alone = np.concatenate([student.probabilities([pair])["relevance"] for pair in pairs])
    assert found["relevance"] == pytest.approx(alone, abs=1e-4)


class Cramped:
    """A module on a device that holds so many rows at once."""

    def __init__(self, module: Any, most: int) -> None:
        self.module, self.most, self.sizes = module, most, []

    def __call__(self, **batch: Any) -> Any:
        import torch

        rows = len(batch["input_ids"])
        if rows > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(rows)
        return self.module(**batch)


def test_a_batch_that_does_not_fit_is_halved_until_it_does_and_it_is_said(
    student: StudentModel, caplog: pytest.LogCaptureFixture
) -> None:
    whole = scored(student, 8192)
    student.module = Cramped(student.module, 12)
    with caplog.at_level(logging.WARNING):
        halved = scored(student, 8192)
    assert all(halved[name] == pytest.approx(whole[name], abs=1e-5) for name in whole)
    assert sum(student.module.sizes) == len(PAIRS)
    assert "a batch of 40 rows does not fit into the device's memory; batches now hold 4096 tokens" in caplog.text


def test_a_pair_that_does_not_fit_alone_is_an_error_that_says_so(student: StudentModel) -> None:
    student.module = Cramped(student.module, 0)
    with pytest.raises(ModelError, match=r"a single pair of .* tokens does not fit"):
        scored(student, 8192)


def test_a_stop_amid_a_block_gives_it_up(student: StudentModel) -> None:
    scorer = Scorer(student, batch_tokens=60)
    reported: list[int] = []

    def on_progress(rows: int) -> bool:
        reported.append(rows)
        return len(reported) < 3

    assert scorer.score(scorer.encode(PAIRS), on_progress) is None
    assert len(reported) == 3
