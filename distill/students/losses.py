"""The losses of a student, its objective L = λ_r L_r + λ_s L_s + λ_a L_a + λ_c L_c, and how that is minimised: step by
step, or for a logistic student by one optimisation over all rows."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from relabel.distill.students.examples import DEV, TRAIN, Examples
from relabel.distill.students.model import PAD_MULTIPLE, PairTexts, TokenRow, answers_of, pad_multiple_for
from relabel.distill.students.networks import HEAD, LogisticStudent, TrainingInputs, build_module
from relabel.distill.students.spec import HEADS, NODE_HEADS, LossSection
from relabel.distill.training import checkpoints
from relabel.distill.training.loop import Choice, SupervisedLearner, plan_batches, train_to_end
from relabel.distill.training.output import Curve, Outcome, TrainingFacts, TrainingPlace
from relabel.manifests.errors import InputError, TrainingError
from relabel.manifests.phi import PhiTable
from relabel.manifests.process import require

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
    cells_C = torch.tensor(list(itertools.chain.from_iterable(phi)))
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
    # a finite substitute for -inf keeps logsumexp's gradient free of NaN where a grade has no cell
    masked_BKC = log_cells_BC[:, None, :].masked_fill(~mask_KC, torch.finfo(log_cells_BC.dtype).min)
    return torch.logsumexp(masked_BKC, dim=-1).masked_fill(~mask_KC.any(-1), float("-inf"))


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
        log_p_BK = log_induced_BK[:, is_reached_K]
        log_q_BK = log_direct_BK[:, is_reached_K]
    else:
        log_p_BK = log_direct_BK
        log_q_BK = log_induced_BK
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
        self.weights = {name: getattr(spec, name) for name in heads if getattr(spec, name) > 0}
        if set(NODE_HEADS) <= set(heads) and spec.consistency > 0:
            self.weights[CONSISTENCY] = spec.consistency
        """λ by part, of those that count."""

    def row_weights(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """w_i by part: float [B]; the consistency needs no label, so every row counts."""
        by_part = {**batch["weights"], CONSISTENCY: batch["row_weight"]}
        return {name: by_part[name] for name in self.weights}

    def sums(self, logits: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Σ_i w_i l_i by part, scalars that carry gradients."""
        sums = {}
        temperature = self._spec.temperature
        for name, weight_B in self.row_weights(batch).items():
            if name == CONSISTENCY:
                mask_KC = self._mask_KC.to(logits["relevance"].device)
                relevance_BK, subject_BS, attribute_BA = (logits[head] for head in HEADS)
                losses_B = consistency(
                    relevance_BK,
                    subject_BS,
                    attribute_BA,
                    mask_KC,
                    direction=self._spec.consistency_direction,
                )
            else:
                smoothing = self._spec.label_smoothing if name == "relevance" else 0.0  # eq. 17; eq. 16 has none
                target_BK = soft_targets(batch["targets"][name], temperature=temperature, smoothing=smoothing)
                losses_B = cross_entropy(logits[name], target_BK, temperature=temperature)
            sums[name] = weighted_sum(losses_B, weight_B)
        return sums

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


# ------------------------------------------------------------------------------
# What a batch of a student's training holds.


