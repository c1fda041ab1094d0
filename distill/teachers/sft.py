"""`method: sft`: a teacher learns to write answers, given the labeler's own prompts.

The loss is a token's cross-entropy, over the answers' tokens that no mask leaves out, divided by their number in the
optimizer step: −[log p(preliminary) + Σ_t m_t log p(c_t) + log p(final)] with m_t ~ Bernoulli(1 − ρ).

Source: Graph-GRPO, equation 1 (random masking of the chain of thought).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from relabel.distill.teachers.answered_rows import AnsweredRows, load_answered_rows
from relabel.distill.teachers.attempts import train_to_end
from relabel.distill.teachers.bases import TeacherBase, load_model
from relabel.distill.teachers.chosen_sets import load_sets
from relabel.distill.teachers.sft_examples import make_examples
from relabel.distill.teachers.sft_spec import SftSpec
from relabel.distill.teachers.sft_trainer import MaskedCollator, MaskedTrainer
from relabel.distill.teachers.teacher_manifest import TeacherData
from relabel.distill.teachers.trainers import Trained, TrainingEstimate
from relabel.distill.teachers.turns import check_learnable
from relabel.distill.training.arguments import training_arguments
from relabel.distill.training.batches import BatchPlan, TokenRows
from relabel.distill.training.training_place import TrainingPlace
from relabel.manifests.errors import InputError
from relabel.manifests.storage.context import Storage


class SftTrainer:
    """A `TeacherTrainer`: supervised fine-tuning on answers.

    Raises:
        ConfigError: the labeler's answers can't be made anew.
        InputError: a source is off, or no row gives an example.
        ManifestError: a run does not prove itself.
    """

    def __init__(self, spec: SftSpec, base: TeacherBase, storage: Storage) -> None:
        self._spec, self._base = spec, base
        answered = _answered(spec, storage)
        is_preliminary = spec.data.answer == "preliminary"
        if not all(row.sets is not None for row in answered.rows):
            check_learnable(
                answered.options,
                answered.labeler,
                has_answers=bool(spec.data.runs),
                is_preliminary=is_preliminary,
            )
        found = make_examples(answered, base, max_tokens=spec.train.max_tokens, is_preliminary=is_preliminary)
        dropped = dict(sorted((answered.dropped + found.dropped).items()))
        if not found.examples:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            raise InputError(f"no row gives an example to learn from: {listed}.")
        self._examples = found
        self._names = [answered.names[example.row] for example in found.examples]
        self.labeler = answered.options.model_dump(mode="json")
        self.templates = answered.labeler.template_digests
        self.notes = list(answered.notes)
        if found.dropped:
            self.notes.append(
                "rows left out: " + ", ".join(f"{count:,} {reason}" for reason, count in found.dropped.items())
            )
        self.data = TeacherData(
            runs=answered.runs,
            gold=answered.gold,
            rows=found.rows,
            dropped=dropped,
            examples=len(found.examples),
            tokens=sum(len(example.ids) for example in found.examples),
            answer_tokens=sum(example.num_answer for example in found.examples),
        )

    @property
    def digest(self) -> str:
        """Of all token ids and of what is masked."""
        return self._examples.digest

    def estimate(self) -> TrainingEstimate:
        """What training would do."""
        train, data = self._spec.train, self.data
        per_step = train.batch_size * train.accumulation
        per_pass = math.ceil(data.examples / per_step)
        steps = train.max_steps or max(1, math.ceil(train.epochs * per_pass))
        whole, rest = divmod(steps, per_pass)  # the last step of a pass may have fewer
        passes = whole + min(1.0, rest * per_step / data.examples)
        return TrainingEstimate(
            rows=data.rows,
            examples=data.examples,
            steps=steps,
            tokens=round(passes * data.tokens),
            answer_tokens=round(passes * data.answer_tokens),
        )

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, going on from the last whole checkpoint; with half the batch if memory ends."""
        return train_to_end(
            self._spec,
            checkpoints,
            say,
            lambda halvings: self._trainer(checkpoints, say, halvings),
            examples="examples",
        )

    def _trainer(self, folder: Path, say: Callable[[str], None], halvings: int) -> MaskedTrainer:
        settings, examples = self._spec.train, self._examples
        arguments = training_arguments(settings, folder, halvings=halvings)  # seeds all generators
        arguments.distributed_state.wait_for_everyone()  # the first process has claimed the output
        plan = BatchPlan(
            [len(example.ids) for example in examples.examples],
            np.arange(len(examples.examples)),
            seed=settings.seed,
            batch_size=arguments.per_device_train_batch_size,
            groups=settings.group_by_length,
            num_shards=arguments.world_size,
        )
        collator = MaskedCollator(
            examples.examples, mask=settings.mask, seed=settings.seed, pad_id=self._base.tokenizer.pad_token_id
        )
        return MaskedTrainer(
            place=TrainingPlace(
                folder, settings.keep_checkpoints, say, self._names, settings.report_to, self._spec.name
            ),
            plan=plan,
            model=load_model(self._spec, self._base),
            args=arguments,
            train_dataset=TokenRows(len(examples.examples)),
            data_collator=collator,
        )


def _answered(spec: SftSpec, storage: Storage) -> AnsweredRows:
    gold = spec.data.gold
    if gold is None or gold.sets is None:
        return load_answered_rows(spec, spec.data, storage)
    assert spec.labeler is not None
    return load_sets(spec.labeler, gold, storage)
