"""The specs of `method: grpo` and `method: graph-grpo`: what is rolled out, what it earns, and how credit flows.

Sources: R3A, section 2 and its training settings (16 rollouts, learning rate 5e-7, 32 prompts a step, 360 steps, λ 0);
Graph-GRPO, section 3. What is said to be ours the papers do not tell.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SerializeAsAny, model_validator

from relabel.distill.teachers.specs import TeacherGold, TeacherSpec, TeacherTraining
from relabel.distill.teachers.watch import WatchSection
from relabel.distill.training.sections import DevSplit, EarlyStop
from relabel.manifests.specs import LabelerOptions, Spec


class VllmSection(Spec):
    """Answers written by vLLM on GPUs, through TRL. What goes on after a kill is no longer equal bit for bit then."""

    mode: Literal["colocate", "server"] = "colocate"
    """`colocate`: in the training's process, on its GPU. `server`: on other GPUs, by a server started for it."""
    url: str | None = None
    """Of the server, http://host:port."""
    gpu_memory_utilization: float = Field(0.3, gt=0.0, lt=1.0)
    """Share of the GPU's memory for vLLM's weights and cache (colocate)."""
    sleep: bool = False
    """Both leave the GPU while the model learns (colocate): less memory, and time to bring them back."""
    timeout_s: float = Field(240.0, gt=0.0)
    """How long a server is waited for."""

    @model_validator(mode="after")
    def _has_the_keys_of_its_mode(self) -> VllmSection:
        if (self.mode == "server") != (self.url is not None):
            raise ValueError("url is of mode: server, which needs it; leave both out, or name both")
        if self.mode == "server" and {"gpu_memory_utilization", "sleep"} & self.model_fields_set:
            raise ValueError("gpu_memory_utilization and sleep are options of the server itself: give them to it")
        return self


class RolloutSection(Spec):
    """How answers are sampled and learned from."""

    group: int = Field(16, ge=2, le=1024)
    """Rollouts of one prompt; their rewards are compared with each other."""
    temperature: float = Field(1.0, gt=0.0)
    """At which answers are sampled, and at which their probabilities are taken (ours)."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Smallest set of tokens, by probability, that is sampled from. Below 1, samples are not quite the policy's own."""
    updates: int = Field(1, ge=1, le=64)
    """Optimizer steps on the same rollouts. From 2 on, the ratio of probabilities leaves 1 and is clipped."""
    at_once: int | None = Field(None, ge=1)
    """Answers written together, those of like length; fewer need less memory. Default: all of a step. Halved when
    memory ends.
    """
    clip: float = Field(0.2, gt=0.0, lt=1.0)
    """ε: the ratio counts within 1 ± ε (ours)."""
    beta: float = Field(0.0, ge=0.0)
    """Weight of the divergence (k3) from the model that training starts from; the reference costs its memory."""
    vllm: VllmSection | None = None
    """Who writes the answers. Default: transformers, in the training's process."""


class RewardGold(TeacherGold):
    """The pairs, and the trusted grades that rewards are measured by."""


class RewardData(Spec):
    """What is learned from."""

    gold: RewardGold
    """Pairs with their texts, and trusted grades; rows without a grade are left out."""


class RolloutTraining(TeacherTraining):
    """How it is trained; TRL's GRPOTrainer does it."""

    epochs: float = Field(1, gt=0)
    """Passes over the prompts."""
    batch_size: int = Field(8, ge=1)
    """Rollouts of one forward pass on one device; `batch_size` · `accumulation` / `rollouts.group` prompts make a
    step.
    """
    accumulation: int = Field(64, ge=1)
    """Batches for one optimizer step; the default makes 32 prompts of 16 rollouts."""
    learning_rate: float = Field(5e-7, gt=0.0)
    """Peak of the schedule."""
    schedule: Literal["linear", "cosine", "constant"] = "constant"
    """After the warm-up."""
    max_tokens: int = Field(4096, ge=64)
    """Longest rollout in tokens: prompt and answers. Where it is longer, the document is cut as `relabel run` does."""
    early_stopping: EarlyStop | None = None
    """Default: train to the end. With a dev split the step with the best reward on dev is kept in any case."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between looks at dev; there is one behind the last step as well. Default: `save_every`, else once an epoch.
    """


class RolloutSpec(TeacherSpec):
    """One teacher that learns from what its own answers earn, whatever they earn."""

    labeler: SerializeAsAny[LabelerOptions]
    """Whose prompts it answers, with the options of a job's `labeler`."""
    rollouts: RolloutSection = RolloutSection()
    """How answers are sampled."""
    train: RolloutTraining = RolloutTraining()
    """How."""
    split: DevSplit = DevSplit()
    """On what. Rows of dev are not trained on; they are answered at every look, without sampling."""
    watch: WatchSection = WatchSection()
    """When it is warned of, and ended, for earning its reward without the work."""

    @model_validator(mode="after")
    def _steps_are_whole(self) -> RolloutSpec:
        rollouts, train = self.rollouts, self.train
        together = train.batch_size * train.accumulation
        if together % rollouts.group:
            raise ValueError(
                f"train.batch_size · train.accumulation is {together} rollouts a step, which is no multiple of "
                f"rollouts.group ({rollouts.group})"
            )
        for key in ("save_every", "eval_every"):
            steps = getattr(train, key)
            if steps is not None and steps % rollouts.updates:
                raise ValueError(
                    f"train.{key} is {steps}, which is no multiple of rollouts.updates "
                    f"({rollouts.updates}): rollouts are not kept in checkpoints"
                )
        return self

    @model_validator(mode="after")
    def _looks_have_rows(self) -> RolloutSpec:
        for key in ("early_stopping", "eval_every"):
            if getattr(self.train, key) is not None and self.split.dev == 0:
                raise ValueError(f"`train.{key}` looks at the dev split, and `split.dev` is 0")
        return self

    @property
    def prompts_per_step(self) -> int:
        """Different prompts of one optimizer step."""
        return self.train.batch_size * self.train.accumulation // self.rollouts.group


class GrpoSpec(RolloutSpec):
    """One teacher, by GRPO on trusted grades."""

    method: Literal["grpo"] = "grpo"
    """How it is trained."""
    labeler: SerializeAsAny[LabelerOptions]
    """Whose prompts it answers, with the options of a job's `labeler`; one whose teacher reasons (`r1`, `umbrela`,
    `r3a`).
    """
    data: RewardData
    """What it learns from."""
    near: float = Field(0.0, ge=0.0, le=1.0)
    """λ: reward of a grade next to the trusted one. A wrong format is worth 0, the right grade 1."""
