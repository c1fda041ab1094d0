"""The training loop of students and teachers: device, batches, steps, evaluations on dev, checkpoints, memory that runs
out, and stopping all ranks if one fails. What a step computes is a `Learner`'s."""

import functools
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    get_int_from_env,
    parse_flag_from_env,
    release_memory,
    send_to_device,
    set_seed,
)
from torch import Tensor, nn
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from relabel.distill.training import checkpoints
from relabel.distill.training.output import (
    RECORD_NAME,
    WEIGHTS,
    Curve,
    CurveReporter,
    Outcome,
    TrainingFacts,
    TrainingPlace,
    checkpoint_name,
    first_line,
    how_it_goes_on,
    step_of,
)
from relabel.distill.training.spec import TrainingSection
from relabel.manifests import failpoints
from relabel.manifests.errors import ConfigError, PeerLostError, SaidElsewhereError, TrainingError
from relabel.manifests.process import cpu_flags, draining, interruption, is_stop_wished
from relabel.manifests.secrets import counted

# ------------------------------------------------------------------------------
# What a training computes in.


AMX = "amx_bf16"
"""The flag of CPUs that multiply bfloat16 in tiles; `auto` does not go by `avx512_bf16` alone."""
Precision = Literal["no", "bf16", "fp16"]
"""As accelerate calls it: `no` is float32 throughout; the others are for matrix products alone, by autocast."""


def is_on_cpu(settings: TrainingSection) -> bool:
    """Whether there is no GPU, or none is wanted."""
    return settings.device == "cpu" or not torch.cuda.is_available()


def precision_of(settings: TrainingSection, flags: Set[str] | None = None) -> Precision:
    """The spec's `train.precision` on this machine.

    Args:
        flags: of the CPU, for tests.
    Raises:
        ConfigError: fp16 without a GPU.
    """
    on_cpu = is_on_cpu(settings)
    if settings.precision == "auto" and on_cpu:
        return "bf16" if AMX in (cpu_flags() if flags is None else flags) else "no"
    if settings.precision == "auto":
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    if settings.precision == "fp16" and on_cpu:  # accelerate would compute in float32 without a word
        raise ConfigError(
            "train.precision: fp16 is for GPUs, and this training has none. Take bf16 or fp32, or a machine with a GPU."
        )
    return "no" if settings.precision == "fp32" else settings.precision


PEERS_WAIT = timedelta(hours=1)
"""How long processes wait for one of them, as for the first while it asks a generator for all. One that has died breaks
their connections at once.
"""


def started_processes() -> int:
    """How many processes a launcher started; 1 without one."""
    return int(get_int_from_env(["WORLD_SIZE"], 1))


def make_accelerator(settings: TrainingSection) -> Accelerator:
    """Device, processes and precision of a training.

    Raises:
        ConfigError: fp16 without a GPU, or a machine with fewer GPUs than processes.
        SaidElsewhereError: the same; the machine's first process reports it.
    """
    own = int(get_int_from_env(["LOCAL_WORLD_SIZE"], 1))
    if not is_on_cpu(settings) and own > torch.cuda.device_count():
        if get_int_from_env(["LOCAL_RANK"], 0) > 0:
            raise SaidElsewhereError("fewer GPUs than processes")
        raise ConfigError(
            f"{own} processes on this machine, where torch finds {counted(torch.cuda.device_count(), 'GPU')}: each "
            "takes one. Start as many as there are (torchrun --nproc-per-node), and raise train.accumulation as much."
        )
    # accelerate keeps one state a process, and refuses a second training in another precision
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        mixed_precision=precision_of(settings),
        cpu=is_on_cpu(settings),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PEERS_WAIT)],
    )


# ------------------------------------------------------------------------------
# Which rows make a batch, epoch by epoch.
#
# An epoch's batches follow from (seed, epoch) alone, so that a resumed training meets the same ones, and their number
# is the same in every epoch. Batches of like length are cut from rows sorted by length within stretches of a shuffled
# epoch, so that which rows share a batch stays mostly chance; with a budget of tokens the whole epoch is one
# stretch, since batches cut elsewhere would differ in number.


STRETCH_BATCHES = 50
"""Batches of a stretch. On crowdflower's pairs, 32 rows a batch, padding falls from 47 to 4.1 % of the tokens with
titles alone, and from 31 to 1.4 % with bodies cut at 96 tokens.
"""
FEWEST_STRETCHES = 4
"""Fewer rows make shorter stretches, so that batches still differ from epoch to epoch."""


