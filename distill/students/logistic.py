"""A logistic student: a linear layer over a frozen embedding of the query and surface counts of its text, and how it is
fitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from relabel.distill.students.examples import DEV, TRAIN
from relabel.distill.students.losses import Objective
from relabel.distill.students.manifest import STUDENT_NAME, StudentRecord, read_student
from relabel.distill.students.model import PAD_MULTIPLE, EncoderTexts, PairTexts, TokenRow, logits_of_rows
from relabel.distill.students.networks import (
    EncoderStudent,
    TrainingInputs,
    build_module,
    load_backbone,
    read_settings,
    sentence_vectors,
)
from relabel.distill.students.query_counts import COUNT_NAMES, query_counts
from relabel.distill.students.spec import DistillSpec
from relabel.distill.training.curves import Curve, Outcome, TrainingFacts
from relabel.manifests.errors import InputError, ModelError, TrainingError
from relabel.manifests.process import require

# ------------------------------------------------------------------------------
# A logistic student: a linear layer over a frozen encoder's vector of the query, and nineteen counts of its text.
#
# The document is not read: what is predicted is a property of the query, say how complex it is.
#
# Source: R2RAG, section 3.1 (logistic regression over a 128-dimensional embedding and 19 linguistic features, which the
# paper does not list; these are ours).


# B rows, T tokens, D hidden, C columns: D and the counts


class LogisticStudent(EncoderStudent):
    """A backbone that is not trained, and a linear head over its vectors and the logarithms of the counts."""

    extra_width: ClassVar[int] = len(COUNT_NAMES)

    def forward(  # type: ignore[override]  # torch calls a module by the names of its own batch
        self, input_ids: Tensor, attention_mask: Tensor, counts: Tensor
    ) -> dict[str, Tensor]:
        """Logits of every head, by head float [B, K].

        Args:
            input_ids, attention_mask: of the query, int64 [B, T].
            counts: int64 [B, 19].
        """
        columns_BC = self.columns(input_ids, attention_mask, counts)
        return {name: head(columns_BC) for name, head in self.heads.items()}

    def columns(self, input_ids: Tensor, attention_mask: Tensor, counts: Tensor) -> Tensor:
        """What the head reads, [B, C]: a vector of length 1, then log(1 + count)."""
        vectors_BD = sentence_vectors(self.backbone, input_ids, attention_mask, self.pooling)
        return torch.cat([vectors_BD, torch.log1p(counts.float()).to(vectors_BD.dtype)], dim=-1)

    @staticmethod
    def own_parts(_spec: DistillSpec, path: Path, tokenizer: Any, _grades: int) -> dict[str, Any]:
        """Pooling and the text before a query, as the model's own files say."""
        if (path / STUDENT_NAME).is_file():
            held = read_student(path)
            return {"pooling": held.pooling, "prompt": held.prompt}
        settings = read_settings(path)
        if settings.is_lower and tokenizer("ABC").input_ids != tokenizer("abc").input_ids:
            raise ModelError(f"{path}: wants lower-cased texts, and its tokenizer does not make them. Take another.")
        return {"pooling": settings.pooling, "prompt": (settings.prompts["query"], "", "")}

    @classmethod
    def start(cls, _spec: DistillSpec, path: Path, _tokenizer: Any, record: StudentRecord) -> Self:
        """With a head that is to be fitted: an earlier student's is not used."""
        return cls(load_backbone(path), record.heads, pooling=record.pooling)

    @staticmethod
    def texts(record: StudentRecord, tokenizer: Any) -> PairTexts:
        """The query alone."""
        return QueryTexts(tokenizer, record.max_tokens, record.prompt[0])


class QueryTexts(EncoderTexts):
    """`[CLS] query [SEP]`, or what the tokenizer makes of one text, and the query's counts.

    Args:
        prompt: text before every query; not counted.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, prompt: str = "") -> None:
        super().__init__(tokenizer, max_tokens, has_types=False)
        self._prompt = prompt

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of the queries; a long one loses its end there, and is counted as a whole."""
        if not pairs:
            return []
        rows = self.token_rows([self._prompt + query for query, _ in pairs])
        return [row._replace(counts=query_counts(query)) for row, (query, _) in zip(rows, pairs, strict=True)]

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """Right-padded `input_ids` and `attention_mask`, and `counts` [B, 19]."""
        batch = super().collate(rows, pad_multiple=pad_multiple)
        return {**batch, "counts": torch.tensor([row.counts for row in rows], dtype=torch.int64)}


class HeadColumns(nn.Module):  # type: ignore[misc]
    """A logistic student that gives what its head reads, under the name `columns`."""

    def __init__(self, student: LogisticStudent) -> None:
        super().__init__()
        self.student = student

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """[B, C]."""
        return {"columns": self.student.columns(**batch)}


