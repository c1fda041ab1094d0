"""`method: grpo`, `graph-grpo` and `res-rag`: reinforcement learning from the rewards of sampled answers. Imports TRL
only when training starts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from relabel.distill.students.manifest import SplitSide
from relabel.distill.teachers.evidence import (
    EVIDENCE_COLUMNS,
    EvidenceJudge,
    EvidenceRow,
    Generator,
    identity_of,
    load_evidence_rows,
    own_keys,
)
from relabel.distill.teachers.manifest import TeacherData
from relabel.distill.teachers.rewards import (
    Credit,
    GoldRows,
    RolloutLog,
    each,
    grade_score,
    graph_score,
    load_gold_rows,
)
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues, check_vllm
from relabel.distill.teachers.spec import GraphGrpoSpec, GrpoSpec, ResRagSpec, RolloutSpec
from relabel.distill.teachers.teaching import (
    TeacherBase,
    TeacherTrainer,
    Trained,
    TrainingEstimate,
    load_model,
    named_ends,
    train_learner,
)
from relabel.distill.teachers.watch import RewardWatch
from relabel.distill.training.curves import Curve
from relabel.distill.training.loop import Learner
from relabel.distill.training.output import TrainingPlace
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.transformers import end_ids
from relabel.labelers.evidence import ShortAnswers
from relabel.labelers.registry import Labeler, engine_class, labeler_class
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.labels import RewardWeights
from relabel.manifests.process import require
from relabel.manifests.records import digest_of
from relabel.manifests.secrets import counted

# ------------------------------------------------------------------------------
# `method: grpo` and `method: graph-grpo`: a teacher learns from what its own answers earn.
#
# Each prompt is answered several times; each answer's reward is standardised among those (`rewards.py`), and its
# tokens are made more or less probable by it: mean_i (1/|τ_i|) Σ_t min(ρA, clip(ρ, 1 ± ε)A) - β·KL over the tokens that
# the model wrote. Graph-GRPO gives each part of the answer an advantage of its own (`rewards.py`).
#
# Sources: R3A, equations 1 and 2; Graph-GRPO, equations 5 to 15. Read on: `rollouts.py`, `grpo_trainer.py`.


class GrpoTeacher(TeacherTrainer):
    """Group relative policy optimisation.

    Raises:
        ConfigError: the labeler has its teacher write nothing, or answers leave no room for a prompt.
        InputError: gold is off, or holds fewer prompts than a step takes.
    """

    def __init__(self, spec: RolloutSpec, base: TeacherBase, storage: Storage) -> None:
        require("trl", extra="train", purpose=f"method {spec.method}")
        if spec.rollouts.vllm is not None:
            check_vllm(spec.rollouts.vllm)
        self._spec, self._base = spec, base
        options = spec.labeler
        labeler = labeler_class(options.name)(options)
        tokens = AnswerTokens(base.tokenizer, end_ids=answer_end_ids(base))
        self._dialogues = Dialogues(labeler, base.encoder, tokens, max_prompt_tokens=spec.train.max_tokens)
        self._max_answer = self._longest_answer()
        room = spec.train.max_tokens - self._max_answer
        if room <= 0:
            raise ConfigError(
                f"train.max_tokens is {spec.train.max_tokens}, and an answer may take {self._max_answer} tokens: no "
                "room for a prompt. Raise it, or lower labeler.max_think_tokens or rollouts.max_answer_tokens."
            )
        self._dialogues = Dialogues(labeler, base.encoder, tokens, max_prompt_tokens=room)
        self._gold = self._read_gold(labeler, storage)
        digest = self._digest_parts()
        self._gold, self._held_out = self._gold.split(spec.split)
        rows = self._gold.rows
        if len(rows) < spec.prompts_per_step:
            raise InputError(
                f"{self._gold.about.path}: {counted(len(rows), 'prompt')} to learn from, {len(self._held_out)} held "
                f"out, and a step takes {spec.prompts_per_step} (train.batch_size · train.accumulation / "
                "rollouts.group). Lower one of the first two, or raise the third."
            )
        self.labeler = options.model_dump(mode="json")
        self.templates = labeler.template_digests
        self.digest = digest_of([*digest, self.labeler, self.templates])
        self.notes = []
        if isinstance(spec, GraphGrpoSpec) and not self._gold.has_node_gold:
            self.notes.append(
                "gold says nothing of subject and attribute: every node takes the grade's advantage, so this is plain "
                "GRPO but for the tokens' weights. Name data.gold.subject and data.gold.attribute."
            )
        grades = Counter(row.gold["grade"] for row in rows)
        self._watch = RewardWatch(spec.watch, gold_share=max(grades.values()) / len(rows))
        self.data = TeacherData(
            runs=[],
            gold=self._gold.about,
            rows=len(rows),
            dropped=dict(sorted((+self._gold.dropped).items())),
            examples=len(rows) * spec.rollouts.group,
            tokens=self._gold.prompt_tokens * spec.rollouts.group,
            answer_tokens=0,
            held_out=SplitSide(len(self._held_out), len({row.pair.query_id for row in self._held_out})),
        )

    def _digest_parts(self) -> list[Any]:
        """What is learned from, in addition to the labeler."""
        return [self._gold.prompts, [row.gold for row in self._gold.rows]]

    def _longest_answer(self) -> int:
        return self._dialogues.max_answer_tokens

    def _read_gold(self, labeler: Labeler, storage: Storage) -> GoldRows:
        assert isinstance(self._spec, GrpoSpec)
        options = self._spec.labeler
        # gold has a grade for each row, so each row has to be one conversation that ends in one
        if not options.grades or labeler.reads.siblings or labeler.recalls:
            raise ConfigError(
                f"labeler {options.name}: its answers are not one grade for one pair, which is what is rewarded here. "
                "Take one whose are (`r1`, `umbrela`, `r3a`, `graph-grpo`), or `method: sft`; `method: res-rag` is for "
                "evidence-set."
            )
        return load_gold_rows(self._spec.data.gold, labeler, self._dialogues, storage, grades=options.grades)

    def estimate(self) -> TrainingEstimate:
        """What training would do, each answer as long as it may be."""
        train, rollouts = self._spec.train, self._spec.rollouts
        batches = len(self._gold.rows) // self._spec.prompts_per_step
        steps = train.max_steps or max(1, math.ceil(train.epochs * batches * rollouts.updates))
        examples = math.ceil(steps / rollouts.updates) * train.batch_size * train.accumulation
        prompt = self._gold.prompt_tokens / len(self._gold.rows)
        every = train.eval_every or train.save_every
        asked = sum(len(row.first.ids) for row in self._held_out if row.first is not None)
        evaluated = asked + len(self._held_out) * self._max_answer
        return TrainingEstimate(
            rows=len(self._gold.rows),
            examples=examples,
            steps=steps,
            tokens=round(examples * (prompt + self._max_answer)),
            answer_tokens=examples * self._max_answer,
            eval_tokens=math.ceil(steps / every) * evaluated if every else 0,
        )

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, resuming from the last whole checkpoint; with half the batch if memory runs out."""
        log = RolloutLog(checkpoints, columns=EVIDENCE_COLUMNS if isinstance(self._spec, ResRagSpec) else ())
        trained = train_learner(
            self._spec,
            checkpoints,
            say,
            lambda _, halvings: self._learner(checkpoints, say, halvings, log),  # TRL makes an accelerator of its own
            keys="rollouts.at_once, train.batch_size (and raise train.accumulation as much) or train.max_tokens",
            can_halve=self._spec.train.batch_size % 2 == 0,  # a step's rollouts stay as many as they are
        )
        trained.outcome.notes.extend(self._watch.notes(trained.outcome.curve))
        if not self._gold.has_node_gold:  # nodes have rewards of their own
            trained.outcome.notes.extend(_nothing_learned(trained.outcome.curve))
        counts = log.counts
        self.data = replace(
            self.data,
            examples=counts["rollouts"],
            tokens=counts["prompt_tokens"] + counts["tokens"],
            answer_tokens=counts["tokens"],
        )

        return trained._replace(write_more=lambda folder: log.write(folder, step=trained.outcome.facts.steps))

    def _learner(self, folder: Path, say: Callable[[str], None], halvings: int, log: RolloutLog) -> Learner:
        say("loading TRL's trainer")
        from relabel.distill.teachers.grpo_trainer import grpo_arguments

        settings = self._spec.train
        arguments = grpo_arguments(
            settings,
            self._spec.rollouts,
            folder,
            max_answer_tokens=self._max_answer,
            halvings=halvings,
        )
        if arguments.world_size > 1:
            raise ConfigError(f"method {self._spec.method} trains in one process; {arguments.world_size} were started.")
        log.go_on({})
        trainer_class, options = self._method()
        at_once = self._spec.rollouts.at_once
        if halvings:
            at_once = max(1, (at_once or settings.batch_size * settings.accumulation) >> halvings)
        learner: Learner = trainer_class(
            model=load_model(self._spec, self._base),
            processing_class=self._base.tokenizer,
            args=arguments,
            dialogues=self._dialogues,
            rows=self._gold.rows,
            place=TrainingPlace(
                folder,
                settings.keep_checkpoints,
                say,
                [row.name for row in self._gold.rows],
                settings.report_to,
                self._spec.name,
            ),
            log=log,
            held_out=self._held_out,
            eval_every=settings.eval_every or settings.save_every,
            patience=None if settings.early_stopping is None else settings.early_stopping.patience,
            at_once=at_once,
            watch=self._watch,
            **options,
        )
        return learner

    def _method(self) -> tuple[Any, dict[str, Any]]:
        """The class of the trainer, and its further arguments."""
        from relabel.distill.teachers.grpo_trainer import CreditTrainer, RolloutTrainer

        spec = self._spec
        assert isinstance(spec, GrpoSpec)
        if not isinstance(spec, GraphGrpoSpec):
            return RolloutTrainer, {"scored": each(grade_score(spec.near))}
        scored = each(graph_score(spec.credit.match, spec.credit.miss))
        return CreditTrainer, {"scored": scored, "credit": Credit(spec.credit)}


