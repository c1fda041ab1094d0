"""The training loop of students and teachers: steps, schedule, evaluations on dev, checkpoints and resume. What a step
computes is a `Learner`'s."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, release_memory, send_to_device, set_seed
from torch import Tensor, nn

from relabel.distill.training import checkpoints
from relabel.distill.training.checkpoints import write_checkpoint
from relabel.distill.training.curves import Curve, CurveReporter, Outcome, TrainingFacts
from relabel.distill.training.output import WEIGHTS, TrainingPlace, checkpoint_name, step_of
from relabel.distill.training.runtime import (
    BatchPlan,
    ending_together,
    first_line,
    is_out_of_memory,
    make_accelerator,
)
from relabel.distill.training.spec import TrainingSection
from relabel.manifests import failpoints
from relabel.manifests.errors import TrainingError
from relabel.manifests.process import draining, interruption, is_stop_wished

# ------------------------------------------------------------------------------
# What turns gradients into the next weights: AdamW by groups of parameters, and the schedule of its rate.


NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameters that weight decay leaves alone, by name; in addition to those of `nn.LayerNorm`."""


def make_optimizer(model: Any, settings: TrainingSection) -> torch.optim.AdamW:
    """AdamW over what training changes; each group has its peak rate as `initial_lr`, a student's heads their own."""
    norms = {id(held) for part in model.modules() if isinstance(part, nn.LayerNorm) for held in part.parameters()}
    rates = {False: settings.learning_rate}
    heads: set[int] = set()
    head_rate = getattr(settings, "head_learning_rate", None)
    if head_rate is not None:
        rates[True] = head_rate
        heads = {id(parameter) for parameter in model.heads.parameters()}
    held: dict[tuple[bool, bool], list[Any]] = {
        (is_head, is_plain): [] for is_head in rates for is_plain in (False, True)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_plain = id(parameter) in norms or NOT_DECAYED.search(name.lower()) is not None
            held[id(parameter) in heads, is_plain].append(parameter)
    groups = [
        {"params": own, "weight_decay": 0.0 if is_plain else settings.weight_decay, "initial_lr": rates[is_head]}
        for (is_head, is_plain), own in held.items()
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)


def rate_share(settings: TrainingSection, step: int, steps: int) -> float:
    """Share of the peak rate that a step has.

    Args:
        step: those done before it.
        steps: of the whole training.
    """
    warmup = math.ceil(steps * settings.warmup)
    if step < warmup:
        return step / warmup
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "linear":
        return (steps - step) / max(1, steps - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / max(1, steps - warmup))))


# ------------------------------------------------------------------------------
# What is trained, and what one step of it computes.


class Choice(NamedTuple):
    """How evaluations on dev choose the step that is kept.

    Args:
        figure: of an evaluation.
        patience: evaluations without a better one after which training ends; None trains to the end.
        sign: -1 where less is better.
    """

    figure: str
    patience: int | None
    sign: float = 1.0


class Learner:
    """What is trained, and what one optimizer step of it computes.

    Everything follows from the step's number, the seed, the random generators and `own_state`, so that a training
    resumed at any step equals one that nothing stopped.
    """

    accelerator: Accelerator
    model: Any
    """Trained in place; checkpoints hold what of its parameters training changes."""
    place: TrainingPlace
    epoch_steps: int
    """Optimizer steps of a pass over the data."""
    eval_every: int | None = None
    """Steps between evaluations on dev; None is once an epoch."""
    choice: Choice | None = None
    progress_figures: tuple[str, ...] = ("loss",)
    """Figures of a step that its line of progress shows."""

    def create_optimizer(self) -> Any:
        """Of the model's parameters, each group with its peak rate."""
        raise NotImplementedError

    def trained(self) -> Any:
        """The model once training has ended, as it will answer."""
        return self.accelerator.unwrap_model(self.model)

    def backward(self, step: int) -> tuple[dict[str, float], list[int]]:
        """Compute the gradients of the step that follows so many.

        Returns:
            Its figures, and the rows that they came of.
        Raises:
            TrainingError: the loss is not finite; the message names the rows.
        """
        raise NotImplementedError

    def before_update(self) -> None:
        """Called before the optimizer's step."""

    def after_update(self, step: int) -> dict[str, float]:
        """Called after the optimizer's step; more figures of it."""
        return {}

    def dev_figures(self, step: int) -> dict[str, float] | None:
        """Figures on dev; None without a dev split."""
        return None

    def epochs_at(self, step: int) -> float:
        """Passes over the data that so many steps make."""
        return step / self.epoch_steps

    def may_stop(self, step: int) -> bool:
        """Whether a checkpoint after this step holds all that training resumes from."""
        return True

    def warnings(self, curve: Curve, step: int) -> Sequence[str]:
        """What a step's figures warn of."""
        return ()

    def is_suspect(self, curve: Curve) -> bool:
        """Whether the last evaluation may not be the best one."""
        return False

    def ended_by(self, curve: Curve) -> str | None:
        """What but the choice ends training after its last evaluation."""
        return None

    def own_state(self, step: int) -> dict[str, Any]:
        """Plain values and tensors that a checkpoint keeps in addition."""
        return {}

    def load_own_state(self, held: dict[str, Any], step: int) -> None:
        """Take back what `own_state` gave."""