# ------------------------------------------------------------------------------
# How a logistic student is trained: principal components of the training queries' vectors, columns standardized, and a
# softmax regression by L-BFGS in float64.
#
# Components, means and scales follow from the distinct queries that train, and from no other. All of it is linear, so
# it is folded into the head's weights: a student that serves holds one matrix. Nothing is drawn and nothing is kept on
# the way: equal inputs give equal weights, and a training that was killed starts again.


# N rows, Q distinct queries, D hidden, P components, F counts, K grades

HEAD = "relevance"
MOST_COMPONENTS = 128
"""R2RAG's width of the embedding."""
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
    def of(cls, vectors_QD: np.ndarray, counts_QF: np.ndarray, *, most: int = MOST_COMPONENTS) -> Basis:
        """Of the queries that train: as many principal components as spread, `most` at most."""
        mean_D = vectors_QD.mean(0)
        _, spread, rows_D = np.linalg.svd(vectors_QD - mean_D, full_matrices=False)
        kept = min(most, int((spread > NO_SPREAD * max(spread[0], 1e-300)).sum()))
        bare = cls(mean_D, rows_D[:kept], np.zeros(kept + counts_QF.shape[1]), np.ones(kept + counts_QF.shape[1]))
        columns = bare.columns(vectors_QD, counts_QF)
        spread_C = columns.std(0)
        # one number for the whole vector: at a scale of their own its many small components would outvote the counts
        spread_C[:kept] = spread_C[:1]
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
    """Train; a `Trainer`.

    Raises:
        InputError: a query of dev or test is one of training under another id.
        TrainingError: the loss is not finite, or has no minimum.
    """
    spec, examples, say = inputs.spec, inputs.examples, inputs.say
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
    queries = [examples.texts[row][0] for row in rows]
    _, first_Q, query_N = np.unique(np.array(queries, dtype=object), return_index=True, return_inverse=True)
    width = module.heads[HEAD].in_features
    chosen = [inputs.tokens[rows[place]] for place in first_Q]
    say(f"the vectors of {len(chosen):,} queries, on {device}")
    found = logits_of_rows(HeadColumns(module.to(device).eval()), inputs.texts, chosen, {"columns": width})["columns"]
    if not np.isfinite(found).all():
        raise TrainingError(
            f"{inputs.base.resolved.reference}: a training query's vector is not finite. Is the model whole?"
        )
    hidden = width - module.extra_width
    vectors_QD, counts_QF = np.split(found.astype(np.float64), [hidden], axis=1)
    basis = Basis.of(vectors_QD, counts_QF)
    columns_NC = basis.columns(vectors_QD, counts_QF)[query_N]
    curve = Curve()
    weight_KC, bias_K = fit_softmax(
        columns_NC,
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
    seconds, steps = time.perf_counter() - began, len(curve.points)
    if len(examples.rows_of(DEV)):
        curve.add(steps, "dev", dev_figures(module))
    notes = [
        f"a query's vector, {hidden} numbers, is reduced to its first {len(basis.components)} principal components "
        f"over {len(chosen):,} training queries"
    ]
    say(notes[0])
    rate = round(len(rows) / seconds, 2)
    facts = TrainingFacts(steps=steps, epochs=float(steps), device=device, rows_per_s=rate, batch_size=len(rows))
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
    grades, width = targets[HEAD].shape[1], columns_NC.shape[1]
    losses: list[float] = []

    def loss_at(flat: np.ndarray) -> tuple[float, np.ndarray]:
        whole = torch.from_numpy(flat).requires_grad_()
        weight, bias = whole[: grades * width].view(grades, width), whole[grades * width :]
        sums = objective.sums({HEAD: columns @ weight.T + bias}, batch)
        loss = objective.loss(sums, totals) + decay / 2 * weight.square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        if not np.isfinite(losses[-1]):
            raise TrainingError("the loss is not finite. Raise train.weight_decay, and check the labels' weights.")
        return losses[-1], np.asarray(whole.grad.numpy())

    steps = iter(range(1, MOST_STEPS + 1))
    found = minimize(
        loss_at,
        np.zeros(grades * (width + 1)),
        jac=True,
        method="L-BFGS-B",
        callback=lambda _: on_step(next(steps), losses[-1]),
        options={"maxiter": MOST_STEPS, "maxfun": 2 * MOST_STEPS, "ftol": 0.0, "gtol": 1e-9, "maxcor": 20},
    )
    if np.abs(found.jac).max() > GRADIENT:
        raise TrainingError(
            f"no optimum after {found.nit} steps (gradient {np.abs(found.jac).max():.2g}). Raise train.weight_decay."
        )
    return found.x[: grades * width].reshape(grades, width), found.x[grades * width :]
