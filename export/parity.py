"""Parity: does an exported model say what the student says, on real pairs, alone and in every company?

The reference is the student in torch. The exported model is driven through the bundle's own loader: its tokens, its
padding, its session. Every pair is answered once in batches of each size, in the order of the data, so that short rows
stand beside long ones and are padded.

The gate of int8 asks whether a loss beyond the bound is proven. Of few pairs little is: a model that passes though a
loss beyond the bound is not ruled out either is marked `undecided`, with the loss that it could have.

A dynamic int8 scales its activations over the whole batch, so its answers depend on the company; the figures of the
worst size decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distill.students.examples import NO_GRADE
from export.loader import Encoder
from export.orders import kept_orders, told_apart_from
from export.reference_pairs import PairSet
from export.specs import ParitySpec
from manifests.ids import codes_of, ids_of
from manifests.metrics.agreement import confusion_by_group, f1_macro
from manifests.metrics.bootstrap import Statistic, paired_bootstrap
from manifests.metrics.ranking import rank_queries

# N pairs, K grades of a head, G queries

HEAD = "relevance"
POINTS = 100.0
FAMILY = {"fp32": "fp32", "fp16": "fp16", "bf16": "fp16", "int8": "int8", "int8-static": "int8"}
"""Which gate a precision passes."""
Run = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]
"""A session: one batch to probabilities by head, [B, K] each."""


def answers(
    run: Run, encoder: Encoder, rows: Sequence[tuple[list[int], list[int]]], batch_size: int
) -> dict[str, np.ndarray]:
    """Probabilities by head, float32 [N, K], asked in batches of one size in the order given."""
    parts: list[Mapping[str, np.ndarray]] = []
    for start in range(0, len(rows), batch_size):
        parts.append(run(encoder.collate(rows[start : start + batch_size])))
    return {name: np.concatenate([part[name] for part in parts]).astype(np.float32) for name in parts[0]}


def measure(
    precision: str,
    reference: Mapping[str, np.ndarray],
    found_by_size: Mapping[int, Mapping[str, np.ndarray]],
    pairs: PairSet,
    spec: ParitySpec,
) -> dict[str, Any]:
    """Hold a model's answers against the student's.

    Args:
        reference: the student's probabilities by head.
        found_by_size: the model's, by batch size.
    Returns:
        Figures by batch size, the verdicts of the precision's gate, and the rows that differ most.
    """
    sizes = {str(size): _figures(reference, found, pairs, spec) for size, found in found_by_size.items()}
    checks = judge(precision, list(sizes.values()), spec)
    return {
        "precision": precision,
        "rows": len(pairs.pairs),
        "queries": int(pairs.queries.max()) + 1,
        "is_weak": len(pairs.pairs) < spec.min_pairs,
        "by_batch_size": sizes,
        "checks": checks,
        "has_passed": all(check["has_passed"] for check in checks),
        "could_lose": could_lose(precision, list(sizes.values()), spec),
        "worst": worst_rows(reference, found_by_size, pairs, spec.worst),
    }


def judge(precision: str, figures: Sequence[Mapping[str, Any]], spec: ParitySpec) -> list[dict[str, Any]]:
    """The gate of a precision, over all batch sizes; answers that are no numbers never pass."""
    finite = all(one["is_finite"] for one in figures)
    checks = [{"check": "answers are numbers", "value": float(finite), "bound": 1.0, "has_passed": finite}]
    family = FAMILY[precision]
    if family == "fp32":
        value = max(one["max_abs"] for one in figures)
        checks.append(_check("max |Δp|", value, spec.fp32_max_abs, value <= spec.fp32_max_abs))
    elif family == "fp16":
        flips = max(one["flip_share"] for one in figures)
        checks.append(_check("share of flipped grades", flips, spec.fp16_max_flips, flips <= spec.fp16_max_flips))
        taus = [one["tau"] for one in figures if one["tau"] is not None]
        if taus:  # else the student tells no two documents of a query apart, and there is no order to keep
            checks.append(_check("Kendall tau per query", min(taus), spec.fp16_min_tau, min(taus) >= spec.fp16_min_tau))
        losses = [one["ndcg@10"]["loss"] for one in figures if one["ndcg@10"]["loss"] is not None]
        if losses:
            checks.append(
                _check("nDCG@10 loss", max(losses), spec.fp16_max_ndcg_loss, max(losses) <= spec.fp16_max_ndcg_loss)
            )
    else:
        worst = max(figures, key=lambda one: one["f1_macro"]["loss_low"])["f1_macro"]
        value = worst["loss_low"]
        checks.append(
            _check("low end of the macro F1 loss, points", value, spec.int8_max_f1_loss, value <= spec.int8_max_f1_loss)
        )
        if spec.int8_max_flips is not None:
            flips = max(one["flip_share"] for one in figures)
            checks.append(_check("share of flipped grades", flips, spec.int8_max_flips, flips <= spec.int8_max_flips))
    return checks


def could_lose(precision: str, figures: Sequence[Mapping[str, Any]], spec: ParitySpec) -> float | None:
    """Points of macro F1 at the far end of an int8's interval, where that lies above the bound; None where it does not.

    A single query gives no interval, and rules nothing out: then it is all points that the student has.
    """
    if FAMILY[precision] != "int8":
        return None
    worst = max(
        one["f1_macro"]["loss_high"] if one["judged_queries"] > 1 else one["f1_macro"]["student"] * POINTS
        for one in figures
    )
    return float(worst) if worst > spec.int8_max_f1_loss else None


def worst_rows(
    reference: Mapping[str, np.ndarray],
    found_by_size: Mapping[int, Mapping[str, np.ndarray]],
    pairs: PairSet,
    number: int,
) -> list[dict[str, Any]]:
    """The rows whose relevance differs most, flipped ones first; texts are left out, the row's name leads to them."""
    ranked: list[tuple[bool, float, int, int]] = []
    for size, found in found_by_size.items():
        difference_N = np.nan_to_num(np.abs(found[HEAD] - reference[HEAD]).max(1), nan=np.inf)
        is_flip_N = found[HEAD].argmax(1) != reference[HEAD].argmax(1)
        order = np.lexsort((-difference_N, ~is_flip_N))[:number]
        ranked += [(bool(is_flip_N[row]), float(difference_N[row]), size, int(row)) for row in order]
    ranked.sort(key=lambda one: (not one[0], -one[1], one[2], one[3]))
    return [
        {
            "source": pairs.names[row][0],
            "row": pairs.names[row][1],
            "batch_size": size,
            "is_flip": is_flip,
            "max_abs": _finite(difference),
            "student": [_finite(value) for value in reference[HEAD][row].tolist()],
            "model": [_finite(value) for value in found_by_size[size][HEAD][row].tolist()],
        }
        for is_flip, difference, size, row in ranked[:number]
    ]


