"""A teacher's formats: the spec (`teacher.yaml`) of each method (sft, grpo, graph-grpo, res-rag) with the JSON Schema
of all of them, the records of `manifest.json`, and the columns of the rollouts. Importing it does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from relabel.distill.students.spec import GoldSource, LearnedGold, LearnedLabels, SplitSide
from relabel.distill.training.output import TrainedManifest
from relabel.distill.training.spec import (
    DevSplit,
    EarlyStop,
    LoraSpec,
    ModelName,
    OutputText,
    TrainingSection,
    as_sources,
)
from relabel.labelers.evidence_set import EVIDENCE_SET
from relabel.labelers.registry import (
    engine_class,
    engine_names,
    engine_schemas,
    labeler_class,
    labeler_names,
    labeler_schemas,
)
from relabel.manifests.errors import ConfigError
from relabel.manifests.records import LEFT_OUT
from relabel.manifests.specs import (
    DRAFT,
    Columns,
    EngineSpec,
    LabelerOptions,
    ModelText,
    ObjectSchema,
    PathText,
    Schema,
    Spec,
    referred,
    unknown_name,
    validate_spec,
)

# ------------------------------------------------------------------------------
# The teacher spec, as far as all methods share it: what a user writes in `teacher.yaml`, checked key by key. Pure: no
# environment, no network, no disk.


class RunSource(Spec):
    """The answers of one run."""

    path: PathText = Field(min_length=1)
    """Output folder of a finished run."""
    allow_over_limit: bool = False
    """Take a run with more quarantined rows than its limit allows: what is missing is seldom a fair sample."""


class TeacherTraining(TrainingSection):
    """How it is trained."""

    epochs: float = Field(1, gt=0)
    """Passes over the examples."""
    batch_size: int = Field(8, ge=1)
    """Examples of one forward pass on one device."""
    learning_rate: float = Field(1e-5, gt=0.0)
    """Peak of the schedule."""
    max_tokens: int = Field(2048, ge=64)
    """Longest example in tokens, prompt and answer. Where it is longer, the document is cut as `relabel run` does."""


class TeacherSpec(Spec):
    """One teacher, whatever the method; each method's spec adds to it."""

    name: ModelName
    """Name of the teacher: letters, digits, dot, dash and underscore."""
    method: str
    """How it is trained."""
    init: ModelText = Field(min_length=1)
    """The model that it starts from: a reference as everywhere (a folder, `hf:…`, `s3://…`,
    `pypi:PACKAGE==VERSION`), also another teacher's folder.
    """
    labeler: SerializeAsAny[LabelerOptions] | None = None
    """Whose prompts it is trained on and whose answers it learns to write, with the options of a job's `labeler`.
    Default: the one of the runs.
    """
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Passed to the tokenizer's chat template, as a job's `engine.chat_template_kwargs`."""
    train: TeacherTraining = TeacherTraining()
    """How it is trained."""
    lora: LoraSpec | None = None
    """Train low-rank adapters instead of all weights; they are merged into the weights that are written."""
    output: OutputText
    """Local folder that the teacher owns."""
    storage_options: dict[str, dict[str, Any]] = Field(default={}, exclude=True, repr=False)
    """For each URL scheme, options of its fsspec filesystem, for all paths of the spec. Secrets, as in a job: never
    written.
    """


# ------------------------------------------------------------------------------
# The spec of `method: sft`: supervised fine-tuning on answers, with the reasoning masked at random.
#
# Source: Graph-GRPO, equation 1 (label-first chain of thought, its two stages); the default of `mask` is ours.


class SftGold(GoldSource):
    """Trusted grades: with runs, only answers whose grade is the trusted one are learned; alone, the grades are. For
    `evidence-set`, the chunks that are wanted.
    """

    sets: str | None = None
    """Column with the numbers of each document's wanted chunks, a list of integers, instead of grades: `similar` of
    `relabel pairs similar`, or gold. Whole questions are learned, without runs.
    """


class SftData(Spec):
    """What is learned from: answers of runs, or gold alone."""

    runs: Annotated[
        tuple[RunSource, ...],
        BeforeValidator(as_sources, json_schema_input_type=str | RunSource | tuple[str | RunSource, ...]),
    ] = ()
    """Finished runs of one labeler: paths, or mappings with a path."""
    gold: SftGold | None = None
    """Trusted grades, or sets of chunks."""
    answer: Literal["whole", "preliminary"] = "whole"
    """`whole`: the answer as the labeler reads it. `preliminary`: its first grade alone (Graph-GRPO's first stage)."""

    @model_validator(mode="after")
    def _there_is_something(self) -> SftData:
        if not self.runs and self.gold is None:
            raise ValueError("nothing to learn from: name `runs`, or `gold`")
        if self.gold is not None and self.gold.sets is not None and (self.runs or self.answer != "whole"):
            raise ValueError("`gold.sets` is learned alone and whole: leave out `runs` and `answer`, or `gold.sets`")
        return self


class SftTraining(TeacherTraining):
    """How it is trained."""

    mask: float = Field(0.5, ge=0.0, le=1.0)
    """ρ: chance of each token of the reasoning to be left out of the loss, drawn in each epoch. The grades, their
    tags and the answer's end are always learned.
    """


class SftSpec(TeacherSpec):
    """One teacher, by supervised fine-tuning."""

    method: Literal["sft"] = "sft"
    """How it is trained."""
    data: SftData
    """What it learns from."""
    train: SftTraining = SftTraining()
    """How it is trained."""

    @model_validator(mode="after")
    def _gold_alone_names_its_labeler(self) -> SftSpec:
        if not self.data.runs and self.labeler is None:
            raise ValueError("gold grades without runs do not say whose prompts they answer: name `labeler`")
        return self


# ------------------------------------------------------------------------------
# The specs of `method: grpo` and `method: graph-grpo`: what is rolled out, what it earns, and how credit flows.
#
# Sources: R3A, section 2 and its training settings (16 rollouts, learning rate 5e-7, 32 prompts a step, 360 steps, λ
# 0); Graph-GRPO, section 3. What is marked as ours is not in the papers.


class VllmSection(Spec):
    """Answers written by vLLM on GPUs, through TRL. What goes on after a kill is no longer equal bit for bit then."""

    mode: Literal["colocate", "server"] = "colocate"
    """`colocate`: in the training's process, on its GPU. `server`: on other GPUs, by a server started for it."""
    url: str | None = None
    """Of the server, http://host:port."""
    gpu_memory_utilization: float = Field(0.3, gt=0.0, lt=1.0)
    """Share of the GPU's memory for vLLM's weights and cache (colocate)."""
    sleep: bool = False
    """Move both off the GPU while the model learns (colocate): less memory, and time to bring them back."""
    timeout_s: float = Field(240.0, gt=0.0)
    """How long to wait for the server."""

    @model_validator(mode="after")
    def _has_the_keys_of_its_mode(self) -> VllmSection:
        if (self.mode == "server") != (self.url is not None):
            raise ValueError("url is of mode: server, which needs it; leave both out, or name both")
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
    memory runs out.
    """
    clip: float = Field(0.2, gt=0.0, lt=1.0)
    """ε: the ratio counts within 1 ± ε (ours)."""
    beta: float = Field(0.0, ge=0.0)
    """Weight of the divergence (k3) from the model that training starts from; the reference costs its memory."""
    vllm: VllmSection | None = None
    """Who writes the answers. Default: transformers, in the training's process."""


class WatchSection(Spec):
    """When training warns of a reward that is earned without the work, and when it ends for it. All thresholds are
    ours; null turns one off.
    """

    window: int = Field(8, ge=1)
    """Steps with rollouts whose mean is judged."""
    length: float | None = Field(3.0, gt=1.0)
    """`response_tokens`: so many times what the first window had, or that part of it."""
    no_evidence: float | None = Field(0.5, gt=0.0, le=1.0)
    """`no_evidence_rate`: share of the grades above 0 that rest on no evidence."""
    one_grade: float | None = Field(0.95, gt=0.0, le=1.0)
    """`top_grade_share`: share of the most frequent grade. Where one trusted grade is as frequent, half way from its
    share to 1.
    """
    format: float | None = Field(0.8, gt=0.0, lt=1.0)
    """`format_rate`: this part of the highest that a window had."""
    patience: int | None = Field(3, ge=1)
    """Evaluations on dev under a warning before training ends. A warning active since the first window never ends it:
    training did not bring it about. Null only warns, and so does a training without a dev split.
    """


class RewardData(Spec):
    """What is learned from."""

    gold: GoldSource
    """Pairs with their texts, and trusted grades; rows without a grade are left out."""


class RolloutTraining(TeacherTraining):
    """How it is trained; TRL's GRPOTrainer does it."""

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
    """Steps between evaluations on dev; one after the last step as well. Default: `save_every`, else an epoch."""


class RolloutSpec(TeacherSpec):
    """One teacher that learns from what its own answers earn, whatever they earn."""

    labeler: SerializeAsAny[LabelerOptions]
    """Whose prompts it answers, with the options of a job's `labeler`; for grpo one whose teacher reasons (`r1`,
    `umbrela`, `r3a`).
    """
    rollouts: RolloutSection = RolloutSection()
    """How answers are sampled."""
    train: RolloutTraining = RolloutTraining()
    """How it is trained."""
    split: DevSplit = DevSplit()
    """Which rows train. Rows of dev are not trained on; they are answered at every evaluation, without sampling."""
    watch: WatchSection = WatchSection()
    """When training warns of a reward that is earned without the work, and when it ends for it."""

    @model_validator(mode="after")
    def _parts_fit(self) -> RolloutSpec:
        rollouts = self.rollouts
        train = self.train
        if train.strategy == "fsdp" and rollouts.vllm is not None:
            raise ValueError("`train.strategy: fsdp` with `rollouts.vllm`, which takes whole weights. Take ddp")
        together = train.batch_size * train.accumulation
        if together % rollouts.group:
            raise ValueError(
                f"train.batch_size · train.accumulation is {together} rollouts a step of one process, which is no "
                f"multiple of rollouts.group ({rollouts.group})"
            )
        for key in ("save_every", "eval_every"):
            steps = getattr(train, key)
            if steps is not None and steps % rollouts.updates:
                raise ValueError(
                    f"train.{key} is {steps}, which is no multiple of rollouts.updates "
                    f"({rollouts.updates}): rollouts are not kept in checkpoints"
                )
        for key in ("early_stopping", "eval_every"):
            if getattr(train, key) is not None and self.split.dev == 0:
                raise ValueError(f"`train.{key}` needs the dev split, and `split.dev` is 0")
        return self

    @property
    def prompts_per_step(self) -> int:
        """Different prompts of one optimizer step, in one process."""
        return self.train.batch_size * self.train.accumulation // self.rollouts.group


class GrpoSpec(RolloutSpec):
    """One teacher, by GRPO on trusted grades."""

    method: Literal["grpo"] = "grpo"
    """How it is trained."""
    data: RewardData
    """What it learns from."""
    near: float = Field(0.0, ge=0.0, le=1.0)
    """λ: reward of a grade next to the trusted one. A wrong format is worth 0, the right grade 1."""


# ------------------------------------------------------------------------------
# The spec of `method: graph-grpo`: what GRPO's has, and how credit flows along the graph.


class GraphGold(GoldSource):
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


# ------------------------------------------------------------------------------
# The spec of `method: res-rag`: a chooser of evidence, rewarded by what a frozen generator answers from its choice.
#
# Source: RES-RAG (section 3.3 and table 4). What is marked as ours is not in the paper.


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
    """How it is trained."""
    watch: WatchSection = WatchSection(length=None)
    """When training warns of a reward that is earned without the work, and when it ends for it. Shorter answers are the
    aim here, so length is not watched; `no_evidence_rate` is the share of questions for which nothing was chosen.
    """

    @model_validator(mode="after")
    def _it_chooses_evidence(self) -> ResRagSpec:
        if self.labeler.name != EVIDENCE_SET:
            raise ValueError(f"labeler {self.labeler.name} chooses no chunks; want {EVIDENCE_SET}")
        if self.rollouts.vllm is not None:
            raise ValueError("rollouts.vllm writes no answers under a grammar yet; leave it out")
        return self


# ------------------------------------------------------------------------------
# Which ways of training a teacher there are. Adding one is one file with a `TeacherTrainer`, one with its spec, and
# one entry here.


@dataclass(frozen=True)
class TeacherMethod:
    """A way of training a teacher.

    Args:
        title: what its card calls it.
        spec: its spec.
        trainer: import path of its `TeacherTrainer` (`teaching.py`).
    """

    title: str
    spec: type[TeacherSpec]
    trainer: str


METHODS = {
    "sft": TeacherMethod(
        "supervised fine-tuning on answers",
        SftSpec,
        "relabel.distill.teachers.sft:SftTrainer",
    ),
    "grpo": TeacherMethod(
        "GRPO on trusted grades",
        GrpoSpec,
        "relabel.distill.teachers.grpo:GrpoTeacher",
    ),
    "graph-grpo": TeacherMethod(
        "GRPO with credit by node",
        GraphGrpoSpec,
        "relabel.distill.teachers.grpo:GrpoTeacher",
    ),
    "res-rag": TeacherMethod(
        "GRPO on a frozen generator's answers (RES-RAG)",
        ResRagSpec,
        "relabel.distill.teachers.res_rag:ResRagTeacher",
    ),
}


def method_of(name: object) -> TeacherMethod:
    """The method that a spec's `method` names.

    Raises:
        ConfigError: there is no such method; the message lists them, and the nearest.
    """
    if str(name) not in METHODS:
        raise ConfigError(unknown_name("method", str(name), list(METHODS)))
    return METHODS[str(name)]


# ------------------------------------------------------------------------------
# A teacher spec's plain values become its method's spec, with the labeler's own options in it; and the JSON Schema of
# all of them.


def teacher_keys() -> tuple[str, ...]:
    """The first keys of all methods' specs."""
    keys: dict[str, None] = {}
    for method in METHODS.values():
        keys |= dict.fromkeys(method.spec.model_fields)
    return tuple(keys)


def read_teacher_spec(values: Mapping[str, Any], *, where: str) -> TeacherSpec:
    """Check plain values.

    Args:
        where: what to call their source in an error.
    Raises:
        ConfigError: a key or value is off; one sentence a fault.
    """
    if "method" not in values:
        raise ConfigError(f"{where}: `method` is missing; want one of {', '.join(METHODS)}")
    sections: dict[str, object] = {}
    try:
        model = method_of(values["method"]).spec
        labeler: Any = values.get("labeler")
        match {"name": labeler} if isinstance(labeler, str) else labeler:
            case {"name": str(name)} as section:
                options = labeler_class(name).Options
                sections["labeler"] = validate_spec(options, section, where=f"{where}, labeler")
            case dict():
                raise ConfigError(f"`labeler.name` is missing; there are {', '.join(labeler_names())}")
        generator = values.get("generator")
        if isinstance(generator, dict):
            sections["generator"] = _with_engine_options(generator, where=f"{where}, generator")
    except ConfigError as exc:
        if str(exc).startswith(where):
            raise
        raise ConfigError(f"{where}: {exc}") from exc
    return validate_spec(model, {**values, **sections}, where=where)


def _with_engine_options(section: dict[str, Any], *, where: str) -> GeneratorSpec:
    """A section that names an engine, with the engine's own options in it."""
    name = section.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: `name` is missing; there are {', '.join(engine_names())}")
    args = section.get("args") or {}
    known = engine_class(name).Args
    if isinstance(args, dict):
        args = validate_spec(known, args, where=f"{where}.args")
    return validate_spec(GeneratorSpec, {**section, "args": args}, where=where)


def teacher_schema() -> Schema:
    """JSON Schema (draft 2020-12) that accepts the keys and short forms that `read_teacher_spec` accepts."""
    definitions: dict[str, Schema] = {}
    labelers = [{"enum": labeler_names()}, *referred(definitions, "labeler", labeler_schemas(definitions))]
    methods = []
    for name, method in METHODS.items():
        spec = ObjectSchema(method.spec, definitions)
        spec.offer("labeler", anyOf=[*labelers, {"type": "null"}])
        spec.fix("method", name)
        if "generator" in spec.keys:
            generators = engine_schemas(GeneratorSpec, definitions)
            spec.offer("generator", oneOf=referred(definitions, "generator", generators))
        spec.require("method")
        methods.append(spec.values)
    for unused in ("LabelerOptions", "GeneratorSpec", "EngineArgs"):
        definitions.pop(unused, None)
    return {"$schema": DRAFT, "title": "relabel teacher", "oneOf": methods, "$defs": definitions}


# ------------------------------------------------------------------------------
# A teacher's `manifest.json` as records.


TEACHER_MANIFEST_VERSION = 1


@dataclass(frozen=True)
class TeacherData:
    """What a teacher learned from.

    Args:
        rows: pairs that it learned from.
        dropped: rows left out, by reason.
        examples: prompts with an answer: a row of a labeler that asks twice has two, and rows of a query may share one.
        tokens, answer_tokens: of one pass over them; where answers are the model's own, all that it wrote in training.
        held_out: rows that it was evaluated on, where the method does so.
    """

    runs: list[LearnedLabels]
    gold: LearnedGold | None
    rows: int
    dropped: dict[str, int]
    examples: int
    tokens: int
    answer_tokens: int
    held_out: SplitSide | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class TeacherManifest(TrainedManifest):
    """The manifest of a teacher: how it was made.

    Args:
        labeler: its options, by name.
        templates: sha256 of its prompt templates, by file name.
    """

    kind: Literal["teacher"] = "teacher"
    method: str
    labeler: dict[str, Any]
    templates: dict[str, str]
    data: TeacherData


# ------------------------------------------------------------------------------
# What a training by reinforcement writes in addition to the model, as Parquet: names and columns, read without torch.


NODES = ("r", "s", "a", "q_s", "q_a", "p_s", "p_a")
"""Grade, subject score, attribute score, and the four texts: of query and product, on subject and attribute."""
ROLLOUTS_NAME = "rollouts.parquet"
EDGES_NAME = "edges.parquet"
ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("row_id", pa.int64()),
        ("sample", pa.int32()),
        ("texts", pa.list_(pa.string())),
        ("grade", pa.int8()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("format_ok", pa.bool_()),
        ("fault", pa.string()),
        ("detail", pa.string()),
        ("tokens", pa.int32()),
        ("node_rewards", pa.list_(pa.float64())),
        ("node_advantages", pa.list_(pa.float64())),
    ]
)
EDGE_SCHEMA = pa.schema(
    [("step", pa.int64()), ("edge", pa.string()), ("logit", pa.float64()), ("coefficient", pa.float64())]
)


PARTS = "rollouts"
"""Folder in that of the checkpoints, with all rollouts up to each of them."""