class BatchPlan:
    """The batches of all epochs, and which of them this process has in each step.

    Args:
        lengths: tokens of each row.
        rows: the row numbers to draw from.
        groups: rows of like length share a batch; always so with `tokens_per_batch`.
        accumulation: batches of an optimizer step, in each process.
        process: number of this one.
        num_processes: that share the batches in turn; the first batches are repeated to make a multiple of it.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: np.ndarray,
        *,
        seed: int,
        batch_size: int,
        tokens_per_batch: int | None = None,
        groups: bool = False,
        accumulation: int = 1,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._lengths = np.asarray(lengths, dtype=np.int64)[rows]
        self._groups = groups or tokens_per_batch is not None
        batches = min(max(1, len(rows) // (FEWEST_STRETCHES * batch_size)), STRETCH_BATCHES)
        self._stretch = len(rows) if tokens_per_batch is not None else batch_size * batches
        self._sizes = batch_sizes(
            np.sort(self._lengths)[::-1], batch_size=batch_size, tokens_per_batch=tokens_per_batch
        )
        self._accumulation = accumulation
        self._process = process
        self._num_processes = num_processes
        self._num_own = math.ceil(len(self._sizes) / num_processes)
        self.epoch_steps = math.ceil(self._num_own / accumulation)
        """Optimizer steps of an epoch; the last one may have fewer batches."""
        self._own_batches = functools.lru_cache(maxsize=1)(self._batches_of_process)

    def rows_of_step(self, step: int) -> list[list[int]]:
        """Row numbers of this process's batches in the step that follows so many."""
        epoch, step_of_epoch = divmod(step, self.epoch_steps)
        first = step_of_epoch * self._accumulation
        return self._own_batches(epoch)[first : first + self._accumulation]

    def _batches_of_process(self, epoch: int) -> list[list[int]]:
        padded = islice(cycle(self.batches(epoch)), self._num_own * self._num_processes)
        return list(padded)[self._process :: self._num_processes]

    def batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch."""
        chance = np.random.default_rng([self._seed, epoch])
        order = chance.permutation(len(self._rows))
        if self._groups:
            stretches = [order[start : start + self._stretch] for start in range(0, len(order), self._stretch)]
            # longest first; the order of equals is drawn
            order = np.concatenate(
                [stretch[np.argsort(-self._lengths[stretch], kind="stable")] for stretch in stretches]
            )
        batches = np.split(self._rows[order], np.cumsum(self._sizes)[:-1])
        numbers = chance.permutation(len(batches)) if self._groups else range(len(batches))
        return [batches[number].tolist() for number in numbers]


def plan_batches(
    lengths: Sequence[int], rows: np.ndarray, settings: TrainingSection, accelerator: Accelerator, halvings: int
) -> BatchPlan:
    """The batches of a spec's training, halved so often and accumulated as much more often."""
    return BatchPlan(
        lengths,
        rows,
        seed=settings.seed,
        batch_size=max(1, settings.batch_size >> halvings),
        tokens_per_batch=getattr(settings, "tokens_per_batch", None),  # a student's alone
        groups=settings.group_by_length,
        accumulation=settings.accumulation << halvings,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )


def batch_sizes(longest_first: np.ndarray, *, batch_size: int, tokens_per_batch: int | None) -> list[int]:
    """How many rows each batch takes of rows sorted by falling length.

    With `tokens_per_batch` as many as fit, padding included, and at least one; else `batch_size`.
    """
    sizes = []
    start = 0
    while start < len(longest_first):
        most = batch_size
        if tokens_per_batch is not None:
            most = max(1, tokens_per_batch // int(longest_first[start]))
        sizes.append(min(most, len(longest_first) - start))
        start += sizes[-1]
    return sizes


# ------------------------------------------------------------------------------
# What turns gradients into the next weights: AdamW by groups of parameters, and the schedule of its rate.


NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Parameters that weight decay leaves alone, by name; in addition to those of `nn.LayerNorm`."""


def make_optimizer(model: Any, settings: TrainingSection) -> torch.optim.AdamW:
    """AdamW over what training changes; each group has its peak rate as `initial_lr`, a student's heads their own."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NOT_DECAYED))
    rates = [settings.learning_rate]
    heads = set[int]()
    head_rate = getattr(settings, "head_learning_rate", None)
    if head_rate is not None:
        rates.append(head_rate)
        heads = {id(parameter) for parameter in model.heads.parameters()}
    groups: list[dict[str, Any]] = []
    for rate in rates:
        groups.append({"params": [], "weight_decay": settings.weight_decay, "initial_lr": rate})
        groups.append({"params": [], "weight_decay": 0.0, "initial_lr": rate})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            of_rate = 2 if id(parameter) in heads else 0
            of_decay = 0 if name in decayed else 1
            groups[of_rate + of_decay]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)


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


