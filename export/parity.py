"""Parity: does an exported model say what the student says, on real pairs, alone and in every company?

The reference is the student in torch. The exported model is driven through the bundle's own loader: its tokens, its
padding, its session. Every pair is answered once in batches of each size, in the order of the data, so that short rows
are beside long ones and are padded.

The gate of int8 asks whether a loss beyond the bound is proven. Of few pairs little is: a model that passes though a
loss beyond the bound is not ruled out either is marked `undecided`, with the loss that it could have.

A dynamic int8 scales its activations over the whole batch, so its answers depend on the company; the figures of the
worst size decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from relabel.export.judged_parity import POINTS, expected_grade, judged_figures
from relabel.export.loader import Encoder
from relabel.export.orders import kept_orders, least_difference
from relabel.export.parity_records import ModelParity, OrderCounts, ParityCheck, SizeFigures, WorstRow
from relabel.export.reference_pairs import PairSet
from relabel.export.specs import ParitySpec
from relabel.manifests.metrics.bootstrap import Interval, bootstrap
from relabel.manifests.metrics.metric import NOTHING_DRAWN, finite, mean
from relabel.manifests.metrics.shares import share_bounds

# N pairs, K grades of a head, G queries

HEAD = "relevance"
FAMILY = {"fp32": "fp32", "fp16": "fp16", "bf16": "fp16", "int8": "int8", "int8-static": "int8"}
"""Which gate a precision passes."""
LEAST_OUTCOMES = 30
"""See `doubts_of`."""
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
) -> ModelParity:
    """Hold a model's answers against the student's.

    Args:
        reference: the student's probabilities by head.
        found_by_size: the model's, by batch size.
    Returns:
        Figures by batch size, the verdicts of the precision's gate, and the rows that differ most.
    """
    sizes = {str(size): _figures(reference, found, pairs, spec) for size, found in found_by_size.items()}
    checks = judge(precision, list(sizes.values()), spec)
    return ModelParity(
        precision=precision,
        rows=len(pairs.pairs),
        queries=int(pairs.queries.max()) + 1,
        is_weak=len(pairs.pairs) < spec.min_pairs,
        by_batch_size=sizes,
        checks=checks,
        has_passed=all(check.has_passed for check in checks),
        could_lose=could_lose(precision, list(sizes.values()), spec),
        doubts=doubts_of(precision, reference[HEAD], list(sizes.values()), spec),
        worst=worst_rows(reference, found_by_size, pairs, spec.worst),
    )


def judge(precision: str, figures: Sequence[SizeFigures], spec: ParitySpec) -> list[ParityCheck]:
    """The gate of a precision, over all batch sizes; answers that are no numbers never pass."""
    finite = all(one.is_finite for one in figures)
    checks = [_check("answers are numbers", float(finite), 1.0, finite)]
    family = FAMILY[precision]
    if family == "fp32":
        value = max(one.max_abs for one in figures)
        checks.append(_check("max |Δp|", value, spec.fp32_max_abs, value <= spec.fp32_max_abs))
    elif family == "fp16":
        flips = max(one.flip_share for one in figures)
        checks.append(_check("share of flipped grades", flips, spec.fp16_max_flips, flips <= spec.fp16_max_flips))
        taus = [one.tau for one in figures if one.tau is not None]
        if taus:  # else the student tells no two documents of a query apart, and there is no order to keep
            checks.append(_check("Kendall tau per query", min(taus), spec.fp16_min_tau, min(taus) >= spec.fp16_min_tau))
        losses = [one.ndcg.loss for one in figures if one.ndcg.loss is not None]
        if losses:
            checks.append(
                _check("nDCG@10 loss", max(losses), spec.fp16_max_ndcg_loss, max(losses) <= spec.fp16_max_ndcg_loss)
            )
    else:
        value = max(one.f1_macro.loss_low for one in figures)
        checks.append(
            _check("low end of the macro F1 loss, points", value, spec.int8_max_f1_loss, value <= spec.int8_max_f1_loss)
        )
        highs = [one.tau if one.tau_high is None else one.tau_high for one in figures if one.tau is not None]
        if highs:
            check, bound = "high end of Kendall tau per query", spec.int8_min_tau
            checks.append(_check(check, min(highs), bound, min(highs) >= bound))
        if spec.int8_max_flips is not None:
            flips = max(one.flip_share for one in figures)
            checks.append(_check("share of flipped grades", flips, spec.int8_max_flips, flips <= spec.int8_max_flips))
    return checks


def could_lose(precision: str, figures: Sequence[SizeFigures], spec: ParitySpec) -> float | None:
    """Points of macro F1 at the far end of an int8's interval, where that lies above the bound; None where it does not.

    A single query gives no interval, and rules nothing out: then it is all points that the student has.
    """
    if FAMILY[precision] != "int8":
        return None
    worst = max(one.f1_macro.loss_high if one.judged_queries > 1 else one.f1_macro.student * POINTS for one in figures)
    return float(worst) if worst > spec.int8_max_f1_loss else None


def doubts_of(precision: str, student_NK: np.ndarray, figures: Sequence[SizeFigures], spec: ParitySpec) -> list[str]:
    """Why these pairs do not tell whether a model that passes its gate is as good as the student; of fp32 none.

    A student that gives one grade to nearly all pairs never flips, and one that tells hardly any documents apart has no
    order to lose. What can show a loss are the outcomes that are not the commonest: if none of m is lost, a loss of up
    to 3/m of them is not ruled out at 95 % (the rule of three), so of fewer than `LEAST_OUTCOMES` = 30 one in ten may
    be lost unseen.
    """
    if FAMILY[precision] == "fp32":
        return []
    count_K = np.bincount(student_NK.argmax(1))
    others, given = int(count_K.sum() - count_K.max()), int((count_K > 0).sum())
    said = []
    if others < LEAST_OUTCOMES:
        said.append(
            f"the student gives {given} of its grades, and to {others:,} of {len(student_NK):,} pairs another than the "
            f"commonest: fewer than {LEAST_OUTCOMES}, of which a flip would hardly show"
        )
    ordered = min((one.orders.ordered for one in figures if one.orders), default=0)
    if ordered < LEAST_OUTCOMES:
        said.append(f"the student orders {ordered:,} pairs of documents: fewer than {LEAST_OUTCOMES}")
    lows = [one.tau if one.tau_low is None else one.tau_low for one in figures if one.tau is not None]
    if FAMILY[precision] == "int8" and lows and min(lows) < spec.int8_min_tau:
        said.append(f"Kendall tau could be as low as {min(lows):.3f} (95 %), the bound is {spec.int8_min_tau:g}")
    return said


def worst_rows(
    reference: Mapping[str, np.ndarray],
    found_by_size: Mapping[int, Mapping[str, np.ndarray]],
    pairs: PairSet,
    number: int,
) -> list[WorstRow]:
    """The rows whose relevance differs most, flipped ones first; texts are left out, the row's name leads to them."""
    ranked: list[tuple[bool, float, int, int]] = []
    for size, found in found_by_size.items():
        difference_N = np.nan_to_num(np.abs(found[HEAD] - reference[HEAD]).max(1), nan=np.inf)
        is_flip_N = found[HEAD].argmax(1) != reference[HEAD].argmax(1)
        order = np.lexsort((-difference_N, ~is_flip_N))[:number]
        ranked += [(bool(is_flip_N[row]), float(difference_N[row]), size, int(row)) for row in order]
    ranked.sort(key=lambda one: (not one[0], -one[1], one[2], one[3]))
    return [
        WorstRow(
            *pairs.names[row],
            batch_size=size,
            is_flip=is_flip,
            max_abs=_finite(difference),
            student=[_finite(value) for value in reference[HEAD][row].tolist()],
            model=[_finite(value) for value in found_by_size[size][HEAD][row].tolist()],
        )
        for is_flip, difference, size, row in ranked[:number]
    ]