def labels_of(examples: Examples, rows: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """What rows are to be answered with: `{"targets": {head: [B, K]}, "weights": {head: [B]}, "row_weight": [B]}`."""
    return {
        "targets": {name: torch.from_numpy(values[rows]) for name, values in examples.targets.items()},
        "weights": {name: torch.from_numpy(values[rows]) for name, values in examples.weights.items()},
        "row_weight": torch.from_numpy(examples.row_weight[rows]),
    }


def loss_of(
    spec: LossSection, examples: Examples, rows: Sequence[int] | np.ndarray, logits: Mapping[str, np.ndarray]
) -> float:
    """The training loss of rows with these logits, [B, K] by head."""
    objective = Objective(spec, examples.heads, examples.phi)
    batch = labels_of(examples, rows)
    sums = objective.sums({name: torch.from_numpy(values) for name, values in logits.items()}, batch)
    return float(objective.loss(sums, {name: weight.sum() for name, weight in objective.row_weights(batch).items()}))


@dataclass
class Collator:
    """Row numbers become a batch of tensors: `tokens`, `rows` (int64 [B]) and what `labels_of` gives for them.

    Args:
        tokens: of all rows of the examples.
        pad_multiple: widths are rounded up to it, see `pad_multiple_for`.
    """

    examples: Examples
    tokens: Sequence[TokenRow]
    texts: PairTexts
    pad_multiple: int = PAD_MULTIPLE

    def __call__(self, rows: Sequence[int], _epoch: int = 0) -> dict[str, Any]:
        """The batch of these rows, in their order; the same in every epoch."""
        batch = self.texts.collate([self.tokens[row] for row in rows], pad_multiple=self.pad_multiple)
        return {"tokens": batch, "rows": torch.tensor(rows), **labels_of(self.examples, rows)}


# ------------------------------------------------------------------------------
# One training, module to trained module: batches planned, layers compiled, checkpoints resumed, the batch halved once
# if memory runs out.


def train_student(inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]) -> tuple[Any, Outcome]:
    """Train, resuming from the last whole checkpoint.

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
        inputs.report,
        identity=inputs.identity,
        advice=f"Lower {lower}, or set train.gradient_checkpointing: true.",
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
        spec = inputs.spec
        examples = inputs.examples
        settings = spec.train
        whole = functools.partial(build_module, spec, inputs.base, inputs.record)
        module = whole()
        if settings.gradient_checkpointing:
            module.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.strategy == "fsdp" and accelerator.num_processes > 1:
            checkpoints.shard(module, accelerator.device, module.layers)
        is_compiled = settings.compile == "on" or (settings.compile == "auto" and accelerator.device.type == "cuda")
        pad_multiple = PAD_MULTIPLE if is_compiled else pad_multiple_for(accelerator.device)
        super().__init__(
            accelerator,
            module,
            TrainingPlace(
                inputs.checkpoints,
                settings.keep_checkpoints,
                inputs.report,
                examples.names,
                spec.name,
            ),
            settings,
            plan=plan_batches(
                [len(row.ids) for row in inputs.tokens],
                examples.rows_of(TRAIN),
                settings,
                accelerator,
                halvings,
            ),
            collate=Collator(examples, inputs.tokens, inputs.texts, pad_multiple=pad_multiple),
            step_loss=Objective(spec.loss, examples.heads, examples.phi),
            whole=whole,
            dev=dev_figures,
            choice=None if settings.early_stopping is None else Choice(*settings.early_stopping.choice),
            eval_every=settings.eval_every,
        )
        if is_compiled:
            compile_layers(module, max_tokens=settings.max_tokens)


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


# ------------------------------------------------------------------------------
# How a logistic student is trained: principal components of the training queries' vectors, columns standardized, and a
# softmax regression by L-BFGS in float64.
#
# Components, means and scales follow from the distinct queries that train, and from no other. All of it is linear, so
# it is folded into the head's weights: a student that serves holds one matrix. Nothing is drawn and nothing is kept on
# the way: equal inputs give equal weights, and a training that was killed starts again.


# N rows, Q distinct queries, D hidden, P components, F counts, K grades

NO_SPREAD = 1e-6
"""A component that spreads less than this, relative to the first, is rounding."""
MOST_STEPS = 1_000
GRADIENT = 1e-5
"""No entry of the gradient is larger at an optimum, in nats."""


@dataclass(frozen=True)
class Basis:
    """What brings a query's vector and counts to columns of mean 0; the spread of each count is 1, and that of the
    vector's first component, whose proportions to the others stay.

    Args:
        mean: float64 [D], of the vectors.
        components: float64 [P, D], orthonormal rows.
        shift, scale: float64 [P + F], of the projected vectors and the counts.
    """

    mean: np.ndarray
    components: np.ndarray
    shift: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, vectors_QD: np.ndarray, counts_QF: np.ndarray, *, most: int = 128) -> Basis:
        """Of the queries that train: as many principal components as spread, `most` at most: R2RAG's width."""
        mean_D = vectors_QD.mean(0)
        _, spread, rows_D = np.linalg.svd(vectors_QD - mean_D, full_matrices=False)
        width = min(most, int((spread > NO_SPREAD * max(spread[0], 1e-300)).sum()))
        num_columns = width + counts_QF.shape[1]
        bare = cls(mean_D, rows_D[:width], np.zeros(num_columns), np.ones(num_columns))
        columns = bare.columns(vectors_QD, counts_QF)
        spread_C = columns.std(0)
        # one number for the whole vector: at a scale of their own its many small components would outvote the counts
        spread_C[:width] = spread_C[:1]
        return cls(mean_D, bare.components, columns.mean(0), np.where(spread_C > 1e-12, spread_C, 1.0))

    def columns(self, vectors_QD: np.ndarray, counts_QF: np.ndarray) -> np.ndarray:
        """Float64 [Q, P + F]."""
        joined = np.concatenate([(vectors_QD - self.mean) @ self.components.T, counts_QF], axis=1)
        return np.asarray((joined - self.shift) / self.scale)

    def folded(self, weight_KC: np.ndarray, bias_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same layer over vectors and counts as they are: weight [K, D + F], bias [K]."""
        plain_KC = weight_KC / self.scale
        on_vectors_KD = plain_KC[:, : len(self.components)] @ self.components
        bias = bias_K - plain_KC @ self.shift - on_vectors_KD @ self.mean
        return np.concatenate([on_vectors_KD, plain_KC[:, len(self.components) :]], axis=1), bias


def fit_student(
    inputs: TrainingInputs, dev_figures: Callable[[Any], dict[str, float]]
) -> tuple[LogisticStudent, Outcome]:
    """Train by one optimisation over all rows.

    Raises:
        InputError: a query of dev or test is one of training under another id.
        TrainingError: the loss is not finite, or has no minimum.
    """
    spec = inputs.spec
    examples = inputs.examples
    split = examples.about.split
    for name, side in (("dev", split.dev), ("test", split.test)):
        if side.texts_seen_in_train:
            raise InputError(
                f"{side.texts_seen_in_train} queries of the {name} split are training queries under another id, and a "
                "logistic student reads nothing else. Set split.by: query."
            )
    began = time.perf_counter()
    module = build_module(spec, inputs.base, inputs.record)
    assert isinstance(module, LogisticStudent)
    device = "cuda" if spec.train.device == "auto" and torch.cuda.is_available() else "cpu"
    rows = examples.rows_of(TRAIN)
    _, first_Q, query_N = np.unique(
        np.array([examples.texts[row][0] for row in rows], dtype=object), return_index=True, return_inverse=True
    )
    width = module.heads[HEAD].in_features
    queries = [inputs.tokens[rows[number]] for number in first_Q]
    inputs.report(f"the vectors of {len(queries):,} queries, on {device}")
    student = module.to(device).eval()
    columns_QC = answers_of(
        lambda **batch: {"columns": student.columns(**batch)},
        inputs.texts,
        queries,
        {"columns": width},
        device,
    )["columns"]
    if not np.isfinite(columns_QC).all():
        raise TrainingError(
            f"{inputs.base.resolved.reference}: a training query's vector is not finite. Is the model whole?"
        )
    hidden = width - module.extra_width
    vectors_QD, counts_QF = np.split(columns_QC.astype(np.float64), [hidden], axis=1)
    basis = Basis.of(vectors_QD, counts_QF)
    curve = Curve()
    weight_KC, bias_K = fit_softmax(
        basis.columns(vectors_QD, counts_QF)[query_N],
        {HEAD: examples.targets[HEAD][rows]},
        {HEAD: examples.weights[HEAD][rows]},
        Objective(spec.loss, examples.heads, examples.phi),
        decay=spec.train.weight_decay,
        on_step=lambda step, loss: curve.add(step, "train", {"loss": loss}),
    )
    weight, bias = basis.folded(weight_KC, bias_K)
    with torch.no_grad():
        module.heads[HEAD].weight.copy_(torch.from_numpy(weight))
        module.heads[HEAD].bias.copy_(torch.from_numpy(bias))
    seconds = time.perf_counter() - began
    steps = len(curve.points)
    if len(examples.rows_of(DEV)):
        curve.add(steps, "dev", dev_figures(module))
    notes = [
        f"a query's vector, {hidden} numbers, is reduced to its first {len(basis.components)} principal components "
        f"over {len(queries):,} training queries"
    ]
    inputs.report(notes[0])
    facts = TrainingFacts(
        steps=steps,
        epochs=float(steps),
        device=device,
        rows_per_s=round(len(rows) / seconds, 2),
        batch_size=len(rows),
    )
    return module.cpu(), Outcome(facts, curve, notes)


def fit_softmax(
    columns_NC: np.ndarray,
    targets: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    objective: Objective,
    *,
    decay: float,
    on_step: Callable[[int, float], None] = lambda *_: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and bias that minimize the objective plus decay / 2 · ‖weights‖², the bias left out.

    Args:
        columns_NC: the features of the rows.
        targets, weights: of the head relevance, [N, K] and [N].
        on_step: called after each step with its number and loss.
    Returns:
        Float64 [K, C] and [K].
    Raises:
        TrainingError: the loss is not finite, or steps end before the optimum.
    """
    minimize = require("scipy.optimize", extra="cpu", purpose="A student of kind logistic").minimize
    columns = torch.from_numpy(columns_NC)
    batch: dict[str, Any] = {
        "targets": {name: torch.from_numpy(values).double() for name, values in targets.items()},
        "weights": {name: torch.from_numpy(values).double() for name, values in weights.items()},
        "row_weight": torch.ones(len(columns), dtype=torch.float64),
    }
    totals = {name: weight.sum() for name, weight in objective.row_weights(batch).items()}
    grades = targets[HEAD].shape[1]
    width = columns_NC.shape[1]
    losses: list[float] = []

    def loss_at(flat: np.ndarray) -> tuple[float, np.ndarray]:
        whole = torch.from_numpy(flat).requires_grad_()
        weight = whole[: grades * width].view(grades, width)
        bias = whole[grades * width :]
        sums = objective.sums({HEAD: columns @ weight.T + bias}, batch)
        loss = objective.loss(sums, totals) + decay / 2 * weight.square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        if not np.isfinite(losses[-1]):
            raise TrainingError("the loss is not finite. Raise train.weight_decay, and check the labels' weights.")
        return losses[-1], np.asarray(whole.grad.numpy())

    steps = iter(range(1, MOST_STEPS + 1))
    optimum = minimize(
        loss_at,
        np.zeros(grades * (width + 1)),
        jac=True,
        method="L-BFGS-B",
        callback=lambda _: on_step(next(steps), losses[-1]),
        options={"maxiter": MOST_STEPS, "maxfun": 2 * MOST_STEPS, "ftol": 0.0, "gtol": 1e-9, "maxcor": 20},
    )
    gradient = np.abs(optimum.jac).max()
    if gradient > GRADIENT:
        raise TrainingError(
            f"no optimum after {optimum.nit} steps (gradient {gradient:.2g}). Raise train.weight_decay."
        )
    return optimum.x[: grades * width].reshape(grades, width), optimum.x[grades * width :]
