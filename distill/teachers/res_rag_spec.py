"""The spec of `method: res-rag`: a chooser of evidence, rewarded by what a frozen generator answers from its choice.

Source: RES-RAG (papers, section 3.3 and table 4). What is said to be ours the paper does not tell.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SerializeAsAny, model_validator

from relabel.distill.teachers.grpo_spec import RolloutSection, RolloutSpec, RolloutTraining
from relabel.distill.teachers.watch import WatchSection
from relabel.labelers.evidence_set import EVIDENCE_SET
from relabel.manifests.specs import Columns, EngineSpec, LabelerOptions, PathText, Spec


class EvidenceGold(Spec):
    """Questions with their documents, the answers wanted, and the chunks wanted."""

    path: PathText = Field(min_length=1)
    """Parquet or a folder of it: pairs with `chunks`, as `relabel pairs chunk` writes them; `jsonld` is shown to the
    generator where it is there. Rows of one query are one question.
    """
    sets: str = "similar"
    """Column with the numbers of each document's wanted chunks, a list of integers: `similar` of `relabel pairs
    similar`, or gold.
    """
    answers: str = "gold_answers"
    """Column with all answers that are wanted, a list of strings, in any row of a query; a query without is left out.
    """
    columns: Columns = Columns()
    """Columns of the texts and ids."""


class EvidenceData(Spec):
    """What is learned from."""

    gold: EvidenceGold
    """Questions, chunks, answers and sets of chunks."""


class GeneratorSpec(EngineSpec):
    """The frozen generator: an engine with its model, as a job's `engine`; asked greedily, at any engine's speed."""

    cache: PathText | None = None
    """Folder where its answers are kept, for several trainings to share. Default: with the checkpoints, and gone with
    them.
    """


class RewardSection(Spec):
    """R = clip(U + α_ret · F1_ret - η · mean φ, r_min, r_max), where U = α_ans · F1_ans, or γ without an answer."""

    eta: float = Field(2.0, ge=0.0)
    """η: weight of the cost φ of a document's chunks: 0 up to the root of those shown, 0.5 up to all, else 1."""
    alpha_ans: float = Field(2.0, ge=0.0)
    """α_ans: weight of the answer's F1."""
    alpha_ret: float = Field(1.0, ge=0.0)
    """α_ret: weight of the F1 with the sets of `data.gold.sets`."""
    gamma: float = Field(-1.0, le=0.0)
    """γ: worth of no answer, or of one that can't be read (ours)."""
    r_min: float = -5.0
    """Least reward."""
    r_max: float = 5.0
    """Most reward."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> RewardSection:
        if self.r_min >= self.r_max:
            raise ValueError(f"r_min is {self.r_min:g} and r_max {self.r_max:g}; want r_min below r_max")
        return self


class EvidenceRollouts(RolloutSection):
    """How choices are sampled and learned from."""

    group: int = Field(4, ge=2, le=1024)
    """W: rollouts of one prompt; their rewards are compared with each other."""
    top_p: float = Field(0.8, gt=0.0, le=1.0)
    """Smallest set of the tokens that the grammar admits, by probability, that is sampled from. Below 1, samples are
    not quite the policy's own.
    """
    beta: float = Field(0.05, ge=0.0)
    """Weight of the divergence (k3) from the model that training starts from; the reference costs its memory."""
    max_answer_tokens: int = Field(1024, ge=8)
    """Longest answer in tokens; one that is cut off has chosen nothing."""


class EvidenceTraining(RolloutTraining):
    """How it is trained; TRL's GRPOTrainer does it."""

    batch_size: int = Field(1, ge=1)
    """Rollouts of one forward pass on one device; `batch_size` · `accumulation` / `rollouts.group` prompts make a
    step.
    """
    accumulation: int = Field(4, ge=1)
    """Batches for one optimizer step; the default makes one prompt of 4 rollouts."""
    learning_rate: float = Field(1e-5, gt=0.0)
    """Peak of the schedule."""
    max_tokens: int = Field(9216, ge=64)
    """Longest rollout in tokens, prompt and answer. Where it is longer, fewer chunks are shown, as `relabel run` does.
    """


class ResRagSpec(RolloutSpec):
    """One chooser of evidence, by GRPO with a joint reward."""

    method: Literal["res-rag"] = "res-rag"
    """How it is trained."""
    labeler: SerializeAsAny[LabelerOptions]
    """Whose prompts it answers: `evidence-set`, with the options of a job's `labeler`."""
    data: EvidenceData
    """What it learns from."""
    generator: SerializeAsAny[GeneratorSpec]
    """What answers the questions from the chunks chosen."""
    reward: RewardSection = RewardSection()
    """What a choice earns."""
    rollouts: EvidenceRollouts = EvidenceRollouts()
    """How answers are sampled."""
    train: EvidenceTraining = EvidenceTraining()
    """How."""
    watch: WatchSection = WatchSection(length=None)
    """When it is warned of, and ended, for earning its reward without the work. Shorter answers are the aim here, so
    length is not watched; `no_evidence_rate` is the share of questions for which nothing was chosen.
    """

    @model_validator(mode="after")
    def _it_chooses_evidence(self) -> ResRagSpec:
        if self.labeler.name != EVIDENCE_SET:
            raise ValueError(f"labeler {self.labeler.name} chooses no chunks; want {EVIDENCE_SET}")
        if self.rollouts.vllm is not None:
            raise ValueError("rollouts.vllm writes no answers under a grammar yet; leave it out")
        if self.rollouts.max_answer_tokens >= self.train.max_tokens:
            raise ValueError(
                f"train.max_tokens is {self.train.max_tokens} and rollouts.max_answer_tokens "
                f"{self.rollouts.max_answer_tokens}: no room for a prompt"
            )
        return self
