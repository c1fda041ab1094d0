"""The training loop of encoder and decoder students: batches, checkpoints, resume, and a smaller batch when memory runs
out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, send_to_device, set_seed

from relabel.distill.students.bases import TrainingInputs, build_module
from relabel.distill.students.examples import DEV, TRAIN, Examples
from relabel.distill.students.losses import Objective, make_optimizer, rate_share
from relabel.distill.students.model import PAD_MULTIPLE, PairTexts, TokenRow, pad_multiple_for
from relabel.distill.students.spec import DistillSpec, EarlyStopping, TrainSection
from relabel.distill.training import checkpoints
from relabel.distill.training.checkpoints import StepState, write_checkpoint
from relabel.distill.training.curves import Curve, CurveReporter, Outcome, TrainingFacts
from relabel.distill.training.output import WEIGHTS, TrainingPlace, step_of
from relabel.distill.training.runtime import BatchPlan, ending_together, halving, make_accelerator
from relabel.manifests import failpoints
from relabel.manifests.errors import TrainingError
from relabel.manifests.process import draining, interruption, is_stop_wished

# ------------------------------------------------------------------------------
# What a batch of a student's training holds.


# B rows of a batch, K grades


class Collator:
    """Row numbers become a batch of tensors.

    A batch is `{"tokens": …, "targets": {head: [B, K]}, "weights": {head: [B]}, "row_weight": [B], "rows": int64 [B]}`.

    Args:
        pad_multiple: widths are rounded up to it, see `pad_multiple_for`.
    """

    def __init__(
        self, examples: Examples, tokens: Sequence[TokenRow], texts: PairTexts, *, pad_multiple: int = PAD_MULTIPLE
    ) -> None:
        self._pad_multiple = pad_multiple
        self._tokens = tokens
        self._texts = texts
        self._targets = {name: torch.from_numpy(values) for name, values in examples.targets.items()}
        self._weights = {name: torch.from_numpy(values) for name, values in examples.weights.items()}
        self._row_weight = torch.from_numpy(examples.row_weight)

    def __call__(self, rows: Sequence[int]) -> dict[str, Any]:
        """The batch of these rows, in their order."""
        index = torch.tensor(list(rows))
        return {
            "tokens": self._texts.collate([self._tokens[row] for row in rows], pad_multiple=self._pad_multiple),
            "targets": {name: values[index] for name, values in self._targets.items()},
            "weights": {name: values[index] for name, values in self._weights.items()},
            "row_weight": self._row_weight[index],
            "rows": index,
        }


# ------------------------------------------------------------------------------
# What a student's training consumes, step by step.


@dataclass
class Feed:
    """Batches of one of the processes that train, and the evaluation on dev.

    Args:
        plan: the batches of all processes.
        collator: row numbers to tensors.
        dev_figures: figures of the module on dev, by name; None without a dev split.
        accumulation: batches of an optimizer step, in each process.
        process: number of this one.
        num_processes: that share the batches in turn.
    """

    plan: BatchPlan
    collator: Collator
    dev_figures: Callable[[Any], dict[str, float]] | None
    accumulation: int
    process: int = 0
    num_processes: int = 1

    @property
    def num_batches(self) -> int:
        """Of an epoch, in each process."""
        return len(self.plan) // self.num_processes

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps of an epoch; the last one may have fewer batches."""
        return math.ceil(self.num_batches / self.accumulation)

    def epochs_at(self, step: int) -> float:
        """Passes over the rows that so many steps make."""
        whole, rest = divmod(step, self.epoch_steps)
        return whole + rest * self.accumulation / self.num_batches

    def rows_of_steps(self, first: int, last: int) -> Iterator[list[list[int]]]:
        """Row numbers of this process's batches in each step, from after the first to the last."""
        for step in range(first, last):
            epoch, place = divmod(step, self.epoch_steps)
            if step == first or place == 0:
                self.plan.set_epoch(epoch)
                own = list(self.plan)[self.process :: self.num_processes]
            yield own[place * self.accumulation : (place + 1) * self.accumulation]


# ------------------------------------------------------------------------------
# The training loop of students, from the first batch to the last step.
#
# accelerate has the devices: DDP, autocast, the scaler of fp16. Which rows make a batch, what is minimised, when dev is
# evaluated and how a checkpoint is written is decided here. What a step does follows from its number, the seed and what
# the checkpoint before it holds, so that a training resumed at any step equals one that nothing stopped.


EARLY_STOPPING = "early_stopping"
METRIC_KEYS = {"macro_f1": "f1_macro"}
"""Spec's name of a dev metric → the figure's own."""