class Watch(Protocol):
    """Judges a training by its curve."""

    def warnings(self, curve: Curve, step: int) -> Sequence[str]:
        """What a step's figures warn of."""

    def is_suspect(self, curve: Curve) -> bool:
        """Whether the last evaluation may not be the best one."""

    def ended_by(self, curve: Curve) -> object | None:
        """What ends training after its last evaluation."""


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
    updates = 1
    """Steps on the same data; checkpoints hold all that training resumes from only after the last of them."""
    eval_every: int | None = None
    """Steps between evaluations on dev; None is once an epoch."""
    choice: Choice | None = None
    watch: Watch | None = None
    whole: Callable[[], Any] | None = None
    """Makes the model once more, where shards of it are trained; what they hold is copied into it at the end."""
    warms_up_from_0 = True
    """Whether the first step of a warm-up has rate 0; otherwise the first share, so that nothing it took is lost."""
    progress_figures: tuple[str, ...] = ("loss",)
    """Figures of a step that its line of progress shows."""

    def create_optimizer(self) -> Any:
        """Of the model's parameters, each group with its peak rate."""
        raise NotImplementedError

    def trained(self) -> Any:
        """The model once training has ended, as it will answer: in float32, and whole."""
        if not checkpoints.is_sharded(self.model):
            return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        assert self.whole is not None
        model = self.whole()
        checkpoints.copy_whole(self.model, model)
        return model

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

    def own_state(self, step: int) -> dict[str, Any]:
        """Plain values and tensors that a checkpoint keeps in addition."""
        return {}

    def load_own_state(self, held: dict[str, Any], step: int) -> None:
        """Take back what `own_state` gave."""


def prepared(accelerator: Accelerator, model: Any) -> Any:
    """The model as a step calls it. Shards reduce their own gradients: they get autocast as for evaluation, and no DDP
    around them.
    """
    is_sharded = checkpoints.is_sharded(model)
    return accelerator.prepare_model(model, device_placement=False if is_sharded else None, evaluation_mode=is_sharded)


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
        whole: makes the model once more; needed of one that is sharded.
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
        whole: Callable[[], Any] | None = None,
        dev: Callable[[Any], dict[str, float]] | None = None,
        choice: Choice | None = None,
        eval_every: int | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.place = place
        self._settings = settings
        self._plan = plan
        self._collate = collate
        self._step_loss = step_loss
        self._dev = dev
        self.choice = choice
        self.eval_every = eval_every
        self.whole = whole
        self.epoch_steps = plan.epoch_steps
        self._model = prepared(accelerator, model)

    def create_optimizer(self) -> Any:
        return make_optimizer(self.model, self._settings)

    def dev_figures(self, step: int) -> dict[str, float] | None:
        return None if self._dev is None else self._dev(self.model)

    def backward(self, step: int) -> tuple[dict[str, float], list[int]]:
        rows = self._plan.rows_of_step(step)
        epoch = step // self.epoch_steps
        batches = send_to_device(
            [self._collate(rows_of_batch, epoch) for rows_of_batch in rows], self.accelerator.device
        )
        # over the whole step: the loss is the mean over its rows, and not a mean of means
        totals_P = self.accelerator.reduce(torch.stack([self._step_loss.amounts(batch) for batch in batches]).sum(0))
        self._model.train()
        names: list[str] = []
        shares_by_batch = []
        for batch in batches:
            # gradients travel with the last batch
            with nullcontext() if batch is batches[-1] else self.accelerator.no_sync(self._model):
                shares = self._step_loss.shares(self._model, batch, totals_P)
                # processes average their gradients, so each one's share is multiplied by their number
                self.accelerator.backward(shares["loss"] * self.accelerator.num_processes)
                names = list(shares)
                shares_by_batch.append(torch.stack([share.detach() for share in shares.values()]))
        figures: dict[str, float] = {}
        # one wait for the device
        values_by_batch = self.accelerator.reduce(torch.stack(shares_by_batch)).tolist()
        for rows_of_batch, values in zip(rows, values_by_batch, strict=True):
            if not math.isfinite(values[0]):
                listed = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, values, strict=True))
                raise self.place.not_finite(f"the loss is not finite ({listed})", rows_of_batch, step=step + 1)
            for name, value in zip(names, values, strict=True):
                if math.isfinite(value):  # 0/0: no row of this step has the label
                    figures[name] = figures.get(name, 0.0) + value
        return figures, list(chain.from_iterable(rows))


