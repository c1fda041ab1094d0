""" """

import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from relabel.distill.students.spec import SplitSide
from relabel.distill.teachers.credit import Credit
from relabel.distill.teachers.rewards import GoldRows, each, grade_score, graph_score, load_gold_rows
from relabel.distill.teachers.rollout_log import RolloutLog
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues, longest_answer
from relabel.distill.teachers.spec import EvidenceRollouts, GraphGrpoSpec, GrpoSpec, RolloutSpec, TeacherData
from relabel.distill.teachers.teaching import (
    ReportLine,
    TeacherBase,
    TeacherTrainer,
    Trained,
    TrainingEstimate,
    load_model,
    train_learner,
)
from relabel.distill.teachers.watch import RewardWatch
from relabel.distill.training.loop import Learner, started_processes
from relabel.distill.training.output import TrainingPlace
from relabel.labelers.engines.openai_options import server_address
from relabel.labelers.registry import Labeler, labeler_class
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.process import require
from relabel.manifests.records import digest_of
from relabel.manifests.secrets import counted

logger = logging.getLogger(__name__)


class GrpoTeacher(TeacherTrainer):
    """Group relative policy optimisation.

    Raises:
        MissingExtraError: TRL, or vLLM where it is asked for, is not installed.
        ConfigError: the labeler has its teacher write nothing, answers leave no room for a prompt, or vLLM can't be
            used here.
        InputError: gold is off, or holds fewer prompts than a step takes.
    """

    columns: tuple[pa.Field, ...] = ()
    """Of the rollouts' table, in addition."""

    def __init__(self, spec: RolloutSpec, base: TeacherBase, storage: Storage) -> None:
        require("trl", extra="train", purpose=f"method {spec.method}")
        vllm = spec.rollouts.vllm
        if vllm is not None:
            if vllm.url is not None:
                server_address(vllm.url, key="rollouts.vllm.url")
            require("vllm", extra="train-gpu", purpose="rollouts.vllm")
            if not torch.cuda.is_available():
                raise ConfigError(
                    "rollouts.vllm: torch finds no GPU here, and vLLM takes a model's new weights over CUDA alone. "
                    "Leave rollouts.vllm out: transformers writes the answers then."
                )
        self._spec = spec
        self._base = base
        labeler = labeler_class(spec.labeler.name)(spec.labeler)
        if isinstance(spec.rollouts, EvidenceRollouts):
            self._max_answer = spec.rollouts.max_answer_tokens
        else:
            self._max_answer = longest_answer(labeler)
        room = spec.train.max_tokens - self._max_answer
        if room <= 0:
            raise ConfigError(
                f"train.max_tokens is {spec.train.max_tokens}, and an answer may take {self._max_answer} tokens: no "
                "room for a prompt. Raise it, or lower labeler.max_think_tokens or rollouts.max_answer_tokens."
            )
        self._dialogues = Dialogues(
            labeler, base.encoder, AnswerTokens(base.tokenizer, end_ids=base.end_ids), max_prompt_tokens=room
        )
        gold = self._read_gold(labeler, storage)
        if not gold.rows:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in gold.dropped.items())
            raise InputError(f"{gold.about.path}: no row to learn from: {listed}.{self._advice(labeler)}")
        self.labeler = spec.labeler.model_dump(mode="json")
        self.templates = labeler.template_digests
        self.digest = digest_of([gold.prompts, *self._learned(gold), self.labeler, self.templates])
        self._gold, self._held_out = gold.split(spec.split)
        rows = self._gold.rows
        self._num_processes = started_processes()
        self._prompts_per_step = spec.prompts_per_step * self._num_processes
        if len(rows) < self._prompts_per_step:
            times = f" · {self._num_processes} processes" if self._num_processes > 1 else ""
            raise InputError(
                f"{gold.about.path}: {counted(len(rows), 'prompt')} to learn from, {len(self._held_out)} held "
                f"out, and a step takes {self._prompts_per_step} (train.batch_size · train.accumulation / "
                f"rollouts.group{times}). Lower one of the first two, or raise the third."
            )
        self.notes = []
        if isinstance(spec, GraphGrpoSpec) and not gold.has_node_gold:
            self.notes.append(
                "gold says nothing of subject and attribute: every node takes the grade's advantage, so this is plain "
                "GRPO but for the tokens' weights. Name data.gold.subject and data.gold.attribute."
            )
        grades = Counter(row.gold["grade"] for row in rows)
        self._watch = RewardWatch(spec.watch, gold_share=max(grades.values()) / len(rows))
        self.data = TeacherData(
            runs=[],
            gold=gold.about,
            rows=len(rows),
            dropped=dict(sorted((+gold.dropped).items())),
            examples=len(rows) * spec.rollouts.group,
            tokens=sum(map(len, self._gold.prompts)) * spec.rollouts.group,
            answer_tokens=0,
            held_out=SplitSide(len(self._held_out), len({row.pair.query_id for row in self._held_out})),
        )

    def _advice(self, labeler: Labeler) -> str:
        """Where prompts do not fit: how long they are, and what to do."""
        longest = self._dialogues.longest_overlong()
        if longest is None:
            return ""
        more = ", and by what its first answers take, which later prompts hold" if len(labeler.probe()) > 1 else ""
        return (
            f" The prompts have up to {longest} tokens, train.max_tokens is {self._spec.train.max_tokens}, of which "
            f"{self._max_answer} are kept for an answer. Raise it to {longest + self._max_answer}{more}."
        )

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
        return load_gold_rows(
            self._spec.data.gold,
            labeler,
            self._dialogues,
            storage,
            grades=options.grades,
        )

    def _learned(self, gold: GoldRows) -> list[Any]:
        """What is learned from, in addition to prompts and labeler."""
        return [[row.gold for row in gold.rows]]

    def estimate(self) -> TrainingEstimate:
        """What training would do, each answer as long as it may be."""
        train = self._spec.train
        updates = self._spec.rollouts.updates
        rows = self._gold.rows
        batches = len(rows) // self._prompts_per_step
        steps = train.max_steps or max(1, math.ceil(train.epochs * batches * updates))
        examples = math.ceil(steps / updates) * train.batch_size * train.accumulation * self._num_processes
        every = train.eval_every or train.save_every
        evaluated = sum(len(row.first.ids) + self._max_answer for row in self._held_out if row.first is not None)
        mean_prompt = sum(map(len, self._gold.prompts)) / len(rows)
        return TrainingEstimate(
            rows=len(rows),
            examples=examples,
            steps=steps,
            tokens=round(examples * (mean_prompt + self._max_answer)),
            answer_tokens=examples * self._max_answer,
            eval_tokens=math.ceil(steps / every) * evaluated if every else 0,
        )

    def train(self, checkpoints: Path, report: ReportLine) -> Trained:
        """Train, resuming from the last whole checkpoint; with half the batch if memory runs out."""
        trained = train_learner(
            self._spec,
            checkpoints,
            report,
            lambda _, halvings: self._learner(checkpoints, report, halvings),  # TRL makes an accelerator of its own
            identity=self.identity,
            keys="rollouts.at_once, train.batch_size (and raise train.accumulation as much) or train.max_tokens",
            can_halve=self._spec.train.batch_size % 2 == 0,  # a step's rollouts stay as many as they are
        )
        curve = trained.outcome.curve
        log = self._log
        trained.outcome.notes += self._watch.notes(curve)
        shares = [share for _, share in curve.series("train", "no_variance_share")]
        if shares and min(shares) == 1.0 and not self._gold.has_node_gold:  # nodes have rewards of their own
            trained.outcome.notes.append(
                "nothing was learned: at every step all answers of a prompt earned the same. Read them in "
                "rollouts.parquet; start from a teacher that knows the format (method: sft), or raise rollouts.group."
            )
        self.data = replace(
            self.data,
            examples=log.counts["rollouts"],
            tokens=log.counts["prompt_tokens"] + log.counts["tokens"],
            answer_tokens=log.counts["tokens"],
        )
        return trained._replace(write_more=lambda folder: log.write(folder, step=trained.outcome.facts.steps))

    def _learner(self, folder: Path, report: ReportLine, halvings: int) -> Learner:
        report("loading TRL's trainer")
        from relabel.distill.teachers.grpo_trainer import grpo_arguments

        spec = self._spec
        settings = self._spec.train
        arguments = grpo_arguments(
            settings,
            spec.rollouts,
            folder,
            max_answer_tokens=self._max_answer,
            halvings=halvings,
        )
        self._log = RolloutLog(folder, columns=self.columns)
        at_once = spec.rollouts.at_once
        if not at_once and halvings:
            at_once = settings.batch_size * settings.accumulation
        if at_once:
            at_once = max(1, at_once >> halvings)
        trainer_class, options = self._method()
        learner: Learner = trainer_class(
            model=load_model(spec, self._base),
            processing_class=self._base.tokenizer,
            args=arguments,
            dialogues=self._dialogues,
            rows=self._gold.rows,
            place=TrainingPlace(
                folder,
                settings.keep_checkpoints,
                report,
                [row.name for row in self._gold.rows],
                spec.name,
            ),
            log=self._log,
            held_out=self._held_out,
            eval_every=settings.eval_every or settings.save_every,
            patience=None if settings.early_stopping is None else settings.early_stopping.patience,
            at_once=at_once,
            watch=self._watch,
            whole=None if settings.strategy == "ddp" else lambda: load_model(spec, self._base),
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
        return CreditTrainer, {
            "scored": each(graph_score(spec.credit.match, spec.credit.miss)),
            "credit": Credit(spec.credit),
        }