class StudentTraining:
    """One training.

    Args:
        module: a student's, sharded or not; trained in place.
        place: where checkpoints lie.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: Any,
        objective: Objective,
        feed: Feed,
        settings: TrainSection,
        place: TrainingPlace,
    ) -> None:
        self.accelerator, self.module = accelerator, module
        self._feed, self._settings, self._place = feed, settings, place
        self.last_step = settings.max_steps or math.ceil(settings.epochs * feed.epoch_steps)
        self.step = 0
        self.curve = Curve()
        self.best_step: int | None = None
        self.stopped_by: str | None = None
        self._rows_seen, self._seconds = 0, 0.0
        self._objective = objective
        # shards reduce their own gradients: they get autocast as for evaluation, and no DDP around them
        is_sharded = checkpoints.is_sharded(module)
        self._model = accelerator.prepare_model(
            module, device_placement=False if is_sharded else None, evaluation_mode=is_sharded
        )
        self.optimizer = accelerator.prepare_optimizer(make_optimizer(module, settings))
        is_first = accelerator.is_main_process
        self._reporter = CurveReporter(place.report_to if is_first else (), place.folder, place.say)

    def run(self, *, resume_from: Path | None = None) -> Outcome:
        """Train to the last step, or until dev gets no better; then put back the best step where early stopping chose
        one.

        Raises:
            TrainingError: a loss, a gradient or a weight is not finite.
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
        eval_every, every_save = self._settings.eval_every, self._settings.save_every
        is_over, is_stopped = self._is_done, False
        upcoming = self._feed.rows_of_steps(self.step, self.last_step)
        while not is_over:
            self._take_step(next(upcoming))
            if self.step == self.last_step or self._is_due(eval_every):
                self._evaluate()
            # a signal to any of the processes stops all of them after the same step
            wished = torch.tensor(is_stop_wished(), dtype=torch.float32, device=self.accelerator.device)
            is_stopped = bool(self.accelerator.reduce(wished))
            is_over = self._is_done or is_stopped
            if is_over or self.best_step == self.step or self._is_due(every_save):
                self._save()
        # the first process may still be writing, and a launcher stops all where one has ended
        self.accelerator.wait_for_everyone()
        if is_stopped:
            raise interruption()

    def _is_due(self, every: int | None) -> bool:
        """Whether something is due after this step: once in so many, or once an epoch."""
        return self.step % (every or self._feed.epoch_steps) == 0

    def _take_step(self, rows: Sequence[Sequence[int]]) -> None:
        """Train on the batches that this process has in one step.

        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are as they were.
        """
        began = time.perf_counter()
        share = rate_share(self._settings, self.step, self.last_step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        batches = send_to_device([self._feed.collator(one) for one in rows], self.accelerator.device)
        figures = self._backward(batches) | {"grad_norm": self._clipped(batches)}
        self.optimizer.step()
        self.optimizer.zero_grad()
        figures["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        self.step += 1
        self._seconds += time.perf_counter() - began
        self._rows_seen += sum(map(len, rows))
        self.curve.add(self.step, "train", figures)
        self._place.say(f"step {self.step} of {self.last_step}, loss {figures['loss']:.4f}")
        self._reporter.send(self.curve)
        failpoints.hit("after_training_step")

    def _backward(self, batches: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Gradients of the loss over all batches and processes; that loss and its parts."""
        # Σ w by part over the whole step: the loss is the mean over its rows, and not a mean of means
        weights = [self._objective.row_weights(batch) for batch in batches]
        sums = torch.stack([sum(one[name].sum() for one in weights) for name in self._objective.weights])
        totals = dict(zip(self._objective.weights, self.accelerator.reduce(sums), strict=True))
        self._model.train()
        shares = []
        for batch in batches:
            # gradients travel with the last batch
            with nullcontext() if batch is batches[-1] else self.accelerator.no_sync(self._model):
                own = self._objective.sums(self._model(**batch["tokens"]), batch)
                loss = self._objective.loss(own, totals)
                # processes average their gradients, so each one's share is multiplied by their number
                self.accelerator.backward(loss * self.accelerator.num_processes)
                shares.append(torch.stack([loss.detach(), *(own[name].detach() / totals[name] for name in own)]))
        found: dict[str, float] = {}
        names = ("loss", *self._objective.weights)
        # one wait for the device
        for batch, values in zip(batches, self.accelerator.reduce(torch.stack(shares)).tolist(), strict=True):
            if not math.isfinite(values[0]):
                listed = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, values, strict=True))
                what = f"the loss is not finite ({listed})"
                raise self._place.not_finite(what, batch["rows"].tolist(), step=self.step + 1)
            for name, value in zip(names, values, strict=True):
                if math.isfinite(value):  # 0/0: no row of this step has the label
                    found[name] = found.get(name, 0.0) + value
        return found

    def _clipped(self, batches: Sequence[dict[str, Any]]) -> float:
        """The gradient's norm before it is clipped; one that is not finite is for fp16's scaler to leave out."""
        max_norm = self._settings.max_grad_norm or math.inf
        norm = float(self.accelerator.clip_grad_norm_(self._model.parameters(), max_norm))
        if self.accelerator.scaler is None and not math.isfinite(norm):
            rows = torch.cat([batch["rows"] for batch in batches]).tolist()
            what = f"the gradient is not finite (norm {norm:.4g}), though the loss is"
            raise self._place.not_finite(what, rows, step=self.step + 1)
        return norm

    def _evaluate(self) -> None:
        """Figures on dev, noted in the curve."""
        if self._feed.dev_figures is None:
            return
        self.module.eval()
        # the first process's: all of them must stop at the same step, however their devices round
        (found,) = broadcast_object_list([self._feed.dev_figures(self.module)])
        self.curve.add(self.step, "dev", found)
        self._reporter.send(self.curve)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self._place.say(f"step {self.step}, dev: {shown}")
        self._judge_evaluations()

    def _judge_evaluations(self) -> None:
        """The first of the best evaluations, and whether too many came after it, where there is early stopping."""
        stopping = self._settings.early_stopping
        points = [] if stopping is None else self.curve.series("dev", metric_key(stopping))
        if stopping is None or not points:
            return
        sign = -1.0 if stopping.metric == "loss" else 1.0
        self.best_step, _ = max(points, key=lambda point: sign * point[1])
        if sum(step > self.best_step for step, _ in points) >= stopping.patience:
            self.stopped_by = EARLY_STOPPING
            self._place.say(f"no better dev {metric_key(stopping)} for {stopping.patience} evaluations: stopping")

    @property
    def _is_done(self) -> bool:
        return self.step >= self.last_step or self.stopped_by is not None

    def _save(self) -> None:
        is_writer = self.accelerator.is_main_process
        if not is_writer and not checkpoints.is_sharded(self.module):
            return
        scaler = self.accelerator.scaler
        state = StepState(
            optimizer=checkpoints.whole_moments(self.optimizer.state_dict(), keep=is_writer),
            scaler=None if scaler is None else scaler.state_dict(),
            curve=self.curve.points,
        )
        write_checkpoint(self._place, self.step, self.module, state, is_writer=is_writer, best=self.best_step)

    def _resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ManifestError: it is damaged, or of another model.
        """
        held = StepState.load(checkpoint)
        self.step = step_of(checkpoint)
        self.curve.points = held.curve
        self._judge_evaluations()
        checkpoints.load_weights(self.module, checkpoint / WEIGHTS)
        self.optimizer.load_state_dict(checkpoints.cut_moments(held.optimizer, self.optimizer))
        if self.accelerator.scaler is not None and held.scaler is not None:
            self.accelerator.scaler.load_state_dict(held.scaler)
        checkpoints.restore_random(held.random)

    def _outcome(self) -> Outcome:
        if self.best_step is not None:
            best = checkpoints.best_checkpoint(self._place.folder, self.best_step)
            checkpoints.load_weights(self.module, best / WEIGHTS)
            self.accelerator.wait_for_everyone()  # the first process removes it soon
        facts = TrainingFacts(
            steps=self.step,
            epochs=round(self._feed.epochs_at(self.step), 4),
            best_step=self.best_step,
            stopped_by=self.stopped_by,
            device=str(self.accelerator.device),
            rows_per_s=round(self._rows_seen / self._seconds, 2) if self._seconds else None,
        )
        return Outcome(facts, self.curve)


def metric_key(stopping: EarlyStopping) -> str:
    """The figure that early stopping uses."""
    return METRIC_KEYS.get(stopping.metric, stopping.metric)


# ------------------------------------------------------------------------------
# One training, module to trained module: batches planned, layers compiled, checkpoints resumed, the batch halved once
# if memory runs out.


def train_student(inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]) -> tuple[Any, Outcome]:
    """Train, resuming from the last whole checkpoint; a `Trainer`.

    Raises:
        TrainingError: the loss is not finite, or memory runs out at half the batch too.
        ConfigError: accelerate's config asks for shards of its own.
    """
    checkpoints.refuse_other_sharding(
        instead="Set it to plain multi-GPU, and `train.strategy: fsdp` in the spec: weights, gradients and optimizer "
        "are then sharded over the same processes."
    )
    spec = inputs.spec
    has_dev = len(inputs.examples.rows_of(DEV)) > 0
    (module, outcome, plan), notes = halving(
        lambda halvings: _attempt(inputs, dev_figures if has_dev else None, halvings=halvings),
        batch_size=spec.train.batch_size if spec.train.tokens_per_batch is None else None,
        say=inputs.say,
        refusal=lambda words: _no_memory(
            spec, words, f"also with half the batch ({max(1, spec.train.batch_size // 2)} rows)"
        ),
    )
    settings, halvings = spec.train, len(notes)
    outcome.notes += notes
    outcome.facts = replace(
        outcome.facts,
        batch_size=settings.batch_size >> halvings if settings.tokens_per_batch is None else None,
        tokens_per_batch=settings.tokens_per_batch,
        accumulation=settings.accumulation << halvings,
        was_batch_halved=halvings > 0,
        padding_share=round(plan.padding_share(), 4),
    )
    return module.cpu(), outcome


def _attempt(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]] | None, *, halvings: int
) -> tuple[Any, Outcome, BatchPlan]:
    spec, folder = inputs.spec, inputs.checkpoints
    settings, accelerator = spec.train, make_accelerator(spec.train)
    with ending_together(accelerator, folder, refusal=lambda words, who: _no_memory(spec, words, who)):
        module = build_module(spec, inputs.base, inputs.record)
        if settings.gradient_checkpointing:
            module.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.strategy == "fsdp" and accelerator.num_processes > 1:
            checkpoints.shard(module, accelerator.device)
        is_compiled = settings.compile == "on" or (settings.compile == "auto" and accelerator.device.type == "cuda")
        feed = _feed(inputs, dev_figures, accelerator, halvings=halvings, is_compiled=is_compiled)
        objective = Objective(spec.loss, inputs.examples.heads, inputs.examples.phi)
        place = TrainingPlace(
            folder, settings.keep_checkpoints, inputs.say, inputs.examples.names, settings.report_to, spec.name
        )
        training = StudentTraining(accelerator, module, objective, feed, settings, place)
        if is_compiled:
            compile_layers(module, max_tokens=settings.max_tokens)
        outcome = training.run(resume_from=checkpoints.last_checkpoint(folder, inputs.say))
        trained = accelerator.unwrap_model(module, keep_fp32_wrapper=False)  # judged as it will answer: in float32
        if checkpoints.is_sharded(module):
            trained = build_module(spec, inputs.base, inputs.record)
            checkpoints.copy_trained(module, trained)
        accelerator.free_memory()
    return trained, outcome, feed.plan