# ------------------------------------------------------------------------------
# The loop, from the first step to the last.
#
# accelerate has the devices: DDP, autocast, the scaler of fp16. When dev is evaluated, when training ends and how a
# checkpoint is written is decided here.


STOPPING = "\nStopping after this step, with a checkpoint. Ctrl-C again stops now.\n"


class Training:
    """One training.

    Args:
        halvings: how often the batch was halved because memory ran out.
    """

    def __init__(self, learner: Learner, settings: TrainingSection, halvings: int = 0) -> None:
        self.learner = learner
        self.accelerator = learner.accelerator
        self._settings = settings
        self._place = learner.place
        self._halvings = halvings
        self.last_step = settings.max_steps or math.ceil(settings.epochs * learner.epoch_steps)
        self.step = 0
        self.curve = Curve()
        self.best_step: int | None = None
        self.stopped_by: str | None = None
        self._rows_seen = 0
        self._seconds = 0.0
        optimizer = learner.create_optimizer()
        name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
        self._warmup_steps = math.ceil(self.last_step * settings.warmup)
        schedule = get_scheduler(name, optimizer, self._warmup_steps, self.last_step)
        self._scheduled: Callable[[int], float] = schedule.lr_lambdas[0]
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self._reporter = CurveReporter(
            settings.report_to if self.accelerator.is_main_process else (), self._place.folder, self._place.report
        )

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
            with draining(STOPPING if self.accelerator.is_main_process else ""):
                self._train()
            self._reporter.send(self.curve)
        finally:
            self._reporter.finish()
        if self.best_step is not None:
            best = self._place.folder / checkpoint_name(self.best_step)
            checkpoints.check_digests(best)
            checkpoints.load_weights(self.learner.model, best / WEIGHTS)
            self.accelerator.wait_for_everyone()  # the first process removes it soon
        return Outcome(
            TrainingFacts(
                steps=self.step,
                epochs=round(self.step / self.learner.epoch_steps, 4),
                best_step=self.best_step,
                stopped_by=self.stopped_by,
                device=str(self.accelerator.device),
                rows_per_s=round(self._rows_seen / self._seconds, 2) if self._seconds else None,
                batch_size=self._settings.batch_size >> self._halvings,
                accumulation=self._settings.accumulation << self._halvings,
                was_batch_halved=self._halvings > 0,
            ),
            self.curve,
        )

    def _train(self) -> None:
        is_over = self._is_done
        is_stopped = False
        while not is_over:
            self._take_step()
            if self.step == self.last_step or self._is_due(self.learner.eval_every):
                self._evaluate()
            # a signal to any of the processes stops all of them after the same step
            wished = torch.tensor(is_stop_wished(), dtype=torch.float32, device=self.accelerator.device)
            is_stopped = bool(self.accelerator.reduce(wished)) and self.step % self.learner.updates == 0
            is_over = self._is_done or is_stopped
            if is_over or self.best_step == self.step or self._is_due(self._settings.save_every):
                self._save()
        # the first process may still be writing, and a launcher stops all where one has ended
        self.accelerator.wait_for_everyone()
        if is_stopped:
            raise interruption()

    @property
    def _is_done(self) -> bool:
        return self.step >= self.last_step or self.stopped_by is not None

    def _is_due(self, every: int | None) -> bool:
        """Whether something is due after this step: once in so many, or once an epoch."""
        return self.step % (every or self.learner.epoch_steps) == 0

    def _rate_share(self, step: int) -> float:
        """Of the peak rate, for the step that follows so many."""
        if step < self._warmup_steps and not self.learner.warms_up_from_0:
            return (step + 1) / self._warmup_steps
        return self._scheduled(step)

    def _take_step(self) -> None:
        """
        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are as they were.
        """
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self._rate_share(self.step)
        figures, rows = self.learner.backward(self.step)
        # the norm before it is clipped; one that is not finite is for fp16's scaler to leave out
        most = self._settings.max_grad_norm or math.inf
        norm = float(self.accelerator.clip_grad_norm_(self.learner.model.parameters(), most))
        if self.accelerator.scaler is None and not math.isfinite(norm):
            what = f"the gradient is not finite (norm {norm:.4g}), though the loss is"
            raise self._place.not_finite(what, rows, step=self.step + 1)
        figures["grad_norm"] = norm
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
        self._place.report(", ".join([f"step {self.step} of {self.last_step}", *shown]))
        if self.learner.watch is not None:
            for warning in self.learner.watch.warnings(self.curve, self.step):
                self._place.report(warning)
        self._reporter.send(self.curve)
        failpoints.hit("after_training_step")

    def _evaluate(self) -> None:
        """Figures on dev, noted in the curve."""
        self.learner.model.eval()
        own = self.learner.dev_figures(self.step)
        if own is None:
            return
        # the first process's: all of them must stop at the same step, however their devices round
        (figures,) = broadcast_object_list([own])
        self.curve.add(self.step, "dev", figures)
        self._reporter.send(self.curve)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self._place.report(f"step {self.step}, dev: {shown}")
        self._judge_evaluations()

    def _judge_evaluations(self) -> None:
        """The first of the best evaluations, and whether it is time to end, where there is a choice."""
        choice = self.learner.choice
        watch = self.learner.watch
        points = [] if choice is None else self.curve.series("dev", choice.figure)
        if choice is None or not points:
            return
        best: float | None = None
        for step, value in points:
            is_better = best is None or choice.sign * value > best
            if is_better and (best is None or watch is None or not watch.is_suspect(self.curve.until(step))):
                self.best_step = step
                best = choice.sign * value
        if watch is not None and watch.ended_by(self.curve) is not None:
            self.stopped_by = "watch"
            self._place.report("ended by watch: stopping")
        elif choice.patience is not None and sum(step > (self.best_step or 0) for step, _ in points) >= choice.patience:
            self.stopped_by = "early_stopping"
            self._place.report(f"no better dev {choice.figure} for {choice.patience} evaluations: stopping")

    def _save(self) -> None:
        is_writer = self.accelerator.is_main_process
        if not is_writer and not checkpoints.is_sharded(self.learner.model):
            return
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.accelerator.scaler and self.accelerator.scaler.state_dict(),
            "curve": self.curve.points,
            "own": self.learner.own_state(self.step),
            "random": checkpoints.random_states(),
        }
        checkpoints.write_checkpoint(
            self._place,
            self.step,
            self.learner.model,
            state,
            is_writer=is_writer,
            best=self.best_step,
        )

    def _resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ManifestError: it is damaged, or of another model.
        """
        state = checkpoints.load_state(checkpoint)
        self.step = step_of(checkpoint)
        self.curve.points = [(step, split, name, value) for step, split, name, value in state["curve"]]
        self._judge_evaluations()
        checkpoints.load_weights(self.learner.model, checkpoint / WEIGHTS)
        self.optimizer.load_state_dict(checkpoints.cut_moments(state["optimizer"], self.optimizer))
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.learner.load_own_state(state["own"], self.step)
        checkpoints.restore_random(state["random"])


# ------------------------------------------------------------------------------
# A training from its data to its end, resumed if there are checkpoints. Where memory runs out, the batch is halved once
# and accumulated twice as often; then the training is refused. If one rank fails, all ranks stop, and one of them
# reports why.


def train_to_end(
    build: Callable[[Accelerator, int], Learner],
    settings: TrainingSection,
    folder: Path,
    report: Callable[[str], None],
    *,
    identity: str,
    advice: str,
    can_halve: bool = True,
) -> tuple[Any, Outcome]:
    """Train, resuming from the last whole checkpoint; what was trained, on the CPU.

    Args:
        build: makes the learner, with the batch halved so often and accumulated as much more often.
        folder: of the checkpoints.
        report: called with progress, a line each.
        identity: what is trained, of what data; the same in all processes.
        advice: what to do where memory runs out, for errors.
        can_halve: whether half a batch is as good.
    Raises:
        TrainingError: memory runs out with half the batch too, or the loss is not finite.
        ConfigError: accelerate's config asks for shards of its own, or processes were not started alike.
    """
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # on a CPU left out without a word
        if parse_flag_from_env(variable):
            raise ConfigError(
                f"accelerate's config sets {variable}, whose checkpoints are pickle. Set it to plain multi-GPU, and "
                "`train.strategy: fsdp`."
            )
    if started_processes() > 1:
        report(f"waiting for all {started_processes()} processes")
    size = settings.batch_size
    notes = list[str]()
    halvings = 0
    while True:
        accelerator = make_accelerator(settings)
        try:
            with ending_together(accelerator, folder):
                check_together(accelerator, folder, identity)
                learner = build(accelerator, halvings)
                outcome = Training(learner, settings, halvings).run(
                    resume_from=checkpoints.last_checkpoint(folder, report)
                )
                model = learner.trained()
                learner.accelerator.free_memory()
            outcome.notes += notes
            return model.cpu(), outcome
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            tried = f", also with half the batch ({size // 2} rows)" if halvings else ""
            if accelerator.num_processes > 1:
                tried += f", in process {accelerator.process_index + 1} of {accelerator.num_processes}"
            if tried or not can_halve or size < 2:
                raise TrainingError(f"out of memory{tried}: {first_line(exc)}. {advice}") from exc
            notes.append(
                f"out of memory with batches of {size} rows: going on with {size // 2}, accumulating twice as many"
            )
            report(notes[-1])
            exc.__traceback__ = None  # its frames hold the activations that did not fit
        halvings = 1
        release_memory()


_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
_LOST_WORDS = ("closed by peer", "reset by peer", "closed by remote peer", "broken pipe", "remote process exit")
"""Words of gloo and NCCL where a process at the other end is gone."""


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        return True
    return any(word in str(exc).lower() for word in _MEMORY_WORDS)


@contextmanager
def ending_together(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """If one of several processes ends, the others block until its connections break or the launcher stops them. Where
    memory ran out in one of them, only that is reported; else the first that has an error reports it. A single process
    passes everything on.

    Args:
        folder: of the checkpoints, which all processes see.
    Raises:
        PeerLostError: another process ended, and none has reported it.
        SaidElsewhereError: one has.
    """
    if accelerator.num_processes == 1:
        yield
        return
    mark = folder / "ended"
    if accelerator.is_main_process:
        mark.unlink(missing_ok=True)
    accelerator.wait_for_everyone()  # the first process has claimed the output
    try:
        yield
    except (Exception, KeyboardInterrupt) as exc:
        if is_out_of_memory(exc) and _is_first(mark):
            raise
        is_lost = isinstance(exc, RuntimeError) and any(word in str(exc).lower() for word in _LOST_WORDS)
        if is_lost and _is_first(mark):
            raise PeerLostError(
                f"another of the {accelerator.num_processes} processes that train together ended: it says why, or was "
                f"killed (process {accelerator.process_index + 1} met: {first_line(exc)}). {how_it_goes_on(folder)}"
            ) from exc
        if mark.exists():
            raise SaidElsewhereError(f"another process ended: {mark}") from exc
        raise


def check_together(accelerator: Accelerator, folder: Path, identity: str) -> None:
    """All processes train the same, in one folder.

    Args:
        folder: of the checkpoints. One that no training claims, as a probe's, is each process's own.
    Raises:
        ConfigError: one of them was started otherwise, or does not see what the first one writes.
        SaidElsewhereError: the same; the first process reports it.
    """
    if accelerator.num_processes == 1:
        return
    is_claimed = (folder / RECORD_NAME).exists()
    # a name that nobody has looked for before: network file systems remember which files were not there
    is_claimed, token = broadcast_object_list([is_claimed, uuid.uuid4().hex])
    mark = folder / f".part-seen-{token}"
    if is_claimed and accelerator.is_main_process:
        mark.mkdir()
    accelerator.wait_for_everyone()
    starts = gather_object([(identity, mark.exists() or not is_claimed)])
    if is_claimed and accelerator.is_main_process:
        mark.rmdir()
    fault = None
    for number, (other, is_seen) in enumerate(starts, start=1):
        if other != starts[0][0]:
            fault = (
                f"process {number} of {len(starts)} was started with another spec than the first, or reads other data. "
                "Start all by the same command, with the same files."
            )
        elif not is_seen:
            fault = (
                f"process {number} of {len(starts)} does not see what the first one writes to {folder}. Put `output` "
                "on storage that all machines have."
            )
    if fault is not None:
        raise ConfigError(fault) if accelerator.is_main_process else SaidElsewhereError(fault)


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
