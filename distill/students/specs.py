"""The student spec: what a user writes in `student.yaml`, checked key by key. Pure: no environment, no network, no
disk.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from relabel.distill.students.heads import NODE_HEADS
from relabel.distill.students.kinds import KINDS, takers
from relabel.distill.students.loss_section import LossSection
from relabel.distill.students.sources import GoldSource, LabelSource, PairsSource
from relabel.distill.students.student_section import StudentSection
from relabel.distill.training.sections import DevSplit, EarlyStop, TrainingSection
from relabel.manifests.errors import ConfigError
from relabel.manifests.json_schemas import DRAFT, ObjectSchema, Schema, of_model, one_or_many, path_or_each
from relabel.manifests.metrics.gates import Gate, parse_gates
from relabel.manifests.phi import PhiTable, check_phi
from relabel.manifests.specs import Columns, PathText, Spec


class EarlyStopping(EarlyStop):
    """Stop when the dev split gets no better, and keep the best step instead of the last."""

    metric: Literal["loss", "accuracy", "macro_f1", "kappa", "kappa_quadratic", "auc"] = "macro_f1"
    """Judged by gold where there is gold, else by the labels; `loss` is the training loss on dev."""


class TrainSection(TrainingSection):
    """How it is trained."""

    tokens_per_batch: int | None = Field(None, ge=1)
    """Instead of `batch_size`: as many rows of like length as fit into this many tokens, padding included; rows are
    then always grouped by length, over the whole epoch.
    """
    head_learning_rate: float | None = Field(None, gt=0.0)
    """Peak rate of an encoder's heads, which begin at nothing. Default: `learning_rate`."""
    class_balance: Literal["none", "weights", "sampler"] = "none"
    """Against rare grades: weigh rows by 1 / frequency of their grade, or sample them so, with replacement."""
    early_stopping: EarlyStopping | None = None
    """Default: train to the end and keep the last step. The best step's checkpoint is kept beside the others."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between looks at dev. Default: once an epoch."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the layers one by one; `auto` does so on a GPU."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What several processes share: `ddp` batches alone, `fsdp` weights, gradients and the
    optimizer's moments as well.
    """

    @model_validator(mode="after")
    def _options_agree(self) -> TrainSection:
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "`strategy: fsdp` with `precision: fp16`: a process sees overflow in its own shards alone. Take bf16"
            )
        if self.class_balance == "sampler" and self.tokens_per_batch:
            raise ValueError(
                "`class_balance: sampler` samples other rows every epoch and cannot go with a budget of tokens; "
                "use weights"
            )
        return self


class SplitSection(DevSplit):
    """Which rows train, choose and judge; all rows of one query fall on the same side."""

    dev: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of queries for early stopping and calibration."""
    test: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of queries for the figures that are reported."""

    @model_validator(mode="after")
    def _something_is_left(self) -> SplitSection:
        if self.dev + self.test >= 1.0:
            raise ValueError(f"dev {self.dev} and test {self.test} leave nothing to train on")
        return self


class DistillSpec(Spec):
    """One student."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the student: letters, digits, dot, dash and underscore."""
    labels: tuple[LabelSource, ...]
    """What to learn from: paths, or mappings with a path and a weight. May be empty if there is gold."""
    gold: GoldSource | None = None
    """Trusted grades."""
    student: StudentSection
    """The model."""
    loss: LossSection = LossSection()
    """What is minimised."""
    train: TrainSection = TrainSection()
    """How."""
    split: SplitSection = SplitSection()
    """On what."""
    phi: PhiTable | None = None
    """Rule map of the consistency loss. Default: the one of the label runs, else the built-in."""
    calibrate: bool = True
    """Fit one temperature a head on dev and store it with the student."""
    require: dict[str, str] = Field(default_factory=dict)
    """Gates on the test split, say {macro_f1: ">=0.9*teacher", kappa: ">=0.4"}. A student that fails one is kept; the
    command exits 5.
    """
    allow_over_limit: bool = False
    """Take label runs over their quarantine limit."""
    output: PathText = Field(min_length=1)
    """Folder that the student owns, or `s3://bucket/folder`, where it is copied once it is finished."""
    storage_options: dict[str, dict[str, Any]] = Field(default={}, exclude=True, repr=False)
    """For each URL scheme, options of its fsspec filesystem, for all paths of the spec. Secrets, as in a job: never
    written.
    """

    @field_validator("labels", mode="before")
    @classmethod
    def _paths_are_sources(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str | dict) else value
        return (
            [{"path": one} if isinstance(one, str) else one for one in value]
            if isinstance(value, list | tuple)
            else value
        )

    @field_validator("require")
    @classmethod
    def _gates_are_readable(cls, value: dict[str, str]) -> dict[str, str]:
        try:
            parse_gates(value)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc
        return value

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> DistillSpec:
        for key in KINDS[self.student.kind].refuses:
            section, _, name = key.partition(".")
            held = getattr(self, section)
            if getattr(held, name) != type(held).model_fields[name].get_default():
                others = " and ".join(f"{kind}s" for kind in takers(key))
                raise ValueError(f"keys like `{key}` are for {others}, and `student.kind` is {self.student.kind}")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> DistillSpec:
        if not self.labels and (self.gold is None or self.loss.gold_weight == 0):
            raise ValueError("nothing to learn from: name `labels`, or `gold` with `loss.gold_weight` above 0")
        if not self.labels and self.loss.gold_weight != 1.0:
            raise ValueError("without labels gold is all there is: set `loss.gold_weight` to 1.0")
        if self.loss.gold_weight and self.gold is None:
            raise ValueError("`loss.gold_weight` is set without `gold`")
        if any(gate.is_of_teacher for gate in self.gates) and (self.gold is None or not self.labels):
            raise ValueError("a gate against the teacher needs `labels` and `gold`: both are judged by trusted grades")
        if self.require and self.split.test == 0:
            raise ValueError("`require` is judged on the test split, and `split.test` is 0")
        if self.train.early_stopping is not None and self.split.dev == 0:
            raise ValueError("`train.early_stopping` looks at the dev split, and `split.dev` is 0")
        if self.student.heads != "auto":
            self._named_heads_are_trained(self.student.heads)
        return self

    def _named_heads_are_trained(self, heads: dict[str, int]) -> None:
        for name in NODE_HEADS:
            if name in heads and getattr(self.loss, name) == 0 and self.loss.consistency == 0:
                raise ValueError(
                    f"head {name} is named, and with `loss.{name}` and `loss.consistency` at 0 nothing trains it"
                )
            if name in heads and heads[name] != 5:
                raise ValueError(f"head {name} has five scores, 0 to 4, not {heads[name]}")
        if self.phi is not None:
            check_phi(self.phi, grades=heads["relevance"])

    @property
    def gates(self) -> list[Gate]:
        """`require`, parsed."""
        return parse_gates(self.require)


def student_schema() -> Schema:
    """JSON Schema (draft 2020-12) that accepts the keys and short forms that the spec accepts."""
    definitions: dict[str, Schema] = {}
    student = ObjectSchema(DistillSpec, definitions)
    path_or_each(student.keys["labels"])
    one_or_many(of_model(definitions, PairsSource, "path"))
    one_or_many(of_model(definitions, Columns, "document"))
    return {"$schema": DRAFT, "$defs": definitions, **student.values, "title": "relabel student"}