class StepLoss(Protocol):
    """A loss that is a mean over a whole optimizer step, however many batches and processes share it."""

    def amounts(self, batch: dict[str, Any]) -> Tensor:
        """What its parts are divided by: a batch's weights [P]."""

    def shares(self, model: Any, batch: dict[str, Any], totals_P: Tensor) -> Mapping[str, Tensor]:
        """A batch's share of the step's figures: `loss`, which carries the gradient, then its parts.

        Args:
            totals_P: amounts of all batches.
        """


class SupervisedLearner(Learner):
    """Learns given targets from planned batches.

    Args:
        model: sharded or not.
        plan: the batches.
        collate: row numbers and the epoch to tensors; `rows` among them.
        dev: figures of the model on dev.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        place: TrainingPlace,
        settings: TrainingSection,
        *,
        plan: BatchPlan,
        collate: Callable[[Sequence[int], int], dict[str, Any]],
        step_loss: StepLoss,
        dev: Callable[[Any], dict[str, float]] | None = None,
        choice: Choice | None = None,
        eval_every: int | None = None,
    ) -> None:
        self.accelerator, self.model, self.place = accelerator, model, place
        self._settings, self._plan, self._collate, self._step_loss, self._dev = settings, plan, collate, step_loss, dev
        self.choice, self.eval_every, self.epoch_steps = choice, eval_every, plan.epoch_steps
        # shards reduce their own gradients: they get autocast as for evaluation, and no DDP around them
        is_sharded = checkpoints.is_sharded(model)
        self._model = accelerator.prepare_model(
            model, device_placement=False if is_sharded else None, evaluation_mode=is_sharded
        )

    def create_optimizer(self) -> Any:
        return make_optimizer(self.model, self._settings)

    def epochs_at(self, step: int) -> float:
        return self._plan.epochs_at(step)

    def dev_figures(self, step: int) -> dict[str, float] | None:
        return None if self._dev is None else self._dev(self.model)

    def backward(self, step: int) -> tuple[dict[str, float], list[int]]:
        rows = self._plan.rows_of_step(step)
        epoch = step // self.epoch_steps
        batches = send_to_device([self._collate(one, epoch) for one in rows], self.accelerator.device)
        # over the whole step: the loss is the mean over its rows, and not a mean of means
        totals_P = self.accelerator.reduce(torch.stack([self._step_loss.amounts(batch) for batch in batches]).sum(0))
        self._model.train()
        names: list[str] = []
        found = []
        for batch in batches:
            # gradients travel with the last batch
            with nullcontext() if batch is batches[-1] else self.accelerator.no_sync(self._model):
                shares = self._step_loss.shares(self._model, batch, totals_P)
                # processes average their gradients, so each one's share is multiplied by their number
                self.accelerator.backward(shares["loss"] * self.accelerator.num_processes)
                names = list(shares)
                found.append(torch.stack([share.detach() for share in shares.values()]))
        figures: dict[str, float] = {}
        # one wait for the device
        for own, values in zip(rows, self.accelerator.reduce(torch.stack(found)).tolist(), strict=True):
            if not math.isfinite(values[0]):
                listed = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, values, strict=True))
                raise self.place.not_finite(f"the loss is not finite ({listed})", own, step=step + 1)
            for name, value in zip(names, values, strict=True):
                if math.isfinite(value):  # 0/0: no row of this step has the label
                    figures[name] = figures.get(name, 0.0) + value
        return figures, [row for own in rows for row in own]


# ------------------------------------------------------------------------------
# The loop, from the first step to the last.
#
# accelerate has the devices: DDP, autocast, the scaler of fp16. When dev is evaluated, when training ends and how a
# checkpoint is written is decided here.


EARLY_STOPPING = "early_stopping"


class Training:
    """One training."""

    def __init__(self, learner: Learner, settings: TrainingSection) -> None:
        self.learner, self.accelerator = learner, learner.accelerator
        self._settings, self._place = settings, learner.place
        self.last_step = settings.max_steps or math.ceil(settings.epochs * learner.epoch_steps)
        self.step = 0
        self.curve = Curve()
        self.best_step: int | None = None
        self.stopped_by: str | None = None
        self._rows_seen, self._seconds = 0, 0.0
        self.optimizer = self.accelerator.prepare_optimizer(learner.create_optimizer())
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        is_first = self.accelerator.is_main_process
        self._reporter = CurveReporter(self._place.report_to if is_first else (), self._place.folder, self._place.say)

    def run(self, *, resume_from: Path | None = None) -> Outcome:
        """Train to the last step, or until dev gets no better; then put back the best step where dev chose one.

        Raises:
            TrainingError: a loss, a gradient or a weight is not finite.
            ManifestError: a checkpoint is missing, damaged, or of another model.
            KeyboardInterrupt: a signal came; what was trained is in a checkpoint.
        """
        set_seed(self._settings.seed)
        if resume_from is not None:
            self._resume(resume_from)
        try:
            with draining():
                self._train()
            self._reporter.send(self.curve)
        finally:
            self._reporter.finish()
        return self._outcome()

    def _train(self) -> None:
        is_over, is_stopped = self._is_done, False
        while not is_over:
            self._take_step()
            if self.step == self.last_step or self._is_due(self.learner.eval_every):
                self._evaluate()
            # a signal to any of the processes stops all of them after the same step
            wished = torch.tensor(is_stop_wished(), dtype=torch.float32, device=self.accelerator.device)
            is_stopped = bool(self.accelerator.reduce(wished)) and self.learner.may_stop(self.step)
            is_over = self._is_done or is_stopped
            if is_over or self.best_step == self.step or self._is_due(self._settings.save_every):
                self._save()
        # the first process may still be writing, and a launcher stops all where one has ended
        self.accelerator.wait_for_everyone()
        if is_stopped:
            raise interruption()

    def _is_due(self, every: int | None) -> bool:
        """Whether something is due after this step: once in so many, or once an epoch."""
        return self.step % (every or self.learner.epoch_steps) == 0

    def _take_step(self) -> None:
        """
        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are as they were.
        """
        began = time.perf_counter()
        share = rate_share(self._settings, self.step, self.last_step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        figures, rows = self.learner.backward(self.step)
        figures["grad_norm"] = self._clipped(rows)
        self.learner.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        figures["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        self.step += 1
        figures |= self.learner.after_update(self.step)
        self._seconds += time.perf_counter() - began
        self._rows_seen += len(rows)
        self.curve.add(self.step, "train", figures)
        shown = [f"{name} {figures[name]:.4f}" for name in self.learner.progress_figures if name in figures]
        self._place.say(", ".join([f"step {self.step} of {self.last_step}", *shown]))
        for warning in self.learner.warnings(self.curve, self.step):
            self._place.say(warning)
        self._reporter.send(self.curve)
        failpoints.hit("after_training_step")

    def _clipped(self, rows: Sequence[int]) -> float:
        """The gradient's norm before it is clipped; one that is not finite is for fp16's scaler to leave out."""
        max_norm = self._settings.max_grad_norm or math.inf
        norm = float(self.accelerator.clip_grad_norm_(self.learner.model.parameters(), max_norm))
        if self.accelerator.scaler is None and not math.isfinite(norm):
            what = f"the gradient is not finite (norm {norm:.4g}), though the loss is"
            raise self._place.not_finite(what, rows, step=self.step + 1)
        return norm

    def _evaluate(self) -> None:
        """Figures on dev, noted in the curve."""
        self.learner.model.eval()
        own = self.learner.dev_figures(self.step)
        if own is None:
            return
        # the first process's: all of them must stop at the same step, however their devices round
        (found,) = broadcast_object_list([own])
        self.curve.add(self.step, "dev", found)
        self._reporter.send(self.curve)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self._place.say(f"step {self.step}, dev: {shown}")
        self._judge_evaluations()

    def _judge_evaluations(self) -> None:
        """The first of the best evaluations, and whether it is time to end, where there is a choice."""
        choice = self.learner.choice
        points = [] if choice is None else self.curve.series("dev", choice.figure)
        if choice is None or not points:
            return
        best: float | None = None
        for step, value in points:
            if best is None or (choice.sign * value > best and not self.learner.is_suspect(self.curve.until(step))):
                self.best_step, best = step, choice.sign * value
        num_since = sum(step > (self.best_step or 0) for step, _ in points)
        if reason := self.learner.ended_by(self.curve):
            self.stopped_by = reason
            self._place.say(f"ended by {reason}: stopping")
        elif choice.patience is not None and num_since >= choice.patience:
            self.stopped_by = EARLY_STOPPING
            self._place.say(f"no better dev {choice.figure} for {choice.patience} evaluations: stopping")

    @property
    def _is_done(self) -> bool:
        return self.step >= self.last_step or self.stopped_by is not None

    def _save(self) -> None:
        is_writer = self.accelerator.is_main_process
        if not is_writer and not checkpoints.is_sharded(self.learner.model):
            return
        scaler = self.accelerator.scaler
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "curve": self.curve.points,
            "own": self.learner.own_state(self.step),
            "random": checkpoints.random_states(),
        }
        write_checkpoint(self._place, self.step, self.learner.model, state, is_writer=is_writer, best=self.best_step)

    def _resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ManifestError: it is damaged, or of another model.
        """
        held = checkpoints.load_state(checkpoint)
        self.step = step_of(checkpoint)
        self.curve.points = [(step, split, name, value) for step, split, name, value in held["curve"]]
        self._judge_evaluations()
        checkpoints.load_weights(self.learner.model, checkpoint / WEIGHTS)
        self.optimizer.load_state_dict(checkpoints.cut_moments(held["optimizer"], self.optimizer))
        if self.accelerator.scaler is not None and held["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(held["scaler"])
        self.learner.load_own_state(held["own"], self.step)
        checkpoints.restore_random(held["random"])

    def _outcome(self) -> Outcome:
        if self.best_step is not None:
            best = self._place.folder / checkpoint_name(self.best_step)
            checkpoints.check_digests(best)
            checkpoints.load_weights(self.learner.model, best / WEIGHTS)
            self.accelerator.wait_for_everyone()  # the first process removes it soon
        facts = TrainingFacts(
            steps=self.step,
            epochs=round(self.learner.epochs_at(self.step), 4),
            best_step=self.best_step,
            stopped_by=self.stopped_by,
            device=str(self.accelerator.device),
            rows_per_s=round(self._rows_seen / self._seconds, 2) if self._seconds else None,
        )
        return Outcome(facts, self.curve)


# ------------------------------------------------------------------------------
# A training from its data to its end, resumed if there are checkpoints. Where memory runs out, the batch is halved once
# and accumulated twice as often; then the training is refused.


logger = logging.getLogger(__name__)


def train_to_end(
    build: Callable[[Accelerator, int], Learner],
    settings: TrainingSection,
    folder: Path,
    say: Callable[[str], None],
    *,
    advice: str,
    sharding: str,
    can_halve: bool = True,
) -> tuple[Any, Outcome]:
    """Train, resuming from the last whole checkpoint; what was trained, on the CPU.

    Args:
        build: makes the learner, with the batch halved so often and accumulated as much more often.
        folder: of the checkpoints.
        say: called with progress, a line each.
        advice: what to do where memory runs out, for errors.
        sharding: what to do instead of sharding by accelerate, for errors.
        can_halve: whether half a batch is as good.
    Raises:
        TrainingError: memory runs out with half the batch too, or the loss is not finite.
        ConfigError: accelerate's config asks for shards of its own.
    """
    checkpoints.refuse_other_sharding(instead=sharding)
    size, notes = settings.batch_size, list[str]()

    def no_memory(exc: BaseException, tried: str) -> TrainingError:
        return TrainingError(f"out of memory, {tried}: {first_line(exc)}. {advice}")

    for halvings in (0, 1):
        accelerator = make_accelerator(settings)
        try:
            with ending_together(accelerator, folder, no_memory=no_memory):
                learner = build(accelerator, halvings)
                outcome = Training(learner, settings).run(resume_from=checkpoints.last_checkpoint(folder, say))
                model = learner.trained()
                learner.accelerator.free_memory()
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            if halvings or not can_halve or size < 2:
                tried = f"also with half the batch ({size // 2} rows)" if halvings else "and the batch can't be halved"
                raise no_memory(exc, tried) from exc
            notes.append(
                f"out of memory with batches of {size} rows: going on with {size // 2}, accumulating twice as many"
            )
            say(notes[-1])
            logger.warning(notes[-1])
            exc.__traceback__ = None  # its frames hold the activations that did not fit
        else:
            outcome.notes += notes
            outcome.facts = replace(
                outcome.facts,
                batch_size=size >> halvings,
                accumulation=settings.accumulation << halvings,
                was_batch_halved=halvings > 0,
            )
            return model.cpu(), outcome
        release_memory()
    raise AssertionError("the second attempt returns or raises")
