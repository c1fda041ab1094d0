"""The section `loss` of a spec: what is minimised."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from relabel.distill.students.heads import HEADS
from relabel.manifests.specs import Spec

TargetKind = Literal["soft", "hard"]
Weight = Annotated[float, Field(ge=0.0, le=1000.0)]


class LossSection(Spec):
    """What is minimised: Σ weight · loss, each a weighted mean over the rows that have the label."""

    relevance: Weight = 1.0
    """Cross-entropy of the relevance head (R3A eq. 3; Graph-GRPO's L_r)."""
    subject: Weight = 0.5
    """λ_s: cross-entropy of the subject score."""
    attribute: Weight = 0.5
    """λ_a: cross-entropy of the attribute score."""
    consistency: Weight = 0.2
    """λ_c: KL(p_ind ‖ p_r), where p_ind is induced from both node heads through φ."""
    consistency_direction: Literal["induced_to_direct", "direct_to_induced"] = "induced_to_direct"
    """The other direction is KL(p_r ‖ p_ind), and wants a φ that reaches every grade."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """T of distillation: teacher p^(1/T), student softmax(z/T), loss times T²."""
    gold_weight: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the gold grade in the target of a row that has both: (1-g)·teacher + g·gold. Above 0, rows with gold
    alone are learned from as well, with weight g; at 0 gold only judges.
    """
    targets: TargetKind | dict[str, TargetKind] = "soft"
    """`soft`: the teacher's distribution, where it gave one. `hard`: the grade that it wrote. One for all heads, or by
    head, say {subject: hard, attribute: hard}; a head that is not named is soft.
    """
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """ε: the relevance head's target becomes (1-ε)·target + ε/K (Graph-GRPO, eq. 17). The node heads learn theirs as
    they are.
    """
    weight_by: tuple[Literal["confidence", "outside_mass"], ...] = ()
    """Further weights of a row: the teacher's largest probability, and 1 - the mass that it put outside the grades."""

    @field_validator("targets", mode="before")
    @classmethod
    def _known_targets(cls, value: Any) -> Any:
        by_head = value if isinstance(value, dict) else {"relevance": value}
        for name, kind in by_head.items():
            if name not in HEADS:
                raise ValueError(f"no head is called {name!r}; there are {', '.join(HEADS)}")
            if kind not in ("soft", "hard"):
                raise ValueError(f"want soft or hard, or a mapping of heads to them, and not {kind!r}")
        return value

    def target_kind(self, head: str) -> TargetKind:
        """Whether a head learns distributions or grades."""
        return self.targets.get(head, "soft") if isinstance(self.targets, dict) else self.targets

    @model_validator(mode="after")
    def _something_is_learned(self) -> LossSection:
        if self.relevance == 0 and self.consistency == 0:
            raise ValueError("`relevance` and `consistency` are both 0, so nothing trains the relevance head")
        return self
