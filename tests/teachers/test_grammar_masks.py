"""Answers under a grammar: what is written is admitted, and probabilities are those of what is admitted alone."""

# ruff: noqa: E402 — trl may be missing
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

trl = pytest.importorskip("trl")

from relabel.distill.teachers.evidence import EvidenceRow
from relabel.distill.teachers.res_rag_trainer import (
    GrammarHold,
    GrammarMasks,
)
from relabel.distill.teachers.rollouts import AnswerTokens
from relabel.labelers.engines.grammars import GrammarCompiler
from tests.engines.conftest import make_model
from tests.labelers.test_evidence_set import query_of
from tests.teachers.res_rag_setup import evidence_dialogues, evidence_row, make_held_trainer


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return make_model("qwen2", len(tokenizer)).eval()


def compiler_of(tokenizer: Any, model: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=model.config.vocab_size, eos_ids=[tokenizer.eos_token_id])


def reference_log_probs(model: Any, tokenizer: Any, row: EvidenceRow, prompt: list[int], ids: list[int]) -> list[float]:
    """Token by token: a matcher of its own says what may come, and numpy renormalises over that alone."""
    assert row.ask.format is not None
    matcher = compiler_of(tokenizer, model).matcher(row.ask.format)
    found = []
    for place, token in enumerate(ids):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids[:place]])).logits[0, -1].double().numpy()
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
        assert rollout.label is not None
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
    hold = GrammarHold(masks, [masks.matcher(row.ask) for _ in range(rows)], [end], 1)
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
