"""What the curve says of answers, on answers that a human can count."""

from __future__ import annotations

from typing import Any

import pytest

from relabel.distill.teachers.rewards import GoldRow, answer_figures, grade_score
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues
from relabel.labelers.engines.checkpoints import end_ids
from relabel.labelers.engines.tokens import PromptEncoder
from tests.labelers.driving import ROSES, labeler

INTENT = "<think></think><intent>When to prune.</intent>"


def figures_of(tokenizer: Any, verdicts: list[str], *, near: float = 0.5) -> dict[str, float]:
    """Figures of r3a's answers about one row whose grade is 2."""
    tokens = AnswerTokens(tokenizer, end_ids=end_ids(None, tokenizer))
    dialogues = Dialogues(labeler("r3a"), PromptEncoder(tokenizer), tokens, max_prompt_tokens=8192)
    texts = iter([[INTENT] * len(verdicts), verdicts])

    def write(contexts: Any) -> list[list[int]]:
        return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in next(texts)]

    rollouts = dialogues.roll([ROSES] * len(verdicts), write)
    score = grade_score(near)
    return answer_figures(rollouts, [score(one, GoldRow(ROSES, {"grade": 2})) for one in rollouts])


def test_every_figure_is_over_the_answers_that_it_can_be_given_for(tokenizer: Any) -> None:
    verdict = "<think></think><extract>{}</extract><score>{}</score>"
    found = figures_of(
        tokenizer,
        [
            verdict.format("pruning late", 2),
            verdict.format("none", 1),
            verdict.format("pruning late", 1),
            verdict.format("nowhere to be found", 2),
            "<score>2</score>",
        ],
    )
    assert found["reward"] == pytest.approx((1 + 0.5 + 0.5) / 5)
    assert found["format_rate"] == pytest.approx(3 / 5)
    assert found["evidence_verbatim_rate"] == pytest.approx(2 / 3)
    assert found["no_evidence_rate"] == pytest.approx(1 / 3)
    assert found["top_grade_share"] == pytest.approx(2 / 3)
    assert found["response_tokens"] > 0
