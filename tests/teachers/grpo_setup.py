"""A tiny model in GRPO, ours or TRL's own, on the same prompts with the same arguments."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relabel.distill.teachers.grpo_trainer import CreditTrainer, RolloutTrainer, grpo_arguments
from relabel.distill.teachers.rewards import GoldRow, Score, each
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues, Rollout
from relabel.distill.teachers.spec import RolloutSection, RolloutTraining
from relabel.distill.training.loop import Training
from relabel.distill.training.output import TrainingPlace
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests.labels import Pair
from tests.labelers.driving import caps, labeler

GOLD_ROWS = [
    GoldRow(Pair(number, f"q{number}", f"query {number}", f"d{number}", "red shoes " * (number % 3 + 1)), {"grade": 2})
    for number in range(6)
]


def first_ids(dialogues: Dialogues, row: GoldRow) -> list[int]:
    """The tokens of a row's first prompt."""
    first = dialogues.first_prompt(row.pair)
    return first.ids


def score_by_tokens(rollout: Rollout, row: GoldRow) -> Score:
    """A reward that any answer has, of a random model too: the share of even token ids."""
    ids = rollout.completion_ids
    return Score(sum(one % 2 == 0 for one in ids) / len(ids))


def short_dialogues(tokenizer: Any, name: str = "r1", **options: Any) -> Dialogues:
    options = caps(name, think=8) | options
    tokens = AnswerTokens(tokenizer, end_ids=[tokenizer.eos_token_id])
    return Dialogues(labeler(name, **options), PromptEncoder(tokenizer), tokens, max_prompt_tokens=4096)


def settings_of(*, steps: int = 4, save_every: int = 4) -> RolloutTraining:
    """Two prompts of four rollouts a step, in two batches."""
    return RolloutTraining(
        max_steps=steps, batch_size=4, accumulation=2, learning_rate=1e-2, schedule="constant", warmup=0,
        seed=3, device="cpu", precision="fp32", save_every=save_every,
    )  # fmt: skip


def arguments(folder: Path, *, updates: int = 2, **changes: Any) -> Any:
    rollouts = RolloutSection(group=4, updates=updates)
    return grpo_arguments(settings_of(), rollouts, folder, max_answer_tokens=12, **changes)


def make_trainer(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    rows: Sequence[GoldRow] = GOLD_ROWS,
    dialogues: Dialogues | None = None,
    score_of: Callable[[Rollout, GoldRow], Score] = score_by_tokens,
    args: Any = None,
    **options: Any,
) -> RolloutTrainer:
    trainer_class = CreditTrainer if "credit" in options else RolloutTrainer
    return trainer_class(
        model=model,
        processing_class=tokenizer,
        args=arguments(folder) if args is None else args,
        dialogues=short_dialogues(tokenizer) if dialogues is None else dialogues,
        rows=rows,
        scored=each(score_of),
        place=TrainingPlace(folder, options.pop("keep", 2), lambda _: None, [row.name for row in rows]),
        **options,
    )


def train(trainer: Any, *, resume_from: Path | None = None, **changes: Any) -> tuple[Training, Any]:
    """The training of a trainer, and how it ended."""
    training = Training(trainer, settings_of(**changes))
    return training, training.run(resume_from=resume_from)
