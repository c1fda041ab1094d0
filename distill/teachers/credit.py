"""How much better a rollout was than the others of its prompt, and credit in a graph of seven nodes: what the grade,
the subject and the attribute earned is passed on to what they rest on, along ten edges with coefficients that can be
learned.

Rewards are standardised within their group by the population's standard deviation, as in the papers, where TRL takes
the sample's. A group whose rewards are all equal shows nothing: its advantages are 0, and so is every gradient through
them. The coefficients enter the loss through the advantages alone. Standardising takes much of them away: only
`effective_ratios` of them can be distinguished by any loss, so those are what is reported.

Source: R3A, equation 1; Graph-GRPO, equation 8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relabel.distill.teachers.rollouts import NO_PART, AnswerTokens, Rollout, Span, token_parts
from relabel.distill.teachers.spec import NODES, CreditSection
from relabel.labelers.verdicts import Reader

# N prompts, G rollouts of a prompt, ... anything


def group_advantages(reward_NG: Tensor, *, epsilon: float = 0.0) -> Tensor:
    """(R - mean) / (σ + ε) within each group; 0 where a group's rewards are equal.

    Args:
        reward_NG: rewards, one row a prompt. May carry a gradient, which is then exact, and 0 in a group of equals. NaN
            is a rollout of which nothing is known: its advantage is 0, and the others' are those of the rest; a
            group with fewer than two others is dropped as a whole.
        epsilon: added to σ, in the rewards' unit.
    """
    if bool(reward_NG.isnan().any()):
        return torch.stack([_of_known(reward_G, epsilon) for reward_G in reward_NG])
    lowest_N1 = reward_NG.amin(-1, keepdim=True)
    highest_N1 = reward_NG.amax(-1, keepdim=True)
    # Equal rewards leave a mean that is off by rounding; only their range shows that they are equal.
    rounding = 4 * torch.finfo(reward_NG.dtype).eps
    is_equal_N1 = (highest_N1 - lowest_N1) <= rounding * torch.maximum(lowest_N1.abs(), highest_N1.abs())
    centred_NG = reward_NG - reward_NG.mean(-1, keepdim=True)
    variance_N1 = centred_NG.square().mean(-1, keepdim=True)
    # A root of 0 has an infinite slope, and 0 times that is no number: equals take the root of 1 and are dropped after.
    deviation_N1 = torch.where(is_equal_N1, 1.0, variance_N1).sqrt()
    return torch.where(is_equal_N1, 0.0, centred_NG / (deviation_N1 + epsilon))


def is_known(reward_NG: Tensor) -> Tensor:
    """Which rollouts count, bool [N, G]: those with a reward, in groups with two or more of them."""
    has_reward_NG = ~reward_NG.isnan()
    return has_reward_NG & (has_reward_NG.sum(-1, keepdim=True) >= 2)


def _of_known(reward_G: Tensor, epsilon: float) -> Tensor:
    known_G = is_known(reward_G[None])[0]
    advantage_G = torch.zeros_like(reward_G)
    if bool(known_G.any()):
        advantage_G[known_G] = group_advantages(reward_G[known_G][None], epsilon=epsilon)[0]
    return advantage_G


# N prompts, G rollouts of a prompt, V = 7 nodes, E = 10 edges, B rollouts, T tokens


TEMPLATE = -1
"""The segment of tokens that belong to no node: their advantage is 0."""

ROUNDINGS = 4 * torch.finfo(torch.float32).eps
"""How much of `Credit.rounding`, times dL/dA, may still be noise: in 1,500 random batches at ρ = 1 it was half an ε at
most (2026-11-25).
"""


EDGES = ("r>s", "r>a", "s>q_s", "s>p_s", "a>q_a", "a>p_a", "q_a>q_s", "q_s>q_a", "p_a>p_s", "p_s>p_a")
"""Three branches, of two edges that share one node's credit, then gates between twins; as files and curves name
them.
"""


class Credit(nn.Module):  # type: ignore[misc]
    """The edges' logits w [E], 0 at first.

    Args:
        section: of the spec; without `consistency` twins share no credit, and the gates' α is 0.
    """

    def __init__(self, section: CreditSection) -> None:
        super().__init__()
        self.section = section
        self.logits = nn.Parameter(torch.zeros(len(EDGES)), requires_grad=section.learn)

    def coefficients(self) -> Tensor:
        """α by edge [E]: of branches softmax · 2, so that equal logits give 1; of gates sigmoid, at first 0.5."""
        branches = self.logits[:6].view(-1, 2).softmax(-1) * 2
        gates = self.logits[6:].sigmoid() * float(self.section.consistency)
        return torch.cat([branches.flatten(), gates])

    def node_rewards(self, base_3: Tensor) -> Tensor:
        """R of all nodes [..., V] from b of r, s, a [..., 3]."""
        r_s, r_a, s_qs, s_ps, a_qa, a_pa, qa_qs, qs_qa, pa_ps, ps_pa = self.coefficients()
        r, own_s, own_a = base_3.unbind(-1)
        s = own_s + r_s * r
        a = own_a + r_a * r
        q_s = s_qs * s
        p_s = s_ps * s
        q_a = a_qa * a
        p_a = a_pa * a
        return torch.stack([r, s, a, q_s + qa_qs * q_a, q_a + qs_qa * q_s, p_s + pa_ps * p_a, p_a + ps_pa * p_s], -1)

    def advantages(self, base_NG3: Tensor, *, epsilon: float = 1e-6) -> Tensor:
        """A of all nodes [N, G, V]: each node's R, standardised over the prompt's rollouts. Never detached."""
        reward_NGV = self.node_rewards(base_NG3)
        return group_advantages(reward_NGV.transpose(-1, -2), epsilon=epsilon).transpose(-1, -2)

    def rounding(self, base_NG3: Tensor) -> Tensor:
        """How far rounding may move dA/dw by node [N, V], in units of float32's ε: the square of the largest reward
        over the deviation, since deviations are differences of rewards; 0 in groups of equals, which have no gradient.
        """
        with torch.no_grad():
            reward_NGV = self.node_rewards(base_NG3)
            has_gradient_NV = self.advantages(base_NG3).abs().amax(1) > 0
            ratio_NV = reward_NGV.abs().amax((1, 2)).unsqueeze(-1) / reward_NGV.std(1, correction=0)
            return torch.where(has_gradient_NV, ratio_NV.square(), 0.0)


def effective_ratios(alpha_E: Tensor) -> dict[str, float]:
    """What the advantages depend on, by node: how much of another node's credit it takes for each 1 of its own.

    Five of the ten coefficients can be derived from these six numbers (those of s and a sum to 2).
    """
    r_s, r_a, s_qs, s_ps, a_qa, a_pa, qa_qs, qs_qa, pa_ps, ps_pa = alpha_E.detach().double()
    of_query = {"q_s": qa_qs * a_qa / s_qs, "q_a": qs_qa * s_qs / a_qa}  # tensors: of a saturated branch inf, no error
    ratios = {"s": r_s, "a": r_a, **of_query, "p_s": pa_ps * a_pa / s_ps, "p_a": ps_pa * s_ps / a_pa}
    return {node: float(value) for node, value in ratios.items()}


def token_advantages(node_BV: Tensor, segment_BT: Tensor) -> Tensor:
    """The advantage of each token's node [B, T]; 0 for `TEMPLATE`."""
    return torch.where(segment_BT == TEMPLATE, 0.0, node_BV.gather(1, segment_BT.clamp(min=0)))


