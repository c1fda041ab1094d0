"""One training, module to trained module: batches planned, layers compiled, checkpoints resumed, the batch halved once
if memory ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distill.students.bases import build_module
from distill.students.collator import Collator
from distill.students.examples import Examples, balance_weights
from distill.students.objective import Objective
from distill.students.specs import DistillSpec
from distill.students.splits import DEV, TRAIN
from distill.students.student_manifest import TrainingFacts
from distill.students.token_rows import PAD_MULTIPLE, pad_multiple_for
from distill.students.trainers import TrainingInputs
from distill.students.training import Feed, StudentTrainer, student_arguments
from distill.training import checkpoints, sharding
from distill.training.batches import BatchPlan
from distill.training.checkpointed import run_to_end
from distill.training.memory import halving
from distill.training.outcomes import Outcome
from manifests.errors import InputError, TrainingError


def train_student(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]
) -> tuple[Any, TrainingFacts, Outcome]:
    """Train, resuming from the last whole checkpoint; a `Trainer`.

    Raises:
        TrainingError: the loss is not finite, or memory runs out at half the batch too.
        InputError: early stopping without a dev row.
        ConfigError: accelerate's config asks for shards of its own.
    """
    sharding.refuse_other_sharding()
    spec = inputs.spec
    has_dev = len(inputs.examples.rows_of(DEV)) > 0
    if spec.train.early_stopping is not None and not has_dev:
        raise InputError(
            "`train.early_stopping` looks at the dev split, and no query fell there. Raise split.dev, or bring more "
            "queries."
        )
    (module, outcome, plan), halved = halving(
        lambda halvings: _attempt(inputs, dev_figures if has_dev else None, halvings=halvings),
        batch_size=spec.train.batch_size if spec.train.tokens_per_batch is None else None,
        say=inputs.say,
        refusal=lambda words: _no_memory(spec, words),
    )
    outcome.notes += halved.notes
    return module.cpu(), _training_facts(spec, outcome, plan, halved.times), outcome


def _attempt(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]] | None, *, halvings: int
) -> tuple[Any, Outcome, BatchPlan]:
    spec, examples, tokens, folder = inputs.spec, inputs.examples, inputs.tokens, inputs.checkpoints
    settings = spec.train
    # seeds all generators
    arguments = student_arguments(settings, folder, has_dev=dev_figures is not None, halvings=halvings)
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
    outcome = run_to_end(trainer, resume_from=checkpoints.last_checkpoint(folder, inputs.say))
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if sharding.is_sharded(trained):
        shards, trained = trained, build_module(spec, inputs.base, inputs.record)
        sharding.copy_trained(shards, trained)
    trainer.accelerator.free_memory()
    return trained, outcome, plan


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


def _no_memory(spec: DistillSpec, words: str) -> TrainingError:
    if spec.train.tokens_per_batch is not None:
        return TrainingError(
            f"out of memory with batches of {spec.train.tokens_per_batch} tokens: {words}. Lower "
            "train.tokens_per_batch."
        )
    return TrainingError(
        f"out of memory, also with half the batch ({max(1, spec.train.batch_size // 2)} rows): {words}. "
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
