"""One training, module to trained module: batches planned, layers compiled, checkpoints resumed, the batch halved once
if memory ends.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.utils import parse_flag_from_env

from distill.students import checkpoints, sharding
from distill.students.bases import build_module
from distill.students.batches import BatchPlan, Collator
from distill.students.examples import Examples, balance_weights
from distill.students.objective import Objective
from distill.students.specs import DistillSpec
from distill.students.splits import DEV, TRAIN
from distill.students.student_manifest import TrainingFacts
from distill.students.texts import PAD_MULTIPLE, pad_multiple_for
from distill.students.trainers import TrainingInputs
from distill.students.training import Feed, Outcome, StudentTrainer, train, training_arguments
from manifests.errors import ConfigError, InputError, TrainingError

logger = logging.getLogger(__name__)

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def train_student(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]
) -> tuple[Any, TrainingFacts, Outcome]:
    """Train, resuming from the last whole checkpoint; a `Trainer`.

    Raises:
        TrainingError: the loss is not finite, or memory runs out at half the batch too.
        InputError: early stopping without a dev row.
        ConfigError: accelerate's config asks for shards of its own.
    """
    _refuse_other_sharding()
    spec = inputs.spec
    has_dev = len(inputs.examples.rows_of(DEV)) > 0
    if spec.train.early_stopping is not None and not has_dev:
        raise InputError(
            "`train.early_stopping` looks at the dev split, and no query fell there. Raise split.dev, or bring more "
            "queries."
        )
    notes: list[str] = []
    for halvings in (0, 1):
        try:
            module, outcome, plan = _attempt(inputs, dev_figures if has_dev else None, halvings=halvings)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            if halvings or spec.train.batch_size < 2 or spec.train.tokens_per_batch is not None:
                raise _no_memory(spec, exc) from exc
            half = spec.train.batch_size // 2
            notes.append(
                f"out of memory with batches of {spec.train.batch_size} rows: going on with {half}, accumulating "
                "twice as many"
            )
            inputs.say(notes[-1])
            logger.warning(notes[-1])
            exc.__traceback__ = None  # its frames hold the activations that did not fit
        else:
            break
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    outcome.notes += notes
    return module.cpu(), _training_facts(spec, outcome, plan, halvings), outcome


def _attempt(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]] | None, *, halvings: int
) -> tuple[Any, Outcome, BatchPlan]:
    spec, examples, tokens, folder = inputs.spec, inputs.examples, inputs.tokens, inputs.checkpoints
    settings = spec.train
    # seeds all generators
    arguments = training_arguments(settings, folder, has_dev=dev_figures is not None, halvings=halvings)
    arguments.distributed_state.wait_for_everyone()  # the first process has claimed the output
    module = build_module(spec, inputs.base, inputs.record)
    if settings.gradient_checkpointing:
        module.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.strategy == "fsdp" and arguments.world_size > 1:
        sharding.shard(module, arguments.device)
    plan = BatchPlan(
        [len(row.ids) for row in tokens],
        examples.rows_of(TRAIN),
        seed=settings.seed,
        batch_size=arguments.per_device_train_batch_size,
        tokens_per_batch=settings.tokens_per_batch,
        groups=settings.group_by_length,
        draw_weight=_draw_weight(spec, examples),
        num_shards=arguments.world_size,
    )
    is_compiled = settings.compile == "on" or (settings.compile == "auto" and arguments.device.type == "cuda")
    pad_multiple = PAD_MULTIPLE if is_compiled else pad_multiple_for(arguments.device)
    collator = Collator(examples, tokens, inputs.texts, pad_multiple=pad_multiple)
    feed = Feed(plan, collator, dev_figures, examples.names)
    objective = Objective(spec.loss, examples.heads, examples.phi)
    trainer = StudentTrainer(module, arguments, objective, feed, settings, folder, inputs.say)
    if is_compiled:
        compile_layers(module, max_tokens=settings.max_tokens)
    kept = checkpoints.list_checkpoints(folder)
    if kept:
        inputs.say(f"resuming from {kept[-1].name}")
    outcome = train(trainer, resume_from=kept[-1] if kept else None)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if sharding.is_sharded(trained):
        shards, trained = trained, build_module(spec, inputs.base, inputs.record)
        sharding.copy_trained(shards, trained)
    trainer.accelerator.free_memory()
    return trained, outcome, plan


def _refuse_other_sharding() -> None:
    """accelerate's own FSDP and DeepSpeed write pickle, and on a CPU it leaves them out without a word.

    Raises:
        ConfigError: its config asks for one of them.
    """
    for name, variable in (("FSDP", "ACCELERATE_USE_FSDP"), ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED")):
        if parse_flag_from_env(variable):
            raise ConfigError(
                f"accelerate's config asks for {name} ({variable}), whose checkpoints are pickle. Set it to plain "
                "multi-GPU, and `train.strategy: fsdp` in the spec: weights, gradients and optimizer are then "
                "sharded over the same processes."
            )


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


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an error says that memory ended, on a device or on the host."""
    return isinstance(exc, torch.OutOfMemoryError | MemoryError) or any(
        word in str(exc).lower() for word in _MEMORY_WORDS
    )


def _no_memory(spec: DistillSpec, exc: BaseException) -> TrainingError:
    first = (str(exc).splitlines() or [type(exc).__name__])[0][:150]
    if spec.train.tokens_per_batch is not None:
        return TrainingError(
            f"out of memory with batches of {spec.train.tokens_per_batch} tokens: {first}. Lower "
            "train.tokens_per_batch."
        )
    return TrainingError(
        f"out of memory, also with half the batch ({max(1, spec.train.batch_size // 2)} rows): {first}. "
        "Lower train.batch_size or train.max_tokens, or set train.gradient_checkpointing: true."
    )


def _draw_weight(spec: DistillSpec, examples: Examples) -> np.ndarray | None:
    """Chances of the training rows to be drawn, for `class_balance: sampler`; None to take each once."""
    if spec.train.class_balance != "sampler":
        return None
    return np.asarray(balance_weights(examples)[examples.rows_of(TRAIN)], dtype=np.float64)


def _training_facts(spec: DistillSpec, outcome: Outcome, plan: BatchPlan, halvings: int) -> TrainingFacts:
    settings = spec.train
    return TrainingFacts(
        steps=outcome.steps,
        epochs=outcome.epochs,
        best_step=outcome.best_step,
        device=outcome.device,
        rows_per_s=outcome.rows_per_s,
        batch_size=settings.batch_size >> halvings if settings.tokens_per_batch is None else None,
        tokens_per_batch=settings.tokens_per_batch,
        accumulation=settings.accumulation << halvings,
        was_batch_halved=halvings > 0,
        padding_share=round(plan.padding_share(), 4),
    )
