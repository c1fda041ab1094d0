"""The losses of a student, and its objective L = λ_r L_r + λ_s L_s + λ_a L_a + λ_c L_c."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from relabel.distill.students.examples import DEV, TRAIN, Examples
from relabel.distill.students.model import PAD_MULTIPLE, PairTexts, TokenRow, pad_multiple_for
from relabel.distill.students.networks import TrainingInputs, build_module
from relabel.distill.students.spec import NODE_HEADS, LossSection
from relabel.distill.training import checkpoints
from relabel.distill.training.curves import Outcome
from relabel.distill.training.loop import Choice, SupervisedLearner, train_to_end
from relabel.distill.training.output import TrainingPlace
from relabel.distill.training.runtime import BatchPlan
from relabel.manifests.labels import PhiTable

# ------------------------------------------------------------------------------
# What a student minimises: soft cross-entropy, and the consistency of its three heads through φ.
#
# Every loss comes as one value a row, so that rows can be weighted and masked; `weighted_sum` and the weights' sum make
# the mean. Computed in float32 or better, whatever the logits' type.
#
# Sources: R3A, equation 3; Graph-GRPO, equations 16 to 19; Hinton et al. 2015 (arXiv:1503.02531), section 2, for the
# temperature.


# B rows, K grades, S subject scores, A attribute scores, C cells S·A


def soft_targets(target_BK: Tensor, *, temperature: float = 1.0, smoothing: float = 0.0) -> Tensor:
    """A teacher's distributions as they are learned: p^(1/T) renormalised, then (1-ε)·p + ε/K.

    Args:
        target_BK: rows of probabilities; a row of zeros (no label) stays a row of zeros when `smoothing` is 0 and is
            masked elsewhere.
        temperature: above 0; 1 changes nothing.
        smoothing: ε, 0 to below 1.
    """
    if temperature != 1.0:
        tiny = torch.finfo(target_BK.dtype).tiny
        # divided by the row's largest first: at a low temperature all powers would round to 0, and the row would teach
        # nothing
        highest_B1 = target_BK.amax(-1, keepdim=True).clamp(min=tiny)
        raised_BK = (target_BK.clamp(min=0.0) / highest_B1) ** (1.0 / temperature)
        target_BK = raised_BK / raised_BK.sum(-1, keepdim=True).clamp(min=tiny)
    if smoothing:
        target_BK = (1.0 - smoothing) * target_BK + smoothing / target_BK.shape[-1]
    return target_BK


def cross_entropy(logits_BK: Tensor, target_BK: Tensor, *, temperature: float = 1.0) -> Tensor:
    """-T² Σ_k p_T(k) log p_S(k) with p_S = softmax(z/T), one value a row.

    Args:
        logits_BK: the student's.
        target_BK: rows of probabilities, of `soft_targets` with the same temperature.
    Returns:
        [B], nats. For T = 1 it is R3A's equation 3; the teacher's entropy, which no student can change, is part of it.
    """
    log_p_BK = torch.log_softmax(_wide(logits_BK) / temperature, dim=-1)
    return -(target_BK.to(log_p_BK.dtype) * log_p_BK).sum(-1) * temperature**2


def phi_mask(phi: PhiTable, grades: int) -> Tensor:
    """Which cells (s, a) of φ give which grade: bool [K, S·A]."""
    cells_C = torch.tensor([grade for row in phi for grade in row])
    return cells_C[None, :] == torch.arange(grades)[:, None]


def induced_log_probs(subject_BS: Tensor, attribute_BA: Tensor, mask_KC: Tensor) -> Tensor:
    """log p_ind(r) = log Σ_{s,a: φ(s,a)=r} p(s) p(a), from the logits of both heads.

    Args:
        mask_KC: of `phi_mask`.
    Returns:
        [B, K]; -inf for a grade that no cell gives.
    Source:
        Graph-GRPO, equation 18 (the induced distribution).
    """
    log_s_BS = torch.log_softmax(_wide(subject_BS), dim=-1)
    log_a_BA = torch.log_softmax(_wide(attribute_BA), dim=-1)
    log_cells_BC = (log_s_BS[:, :, None] + log_a_BA[:, None, :]).flatten(1)
    lowest = torch.finfo(log_cells_BC.dtype).min
    # a finite substitute for -inf keeps logsumexp's gradient free of NaN where a grade has no cell
    masked_BKC = log_cells_BC[:, None, :].masked_fill(~mask_KC, lowest)
    log_p_BK = torch.logsumexp(masked_BKC, dim=-1)
    return log_p_BK.masked_fill(~mask_KC.any(-1), float("-inf"))


def consistency(
    relevance_BK: Tensor,
    subject_BS: Tensor,
    attribute_BA: Tensor,
    mask_KC: Tensor,
    *,
    direction: str = "induced_to_direct",
) -> Tensor:
    """KL between the induced and the direct grade distribution, one value a row; gradients reach all three heads.

    Args:
        relevance_BK, subject_BS, attribute_BA: logits.
        mask_KC: of `phi_mask`.
        direction: `induced_to_direct` is KL(p_ind ‖ p_r); `direct_to_induced` is KL(p_r ‖ p_ind),
            infinite where no cell of φ gives a grade.
    Returns:
        [B], nats, at least 0 up to rounding; 0 exactly where both agree.
    Source:
        Graph-GRPO, equation 19 (L_c); the direction is ours, see methods.
    """
    log_direct_BK = torch.log_softmax(_wide(relevance_BK), dim=-1)
    log_induced_BK = induced_log_probs(subject_BS, attribute_BA, mask_KC)
    if direction == "induced_to_direct":
        is_reached_K = mask_KC.any(-1)
        # a grade without a cell has p_ind = 0 and adds nothing; it is left out, since 0 · (-inf) is NaN
        log_p_BK, log_q_BK = log_induced_BK[:, is_reached_K], log_direct_BK[:, is_reached_K]
    else:
        log_p_BK, log_q_BK = log_direct_BK, log_induced_BK
    return (log_p_BK.exp() * (log_p_BK - log_q_BK)).sum(-1)


def weighted_sum(losses_B: Tensor, weight_B: Tensor) -> Tensor:
    """Σ_i w_i l_i over the rows of positive weight. A masked row's loss is not even multiplied: its NaN, if any, would
    survive a zero.
    """
    kept_B = torch.where(weight_B > 0, losses_B, torch.zeros_like(losses_B))
    return (kept_B * weight_B.to(losses_B.dtype)).sum()


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


# ------------------------------------------------------------------------------
# The objective L = λ_r L_r + λ_s L_s + λ_a L_a + λ_c L_c of a batch: which losses there are, their weights, and their
# means.
#
# Each part is kept as (Σ w·l, Σ w) until all batches of an optimizer step are known, so that accumulation over several
# batches, or over several devices, gives the loss of one large batch and not the mean of unequal means.
#
# Source: Graph-GRPO, equations 16 to 19; R3A, equation 3, is the part `relevance` alone.


# B rows, K grades

CONSISTENCY = "consistency"


class Objective:
    """What a student with these heads minimises.

    Args:
        heads: number of grades by head.
    """

    def __init__(self, spec: LossSection, heads: Mapping[str, int], phi: PhiTable) -> None:
        self._spec = spec
        self._mask_KC = phi_mask(phi, heads["relevance"])
        has_nodes = set(NODE_HEADS) <= set(heads)
        self.weights = {name: getattr(spec, name) for name in heads if getattr(spec, name) > 0}
        if has_nodes and spec.consistency > 0:
            self.weights[CONSISTENCY] = spec.consistency
        """λ by part, of those that count."""

    def row_weights(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """w_i by part: float [B]; the consistency needs no label, so every row counts."""
        held = {**batch["weights"], CONSISTENCY: batch["row_weight"]}
        return {name: held[name] for name in self.weights}

    def sums(self, logits: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Σ_i w_i l_i by part, scalars that carry gradients."""
        found, temperature = {}, self._spec.temperature
        for name, weight_B in self.row_weights(batch).items():
            if name == CONSISTENCY:
                losses_B = self._consistency(logits)
            else:
                smoothing = self._spec.label_smoothing if name == "relevance" else 0.0  # eq. 17; eq. 16 has none
                target_BK = soft_targets(batch["targets"][name], temperature=temperature, smoothing=smoothing)
                losses_B = cross_entropy(logits[name], target_BK, temperature=temperature)
            found[name] = weighted_sum(losses_B, weight_B)
        return found

    def amounts(self, batch: Mapping[str, Any]) -> Tensor:
        """Σ_i w_i by part [P]."""
        return torch.stack([weight_B.sum() for weight_B in self.row_weights(batch).values()])

    def shares(self, model: Any, batch: Mapping[str, Any], totals_P: Tensor) -> dict[str, Tensor]:
        """A batch's share of the loss, then of its parts, of a step with these amounts."""
        totals = dict(zip(self.weights, totals_P, strict=True))
        sums = self.sums(model(**batch["tokens"]), batch)
        return {"loss": self.loss(sums, totals)} | {name: sums[name].detach() / totals[name] for name in sums}

    def loss(self, sums: Mapping[str, Tensor], totals: Mapping[str, Tensor]) -> Tensor:
        """Σ_parts λ · Σ w·l / Σ w.

        Args:
            totals: Σ w by part, over all batches of the optimizer step; a part without a weighted row adds nothing.
        """
        terms = [
            weight * sums[name] / torch.where(totals[name] > 0, totals[name], 1.0)
            for name, weight in self.weights.items()
        ]
        return torch.stack(terms).sum()

    def _consistency(self, logits: Mapping[str, Tensor]) -> Tensor:
        relevance_BK, subject_BS, attribute_BA = (logits[name] for name in ("relevance", *NODE_HEADS))
        mask_KC = self._mask_KC.to(relevance_BK.device)
        return consistency(relevance_BK, subject_BS, attribute_BA, mask_KC, direction=self._spec.consistency_direction)


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


