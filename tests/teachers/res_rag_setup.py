"""A tiny model that chooses evidence, with a judge or a generator of the test's own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relabel.distill.teachers.grpo_trainer import GrammarMasks, HeldTrainer, grpo_arguments
from relabel.distill.teachers.res_rag import EvidenceRow, chosen_of, row_of
from relabel.distill.teachers.rewards import GoldRow, Score
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues, Rollout
from relabel.distill.teachers.spec import EvidenceRollouts, RolloutTraining
from relabel.distill.training.output import TrainingPlace
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests.labels import Pair
from tests.labelers.driving import labeler
from tests.labelers.test_evidence_set import query_of

MAX_ANSWER = 160


class FakeJudge:
    """Scores choices by a function of the chosen numbers, by document."""

    def __init__(self, worth: Callable[[list[list[int]]], float]) -> None:
        self._worth = worth

    def scores(self, rollouts: Sequence[Rollout], rows: Sequence[GoldRow]) -> list[Score]:
        return [self._score(*one) for one in zip(rollouts, rows, strict=True)]

    def _score(self, rollout: Rollout, row: GoldRow) -> Score:
        assert isinstance(row, EvidenceRow)
        chosen = chosen_of(rollout, row)
        return Score(-3.0 if chosen is None else self._worth(chosen))


def evidence_dialogues(tokenizer: Any, **options: Any) -> Dialogues:
    tokens = AnswerTokens(tokenizer, end_ids=[tokenizer.eos_token_id])
    return Dialogues(labeler("evidence-set", **options), PromptEncoder(tokenizer), tokens, max_prompt_tokens=7000)


def evidence_row(dialogues: Dialogues, pairs: Sequence[Pair], answers: Sequence[str] = ()) -> EvidenceRow:
    """A question to train on, with nothing wanted of any document."""
    query = EvidenceRow(pairs[0], {"grade": None}, "here", sets=tuple(() for _ in pairs), answers=tuple(answers))
    return row_of(query, dialogues.first_prompt(query.pair))


def make_held_trainer(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    rows: Sequence[EvidenceRow] | None = None,
    dialogues: Dialogues | None = None,
    judge: Any = None,
    updates: int = 1,
    beta: float = 0.0,
    group: int = 2,
    rate: float = 1e-2,
    steps: int = 2,
    batch: int = 2,
    accumulation: int = 2,
    top_p: float = 1.0,
    **options: Any,
) -> HeldTrainer:
    dialogues = dialogues or evidence_dialogues(tokenizer)
    if rows is None:
        rows = [evidence_row(dialogues, query_of(counts)) for counts in ([3, 12], [2], [4, 0, 1])]
    settings = RolloutTraining(
        max_steps=steps, batch_size=batch, accumulation=accumulation, learning_rate=rate, schedule="constant", warmup=0,
        seed=3, device="cpu", precision="fp32", save_every=updates, weight_decay=0.0,
    )  # fmt: skip
    rollouts = EvidenceRollouts(group=group, updates=updates, beta=beta, top_p=top_p)
    args = grpo_arguments(settings, rollouts, folder, max_answer_tokens=MAX_ANSWER)
    compiler = GrammarCompiler(tokenizer, vocab_size=model.config.vocab_size, eos_ids=[tokenizer.eos_token_id])
    return HeldTrainer(
        model=model,
        processing_class=tokenizer,
        args=args,
        dialogues=dialogues,
        rows=rows,
        masks=GrammarMasks(compiler),
        scored=(FakeJudge(lambda chosen: float(len(chosen[0]))) if judge is None else judge).scores,
        lowest=-5.0,
        place=TrainingPlace(folder, 2, lambda _: None, [row.name for row in rows]),
        **options,
    )
