"""Parity: does an exported model answer what the student answers, on real pairs, alone and in batches of every size?

The reference is the student in torch. The exported model is driven through the bundle's own loader: its tokens, its
padding, its session. Every pair is answered once in batches of each size, in the order of the data, so that short rows
share batches with long ones and are padded. A dynamic int8 scales its activations over the whole batch, so its answers
depend on the batch; the figures of the worst size decide.

The gate of int8 asks whether a loss beyond the bound is proven. Of few pairs little is: a model that passes though a
loss beyond the bound is not ruled out either is marked `undecided`, with its doubts.

Order is Kendall's tau over the orders that the student states. Two documents whose scores hardly differ have no order
to keep: another padding, or sums in another order, turn it round in the student itself. So a margin is fixed
beforehand, and documents whose scores differ by more than that must keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from relabel.distill.students.examples import NO_GRADE, SIDES, TEST, TRAIN, load_examples, read_pairs
from relabel.distill.students.spec import DistillSpec
from relabel.export import loader
from relabel.export.bundle_facts import ModelParity, ParityCheck, SizeFigures
from relabel.export.loader import OPENVINO, STATIC, BundleError, Encoder, choose_provider, open_session
from relabel.export.specs import ParitySpec
from relabel.manifests.errors import ConfigError, InputError, ManifestError, MissingExtraError, RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale, grades_seen, load_gold_by_row, mapped
from relabel.manifests.inputs import open_dataset
from relabel.manifests.labels import codes_of, ids_of
from relabel.manifests.metrics.metric import (
    NOTHING_DRAWN,
    bootstrap,
    confusion_by_group,
    f1_macro,
    finite,
    mean,
    rank_queries,
    rows_by_group,
    share_bounds,
)
from relabel.manifests.process import require
from relabel.manifests.records import digest_of, readable_json
from relabel.manifests.specs import Columns, InputSpec, validate_spec
from relabel.manifests.tables import read_grades

# N pairs


@dataclass(frozen=True)
class PairSet:
    """Pairs with their queries, and with grades where there are some.

    Args:
        pairs: (query, document) texts.
        names: where each comes from: `(source, row)`.
        queries: int64 [N], which pairs are of one query: 0..G-1.
        grades: int64 [N], -1 where there is none.
        judge: whose grades those are, `gold` or `teacher`; None where no pair has one.
        about: where all of this is from, for the manifest.
    """

    pairs: list[tuple[str, str]]
    names: list[tuple[str, int]]
    queries: np.ndarray
    grades: np.ndarray
    judge: str | None
    about: dict[str, Any]

    def take(self, rows: np.ndarray) -> PairSet:
        """Some of the pairs, in the order of `rows`; queries get new numbers."""
        _, query_N = np.unique(self.queries[rows], return_inverse=True)
        chosen = rows.tolist()
        return replace(
            self,
            pairs=[self.pairs[row] for row in chosen],
            names=[self.names[row] for row in chosen],
            queries=query_N,
            grades=self.grades[rows],
        )


@dataclass(frozen=True)
class PairsFile:
    """A file of pairs that the user names.

    Args:
        path: Parquet file, folder or glob.
        gold: column of trusted grades, if any.
        gold_map: brings them to the student's scale.
        columns: by role, where they are called otherwise than those that the student was trained on.
    """

    path: str
    gold: str | None = None
    gold_map: dict[int, int] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self) -> dict[str, Any]:
        """What a bundle that was compared on it is made by; without columns as before they could be named."""
        named = {"columns": dict(self.columns)} if self.columns else {}
        return {"path": self.path, "gold": self.gold, "gold_map": self.gold_map, **named}


def lineage_pairs(manifest: Mapping[str, Any], storage: Storage, *, grades: int) -> tuple[PairSet, PairSet]:
    """The pairs that a student was tested on, and those that it learned from, read again from where its labels and gold
    lie.

    Args:
        manifest: the student's.
        grades: K of its relevance head.
    Raises:
        InputError: the student's manifest names none, or they can't be read any more.
        ManifestError: they are no longer what they were.
    """
    if "spec" not in manifest:
        raise InputError(
            "the student's manifest does not say what it was trained on. Name pairs to compare on with --pairs."
        )
    try:
        examples = load_examples(validate_spec(DistillSpec, manifest["spec"], where="the student's manifest"), storage)
    except RelabelError as exc:
        raise InputError(
            f"the student's own pairs can't be read: {exc} Restore them, or name others with --pairs."
        ) from exc
    split_digest = examples.about.split.sha256
    if split_digest != manifest["split"]["sha256"]:
        raise ManifestError(
            "the pairs that the student's manifest names now split otherwise than when it was trained, so its test "
            "split can't be determined. Restore them, or name other pairs with --pairs."
        )
    is_gold = bool((examples.gold != NO_GRADE).any())
    grade_N = examples.gold if is_gold else examples.teacher
    judge = "gold" if is_gold else "teacher" if bool((grade_N != NO_GRADE).any()) else None
    check_scale(set(grade_N[grade_N != NO_GRADE].tolist()), grades, where="the student's labels", option="gold.map")
    about = {"from": "lineage", "split_sha256": split_digest, "side": SIDES[TEST]}
    _, query_N = np.unique(examples.queries, return_inverse=True)
    whole = PairSet(
        pairs=examples.texts,
        names=examples.names,
        queries=query_N,
        grades=grade_N,
        judge=judge,
        about=about,
    )
    return whole.take(examples.rows_of(TEST)), whole.take(examples.rows_of(TRAIN))


def file_pairs(source: PairsFile, columns: Mapping[str, Any], storage: Storage, *, grades: int) -> PairSet:
    """The pairs of a file.

    Args:
        columns: the student's.
        grades: K of its relevance head.
    Raises:
        InputError: the file can't be read, lacks a column, or its grades are off the scale.
    """
    wanted = Columns(**{**columns, **source.columns}).model_copy(update={"gold": source.gold, "context": None})
    dataset = open_dataset(InputSpec(path=(source.path,), columns=wanted), storage)
    pairs = read_pairs(dataset, np.arange(dataset.rows))
    grade_N = np.full(len(pairs), NO_GRADE, dtype=np.int64)
    if source.gold is not None:
        values = read_grades(load_gold_by_row([file.path for file in dataset.files], source.gold, storage)).values
        known = mapped(values, source.gold_map, where=source.path, option="--gold-map")
        check_scale(grades_seen(known), grades, where=source.path, option="--gold-map")
        grade_N[:] = known.fill_null(NO_GRADE).to_numpy()
    _, query_N = np.unique([pair.query_id for pair in pairs], return_inverse=True)
    return PairSet(
        pairs=[(pair.query, pair.document) for pair in pairs],
        names=[(source.path, pair.row_id) for pair in pairs],
        queries=query_N,
        grades=grade_N,
        judge="gold" if (grade_N != NO_GRADE).any() else None,
        about={
            "from": "file",
            "name": Path(source.path).name,
            "inputs_sha256": digest_of([list(file.identity) for file in dataset.files]),
        },
    )


def draw_queries(pairs: PairSet, at_least: int, *, seed: int) -> PairSet:
    """Whole queries, drawn until they hold enough pairs; all of them where there are too few.

    Raises:
        ConfigError: there is no pair at all.
    """
    if not pairs.pairs:
        raise ConfigError("no pair to compare on: the student's test split is empty. Name some with --pairs.")
    groups = rows_by_group(pairs.queries, int(pairs.queries.max()) + 1)
    drawn = [groups[group] for group in np.random.default_rng(seed).permutation(len(groups)).tolist()]
    number = np.searchsorted(np.cumsum([len(rows) for rows in drawn]), at_least) + 1
    return pairs.take(np.sort(np.concatenate(drawn[:number])))


def draw_pairs(pairs: PairSet, number: int, *, seed: int) -> Sequence[tuple[str, str]]:
    """Some pairs, drawn without replacement; all where there are too few."""
    if len(pairs.pairs) <= number:
        return pairs.pairs
    rows = np.random.default_rng(seed).choice(len(pairs.pairs), size=number, replace=False)
    return [pairs.pairs[row] for row in rows.tolist()]


# N pairs, K grades

RESOLUTION = 1e-4
"""How far a probability may move in fp32: the default of that gate and not its setting, since to loosen one must not
loosen the other.
"""


def least_difference(grades: int) -> float:
    """The least difference of two expected grades that is an order, K(K−1)·1e-4: 6e-4 for three grades.

    When every probability moves by 1e-4 or less, an expected grade Σ k p(k) moves by at most 1e-4·K(K−1)/2, and a
    difference of two by twice that. So a model that is as near as fp32 has to be keeps all orders, and tau 1.
    """
    return RESOLUTION * grades * (grades - 1)


def kept_orders(query_N: np.ndarray, ours_N: np.ndarray, theirs_N: np.ndarray, margin: float) -> tuple[int, np.ndarray]:
    """Compare a model's orders with the student's.

    Of a query, tau = (kept − reversed) / ordered pairs; an order that the model makes a tie counts as neither. Queries
    are averaged by their number of documents: in a plain mean one swap in a query of two documents would outweigh a
    hundred in a large one, and by pairs of documents, which grow with the square, a large query would hide all others.

    Args:
        query_N: which rows are of one query, 0..G-1.
        ours_N, theirs_N: expected grades by student and model.
        margin: the student's scores differ by more than this, or there is no order.
    Returns:
        Pairs of documents of one query that are in order; tau of each query that has an order with its weight, [G, 2],
        tau times the weight first.
    Source:
        Kendall 1938, "A new measure of rank correlation": tau; here over the pairs beyond the margin only.
    """
    weighted = [np.zeros((0, 2))]
    ordered = 0
    for rows in rows_by_group(query_N, int(query_N.max()) + 1):
        score, count = _balance(ours_N[rows], theirs_N[rows], margin)
        if count:
            ordered += count
            weighted.append(np.array([[score / count * len(rows), len(rows)]]))
    return ordered, np.concatenate(weighted)


def tau_of(by_query_G2: np.ndarray) -> float | None:
    """The mean over queries by weight, -1 to 1; None where the student orders no two documents of a query."""
    return float(by_query_G2[:, 0].sum() / by_query_G2[:, 1].sum()) if len(by_query_G2) else None


def _balance(ours_D: np.ndarray, theirs_D: np.ndarray, margin: float) -> tuple[int, int]:
    """Orders kept less those reversed, and how many there are. Document by document: a query of
    10,000 has 50 million.
    """
    score = count = 0
    for place in range(len(ours_D) - 1):
        difference = ours_D[place + 1 :] - ours_D[place]
        is_order = np.abs(difference) > margin
        count += int(is_order.sum())
        score += int((np.sign(difference) * np.sign(theirs_D[place + 1 :] - theirs_D[place]))[is_order].sum())
    return score, count


POINTS = 100.0


def expected_grade(probs_NK: np.ndarray) -> np.ndarray:
    """Σ k p(k), float64 [N]: what documents are ordered by."""
    return np.nan_to_num(probs_NK.astype(np.float64)) @ np.arange(probs_NK.shape[1])


def _judged(ours_NK: np.ndarray, theirs_NK: np.ndarray, pairs: PairSet, spec: ParitySpec) -> dict[str, Any]:
    """Fields of `SizeFigures`: macro F1 and nDCG@10 of both by grades: gold, else the teacher's, else the student's
    own.
    """
    has_N = pairs.grades != NO_GRADE
    judge_name = pairs.judge if pairs.judge and has_N.any() else "student"
    rows = np.flatnonzero(has_N) if judge_name != "student" else np.arange(len(ours_NK))
    grade_N = pairs.grades[rows] if judge_name != "student" else ours_NK.argmax(1)
    _, query_N = np.unique(pairs.queries[rows], return_inverse=True)
    queries = int(query_N.max()) + 1
    grades = ours_NK.shape[1]
    counts = [
        confusion_by_group(
            grade_N,
            probs_NK[rows].argmax(1),
            query_N,
            num_groups=queries,
            grades=grades,
        )
        for probs_NK in (ours_NK, theirs_NK)
    ]
    ours, theirs = (float(_f1_macro(count_GKK.sum(0))) for count_GKK in counts)

    def difference(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        first_R, second_R = (_f1_macro(np.tensordot(weight_RG, count_GKK, axes=1)) for count_GKK in counts)
        return {"f1_macro": second_R - first_R}

    drawn = bootstrap(difference, num_groups=queries, resamples=spec.resamples, seed=spec.seed)
    loss = (ours - theirs) * POINTS
    interval = drawn.get("f1_macro")
    # from zero, since a minus alone makes -0.0 of no loss
    low, high = (0 - interval.high * POINTS, 0 - interval.low * POINTS) if interval else (loss, loss)
    doc_N, _ = codes_of(ids_of(map(str, rows.tolist())))
    first_ndcg, second_ndcg = (
        _mean(
            rank_queries(
                query_N,
                doc_N,
                expected_grade(probs_NK)[rows],
                grade_N,
                num_queries=queries,
            ).ndcg
        )
        for probs_NK in (ours_NK, theirs_NK)
    )
    ndcg_loss = None if first_ndcg is None or second_ndcg is None else first_ndcg - second_ndcg
    return {
        "judged_by": judge_name,
        "judged_queries": queries,
        "f1_macro": {"student": ours, "model": theirs, "loss_points": loss, "loss_low": low, "loss_high": high},
        "ndcg": {"student": first_ndcg, "model": second_ndcg, "loss": ndcg_loss},
    }


def _f1_macro(counts_KK: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return f1_macro(counts_KK)


def _mean(value_G: np.ndarray) -> float | None:
    return float(np.nanmean(value_G)) if np.isfinite(value_G).any() else None


# N pairs, K grades of a head, G queries

HEAD = "relevance"
FAMILY = {"fp32": "fp32", "fp16": "fp16", "bf16": "fp16", "int8": "int8", STATIC: "int8"}
"""Which gate a precision passes."""
LEAST_OUTCOMES = 30
"""See `doubts_of`."""
Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""A session: one batch to probabilities by head, [B, K] each, which lie in host memory when it returns."""