def node_average_weights(segment_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """|o| / (V · n_v) for each token [B, T]: under a mean over tokens it makes a mean over tokens within each node,
    then over all seven nodes. A node without tokens weighs nothing, and V stays 7.

    min(ρA, clip(ρ)A) is homogeneous in A, so advantages times these weights need no loss of their own.
    """
    mask_BT = mask_BT.to(torch.float32)
    length_B1 = mask_BT.sum(1, keepdim=True)
    member_BTV = nn.functional.one_hot(segment_BT.clamp(min=0), len(NODES)) * mask_BT.unsqueeze(-1)
    member_BTV = member_BTV * (segment_BT != TEMPLATE).unsqueeze(-1)
    count_BV = member_BTV.sum(1).clamp(min=1.0)
    return torch.where(
        segment_BT == TEMPLATE, 0.0, length_B1 / (len(NODES) * count_BV.gather(1, segment_BT.clamp(min=0)))
    )


NODE_OF_TAG = {
    "preliminary": "r",
    "query_subject": "q_s",
    "query_attribute": "q_a",
    "product_subject": "p_s",
    "product_attribute": "p_a",
    "subject_score": "s",
    "attribute_score": "a",
    "score": "r",
}
"""The first grade is a grade too."""


def segments_of(rollout: Rollout, tokens: AnswerTokens, *, template: int = NO_PART) -> list[int]:
    """The node of each completion token, by its place in `NODES`.

    All tokens of a rollout without a readable label are the grade's: nobody knows which of them went wrong.

    Args:
        template: what tags, white space and the end belong to: `NO_PART`, or a node.
    """
    if rollout.label is None:
        return [NODES.index("r")] * len(rollout.completion_ids)
    segments = [NO_PART] * len(rollout.completion_ids)
    for turn in rollout.turns:
        assert turn.ask.format is not None
        spans: dict[int, list[Span]] = {}
        for tag, span in Reader(turn.ask.format).spans(turn.text).items():
            spans.setdefault(NODES.index(NODE_OF_TAG[tag]), []).append(span)
        opened = turn.text.removesuffix(tokens.text(turn.ids)).encode()  # by the chat template
        parts = token_parts([opened, *tokens.pieces(turn.ids)], spans)[1:]
        segments[turn.start : turn.start + len(turn.ids)] = [template if part == NO_PART else part for part in parts]
    return segments
