"""Advantages and credit against numbers computed by hand, finite differences and plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.distill.teachers.credit import (
    EDGES,
    NODES,
    TEMPLATE,
    Credit,
    group_advantages,
    node_average_weights,
    token_advantages,
)
from relabel.distill.teachers.rewards import graded_reward, node_rewards
from relabel.distill.teachers.rollouts import NO_PART, token_parts, token_spans
from relabel.distill.teachers.spec import CreditSection
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer
from relabel.manifests.formats import AnswerFormat, Choice, Text
from relabel.manifests.labels import Label
from tests.strategies import texts

V = len(NODES)
GOLDEN_BASE = [(1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (-1.0, -1.0, 1.0)]

rewards = st.lists(st.sampled_from((0.0, 0.1, 0.2, 1.0, -1.0)), min_size=2, max_size=16)
bases = st.lists(st.tuples(*[st.sampled_from((-1.0, 0.0, 1.0))] * 3), min_size=2, max_size=8)


@pytest.mark.parametrize(
    ("reward", "wanted"),
    [
        ((1, 0, 0, 0), (1.7321, -0.5774, -0.5774, -0.5774)),
        ((1, 0.2, 0, 0), (1.6977, -0.2425, -0.7276, -0.7276)),
        ((0.2, 0.2, 0.2, 0.2), (0, 0, 0, 0)),
    ],
)
def test_the_papers_groups(reward: tuple[float, ...], wanted: tuple[float, ...]) -> None:
    found = group_advantages(torch.tensor([reward], dtype=torch.float32))
    np.testing.assert_allclose(found[0], wanted, atol=6e-5)


@given(rewards)
def test_advantages_have_mean_0_and_variance_1_or_are_all_0(reward: list[float]) -> None:
    found = group_advantages(torch.tensor([reward])).numpy()[0]
    if len(set(reward)) == 1:
        assert (found == 0).all()
    else:
        np.testing.assert_allclose(found, (reward - np.mean(reward)) / np.std(reward), atol=1e-5)


def test_equal_rewards_have_a_gradient_of_exactly_0() -> None:
    reward = torch.full((1, 7), 0.1, requires_grad=True)
    (group_advantages(reward) * torch.arange(7.0)).sum().backward()
    assert (reward.grad == 0).all()


def graph_advantages(credit: Credit, base: list[tuple[float, float, float]]) -> torch.Tensor:
    return credit.advantages(torch.tensor([base], dtype=torch.float64))[0]


def double_credit(logits: list[float] | None = None, **options: bool) -> Credit:
    credit = Credit(CreditSection(**options)).double()
    if logits is not None:
        credit.logits.data = torch.tensor(logits, dtype=torch.float64)
    return credit


def test_the_specs_graph_at_the_first_coefficients() -> None:
    found = dict(zip(NODES, graph_advantages(double_credit(), GOLDEN_BASE).T.tolist(), strict=True))
    wanted = {
        "r": (0.7071, 0.7071, -1.4142),
        "a": (0.7071, 0.7071, -1.4142),
        "s": (1.2247, 0, -1.2247),
        "q_s": (1.1355, 0.1622, -1.2978),
        "q_a": (0.9806, 0.3922, -1.3728),
    }
    for node, values in wanted.items():
        assert found[node] == pytest.approx(values, abs=6e-5), node
    assert found["p_s"] == found["q_s"]
    assert found["p_a"] == found["q_a"]


logit_lists = st.lists(st.floats(-2, 2), min_size=len(EDGES), max_size=len(EDGES))


@settings(deadline=None)
@given(bases, logit_lists)
def test_the_gradient_of_a_nodes_advantages_sums_to_0_over_rollouts(
    base: list[tuple[float, float, float]], logits: list[float]
) -> None:
    credit = double_credit(logits)
    for node in range(V):
        credit.logits.grad = None
        graph_advantages(credit, base)[:, node].sum().backward()
        assert torch.isfinite(credit.logits.grad).all()
        np.testing.assert_allclose(credit.logits.grad, 0, atol=1e-4)


@given(st.lists(st.sampled_from((-1.0, 1.0)), min_size=2, max_size=8), logit_lists)
def test_without_gold_for_nodes_all_take_the_grades_advantage(base: list[float], logits: list[float]) -> None:
    found = graph_advantages(double_credit(logits), [(one, 0.0, 0.0) for one in base]).detach()
    for node in range(1, V):
        np.testing.assert_allclose(found[:, node], found[:, 0], atol=1e-4)


def clipped_loss(logp_BT: torch.Tensor, old_BT: torch.Tensor, advantage_BT: torch.Tensor) -> torch.Tensor:
    ratio_BT = (logp_BT - old_BT).exp()
    least_BT = torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(0.8, 1.2) * advantage_BT)
    return -least_BT.mean(1).mean()


def rollouts(*, absent: int | None = None) -> torch.Tensor:
    """Segments of three rollouts of twelve tokens: every node in each but, perhaps, one in the first."""
    rng = np.random.default_rng(3)
    rows = [rng.permutation([*range(V), *rng.integers(-1, V, 12 - V)]) for _ in range(3)]
    segment_BT = torch.tensor(np.array(rows))
    if absent is not None:
        segment_BT[0][segment_BT[0] == absent] = TEMPLATE
    return segment_BT


def learned_loss(
    credit: Credit, segment_BT: torch.Tensor, ratio_BT: torch.Tensor, *, average_nodes: bool
) -> torch.Tensor:
    advantage_BT = token_advantages(graph_advantages(credit, GOLDEN_BASE), segment_BT)
    if average_nodes:
        advantage_BT = advantage_BT * node_average_weights(segment_BT, torch.ones_like(segment_BT))
    return clipped_loss(ratio_BT.log(), torch.zeros_like(ratio_BT), advantage_BT)


def gradient_of(
    credit: Credit, segment_BT: torch.Tensor, ratio_BT: torch.Tensor, *, average_nodes: bool
) -> torch.Tensor:
    credit.logits.grad = None
    learned_loss(credit, segment_BT, ratio_BT, average_nodes=average_nodes).backward()
    return credit.logits.grad


def test_on_policy_the_coefficients_do_not_move_where_every_node_weighs_the_same() -> None:
    on_policy = torch.ones(3, 12, dtype=torch.float64)
    credit = double_credit()
    np.testing.assert_allclose(gradient_of(credit, rollouts(), on_policy, average_nodes=True), 0, atol=1e-7)
    assert gradient_of(credit, rollouts(), on_policy, average_nodes=False).abs().max() > 1e-3
    # a node that a rollout lacks weighs 0 there, and the others no more than before: the sum over rollouts is off
    assert gradient_of(credit, rollouts(absent=3), on_policy, average_nodes=True).abs().max() > 1e-3


@pytest.mark.parametrize("average_nodes", [True, False])
def test_off_policy_the_coefficients_gradient_is_that_of_finite_differences(average_nodes: bool) -> None:
    rng = np.random.default_rng(5)
    ratio_BT = torch.tensor(rng.choice([0.5, 0.9, 1.0, 1.1, 1.5], size=(3, 12)))
    start = rng.normal(size=len(EDGES)) * 0.5
    found = gradient_of(double_credit(start.tolist()), rollouts(), ratio_BT, average_nodes=average_nodes)
    step = 1e-6
    for edge in range(len(EDGES)):
        ends = []
        for sign in (1, -1):
            moved = start.copy()
            moved[edge] += sign * step
            loss = learned_loss(double_credit(moved.tolist()), rollouts(), ratio_BT, average_nodes=average_nodes)
            ends.append(float(loss.detach()))
        assert float(found[edge]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)
    assert found.abs().max() > 1e-3


def test_node_average_is_a_mean_within_nodes_and_then_over_all_seven() -> None:
    segment_BT = torch.tensor([[0, 0, 0, 1, 2, TEMPLATE, 0, 1]])
    mask_BT = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    weight_BT = node_average_weights(segment_BT, mask_BT)
    values = torch.tensor([[3.0, 6.0, 9.0, 4.0, 5.0, 100.0, 100.0, 100.0]])
    mean = (values * weight_BT * mask_BT).sum() / mask_BT.sum()
    assert float(mean) == pytest.approx((6 + 4 + 5) / 7)
    assert math.isclose(float(weight_BT[0, 5]), 0.0)


# What a rollout is worth.


@pytest.mark.parametrize(
    ("grade", "gold", "near", "wanted"),
    [(2, 2, 0.2, 1), (1, 2, 0.2, 0.2), (1, 0, 0.0, 0), (0, 2, 0.2, 0), (3, 0, 0.5, 0), (None, 0, 0.5, 0)],
)
def test_a_grade_earns_by_its_distance(grade: int | None, gold: int, near: float, wanted: float) -> None:
    assert graded_reward(grade, gold, near=near) == wanted


def test_nodes_earn_one_by_one() -> None:
    label = Label(2, None, {"subject": 4, "attribute": 1})
    assert node_rewards(label, {"grade": 2, "subject": 3, "attribute": 1}) == (1, -1, 1)
    assert node_rewards(label, {"grade": 0, "subject": 4}, match=2, miss=0) == (0, 2, 0)


def test_an_unreadable_answer_misses_every_node_that_has_gold() -> None:
    assert node_rewards(None, {"grade": 2, "subject": 3, "attribute": 1}) == (-1, -1, -1)
    assert node_rewards(None, {"grade": 2, "subject": None}) == (-1, 0, 0)


# Tokens find their parts: cases made by hand, and any cut of any text.


def test_a_token_belongs_to_the_part_of_most_of_its_characters_and_to_the_section_of_equals() -> None:
    text = "<think>ab</think><score>2</score>"
    reader = Reader(AnswerFormat((Text("think", 9), Choice("score", ("0", "1", "2")))))
    reader.read(Answer(0, text, "stop"))
    spans = [[span] for span in reader.spans(text).values()]
    pieces = [b"<think", b">ab", b"</think", b"><score", b">2", b"</score>", b""]
    found = token_parts(pieces, dict(enumerate(spans)))
    assert found == [NO_PART, 0, NO_PART, NO_PART, 1, NO_PART, NO_PART]


def test_a_token_within_a_character_goes_with_that_character() -> None:
    euro = "€".encode()
    pieces = [b"<a>", euro[:1], euro[1:2], euro[2:] + b"<", b"/a>"]
    assert token_spans(pieces) == [(0, 3), (3, 3), (3, 3), (3, 5), (5, 8)]
    assert token_parts(pieces, {0: [(3, 4)]}) == [NO_PART, 0, 0, 0, NO_PART]


@given(texts(), st.data())
def test_tokens_cover_the_decoded_text_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    spans = token_spans(pieces)
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] == len(text)
    assert token_parts(pieces, {7: [(0, len(text))]}) == [7 if piece else NO_PART for piece in pieces]