def answers(
    run: Run, encoder: Encoder, rows: Sequence[tuple[list[int], list[int]]], batch_size: int
) -> dict[str, np.ndarray]:
    """Probabilities by head, float32 [N, K], asked in batches of one size in the order given."""
    starts = range(0, len(rows), batch_size)
    parts = [run(encoder.collate(rows[start : start + batch_size])) for start in starts]
    return {name: np.concatenate([part[name] for part in parts]).astype(np.float32) for name in parts[0]}


def measure(
    precision: str,
    reference: Mapping[str, np.ndarray],
    found_by_size: Mapping[int, Mapping[str, np.ndarray]],
    pairs: PairSet,
    spec: ParitySpec,
) -> ModelParity:
    """Compare a model's answers with the student's.

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
        doubts=doubts_of(precision, reference[HEAD], list(sizes.values()), spec),
        worst=worst_rows(reference, found_by_size, pairs, spec.worst),
    )


def judge(precision: str, figures: Sequence[SizeFigures], spec: ParitySpec) -> list[ParityCheck]:
    """The gate of a precision, over all batch sizes: checks that have no value are left out (a student that gives no
    two documents of a query different scores has no order to keep). Answers that are no numbers never pass.
    """
    taus = [size.tau for size in figures if size.tau is not None]
    high_taus = [size.tau if size.tau_high is None else size.tau_high for size in figures]
    losses = [size.ndcg["loss"] for size in figures]
    flips = max(size.flip_share for size in figures)
    low_tau = min(taus, default=None)
    high_tau = min((tau for tau in high_taus if tau is not None), default=None)
    ndcg_loss = max((loss for loss in losses if loss is not None), default=None)
    gate = _Gate()
    gate.at_least("answers are numbers", float(all(size.is_finite for size in figures)), 1.0)
    match FAMILY[precision]:
        case "fp32":
            gate.at_most("max |Δp|", max(size.max_abs for size in figures), spec.fp32_max_abs)
        case "fp16":
            gate.at_most("share of flipped grades", flips, spec.fp16_max_flips)
            gate.at_least("Kendall tau per query", low_tau, spec.fp16_min_tau)
            gate.at_most("nDCG@10 loss", ndcg_loss, spec.fp16_max_ndcg_loss)
        case "int8":
            f1_loss = max(size.f1_macro["loss_low"] for size in figures)
            gate.at_most("low end of the macro F1 loss, points", f1_loss, spec.int8_max_f1_loss)
            gate.at_least("high end of Kendall tau per query", high_tau, spec.int8_min_tau)
            gate.at_most("share of flipped grades", flips, spec.int8_max_flips)
    return gate.checks


class _Gate:
    """Checks against bounds; one without a value or a bound is left out."""

    def __init__(self) -> None:
        self.checks: list[ParityCheck] = []

    def at_most(self, check: str, value: float | None, bound: float | None) -> None:
        if value is not None and bound is not None:
            self.checks.append(ParityCheck(check, value, bound, has_passed=value <= bound))

    def at_least(self, check: str, value: float | None, bound: float | None) -> None:
        if value is not None and bound is not None:
            self.checks.append(ParityCheck(check, value, bound, has_passed=value >= bound))


def doubts_of(precision: str, student_NK: np.ndarray, figures: Sequence[SizeFigures], spec: ParitySpec) -> list[str]:
    """Why these pairs do not show whether a model that passes its gate is as good as the student; of fp32 none.

    A student that gives one grade to nearly all pairs never flips, and one that scores nearly all documents alike has
    no order to lose. What can show a loss are the outcomes that are not the commonest: if none of m is lost, a loss of
    up to 3/m of them is not ruled out at 95 % (the rule of three), so of fewer than `LEAST_OUTCOMES` = 30 one in ten
    may be lost unseen. A single query gives no interval of macro F1: all points that it has could be lost.
    """
    if FAMILY[precision] == "fp32":
        return []
    count_K = np.bincount(student_NK.argmax(1))
    others = int(count_K.sum() - count_K.max())
    given = int((count_K > 0).sum())
    doubts = []
    loss = max(
        one.f1_macro["loss_high"] if one.judged_queries > 1 else one.f1_macro["student"] * POINTS for one in figures
    )
    if FAMILY[precision] == "int8" and loss > spec.int8_max_f1_loss:
        doubts.append(
            f"it could lose {loss:.1f} points of macro F1 (95 %), the bound is {spec.int8_max_f1_loss:g}; more pairs "
            "would decide, or a bound on flips (parity.int8_max_flips)"
        )
    if others < LEAST_OUTCOMES:
        doubts.append(
            f"the student gives {given} of its grades, and to {others:,} of {len(student_NK):,} pairs another than the "
            f"commonest: fewer than {LEAST_OUTCOMES}, of which a flip would hardly show"
        )
    ordered = min(one.ordered for one in figures)
    if ordered < LEAST_OUTCOMES:
        doubts.append(f"the student orders {ordered:,} pairs of documents: fewer than {LEAST_OUTCOMES}")
    lows = [one.tau if one.tau_low is None else one.tau_low for one in figures if one.tau is not None]
    if FAMILY[precision] == "int8" and lows and min(lows) < spec.int8_min_tau:
        doubts.append(f"Kendall tau could be as low as {min(lows):.3f} (95 %), the bound is {spec.int8_min_tau:g}")
    return doubts


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
        ranked += [
            (bool(is_flip_N[row]), float(difference_N[row]), size, int(row))
            for row in np.lexsort((-difference_N, ~is_flip_N))[:number]
        ]
    ranked.sort(key=lambda one: (not one[0], -one[1], one[2], one[3]))
    return [
        {
            **dict(zip(("source", "row"), pairs.names[row], strict=True)),
            "batch_size": size,
            "is_flip": is_flip,
            "max_abs": finite(difference),
            "student": [finite(value) for value in reference[HEAD][row].tolist()],
            "model": [finite(value) for value in found_by_size[size][HEAD][row].tolist()],
        }
        for is_flip, difference, size, row in ranked[:number]
    ]


def _figures(
    reference: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], pairs: PairSet, spec: ParitySpec
) -> SizeFigures:
    ours_NK = reference[HEAD]
    theirs_NK = found[HEAD]
    ordered, by_query_G2 = kept_orders(
        pairs.queries, expected_grade(ours_NK), expected_grade(theirs_NK), least_difference(ours_NK.shape[1])
    )
    tau = bootstrap(
        lambda weight_RG: {"tau": mean(weight_RG @ by_query_G2)},
        num_groups=len(by_query_G2),
        resamples=spec.resamples,
        seed=spec.seed,
    ).get("tau", NOTHING_DRAWN)
    apart = [np.nan_to_num(np.abs(found[name] - reference[name]), nan=np.inf).max() for name in reference]
    flips_N = ours_NK.argmax(1) != theirs_NK.argmax(1)
    flip_low, flip_high = share_bounds(np.bincount(pairs.queries, flips_N), np.bincount(pairs.queries))
    return SizeFigures(
        is_finite=all(bool(np.isfinite(values).all()) for values in found.values()),
        max_abs=float(min(1.0, max(apart))),  # no number at all counts as the largest difference that there is
        flip_share=float(flips_N.mean()),
        flip_low=finite(float(flip_low)),
        flip_high=finite(float(flip_high)),
        tau=tau_of(by_query_G2),
        tau_low=finite(tau.low),
        tau_high=finite(tau.high),
        ordered=ordered,
        **_judged(ours_NK, theirs_NK, pairs, spec),
    )


# ------------------------------------------------------------------------------
# The onnxruntime sessions that answer on this machine, and the reference answers that a bundle carries.


def provider_here(wish: str, *, option: str = "--provider", purpose: str = "An export") -> str:
    """The provider that a wish means on this machine: `cpu` or `cuda` for `auto`; `openvino` only where it is named.

    Args:
        option, purpose: for messages: where the wish comes from, and what the runtime is needed for.
    Raises:
        MissingExtraError: the runtime, or the provider in it, is absent.
    """
    if wish == OPENVINO:
        require(OPENVINO, extra=OPENVINO, purpose=f"{option} {OPENVINO}")
        return wish
    require("onnxruntime", extra="cpu", purpose=purpose)
    try:
        return choose_provider(wish)
    except BundleError as exc:
        raise MissingExtraError(f"{option} {wish}: {exc}") from exc


def model_runner(path: Path, provider: str, heads: Sequence[str], *, precision: str = "fp32", threads: int = 0) -> Run:
    """One exported model on one provider, and on no other.

    Args:
        heads: names of the outputs to ask for.
        precision: in what openvino computes; elsewhere the file says it.
        threads: of the CPU; 0 is as many as this process may use.
    Raises:
        MissingExtraError: this machine can't open it there, or, of what is returned, can't run it.
    """
    try:
        session = open_session(path, provider, precision=precision, threads=threads)
    except BundleError as exc:
        raise MissingExtraError(f"{exc} Leave its precision out here, or go where it runs.") from exc

    def run(batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        try:
            return dict(zip(heads, session.run(heads, batch), strict=True))
        except Exception as exc:  # the runtimes' errors share no other class
            rows, tokens = next(iter(batch.values())).shape
            reason = str(exc).splitlines()[0].rpartition(" : ")[2][:200]
            raise MissingExtraError(f"{path}: can't run {rows} rows of {tokens} tokens here ({reason}).") from exc

    return run


def choose_rows(pairs: PairSet, number: int) -> list[int]:
    """Places of pairs to seal, spread evenly over those that were compared, so that many queries are among them."""
    # longer ones are not sealed: what a model reads of them is far less
    short = [place for place, texts in enumerate(pairs.pairs) if sum(map(len, texts)) <= 20_000]
    places = np.linspace(0, len(short) - 1, min(number, len(short)))
    return [short[place] for place in places.round().astype(int).tolist()]


def write_reference(
    folder: Path,
    pairs: Sequence[tuple[str, str]],
    answered: Mapping[str, Mapping[str, np.ndarray]],
    models: Sequence[ModelParity],
    spec: ParitySpec,
) -> None:
    """Write `reference.json`: pairs, each model's probabilities of them, and how far another machine's may differ.
    `load.py --check` and `relabel pull --check-parity` ask them again where the bundle serves: answers may lie fp32's
    bound apart, or where a smaller precision moved them further from the student's at export, as far as that. No file
    without pairs.

    Args:
        answered: by precision and head, [B, K].
    """
    if not pairs:
        return
    apart = {one.precision: max(figure.max_abs for figure in one.figures) for one in models if one.precision != "fp32"}
    held = {
        "format": 1,
        "pairs": [list(pair) for pair in pairs],
        "models": {
            model.precision: {
                "tolerance": max(spec.fp32_max_abs, apart.get(model.precision, 0.0)),
                "answers": {name: values_BK.tolist() for name, values_BK in answered[model.precision].items()},
            }
            for model in models
        },
    }
    (folder / loader.REFERENCE).write_bytes(readable_json(held))
