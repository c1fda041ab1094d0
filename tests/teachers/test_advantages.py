"""Advantages and credit against numbers computed by hand, finite differences and plain loops."""

from __future__ import annotations

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
from relabel.distill.teachers.spec import CreditSection

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
    assert reward.grad is not None
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
        assert credit.logits.grad is not None
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
    assert credit.logits.grad is not None
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