def train_student(inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]) -> tuple[Any, Outcome]:
    """Train, resuming from the last whole checkpoint; a `Trainer`.

    Raises:
        TrainingError: the loss is not finite, or memory runs out at half the batch too.
        ConfigError: accelerate's config asks for shards of its own.
    """
    settings = inputs.spec.train
    has_dev = len(inputs.examples.rows_of(DEV)) > 0
    tokens = settings.tokens_per_batch
    lower = "train.batch_size or train.max_tokens" if tokens is None else "train.tokens_per_batch"
    module, outcome = train_to_end(
        lambda accelerator, halvings: StudentLearner(inputs, accelerator, dev_figures if has_dev else None, halvings),
        settings,
        inputs.checkpoints,
        inputs.say,
        advice=f"Lower {lower}, or set train.gradient_checkpointing: true.",
        sharding="Set it to plain multi-GPU, and `train.strategy: fsdp` in the spec: weights, gradients and optimizer "
        "are then sharded over the same processes.",
        can_halve=tokens is None,
    )
    if tokens is not None:
        outcome.facts = replace(outcome.facts, batch_size=None, tokens_per_batch=tokens)
    return module, outcome


class StudentLearner(SupervisedLearner):
    """Learns a student's objective.

    Args:
        dev_figures: None without a dev split.
        halvings: how often the batch was halved because memory ran out.
    """

    def __init__(
        self,
        inputs: TrainingInputs,
        accelerator: Accelerator,
        dev_figures: Callable[[Any], dict[str, float]] | None,
        halvings: int,
    ) -> None:
        self._inputs = inputs
        spec, examples = inputs.spec, inputs.examples
        settings = spec.train
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
        super().__init__(
            accelerator,
            module,
            TrainingPlace(
                inputs.checkpoints,
                settings.keep_checkpoints,
                inputs.say,
                examples.names,
                settings.report_to,
                spec.name,
            ),
            settings,
            plan=plan,
            collate=Collator(examples, inputs.tokens, inputs.texts, pad_multiple=pad_multiple),
            step_loss=Objective(spec.loss, examples.heads, examples.phi),
            dev=dev_figures,
            choice=None if stopping is None else Choice(*stopping.choice),
            eval_every=settings.eval_every,
        )
        if is_compiled:
            compile_layers(module, max_tokens=settings.max_tokens)

    def trained(self) -> Any:
        """In float32, and whole where it was sharded."""
        if not checkpoints.is_sharded(self.model):
            return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        found = build_module(self._inputs.spec, self._inputs.base, self._inputs.record)
        checkpoints.copy_trained(self.model, found)
        return found


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
