"""How a teacher is trained, whatever the method: the model that it starts from, transformers' Trainer with a curve,
checkpoints of our own and a stop at the first non-finite value, and half the batch where memory runs out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer, TrainerState
from transformers.trainer_callback import PrinterCallback, TrainerControl

from relabel.distill.teachers.manifest import TeacherData
from relabel.distill.teachers.spec import TeacherSpec
from relabel.distill.training import checkpoints
from relabel.distill.training.checkpoints import StepState, write_checkpoint
from relabel.distill.training.curves import Curve, CurveReporter, Outcome, TrainingFacts
from relabel.distill.training.output import WEIGHTS, TrainingPlace, checkpoint_name, damaged, open_to_readers
from relabel.distill.training.runtime import halving, is_on_cpu, precision_of
from relabel.distill.training.spec import TrainingSection, adapted, check_targets, open_base
from relabel.labelers.engines.checkpoints import end_ids, load_tokenizer
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests import failpoints
from relabel.manifests.errors import ConfigError, ModelError, TrainingError
from relabel.manifests.models import ResolvedModel, read_weights
from relabel.manifests.process import draining, is_stop_wished, require, usable_cores
from relabel.manifests.records import LEFT_OUT, fault_of

# ------------------------------------------------------------------------------
# The model that a teacher starts from: checked before the data is read, loaded when training begins.


@dataclass
class TeacherBase:
    """A model that was checked.

    Args:
        encoder: makes prompts into tokens as the engines do.
        end_id: the token that ends an answer.
        context: longest sequence that it can read, in tokens.
    """

    resolved: ResolvedModel
    config: Any
    tokenizer: Any
    encoder: PromptEncoder
    end_id: int
    context: int


def check_teacher_base(spec: TeacherSpec, resolved: ResolvedModel) -> TeacherBase:
    """Check config, tokenizer, and the headers of its weights' files.

    Raises:
        ModelError: it is no causal language model, has no fast tokenizer, or its weights are not those of its config.
        ConfigError: `train.max_tokens` is over its limit, `lora.targets` names layers that it does not have, or it
            can't have `train.gradient_checkpointing`.
        MissingExtraError: a package is absent.
    """
    library, config = open_base(resolved.path, f"`init` {resolved.reference!r}", extra="train", purpose="relabel train")
    if spec.lora is not None:
        require("peft", extra="train", purpose="lora")
    known = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_masked = config.model_type in library.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.model_type not in known or is_masked:
        raise ModelError(
            f"`init` {resolved.reference!r}: a {config.model_type} writes no answers; want a causal language model."
        )
    named_ends(resolved)
    hollow = _read_model(resolved, device="meta")
    if spec.lora is not None:
        check_targets(hollow, spec.lora, key="lora")
    if spec.train.gradient_checkpointing:
        _checkpoint_gradients(hollow)
    tokenizer = load_tokenizer(library, resolved)
    context = int(getattr(config.get_text_config(), "max_position_embeddings", None) or spec.train.max_tokens)
    if spec.train.max_tokens > context:
        raise ConfigError(
            f"train.max_tokens is {spec.train.max_tokens}; model {resolved.reference!r} reads at most {context} "
            "tokens. Lower it."
        )
    encoder = PromptEncoder(tokenizer, chat_template_kwargs=spec.chat_template_kwargs)
    own = tokenizer.eos_token_id
    end_id = own if own is not None else end_ids(getattr(config, "eos_token_id", None), tokenizer)[0]
    return TeacherBase(resolved, config, tokenizer, encoder, end_id, context)


def named_ends(resolved: ResolvedModel) -> int | list[int] | None:
    """Tokens that end an answer, as the model's generation_config.json has them, if it does.

    Raises:
        ModelError: the file is damaged.
    """
    file = resolved.path / "generation_config.json"
    try:
        held = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        named: int | list[int] | None = held.get("eos_token_id")
    except (OSError, ValueError, AttributeError) as exc:
        raise ModelError(f"`init` {resolved.reference!r}: {file} can't be read ({fault_of(exc)}).") from exc
    return named


def load_model(spec: TeacherSpec, base: TeacherBase) -> Any:
    """The model to train, in float32; in peft's wrapper where the spec has `lora`.

    Raises:
        ModelError: its weights can't be loaded, or contain NaN or Inf.
    """
    reference = base.resolved.reference
    model = _read_model(base.resolved)
    if bad := [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]:
        raise ModelError(f"`init` {reference!r}: tensor {bad[0]} contains NaN or Inf.")
    if spec.train.gradient_checkpointing:
        _checkpoint_gradients(model)
    if spec.lora is None:
        return model
    return adapted(model, spec.lora, seed=spec.train.seed, key="lora", extra="train")


def _read_model(resolved: ResolvedModel, *, device: str | None = None) -> Any:
    """The model in float32. On the device `meta` it has shapes alone: the headers of its files are read, no tensor.

    Raises:
        ModelError: its weights can't be loaded, or are not those of its config.
    """
    from transformers import AutoModelForCausalLM

    where = f"`init` {resolved.reference!r}"
    return read_weights(AutoModelForCausalLM, resolved.path, where, device=device, dtype=torch.float32)


def _checkpoint_gradients(model: Any) -> None:
    """
    Raises:
        ConfigError: the model's architecture can't.
    """
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    except (ValueError, NotImplementedError) as exc:
        raise ConfigError(
            f"train.gradient_checkpointing: a {model.config.model_type} can't drop its activations. Leave it "
            "out; where memory is short, lower train.batch_size and raise train.accumulation as much."
        ) from exc


def merged(model: Any) -> Any:
    """The model without peft's wrapper, its adapters merged into the weights; on the CPU."""
    merge = getattr(model, "merge_and_unload", None)
    return (model if merge is None else merge()).cpu().eval()