def _figures(
    reference: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], pairs: PairSet, spec: ParitySpec
) -> dict[str, Any]:
    ours_NK, theirs_NK = reference[HEAD], found[HEAD]
    margin = told_apart_from(ours_NK.shape[1])
    orders = kept_orders(pairs.queries, expected_grade(ours_NK), expected_grade(theirs_NK), margin)
    by_head = {
        name: float(np.nan_to_num(np.abs(found[name] - reference[name]), nan=np.inf).max()) for name in reference
    }
    flips_N = ours_NK.argmax(1) != theirs_NK.argmax(1)
    return {
        "is_finite": all(bool(np.isfinite(values).all()) for values in found.values()),
        "max_abs": _capped(max(by_head.values())),
        "max_abs_by_head": {name: _capped(value) for name, value in by_head.items()},
        "flips": int(flips_N.sum()),
        "flip_share": float(flips_N.mean()),
        "flip_share_by_head": {
            name: float((reference[name].argmax(1) != found[name].argmax(1)).mean()) for name in reference
        },
        "tau": orders.tau,
        "orders": {"told_apart": orders.told_apart, "of": orders.of, "margin": margin},
        **_judged(ours_NK, theirs_NK, pairs, spec),
    }


def expected_grade(probs_NK: np.ndarray) -> np.ndarray:
    """Σ k p(k), float64 [N]: what documents are ordered by."""
    return np.nan_to_num(probs_NK.astype(np.float64)) @ np.arange(probs_NK.shape[1])


def _judged(ours_NK: np.ndarray, theirs_NK: np.ndarray, pairs: PairSet, spec: ParitySpec) -> dict[str, Any]:
    """Macro F1 and nDCG@10 of both by grades: gold, else the teacher's, else the student's own."""
    has_N = pairs.grades != NO_GRADE
    judge_name = pairs.judge if pairs.judge and has_N.any() else "student"
    rows = np.flatnonzero(has_N) if judge_name != "student" else np.arange(len(ours_NK))
    grade_N = pairs.grades[rows] if judge_name != "student" else ours_NK.argmax(1)
    _, query_N = np.unique(pairs.queries[rows], return_inverse=True)
    queries, grades = int(query_N.max()) + 1, ours_NK.shape[1]
    counts = [
        confusion_by_group(grade_N, probs_NK[rows].argmax(1), query_N, num_groups=queries, grades=grades)
        for probs_NK in (ours_NK, theirs_NK)
    ]
    ours, theirs = (float(_f1_macro(count_GKK.sum(0))) for count_GKK in counts)
    first, second = (_resampled(count_GKK) for count_GKK in counts)
    drawn = paired_bootstrap(first, second, num_groups=queries, resamples=spec.resamples, seed=spec.seed).difference
    loss = (ours - theirs) * POINTS
    low, high = (-drawn["f1_macro"].high * POINTS, -drawn["f1_macro"].low * POINTS) if drawn else (loss, loss)
    doc_N, _ = codes_of(ids_of(map(str, rows.tolist())))
    ndcg = [
        _mean(rank_queries(query_N, doc_N, expected_grade(probs_NK)[rows], grade_N, num_queries=queries).ndcg)
        for probs_NK in (ours_NK, theirs_NK)
    ]
    return {
        "judged_by": judge_name,
        "judged_rows": len(rows),
        "judged_queries": queries,
        "f1_macro": {"student": ours, "model": theirs, "loss_points": loss, "loss_low": low, "loss_high": high},
        "ndcg@10": {"student": ndcg[0], "model": ndcg[1], "loss": None if None in ndcg else ndcg[0] - ndcg[1]},  # type: ignore[operator]
    }


def _f1_macro(counts_KK: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return f1_macro(counts_KK)


def _resampled(counts_GKK: np.ndarray) -> Statistic:
    """Macro F1 of weighted queries."""
    return lambda weight_RG: {"f1_macro": _f1_macro(np.tensordot(weight_RG, counts_GKK, axes=1))}


def _check(name: str, value: float, bound: float, has_passed: bool) -> dict[str, Any]:
    return {"check": name, "value": value, "bound": bound, "has_passed": bool(has_passed)}


def _mean(value_G: np.ndarray) -> float | None:
    return float(np.nanmean(value_G)) if np.isfinite(value_G).any() else None


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _capped(value: float) -> float:
    """A difference of probabilities is at most 1; no number at all counts as that."""
    return float(min(value, 1.0))