def _figures(
    reference: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], pairs: PairSet, spec: ParitySpec
) -> SizeFigures:
    ours_NK, theirs_NK = reference[HEAD], found[HEAD]
    margin = least_difference(ours_NK.shape[1])
    orders = kept_orders(pairs.queries, expected_grade(ours_NK), expected_grade(theirs_NK), margin)
    tau = _tau_bounds(orders.by_query, spec)
    by_head = {
        name: float(np.nan_to_num(np.abs(found[name] - reference[name]), nan=np.inf).max()) for name in reference
    }
    flips_N = ours_NK.argmax(1) != theirs_NK.argmax(1)
    flip_low, flip_high = share_bounds(np.bincount(pairs.queries, flips_N), np.bincount(pairs.queries))
    judged = judged_figures(ours_NK, theirs_NK, pairs, spec)
    return SizeFigures(
        is_finite=all(bool(np.isfinite(values).all()) for values in found.values()),
        max_abs=_capped(max(by_head.values())),
        max_abs_by_head={name: _capped(value) for name, value in by_head.items()},
        flips=int(flips_N.sum()),
        flip_share=float(flips_N.mean()),
        flip_share_by_head={
            name: float((reference[name].argmax(1) != found[name].argmax(1)).mean()) for name in reference
        },
        flip_low=finite(float(flip_low)),
        flip_high=finite(float(flip_high)),
        tau=orders.tau,
        tau_low=finite(tau.low),
        tau_high=finite(tau.high),
        orders=OrderCounts(orders.ordered, orders.of, margin),
        judged_by=judged.judge,
        judged_rows=judged.rows,
        judged_queries=judged.queries,
        f1_macro=judged.f1_macro,
        ndcg=judged.ndcg,
    )


def _tau_bounds(by_query_G2: np.ndarray, spec: ParitySpec) -> Interval:
    drawn = bootstrap(
        lambda weight_RG: {"tau": mean(weight_RG @ by_query_G2)},
        num_groups=len(by_query_G2),
        resamples=spec.resamples,
        seed=spec.seed,
    )
    return drawn.get("tau", NOTHING_DRAWN)


def _check(name: str, value: float, bound: float, has_passed: bool) -> ParityCheck:
    return ParityCheck(name, value, bound, bool(has_passed))


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _capped(value: float) -> float:
    """A difference of probabilities is at most 1; no number at all counts as that."""
    return float(min(value, 1.0))
