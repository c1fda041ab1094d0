"""The scorer alone: every student, any batch size, too little memory, a stop amid a block."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.distill.students.model import Scorer, StudentModel, load_student
from relabel.manifests.errors import ModelError
from tests.export.conftest import decoder  # noqa: F401

PAIRS = [(f"red shoe {row % 5}", " ".join(["running", "blue", str(row)] * (row % 6))) for row in range(40)]


@pytest.fixture
def student(tiny: Path) -> StudentModel:
    return load_student(tiny)


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


def test_a_decoder_is_scored_like_an_encoder_and_reports_cut_documents(decoder: Path) -> None:  # noqa: F811
    student = load_student(decoder)
    pairs = [("red shoe", "a"), ("red shoe", "long " * 300), ("blue", "fits")]
    scorer = Scorer(student, batch_tokens=400)
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
