"""The training of encoder and decoder students: batches, compiled layers, and half the batch if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from relabel.distill.students.bases import TrainingInputs, build_module
from relabel.distill.students.examples import DEV, TRAIN, Examples
from relabel.distill.students.losses import Objective
from relabel.distill.students.model import PAD_MULTIPLE, PairTexts, TokenRow, pad_multiple_for
from relabel.distill.students.spec import DistillSpec, EarlyStopping
from relabel.distill.training import checkpoints
from relabel.distill.training.curves import Outcome
from relabel.distill.training.loop import Choice, SupervisedLearner, Training
from relabel.distill.training.output import TrainingPlace
from relabel.distill.training.runtime import BatchPlan, ending_together, halving, make_accelerator
from relabel.manifests.errors import TrainingError

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

    def __call__(self, rows: Sequence[int], _epoch: int = 0) -> dict[str, Any]:
        """The batch of these rows, in their order; the same in every epoch."""
        index = torch.tensor(list(rows))
        return {
            "tokens": self._texts.collate([self._tokens[row] for row in rows], pad_multiple=self._pad_multiple),
            "targets": {name: values[index] for name, values in self._targets.items()},
            "weights": {name: values[index] for name, values in self._weights.items()},
            "row_weight": self._row_weight[index],
            "rows": index,
        }


# ------------------------------------------------------------------------------
# One training, module to trained module: batches planned, layers compiled, checkpoints resumed, the batch halved once
# if memory runs out.


METRIC_KEYS = {"macro_f1": "f1_macro"}
"""Spec's name of a dev metric → the figure's own."""


def metric_key(stopping: EarlyStopping) -> str:
    """The figure that early stopping uses."""
    return METRIC_KEYS.get(stopping.metric, stopping.metric)


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
    module, outcome = halving(
        lambda halvings: _attempt(inputs, dev_figures if has_dev else None, halvings=halvings),
        spec.train,
        say=inputs.say,
        refusal=lambda words: _no_memory(
            spec, words, f"also with half the batch ({max(1, spec.train.batch_size // 2)} rows)"
        ),
        can_halve=spec.train.tokens_per_batch is None,
    )
    if spec.train.tokens_per_batch is not None:
        facts = replace(outcome.facts, batch_size=None, tokens_per_batch=spec.train.tokens_per_batch)
        outcome.facts = facts
    return module.cpu(), outcome


def _attempt(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]] | None, *, halvings: int
) -> tuple[Any, Outcome]:
    spec, folder, examples = inputs.spec, inputs.checkpoints, inputs.examples
    settings, accelerator = spec.train, make_accelerator(spec.train)
    with ending_together(accelerator, folder, refusal=lambda words, who: _no_memory(spec, words, who)):
        module = build_module(spec, inputs.base, inputs.record)
        if settings.gradient_checkpointing:
            module.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.strategy == "fsdp" and accelerator.num_processes > 1:
            checkpoints.shard(module, accelerator.device)
        is_compiled = settings.compile == "on" or (settings.compile == "auto" and accelerator.device.type == "cuda")
        plan = BatchPlan(
            [len(row.ids) for row in inputs.tokens],
            examples.rows_of(TRAIN),
            seed=settings.seed,
            batch_size=max(1, settings.batch_size >> halvings),
            tokens_per_batch=settings.tokens_per_batch,
            groups=settings.group_by_length,
            accumulation=settings.accumulation << halvings,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )
        pad_multiple = PAD_MULTIPLE if is_compiled else pad_multiple_for(accelerator.device)
        stopping = settings.early_stopping
        learner = SupervisedLearner(
            accelerator,
            module,
            TrainingPlace(folder, settings.keep_checkpoints, inputs.say, examples.names, settings.report_to, spec.name),
            settings,
            plan=plan,
            collate=Collator(examples, inputs.tokens, inputs.texts, pad_multiple=pad_multiple),
            step_loss=Objective(spec.loss, examples.heads, examples.phi),
            dev=dev_figures,
            choice=None if stopping is None else _choice(stopping),
            eval_every=settings.eval_every,
        )
        training = Training(learner, settings)
        if is_compiled:
            compile_layers(module, max_tokens=settings.max_tokens)
        outcome = training.run(resume_from=checkpoints.last_checkpoint(folder, inputs.say))
        outcome.facts = replace(outcome.facts, padding_share=round(plan.padding_share(), 4))
        trained = accelerator.unwrap_model(module, keep_fp32_wrapper=False)  # judged as it will answer: in float32
        if checkpoints.is_sharded(module):
            trained = build_module(spec, inputs.base, inputs.record)
            checkpoints.copy_trained(module, trained)
        accelerator.free_memory()
    return trained, outcome


def _choice(stopping: EarlyStopping) -> Choice:
    return Choice(metric_key(stopping), stopping.patience, -1.0 if stopping.metric == "loss" else 1.0)


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
