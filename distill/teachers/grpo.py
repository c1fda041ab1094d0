"""`method: grpo` and `graph-grpo`: reinforcement learning from the rewards of sampled answers, and the watch over a
reward that is earned without the work. Imports TRL only when training starts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from relabel.distill.students.spec import SplitSide
from relabel.distill.teachers.rewards import (
    Credit,
    GoldRows,
    RolloutLog,
    each,
    grade_score,
    graph_score,
    load_gold_rows,
)
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues, check_vllm, longest_answer
from relabel.distill.teachers.spec import (
    EvidenceRollouts,
    GraphGrpoSpec,
    GrpoSpec,
    RolloutSpec,
    TeacherData,
    WatchSection,
)
from relabel.distill.teachers.teaching import (
    Say,
    TeacherBase,
    TeacherTrainer,
    Trained,
    TrainingEstimate,
    load_model,
    train_learner,
)
from relabel.distill.training.loop import Learner
from relabel.distill.training.output import Curve, TrainingPlace
from relabel.labelers.registry import Labeler, labeler_class
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.process import require
from relabel.manifests.records import digest_of
from relabel.manifests.secrets import counted

# ------------------------------------------------------------------------------
# Detection of reward hacking: figures that move when a reward is earned without the work. A warning is logged, and
# ends the training where evaluations on held-out rows decide which step to keep.
#
# All follows from the curve alone, so a training that is resumed ends as an undisturbed one. The held-out reward is the
# same reward and can be hacked as well, so a step under a warning is not taken for the best.


WATCHED = {
    "length": ("response_tokens", "Read the longest and the shortest answers: is it their length that earns?"),
    "no_evidence": ("no_evidence_rate", "Read answers that quote nothing: the reward may not ask for evidence."),
    "one_grade": ("top_grade_share", "Compare grades with the trusted ones: one grade may pay whatever the row."),
    "format": ("format_rate", "Read their `fault` and `detail`; lower train.learning_rate or raise rollouts.beta."),
}
"""Key of the section → the figure, and what to check."""


@dataclass
class Episode:
    """A stretch of steps in which a figure is beyond its threshold, or was within the last window.

    Args:
        start, end: steps; no end while it lasts.
        value, limit: of the figure at its start.
        is_first: active since the first window.
    """

    key: str
    start: int
    value: float
    limit: float
    is_first: bool
    end: int | None = None

    def __str__(self) -> str:
        figure, advice = WATCHED[self.key]
        return (
            f"watch: {figure} is {self.value:.3g} at step {self.start}, beyond {self.limit:.3g} (watch.{self.key}). "
            f"{advice}"
        )


class RewardWatch:
    """Compares a training's curve with the thresholds.

    Args:
        gold_share: share of the most frequent trusted grade.
    """

    def __init__(self, section: WatchSection, *, gold_share: float) -> None:
        self._section, self._gold_share = section, gold_share

    def episodes(self, curve: Curve) -> list[Episode]:
        """All of them, figure by figure."""
        watched = [(key, figure) for key, (figure, _) in WATCHED.items() if getattr(self._section, key) is not None]
        return [one for key, figure in watched for one in self._of_figure(key, curve.series("train", figure))]

    def warnings(self, curve: Curve, step: int) -> list[str]:
        """Of rewards that are earned without the work, once an episode."""
        return [str(one) for one in self.episodes(curve) if one.start == step]

    def is_suspect(self, curve: Curve) -> bool:
        """Whether a warning is active that may end the training: a step is then the best one only if it is the
        first."""
        return any(one.end is None for one in self._ending(curve))

    def ended_by(self, curve: Curve) -> Episode | None:
        """The episode that outlasted the patience, counted in evaluations."""
        evaluated = sorted({step for step, split, _, _ in curve.points if split == "dev"})
        for one in self._ending(curve):
            seen = [step for step in evaluated if one.start <= step and (one.end is None or step < one.end)]
            if len(seen) >= (self._section.patience or 0):
                return one
        return None

    def notes(self, curve: Curve) -> list[str]:
        """Remarks for the manifest."""
        found = [str(one) for one in self.episodes(curve)]
        ending = self.ended_by(curve)
        if ending is not None:
            found.append(f"ended early: {WATCHED[ending.key][0]} was beyond its threshold since step {ending.start}")
        return found

    def _ending(self, curve: Curve) -> list[Episode]:
        return [one for one in self.episodes(curve) if self._section.patience is not None and not one.is_first]

    def _of_figure(self, key: str, points: list[tuple[int, float]]) -> list[Episode]:
        """One figure's episodes: the mean of its last window is judged, from the first whole one on."""
        size = self._section.window
        steps, values = [step for step, _ in points], [value for _, value in points]
        means = [sum(values[end - size : end]) / size for end in range(size, len(values) + 1)]
        found: list[Episode] = []
        num_fine = 0
        for step, mean, highest in zip(steps[size - 1 :], means, accumulate(means, max), strict=True):
            limit, is_beyond = self._judged(key, mean, first=means[0], highest=highest)
            num_fine = 0 if is_beyond else num_fine + 1
            is_open = bool(found) and found[-1].end is None
            if is_beyond and not is_open:
                found.append(Episode(key, step, mean, limit, is_first=step == steps[size - 1]))
            elif is_open and num_fine >= size:
                found[-1].end = step
        return found

    def _judged(self, key: str, mean: float, *, first: float, highest: float) -> tuple[float, bool]:
        """A mean's limit, and whether it is beyond."""
        threshold = getattr(self._section, key)
        if key == "length":
            limit = first * threshold if mean > first else first / threshold
            return limit, mean >= first * threshold or mean <= first / threshold
        if key == "format":
            return highest * threshold, mean < highest * threshold
        limit = max(threshold, (1 + self._gold_share) / 2) if key == "one_grade" else threshold
        return limit, mean >= limit


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

    columns: tuple[pa.Field, ...] = ()
    """Of the rollouts' table, in addition."""

    def __init__(self, spec: RolloutSpec, base: TeacherBase, storage: Storage) -> None:
        require("trl", extra="train", purpose=f"method {spec.method}")
        if spec.rollouts.vllm is not None:
            check_vllm(spec.rollouts.vllm)
        self._spec, self._base = spec, base
        labeler = labeler_class(spec.labeler.name)(spec.labeler)
        self._max_answer = (
            spec.rollouts.max_answer_tokens if isinstance(spec.rollouts, EvidenceRollouts) else longest_answer(labeler)
        )
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
            raise InputError(f"{gold.about.path}: no row to learn from: {listed}.")
        self.labeler, self.templates = spec.labeler.model_dump(mode="json"), labeler.template_digests
        self.digest = digest_of([gold.prompts, *self._learned(gold), self.labeler, self.templates])
        self._gold, self._held_out = gold.split(spec.split)
        rows = self._gold.rows
        if len(rows) < spec.prompts_per_step:
            raise InputError(
                f"{gold.about.path}: {counted(len(rows), 'prompt')} to learn from, {len(self._held_out)} held "
                f"out, and a step takes {spec.prompts_per_step} (train.batch_size · train.accumulation / "
                "rollouts.group). Lower one of the first two, or raise the third."
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

    def _learned(self, gold: GoldRows) -> list[Any]:
        """What is learned from, in addition to prompts and labeler."""
        return [[row.gold for row in gold.rows]]

    def estimate(self) -> TrainingEstimate:
        """What training would do, each answer as long as it may be."""
        train, updates, rows = self._spec.train, self._spec.rollouts.updates, self._gold.rows
        batches = len(rows) // self._spec.prompts_per_step
        steps = train.max_steps or max(1, math.ceil(train.epochs * batches * updates))
        examples = math.ceil(steps / updates) * train.batch_size * train.accumulation
        every = train.eval_every or train.save_every
        evaluated = sum(len(row.first.ids) + self._max_answer for row in self._held_out if row.first is not None)
        return TrainingEstimate(
            rows=len(rows),
            examples=examples,
            steps=steps,
            tokens=round(examples * (sum(map(len, self._gold.prompts)) / len(rows) + self._max_answer)),
            answer_tokens=examples * self._max_answer,
            eval_tokens=math.ceil(steps / every) * evaluated if every else 0,
        )

    def train(self, checkpoints: Path, say: Say) -> Trained:
        """Train, resuming from the last whole checkpoint; with half the batch if memory runs out."""
        trained = train_learner(
            self._spec,
            checkpoints,
            say,
            lambda _, halvings: self._learner(checkpoints, say, halvings),  # TRL makes an accelerator of its own
            keys="rollouts.at_once, train.batch_size (and raise train.accumulation as much) or train.max_tokens",
            can_halve=self._spec.train.batch_size % 2 == 0,  # a step's rollouts stay as many as they are
        )
        curve, log = trained.outcome.curve, self._log
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

    def _learner(self, folder: Path, say: Say, halvings: int) -> Learner:
        say("loading TRL's trainer")
        from relabel.distill.teachers.grpo_trainer import grpo_arguments

        spec, settings = self._spec, self._spec.train
        arguments = grpo_arguments(
            settings, spec.rollouts, folder, max_answer_tokens=self._max_answer, halvings=halvings
        )
        if arguments.world_size > 1:
            raise ConfigError(f"method {spec.method} trains in one process; {arguments.world_size} were started.")
        self._log = RolloutLog(folder, columns=self.columns)
        at_once = spec.rollouts.at_once
        if halvings:
            at_once = max(1, (at_once or settings.batch_size * settings.accumulation) >> halvings)
        trainer_class, options = self._method()
        learner: Learner = trainer_class(
            model=load_model(spec, self._base),
            processing_class=self._base.tokenizer,
            args=arguments,
            dialogues=self._dialogues,
            rows=self._gold.rows,
            place=TrainingPlace(
                folder, settings.keep_checkpoints, say, [row.name for row in self._gold.rows], spec.name
            ),
            log=self._log,
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
        return CreditTrainer, {
            "scored": each(graph_score(spec.credit.match, spec.credit.miss)),
            "credit": Credit(spec.credit),
        }
