"""One training, module to trained module: batches planned, layers compiled, checkpoints resumed, the batch halved once
if memory ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from accelerate import Accelerator

from relabel.distill.students.bases import build_module
from relabel.distill.students.collator import Collator
from relabel.distill.students.examples import Examples, balance_weights
from relabel.distill.students.feed import Feed
from relabel.distill.students.heads import remark_on_nodes
from relabel.distill.students.objective import Objective
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.splits import DEV, TRAIN
from relabel.distill.students.student_manifest import TrainingFacts
from relabel.distill.students.token_rows import PAD_MULTIPLE, pad_multiple_for
from relabel.distill.students.trainers import TrainingInputs
from relabel.distill.students.training import StudentTraining
from relabel.distill.training import checkpoints, sharding
from relabel.distill.training.accelerators import make_accelerator
from relabel.distill.training.batches import BatchPlan
from relabel.distill.training.memory import halving
from relabel.distill.training.outcomes import Outcome
from relabel.distill.training.together import ending_together
from relabel.distill.training.training_place import TrainingPlace
from relabel.manifests.errors import InputError, TrainingError


def train_student(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]
) -> tuple[Any, TrainingFacts, Outcome]:
    """Train, resuming from the last whole checkpoint; a `Trainer`.

    Raises:
        TrainingError: the loss is not finite, or memory runs out at half the batch too.
        InputError: early stopping without a dev row.
        ConfigError: accelerate's config asks for shards of its own.
    """
    sharding.refuse_other_sharding(
        instead="Set it to plain multi-GPU, and `train.strategy: fsdp` in the spec: weights, gradients and optimizer "
        "are then sharded over the same processes."
    )
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
        refusal=lambda words: _no_memory(
            spec, words, f"also with half the batch ({max(1, spec.train.batch_size // 2)} rows)"
        ),
    )
    outcome.notes += halved.notes
    return module.cpu(), _training_facts(spec, outcome, plan, halved.times), outcome


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
            sharding.shard(module, accelerator.device)
        is_compiled = settings.compile == "on" or (settings.compile == "auto" and accelerator.device.type == "cuda")
        feed = _feed(inputs, dev_figures, accelerator, halvings=halvings, is_compiled=is_compiled)
        objective = Objective(spec.loss, inputs.examples.heads, inputs.examples.phi)
        place = TrainingPlace(folder, settings.keep_checkpoints, inputs.say, inputs.examples.names, settings.report_to)
        training = StudentTraining(accelerator, module, objective, feed, settings, place)
        if is_compiled:
            compile_layers(module, max_tokens=settings.max_tokens)
        remarks = _remarks(inputs, training.last_step)
        for remark in remarks if halvings == 0 else ():  # of the halved batch as of the whole one
            inputs.say(remark)
        outcome = training.run(resume_from=checkpoints.last_checkpoint(folder, inputs.say))
        trained = accelerator.unwrap_model(module, keep_fp32_wrapper=False)  # judged as it will answer: in float32
        if sharding.is_sharded(module):
            trained = build_module(spec, inputs.base, inputs.record)
            sharding.copy_trained(module, trained)
        accelerator.free_memory()
    outcome.notes[:0] = remarks
    return trained, outcome, feed.plan


def _remarks(inputs: TrainingInputs, steps: int) -> list[str]:
    """On heads for nodes; an encoder's, which begin at nothing."""
    settings = inputs.spec.train
    if inputs.spec.student.kind != "encoder":
        return []
    rate = settings.head_learning_rate or settings.learning_rate
    return remark_on_nodes(inputs.examples.heads, steps=steps, learning_rate=rate)


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
        draw_weight=_draw_weight(spec, examples),
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