def _nothing_learned(curve: Curve) -> list[str]:
    """A remark where there was nothing to learn from: a prompt's answers are only compared with each other."""
    shares = [share for _, share in curve.series("train", "no_variance_share")]
    if not shares or min(shares) < 1.0:
        return []
    return [
        "nothing was learned: at every step all answers of a prompt earned the same. Read them in rollouts.parquet; "
        "start from a teacher that knows the format (method: sft), or raise rollouts.group."
    ]


def answer_end_ids(base: TeacherBase) -> list[int]:
    """Tokens that end an answer, as the engines have them.

    Raises:
        ModelError: the model names none.
    """
    named = named_ends(base.resolved)
    return end_ids(named if named is not None else base.config.eos_token_id, base.tokenizer)


# ------------------------------------------------------------------------------
# `method: res-rag`: a teacher learns to choose evidence by what a frozen generator answers from its choice.
#
# The loss is GRPO's, over answers that a grammar holds; see `res_rag_trainer.py`. The reward is in
# `evidence.py`, with the generator.
#
# Source: RES-RAG (sections 3.3 and 3.4).


ANSWERS = "generator"
"""Folder of the generator's kept answers, in the folder of the checkpoints."""


class ResRagTeacher(GrpoTeacher):
    """GRPO with RES-RAG's joint reward.

    Raises:
        ModelError, MissingExtraError: the generator can't be started here.
        InputError: no question can be learned from, or fewer than a step takes.
    """

    _spec: ResRagSpec

    def __init__(self, spec: ResRagSpec, base: TeacherBase, storage: Storage) -> None:
        with own_keys():
            engine_class(spec.generator.name).check(spec.generator)
            self._generator_identity = identity_of(spec.generator, ShortAnswers())
        self._generator: Generator | None = None
        super().__init__(spec, base, storage)

    def _digest_parts(self) -> list[Any]:
        rows = [row for row in self._gold.rows if isinstance(row, EvidenceRow)]
        return [self._gold.prompts, [[row.sets, row.answers] for row in rows], self._generator_identity]

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """As GRPO; the generator is started before the trainer, and closed after it."""
        kept = self._spec.generator.cache
        folder = Path(kept) if kept is not None else checkpoints / ANSWERS
        self._generator = Generator(self._spec.generator, folder, secrets=self.secrets)
        say("starting the generator")
        try:
            for remark in self._generator.start():
                say(remark)
            return super().train(checkpoints, say)
        finally:
            self._generator.close()

    def _longest_answer(self) -> int:
        return self._spec.rollouts.max_answer_tokens

    def _read_gold(self, labeler: Labeler, storage: Storage) -> GoldRows:
        return load_evidence_rows(self._spec.data.gold, labeler, self._dialogues, storage)

    def _method(self) -> tuple[Any, dict[str, Any]]:
        from relabel.distill.teachers.res_rag_trainer import GrammarMasks, HeldTrainer

        assert self._generator is not None
        reward = self._spec.reward
        weights = RewardWeights(
            cost=reward.eta,
            answer=reward.alpha_ans,
            retrieval=reward.alpha_ret,
            empty_answer=reward.gamma,
            lowest=reward.r_min,
            highest=reward.r_max,
        )
        tokenizer = self._base.tokenizer
        width = max(len(tokenizer), int(self._base.config.get_text_config().vocab_size))
        compiler = GrammarCompiler(tokenizer, vocab_size=width, eos_ids=answer_end_ids(self._base))
        return HeldTrainer, {"masks": GrammarMasks(compiler), "judge": EvidenceJudge(self._generator, weights)}
