"""The spec of `method: graph-grpo`: what GRPO's has, and how credit flows along the graph."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from relabel.distill.teachers.grpo_spec import GrpoSpec, RewardData, RewardGold, RolloutSection
from relabel.manifests.specs import Spec


class GraphGold(RewardGold):
    """The pairs, and the trusted grades and scores that rewards are measured by."""

    subject: str | None = None
    """Column of the subject's trusted score, 0 to 4; null where a row has none."""
    attribute: str | None = None
    """Column of the attribute's, likewise."""


class GraphData(RewardData):
    """What is learned from."""

    gold: GraphGold
    """Pairs with their texts, trusted grades and scores."""


class CreditSection(Spec):
    """How credit flows from grade and scores to what they rest on."""

    learn: bool = True
    """Learn the edges' coefficients with the model; off, they stay as they begin."""
    learning_rate: float = Field(1e-3, gt=0.0)
    """The coefficients' own (ours)."""
    decay: float = Field(0.01, ge=0.0)
    """λ_w: weight of their squared distance from where they begin (ours)."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Their gradient is clipped to this norm."""
    average: Literal["auto", "node", "token"] = "auto"
    """`node` weighs every node of a rollout alike, `token` every token. `auto`: `node` where coefficients are learned;
    by token, their gradient would be driven by the lengths of spans.
    """
    consistency: bool = True
    """Subject and attribute share credit, on the query's side and on the product's."""
    tags: Literal["none", "grade"] = "none"
    """Whose advantage the tags take: nobody's, as the paper has it, or the grade's. With `none`, tags are made less
    probable by answers in a wrong format and never more probable by right ones, so the format can be lost.
    """
    match: float = 1.0
    """Base reward of a node that equals gold's."""
    miss: float = -1.0
    """Base reward of one that does not, and of all three where the format is wrong."""
    epsilon: float = Field(1e-6, ge=0.0)
    """Added to the standard deviation of a node's rewards (ours)."""

    @model_validator(mode="after")
    def _right_earns_more(self) -> CreditSection:
        if self.match <= self.miss:
            raise ValueError(f"match is {self.match:g} and miss {self.miss:g}; want match above miss")
        return self


class GraphRollouts(RolloutSection):
    """How answers are sampled and learned from."""

    group: int = Field(8, ge=2, le=1024)
    """Rollouts of one prompt (ours)."""
    updates: int = Field(2, ge=1, le=64)
    """Optimizer steps on the same rollouts. Coefficients learn from the second on."""
    beta: float = Field(0.01, ge=0.0)
    """Weight of the divergence (k3) from the model that training starts from (ours)."""


class GraphGrpoSpec(GrpoSpec):
    """One teacher, by GRPO with credit by node."""

    method: Literal["graph-grpo"] = "graph-grpo"  # type: ignore[assignment]
    """How it is trained."""
    data: GraphData
    """What it learns from."""
    rollouts: GraphRollouts = GraphRollouts()
    """How answers are sampled."""
    credit: CreditSection = CreditSection()
    """How credit flows."""

    @model_validator(mode="after")
    def _the_graph_is_there(self) -> GraphGrpoSpec:
        if self.labeler.name != "graph-grpo":
            raise ValueError(f"labeler {self.labeler.name} writes no graph; want graph-grpo")
        if self.credit.learn and self.rollouts.updates < 2:
            raise ValueError(
                "credit.learn wants rollouts.updates of 2 or more: on the first update the coefficients' gradient is 0"
            )
        return self
