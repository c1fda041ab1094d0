"""`method: grpo` and `method: graph-grpo`: a teacher learns from what its own answers earn.

Each prompt is answered several times; each answer's reward is standardised among those (`advantages.py`), and its
tokens are made more or less probable by it: mean_i (1/|τ_i|) Σ_t min(ρA, clip(ρ, 1 ± ε)A) - β·KL over the tokens that
the model wrote. Graph-GRPO gives each part of the answer an advantage of its own (`grpo_credit.py`).

Sources: R3A, equations 1 and 2; Graph-GRPO, equations 5 to 15. Read on: `rollouts.py`, `grpo_trainer.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.teachers.answer_tokens import AnswerTokens
from distill.teachers.bases import TeacherBase, load_model, memory_bytes, merged
from distill.teachers.gold_rows import load_gold_rows
from distill.teachers.grpo_credit import Credit, CreditPlan
from distill.teachers.grpo_spec import GraphGrpoSpec, GrpoSpec
from distill.teachers.rewards import NodeWorth
from distill.teachers.rollout_log import RolloutLog
from distill.teachers.rollouts import Dialogues
from distill.teachers.scores import grade_score, graph_score
from distill.teachers.teacher_manifest import TeacherData
from distill.teachers.trainers import Trained, TrainingEstimate
from distill.training import checkpoints, sharding
from distill.training.checkpointed import Outcome, TrainingPlace, run_to_end
from distill.training.memory import halving
from labelers.engines.checkpoints import end_ids
from labelers.registry import labeler_class
from manifests.digests import digest_of
from manifests.errors import ConfigError, InputError, TrainingError
from manifests.extras import require
from manifests.storage.context import Storage


class GrpoTeacher:
    """A `TeacherTrainer`: group relative policy optimisation.

    Raises:
        ConfigError: the labeler has its teacher write nothing, or answers leave no room for a prompt.
        InputError: gold is off, or holds fewer prompts than a step takes.
    """

    def __init__(self, spec: GrpoSpec, base: TeacherBase, storage: Storage) -> None:
        require("trl", extra="train", purpose=f"method {spec.method}")
        self._spec, self._base = spec, base
        options = spec.labeler
        labeler = labeler_class(options.name)(options)
        tokens = AnswerTokens(base.tokenizer, end_ids=_end_ids(base))
        self._dialogues = Dialogues(labeler, base.encoder, tokens, max_prompt_tokens=spec.train.max_tokens)
        self._max_answer = self._dialogues.max_answer_tokens
        room = spec.train.max_tokens - self._max_answer
        if room <= 0:
            raise ConfigError(
                f"train.max_tokens is {spec.train.max_tokens}, and an answer may take {self._max_answer} tokens: no "
                "room for a prompt. Raise it, or lower labeler.max_think_tokens."
            )
        self._dialogues = Dialogues(labeler, base.encoder, tokens, max_prompt_tokens=room)
        self._gold = load_gold_rows(
            spec.data.gold, labeler, options.name, self._dialogues, storage, grades=options.grades
        )
        rows = self._gold.rows
        if len(rows) < spec.prompts_per_step:
            raise InputError(
                f"{spec.data.gold.path}: {len(rows)} rows to learn from, and a step takes {spec.prompts_per_step}. "
                "Lower train.accumulation."
            )
        self.labeler = options.model_dump(mode="json")
        self.templates = labeler.template_digests
        self.notes = self._remarks()
        self.data = TeacherData(
            runs=[],
            gold=self._gold.about,
            rows=len(rows),
            dropped=dict(sorted((+self._gold.dropped).items())),
            examples=len(rows) * spec.rollouts.group,
            tokens=self._gold.prompt_tokens * spec.rollouts.group,
            answer_tokens=0,
        )

    def _remarks(self) -> list[str]:
        if isinstance(self._spec, GraphGrpoSpec) and not self._gold.has_node_gold:
            return [
                "gold says nothing of subject and attribute: every node takes the grade's advantage, so this is plain "
                "GRPO but for the tokens' weights. Name data.gold.subject and data.gold.attribute."
            ]
        return []

    @property
    def digest(self) -> str:
        """Of prompts, grades and the labeler."""
        gold = [row.gold for row in self._gold.rows]
        return digest_of([self._gold.prompts, gold, self.labeler, self.templates])

    def estimate(self) -> TrainingEstimate:
        """What training would do, each answer as long as it may be."""
        train, rollouts = self._spec.train, self._spec.rollouts
        batches = len(self._gold.rows) // self._spec.prompts_per_step
        steps = train.max_steps or max(1, math.ceil(train.epochs * batches * rollouts.updates))
        examples = math.ceil(steps / rollouts.updates) * train.batch_size * train.accumulation
        prompt = self._gold.prompt_tokens / len(self._gold.rows)
        return TrainingEstimate(
            rows=len(self._gold.rows),
            examples=examples,
            steps=steps,
            tokens=round(examples * (prompt + self._max_answer)),
            answer_tokens=examples * self._max_answer,
            memory_bytes=memory_bytes(self._spec, self._base, self._max_answer)
            + (4 * (self._base.num_weights or 0) if rollouts.beta and self._spec.lora is None else 0),
        )

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, going on from the last whole checkpoint; with half the batch if memory ends."""
        sharding.refuse_other_sharding()
        log = RolloutLog(checkpoints)
        (model, outcome), halved = halving(
            lambda halvings: self._attempt(checkpoints, say, halvings, log),
            batch_size=self._spec.train.batch_size,
            say=say,
            refusal=self._no_memory,
        )
        counts = log.counts
        self.data = replace(
            self.data,
            examples=counts["rollouts"],
            tokens=counts["prompt_tokens"] + counts["tokens"],
            answer_tokens=counts["tokens"],
        )
        return Trained(merged(model), outcome, halved, lambda folder: log.write(folder, step=outcome.steps))

    def _attempt(self, folder: Path, say: Callable[[str], None], halvings: int, log: RolloutLog) -> tuple[Any, Outcome]:
        say("loading TRL's trainer")
        from distill.teachers.grpo_arguments import grpo_arguments
        from distill.teachers.grpo_trainer import RolloutTrainer

        settings = self._spec.train
        arguments = grpo_arguments(
            settings, self._spec.rollouts, folder, max_answer_tokens=self._max_answer, halvings=halvings
        )
        if arguments.world_size > 1:
            raise ConfigError(f"method {self._spec.method} trains in one process; {arguments.world_size} were started.")
        log.go_on({})
        trainer = RolloutTrainer(
            model=load_model(self._spec, self._base),
            processing_class=self._base.tokenizer,
            args=arguments,
            dialogues=self._dialogues,
            rows=self._gold.rows,
            place=TrainingPlace(folder, settings.keep_checkpoints, say, [row.name for row in self._gold.rows]),
            log=log,
            **self._method_options(),
        )
        kept = checkpoints.list_checkpoints(folder)
        if kept:
            say(f"resuming from {kept[-1].name}")
        outcome = run_to_end(trainer, resume_from=kept[-1] if kept else None)
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.accelerator.free_memory()
        return model, outcome

    def _method_options(self) -> dict[str, Any]:
        spec = self._spec
        if not isinstance(spec, GraphGrpoSpec):
            return {"score_of": grade_score(spec.near)}
        section = spec.credit
        plan = CreditPlan(
            credit=Credit(consistency=section.consistency),
            learning_rate=section.learning_rate if section.learn else None,
            decay=section.decay,
            max_grad_norm=section.max_grad_norm,
            average=section.average if section.average != "auto" else "node" if section.learn else "token",
            epsilon=section.epsilon,
            tags_earn=section.tags == "grade",
        )
        return {"score_of": graph_score(NodeWorth(section.match, section.miss)), "credit": plan}

    def _no_memory(self, words: str) -> TrainingError:
        half = max(1, self._spec.train.batch_size // 2)
        return TrainingError(
            f"out of memory, also with half the batch ({half} rollouts): {words}. Lower train.batch_size or "
            "train.max_tokens, set train.gradient_checkpointing: true, or train adapters alone (lora: {})."
        )


def _end_ids(base: TeacherBase) -> list[int]:
    """Tokens that end an answer, as the engines have them.

    Raises:
        ModelError: the model names none.
    """
    file = base.resolved.path / "generation_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return end_ids(named if named is not None else base.config.eos_token_id, base.tokenizer)