def _feed(
    inputs: TrainingInputs,
    dev_figures: Callable[[Any], dict[str, float]] | None,
    accelerator: Accelerator,
    *,
    halvings: int,
    is_compiled: bool,
) -> Feed:
    """Batches of this training, halved so often and accumulated as much more often."""
    spec, examples = inputs.spec, inputs.examples
    settings = spec.train
    plan = BatchPlan(
        [len(row.ids) for row in inputs.tokens],
        examples.rows_of(TRAIN),
        seed=settings.seed,
        batch_size=max(1, settings.batch_size >> halvings),
        tokens_per_batch=settings.tokens_per_batch,
        groups=settings.group_by_length,
        num_shards=accelerator.num_processes,
    )
    pad_multiple = PAD_MULTIPLE if is_compiled else pad_multiple_for(accelerator.device)
    collator = Collator(examples, inputs.tokens, inputs.texts, pad_multiple=pad_multiple)
    accumulation = settings.accumulation << halvings
    return Feed(plan, collator, dev_figures, accumulation, accelerator.process_index, accelerator.num_processes)


def compile_layers(module: Any, *, max_tokens: int) -> None:
    """Compile the transformer's layers one by one, each shape apart.

    Measured for BERT-base training at 256 tokens on an H200: 2,697 rows/s against 2,108 eager; compiling the whole
    model was slower than eager. Padding to a multiple of 8 leaves max_tokens / 8 widths, so torch's limit of 8
    recompilations is raised.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * max_tokens // PAD_MULTIPLE + 8)
    for layer in module.layers:
        layer.compile(dynamic=False)


def _no_memory(spec: DistillSpec, words: str, tried: str) -> TrainingError:
    if spec.train.tokens_per_batch is not None:
        return TrainingError(
            f"out of memory with batches of {spec.train.tokens_per_batch} tokens: {words}. Lower "
            "train.tokens_per_batch."
        )
    return TrainingError(
        f"out of memory, {tried}: {words}. Lower train.batch_size or train.max_tokens, or set "
        "train.gradient_checkpointing: true."
    )
