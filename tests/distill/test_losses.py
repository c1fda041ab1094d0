"""Every loss against an independent computation: numpy loops, cases made by hand, torch's own functions, gradcheck in
float64.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.students.length_batches import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, batch_tokens_on, length_batches
from relabel.distill.students.losses import (
    Objective,
    consistency,
    cross_entropy,
    induced_log_probs,
    phi_mask,
    soft_targets,
    weighted_sum,
)
from relabel.distill.students.query_counts import COUNT_NAMES, query_counts
from relabel.distill.students.spec import LossSection
from relabel.manifests.labels import DEFAULT_PHI

MASK = phi_mask(DEFAULT_PHI, 3)


def softmax(row: np.ndarray) -> np.ndarray:
    raised = np.exp(row - row.max())
    return raised / raised.sum()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape) * 2


def induced_by_loop(subject: np.ndarray, attribute: np.ndarray, grades: int = 3) -> np.ndarray:
    found = np.zeros((len(subject), grades))
    for row in range(len(subject)):
        p_s, p_a = softmax(subject[row]), softmax(attribute[row])
        for s, a in itertools.product(range(5), range(5)):
            found[row, DEFAULT_PHI[s][a]] += p_s[s] * p_a[a]
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.5, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_soft_cross_entropy_is_the_sum_over_grades(temperature: float, smoothing: float) -> None:
    logits, teacher = draw(6, 3), np.apply_along_axis(softmax, 1, draw(6, 3, seed=1))
    wanted = []
    for z, p in zip(logits, teacher, strict=True):
        target = p ** (1 / temperature)
        target = (1 - smoothing) * target / target.sum() + smoothing / 3
        q = softmax(z / temperature)
        wanted.append(-(temperature**2) * sum(target[k] * math.log(q[k]) for k in range(3)))
    target = soft_targets(torch.tensor(teacher), temperature=temperature, smoothing=smoothing)
    found = cross_entropy(torch.tensor(logits), target, temperature=temperature)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)


def test_induced_distribution_is_the_sum_over_phis_cells() -> None:
    subject, attribute = draw(7, 5), draw(7, 5, seed=1)
    found = induced_log_probs(torch.tensor(subject), torch.tensor(attribute), MASK).exp()
    np.testing.assert_allclose(found.numpy(), induced_by_loop(subject, attribute), rtol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("direction", ["induced_to_direct", "direct_to_induced"])
def test_consistency_is_the_kl_that_its_name_says(direction: str) -> None:
    relevance, subject, attribute = draw(6, 3, seed=4), draw(6, 5), draw(6, 5, seed=1)
    induced, direct = induced_by_loop(subject, attribute), np.apply_along_axis(softmax, 1, relevance)
    p, q = (induced, direct) if direction == "induced_to_direct" else (direct, induced)
    wanted = [sum(p[row, k] * math.log(p[row, k] / q[row, k]) for k in range(3)) for row in range(6)]
    tensors = (torch.tensor(values) for values in (relevance, subject, attribute))
    np.testing.assert_allclose(consistency(*tensors, MASK, direction=direction).numpy(), wanted, rtol=1e-10)
    kl = torch.nn.functional.kl_div(torch.tensor(np.log(q)), torch.tensor(p), reduction="none").sum(-1)
    np.testing.assert_allclose(kl.numpy(), wanted, rtol=1e-10)


def test_a_grade_that_no_cell_gives_costs_nothing_and_has_a_finite_gradient() -> None:
    never_one = tuple(tuple(2 if grade else 0 for grade in row) for row in DEFAULT_PHI)
    logits = [torch.tensor(draw(3, width, seed=width), requires_grad=True) for width in (3, 5, 5)]
    losses = consistency(*logits, phi_mask(never_one, 3))
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert all(torch.isfinite(one.grad).all() for one in logits)


@pytest.mark.parametrize("direction", ["induced_to_direct", "direct_to_induced"])
def test_gradients_are_those_of_finite_differences(direction: str) -> None:
    relevance, subject, attribute = (
        torch.tensor(draw(3, width, seed=width), requires_grad=True) for width in (3, 5, 5)
    )
    target = torch.softmax(torch.tensor(draw(3, 3, seed=9)), -1)
    assert torch.autograd.gradcheck(
        lambda *heads: consistency(*heads, MASK, direction=direction), (relevance, subject, attribute)
    )
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, target, temperature=1.7), (relevance,))


def test_a_masked_row_can_be_anything() -> None:
    losses = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    total = weighted_sum(losses, torch.tensor([0.5, 0.0, 2.0]))
    total.backward()
    assert total.item() == 6.5
    assert losses.grad.tolist() == [0.5, 0.0, 2.0]


def batch(rows: int = 4, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    widths = {"relevance": 3, "subject": 5, "attribute": 5}
    logits = {
        name: torch.tensor(draw(rows, width, seed=seed + place)) for place, (name, width) in enumerate(widths.items())
    }
    targets = {
        name: torch.softmax(torch.tensor(draw(rows, width, seed=seed + 10 + width)), -1)
        for name, width in widths.items()
    }
    weights = {
        "relevance": torch.tensor([1.0, 2.0, 0.5, 1.0]),
        "subject": torch.tensor([1.0, 0.0, 0.0, 3.0]),
        "attribute": torch.ones(4),
    }
    held = {"targets": targets, "weights": {name: values.double() for name, values in weights.items()}}
    return logits, {**held, "row_weight": torch.tensor([1.0, 2.0, 0.5, 1.0]).double()}


def test_objective_is_equations_16_to_19_with_masks_and_weights() -> None:
    spec = LossSection(relevance=1.0, subject=0.5, attribute=0.25, consistency=0.2)
    logits, held = batch()
    objective = Objective(spec, {"relevance": 3, "subject": 5, "attribute": 5}, DEFAULT_PHI)
    totals = {name: weight.sum() for name, weight in objective.row_weights(held).items()}
    found = objective.loss(objective.sums(logits, held), totals).item()

    wanted = 0.0
    for name, weight in (("relevance", 1.0), ("subject", 0.5), ("attribute", 0.25)):
        target, weights = held["targets"][name].numpy(), held["weights"][name].numpy()  # type: ignore[index]
        rows = [-(target[row] * np.log(softmax(logits[name][row].numpy()))).sum() for row in range(4)]
        wanted += weight * float(np.average(rows, weights=weights))
    induced = induced_by_loop(logits["subject"].numpy(), logits["attribute"].numpy())
    direct = np.apply_along_axis(softmax, 1, logits["relevance"].numpy())
    kl = (induced * np.log(induced / direct)).sum(1)
    wanted += 0.2 * float(np.average(kl, weights=held["row_weight"].numpy()))  # type: ignore[union-attr]
    assert found == pytest.approx(wanted, rel=1e-10)


def test_a_low_temperature_sharpens_the_teacher_and_never_wipes_it_out() -> None:
    """0.34^(1/0.005) is below what float32 holds; the distribution that it is part of is not."""
    teacher = torch.tensor([[0.34, 0.33, 0.33], [0.2, 0.5, 0.3], [0.0, 0.0, 0.0]])
    found = soft_targets(teacher, temperature=0.005)
    raised = (teacher[:2].double() / teacher[:2].double().amax(-1, keepdim=True)) ** 200
    torch.testing.assert_close(found[:2].double(), raised / raised.sum(-1, keepdim=True), rtol=1e-4, atol=1e-7)
    assert found[2].tolist() == [0.0, 0.0, 0.0]


# Rows of like length share a batch, and how large one is follows from where it is computed.


@given(st.lists(st.integers(0, 300)), st.integers(1, 2000))
def test_every_row_is_in_one_batch_that_holds_no_more_than_it_may(lengths: list[int], batch_tokens: int) -> None:
    batches = list(length_batches(lengths, batch_tokens))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    widths = [max(lengths[place] for place in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert all(len(batch) == 1 or len(batch) * width <= batch_tokens
               for batch, width in zip(batches, widths, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("device", "tokens"),
    [("cpu", CPU_BATCH_TOKENS), ("cpu:0", CPU_BATCH_TOKENS), ("openvino", CPU_BATCH_TOKENS), ("cuda", GPU_BATCH_TOKENS),
     ("cuda:1", GPU_BATCH_TOKENS), ("tensorrt", GPU_BATCH_TOKENS), ("mps", GPU_BATCH_TOKENS)],
)  # fmt: skip
def test_a_device_has_its_size(device: str, tokens: int) -> None:
    assert batch_tokens_on(device) == tokens


# The nineteen counts of a query, by hand.


EXAMPLES = {
    "": {},
    "   \n": {"characters": 4},
    "How tall is Mount Everest?": {
        "characters": 26,
        "words": 5,
        "sentences": 1,
        "capitalized": 2,
        "question_marks": 1,
        "question_words": 1,
        "auxiliaries": 1,
    },
    "Compare the impact of EU and U.S. laws, and explain why they don't agree in 2024!": {
        "characters": 81,
        "words": 17,
        "sentences": 2,  # the one after U.S., too: no list of abbreviations is kept
        "capitalized": 3,
        "numbers": 1,
        "separators": 1,
        "question_words": 1,
        "open_words": 2,
        "relation_words": 1,
        "comparisons": 1,
        "pronouns": 1,
        "determiners": 1,
        "prepositions": 2,
        "coordinators": 2,
        "negations": 1,
    },
    "If it’s a state-of-the-art réseau…  is the ΩMEGA ³ better?": {
        "characters": 58,
        "words": 10,
        "sentences": 2,
        "long_words": 1,
        "capitalized": 1,
        "numbers": 1,
        "question_marks": 1,
        "comparisons": 1,
        "auxiliaries": 1,
        "determiners": 2,
        "subordinators": 1,
    },
    "日本の首都はどこですか？ 教えて、": {
        "characters": 17,
        "words": 2,
        "sentences": 1,
        "long_words": 1,
        "question_marks": 1,
        "separators": 1,
    },
    "a_b \udcff👟 [SEP]": {"characters": 12, "words": 3, "capitalized": 1, "determiners": 1},
}


@pytest.mark.parametrize("text", list(EXAMPLES))
def test_counts_are_those_counted_by_hand(text: str) -> None:
    found = dict(zip(COUNT_NAMES, query_counts(text), strict=True))
    assert {name: count for name, count in found.items() if count} == EXAMPLES[text]


@pytest.mark.parametrize("piece", ["why not? ", "a-"])
def test_a_very_long_text_takes_time_in_proportion(piece: str) -> None:
    text = piece * (400_000 // len(piece)) + "x"
    began = time.process_time()
    assert query_counts(text)[0] == len(text)
    assert time.process_time() - began < 10.0