def write_model(folder: Path, model: Any, base: TeacherBase) -> None:
    """Write a directory that `engine.model` takes: weights as safetensors, config, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    base.tokenizer.save_pretrained(folder)
    if hasattr(base.config, "use_cache"):  # a Trainer turns it off, and other libraries would write answers without
        model.config.use_cache = base.config.use_cache
    model.save_pretrained(folder)
    open_to_readers(folder)


# ------------------------------------------------------------------------------
# What trains a teacher, whatever the method: what it is given, and what it gives back.


class Trained(NamedTuple):
    """What training left.

    Args:
        model: the causal language model of transformers, adapters merged, on the CPU.
        write_more: writes further files of the method into the teacher's folder.
    """

    model: Any
    outcome: Outcome
    write_more: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class TrainingEstimate:
    """What a training would do.

    Args:
        tokens: that the model reads, over all steps.
        eval_tokens: read and written in evaluations on dev, in addition.
        dropped: rows left out, by reason.
        step_s, seconds: of a step and of all steps, where a probe measured them; evaluations left out.
    """

    rows: int
    examples: int
    steps: int
    tokens: int
    answer_tokens: int
    eval_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    step_s: float | None = field(default=None, metadata=LEFT_OUT)
    seconds: float | None = field(default=None, metadata=LEFT_OUT)


class TeacherTrainer:
    """A method of training, with its spec's data. Making one reads and checks all data, and loads no weights.

    Raises:
        RelabelError: the data does not do for what the spec asks.
    """

    data: TeacherData
    """For the manifest."""
    digest: str
    """Of all training data."""
    labeler: dict[str, Any]
    """Options of the labeler whose prompts are used."""
    templates: dict[str, str]
    """sha256 of its templates, by file name."""
    notes: list[str]
    """Remarks for the user."""
    secrets: Mapping[str, Any]
    """What the options of an engine that the method asks name, by option."""

    def estimate(self) -> TrainingEstimate:
        """What `train` would do."""
        raise NotImplementedError

    def train(self, checkpoints: Path, say: Callable[[str], None]) -> Trained:
        """Train, resuming from the last whole checkpoint.

        Args:
            checkpoints: folder that they are kept in.
            say: called with progress, a line each.
        Raises:
            TrainingError: the loss is not finite, or memory runs out.
            ModelError: the weights can't be loaded.
        """
        raise NotImplementedError


# ------------------------------------------------------------------------------
# transformers' Trainer with a curve, and checkpoints that are resumed bit for bit.


STATE_OF_TRAINER = "trainer_state.json"


class CheckpointTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A Trainer whose figures go into a curve, and whose checkpoints are atomic, without pickle, and resumed
    bit for bit. TRL's trainers are Trainers too: put this class before theirs.

    Overridden hooks: `_maybe_log_save_evaluate` and `log` (Trainer's own figures are not kept), `_save_checkpoint` and
    the `_load_*` methods (Trainer's write pickle, and a half-written checkpoint would be taken for whole).

    Args:
        place: where checkpoints go; all other arguments are Trainer's.
    """

    control: TrainerControl
    progress_figures: tuple[str, ...] = ("loss",)
    """Figures of a step that its line of progress shows."""

    def __init__(self, *args: Any, place: TrainingPlace, **kwargs: Any) -> None:
        self.place = place
        self.curve = Curve()
        self.rows_seen = 0
        self.seconds = 0.0
        self._step_began: float | None = None
        self._pending: dict[str, float] = {}
        self._rows_of_step: list[int] = []
        super().__init__(*args, **kwargs)
        services = place.report_to if self.args.process_index == 0 else ()
        self.reporter = CurveReporter(services, place.folder, place.say)
        self.remove_callback(PrinterCallback)

    # figures of a step

    def begin_step(self, num_rows: int) -> None:
        """Start the clock of an optimizer step over so many rows of this process."""
        self._step_began = time.perf_counter()
        self.rows_seen += num_rows

    def note(self, values: dict[str, float], rows: Sequence[int]) -> None:
        """Add a batch's values to those of its optimizer step; `loss` is among them.

        Raises:
            TrainingError: the loss is not finite; the message names the rows.
        """
        if not math.isfinite(values["loss"]):
            parts = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            raise self.not_finite(f"the loss is not finite ({parts})", rows)
        self._rows_of_step += rows
        for name, value in values.items():
            if math.isfinite(value):
                self._pending[name] = self._pending.get(name, 0.0) + value

    def not_finite(self, what: str, rows: Sequence[int]) -> TrainingError:
        """The error for a value of these rows that is not finite, in the step under way."""
        return self.place.not_finite(what, rows, step=self.state.global_step + 1)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._step_began is not None:
            self.seconds += time.perf_counter() - self._step_began
            self._step_began = None
        if self._pending:
            # stop before the weights of such a gradient are in a checkpoint; with fp16 the scaler checks it
            rows, self._rows_of_step = self._rows_of_step, []
            if grad_norm is not None and self._scaler is None and not math.isfinite(float(grad_norm)):
                what = f"the gradient is not finite (norm {float(grad_norm):.4g}), though the loss is"
                raise self.place.not_finite(what, rows, step=self.state.global_step)
            extra = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
            extra["learning_rate"] = float(kwargs.get("learning_rate") or 0.0)
            self.curve.add(self.state.global_step, "train", {**self._pending, **extra})
            figures = [f"{name} {self._pending[name]:.4f}" for name in self.progress_figures if name in self._pending]
            self._pending = {}
            self.place.say(", ".join([f"step {self.state.global_step} of {self.state.max_steps}", *figures]))
            self.measured()
            failpoints.hit("after_training_step")
            if is_stop_wished() and self.may_stop():
                self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def measured(self) -> None:
        """Called when a step's figures are in the curve."""
        self.reporter.send(self.curve)

    def may_stop(self) -> bool:
        """Whether a checkpoint after the step just done holds all that training resumes from."""
        return True

    def stopped_by(self) -> str | None:
        """What ended training before its last step, as the state of the last checkpoint says."""
        return None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep Trainer's closing figures; the curve holds the rest."""
        self.state.log_history.append({**logs, "step": self.state.global_step})

    # checkpoints

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)

    def own_state(self) -> dict[str, Any]:
        """What a subclass keeps in a checkpoint in addition: plain values and tensors."""
        return {}

    def load_own_state(self, held: dict[str, Any]) -> None:
        """Take back what `own_state` gave."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        best = self.state.best_global_step
        if best:
            self.state.best_model_checkpoint = str(self.place.folder / checkpoint_name(best))
        if not self.args.should_save:
            return
        state = StepState(
            optimizer=self.optimizer.state_dict(),
            scheduler=self.lr_scheduler.state_dict(),
            scaler=None if self._scaler is None else self._scaler.state_dict(),
            curve=self.curve.points,
            own=self.own_state(),
        )
        write_checkpoint(
            self.place,
            self.state.global_step,
            self.accelerator.unwrap_model(self.model),
            state,
            best=best,
            write_more=lambda folder: self.state.save_to_json(str(folder / STATE_OF_TRAINER)),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        module = self.accelerator.unwrap_model(model or self.model)
        checkpoints.load_weights(module, Path(resume_from_checkpoint) / WEIGHTS)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            held = StepState.load(checkpoint)
            self.optimizer.load_state_dict(held.optimizer)
            self.lr_scheduler.load_state_dict(held.scheduler)
            self._take(held)

    def _load_scaler(self, checkpoint: str | None) -> None:
        held = None if checkpoint is None or self._scaler is None else StepState.load(checkpoint).scaler
        if held is not None:
            self._scaler.load_state_dict(held)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_random(StepState.load(checkpoint).random)

    def _take(self, held: StepState) -> None:
        self.curve.points = held.curve
        self.load_own_state(held.own)

    def adopt_if_finished(self, checkpoint: Path) -> bool:
        """Take over a checkpoint after which there is nothing left to train; False if there is. Trainer itself would do
        one step more.

        Raises:
            ManifestError: it is damaged.
        """
        try:
            self.state = TrainerState.load_from_json(str(checkpoint / STATE_OF_TRAINER))
        except (OSError, ValueError, TypeError) as exc:
            raise damaged(checkpoint, f"{STATE_OF_TRAINER} is missing, or can't be read") from exc
        self._take(StepState.load(checkpoint))
        if self.state.global_step < self.state.max_steps and self.stopped_by() is None:
            return False
        self._load_from_checkpoint(str(checkpoint))
        return True


def run_to_end(trainer: CheckpointTrainer, *, resume_from: Path | None) -> Outcome:
    """Run the loop to its end, and load the best step's weights where evaluations chose one.

    Raises:
        KeyboardInterrupt: a signal came; what was trained is in a checkpoint.
        ManifestError: the best step's checkpoint is missing or damaged.
    """
    try:
        if resume_from is None or not trainer.adopt_if_finished(resume_from):
            # one process stops after a step, with a checkpoint; several would stop after different ones
            with draining() if trainer.args.world_size == 1 else nullcontext():
                trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
        trainer.reporter.send(trainer.curve)
    finally:
        trainer.reporter.finish()
    state: TrainerState = trainer.state
    best = state.best_global_step if state.best_model_checkpoint else None
    trainer.accelerator.wait_for_everyone()  # the first process may still be writing the best step
    if best is not None:
        kept = checkpoints.best_checkpoint(trainer.place.folder, best)  # by its step: the folder may have moved since
        checkpoints.load_weights(trainer.accelerator.unwrap_model(trainer.model), kept / WEIGHTS)
        trainer.accelerator.wait_for_everyone()  # before the first process removes it
    facts = TrainingFacts(
        steps=state.global_step,
        epochs=round(float(state.epoch or 0.0), 4),
        best_step=best,
        stopped_by=trainer.stopped_by(),
        device=str(trainer.args.device),
        rows_per_s=round(trainer.rows_seen / trainer.seconds, 2) if trainer.seconds else None,
    )
    return Outcome(facts, trainer.curve)


def train_to_end(
    spec: TeacherSpec,
    folder: Path,
    say: Callable[[str], None],
    build: Callable[[int], CheckpointTrainer],
    *,
    examples: str,
    keys: str = "train.batch_size or train.max_tokens",
    can_halve: bool = True,
) -> Trained:
    """Train a teacher, resuming from the last whole checkpoint.

    Args:
        folder: of the checkpoints.
        build: makes the trainer, whose batch is halved so often.
        examples: what a batch holds, for errors.
        keys: to lower where memory runs out, for errors.
        can_halve: whether half a batch is as good, accumulated twice as often.
    Raises:
        TrainingError: memory runs out with half the batch too, or the loss is not finite.
    """
    checkpoints.refuse_other_sharding(
        instead="Teachers are not sharded: take it out, or set it to plain multi-GPU with `method: sft`; where memory "
        "is short, train adapters alone (`lora: {}`)."
    )
    # one thread fewer than there are cores: a thread that a step waits for must not wait for others. A lower number,
    # set from outside, is kept.
    if is_on_cpu(spec.train):
        torch.set_num_threads(min(torch.get_num_threads(), max(1, usable_cores() - 1)))

    def attempt(halvings: int) -> tuple[Any, Outcome]:
        trainer = build(halvings)
        outcome = run_to_end(trainer, resume_from=checkpoints.last_checkpoint(folder, say))
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.accelerator.free_memory()
        return model, outcome

    def refusal(words: str) -> TrainingError:
        size = spec.train.batch_size
        tried = f"also with half the batch ({size // 2} {examples})"
        if not can_halve or size < 2:
            tried = f"and the batch ({size} {examples}) can't be halved"
        return TrainingError(
            f"out of memory, {tried}: {words}. Set train.gradient_checkpointing: true, with which --resume goes on, or "
            f"begin again with --restart: lower {keys}, or train adapters alone (lora: {{}})."
        )

    batch_size = spec.train.batch_size if can_halve else None
    (model, outcome), notes = halving(attempt, batch_size=batch_size, say=say, refusal=refusal)
    halvings = len(notes)
    outcome.notes += notes
    outcome.facts = replace(
        outcome.facts,
        batch_size=spec.train.batch_size >> halvings,
        accumulation=spec.train.accumulation << halvings,
        was_batch_halved=halvings > 0,
    )
    return Trained(merged(model), outcome)


def argument_values(settings: TrainingSection, folder: Path, *, halvings: int = 0) -> dict[str, Any]:
    """The spec's `train` section as arguments of transformers' TrainingArguments.

    Args:
        halvings: how often the batch was halved because memory ran out; accumulation doubles as often.
    Raises:
        ConfigError: fp16 without a GPU.
    """
    precision = precision_of(settings)
    return {
        "output_dir": str(folder),
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps or -1,
        "per_device_train_batch_size": max(1, settings.batch_size >> halvings),
        "gradient_accumulation_steps": settings.accumulation << halvings,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": {"constant": "constant_with_warmup"}.get(settings.schedule, settings.schedule),
        "warmup_steps": settings.warmup,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": is_on_cpu(settings),
        "eval_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "log_level_replica": "error",  # the first process writes the log
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "average_tokens_across_devices": False,
        "accelerator_config": {"even_batches": False},
        "ddp_find_unused_parameters": False,
        "save_strategy": "steps" if settings.save_every else "epoch",
        **({"save_steps": settings.save_every} if settings.save_every else {}),
    }
